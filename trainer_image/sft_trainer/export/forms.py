"""What an export looks like: a whole model, or the adapters of one in the format of peft."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_api.adapters import named, shortest, within
from sft_api.place import (
    EXPORT_ADAPTER,
    EXPORT_ADAPTER_CONFIG,
    EXPORT_CONFIG,
    EXPORT_WEIGHTS,
    ExportForm,
    form_of,
)
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.lora import LoraSpec
from sft_trainer.data.added_tokens import numbers_of
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.lora import (
    Beside,
    adapters_beside,
    add_adapters,
    is_adapter,
    linear_layers,
    stacked_weights,
    taken_for_experts,
)
from sft_trainer.models.quantised import FORMATS, packed_weights
from sft_trainer.models.tensors import tied_names
from sft_trainer.models.trained_rows import InPlace, add_rows, rows_in_tables, tables_with_rows
from sft_trainer.models.weights import untrained_tensors

from .plan import FILE_BYTES, Plan, plan_adapter, plan_export


@dataclass(frozen=True)
class Adapters:
    """Of a run that trains some, in place of the model's weights."""

    lora: LoraSpec
    form: ExportForm
    """What of them is exported: themselves, or the model with them in its weights."""
    base_uri: str
    """Where the model beside them came from, at the revision that the run is pinned to."""
    modules: tuple[str, ...] = ()
    """Names of modules that are trained besides."""
    tokens: tuple[str, ...] = ()
    """Of which rows are trained besides."""

    @classmethod
    def of(cls, config: TrainerConfig, base_uri: str) -> "Adapters | None":
        """Those of the run of ``config``, if it has some."""
        spec = config.spec
        if spec.lora is None:
            return None
        modules = tuple(spec.training.trainable_modules or ())
        return cls(spec.lora, form_of(spec), base_uri, modules, tuple(spec.tokens_with_rows))

    def trains(self, parameter: str) -> bool:
        """Whether that parameter of the model with its adapters is trained."""
        return is_adapter(parameter) or within(parameter, self.modules)


@dataclass(frozen=True)
class Shape:
    """The files of an export besides those of its tokenizer."""

    form: ExportForm
    plan: Plan
    adapter_config: Mapping[str, Any] | None = None
    """Content of the last file, where that is not the model's own configuration."""
    rows: Mapping[str, InPlace] = field(default_factory=dict)
    """Trained rows that weights have in place of their own, by the canonical names of these."""
    added: Mapping[str, Beside] = field(default_factory=dict)
    """Adapters that are added to the weights, or were trained beside them, by the canonical names of these."""
    packed: frozenset[str] = frozenset()
    """Names of weights that are what was trained beside, in 4 bits, and not what the base's files have."""
    copied: frozenset[str] = frozenset()
    """Names of tensors of the base's files that are there as they are, whatever they hold."""
    either: bool = False
    """Whether the same run may have been exported into the folder in the other form: nothing of that stays."""

    @property
    def configs(self) -> tuple[str, ...]:
        """Names of the files that come last, in any form that this run may have in the folder."""
        return (EXPORT_CONFIG, EXPORT_ADAPTER_CONFIG) if self.either else (EXPORT_CONFIG,)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Of the names of all weights that this run may have in the folder."""
        return (EXPORT_WEIGHTS, EXPORT_ADAPTER) if self.either else (EXPORT_WEIGHTS,)


def shape_of(
    model: CausalLM, folder: Path, adapters: Adapters | None, file_bytes: int = FILE_BYTES, tokenizer: Any = None
) -> Shape:
    """That of an export of ``model``, on the meta device and without adapters, which came from ``folder``: with its
    weights where it is a part of a whole model, which is exported then.

    Where ``adapters`` are to be exported as such, it gets them. Their tokens are those of ``tokenizer``.
    """
    tokens = adapters.tokens if adapters else ()
    numbers = numbers_of(tokenizer.backend_tokenizer, tokens) if tokens else []
    if adapters is None or adapters.form == "model":
        untrained = untrained_tensors(model, folder)
        plan = plan_export(model, model.stored_dtype, file_bytes, untrained)
        copied = frozenset(name for name, _, _ in untrained.others)
        if adapters is None:
            return Shape("model", plan, copied=copied)
        added = adapters_beside(model.huggingface, model.names, adapters.lora, adapters.modules)
        rows = dict[str, InPlace]()
        if numbers:
            rows = rows_in_tables(model, tables_with_rows(model, numbers, adapters.modules), numbers)
        return Shape("model", plan, None, rows, added, _packed(model, adapters), copied, either=True)
    beside, packed = dict[str, Beside](), frozenset[str]()
    if adapters.lora.use_dora:
        # Of these peft has whole magnitudes, not what was added to those of the base.
        beside = adapters_beside(model.huggingface, model.names, adapters.lora, adapters.modules)
        packed = _packed(model, adapters)
    config = _peft_config(adapters, model, numbers)
    plan = plan_adapter(model, adapters.trains)
    return Shape("adapter", plan, config, added=beside, packed=packed, either=True)


def _packed(model: CausalLM, adapters: Adapters) -> frozenset[str]:
    """Canonical names of the tensors of ``model`` that were held rounded beside ``adapters``."""
    quantised = adapters.lora.quantised
    # What is held exactly is what the files have.
    if quantised is None or FORMATS[quantised].exact:
        return frozenset()
    weights = dict(model.huggingface.named_parameters())
    packed = packed_weights(model.huggingface, quantised, adapters.trains)
    return frozenset(part.name for name in packed for part in model.names.parts(name, tuple(weights[name].shape)))


def _peft_config(adapters: Adapters, model: CausalLM, numbers: Sequence[int]) -> dict[str, Any]:
    """Fields of peft's ``LoraConfig`` for the adapters that ``model`` gets here, and rows of the tokens ``numbers``."""
    linear, _ = linear_layers(model.huggingface)
    stacked = stacked_weights(model.huggingface)
    lora = adapters.lora
    alpha = _number(lora.effective_alpha)
    # Before there are adapters, whose modules are called as what they are beside.
    modules = _modules_of_peft(model, adapters.modules)
    chosen = add_adapters(model.huggingface, lora, adapters.modules)
    tables = add_rows(model, numbers, adapters.modules) if numbers else []
    # Named as layers they would be its experts to peft; beside weights in 4 bits it knows no parameters.
    apart = taken_for_experts(model.huggingface) if lora.quantised != "nf4" else []
    experts = shortest([name for name in chosen if name in stacked], stacked, 2)
    parameters = [*experts, *(f"{name}.weight" for name in apart)]
    layers = [name for name in chosen if name not in stacked and name not in apart]
    base, revision = adapters.base_uri.removeprefix("file://"), ""
    if base.startswith("hf://"):
        base, _, revision = base.removeprefix("hf://").partition("@")
    return {
        "peft_type": "LORA",
        **_loaded_as(model),
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": lora.rank,
        "lora_alpha": alpha,
        # Beside parameters peft has none, and takes no other number.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "target_modules": shortest(*_of_whole(model, layers, linear)),
        **({"target_parameters": [*map(model.module_of_whole, parameters)]} if parameters else {}),
        **_patterns(lora, [*map(model.module_of_whole, experts)]),
        "exclude_modules": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True if lora.init_method == "kaiming" else lora.init_method,
        "use_rslora": False,
        "use_dora": bool(lora.use_dora),
        "modules_to_save": [*map(model.module_of_whole, modules)] or None,
        **({"trainable_token_indices": {model.module_of_whole(name): [*numbers] for name in tables}} if tables else {}),
        "inference_mode": True,
    }


def _loaded_as(model: CausalLM) -> dict[str, Any]:
    """Fields of peft's ``LoraConfig`` by which its classes that load the base too know as what."""
    if model.whole is None:
        return {"task_type": "CAUSAL_LM"}
    # By the task they would take what transformers has for texts alone: another class, of which peft finds the layers
    # by their ends, but no adapters by their names. It leaves the model as it was then, with a warning.
    kind = model.whole.kind
    return {
        "task_type": None,
        "auto_mapping": {"base_model_class": kind.__name__, "parent_library": kind.__module__},
    }


def _of_whole(model: CausalLM, layers: Sequence[str], linear: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of ``layers``, and of all that are ``linear``, in the model that is published; its other parts have some
    besides, which peft would take for those of a text that end alike."""
    others = () if model.whole is None else model.whole.linear
    return [*map(model.module_of_whole, layers)], [*map(model.module_of_whole, linear), *others]


def _patterns(lora: LoraSpec, experts: Sequence[str]) -> dict[str, Any]:
    """Fields of peft's ``LoraConfig`` for ``experts``, by name, whose rank is another than that of layers."""
    own = lora.rank_of_experts
    if not experts or lora.expert_rank in (None, lora.rank):
        return {}
    # One scale for all: who reads no patterns takes that of the other layers.
    patterns = {"rank_pattern": own, "alpha_pattern": _number(lora.scaling * own)}
    return {field: dict.fromkeys(experts, number) for field, number in patterns.items()}


def _number(value: float) -> float:
    """``value`` as JSON: peft declares a whole number, and others that read the file take no 16.0 for one."""
    return int(value) if float(value).is_integer() else value


def _modules_of_peft(model: CausalLM, names: Sequence[str]) -> list[str]:
    """Full names of the modules that ``names`` mean, none of them within another, since peft takes any ending for a
    name; and of those that have tied weights of theirs."""
    meant = [name for name, _ in model.huggingface.named_modules() if named(name, names)]
    whole = [name for name in meant if not any(name.startswith(f"{other}.") for other in meant)]
    tied = [other for other, parameter in tied_names(model.huggingface).items() if within(parameter, names)]
    return list(dict.fromkeys([*whole, *(name.rpartition(".")[0] for name in tied if not within(name, whole))]))
