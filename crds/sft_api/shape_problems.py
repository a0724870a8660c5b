"""What a model of a known shape cannot have, however much memory there is. Pure."""

import re

from .adapters import AdapterError, adapted, hint_on_experts, hint_on_peft, no_such_module, within
from .layers import HEAD, all_linear, embeddings_of, names_of_modules, packed_of, some_parameters
from .megatron import model_problem
from .memory import NF4_BLOCK
from .model_shape import ModelShape
from .sequence_parallel import heads_problem, layers_problem
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import megatron_of
from .v1alpha1.status import PlanStatus

_OF_A_LAYER = re.compile(r"(.*\.)?layers\.(?P<number>\d+)(\..*)?")


def shape_problem(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape) -> str:
    """Why a model of ``shape`` cannot have what ``spec`` asks for, and what to change; else empty."""
    degree, megatron = spec.sequence_parallel, megatron_of(spec)
    return (
        layers_problem(shape.kind, degree)
        or heads_problem(shape.heads, {kind.kv_heads for kind in shape.distinct}, degree, plan.shard_degree)
        or _experts_problem(spec, shape)
        or _adapters_problem(spec, shape)
        or packing_problem(spec, shape)
        or _modules_problem(spec, shape)
        or (model_problem(megatron, shape, plan.processes) if megatron else "")
    )


def _experts_problem(spec: SFTJobSpec, shape: ModelShape) -> str:
    """Why a model of ``shape`` cannot have what ``spec`` asks for and its experts, or their lack, do not know."""
    if spec.training.router_aux_loss_coefficient and not (shape.experts and shape.family.balanced):
        why = "was not trained with a load-balancing loss: transformers knows none for its type"
        return (
            f"training.routerAuxLossCoefficient is {spec.training.router_aux_loss_coefficient:g}, but "
            f"{spec.model.uri} {why if shape.experts else 'sends no tokens to experts'}: leave the field out"
        )
    if spec.training.compile and shape.family.uncompiled:
        return f"training.compile is true, but {spec.model.uri} {shape.family.uncompiled}: leave the field out"
    return ""


def _adapters_problem(spec: SFTJobSpec, shape: ModelShape) -> str:
    """Which name of ``lora`` no linear layer and no expert of a model of ``shape`` has, and which there are; else
    empty."""
    lora = spec.lora
    if lora is None:
        return ""
    blocks = [*enumerate(shape.blocks)]
    stacked = [f"model.layers.{layer}.{name}" for layer, block in blocks for name in block.of_experts]
    try:
        modules = spec.training.trainable_modules or ()
        adapted([*all_linear(shape), HEAD], HEAD, lora.target_modules, lora.exclude_modules, modules, stacked)
    except AdapterError as error:
        error = hint_on_peft(error, shape.kind)
        return hint_on_experts(error) if shape.experts else str(error)
    return ""


def packing_problem(spec: SFTJobSpec, shape: ModelShape) -> str:
    """Why frozen weights of a model of ``shape`` cannot be held in 4 bits where ``spec`` asks for that; else empty."""
    if spec.quantised is None:
        return ""
    if spec.quantised == "mxfp4":
        if shape.in_mxfp4:
            return ""
        return f"lora.basePrecision is mxfp4, and {spec.model.uri} is not, as gpt-oss is published: take nf4, or bf16"
    packed = {name: columns for block in packed_of(shape, spec) for name, (_, columns) in block.items()}
    for name, columns in packed.items():
        if columns % NF4_BLOCK:
            return (
                f"lora.basePrecision is nf4, but rows of {name} of {spec.model.uri} have {columns} weights: they must "
                f"be a multiple of {NF4_BLOCK}, which share a scale; take bf16, or another model"
            )
    return ""


def _modules_problem(spec: SFTJobSpec, shape: ModelShape) -> str:
    """Which name of ``training.trainableModules`` means nothing in a model of ``shape``, or one of two that tied
    weights have; else empty."""
    names = spec.training.trainable_modules or ()
    for name in names:
        layer = _OF_A_LAYER.fullmatch(name)
        if layer and int(layer["number"]) >= shape.layers:
            return (
                f"training.trainableModules names {name!r}, and {spec.model.uri} has {shape.layers} layers, from "
                f"layers.0 to layers.{shape.layers - 1}"
            )
        embeddings = embeddings_of(shape)
        if shape.tied and name == HEAD and not within(f"{embeddings}.weight", names):
            return (
                f"training.trainableModules names {name!r}, which is the same tensor as {embeddings} in "
                f"{spec.model.uri}: name that too, or instead"
            )
        if name not in names_of_modules(shape):
            return no_such_module(name, some_parameters(shape))
    return ""
