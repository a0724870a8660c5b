"""Features of a run, each with a few values; drawn so that every two values meet that can."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft_api.v1alpha1 import SFTJob

from .inputs import END_OF_TURN, IN_BRACKETS, KINDS, MARKED, TICKET, WHOLES

Sections = Mapping[str, Any]
"""A part of a spec."""

_CANDIDATES = 12
"""Manifests that are drawn for each that is tried: the one with the most new pairs."""

_OPTIMIZER = {"learningRate": 1e-3, "eps": 1e-4}
"""With the usual eps a weight whose gradient is nothing but rounding moves as far as any other."""


def _training(**fields: Any) -> Sections:
    return {"training": fields}


def _lora(**fields: Any) -> Sections:
    return {"lora": {"rank": 4, "alpha": 8, **fields}, "training": {"optimizer": {"learningRate": 1e-2}}}


def _source(inputs: Path, form: str, name: str = "train", **fields: Any) -> dict[str, Any]:
    return {"uri": f"file://{inputs}/data/{name}-{form}.jsonl", **fields}


def features(inputs: Path) -> dict[str, dict[str, Sections]]:
    """By name of the feature and of its value what that is merged into a spec; ``inputs`` were made by ``make``."""

    def rows(form: str, **others: Any) -> Sections:
        return {"data": {"train": [_source(inputs, form)], **others}}

    evaluated = [{**_source(inputs, "messages", "eval"), "name": "chats"}]
    both = [*evaluated, {**_source(inputs, "text", "eval"), "name": "texts"}]
    experts = ["all-linear", "experts"]
    return {
        "model": {kind: {"model": {"uri": f"file://{inputs}/models/{kind}"}} for kind in (*KINDS, *WHOLES)},
        "trained": {
            "all": {},
            "all, in bf16": _training(precision="bf16", parameterDtype="bf16"),
            "a layer": _training(trainableModules=["layers.1"]),
            "a layer and head": _training(trainableModules=["layers.1", "lm_head"]),
            "adapters": _lora(),
            "adapters with dropout": _lora(dropout=0.2),
            "adapters of some": _lora(targetModules=["q_proj", "v_proj", "down_proj"], initMethod="gaussian"),
            "adapters with magnitudes": _lora(useDora=True, excludeModules=["k_proj"]),
            "adapters, B faster": _lora(learningRateRatio=4),
            "adapters in 4 bits": _lora(basePrecision="nf4"),
            "adapters of experts": _lora(targetModules=experts, expertRank=2),
            "adapters of experts in 4 bits": _lora(targetModules=experts, basePrecision="nf4"),
            "adapters in MXFP4": _lora(basePrecision="mxfp4"),
            "adapters beside bf16": _lora(basePrecision="bf16"),
            "adapters that are there": _lora(adapterUri=f"file://{inputs}/adapters/{{model}}"),
            "adapters that are there in 4 bits": _lora(
                adapterUri=f"file://{inputs}/adapters/{{model}}-rslora", basePrecision="nf4"
            ),
            "adapters and rows": _lora(trainableTokens=[END_OF_TURN]),
            "adapters and embeddings": _merged(_lora(), _training(trainableModules=["embed_tokens"])),
            "adapters, embeddings and head": _merged(_lora(), _training(trainableModules=["embed_tokens", "lm_head"])),
        },
        "optimizer": {
            "adamw": {},
            "adamw in bf16": _training(optimizer={"stateDtype": "bf16"}),
            "adamw in 8 bits": _training(optimizer={"stateDtype": "int8"}),
            "muon": _training(optimizer={"type": "muon"}),
            "muon in bf16": _training(optimizer={"type": "muon", "stateDtype": "bf16", "momentum": 0.8}),
        },
        "clipping": {"usual": {}, "none": _training(optimizer={"maxGradNorm": 0})},
        "precision": {"fp32": {}, "bf16": _training(precision="bf16")},
        "loss": {
            "cross-entropy": {},
            "dft": _training(loss="dft"),
            "smoothed": _training(labelSmoothing=0.1),
            "noise": _training(neftuneNoiseAlpha=5),
            "routers": _training(routerAuxLossCoefficient=0.1),
        },
        "batch": {
            "tokens": _training(globalBatchTokens=1024, maxTokensPerMicroBatch=512),
            "short micro-batches": _training(globalBatchTokens=1024),
            "packed rows": _training(globalBatchSize=6),
            "rows": {"data": {"packing": "none"}, **_training(globalBatchSize=8, microBatchSize=2)},
            "single rows": {"data": {"packing": "none"}, **_training(globalBatchSize=4)},
        },
        "rows": {
            "messages": rows("messages"),
            "shareGPT": rows("shareGPT"),
            "alpaca": rows("alpaca"),
            "completions": rows("promptCompletion"),
            "completed turns": rows("continued"),
            "history": rows("history"),
            "flagged": rows("flagged"),
            "other columns": {
                "data": {
                    "train": [
                        _source(
                            inputs,
                            "questions",
                            columns={"instruction": "question", "output": "reply"},
                            systemKey="persona",
                        )
                    ]
                }
            },
            "other turns": {"data": {"train": [_source(inputs, "dialogs", format="shareGPT", messagesKey="dialog")]}},
            "texts": rows("text"),
            "tokens": rows("pretokenized"),
            "a part": {"data": {"train": [_source(inputs, "messages", split="train[10%:70%]")]}},
            "two": {"data": {"train": [_source(inputs, "messages"), _source(inputs, "pretokenized")]}},
            "weighted": {
                "data": {"train": [_source(inputs, "alpaca", weight=3), _source(inputs, "messages", weight=1)]}
            },
        },
        "trained turns": {
            "last": {},
            "all": {"data": {"trainOn": "allAssistantMessages"}},
            "everything": {"data": {"trainOn": "allTokens"}},
        },
        "template": {
            "published": {},
            "brackets": {"model": {"chatTemplate": IN_BRACKETS}},
            "marked": {"model": {"chatTemplate": MARKED}},
        },
        "length": {
            "fits": {"data": {"maxLength": 256}},
            "dropped": {"data": {"maxLength": 96}},
            "cut": {"data": {"maxLength": 64, "overlong": "truncate"}},
            "split": {"data": {"maxLength": 48, "overlong": "split"}},
        },
        "evaluated": {
            "set": {"data": {"eval": evaluated}},
            "sets": {"data": {"eval": both}},
            "held out": {"data": {"heldOut": {"fraction": 0.2}}},
            "set and held out": {"data": {"eval": evaluated, "heldOut": {"fraction": 0.1}}},
            "nothing": {},
        },
        "evaluations": {
            "end": {},
            "steps": _training(evaluation={"everySteps": 2, "beforeTraining": True}),
            "passes": _training(evaluation={"everyEpochs": 0.5}),
            "stops early": _training(evaluation={"everySteps": 1, "earlyStopping": {"patience": 1, "minDelta": 0.05}}),
        },
        "end": {
            "steps": _training(steps=6),
            "a pass": _training(epochs=1),
            "part of a pass": _training(epochs=0.6),
            "passes": _training(epochs=1.5),
        },
        "order": {"random": {}, "stored": {"data": {"sampler": "sequential"}}},
        "new tokens": {
            "none": {},
            "one": {"model": {"addedTokens": [TICKET]}},
            "several": {"model": {"addedTokens": [TICKET, f"{TICKET}s"], "addedSpecialTokens": ["<|note|>"]}},
        },
        "schedule": {
            "cosine": {},
            "linear": _training(schedule={"type": "linear", "warmupSteps": 2}),
            "stable": _training(schedule={"type": "warmupStableDecay", "decaySteps": 2, "minRatio": 0.1}),
            "restarts": _training(schedule={"type": "cosineWithRestarts", "cycles": 2}),
            "root": _training(schedule={"type": "inverseSqrt", "warmupRatio": 0.3}),
        },
        "memory": {
            "kept": {},
            "selective": _training(activationCheckpointing="selective"),
            "full": _training(activationCheckpointing="full"),
        },
        "processes": {
            "one": {},
            "two": {"compute": {"processesPerNode": 2}},
            "two copies": {"compute": {"processesPerNode": 2}, "strategy": {"fsdp": {"shardDegree": 1}}},
            "shared tokens": {
                "compute": {"processesPerNode": 2},
                "strategy": {"fsdp": {"sequenceParallelDegree": 2}},
            },
        },
        "gradients": {
            "auto": {},
            "once": {"strategy": {"fsdp": {"reduceGradients": "oncePerStep"}}},
            "each": {"strategy": {"fsdp": {"reduceGradients": "everyMicroBatch", "reshardAfterForward": False}}},
            "in bf16": {"strategy": {"fsdp": {"reduceDtype": "bf16"}}},
            "offloaded": {"strategy": {"fsdp": {"cpuOffload": True}}},
        },
        "saves": {
            "each": {"checkpoint": {"everySteps": 1}},
            "every other, waits": {"checkpoint": {"everySteps": 2, "async": False, "keep": {"last": 1}}},
            "passes": {"checkpoint": {"everyEpochs": 0.5}},
            "end": {},
        },
        "export": {
            "last": {},
            "best": {"checkpoint": {"keep": {"best": 1}}, "export": {"checkpoint": "best"}},
            "merged": {"export": {"mergeAdapter": True}},
            "on the way": {"checkpoint": {"everySteps": 1}, "export": {"everySteps": 2}},
        },
        "config": {
            "published": {},
            "longer": {
                "model": {
                    "configOverrides": {
                        "rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128}
                    }
                }
            },
            "attention dropout": {"model": {"configOverrides": {"attention_dropout": 0.1}}},
        },
    }


_USUAL = {"config": 8, "new tokens": 3, "export": 2, "gradients": 3, "precision": 2, "loss": 2}
"""How many times as often as another the first value of these is drawn: what most others are refused beside."""


_MIXTURES = {"gpt_oss", "qwen3_moe", "mixtral", "qwen3_next"}
_TIED = {"qwen3", "qwen2", "gemma2", "gemma3_text"}
_IN_ORDER = {"qwen3_next", "qwen3_5", "granitemoehybrid", "lfm2"}
_LEARNS_TOKENS = {
    *("all", "all, in bf16", "adapters", "adapters with dropout", "adapters of some", "adapters with magnitudes"),
    *("adapters, B faster", "adapters in 4 bits", "adapters of experts", "adapters of experts in 4 bits"),
    *("adapters beside bf16", "adapters and rows", "adapters and embeddings", "adapters, embeddings and head"),
}
_ONLY_WITH: dict[tuple[str, str], tuple[str, Collection[str]]] = {
    ("trained", "adapters in MXFP4"): ("model", {"gpt_oss"}),
    ("trained", "adapters of experts"): ("model", _MIXTURES),
    ("trained", "adapters of experts in 4 bits"): ("model", _MIXTURES),
    ("trained", "adapters in 4 bits"): ("model", set(KINDS) - {"granitemoehybrid"}),
    ("trained", "adapters that are there in 4 bits"): ("model", set(KINDS) - {"granitemoehybrid"}),
    ("trained", "a layer and head"): ("model", {*KINDS, *WHOLES} - _TIED),
    ("trained", "adapters and embeddings"): ("model", _TIED),
    ("trained", "adapters of some"): ("model", {"qwen3", "llama", "qwen2", "gemma2", "gemma3_text", "stablelm"}),
    ("trained", "adapters with magnitudes"): ("model", {*KINDS, *WHOLES} - {"phi3"}),
    ("processes", "shared tokens"): ("model", {*KINDS, *WHOLES} - _IN_ORDER),
    ("loss", "routers"): ("model", _MIXTURES),
    ("rows", "flagged"): ("trained turns", {"last", "all"}),
    ("config", "attention dropout"): ("model", {"qwen3", "llama", "qwen2", "gemma2", "phi3", "mixtral"}),
    ("config", "longer"): ("model", {"qwen3", "llama", "qwen2", "mixtral", "qwen3_moe"}),
    ("new tokens", "one"): ("trained", _LEARNS_TOKENS),
    ("new tokens", "several"): ("trained", _LEARNS_TOKENS),
}
"""Of values that are refused beside most others of a feature those beside which they are not."""
_REFUSED_SHARE = 0.05
"""Of draws that are taken although one of these is beside another: whether they are refused well is asked too."""


@dataclass(frozen=True)
class Drawn:
    """A manifest, and of which values it is."""

    values: Mapping[str, str]
    job: dict[str, Any]

    @property
    def pairs(self) -> set[frozenset[tuple[str, str]]]:
        return {frozenset(pair) for pair in itertools.combinations(self.values.items(), 2)}


class Draws:
    """Manifests that the API accepts, the same ones for the same seed."""

    def __init__(self, inputs: Path, seed: int) -> None:
        self._features = features(inputs)
        self._random = random.Random(seed)
        self._met: set[frozenset[tuple[str, str]]] = set()
        self.refused_by_the_api = 0

    @property
    def met(self) -> int:
        """Pairs of values that were in a manifest together."""
        return len(self._met)

    def __iter__(self) -> Iterator[Drawn]:
        while True:
            candidates = [self._acceptable() for _ in range(_CANDIDATES)]
            best = max(candidates, key=lambda drawn: len(drawn.pairs - self._met))
            self._met |= best.pairs
            yield best

    def _acceptable(self) -> Drawn:
        while True:
            drawn = self._draw()
            known = any(
                drawn.values[feature] == value and drawn.values[other] not in among
                for (feature, value), (other, among) in _ONLY_WITH.items()
            )
            if known and self._random.random() > _REFUSED_SHARE:
                continue
            try:
                SFTJob.from_manifest(drawn.job)
            except ValidationError:
                self.refused_by_the_api += 1
            else:
                return drawn

    def _draw(self) -> Drawn:
        values = {}
        for feature, known in self._features.items():
            names = list(known)
            weights = [_USUAL.get(feature, 1), *[1] * (len(names) - 1)]
            (values[feature],) = self._random.choices(names, weights)
        seed = self._random.randrange(1000)
        return Drawn(values, manifest([self._features[feature][value] for feature, value in values.items()], seed))


def manifest(parts: list[Sections], seed: int) -> dict[str, Any]:
    """The job of ``parts``, merged in their order."""
    spec: dict[str, Any] = {
        "data": {"workers": 1},
        "training": {"optimizer": _OPTIMIZER, "seed": seed},
        "compute": {"gpusPerNode": 0},
        # Of time no save depends.
        "checkpoint": {"everySeconds": 86400},
    }
    for part in parts:
        spec = _merged(spec, part)
    if adapters := spec.get("lora", {}).get("adapterUri"):
        kind = spec["model"]["uri"].rpartition("/")[2]
        spec = _merged(spec, {"lora": {"adapterUri": adapters.replace("{model}", kind)}})
    return {"apiVersion": "sftjob.dev/v1alpha1", "kind": "SFTJob", "metadata": {"name": "drawn"}, "spec": spec}


def _merged(one: Any, other: Any) -> Any:
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return other
    return {
        name: _merged(one[name], other[name])
        if name in one and name in other
        else (other if name in other else one)[name]
        for name in [*one, *(name for name in other if name not in one)]
    }
