"""Pure planning: from a spec to the numbers the run uses where the spec leaves them open."""

from .batch import batch_of
from .goodput import Devices
from .gpus import declared_gpu_memory
from .known_models import known_shape
from .memory_plan import fits_a_node, memory_status
from .model_shape import ModelShape
from .traffic import with_traffic
from .v1alpha1.job import SFTJobSpec, drops_attention
from .v1alpha1.megatron import megatron_of
from .v1alpha1.status import PlanStatus

DEFAULT_LEARNING_RATE = 1e-5
DEFAULT_LORA_LEARNING_RATE = 1e-4
"""Adapters begin at 0 and are small: they want larger steps than weights that were trained for long."""
DEFAULT_WARMUP_RATIO = 0.03
DEFAULT_DECAY_RATIO = 0.1
"""Of schedules whose rate is stable before."""

Plan = PlanStatus


def devices_of(spec: SFTJobSpec) -> Devices:
    """What the time of ``spec`` is counted in: its GPUs, or its processes where it has none."""
    compute = spec.compute
    if compute.gpus_per_node:
        return Devices("GPUs", compute.gpus_per_node, compute.nodes)
    return Devices("Processes", compute.effective_processes_per_node, compute.nodes)


def make_plan(
    spec: SFTJobSpec,
    *,
    processes: int | None = None,
    gpu_memory: int | None = None,
    shape: ModelShape | None = None,
    uncounted: str = "",
) -> Plan:
    """The plan of ``spec``: the same in the operator, ``sft run`` and after any restart.

    With packing and no explicit batch, one step holds at least 65,536 tokens and one full micro-batch on every
    process; without packing 32 examples, rounded up to the processes. Those that compute on the same micro-batches are
    one of them here. See docs/reference for every field. ``processes``, where they differ from what ``spec`` asks for,
    change how a step is shared out and never the step. ``gpu_memory`` (bytes) is that of GPUs of which ``spec`` does
    not say it: what the manifest leaves open of ``shard_degree``, ``reshard_after_forward`` and ``reduce_gradients``
    follows from it too, so that a plan is the same wherever that is known alike; ``sft plan`` knows none of a chart's.
    ``shape`` is that of the model, where this machine has it, and ``uncounted`` why it has none
    (``model_shape.uncounted``): what is shown of memory follows from them, and nothing else. Raises ``ValueError`` for
    ``processes`` that are no whole number of shares.
    """
    declared = spec.compute.processes
    processes = processes or declared
    if processes % (together := spec.processes_a_share):
        raise ValueError(f"{together} processes have a share of a step together: {processes} are no multiple of that")
    shares, batch = processes // spec.processes_a_share, batch_of(spec)
    training = spec.training
    steps = training.dummy_run.steps if training.dummy_run else training.steps
    megatron = megatron_of(spec)

    plan = Plan(
        processes=processes,
        data_parallel=shares,
        sequence_parallel=megatron.context_parallel_degree if megatron else spec.sequence_parallel,
        tensor_parallel=megatron.tensor_parallel_degree if megatron else 1,
        pipeline_parallel=megatron.pipeline_parallel_degree if megatron else 1,
        expert_parallel=megatron.expert_parallel_degree if megatron else 1,
        shard_degree=spec.fsdp.shard_degree or processes,
        precision=spec.precision,
        compile=_compiles(spec, known_shape(spec.model.uri)),
        learning_rate=training.optimizer.learning_rate
        or (DEFAULT_LORA_LEARNING_RATE if spec.lora else DEFAULT_LEARNING_RATE),
        global_batch_size=batch.examples,
        global_batch_tokens=batch.tokens,
        max_tokens_per_micro_batch=batch.micro_batch_tokens,
        gradient_accumulation=batch.each(shares),
        total_steps=steps,
        epochs=None if steps else (training.epochs or 1),
    )
    gpu, known = declared_gpu_memory(spec) or gpu_memory, known_shape(spec.model.uri)
    if processes == declared and spec.fsdp.shard_degree is None and fits_a_node(spec, plan, known, gpu):
        plan = plan.model_copy(update={"shard_degree": spec.compute.effective_processes_per_node})
    plan = with_traffic(spec, plan, known, gpu)
    memory = memory_status(spec, plan, shape or known, gpu, uncounted)
    return plan.model_copy(update={"memory": memory})


def as_asked(plan: Plan, spec: SFTJobSpec) -> Plan:
    """``plan`` with what one of before it said what becomes of layers means: that they are compiled, and kept gathered
    after their forward pass, where ``spec`` asks for it."""
    asked = {
        "compile": spec.training.compile is True,
        "reshard_after_forward": spec.fsdp.reshard_after_forward is not False,
    }
    untold = {field: value for field, value in asked.items() if field not in plan.model_fields_set}
    return plan.model_copy(update=untold) if untold else plan


def _compiles(spec: SFTJobSpec, shape: ModelShape | None) -> bool:
    """Whether layers are compiled: as the manifest says, else where steps become so much faster that a slower start is
    made up for within minutes (docs/benchmarks.md), which is on GPUs.

    Not where it is known that it cannot be done, nor of experts, whose compiled layers nobody has seen on a GPU. What
    only the trainer sees, the model and the image, may rule it out.
    """
    training = spec.training
    if training.compile is not None:
        return training.compile
    if not spec.compute.gpus_per_node or training.precision == "fp32" or megatron_of(spec) is not None:
        return False
    return not drops_attention(spec) and not (shape is not None and shape.experts)


def warmup_steps(spec: SFTJobSpec, total_steps: int) -> int:
    """Steps of linear warm-up of a run of ``total_steps``."""
    schedule = spec.training.schedule
    if schedule.type == "constant":
        return 0
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    ratio = DEFAULT_WARMUP_RATIO if schedule.warmup_ratio is None else schedule.warmup_ratio
    return round(ratio * total_steps)


def decay_steps(spec: SFTJobSpec, total_steps: int) -> int:
    """Steps of decay of a run of ``total_steps``: where the rate is stable before, the last ones that are given."""
    schedule = spec.training.schedule
    left = max(0, total_steps - warmup_steps(spec, total_steps))
    if schedule.type in ("constant", "constantWithWarmup"):
        return 0
    if schedule.type != "warmupStableDecay":
        return left
    if schedule.decay_steps is not None:
        return min(left, schedule.decay_steps)
    ratio = DEFAULT_DECAY_RATIO if schedule.decay_ratio is None else schedule.decay_ratio
    return min(left, round(ratio * total_steps))


def progress_deadline_seconds(configured: int | None, median_step_seconds: float | None) -> float:
    """How long the group may go without a new step; ``median_step_seconds`` is None before the first."""
    if configured is not None:
        return float(configured)
    if median_step_seconds is None:
        return 1800.0
    return max(180.0, 20 * median_step_seconds)
