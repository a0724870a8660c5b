"""What was probably meant by a value of the wrong type, in the words of the manifest.

The API server names the type and no more: what it may say itself stands with the rules, as their near misses.
"""

import difflib
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from sft_api.openapi import Schema

from .kubernetes_yaml import plain_scalar

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART_OF_DURATION = r"(\d+(?:[.]\d+)?)([smhd])"
_DURATION = re.compile(rf"({_PART_OF_DURATION})+", re.ASCII)


def remedy(error: ErrorDetails, root: Schema) -> str:
    """What to write instead, as the end of a sentence; nothing when that is not known.

    ``root`` is the schema of the whole manifest.
    """
    kind, value, location = error["type"], error["input"], error["loc"]
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f"; write {_parameters(value)}" if location[-1] == "parameters" else "; put it in quotes"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        if kind == "int_type" and "Seconds" in str(location[-1]) and _DURATION.fullmatch(value):
            return f"; write {seconds(value)}"
        return "" if isinstance(plain_scalar(value), str) else "; leave the quotes out"
    if kind == "literal_error" and isinstance(value, str | int):
        choices = [str(choice) for choice in schema_at(root, location)["enum"]]
        if _is_in_8_bits(value) and "int8" not in choices:
            return _did_you_mean(_MOMENTS_IN_8_BITS)
        if isinstance(value, bool):  # none and false are one word to many, and on is what they know best
            return _did_you_mean(next((choice for choice in choices if choice in _OF_BOOL[value]), None))
        known = "int8" if _is_in_8_bits(value) else _OTHER_VALUES.get(bare(str(value)))
        return _did_you_mean(known if known in choices else closest(str(value), choices))
    if kind == "list_type":
        return _as_list(value, schema_at(root, location)["items"])
    if kind in ("model_type", "model_attributes_type") and isinstance(value, str):
        if (meant := _optimizer_meant(value)) is not None:
            return _did_you_mean(meant)
        return _as_map(value, schema_at(root, location).get("properties", {}), location)
    if kind in ("model_type", "model_attributes_type") and isinstance(value, bool):
        return _instead_of_switch(schema_at(root, location), on=value)
    return ""


def seconds(duration: str) -> int:
    """The seconds in ``10m``, ``1h30m`` or ``1.5h``; a part of one counts as one."""
    parts = re.findall(_PART_OF_DURATION, duration, re.ASCII)
    return math.ceil(sum(Fraction(number) * _SECONDS[unit] for number, unit in parts))


def absolute_path(value: Any) -> str:
    """The URI of ``value`` on this machine, where it is a path that says something only here."""
    if not isinstance(value, str):
        return ""
    value = value.removeprefix("file://")
    if ":" in value or value.startswith("/"):
        return ""
    path = Path(value).expanduser()
    if value.startswith((".", "~")) or path.exists():
        with suppress(FileNotFoundError):  # the current folder is gone
            return f" (here file://{Path.cwd().joinpath(path).resolve()})"
    return ""


def _parameters(number: float) -> str:
    """As ``model.parameters`` has it: 8000000000, and 8 too, which no model would be content with, are 8B."""
    billions = number / 1e9 if number >= 1e6 else number
    return f"{billions:.4f}".rstrip("0").rstrip(".") + "B"


def _as_list(value: Any, items: Schema) -> str:
    if isinstance(value, dict):
        return "; begin the entry with a dash"
    if items.get("type") == "string":
        return f"; write [{json.dumps(value)}]"
    if items.get("required") == ["uri"] and isinstance(value, str):
        return f"; write [{{uri: {json.dumps(value)}}}]"
    return ""


def _as_map(value: str, fields: dict[str, Schema], location: tuple[int | str, ...]) -> str:
    """What to write where one of ``fields`` is what ``value`` is about, or is called so; else nothing."""
    if fields.get(value, {}).get("type") == "object":
        return f"; write {{{value}: {{}}}}"
    if named := next((name for name in ("uri", "repository") if name in fields), None):
        return f"; write {{{named}: {json.dumps(value)}}}"
    if location and str(location[-1]).endswith("SecretRef") and "name" in fields:
        return f"; write {{name: {json.dumps(value)}}}"
    kinds = ((name, closest(value, fields.get(name, {}).get("enum", ()))) for name in ("type", "policy"))
    return next((f"; write {{{name}: {kind}}}" for name, kind in kinds if kind), "")


def _instead_of_switch(schema: Schema, *, on: bool) -> str:
    """What to write where a map of ``schema`` was to be switched ``on``, or off; nothing where that is not known."""
    if on:
        return "" if schema.get("required") else "; write {} for its defaults"
    if "default" not in schema:
        return "; leave it out"
    # Left out it is as its defaults say, which is not off: the run would resume, and export its model.
    fields = schema["properties"]
    if "never" in fields.get("policy", {}).get("enum", ()):
        return "; write {policy: never}"
    return "; write {atEnd: false}" if "atEnd" in fields else ""


def _did_you_mean(*names: str | None) -> str:
    meant = " or ".join(filter(None, names))
    return f"; did you mean {meant}?" if meant else ""


_OF_BOOL = {True: ("ffd", "full"), False: ("none", "never")}
"""What is meant by true and false where a word has to be chosen."""

_OTHER_VALUES = {
    "8bit": "int8",
    "uint8": "int8",
    "4": "nf4",
    "4bit": "nf4",
    "int4": "nf4",
    "bnb": "nf4",
    "bitsandbytes": "nf4",
    "qlora": "nf4",
    "float32": "fp32",
    "nll": "crossEntropy",
    "chunkednll": "crossEntropy",
    "ce": "crossEntropy",
    "adamwtorch": "adamw",
    "adamwtorchfused": "adamw",
    "cosinewithminlr": "cosine",
    "wsd": "warmupStableDecay",
}
"""What other tools call a value of ours that looks different."""

_ADAMW_IN_8_BITS = re.compile(r"(paged)?adamw(bnb|torch)?8bit", re.ASCII)
_MOMENTS_IN_8_BITS = "spec.training.optimizer.stateDtype: int8"


def _is_in_8_bits(value: Any) -> bool:
    """Whether ``value`` is what other tools call an AdamW whose moments have 8 bits."""
    return isinstance(value, str) and _ADAMW_IN_8_BITS.fullmatch(bare(value)) is not None


_MUON = "spec.training.optimizer.type: muon"


def _optimizer_meant(value: Any) -> str | None:
    """The field, and its value, for what other tools call ``value``, an optimizer; None of any other."""
    if _is_in_8_bits(value):
        return _MOMENTS_IN_8_BITS
    return _MUON if isinstance(value, str) and bare(value) == "muon" else None


_PACKED = "lora.basePrecision: nf4"
_REPOSITORY = "export.hub.repository"
_SCALED_BY_ROOT = "lora.alpha: alpha times the root of the rank"

_OTHER_NAMES = {
    **dict.fromkeys(("tokens", "addtokens", "newtokens", "extratokens", "resizevocab"), "model.addedTokens"),
    **dict.fromkeys(("additionaltokens", "resizetokenembeddings"), "model.addedTokens"),
    **dict.fromkeys(("trainabletokenindices", "pefttrainabletokenindices", "tokenindices"), "lora.trainableTokens"),
    **dict.fromkeys(("trainabletoken", "trainedtokens", "trainablerows"), "lora.trainableTokens"),
    **dict.fromkeys(("specialtokens", "addspecialtokens", "newspecialtokens"), "model.addedSpecialTokens"),
    **dict.fromkeys(("additionalspecialtokens", "extraspecialtokens", "controltokens"), "model.addedSpecialTokens"),
    "lr": "training.optimizer.learningRate",
    "muonlr": "training.optimizer.learningRate",
    "learningrate": "training.optimizer.learningRate",
    "numtrainepochs": "training.epochs",
    "numepochs": "training.epochs",
    "maxsteps": "training.steps",
    "maxseqlength": "data.maxLength",
    "maxseqlen": "data.maxLength",
    "sequencelen": "data.maxLength",
    "cutofflen": "data.maxLength",
    "samplepacking": "data.packing",
    "truncation": "data.overlong",
    "maxsamples": "data.train[].split",
    "valsetsize": "data.heldOut.fraction",
    "valsize": "data.heldOut.fraction",
    "maskhistory": "data.trainOn",
    "assistantonlyloss": "data.trainOn",
    "completiononlyloss": "data.trainOn",
    "trainoninputs": "data.trainOn",
    "optim": "training.optimizer",
    "muon": "training.optimizer.type: muon",
    "usemuon": "training.optimizer.type: muon",
    "batchsize": "training.globalBatchSize",
    "trainbatchsize": "training.globalBatchSize",
    "perdevicetrainbatchsize": "training.microBatchSize",
    "gradientaccumulationsteps": "training.globalBatchSize",
    "gradientcheckpointing": "training.activationCheckpointing",
    "bf16": "training.precision",
    "purebf16": "training.parameterDtype: bf16",
    "fp16": "training.precision",
    "dtype": "training.precision",
    "torchdtype": "training.precision",
    "beta1": "training.optimizer.betas",
    "beta2": "training.optimizer.betas",
    "adambeta1": "training.optimizer.betas",
    "adambeta2": "training.optimizer.betas",
    "adamepsilon": "training.optimizer.eps",
    "numdecaysteps": "training.schedule.decaySteps",
    "lrscheduler": "training.schedule.type",
    "lrschedulertype": "training.schedule.type",
    "numcycles": "training.schedule.cycles",
    "lrschedulerkwargs": "training.schedule",
    "losstype": "training.loss",
    "usedftloss": "training.loss: dft",
    "usedynamicfinetuning": "training.loss: dft",
    "labelsmoothingfactor": "training.labelSmoothing",
    "savesteps": "checkpoint.everySteps",
    "savestrategy": "checkpoint.everyEpochs",
    "savesperepoch": "checkpoint.everyEpochs: 1",
    "savetotallimit": "checkpoint.keep.last",
    "evalsteps": "training.evaluation.everySteps",
    "evalstrategy": "training.evaluation.everyEpochs",
    "evaluationstrategy": "training.evaluation.everyEpochs",
    "evalsperepoch": "training.evaluation.everyEpochs: 0.25",
    "earlystoppingpatience": "training.evaluation.earlyStopping.patience",
    "loadbestmodelatend": "export.checkpoint: best",
    "push": "export.hub",
    "pushtohub": "export.hub",
    "upload": "export.hub",
    "uploadtohub": "export.hub",
    "huggingface": "export.hub",
    "hubmodelid": _REPOSITORY,
    "pushtohubmodelid": _REPOSITORY,
    "exporthubmodelid": _REPOSITORY,
    "repoid": _REPOSITORY,
    "export.name": _REPOSITORY,
    "export.repo": _REPOSITORY,
    "hubstrategy": "export.hub",
    "hubalwayspush": "export.hub",
    "hubprivaterepo": "export.hub.private",
    "hubrevision": "export.hub.revision",
    "hubtoken": "model.tokenSecretRef",
    "hftoken": "model.tokenSecretRef",
    "hfuseauthtoken": "model.tokenSecretRef",
    "token": "model.tokenSecretRef",
    "gradientclipping": "training.optimizer.maxGradNorm",
    "everyminutes": "checkpoint.everySeconds",
    "outputdir": "checkpoint.uri",
    "resumefromcheckpoint": "checkpoint.resume.policy",
    "basemodel": "model.uri",
    "modelnameorpath": "model.uri",
    "dataset": "data.train",
    "datasets": "data.train",
    "gpus": "compute.gpusPerNode",
    "numgpus": "compute.gpusPerNode",
    "replicas": "compute.nodes",
    "cpu": "compute.resources.requests",
    "memory": "compute.resources.requests",
    "resourcespernode": "compute.resources",
    "runtimeref": "compute.podProfile",
    "trainingruntime": "compute.podProfile",
    "hardwareprofile": "compute.podProfile",
    "resourceflavor": "compute.podProfile",
    "nodepool": "compute.podProfile",
    "podtemplate": "compute.podProfile",
    "volumes": "compute.podProfile",
    "volumemounts": "compute.podProfile",
    "sidecars": "compute.podProfile",
    "initcontainers": "compute.podProfile",
    "affinity": "compute.podProfile",
    "nodeaffinity": "compute.podProfile",
    "podaffinity": "compute.podProfile",
    "podantiaffinity": "compute.podProfile",
    "topologyspreadconstraints": "compute.podProfile",
    "podspecoverrides": "compute.podProfile",
    "podtemplateoverrides": "compute.podProfile",
    "resourceclaims": "compute.podProfile",
    "schedulername": "compute.podProfile",
    "securitycontext": "compute.podProfile",
    "hostnetwork": "compute.podProfile",
    "backofflimit": "runPolicy.maxRestarts",
    "adapter": "lora",
    "adapternameorpath": "lora.adapterUri",
    "adapterpath": "lora.adapterUri",
    "loramodeldir": "lora.adapterUri",
    "finetuningtype": "lora",
    "peft": "lora",
    "peftconfig": "lora",
    "usepeft": "lora",
    "uselora": "lora",
    "lorar": "lora.rank",
    "lorarank": "lora.rank",
    "loraalpha": "lora.alpha",
    "loradropout": "lora.dropout",
    "userslora": _SCALED_BY_ROOT,
    "peftuserslora": _SCALED_BY_ROOT,
    "usedora": "lora.useDora",
    "peftusedora": "lora.useDora",
    "lorapluslrratio": "lora.learningRateRatio",
    "loratarget": "lora.targetModules",
    "loratargetlinear": "lora.targetModules",
    "loratargetmodules": "lora.targetModules",
    "loratargetparameters": "lora.targetModules",
    "targetparameters": "lora.targetModules",
    "loramodulestosave": "training.trainableModules",
    "modulestosave": "training.trainableModules",
    "qlora": _PACKED,
    "bnb": _PACKED,
    "bnb4bitquanttype": _PACKED,
    "bnbconfig": _PACKED,
    "loadin4bit": _PACKED,
    "quantization": _PACKED,
    "quantizationbit": _PACKED,
    "quantizationconfig": _PACKED,
    "quantizebase": _PACKED,
    "bnb4bitcomputedtype": "training.precision",
    "loadin8bit": "lora.basePrecision",
    **dict.fromkeys(("paddingfree", "neatpacking", "packed"), "data.packing"),
    "excesslengthstrategy": "data.overlong",
    **dict.fromkeys(("shuffle", "shuffletraindata"), "data.sampler"),
    **dict.fromkeys(("numproc", "datasetnumproc", "preprocessingnumworkers", "datasetprocesses"), "data.workers"),
    **dict.fromkeys(("evaldataset", "evaldatasets", "datasetval", "testdatasets", "validation"), "data.eval"),
    "datasettextfield": "data.train[].columns",
    **dict.fromkeys(("interleaveprobs", "mixstrategy"), "data.train[].weight"),
    "formatting": "data.train[].format",
    **dict.fromkeys(("template", "chattemplatepath", "chattemplatejinja"), "model.chatTemplate"),
    "maxstepsperepoch": "training.steps",
    "enableactivationcheckpointing": "training.activationCheckpointing",
    **dict.fromkeys(("reportto", "wandb", "usewandb", "wandbproject", "mlflow"), "training.callbacks"),
    "torchcompile": "training.compile",
    "clipgradnorm": "training.optimizer.maxGradNorm",
    "cosineminlrratio": "training.schedule.minRatio",
    "numwarmupsteps": "training.schedule.warmupSteps",
    "runvaleverynsteps": "training.evaluation.everySteps",
    **dict.fromkeys(("unfrozenparameters", "freezetrainablelayers", "additionaltarget"), "training.trainableModules"),
    **dict.fromkeys(("loraattnmodules", "applyloratomlp"), "lora.targetModules"),
    **dict.fromkeys(("deepspeed", "deepspeedconfig", "zero", "zerostage", "fsdpconfig", "ddp"), "strategy.fsdp"),
    "optimizerinbwd": "strategy.fsdp.cpuOffload",
    "contextparallelsize": "strategy.fsdp.sequenceParallelDegree",
    **dict.fromkeys(("dpshardsize", "dpreplicatesize"), "strategy.fsdp.shardDegree"),
    **dict.fromkeys(("model.revision", "modelrevision"), "model.uri: hf://org/name@revision"),
    "train.revision": "data.train[].uri: hf://org/name@revision",
    "eval.revision": "data.eval[].uri: hf://org/name@revision",
    "evaluation.strategy": "training.evaluation.everyEpochs",
    "lora.adapter": "lora.adapterUri",
    "s3.secret": "checkpoint.s3.credentialsSecretRef",
    "export.merge": "export.mergeAdapter",
}
"""What other tools call a field of ours, some with the value that is meant; behind a dot what means it in that block
alone."""

_NEEDLESS = {
    **dict.fromkeys(("attnimplementation", "flashattention", "flashattn", "useflashattention"), "the kernel is chosen"),
    **dict.fromkeys(("flashattention2", "useflashattention2", "sdpattention"), "the kernel is chosen"),
    **dict.fromkeys(("useliger", "useligerkernel", "enableligerkernel"), "kernels are chosen"),
    "loggingsteps": "every step is logged",
    "trustremotecode": "no code of models is run",
}
"""What other tools have to be told, and why it is left out here."""

_NAMES_HERE = {
    "path": ("uri",),
    # Of a data set the hub's library, and who takes it from there, calls its configuration so.
    "name": ("uri", "subset", "repository"),
    "config": ("subset",),
    "configname": ("subset",),
    "nameorpath": ("uri",),
    "dir": ("uri",),
    "repo": ("uri", "repository"),
    "repoid": ("repository",),
    "modelid": ("repository",),
    "uri": ("repository",),
    "branch": ("revision",),
    "visibility": ("private",),
    "public": ("private",),
    "dataset": ("uri",),
    "type": ("format",),
    "ropescaling": ("rope_parameters",),
    "r": ("rank",),
}
"""What is called so in many places: it means fields of the same object, where that has them, and none elsewhere."""


_OVERRIDES = frozenset({"configOverrides", "transformerConfigOverrides"})
"""Whose fields are few of those that people know by their names from config.json, and from Megatron-Core."""


def meant_field(location: tuple[int | str, ...], root: Schema, value: Any = None) -> str:
    """What was meant by the unknown field at ``location`` that has this ``value``, as the end of a sentence.

    A name known from other tools goes before one that looks alike: ``save_steps`` is no way of writing ``steps``.
    """
    if (meant := _optimizer_meant(value)) is not None:
        return _did_you_mean(meant)
    *parents, last = location
    name = bare(str(last))
    block = next((part for part in reversed(parents) if isinstance(part, str)), "")
    if (meant := _OTHER_NAMES.get(f"{block}.{name}")) is not None:
        return _did_you_mean(f"spec.{meant}")
    if name in _NEEDLESS:
        return f"; leave it out: {_NEEDLESS[name]}"
    beside = schema_at(root, tuple(parents)).get("properties", {})
    if here := [field for field in _NAMES_HERE.get(name, ()) if field in beside]:
        return _did_you_mean(*here)
    if name in _OTHER_NAMES:
        return _did_you_mean(f"spec.{_OTHER_NAMES[name]}")
    outermost = parents == ["spec"]
    paths = (path for block in ("metadata", "spec") for path in field_paths(root["properties"][block], block))
    elsewhere = [path for path in paths if name and bare(path.rpartition(".")[2]) == name]
    if (outermost or not parents) and elsewhere:  # it lacks where it stands, or its indentation
        return _did_you_mean(*sorted(elsewhere, key=lambda path: path.count("."))[:3])
    if close := closest(name, [*beside, *(["metadata"] if outermost else [])]):
        return _did_you_mean(close, *(elsewhere if len(elsewhere) == 1 and bare(close) != name else ()))
    if name in _NAMES_HERE and not outermost:
        return ""
    if not elsewhere and (outermost or not _OVERRIDES.isdisjoint(parents)):
        return f"; allowed are {', '.join(beside)}"
    return _did_you_mean(*elsewhere) if len(elsewhere) <= 2 else ""


def closest(name: str, candidates: Any) -> str | None:
    """The candidate that ``name`` most resembles, case and underscores aside."""
    stripped = {bare(candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(bare(name), stripped, n=1, cutoff=0.65)
    return stripped[found[0]] if found else None


def bare(name: str) -> str:
    """``name`` without what differs between ways of writing one name."""
    return name.replace("_", "").replace("-", "").lower()


def schema_at(schema: Schema, location: tuple[int | str, ...]) -> Schema:
    """The part of ``schema`` at ``location``."""
    for part in location:
        if isinstance(part, int):
            schema = schema["items"]
        else:
            schema = schema.get("properties", {}).get(part) or schema.get("additionalProperties", {})
    return schema


def field_paths(schema: Schema, path: str) -> Iterator[str]:
    """The paths of all fields below ``path``, whose schema is ``schema``."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from field_paths(field.get("items", field), f"{path}.{name}{'[]' if 'items' in field else ''}")
