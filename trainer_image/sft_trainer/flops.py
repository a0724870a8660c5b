"""Model FLOPs of a step and the peak of the device, for the model-FLOPs utilisation."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .models.causal_lm import CausalLM
from .models.experts import chosen_experts
from .models.in_order import state_flops
from .models.layer_configs import config_of_window, head_size
from .models.windows import Chunks, windows

# Dense bf16 peak without sparsity, from the vendors' data sheets, by whole words of the device's name. The first that
# fits counts: boards of one name with less power stand before the others.
_PEAK_BF16_FLOPS = {
    "H200 NVL": 835e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}


def is_slice(name: str) -> bool:
    """Whether the GPU of that ``name`` is a slice of a board, whose name then goes on behind that of the board (NVIDIA
    H100 80GB HBM3 MIG 3g.40gb): it has a part of its multiprocessors."""
    return "MIG" in _words(name)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[A-Za-z0-9]+", name))


def peak_flops(device: torch.device) -> float | None:
    """Peak dense bf16 FLOP/s of ``device``; None when it is not known (and on the CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if is_slice(name):
        return None
    words = _words(name)
    return next((flops for board, flops in _PEAK_BF16_FLOPS.items() if words.issuperset(board.split())), None)


_ATTENDS_TWICE = ("diffllama",)
"""Types whose layers compute attention of all their queries with one half of the values, and with the other."""


def active_parameters(model: nn.Module, config: Any, counts: Callable[[str], bool] = lambda name: True) -> int:
    """Parameters that take part in the computation of one token: of the routed experts only those that it is sent to.

    Routed experts are one tensor of shape (experts, ...) below a module named ``experts``; all are counted where the
    config does not say how many a token is sent to. ``counts`` says by their names which parameters are looked at.
    """
    _, given = chosen_experts(config) or ("", None)
    # Where each layer has its number, all of them are of one size.
    chosen = sum(given) / len(given) if isinstance(given, list) else given
    return sum(
        int(parameter.numel() // parameter.shape[0] * min(chosen, parameter.shape[0]))
        if chosen is not None and ".experts." in name
        else parameter.numel()
        for name, parameter in model.named_parameters()
        if counts(name)
    )


def training_flops(
    config: Any,
    layers: Mapping[int | Chunks | None, int],
    parameters: int,
    embedding_parameters: int,
    document_lengths: Iterable[int],
    frozen: int = 0,
    states: int = 0,
) -> float:
    """FLOPs of forward and backward over documents of the given lengths; ``parameters`` are the active ones.

    6 per parameter and token (the input embedding is a look-up and does not count, a head that is tied to it does),
    but 4 for those of them that are ``frozen`` (of those that count), which have no gradient of their own,
    plus causal attention: 6 * layers * heads * head size * length^2 (half of the full 12), as in the PaLM paper,
    appendix B; where queries and values are not of one size, by the mean of the two. ``layers`` says how many have
    which sliding window (None: none): there the pairs of tokens farther apart are left out, (length - window)^2 of
    length^2; or in which chunks they look at a document. A layer without attention has the window 0. ``states`` are the
    FLOPs of a token in the states of all layers that have some, forwards (``state_flops``).
    """
    lengths = list(document_lengths)
    matrices = parameters if config.tie_word_embeddings else parameters - embedding_parameters
    # A whole number until the end: documents that a window holds cost what they cost without one, to the last bit.
    attention: float = 3 * _attended(config, layers, lengths)
    return (6.0 * matrices - 2.0 * frozen + 3.0 * states) * sum(lengths) + attention


def _attended(config: Any, layers: Mapping[int | Chunks | None, int], lengths: Sequence[int]) -> int:
    """Of all ``layers``, the pairs of tokens of ``_pairs`` times the numbers that each is computed by."""
    return sum(
        count * _queries_and_values(config_of_window(config, window)) * _pairs(lengths, window)
        for window, count in layers.items()
    )


def _queries_and_values(config: Any) -> int:
    """Numbers of all heads that a token has in the attention of a layer: those of its queries and of their values."""
    heads = config.num_attention_heads
    if (value_size := getattr(config, "v_head_dim", None)) is not None:
        return int(heads * (config.qk_head_dim + value_size))
    return int(2 * heads * head_size(config) * (2 if config.model_type in _ATTENDS_TWICE else 1))


def _pairs(lengths: Sequence[int], window: int | Chunks | None) -> int:
    """Twice the pairs of tokens of a document of which one sees the other, of all documents."""
    if isinstance(window, Chunks):
        return sum(length // window.tokens * window.tokens**2 + (length % window.tokens) ** 2 for length in lengths)
    if window is None:
        return sum(length * length for length in lengths)
    return sum(length * length - max(0, length - window) ** 2 for length in lengths)


class ModelFlops:
    """FLOPs of training one model, and the share that they are of what a device can do."""

    def __init__(self, blueprint: CausalLM, trains: Callable[[str], bool], device: torch.device) -> None:
        """``blueprint`` is only looked at, and may be on the meta device; ``trains`` names what of it is trained."""
        huggingface: Any = blueprint.huggingface
        self._config = huggingface.config
        embeddings = huggingface.get_input_embeddings().weight
        # Those of positions, or of each block: whatever the head is, they are looked up.
        others = {each.weight for each in huggingface.modules() if isinstance(each, nn.Embedding)} - {embeddings}
        beside = {name for name, parameter in huggingface.named_parameters() if parameter in others}
        self._parameters = active_parameters(huggingface, self._config, lambda name: name not in beside)
        looked_up = others if self._config.tie_word_embeddings else {embeddings, *others}
        multiplied = {name for name, parameter in huggingface.named_parameters() if parameter not in looked_up}
        self._frozen = active_parameters(
            huggingface, self._config, lambda name: name in multiplied and not trains(name)
        )
        layers = windows(huggingface)
        self._layers = Counter(layers)
        states = state_flops(huggingface)
        self._states = sum(states)
        self._embedding_parameters = embeddings.numel()
        first = blueprint.first_trained(trains)
        # Weights whose input needs no gradient, as nothing trained comes before them: those up to the first that is
        # trained, in the order in which the model computes. Within a layer that order is another: in the first with
        # trained weights all are counted with it, at most 2 too much for each weight of one layer. Embeddings are
        # multiplied with as the head only, behind all.
        behind = {embeddings, *others, *blueprint.blocks[first:].parameters()}
        named = blueprint.in_order()
        until = next((number for number, (name, _) in enumerate(named, 1) if trains(name)), 0)
        before_all = {name for name, parameter in named[:until] if parameter not in behind}
        self._without_input_gradient = active_parameters(huggingface, self._config, before_all.__contains__)
        self._forward_layers = Counter(layers[:first])
        self._forward_states = sum(states[:first])
        self._peak = peak_flops(device)

    def training(self, bins: Iterable[Sequence[int]]) -> float:
        """Of forward and backward over the documents of all ``bins``, given by their lengths."""
        return sum(
            training_flops(
                self._config,
                self._layers,
                self._parameters,
                self._embedding_parameters,
                lengths,
                self._frozen,
                self._states,
            )
            - self._left_out(lengths)
            for lengths in bins
        )

    def _left_out(self, lengths: Sequence[int]) -> float:
        """Of these FLOPs those that no backward pass has: 2 of each weight whose input needs no gradient, and two
        thirds of the attention, and of what is done with states, of layers that no gradient comes to."""
        states = 2.0 * self._forward_states
        weights = 2.0 * self._without_input_gradient
        return (weights + states) * sum(lengths) + 2.0 * _attended(self._config, self._forward_layers, lengths)

    def share_of_peak(self, flops: float, device_seconds: float) -> float | None:
        """Of what devices could compute in ``device_seconds`` of them all; None where that is not known."""
        return flops / (device_seconds * self._peak) if self._peak else None
