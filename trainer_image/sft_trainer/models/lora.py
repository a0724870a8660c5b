"""LoRA: beside the frozen weight W of a linear layer, A and B are trained: y = W x + scaling * B A x.

As Hu et al. 2021 (arXiv 2106.09685) describe it, and peft computes it. A layer keeps the name of its weight, so the
base is read from hub files as without adapters; theirs are ``<layer>.lora_A.weight`` (rank, inputs) and
``<layer>.lora_B.weight`` (outputs, rank).

DoRA (Liu et al. 2024, arXiv 2402.09353) takes from W + scaling * B A the direction of each row alone, and has a number
for its magnitude: m / |W + scaling * B A|, by which y without the bias is multiplied for each output. The norm is taken
for a constant in the backward pass, as there. What is trained is by how much m is more than |W|: that is 0 at first,
so that a run begins with the model as it is to the last bit, in any precision.

Experts, whose weights are stacked in a tensor, have theirs stacked in ``<experts>.adapters.<tensor>``, one for each.
"""

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from sft_api.adapters import AdapterError, adapted, hint_on_experts, hint_on_peft, refused_by_peft
from sft_api.block_memory import ROW_MULTIPLE
from sft_api.v1alpha1.lora import LoraSpec
from sft_trainer.boxes import Box
from sft_trainer.errors import ConfigError
from sft_trainer.names.canonical import Names, Part

from . import grouped_experts
from .experts import has_experts, stacked_parameters
from .nf4 import linear, values_of
from .routers import within_routers
from .trained_rows import is_row

A, B = "lora_A.weight", "lora_B.weight"
"""How the names of their parameters end, behind that of the layer."""
MAGNITUDE = "lora_magnitude"
"""The same by DoRA: (outputs,), by how much the magnitude of each row is more than that of the frozen weight."""


def is_adapter(name: str) -> bool:
    """Whether the parameter ``name``, canonical or of a module, is that of an adapter, or of rows of single tokens."""
    return name.endswith((f".{A}", f".{B}", f".{MAGNITUDE}")) or is_row(name)


class LoraLinear(nn.Linear):
    """A linear layer with the weights of another, and an adapter beside them."""

    lora_magnitude: nn.Parameter | None

    def __init__(self, layer: nn.Linear, rank: int, scaling: float, dropout: float, *, dora: bool = False) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        device, dtype = layer.weight.device, torch.float32
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, device=device, dtype=dtype)
        self.scaling = scaling
        self.register_parameter(
            MAGNITUDE, nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if dora else None
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        result = linear(inputs, self.weight, self.bias if self.lora_magnitude is None else None)
        # Between A and B, where there are few numbers: behind B all outputs, and their gradients, were read once more.
        lower: torch.Tensor = self.lora_A(self.lora_dropout(inputs)) * self.scaling
        added: torch.Tensor = self.lora_B(lower)
        if self.lora_magnitude is None:
            return result + added
        whole = result + added
        # By how much it is more than 1: a number near 1 itself has few digits in bf16.
        scaled = torch.addcmul(whole, whole, self._more(self.lora_magnitude).to(whole.dtype))
        return scaled if self.bias is None else scaled + self.bias

    def _more(self, magnitude: torch.Tensor) -> torch.Tensor:
        """By how much more than by 1 each output is multiplied, by DoRA: (outputs,), fp32."""
        with torch.no_grad():
            a, b = self.lora_A.weight, self.lora_B.weight.float()
            weight = values_of(self.weight, self.in_features, a.dtype)
            frozen = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
            # The norms of the rows of a sum, without the sum, which is as large as the weight once more. Products in
            # batches, of one, are none of those that selective checkpointing keeps.
            across = torch.bmm(weight[None], a.mT[None])[0].float() * b
            within = torch.bmm(b[None], torch.bmm(a.float()[None], a.float().mT[None]))[0] * b
            squares = frozen.square() + (2 * self.scaling * across + self.scaling**2 * within).sum(1)
            norms = squares.clamp_min(0).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        more: torch.Tensor = (magnitude.float() + (frozen - norms)) / norms
        return more


class _Stacked(nn.Module):
    """As many matrices as there are experts, as one parameter ``weight``."""

    def __init__(self, experts: int, outputs: int, inputs: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, device=device, dtype=torch.float32))


class ExpertsAdapter(nn.Module):
    """What is added to the products of experts with their weights that are stacked in one tensor.

    Gate and up are one tensor, and so have one A, as they have for peft.
    """

    def __init__(self, stacked: torch.Tensor, rank: int, scaling: float, *, turned: bool) -> None:
        """``stacked`` is (experts, outputs, inputs), or ``turned`` (experts, inputs, outputs)."""
        super().__init__()
        experts, outputs, inputs = _sizes(stacked, turned=turned)
        self.lora_A = _Stacked(experts, rank, inputs, stacked.device)
        self.lora_B = _Stacked(experts, outputs, rank, stacked.device)
        self.scaling = scaling

    def forward(self, inputs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Of ``inputs`` (tokens, inputs), sorted by expert and ended by ``ends``, (tokens, outputs)."""
        a: torch.Tensor = self.lora_A.weight
        b: torch.Tensor = self.lora_B.weight
        # A product for all experts takes rows of whole 16 bytes only.
        if missing := -a.shape[1] % ROW_MULTIPLE:
            a, b = pad(a, (0, 0, 0, missing)), pad(b, (0, missing))
        lower = grouped_experts.grouped_linear(inputs, a, ends, turned=False) * self.scaling
        return grouped_experts.grouped_linear(lower, b, ends, turned=False)


def _sizes(weight: torch.Tensor, *, turned: bool) -> tuple[int, ...]:
    """(outputs, inputs), of experts (experts, outputs, inputs), of a ``weight`` that may be ``turned``."""
    return tuple((weight.mT if turned else weight).shape)


def stacked_weights(huggingface: Any) -> list[str]:
    """Names of the tensors in which a Hugging Face model has the weights of its experts, in order."""
    return [name for name, _ in stacked_parameters(huggingface) if not is_adapter(name)]


def linear_layers(huggingface: Any) -> tuple[list[str], str | None]:
    """Names of all linear layers of a Hugging Face model but those of routers, and those that peft has no adapters of,
    in order, and that of its head.

    Raises ``ConfigError`` where the layers of a kind have a forward pass of their own, beside which no adapter could be
    put in.
    """
    head = huggingface.get_output_embeddings()
    routers, kind = within_routers(huggingface), huggingface.config.model_type
    names, named_head = [], None
    for name, module in huggingface.named_modules():
        if not isinstance(module, nn.Linear) or module in routers or refused_by_peft(kind, name):
            continue
        if type(module).forward is not nn.Linear.forward:
            raise ConfigError(
                f"lora: {name} of a model of type {kind!r} is a {type(module).__name__}, "
                "which computes otherwise than a linear layer: no adapter fits it; train all weights, without lora"
            )
        names.append(name)
        if module is head:
            named_head = name
    return names, named_head


def adapted_layers(huggingface: Any, lora: LoraSpec, trained: Collection[str] = ()) -> list[str]:
    """Names of the layers of ``huggingface`` that get adapters, and of tensors of experts, where all of the modules
    ``trained`` is trained; ``ConfigError`` for names that it does not have."""
    names, head = linear_layers(huggingface)
    try:
        return adapted(names, head, lora.target_modules, lora.exclude_modules, trained, stacked_weights(huggingface))
    except AdapterError as error:
        told = hint_on_peft(error, huggingface.config.model_type)
        raise ConfigError(hint_on_experts(told) if has_experts(huggingface) else str(told)) from error


def add_adapters(huggingface: Any, lora: LoraSpec, trained: Collection[str] = ()) -> list[str]:
    """Put adapters into ``huggingface`` (on the meta device), but not into the modules ``trained``, all of which is
    trained; the names of the layers, and of tensors of experts, that got one, in order."""
    chosen, stacked = adapted_layers(huggingface, lora, trained), {*stacked_weights(huggingface)}
    for name in chosen:
        module, _, leaf = name.rpartition(".")
        parent = huggingface.get_submodule(module)
        if name in stacked:
            adapter = ExpertsAdapter(
                getattr(parent, leaf), lora.rank_of_experts, lora.scaling, turned=parent.is_transposed
            )
            if not hasattr(parent, grouped_experts.ADAPTERS):
                parent.add_module(grouped_experts.ADAPTERS, nn.ModuleDict())
            getattr(parent, grouped_experts.ADAPTERS)[leaf] = adapter
        else:
            layer = parent.get_submodule(leaf)
            dora = bool(lora.use_dora)
            setattr(parent, leaf, LoraLinear(layer, lora.rank, lora.scaling, lora.dropout, dora=dora))
    if not stacked.isdisjoint(chosen):
        grouped_experts.use(huggingface)
    return chosen


_TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_TYPES_TAKEN_FOR_EXPERTS = (
    "afmoe",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe_text",
    "hunyuan_v1_moe",
    "mellum",
    "qwen3_moe",
    "qwen3_next",
    "solar_open",
)
"""Types with layers beside experts that are called so, which peft takes for these: they were such modules once."""


def taken_for_experts(huggingface: Any) -> list[str]:
    """Names of those linear layers of ``huggingface`` with adapters that peft would load as adapters of its experts."""
    if huggingface.config.model_type not in _TYPES_TAKEN_FOR_EXPERTS:
        return []
    layers = [name for name, part in huggingface.named_modules() if isinstance(part, LoraLinear)]
    return [name for name in layers if name.rpartition(".")[2] in _TAKEN_FOR_EXPERTS]


@dataclass(frozen=True)
class StackedAdapter:
    """Where a parameter of the adapters of experts belongs."""

    module: str
    """Name of the module with the experts."""
    within: int
    """How many tensors with adapters the module has behind the one that these are beside."""
    factor: str
    """A or B."""
    swapped: bool = False
    """Whether for peft it is the other one, turned: it takes outputs of the weights for inputs."""


def stacked_adapter(huggingface: Any, parameter: str) -> StackedAdapter | None:
    """Where the ``parameter`` of ``huggingface`` belongs; None where it is none of an adapter of experts."""
    module, *names = parameter.rsplit(".", 4)
    if len(names) < 4 or names[0] != grouped_experts.ADAPTERS or not is_adapter(parameter):
        return None
    _, leaf, *factor = names
    experts = huggingface.get_submodule(module)
    adapted = [*getattr(experts, grouped_experts.ADAPTERS)]
    swapped = getattr(experts, grouped_experts.SWAPPED, False)
    return StackedAdapter(module, len(adapted) - 1 - adapted.index(leaf), ".".join(factor), swapped)


@dataclass(frozen=True)
class Beside:
    """The adapter of a canonical tensor: what is to be added to it is ``scaling`` times the product of B and A."""

    a: Part
    """(rank, inputs), of experts (experts, rank, inputs)."""
    b: Part
    """(outputs, rank), of experts (experts, outputs, rank)."""
    scaling: float
    first: int = 0
    """Which of its outputs is the first of the tensor: gate and up share an adapter."""
    turned: bool = False
    """Whether the tensor is (experts, inputs, outputs)."""
    magnitude: Part | None = None
    """(outputs,), by DoRA: by how much the norm of each row is to be more than that of the tensor as it is."""


def adapters_beside(huggingface: Any, names: Names, lora: LoraSpec, trained: Collection[str] = ()) -> dict[str, Beside]:
    """The adapters that ``add_adapters`` would put into ``huggingface``, by the canonical name of what they are beside.

    ``names`` are those of its architecture.
    """
    found, stacked = dict[str, Beside](), {*stacked_weights(huggingface)}
    for name in adapted_layers(huggingface, lora, trained):
        of_experts = name in stacked
        weight = name if of_experts else f"{name}.weight"
        module, _, leaf = name.rpartition(".")
        adapter = f"{module}.{grouped_experts.ADAPTERS}.{leaf}" if of_experts else name
        turned = of_experts and huggingface.get_submodule(module).is_transposed
        whole = huggingface.get_parameter(weight)
        *experts, outputs, inputs = _sizes(whole, turned=turned)
        rank = lora.rank_of_experts if of_experts else lora.rank
        (a,) = names.parts(f"{adapter}.{A}", (*experts, rank, inputs))
        (b,) = names.parts(f"{adapter}.{B}", (*experts, outputs, rank))
        magnitude = names.parts(f"{adapter}.{MAGNITUDE}", (outputs,))[0] if lora.use_dora else None
        for part in names.parts(weight, tuple(whole.shape)):
            first = 0 if turned else part.start[-2]
            found[part.name] = Beside(a, b, lora.scaling, first, turned, magnitude)
    return found


@torch.no_grad()
def initialize_adapters(boxes: Iterable[Box], lora: LoraSpec, seed: int) -> None:
    """Give those of ``boxes`` that are of adapters their first values: functions of ``seed`` and the name alone.

    So they are the same on any number of processes. A is drawn as ``lora.initMethod`` says, as peft does; B, and what
    DoRA adds to magnitudes, is 0.
    """
    for box in boxes:
        if box.name.endswith((f".{B}", f".{MAGNITUDE}")):
            box.local.detach().zero_()
        elif box.name.endswith(f".{A}"):
            *experts, rank, inputs = box.shape
            offsets, sizes = box.place.offsets, box.place.sizes
            part = tuple(slice(o, o + n) for o, n in zip(offsets[-2:], sizes[-2:], strict=True))
            # Of each expert by itself: a process draws those that it has.
            held = range(offsets[0], offsets[0] + sizes[0])
            names = [f"{box.name} {expert}" for expert in held] if experts else [box.name]
            values = [_first_values(name, rank, inputs, lora, seed)[part] for name in names]
            if values:
                box.write(torch.stack(values) if experts else values[0])


def _first_values(name: str, rank: int, inputs: int, lora: LoraSpec, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    whole = torch.empty(rank, inputs)
    if lora.init_method == "gaussian":
        return whole.normal_(std=1 / rank, generator=generator)
    # Kaiming's uniform distribution with a = sqrt(5), as torch fills a linear layer.
    bound = 1 / math.sqrt(inputs)
    return whole.uniform_(-bound, bound, generator=generator)
