"""What the checkpoints of a run record besides tensors, and what it means to go on from there."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from sft_api.checkpoints import Manifest, RunState
from sft_api.megatron import ends_of
from sft_api.memory import offloads
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.megatron import MegatronSpec, megatron_of

from .figures import Figures
from .models import flash_attention
from .prepared import Prepared
from .topology import Topology


@dataclass(frozen=True)
class Facts:
    """What decides the numbers of a run besides its configuration."""

    environment: dict[str, str | int]
    data: dict[str, str]
    """Digest of the tokenised examples of every training source, by its place in the manifest."""
    base_digest: str
    """Of the model that is there."""
    companions: dict[str, str]
    """Digests of the files beside its weights, by name."""
    eval_data: dict[str, str]
    """Digest of the tokenised examples of every evaluation set, by its name: of what the run is judged by."""

    @classmethod
    def of(cls, config: TrainerConfig, prepared: Prepared, device: torch.device, topology: Topology) -> "Facts":
        return cls(
            environment_facts(
                device,
                topology.world_size,
                compiled=config.plan.compile,
                checkpointing=config.spec.training.activation_checkpointing,
                offloaded=offloads(config.spec),
                sequence=config.spec.sequence_parallel,
                shares=topology.data_parallel,
                reduced_once=config.plan.reduce_gradients == "oncePerStep" and topology.world_size > 1,
                replicas=topology.replicate,
                megatron=megatron_of(config.spec),
            ),
            {f"data.train[{index}]": source.digest[:16] for index, source in enumerate(prepared.train)},
            prepared.model.digest,
            prepared.companions,
            {name: source.digest[:16] for name, source in prepared.eval.items()},
        )


def run_state(config: TrainerConfig, facts: Facts, figures: Figures, *, updates: int, base_digest: str) -> RunState:
    """What the checkpoint of the step of ``figures`` records, besides tensors.

    ``base_digest`` is of the model that the run started from.
    """
    numbers = config.numbers()
    return RunState.model_validate(
        {
            **figures.record(),
            "updates": updates,
            "plan": config.plan.model_dump(mode="json"),
            "environment": facts.environment,
            "config_digest": numbers.digest,
            "numbers": numbers.as_record(),
            "base_digest": base_digest,
            "data": facts.data,
            "companions": facts.companions,
            "eval_data": facts.eval_data,
        }
    )


def evaluates_on_other_data(run: RunState, here: Facts) -> bool:
    """Whether losses of evaluations of now cannot be compared with those that ``run`` tells of."""
    return run.evaluated_on not in ("", RunState(eval_data=here.eval_data).evaluated_on)


def resume_warnings(manifest: Manifest, here: Facts, model_uri: str) -> list[str]:
    """What is not as it was when that checkpoint was made, in sentences for the user."""
    run, warnings = manifest.run, []
    if changed := changed_fields(_with_usual(_recorded(run, here)), _with_usual(here.environment)):
        warnings.append(f"resumed in another environment ({', '.join(changed)}): not equal to the last bit")
    if run.base_digest not in ("", here.base_digest):
        warnings.append(
            f"the model in {model_uri} is not the one that this run started from: its digest was "
            f"{run.base_digest[:16]} and is {here.base_digest[:16]}; all weights come from the "
            "checkpoint, config.json and tokenizer are those of now: pin model.uri to a commit (@revision)"
        )
    if changed := changed_fields((run.model_extra or {}).get("data", here.data), here.data):
        warnings.append(
            f"the data is not what it was at step {manifest.step}: digests of {', '.join(changed)}; only later steps "
            "see the rows of now: give the run another metadata.name to train all of it on them"
        )
    if evaluates_on_other_data(run, here):
        changed = changed_fields(run.eval_data, here.eval_data, "data.eval")
        warnings.append(
            f"the evaluation data is not what it was at step {manifest.step}: digests of {', '.join(changed)}; losses "
            "of before are compared with none of now: early stopping and the best checkpoint begin anew"
        )
    return warnings


_USUAL: dict[str, str | int] = {
    "attention": "PyTorch's",
    "compiled": "no",
    "cpuOffload": "no",
    "sequenceParallelDegree": 1,
    "bins": "dealt in order",
    "reduceGradients": "everyMicroBatch",
    "replicas": 1,
    "strategy": "fsdp",
}
"""What the facts of an environment are where it does not say them."""


def _with_usual(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {**_USUAL, **environment}


def _recorded(run: RunState, here: Facts) -> dict[str, Any]:
    """The facts of the environment of ``run``; of replicas an earlier version told in its plan alone, and with which
    transformers it ran not at all: nothing is said of that."""
    plan: dict[str, Any] = run.plan
    processes, shards = plan.get("processes", 0), plan.get("shardDegree", 0)
    told = {"replicas": processes // shards} if 0 < shards < processes else {}
    unknown = {name: value for name, value in here.environment.items() if name == "transformers"}
    return {**unknown, **told, **run.environment}


def environment_facts(
    device: torch.device,
    world_size: int,
    *,
    compiled: bool,
    checkpointing: str,
    offloaded: bool,
    sequence: int = 1,
    shares: int = 1,
    reduced_once: bool = False,
    replicas: int = 1,
    megatron: MegatronSpec | None = None,
) -> dict[str, str | int]:
    """What decides the last bits of the numbers: a resume is bit-equal only where all of it is the same."""
    on_gpu, kinds = device.type == "cuda", flash_attention.used()
    return {
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),  # what layers compute, and in which order
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}",
        "cpuCapability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "") if on_gpu else "yes",
        # Left out where it is not so: a checkpoint that says nothing of it was made without.
        **({"compiled": _compiled(checkpointing)} if compiled else {}),
        **({"attention": f"FlashAttention {version('flash-attn-4')}: {'; '.join(kinds)}"} if kinds else {}),
        # The norm is then added up in another order, and AdamW of a GPU is the kernel of its host.
        **({"cpuOffload": "yes"} if offloaded else {}),
        # Sums over tokens are those of other parts.
        **({"sequenceParallelDegree": sequence} if sequence > 1 else {}),
        # Sums over micro-batches come before those over processes.
        **({"reduceGradients": "oncePerStep"} if reduced_once else {}),
        # They are first those of the processes that share a replica.
        **({"replicas": replicas} if replicas > 1 else {}),
        **({"strategy": _in_words(megatron)} if megatron else {}),
        # Which process computes which bins: an earlier version dealt them out in their order, and said nothing of it.
        **({"bins": "dealt by cost"} if shares > 1 else {}),
    }


def _compiled(checkpointing: str) -> str:
    # What a layer computes again is the compiler's to fuse, and rounded otherwise; without it that changes nothing.
    return "yes" if checkpointing == "none" else f"yes, {checkpointing} activation checkpointing"


def _in_words(megatron: MegatronSpec) -> str:
    degrees = (megatron.tensor_parallel_degree, megatron.pipeline_parallel_degree, megatron.expert_parallel_degree)
    words = [f"{name}{degree}" for name, degree in zip(("TP", "PP", "EP"), degrees, strict=True)]
    chunks = megatron.virtual_pipeline_parallel_degree
    # Norms are added up stage by stage.
    words += [f"VPP{chunks}"] if chunks > 1 else []
    words += [f"{which}{layers}" for which, layers in zip(("first", "last"), ends_of(megatron), strict=True) if layers]
    words += ["SP"] if megatron.shares_tokens else []
    # Left out where it is not so: an earlier version had none.
    words += [f"CP{megatron.context_parallel_degree}"] if megatron.context_parallel_degree > 1 else []
    return " ".join(["megatron", *words])


def changed_fields(before: Any, now: Any, path: str = "") -> list[str]:
    """Paths at which two nested dictionaries differ, each with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            change
            for key in sorted({*before, *now})
            for change in changed_fields(before.get(key), now.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if before == now else [f"{path}: {before!r} -> {now!r}"]


def changed_companions(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between the files beside the weights as a checkpoint tells of them and those of ``now``."""
    # Checkpoints of earlier versions do not tell of this one, also where it was there.
    unknown = {"chat_template.json"} - recorded.keys()
    return changed_fields(dict(recorded), {name: digest for name, digest in now.items() if name not in unknown})
