"""What this machine knows of a job's model: its shape, by the config.json of a folder or of the hub's cache."""

import os
from pathlib import Path

from sft_api.deletion import deletion_warnings
from sft_api.gpus import declared_gpu_memory
from sft_api.known_models import known_shape
from sft_api.layers import linear_of
from sft_api.megatron import config_problem
from sft_api.memory_plan import Fit, judge, staging_warning
from sft_api.model_config import LARGEST_SIZE, content_of_config, of_text, shape_of, uncounted, wrong_sizes
from sft_api.model_shape import ModelShape
from sft_api.peft_files import FIELD as ADAPTER_FIELD
from sft_api.peft_files import FILES, AdapterFilesError, PeftFiles
from sft_api.quantised_files import refused_by_config
from sft_api.sequence_parallel import layers_problem
from sft_api.spec_uris import uris_of
from sft_api.surprises import surprises
from sft_api.v1alpha1.job import SFTJobSpec
from sft_api.v1alpha1.megatron import megatron_of
from sft_api.v1alpha1.quantities import quantity_value
from sft_api.v1alpha1.status import PlanStatus

from .files import absent, path_of
from .hub_folders import HUB_LOGINS, hub_cache

_HUB = "hf://"


def model_shape(spec: SFTJobSpec) -> ModelShape | None:
    """The shape of the model of ``spec``: as its config says it, where that is here, or by the table; else None."""
    config = _config(spec.model.uri)
    return known_shape(spec.model.uri) if config is None else shape_of(content_of_config(config.parent))


def why_uncounted(spec: SFTJobSpec) -> str:
    """Why the model of ``spec`` has no shape although its config.json is here (``uncounted``); else empty."""
    config = _config(spec.model.uri)
    return uncounted(content_of_config(config.parent)) if config is not None and config.is_file() else ""


def fit_of(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None) -> Fit:
    """``judge``, and what it cannot see where the model's config.json is here, of a model without a shape."""
    config = _config(spec.model.uri)
    content = {} if config is None else content_of_config(config.parent)
    problem = layers_problem(of_text(content).get("model_type"), spec.sequence_parallel)
    if megatron_of(spec) and content.get("model_type"):
        problem = config_problem(content)
    problem = problem or refused_by_config(content)
    return Fit(refused=problem) if problem else judge(spec, plan, shape=shape)


def _profile_warning(spec: SFTJobSpec) -> str:
    """That nobody knows here whether it fits, of a job whose GPUs a profile of the platform names; else empty."""
    profile = spec.compute.pod_profile
    if profile is None or spec.compute.gpus_per_node == 0 or declared_gpu_memory(spec) is not None:
        return ""
    return (
        f"compute.podProfile: {profile} is the platform's, so how large its GPUs are is not known here: give "
        "compute.gpuMemory (e.g. 80Gi) to see here, too, whether the model fits"
    )


def _upload_warning(spec: SFTJobSpec) -> str:
    """That pods have no token to upload with, of a job that names none and is not one of this machine; else empty."""
    hub = spec.export.hub
    named = spec.model.token_secret_ref is not None or any(each.name in HUB_LOGINS for each in spec.compute.env)
    if hub is None or named or spec.training.dummy_run or path_of(spec.model.uri):
        return ""
    return (
        f"export.hub: on a cluster nobody may write to {hub.repository} without a token: name its Secret in "
        "model.tokenSecretRef, unless the platform gives pods HF_TOKEN"
    )


def _sizes_warning(uri: str) -> str:
    config = _config(uri)
    wrong = {} if config is None else wrong_sizes(content_of_config(config.parent))
    if not wrong:
        return ""
    from .live import shortened  # brings rich along, which other commands do without

    words = ", ".join(f"{name} = {shortened(repr(value), 40)}" for name, value in wrong.items())
    return (
        f"{config} has {words}: sizes are numbers from 1 to {LARGEST_SIZE}, and a token is sent to at most as many "
        "experts as there are; memory and heads are not reckoned"
    )


def warnings_of(spec: SFTJobSpec, shape: ModelShape | None, fit: Fit) -> list[str]:
    """What is valid and may surprise, as far as this machine can tell; ``shape`` is that of the model, if known."""
    found = (
        *deletion_warnings(spec),
        _absent_warning(spec),
        _absent_data_warning(spec),
        _adapters_warning(spec, shape),
        *surprises(spec, shape),
        _sizes_warning(spec.model.uri),
        fit.warning,
        _staging_warning(spec, shape),
        _profile_warning(spec),
        _upload_warning(spec),
    )
    return [text for text in found if text]


def _staging_warning(spec: SFTJobSpec, shape: ModelShape | None) -> str:
    """``staging_warning``, as far as ``spec`` says how much memory pods have."""
    resources = spec.compute.resources
    asked = resources.limits.get("memory", resources.requests.get("memory"))
    size = quantity_value(asked) if asked is not None and spec.compute.gpus_per_node else None
    return staging_warning(spec, shape, None if size is None else int(size))


def _absent_warning(spec: SFTJobSpec) -> str:
    """What to say of a model in a folder that is not on this machine; it may be on the one for which ``spec`` is."""
    told = _told_absent(spec, "model.", "lora.")
    return told and f"{told}: right where the run has it, and what depends on the model is not looked at here"


def _absent_data_warning(spec: SFTJobSpec) -> str:
    """What to say of data in files that are not on this machine; they may be on the one for which ``spec`` is."""
    told = "" if spec.training.dummy_run else _told_absent(spec, "data.")
    hint = "; a pattern is no path: name the folder, all of which is read" if {*"*?"} & {*told} else ""
    return told and f"{told}: right where the run has it{hint}"


def _told_absent(spec: SFTJobSpec, *blocks: str) -> str:
    """What of ``blocks`` names files that are not on this machine; empty where nothing does."""
    paths = absent({path: uri for path, uri in uris_of(spec).items() if path.startswith(blocks)})
    return "; ".join(f"{field}: there is no {path} on this machine" for field, path in paths.items())


def _adapters_warning(spec: SFTJobSpec, shape: ModelShape | None) -> str:
    """What would have a run refused that begins with adapters, as far as these are on this machine; else empty."""
    lora = spec.lora
    if lora is None or lora.adapter_uri is None:
        return ""
    # The hub's cache may have one of them, where somebody has looked at that alone.
    file, *others = (_config(lora.adapter_uri, name) for name in FILES)
    if file is None or None in others or not file.parent.is_dir():
        return ""
    layers = (None, None) if shape is None else linear_of(shape, spec)
    try:
        files = PeftFiles.read(file.parent)
        problem = files.problem(lora, *layers) or files.other_base(spec.model.uri)
    except AdapterFilesError as error:
        problem = str(error)
    return f"{ADAPTER_FIELD}: {problem}" if problem else ""


def _config(uri: str, file: str = "config.json") -> Path | None:
    if (folder := path_of(uri)) is not None:
        return folder / file
    if not uri.startswith(_HUB):
        return None
    name, _, revision = uri.removeprefix(_HUB).partition("@")
    cached = hub_cache(os.environ) / f"models--{name.replace('/', '--')}"
    try:
        commit = (cached / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    path = cached / "snapshots" / commit / file
    return path if commit and path.is_file() else None
