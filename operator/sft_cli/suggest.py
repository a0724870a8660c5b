"""``sft plan --suggest``: with which strategy, over how many processes, a job fits its GPUs."""

from typing import Any

import yaml

from sft_api.failures import ExitCode
from sft_api.gpus import declared_gpu_memory
from sft_api.memory_needed import gibibytes
from sft_api.memory_plan import config_download
from sft_api.suggestions import Suggestion, suggestions
from sft_api.v1alpha1.job import SFTJob

from .console import document, result
from .errors import UserError
from .local_model import model_shape, why_uncounted

_NAMES = {"fsdp": "FSDP", "megatron": "Megatron-Core (experimental: docs/megatron.md)"}


def show_suggestions(job: SFTJob, output: str) -> int:
    """Print what to put into ``job`` so that it fits; the exit code is 10 where nothing does.

    Raises ``UserError`` where model or GPU is not known.
    """
    spec = job.spec
    shape, gpu = model_shape(spec), declared_gpu_memory(spec)
    if spec.compute.gpus_per_node == 0:
        raise UserError("--suggest reckons with GPUs, and the job asks for none: set spec.compute.gpusPerNode")
    if gpu is None:
        raise UserError("--suggest has to know the memory of a GPU: set spec.compute.gpuMemory (e.g. 80Gi)")
    if shape is None:
        name = f"--suggest has to know the layers of {spec.model.uri}"
        if reason := why_uncounted(spec):
            raise UserError(
                f"{name}, {reason}: try a strategy with training.dummyRun; the trainer looks at the layers themselves, "
                "and refuses what does not fit"
            )
        fetch = config_download(spec.model.uri) or "with --set model.uri=file:///folder, one that has a copy of it"
        raise UserError(
            f"{name}: have its config.json here ({fetch}), which helps where docs/memory.md has a formula for its "
            "type, or name a model of the table there"
        )
    found = suggestions(spec, shape, gpu)
    if output == "text":
        for name, each in found.items():
            _show(_NAMES[name], each, gpu)
    else:
        document({name: _document(each) for name, each in found.items()}, output)
    return 0 if any(isinstance(each, Suggestion) for each in found.values()) else int(ExitCode.CONFIG_ERROR)


def _document(found: Suggestion | str) -> dict[str, Any] | None:
    return None if isinstance(found, str) else {**found.sections, "memory": gibibytes(found.bytes)}


def _show(strategy: str, found: Suggestion | str, gpu: int) -> None:
    if isinstance(found, str):
        result(f"{strategy}: {found}")
        return
    result(f"{strategy}: {gibibytes(found.bytes)} of each GPU's {gibibytes(gpu)}", bold=True)
    text = yaml.safe_dump(found.sections, sort_keys=False, default_flow_style=None)
    result("\n".join(f"  {line}" for line in text.splitlines()))
