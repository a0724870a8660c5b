"""The chunked loss against plain cross-entropy: value and gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sft_api.memory import logit_bytes
from sft_api.v1alpha1.workload import TrainingSpec
from sft_trainer import loss as loss_module
from sft_trainer.loss import CROSS_ENTROPY, PRODUCTS, Logits, Objective, evaluation_sums, linear_cross_entropy
from tests.live_bytes import LiveBytes

VOCABULARY, WIDTH = 97, 16


def inputs(dtype: torch.dtype = torch.float32, rows: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head, and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (rows,), generator=generator)


@pytest.mark.parametrize("elements", [8 * 50 * VOCABULARY, 7 * VOCABULARY, VOCABULARY])
@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_cross_entropy(monkeypatch: pytest.MonkeyPatch, elements: int, frozen_head: bool, biased: bool) -> None:
    # Given room for all logits, for seven rows, and for one row at a time
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements)
    hidden, weight, labels = inputs()
    weight.requires_grad_(not frozen_head)
    bias = torch.linspace(-2, 2, VOCABULARY, requires_grad=not frozen_head) if biased else None

    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    wanted = [hidden] if frozen_head else [hidden, weight, *([] if bias is None else [bias])]
    expected_gradients = torch.autograd.grad(expected / 7, wanted)
    scaled, total = linear_cross_entropy(hidden, weight, labels, 1 / 7, bias=bias)
    gradients = torch.autograd.grad(scaled, wanted)
    evaluated, right = evaluation_sums(hidden, weight, labels, bias=bias)

    assert evaluated == total
    assert right == (logits.argmax(-1) == labels).sum()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled, expected / 7, rtol=1e-6, atol=0)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("elements", [8 * 50 * VOCABULARY, 7 * VOCABULARY])
@pytest.mark.parametrize(("factor", "cap"), [(1 / 6, None), (1.0, 4.0), (0.7, 3.0)])
def test_logits_that_are_scaled_or_capped(
    monkeypatch: pytest.MonkeyPatch, elements: int, factor: float, cap: float | None
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements)
    hidden, weight, labels = inputs()
    logits = factor * (hidden @ weight.T)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    expected_gradients = torch.autograd.grad(expected / 7, [hidden, weight])

    scaled, total = linear_cross_entropy(hidden, weight, labels, 1 / 7, Logits(factor, cap))
    gradients = torch.autograd.grad(scaled, [hidden, weight])
    evaluated, right = evaluation_sums(hidden, weight, labels, Logits(factor, cap))

    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    assert evaluated == total
    assert right == (logits.argmax(-1) == labels).sum()
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


OBJECTIVES = [Objective(by_probability=True), Objective(smoothing=0.1)]


def in_plain_words(logits: torch.Tensor, labels: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Summed over positions, by torch's own functions."""
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=objective.smoothing)
    if objective.by_probability:
        each = each * logits.softmax(-1).gather(1, labels[:, None])[:, 0].detach()
    return each.sum()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("elements", [8 * 50 * VOCABULARY, 7 * VOCABULARY, VOCABULARY])
@pytest.mark.parametrize(("factor", "cap", "frozen_head"), [(1.0, None, False), (1 / 6, None, True), (0.7, 3.0, False)])
def test_what_else_is_trained_is_that_of_plain_words(
    monkeypatch: pytest.MonkeyPatch,
    objective: Objective,
    elements: int,
    factor: float,
    cap: float | None,
    frozen_head: bool,
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements)
    hidden, weight, labels = inputs()
    weight.requires_grad_(not frozen_head)
    # Given some labels that the model finds likely
    labels[::3] = (hidden @ weight.T).argmax(dim=-1)[::3]
    logits = factor * (hidden @ weight.T)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    wanted = [hidden] if frozen_head else [hidden, weight]
    expected = in_plain_words(logits, labels, objective)
    expected_gradients = torch.autograd.grad(expected / 7, wanted)

    scaled, total = linear_cross_entropy(hidden, weight, labels, 1 / 7, Logits(factor, cap), objective=objective)
    gradients = torch.autograd.grad(scaled, wanted)
    with torch.no_grad():
        without, _ = linear_cross_entropy(hidden, weight, labels, 1 / 7, Logits(factor, cap), objective=objective)

    torch.testing.assert_close(total, expected.detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(scaled, expected / 7, rtol=2e-6, atol=0)
    assert without == scaled
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_manifest_says_what_is_trained() -> None:
    assert Objective.of(TrainingSpec()) == Objective.of(TrainingSpec(loss="crossEntropy")) == CROSS_ENTROPY
    assert Objective.of(TrainingSpec(loss="dft")) == OBJECTIVES[0]
    assert Objective.of(TrainingSpec(label_smoothing=0.1)) == OBJECTIVES[1]


@pytest.mark.parametrize("elements", [50 * VOCABULARY, VOCABULARY])
def test_gradients_in_bf16_are_rounded_and_not_scaled_wrongly(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    # Given a denominator whose inverse bf16 holds wrong by 0.4%, all rows in one chunk and each in its own
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(loss_module, "_SLICE_ROWS", 10)
    hidden, weight, labels = inputs(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / 1020, exact)

    scaled, _ = linear_cross_entropy(hidden, weight, labels, 1 / 1020)
    gradients = torch.autograd.grad(scaled, [hidden, weight])

    # Then they are off by what rounding does, in either direction: their length is right
    for one, other in zip(gradients, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() <= 6e-3 * other.norm()
        assert one.double().norm().item() == pytest.approx(other.norm().item(), rel=1e-3)


@pytest.fixture
def products_in_fp32(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels of a GPU that give fp32 for bf16, on the CPU as well; and which of them were called."""
    called: list[str] = []

    def product(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        called.append("mm")
        return one.to(dtype) @ other.to(dtype)

    def added(
        total: torch.Tensor, one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor
    ) -> torch.Tensor:
        assert total is out
        called.append("addmm")
        return out.add_(one.to(dtype) @ other.to(dtype))

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", product, "CPU")
    library.impl("addmm.dtype_out", added, "CPU")
    monkeypatch.setattr(loss_module, "_gives_fp32", lambda _: True)
    yield called
    library._destroy()


def test_a_gpu_adds_the_products_of_chunks_up_without_rounding_them(
    monkeypatch: pytest.MonkeyPatch, products_in_fp32: list[str]
) -> None:
    # Given a chunk for each row, in bf16, and what its products add up to
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", VOCABULARY)
    hidden, weight, labels = inputs(torch.bfloat16)
    logits = (hidden @ weight.T).detach().requires_grad_()
    torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum").div(1020).backward()
    assert logits.grad is not None
    expected = logits.grad.double().T @ hidden.detach().double()

    scaled, _ = linear_cross_entropy(hidden, weight, labels, 1 / 1020)
    (gradient,) = torch.autograd.grad(scaled, [weight])

    # Then it is that, rounded once: nowhere off by more than half of what numbers of bf16 are apart
    assert products_in_fp32 == ["mm", *["addmm"] * 49]
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), expected, rtol=1.01 * 2**-8, atol=1e-7)


@pytest.mark.parametrize(("dtype", "elements"), [(torch.bfloat16, 50), (torch.float32, 7)])
def test_it_does_so_only_where_there_is_something_to_round(
    monkeypatch: pytest.MonkeyPatch, products_in_fp32: list[str], dtype: torch.dtype, elements: int
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements * VOCABULARY)
    linear_cross_entropy(*inputs(dtype), 1.0)
    assert products_in_fp32 == []


def test_without_positions_there_is_nothing_to_learn() -> None:
    hidden, weight, labels = inputs(rows=0)
    scaled, total = linear_cross_entropy(hidden, weight, labels, 0.5)
    scaled.backward()
    assert total == scaled == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_loss_that_is_scaled_again_is_refused() -> None:
    scaled, _ = linear_cross_entropy(*inputs(), 0.5)
    with pytest.raises(ValueError, match=r"scaled already.*not by 2\.0"):
        (scaled * 2).backward()


@pytest.mark.parametrize(
    ("dtype", "elements", "copies"),
    [
        (torch.float32, 50 * VOCABULARY, 1),
        (torch.float32, 7 * VOCABULARY, 1),
        (torch.bfloat16, 50 * VOCABULARY, 1),
        # Sums of products are fp32, the size of two, until the last one is there.
        (torch.bfloat16, 7 * VOCABULARY, 3),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_the_head_exists_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, elements: int, copies: int, tied: bool
) -> None:
    # Given a head, perhaps the embedding at the same time, and products that are made in slices
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(loss_module, "_SLICE_ROWS", 10)
    hidden, weight, labels = inputs(dtype)
    size = weight.nbytes
    if tied:
        hidden = torch.nn.functional.embedding(labels, weight)

    # When forward and backward pass are made, and tensors as large as the head are counted
    with LiveBytes(lambda nbytes: nbytes in (size, 2 * size)) as forward:
        scaled, _ = linear_cross_entropy(hidden, weight, labels, 1 / 1027)
    held = forward.now
    with LiveBytes(lambda nbytes: nbytes in (size, 2 * size)) as backward:
        scaled.backward()

    # Then one is made, kept, and handed over: what is made anew is the embedding's own, and, while it is counted, their
    # sum, which is otherwise made in place
    assert forward.most == copies * size
    assert held == size
    assert backward.most == (2 * size if tied else 0)
    assert forward.now + backward.now == size
    assert weight.grad is not None
    assert weight.grad.dtype == dtype


@pytest.mark.parametrize(
    ("logits", "dtype"),
    [
        # In bf16 a CPU makes a copy in fp32 of them, which a GPU does not.
        (PRODUCTS, torch.float32),
        *((logits, dtype) for logits in (Logits(0.5), Logits(cap=30.0)) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("objective", [CROSS_ENTROPY, *OBJECTIVES])
def test_a_chunk_takes_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, logits: Logits, dtype: torch.dtype, objective: Objective
) -> None:
    # Given several chunks, beside which nothing else is large
    vocabulary, rows = 3000, 8
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", vocabulary * rows * (3 if logits.transformed else 1))
    weight = torch.randn(vocabulary, 2).to(dtype)
    hidden = torch.randn(3 * rows, 2).to(dtype).requires_grad_()

    with LiveBytes() as live:
        linear_cross_entropy(hidden, weight, torch.arange(3 * rows), 1.0, logits, objective=objective)

    assert logits.rows(vocabulary) == rows
    assert live.most == pytest.approx(rows * vocabulary * logit_bytes(logits.transformed, dtype.itemsize), rel=0.02)


class _Products(TorchDispatchMode):
    """Counts products of matrices, and remembers the largest tensors that are made besides."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        self.products += func in (aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm_.default)
        if isinstance(result, torch.Tensor) and func not in (torch.ops.aten.t.default, torch.ops.aten.detach.default):
            self.shapes.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_evaluation_does_no_work_for_gradients(monkeypatch: pytest.MonkeyPatch, evaluates: bool) -> None:
    # Given a head that is trained, and two chunks
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 2 * 5)
    weight = torch.ones(5, 4, requires_grad=True)
    hidden = torch.ones(4, 4, requires_grad=not evaluates)

    # When its loss is computed
    with _Products() as work, torch.set_grad_enabled(not evaluates):
        scaled, value = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 3]), 1.0)

    # Then without gradients it takes one product a chunk, not three, and no room for a gradient of the head
    assert value.item() == pytest.approx(4 * torch.log(torch.tensor(5.0)).item())
    assert work.products == (2 if evaluates else 6)
    assert ((5, 4) in work.shapes) == (not evaluates)
    assert scaled.requires_grad == (not evaluates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [50 * VOCABULARY, 7 * VOCABULARY])
def test_an_evaluation_counts_what_the_model_finds_most_likely_and_its_loss_is_that_of_training(
    monkeypatch: pytest.MonkeyPatch, elements: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements)
    hidden, weight, labels = inputs(dtype)
    # Given labels of which a third is what the model would say
    said = (hidden @ weight.T).argmax(dim=-1)
    labels[::3] = said[::3]

    total, right = evaluation_sums(hidden, weight, labels)

    assert torch.equal(total, linear_cross_entropy(hidden, weight, labels, 1.0)[1])
    assert (total.dtype, right.item()) == (torch.float32, (said == labels).sum().item())
    assert 17 <= right.item() < 50
    assert not total.requires_grad
