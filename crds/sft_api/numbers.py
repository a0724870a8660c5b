"""The numbers of a run: the settings that decide its losses, and the digest by which the run is known.

The digest is for ever. It is made of the fields listed here and of nothing else, and a field with the value that it
had by default in version 1 is left out: so neither a new field nor another default of a later version changes the
digest of a run that does not use it. What version 1 made of a field that a manifest leaves open (the batch, the
learning rate, the precision) is frozen here as well, whatever the planner of today does.

A field of the API that decides numbers is added to ``_DEFAULTS`` (with the value that says what runs did before it
was there) or ``_SOURCE_DEFAULTS``; every other one to ``NOT_NUMBERS``. See docs/design/0007.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from pydantic import JsonValue

from .splits import LONGEST_SPLIT, MANY_ROWS, Slice, parse_split, share_rows
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.lora import LoraSpec

VERSION = 1
"""Of the list of fields, their defaults and the rules below. A digest is never computed anew by another version."""

_DEFAULTS: Mapping[str, JsonValue] = {
    "model.tokenizerUri": None,
    "model.chatTemplate": None,
    "model.addedTokens": None,
    "model.addedSpecialTokens": None,
    "model.configOverrides.rope_parameters.rope_type": None,
    "model.configOverrides.rope_parameters.factor": None,
    "model.configOverrides.rope_parameters.original_max_position_embeddings": None,
    "model.configOverrides.rope_parameters.rope_theta": None,
    "model.configOverrides.rope_parameters.attention_factor": None,
    "model.configOverrides.rope_parameters.beta_fast": None,
    "model.configOverrides.rope_parameters.beta_slow": None,
    "model.configOverrides.rope_parameters.truncate": None,
    "model.configOverrides.rope_parameters.low_freq_factor": None,
    "model.configOverrides.rope_parameters.high_freq_factor": None,
    "model.configOverrides.max_position_embeddings": None,
    "model.configOverrides.sliding_window": None,
    "model.configOverrides.attention_dropout": None,
    "model.configOverrides.attention_probs_dropout_prob": None,
    "model.configOverrides.hidden_dropout": None,
    "model.configOverrides.hidden_dropout_prob": None,
    "model.configOverrides.resid_pdrop": None,
    "model.configOverrides.residual_dropout": None,
    "model.configOverrides.embd_pdrop": None,
    "model.configOverrides.embedding_dropout": None,
    "lora.rank": None,
    "lora.expertRank": None,
    "lora.alpha": None,
    "lora.dropout": None,
    "lora.targetModules": None,
    "lora.excludeModules": None,
    "lora.initMethod": None,
    "lora.learningRateRatio": 1,
    "lora.useDora": False,
    "lora.trainableTokens": None,
    "lora.adapterUri": None,
    "lora.basePrecision": None,
    "data.heldOut.fraction": None,
    "data.trainOn": "lastAssistantMessage",
    "data.maxLength": 4096,
    "data.overlong": "drop",
    "data.packing": "ffd",
    "data.sampler": "random",
    "training.steps": None,
    "training.epochs": 1,
    "training.globalBatchSize": None,
    "training.globalBatchTokens": 65536,
    "training.maxTokensPerMicroBatch": None,
    "training.microBatchSize": None,
    "training.loss": "crossEntropy",
    "training.labelSmoothing": 0,
    "training.neftuneNoiseAlpha": 0,
    "training.routerAuxLossCoefficient": 0,
    "training.trainableModules": None,
    "training.optimizer.type": "adamw",
    "training.optimizer.learningRate": 1e-5,
    "training.optimizer.betas": [0.9, 0.999],
    "training.optimizer.momentum": 0.95,
    "training.optimizer.eps": 1e-8,
    "training.optimizer.weightDecay": 0.01,
    "training.optimizer.maxGradNorm": 1,
    "training.optimizer.stateDtype": "fp32",
    "training.schedule.type": "cosine",
    "training.schedule.warmupRatio": 0.03,
    "training.schedule.warmupSteps": None,
    "training.schedule.minRatio": 0,
    "training.schedule.decayRatio": 0.1,
    "training.schedule.decaySteps": None,
    "training.schedule.power": None,
    "training.schedule.cycles": None,
    "training.precision": "bf16",
    "training.parameterDtype": "fp32",
    "training.seed": 42,
    "strategy.fsdp.reduceDtype": "fp32",
    "strategy.megatron.transformerConfigOverrides.moe_router_dtype": None,
    "checkpoint.resume.from.uri": None,
    "checkpoint.resume.from.step": None,
    "checkpoint.resume.from.what": "weights",
}
_SOURCE_DEFAULTS: Mapping[str, JsonValue] = {
    "split": None,
    "subset": None,
    "weight": None,
    "format": "auto",
    "columns": {},
    "messagesKey": "messages",
    "toolsKey": "tools",
    "systemKey": "system",
}
_OVERRIDES = "model.configOverrides."
_MODULES = "training.trainableModules"
_BATCH = ("training.globalBatchSize", "training.globalBatchTokens")
_BINS = "training.maxTokensPerMicroBatch"
_INSTEAD = {
    "training.globalBatchTokens": "training.globalBatchSize",
    "training.epochs": "training.steps",
    "training.schedule.warmupRatio": "training.schedule.warmupSteps",
    "training.schedule.decayRatio": "training.schedule.decaySteps",
}
"""What says nothing, whatever it is by default, where the other field is given."""
_OPTIMIZER, _MOMENTS = "training.optimizer.type", "training.optimizer.stateDtype"
_MODEL, _SOURCES, _HELD_OUT = "model.uri", "data.train", "data.heldOut.fraction"
_ORIGIN = "checkpoint.resume.from.uri"
_FIRST_ADAPTERS = "lora.adapterUri"
_NO_POSITION = (
    "training.steps",
    "training.epochs",
    "training.precision",
    "training.parameterDtype",
    "training.microBatchSize",
    "training.loss",
    "training.labelSmoothing",
    "training.neftuneNoiseAlpha",
    "training.routerAuxLossCoefficient",
    "training.optimizer.",
    "training.schedule.",
    "strategy.fsdp.reduceDtype",
    "strategy.megatron.",
    "checkpoint.resume.from.",
    "lora.initMethod",
    "lora.learningRateRatio",
    _FIRST_ADAPTERS,
    "lora.basePrecision",
    _MODULES,
)
"""What begins so decides neither which tokens a step sees nor with which random numbers."""
_NOT_OF_VALUES = frozenset(
    {"lora.dropout", "lora.initMethod", "lora.learningRateRatio", _FIRST_ADAPTERS, "lora.basePrecision"}
)
"""What may be another while the same values of adapters mean the same."""

NUMBERS = frozenset({*_DEFAULTS, _MODEL, f"{_SOURCES}[].uri", *(f"{_SOURCES}[].{name}" for name in _SOURCE_DEFAULTS)})
"""Every field below ``spec`` that counts."""

NOT_NUMBERS = frozenset(
    {
        "model.tokenSecretRef",
        "model.parameters",
        "data.eval",  # it measures, and changes no weight
        "data.workers",
        "data.keepTokenized",
        "training.activationCheckpointing",
        "training.compile",
        "training.evaluation",
        "training.dummyRun",  # it is no run, and what it does is thrown away
        "training.callbacks",  # they see values, and decide where it ends at most
        "strategy.fsdp.shardDegree",
        "strategy.fsdp.reshardAfterForward",
        "strategy.fsdp.reduceGradients",
        "strategy.fsdp.cpuOffload",
        "strategy.fsdp.sequenceParallelDegree",
        # Which processes compute what, as those of fsdp.
        "strategy.megatron.tensorParallelDegree",
        "strategy.megatron.contextParallelDegree",
        "strategy.megatron.pipelineParallelDegree",
        "strategy.megatron.virtualPipelineParallelDegree",
        "strategy.megatron.expertParallelDegree",
        "strategy.megatron.sequenceParallel",
        "strategy.megatron.transformerConfigOverrides.num_layers_in_first_pipeline_stage",
        "strategy.megatron.transformerConfigOverrides.num_layers_in_last_pipeline_stage",
        "strategy.megatron.transformerConfigOverrides.batch_p2p_comm",
        "strategy.megatron.transformerConfigOverrides.deallocate_pipeline_outputs",
        # Processes share a step out; where the batch is left open, the step that follows from them counts.
        "compute.nodes",
        "compute.gpusPerNode",
        "compute.processesPerNode",
        "compute.launcher",
        "compute.image",
        "compute.imagePullPolicy",
        "compute.imagePullSecrets",
        "compute.podProfile",
        "compute.serviceAccountName",
        "compute.gpuResourceName",
        "compute.gpuMemory",
        "compute.memoryCheck",
        "compute.resources",
        "compute.nodeSelector",
        "compute.tolerations",
        "compute.priorityClassName",
        "compute.runtimeClassName",
        "compute.env",
        "compute.sharedMemorySize",
        "compute.cacheSize",
        "compute.labels",
        "compute.annotations",
        "checkpoint.uri",
        "checkpoint.s3",
        "checkpoint.everySteps",
        "checkpoint.everyEpochs",
        "checkpoint.everySeconds",
        "checkpoint.keep",
        "checkpoint.async",
        "checkpoint.resume.policy",
        "export.atEnd",
        "export.checkpoint",
        "export.everySteps",
        "export.uri",
        "export.mergeAdapter",
        "export.hub",  # of what is trained it gets a copy
        "monitoring",
        "suspend",
        "runPolicy",
        "deletionPolicy",
    }
)
"""Every other field below ``spec``; an entry covers what is below it."""


class NumbersError(ValueError):
    """A record of numbers that cannot be compared; the text says why."""


@dataclass(frozen=True)
class Numbers:
    """What decides the losses of a run: value by dotted path below ``spec``, without the defaults of version 1."""

    values: Mapping[str, JsonValue]

    @classmethod
    def of(cls, spec: SFTJobSpec) -> "Numbers":
        """The numbers of ``spec``, whatever machine it runs on and however its values are written."""
        document = spec.model_dump(mode="json", exclude_none=True)
        shares = spec.compute.processes // spec.processes_a_share
        learned: dict[str, Any] = {
            "training.optimizer.learningRate": spec.training.optimizer.learning_rate,
            "training.precision": spec.precision,
            **(_adapters(spec.lora, spec.training.optimizer.learning_rate, spec.precision) if spec.lora else {}),
            # Names in one order.
            "training.trainableModules": sorted({*(spec.training.trainable_modules or [])}) or None,
        }
        return cls(_values(document, {**_batch(document, shares), **learned}))

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Numbers":
        """The numbers that ``as_record`` made ``record`` of; also of one that is older than version 1.

        Raises NumbersError when it is neither.
        """
        if not record:
            raise NumbersError("it is not recorded with which settings they were made")
        try:
            if "version" not in record:
                return cls(_before_version_1(record))
            if record["version"] == VERSION:
                return cls(dict(record["values"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise NumbersError(f"their numbers cannot be read ({type(error).__name__}: {error})") from error
        raise NumbersError(
            f"their numbers are written in version {record['version']!r}, this program knows version {VERSION}"
        )

    def as_record(self) -> dict[str, JsonValue]:
        """JSON for whoever has to compare or repeat the run: version and values."""
        return {"version": VERSION, "values": dict(self.values)}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the record in canonical JSON; the same for ever."""
        canonical = json.dumps(self.as_record(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def optimizer(self) -> str:
        """Which one it is: adamw or muon."""
        return str(self.values.get(_OPTIMIZER, _DEFAULTS[_OPTIMIZER]))

    @property
    def moments(self) -> str:
        """What the optimizer's are held in."""
        return str(self.values.get(_MOMENTS, _DEFAULTS[_MOMENTS]))

    def has_moments_for(self, other: "Numbers") -> bool:
        """Whether a run with the numbers ``other`` can go on with the moments that one with these has saved.

        Codes of 8 bits are neither made of others nor made others; nor is another optimizer's state.
        """
        alike = self.moments == other.moments or "int8" not in (self.moments, other.moments)
        return alike and self.optimizer == other.optimizer

    def position_differences(self, other: "Numbers") -> list[str]:
        """``differences`` in what decides which tokens a step sees, and with which random numbers.

        Where there are none, a step of one run stands at the same place of its data as that step of the other.
        """
        both = {*self.values, *other.values}
        return self._differences(other, (path for path in both if not path.startswith(_NO_POSITION)))

    def trained_differences(self, other: "Numbers") -> list[str]:
        """``differences`` in what the tensors are that are trained, and mean: the values of one fit no other."""
        both = {path for path in (*self.values, *other.values) if path.startswith(("lora.", _MODULES))}
        return self._differences(other, both - _NOT_OF_VALUES)

    def override_differences(self, other: "Numbers") -> list[str]:
        """``differences`` in the config of the model: the same weights give other values with another one."""
        both = (path for path in {*self.values, *other.values} if path.startswith(_OVERRIDES))
        return self._differences(other, both)

    def rows_shown(self, other: "Numbers") -> list[str]:
        """``differences`` in what is held out, and of which rows, where this run trained some that ``other`` holds
        out."""
        mine, theirs = (numbers.values.get(_SOURCES) for numbers in (self, other))
        fraction = other.values.get(_HELD_OUT)
        if fraction is None or not (isinstance(mine, list) and isinstance(theirs, list)):
            return []
        trained, drawn = (list(filter(None, map(_rows_of, sources))) for sources in (mine, theirs))
        alike = fraction == self.values.get(_HELD_OUT)
        same = not alike and any(rows in trained for rows in drawn)
        others = any(
            a != b and _share_rows(a, b) and not (alike and _begin_alike(a, b)) for a in trained for b in drawn
        )
        return self._differences(other, [_HELD_OUT, *([_SOURCES] if others else [])]) if same or others else []

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and of the model at most some modules."""
        return "lora.rank" in self.values

    @property
    def has_base(self) -> bool:
        """Whether some of the model's weights are not trained: those that are mean nothing without them."""
        return self.has_adapters or _MODULES in self.values

    def differences(self, other: "Numbers") -> list[str]:
        """Every field that is another one in ``other``, with both values: this one's, then the other's."""
        return self._differences(other, {*self.values, *other.values})

    def _differences(self, other: "Numbers", paths: Iterable[str]) -> list[str]:
        found = []
        for path in sorted(paths):
            here, there = (numbers._in_force(path) for numbers in (self, other))
            if here != there:
                found += _differences(path, here, there)
        return found

    def _in_force(self, path: str) -> JsonValue:
        """What ``path`` is in this run. What it leaves out has its default, but where another field stands for it."""
        if path in self.values:
            return self.values[path]
        if path == _BINS and self._counts_bins:
            return self.values.get("data.maxLength", _DEFAULTS["data.maxLength"])
        return None if _INSTEAD.get(path) in self.values else _DEFAULTS.get(path)

    @property
    def _counts_bins(self) -> bool:
        """Whether the size of bins decides something, which is ``data.maxLength`` where it is left open."""
        by_tokens = "training.globalBatchSize" not in self.values
        return by_tokens or ("training.routerAuxLossCoefficient" in self.values and "data.packing" not in self.values)


def _values(spec: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Values by path of the JSON of a spec, defaults left out; ``resolved`` are those that follow from others."""
    given = {path: _at(spec, path) for path in _DEFAULTS} | {
        path: value for path, value in resolved.items() if value is not None or path in _BATCH
    }
    # A bin decides which examples share a step when steps are counted in tokens, and which are balanced together over
    # experts. Else it is how much of a step goes through one forward: sums are rounded otherwise, as with other
    # processes.
    counts_tokens = given["training.globalBatchTokens"] is not None
    balances = bool(given["training.routerAuxLossCoefficient"])
    packed = given["data.packing"] != "none"
    counts_bins = counts_tokens or (balances and packed)
    if not counts_bins or given["training.maxTokensPerMicroBatch"] == given["data.maxLength"]:
        given["training.maxTokensPerMicroBatch"] = None
    if not balances or packed:
        given["training.microBatchSize"] = None
    if given["training.steps"] is not None or given["training.epochs"] is None:
        given["training.epochs"] = _DEFAULTS["training.epochs"]
    if given["training.schedule.type"] == "constant" or given["training.schedule.warmupSteps"] is not None:
        given["training.schedule.warmupRatio"] = None
    model = one_spelling(_at(spec, _MODEL))
    if given["model.tokenizerUri"] is not None:
        tokenizer = one_spelling(given["model.tokenizerUri"])
        given["model.tokenizerUri"] = None if tokenizer == model else tokenizer
    given["lora.excludeModules"] = given["lora.excludeModules"] or None
    if given["lora.expertRank"] == given["lora.rank"]:
        given["lora.expertRank"] = None
    for path in (_ORIGIN, _FIRST_ADAPTERS):
        if given[path] is not None:
            given[path] = one_spelling(given[path])
    values = {path: _plain(value) for path, value in given.items() if value is not None}
    chosen = {path: value for path, value in values.items() if value != _DEFAULTS[path]}
    return {_MODEL: model, _SOURCES: [_source(source) for source in spec["data"]["train"]], **chosen}


def _adapters(lora: LoraSpec, rate: float | None, precision: str) -> dict[str, Any]:
    """What follows from other fields where there are adapters, by the rules of version 1; names in one order."""
    return {
        "training.optimizer.learningRate": 1e-4 if rate is None else rate,
        "lora.alpha": lora.effective_alpha,
        "lora.targetModules": sorted({*lora.target_modules}),
        "lora.excludeModules": sorted({*lora.exclude_modules}),
        "lora.trainableTokens": sorted({*(lora.trainable_tokens or ())}) or None,
        "lora.basePrecision": lora.base_precision or precision,
    }


def _batch(spec: Mapping[str, Any], shares: int) -> dict[str, int | None]:
    """Examples or tokens of a step, by the rules of version 1 for as many processes as the manifest declares.

    Those that compute on the same micro-batches are one of its ``shares``."""
    training = spec["training"]
    size, tokens = training.get("globalBatchSize"), training.get("globalBatchTokens")
    if spec["data"]["packing"] == "none":
        size = size or _round_up(32, shares * training["microBatchSize"])
    elif size is None:
        at_once = shares * (training.get("maxTokensPerMicroBatch") or spec["data"]["maxLength"])
        tokens = tokens // at_once * at_once if tokens else _round_up(65536, at_once)
    return dict(zip(_BATCH, (size, tokens), strict=True))


def _before_version_1(record: Mapping[str, Any]) -> dict[str, JsonValue]:
    """From the spec and the plan that checkpoints held before there were versions."""
    spec, plan = record["spec"], record["plan"]
    resolved = {path: plan.get(path.rpartition(".")[2]) for path in _BATCH}
    return _values(
        spec,
        {
            **resolved,
            "training.optimizer.learningRate": plan["learningRate"],
            "training.precision": plan["precision"],
        },
    )


def _source(source: Mapping[str, Any]) -> dict[str, JsonValue]:
    split = source.get("split")
    given = {**source, "split": split and "+".join(map(str, parse_split(split)))}
    chosen = {name: _plain(given.get(name)) for name in _SOURCE_DEFAULTS}
    return {
        "uri": one_spelling(source["uri"]),
        **{name: value for name, value in chosen.items() if value is not None and value != _SOURCE_DEFAULTS[name]},
    }


def one_spelling(uri: str) -> str:
    """One spelling: the hub's main branch is meant where no revision is named, and a folder ends without a slash."""
    return uri.removesuffix("@main") if uri.startswith("hf://") else uri.rstrip("/")


def _plain(value: Any) -> JsonValue:
    """``value`` with whole numbers as such: 1 and 1.0 are written in one way."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _at(spec: Mapping[str, Any], path: str) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_LONGEST_QUOTE = 120
_ALIKE_QUOTED = 30
"""Characters before those in which two long values differ."""


def _differences(path: str, here: Any, there: Any) -> list[str]:
    if path == _SOURCES and isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        pairs = enumerate(zip(here, there, strict=True))
        return [line for index, (a, b) in pairs if a != b for line in _in_source(f"{path}[{index}]", a, b)]
    return [f"{path}: {' -> '.join(both_quoted(here, there))}"]


def _in_source(path: str, here: Any, there: Any) -> list[str]:
    if not (isinstance(here, dict) and isinstance(there, dict)):
        return [f"{path}: {' -> '.join(both_quoted(here, there))}"]
    both = [(name, *(s.get(name, _SOURCE_DEFAULTS.get(name)) for s in (here, there))) for name in {**here, **there}]
    return [f"{path}.{name}: {' -> '.join(both_quoted(a, b))}" for name, a, b in both if a != b]


_RowsOf = tuple[JsonValue, JsonValue, tuple[Slice, ...]]


def _rows_of(source: JsonValue) -> _RowsOf | None:
    """What decides which rows a source has: URI, subset and slices; None of what is none."""
    if not isinstance(source, dict):
        return None
    split = source.get("split") or "train"
    if not isinstance(split, str) or len(split) > LONGEST_SPLIT:
        return None
    with suppress(ValueError):
        return source.get("uri"), source.get("subset"), tuple(parse_split(split))
    return None


def _share_rows(one: _RowsOf, other: _RowsOf) -> bool:
    return one[:2] == other[:2] and any(share_rows(a, b) for a in one[2] for b in other[2])


def _begin_alike(one: _RowsOf, other: _RowsOf) -> bool:
    """Whether one of both is the beginning of the other: rows are drawn by their places, and are the same there."""
    begins = [rows[2][0].bounds(MANY_ROWS)[0] for rows in (one, other) if len(rows[2]) == 1]
    return len(begins) == 2 and begins[0] == begins[1]


def both_quoted(here: Any, there: Any) -> tuple[str, str]:
    """Two values that differ as they are told: as they are written, and not without end; what they are found to differ
    in is among what is left of them."""
    texts = tuple("not set" if value is None else json.dumps(value, ensure_ascii=False) for value in (here, there))
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    begin = alike - _ALIKE_QUOTED if alike > _LONGEST_QUOTE - _ALIKE_QUOTED else 0
    one, other = (text if len(text) <= _LONGEST_QUOTE else f"{'…' * bool(begin)}{_cut(text[begin:])}" for text in texts)
    return one, other


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"
