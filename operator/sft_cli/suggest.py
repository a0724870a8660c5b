"""``sft plan --suggest``: with which strategy, over how many processes, a job fits its GPUs."""

import json

import yaml

from sft_api.failures import ExitCode
from sft_api.gpus import declared_gpu_memory
from sft_api.memory_plan import gibibytes
from sft_api.suggestions import Suggestion, suggestions
from sft_api.v1alpha1.job import SFTJob

from .console import result
from .errors import UserError
from .local_model import model_shape
from .words import counted

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
        raise UserError("--suggest has to know the memory of a GPU: set spec.compute.gpuMemory (80Gi)")
    if shape is None:
        raise UserError(
            f"--suggest has to know the layers of {spec.model.uri}: fetch its config.json (hf download), or name a "
            "model of the table in docs/memory.md"
        )
    found = suggestions(spec, shape, gpu)
    if output == "text":
        for name, each in found.items():
            _show(_NAMES[name], each, gpu, spec.compute.processes)
    else:
        document = {name: each and {**each.sections, "memory": gibibytes(each.bytes)} for name, each in found.items()}
        as_yaml = yaml.safe_dump(document, sort_keys=False).rstrip()
        result(json.dumps(document, indent=2) if output == "json" else as_yaml)
    return 0 if any(found.values()) else int(ExitCode.CONFIG_ERROR)


def _show(strategy: str, found: Suggestion | None, gpu: int, processes: int) -> None:
    if found is None:
        here = counted(processes, "GPU")
        result(
            f"{strategy}: no shape of {here} has room for it and, of stages, as many micro-batches a step "
            "(training.globalBatchTokens); or it does not train such a job (sft validate)"
        )
        return
    result(f"{strategy}: {gibibytes(found.bytes)} of each GPU's {gibibytes(gpu)}", bold=True)
    text = yaml.safe_dump(found.sections, sort_keys=False, default_flow_style=None)
    result("\n".join(f"  {line}" for line in text.splitlines()))
