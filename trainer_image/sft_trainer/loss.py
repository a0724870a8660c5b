"""Cross-entropy of a linear head on trained positions, in chunks, without keeping the logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import log_softmax

from sft_api.model_shape import Transformed
from sft_api.v1alpha1.workload import TrainingSpec

CHUNK_ELEMENTS = 2**27
"""Logits held at a time (512 MiB in fp32), so memory does not grow with vocabulary or length."""
_SLICE_ROWS = 2**14
"""Of a gradient of the head whose product is made apart from the sum that it goes into."""

Slopes = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""What ``slopes`` is, for two rows or more."""


class Rows(Protocol):
    """Which rows of the head this process has: consecutive ones, the others some other processes have.

    What its methods do is collective: all of these processes call them alike.
    """

    @property
    def first(self) -> int:
        """Token of the first of them."""
        ...

    @property
    def most(self) -> int:
        """Rows that any process has: by it all cut positions into chunks alike."""
        ...

    @property
    def vocabulary(self) -> int:
        """Rows of all of them."""
        ...

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` (positions, rows) in fp32 of the tokens of this process, over those of all; changes them."""
        ...

    def most_likely(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        """Of each position the token that has the most among all processes, the first of equals: (positions,)."""
        ...

    def add_up(self, total: torch.Tensor) -> None:
        """Make ``total`` the sum of those of all processes."""
        ...


@dataclass(frozen=True)
class Logits:
    """What a model makes of the products of hidden states and head: ``cap * tanh(factor * product / cap)``."""

    factor: float = 1.0
    cap: float | None = None
    """None where it only multiplies."""

    @property
    def transformed(self) -> Transformed:
        """In the words of the memory plan, which knows what a chunk of them takes."""
        if self.cap is not None:
            return "capped"
        return "" if self.factor == 1 else "scaled"

    def rows(self, vocabulary: int) -> int:
        """Of a chunk, so that it takes no more memory than one whose logits are the products."""
        return max(1, CHUNK_ELEMENTS // vocabulary // (3 if self.transformed else 1))

    def log_probabilities(
        self, products: torch.Tensor, held: Rows | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows, vocabulary) in fp32, and the tanh of above where there is a cap; ``products`` may be changed.

        With ``held`` they are those of a part of the vocabulary, and so is what is returned: a collective call.
        """
        if self == PRODUCTS:
            if held is not None:
                return held.log_softmax(products.float()), None
            return log_softmax(products, dim=-1, dtype=torch.float32), None
        logits, bent = products.float().mul_(self.factor), None
        if self.cap is not None:
            bent = logits.div_(self.cap).tanh_()
            logits = bent * self.cap
        return log_softmax(logits, dim=-1) if held is None else held.log_softmax(logits), bent


PRODUCTS = Logits()
"""The products are the logits."""


@dataclass(frozen=True)
class Objective:
    """What is made of a position's log probabilities to be trained: cross-entropy, or with one of these."""

    smoothing: float = 0.0
    """Of what is to be predicted the share that all tokens of the vocabulary have alike, that of the label too."""
    by_probability: bool = False
    """Whether each cross-entropy is times the label's own probability, taken for a constant (arXiv 2508.05629)."""

    @classmethod
    def of(cls, training: TrainingSpec) -> "Objective":
        """The one that ``training`` asks for."""
        return cls(training.label_smoothing or 0.0, training.loss == "dft")


CROSS_ENTROPY = Objective()
"""As evaluations have it, whatever is trained."""


@dataclass(frozen=True)
class OtherRows:
    """Rows that a head has in place of its own."""

    numbers: torch.Tensor
    """Which of its rows: (rows,), each once."""
    weight: torch.Tensor
    """(rows, width)."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass: every chunk's logits exist once, and are never recomputed.

    They are scaled there as well, so that the backward pass hands over what there is: scaled there, a gradient of the
    head, vocabulary x width, would exist twice while the activations of all layers are held.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        scale: float,
        logits: Logits,
        held: Rows | None,
        fused: Slopes | None,
        objective: Objective,
        numbers: torch.Tensor | None,
        rows_weight: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_hidden, needs_weight, needs_bias, *_, needs_rows = ctx.needs_input_grad
        others = None if numbers is None or rows_weight is None else OtherRows(numbers, rows_weight)
        rows = logits.rows(weight.shape[0] if held is None else held.most)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: torch.Tensor | None = None
        grad_rows: torch.Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        wanted = needs_hidden or needs_weight or needs_bias or needs_rows
        # A tensor: for a number there would be code of its own.
        factor = torch.full_like(total, scale)
        for start in range(0, hidden.shape[0], rows):
            piece, target = hidden[start : start + rows], labels[start : start + rows, None]
            if fused is None or not wanted or piece.shape[0] == 1:
                one, grad_logits = _slopes(
                    piece, weight, target, scale if wanted else None, logits, held, objective, bias, others
                )
            else:
                one, grad_logits = _fused_slopes(piece, weight, target, factor, fused, bias, others)
            total -= one
            if grad_logits is None:
                continue
            of_others = None if others is None else grad_logits.index_select(1, others.numbers)
            if others is not None:
                # Of these products the head's own rows have no part.
                grad_logits.index_fill_(1, others.numbers, 0)
            if grad_hidden is not None:
                grad_piece = torch.mm(grad_logits, weight, out=grad_hidden[start : start + rows])
                if others is not None and of_others is not None:
                    grad_piece.addmm_(of_others, others.weight)
            if needs_rows and of_others is not None:
                grad_rows = _with_product(grad_rows, of_others.T, piece, alone=hidden.shape[0] <= rows)
            if needs_weight:
                grad_weight = _with_product(grad_weight, grad_logits.T, piece, alone=hidden.shape[0] <= rows)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            # Else it is there still while the next chunk's is made.
            del grad_logits, of_others
        if held is not None:
            held.add_up(total)
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        if needs_rows and rows_weight is not None:
            grad_rows = torch.zeros_like(rows_weight) if grad_rows is None else grad_rows.to(rows_weight.dtype)
        of_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        ctx.gradients = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), of_bias, grad_rows
        ctx.mark_non_differentiable(total)
        return total * scale, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        upstream, _ = gradients
        if upstream.device.type == "cpu" and upstream != 1:  # a GPU's the host would wait for
            raise ValueError(f"the loss is scaled already: scale it by another number, not by {float(upstream)} more")
        # Nothing here may keep them: autograd takes over a gradient that nobody else holds, and copies every other.
        (grad_hidden, grad_weight, grad_bias, grad_rows), ctx.gradients = ctx.gradients, None
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None, None, grad_rows


def _found(labels: torch.Tensor, weight: torch.Tensor, held: Rows | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ``weight`` of ``labels``, and 1 for each; 0, and any row, where another process has that of a label."""
    if held is None:
        return labels, torch.ones_like(labels, dtype=torch.float32)
    rows = labels - held.first
    here = (rows >= 0) & (rows < weight.shape[0])
    return rows.clamp(0, weight.shape[0] - 1), here.float()


def _products(
    piece: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, others: OtherRows | None
) -> torch.Tensor:
    products = piece @ weight.T if bias is None else torch.addmm(bias, piece, weight.T)
    return products if others is None else products.index_copy_(1, others.numbers, piece @ others.weight.T)


def _slopes(
    piece: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    scale: float | None,
    logits: Logits,
    held: Rows | None,
    objective: Objective,
    bias: torch.Tensor | None,
    others: OtherRows | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ``objective`` makes of the log probabilities of ``labels`` (positions, 1), added up, and of the loss times
    ``scale`` the gradient of the products of ``piece`` and ``weight``; None where there is no scale."""
    target, one = _found(labels, weight, held)
    log_probabilities, bent = logits.log_probabilities(_products(piece, weight, bias, others), held)
    of_labels = log_probabilities.gather(1, target).mul_(one)
    probabilities: torch.Tensor | None = None
    if objective.by_probability:
        probabilities = of_labels.clone()
        if held is not None:
            held.add_up(probabilities)
        of_labels.mul_(probabilities.exp_())
    total = of_labels.sum()
    smoothed = objective.smoothing / (weight.shape[0] if held is None else held.vocabulary)
    if smoothed:
        total = (1 - objective.smoothing) * total + smoothed * log_probabilities.sum()
    if scale is None:
        return total, None
    # d loss / d logits = softmax(logits) - one_hot(labels), or what is to be predicted in its place
    slope = log_probabilities.exp_().scatter_add_(1, target, one.mul_(objective.smoothing - 1))
    if smoothed:
        slope.sub_(smoothed)
    if probabilities is not None:
        slope.mul_(probabilities)
    if bent is not None:
        slope.mul_(bent.square_().neg_().add_(1))  # the derivative of tanh
    # The scale stays in fp32: in bf16 it would be wrong by up to 0.4%, the same for every gradient.
    room = slope if slope.dtype == piece.dtype else torch.empty_like(slope, dtype=piece.dtype)
    return total, torch.mul(slope, scale * logits.factor, out=room)


def slopes(
    products: torch.Tensor,
    of_labels: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor,
    objective: Objective = CROSS_ENTROPY,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``_slopes`` makes of ``products`` that are the logits, for a compiler to make one pass or two of: what
    ``objective`` makes of the log probabilities of ``labels`` (rows, 1), and the gradient. ``of_labels`` are the
    products of these."""
    logits = products.float()
    highest = logits.amax(dim=-1, keepdim=True)
    logits = logits - highest
    logarithms = logits.exp().sum(dim=-1, keepdim=True).log()
    is_label = labels == torch.arange(products.shape[1], device=products.device)
    slope = (logits - logarithms).exp() - is_label.float()
    found = of_labels.float() - highest - logarithms
    if objective.by_probability:
        probabilities = found.exp()
        found, slope = found * probabilities, slope * probabilities
    if objective.smoothing:
        share = objective.smoothing
        # That of all tokens alike is the mean of their log probabilities.
        found = (1 - share) * found + share * (logits.mean(dim=-1, keepdim=True) - logarithms)
        slope = slope + share * (is_label.float() - 1 / products.shape[1])
    return found, (slope * scale).to(products.dtype)


def _fused_slopes(
    piece: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor,
    fused: Slopes,
    bias: torch.Tensor | None,
    others: OtherRows | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as ``_slopes`` by ``fused``: the products and their gradient are all that is held."""
    products = _products(piece, weight, bias, others)
    # Here a label that the head has no row of is an error, as it is there.
    log_probabilities, gradient = fused(products, products.gather(1, labels), labels, scale)
    return log_probabilities.sum(), gradient


def _with_product(total: torch.Tensor | None, one: torch.Tensor, other: torch.Tensor, *, alone: bool) -> torch.Tensor:
    """``one @ other`` added to ``total`` in place, which is fp32 unless the product is ``alone``, or yet the first.

    A GPU adds up in fp32 whatever it multiplies, and gives that away: one pass, and nothing is rounded on the way.
    """
    if one.dtype != torch.float32 and not alone and _gives_fp32(one):
        if total is None:
            return torch.mm(one, other, out_dtype=torch.float32)
        return torch.addmm(total, one, other, out_dtype=torch.float32, out=total)
    if total is None:
        return one @ other
    if total.dtype == one.dtype == torch.float32:
        return total.addmm_(one, other)
    total = total.float()
    for rows in range(0, total.shape[0], _SLICE_ROWS):
        total[rows : rows + _SLICE_ROWS] += one[rows : rows + _SLICE_ROWS] @ other
    return total


def _gives_fp32(factor: torch.Tensor) -> bool:
    """Whether products of ``factor``, in bf16, can be had in fp32: on no CPU, nor where torch tries many kernels."""
    return factor.is_cuda and not torch.cuda.tunable.is_enabled()


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    scale: float,
    logits: Logits = PRODUCTS,
    held: Rows | None = None,
    fused: Slopes | None = None,
    objective: Objective = CROSS_ENTROPY,
    bias: torch.Tensor | None = None,
    others: OtherRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of ``logits`` of ``hidden @ weight.T`` against ``labels``, summed over positions; float32 scalars;
    what ``objective`` makes of it, where that is another.

    The first is the sum times ``scale``, and the one to call ``backward`` of, as it is: its gradients are made here,
    scaled. The second is the sum itself, without a gradient. ``hidden`` is (positions, width), ``weight``
    (vocabulary, width), ``labels`` (positions,) token ids.

    With ``held`` ``weight`` is a part of the rows, and the call a collective one of those who have the others, all with
    the same ``hidden`` and ``labels``. The loss is that over all rows; the gradient of ``hidden`` is what these
    rows give to it, to be added up by the caller.

    ``bias`` (vocabulary,) is added to the products, where the head has one. Where it has ``others`` in place of some of
    its rows, which needs all rows here and no bias, the gradient of these is in place of that of its own.

    ``fused``, ``slopes`` of the same ``objective`` compiled, is used where the products are the logits and all rows
    are here.
    """
    if logits != PRODUCTS or held is not None:
        fused = None
    if not torch.is_grad_enabled():
        # Inside the function needs_input_grad is true of every parameter, wanted or not.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        others = None if others is None else OtherRows(others.numbers, others.weight.detach())
    numbers, rows = (None, None) if others is None else (others.numbers, others.weight)
    scaled, total = _LinearCrossEntropy.apply(
        hidden, weight, bias, labels, scale, logits, held, fused, objective, numbers, rows
    )
    return scaled, total


@torch.no_grad()
def evaluation_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    logits: Logits = PRODUCTS,
    held: Rows | None = None,
    bias: torch.Tensor | None = None,
    others: OtherRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy summed over positions, and at how many of them the label has the highest logit; float32 scalars.

    Arguments as of ``linear_cross_entropy``, whose sum the first one is, of no other objective: without ``fused`` to
    the last bit.
    """
    rows = logits.rows(weight.shape[0] if held is None else held.most)
    total, right = torch.zeros((2,), dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], rows):
        piece, target = hidden[start : start + rows], labels[start : start + rows]
        log_probabilities, _ = logits.log_probabilities(_products(piece, weight, bias, others), held)
        row, one = _found(target[:, None], weight, held)
        total -= log_probabilities.gather(1, row).mul_(one).sum()
        likely = log_probabilities.argmax(dim=-1) if held is None else held.most_likely(log_probabilities)
        right += (likely == target).sum()
    if held is not None:
        held.add_up(total)
    return total, right
