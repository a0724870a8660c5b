"""What a plan decides, a line each: its value, who made it, and from what."""

from collections.abc import Iterator
from typing import Any

from sft_api.batch import DEFAULT_GLOBAL_BATCH_SIZE, DEFAULT_GLOBAL_BATCH_TOKENS
from sft_api.megatron import given_in_words, stages_in_words
from sft_api.plan import DEFAULT_DECAY_RATIO, DEFAULT_WARMUP_RATIO, Plan
from sft_api.report import duration
from sft_api.v1alpha1.job import SFTJobSpec
from sft_api.v1alpha1.lora import LoraSpec
from sft_api.v1alpha1.megatron import MegatronSpec, megatron_of
from sft_api.v1alpha1.workload import DummyRunSpec, OptimizerSpec

from .decisions import Decision, Origin, computed_unless, origin_of
from .trained import Trained
from .words import counted

_TOKENS_SHOWN = 200
"""Characters of all added tokens together."""


def explain(spec: SFTJobSpec, plan: Plan, found: Trained | str | None) -> list[Decision]:
    """The decisions of ``plan`` and the defaults around them, in the order in which people ask for them.

    ``found`` is what ``measure_trained`` says of ``spec``.
    """
    dummy = spec.training.dummy_run
    return [
        *_model(spec),
        *_processes(spec, plan),
        *_memory(plan),
        *_trained(spec, plan, found),
        *(_dummy(dummy) if dummy else _length(spec, plan)),
        *_batch(spec, plan),
        *_optimisation(spec, plan),
        *([] if dummy else _end(spec)),
    ]


def _model(spec: SFTJobSpec) -> Iterator[Decision]:
    # What may be long stands at the end of the line.
    if given := spec.model.config_overrides.given if spec.model.config_overrides else {}:
        values = ", ".join(f"{name}: {_flow(value)}" for name, value in given.items())
        fields = f"{counted(len(given), 'field')} of ours"
        yield Decision("model's config", fields, Origin.GIVEN, f"model.configOverrides: {values}")
    if tokens := spec.model.new_tokens:
        special = f", {sum(tokens.values())} of them special" if any(tokens.values()) else ""
        why = f"where the tokenizer lacks them: {' '.join(tokens)[:_TOKENS_SHOWN]}"
        yield Decision("added tokens", f"{len(tokens)}{special}", Origin.GIVEN, why)
    if spec.lora is not None and (trained := spec.lora.trainable_tokens):
        # Ends of lines are tokens too, and this is one line.
        shown = " ".join(trained).replace("\n", r"\n").replace("\r", r"\r")
        why = f"lora.trainableTokens: {shown[:_TOKENS_SHOWN]}"
        yield Decision("trained tokens", str(len(trained)), Origin.GIVEN, why)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _dummy(dummy: DummyRunSpec) -> list[Decision]:
    steps = f"{counted(dummy.steps, 'step')} of random tokens"
    return [Decision("dummy run", steps, Origin.GIVEN, "training.dummyRun: no data is read, nothing is saved")]


def _processes(spec: SFTJobSpec, plan: Plan) -> list[Decision]:
    compute, megatron = spec.compute, megatron_of(spec)
    device = "GPU" if compute.gpus_per_node else "CPU"
    ray = Decision("launcher", "Ray, in the job's own pods", Origin.GIVEN, "compute.launcher: docs/ray.md")
    together = counted(plan.sequence_parallel, "process")
    field = "megatron.contextParallelDegree" if megatron else "fsdp.sequenceParallelDegree"
    shared = Decision("tokens shared by", together, Origin.GIVEN, f"strategy.{field}")
    return [
        Decision(
            "processes",
            f"{plan.processes} on {device}",
            origin_of(compute, "nodes", "gpus_per_node", "processes_per_node"),
            f"compute: {counted(compute.nodes, 'node')} x {compute.effective_processes_per_node} a node",
        ),
        *([ray] if compute.launcher == "ray" else []),
        *(_megatron(megatron, plan) if megatron else [_copies(spec, plan)]),
        *([shared] if plan.sequence_parallel > 1 else []),
        *_layers(spec, plan),
        *_reduction(spec, plan),
    ]


def _copies(spec: SFTJobSpec, plan: Plan) -> Decision:
    sharded = spec.fsdp.shard_degree is not None
    value = f"{plan.processes // plan.shard_degree}, each over {counted(plan.shard_degree, 'process')}"
    why = "strategy.fsdp.shardDegree" if sharded else _why_sharded(plan)
    return Decision("copies of the model", value, computed_unless(sharded), why)


def _layers(spec: SFTJobSpec, plan: Plan) -> list[Decision]:
    """How long layers' weights stay gathered, where it is asked for or longer than for one pass."""
    given = spec.fsdp.reshard_after_forward is not None
    if plan.reshard_after_forward:
        value, why = "gathered for each pass", "freed between forward and backward"
    else:
        value, why = "gathered once a micro-batch", "kept from forward to backward"
    decision = Decision("layers", value, computed_unless(given), f"strategy.fsdp.reshardAfterForward; {why}")
    return [decision] if given or not plan.reshard_after_forward else []


def _reduction(spec: SFTJobSpec, plan: Plan) -> list[Decision]:
    """How often gradients are summed, where it is asked for or not after each micro-batch."""
    given = spec.fsdp.reduce_gradients != "auto"
    if plan.reduce_gradients == "oncePerStep":
        value, why = "summed once a step", "each process adds up its micro-batches before"
    else:
        value, why = "summed after every micro-batch", "of a share each is kept"
    decision = Decision("gradients", value, computed_unless(given), f"strategy.fsdp.reduceGradients; {why}")
    return [decision] if given or plan.reduce_gradients == "oncePerStep" else []


def _megatron(megatron: MegatronSpec, plan: Plan) -> list[Decision]:
    tensor, expert = plan.tensor_parallel, plan.expert_parallel
    apart = tensor * plan.pipeline_parallel
    shared = f"{counted(tensor, 'process')}{', and tokens between them' if megatron.shares_tokens else ''}"
    degrees = [
        ("matrices shared by", tensor, shared, "tensorParallelDegree"),
        ("stages", plan.pipeline_parallel, stages_in_words(megatron), "pipelineParallelDegree"),
        ("experts spread over", expert, counted(expert, "process"), "expertParallelDegree"),
    ]
    return [
        Decision("strategy", "Megatron-Core", Origin.GIVEN, given_in_words(megatron)),
        *(
            Decision(subject, value, Origin.GIVEN, f"strategy.megatron.{field}")
            for subject, degree, value, field in degrees
            if degree > 1
        ),
        Decision(
            "copies of the model",
            f"{plan.processes // apart}, each over {counted(apart, 'process')}",
            Origin.COMPUTED,
            "the processes that are left; what updates a copy is shared out to all of them",
        ),
    ]


def _why_sharded(plan: Plan) -> str:
    if plan.shard_degree < plan.processes:
        return "FSDP2 within each node, which has room for a copy: only gradients cross the network"
    return "FSDP2 over all processes"


_PARTS = {
    "weights": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered layers": "gathered",
    "activations": "activations",
    "logits": "logits",
    "CUDA and NCCL": "reserve",
}
"""Parts of the memory of a GPU, as the plan names them."""


def _memory(plan: Plan) -> list[Decision]:
    if (memory := plan.memory) is None:
        return []
    if memory.total is None:
        return [Decision("memory of a GPU", "unknown", Origin.COMPUTED, memory.unknown)]
    parts = ", ".join(f"{name} {size}" for name, part in _PARTS.items() if (size := getattr(memory, part)))
    least = "" if memory.activations else "at least "
    of = f" of {memory.gpu_memory}" if memory.gpu_memory else ""
    decisions = [Decision("memory of a GPU", f"{least}{memory.total}{of}", Origin.COMPUTED, parts)]
    if memory.unknown:
        decisions.append(Decision("not known", "", Origin.COMPUTED, memory.unknown))
    if memory.host_offload:
        why = "of each node's host memory: strategy.fsdp.cpuOffload"
        decisions.append(Decision("offloaded", memory.host_offload, Origin.COMPUTED, why))
    if memory.host_staging:
        why = "of each node's host memory, for a save in the background: checkpoint.async"
        decisions.append(Decision("staging", memory.host_staging, Origin.COMPUTED, why))
    return decisions


_WHEN_TRAINED_IS_KNOWN = (
    "the log of the run says it; known here of a folder (file://), of a model of the table in docs/memory.md, and of "
    "one of a type in it whose config.json is in the hub's cache (hf download)"
)


def _trained(spec: SFTJobSpec, plan: Plan, found: Trained | str | None) -> list[Decision]:
    """Of a model of which not all is trained."""
    if spec.trains_all:
        return []
    decisions = _adapters(spec.lora) if spec.lora else []
    if modules := spec.training.trainable_modules:
        # What may be long stands at the end of the line.
        why = f"training.trainableModules: {', '.join(modules)}"
        decisions.append(Decision("trained modules", counted(len(modules), "name"), Origin.GIVEN, why))
    why = "lora.basePrecision; as precision when absent" if spec.lora else "as precision; what is trained in fp32"
    origin = computed_unless(spec.lora and spec.lora.base_precision)
    decisions.append(Decision("frozen weights in", _frozen(spec, plan), origin, why))
    if isinstance(found, Trained):
        share = found.parameters / (found.parameters + found.frozen)
        value = f"{found.parameters:,} of {found.parameters + found.frozen:,} ({share:.2%})"
        why = f"{_with_adapters(found)}by {found.by}"
    else:
        value, why = "unknown", "as said above" if found else _WHEN_TRAINED_IS_KNOWN
    return [*decisions, Decision("trained parameters", value, Origin.COMPUTED, why)]


def _with_adapters(found: Trained) -> str:
    linear = [counted(found.layers, "layer")] if found.layers else []
    experts = [f"the experts of {counted(found.experts, 'layer')}"] if found.experts else []
    both = " and ".join([*linear, *experts])
    return f"{both} with adapters, " if both else ""


def _frozen(spec: SFTJobSpec, plan: Plan) -> str:
    """What the weights are held in that are not trained."""
    others = spec.frozen_precision(plan.precision)
    if spec.quantised is None:
        return others
    which = "experts, linear layers but the head" if spec.quantised == "nf4" else "experts"
    return f"{spec.quantised} ({which}; others in {others})"


def _adapters(lora: LoraSpec) -> list[Decision]:
    excluded = f", not {', '.join(lora.exclude_modules)}" if lora.exclude_modules else ""
    dropout = f", dropout {lora.dropout:g}" if lora.dropout else ""
    uri = lora.adapter_uri
    return [
        *([Decision("adapters begin as", uri, Origin.GIVEN, "lora.adapterUri")] if uri else []),
        Decision(
            "adapters",
            f"{lora.in_words}{dropout}",
            origin_of(lora, "rank", "expert_rank", "alpha", "dropout", "use_dora"),
            f"lora.rank, {'.expertRank, ' if lora.names_experts else ''}.alpha, .dropout"
            f"{', .useDora' if lora.use_dora else ''}",
        ),
        Decision(
            "adapters on",
            f"{', '.join(lora.target_modules)}{excluded}",
            origin_of(lora, "target_modules", "exclude_modules"),
            "lora.targetModules, .excludeModules",
        ),
    ]


def _length(spec: SFTJobSpec, plan: Plan) -> list[Decision]:
    if plan.total_steps is not None:
        return [Decision("length", counted(plan.total_steps, "step"), Origin.GIVEN, "training.steps")]
    origin, epochs = origin_of(spec.training, "epochs"), counted(plan.epochs or 1, "epoch")
    return [Decision("length", epochs, origin, "training.epochs; steps follow from the data")]


def _batch(spec: SFTJobSpec, plan: Plan) -> list[Decision]:
    training = spec.training
    decisions = []
    if plan.global_batch_tokens is not None:
        given = training.global_batch_tokens
        if given is None:
            why = f"at least {DEFAULT_GLOBAL_BATCH_TOKENS:,}, in whole micro-batches on every process"
        elif given != plan.global_batch_tokens:
            why = f"training.globalBatchTokens {given:,}, rounded down to whole micro-batches on every process"
        else:
            why = "training.globalBatchTokens"
        decisions.append(Decision("tokens a step", f"{plan.global_batch_tokens:,}", computed_unless(given), why))
    if plan.global_batch_size is not None:
        given = training.global_batch_size
        default = f"{DEFAULT_GLOBAL_BATCH_SIZE}, rounded up to whole micro-batches on every process"
        why = default if given is None else "training.globalBatchSize"
        decisions.append(Decision("examples a step", f"{plan.global_batch_size:,}", computed_unless(given), why))
    if (most := plan.max_tokens_per_micro_batch) is not None:
        given = training.max_tokens_per_micro_batch
        why = "as data.maxLength" if given is None else "training.maxTokensPerMicroBatch"
        decisions.append(Decision("tokens a micro-batch", f"{most:,}", computed_unless(given), why))
    else:
        origin = origin_of(training, "micro_batch_size")
        size = f"{training.micro_batch_size:,}"
        decisions.append(Decision("examples a micro-batch", size, origin, "training.microBatchSize"))
    count, why = str(plan.gradient_accumulation), "micro-batches a step on every process"
    if plan.gradient_accumulation is None:
        count, why = "varies", "packing decides how many micro-batches hold the examples of a step"
    return [*decisions, Decision("gradient accumulation", count, Origin.COMPUTED, why)]


def _optimisation(spec: SFTJobSpec, plan: Plan) -> list[Decision]:
    training, schedule = spec.training, spec.training.schedule
    if schedule.type == "constant":
        warmup = "no warm-up"
    elif schedule.warmup_steps is not None:
        warmup = f"warm-up {counted(schedule.warmup_steps, 'step')}"
    else:
        ratio = DEFAULT_WARMUP_RATIO if schedule.warmup_ratio is None else schedule.warmup_ratio
        warmup = f"warm-up {ratio * 100:g}% of the steps"
    decay = ""
    if schedule.type == "warmupStableDecay" and schedule.decay_steps is not None:
        decay = f", decay in the last {counted(schedule.decay_steps, 'step')}"
    elif schedule.type == "warmupStableDecay":
        ratio = DEFAULT_DECAY_RATIO if schedule.decay_ratio is None else schedule.decay_ratio
        decay = f", decay in the last {ratio * 100:g}% of the steps"
    elif schedule.power is not None:
        decay = f", to the power of {schedule.power:g}"
    elif schedule.cycles is not None:
        decay = f", {schedule.cycles} times"
    precision = computed_unless(training.precision)
    times = spec.lora.learning_rate_ratio if spec.lora else None
    of_b = f", of B {plan.learning_rate * times:g} (lora.learningRateRatio)" if times else ""
    return [
        Decision(
            "learning rate",
            f"{plan.learning_rate:g}{of_b}",
            origin_of(training.optimizer, "learning_rate"),
            "training.optimizer.learningRate, at its peak" + ("; 1e-4 with lora when absent" if spec.lora else ""),
        ),
        *_optimizer(training.optimizer),
        Decision(
            "schedule",
            f"{schedule.type}, {warmup}{decay}",
            origin_of(
                schedule, "type", "warmup_steps", "warmup_ratio", "decay_steps", "decay_ratio", "power", "cycles"
            ),
            "training.schedule",
        ),
        Decision("precision", plan.precision, precision, "training.precision; bf16 on GPUs, fp32 on CPU when absent"),
        *_compiled(spec, plan),
        *_for_memory(spec),
        *_objective(spec),
        *_balance(spec),
        Decision("seed", str(training.seed), origin_of(training, "seed"), "training.seed"),
    ]


def _optimizer(optimizer: OptimizerSpec) -> list[Decision]:
    """Where it is not the usual one."""
    if not optimizer.is_muon:
        return []
    value = f"Muon with momentum {optimizer.effective_momentum:g} for matrices of layers, AdamW for all else"
    return [Decision("optimizer", value, Origin.GIVEN, "training.optimizer.type")]


def _compiled(spec: SFTJobSpec, plan: Plan) -> list[Decision]:
    """Whether the layers are, where it is asked for or not usual."""
    asked = spec.training.compile
    if asked is None and plan.compile == bool(spec.compute.gpus_per_node):
        return []
    value, origin = "the layers" if plan.compile else "nothing", Origin.COMPUTED if asked is None else Origin.GIVEN
    where = "training.compile; on GPUs when absent, but in fp32, by Megatron, and of experts"
    return [Decision("compiled", value, origin, where)]


def _objective(spec: SFTJobSpec) -> list[Decision]:
    """What is trained where that is not the cross-entropy of the tokens as they are."""
    training, alpha = spec.training, spec.training.neftune_noise_alpha
    chosen = [
        ("loss", training.loss == "dft", "dft: cross-entropy times probability", "training.loss"),
        ("label smoothing", training.label_smoothing, f"{training.label_smoothing or 0:g}", "training.labelSmoothing"),
        ("noise on embeddings", alpha, f"alpha {alpha or 0:g}", "training.neftuneNoiseAlpha"),
    ]
    return [
        Decision(name, value, Origin.GIVEN, f"{field}; not in evaluations")
        for name, asked, value, field in chosen
        if asked
    ]


def _balance(spec: SFTJobSpec) -> list[Decision]:
    coefficient = spec.training.router_aux_loss_coefficient
    if not coefficient:
        return []
    where = "training.routerAuxLossCoefficient; of each micro-batch, by its share of the step's tokens"
    return [Decision("loss of routers", f"times {coefficient:g}", Origin.GIVEN, where)]


def _for_memory(spec: SFTJobSpec) -> list[Decision]:
    """What was chosen to take less memory than the defaults do."""
    training = spec.training
    chosen = [
        ("activations", training.activation_checkpointing, "none", "training.activationCheckpointing"),
        ("weights", training.held_dtype, "fp32", "training.parameterDtype"),
        ("moments", training.optimizer.state_dtype, "fp32", "training.optimizer.stateDtype"),
        ("sums of gradients", spec.fsdp.reduce_dtype, "fp32", "strategy.fsdp.reduceDtype"),
    ]
    return [Decision(name, value, Origin.GIVEN, field) for name, value, usual, field in chosen if value != usual]


def _interval(steps: int | None, epochs: float | None) -> str:
    """What stands behind "every"; empty where neither is given."""
    if epochs is not None:
        return "epoch" if epochs == 1 else f"{epochs:g} epochs"
    return counted(steps, "step") if steps else ""


def _evaluated_on(spec: SFTJobSpec) -> str:
    sets = [f"{counted(len(spec.data.eval), 'set')} of data.eval"] if spec.data.eval else []
    if (held_out := spec.data.held_out) is not None:
        sets.append(f"{held_out.fraction:g} of the rows of data.train (data.heldOut)")
    return " and ".join(sets)


def _end(spec: SFTJobSpec) -> list[Decision]:
    checkpoint, export, evaluation = spec.checkpoint, spec.export, spec.training.evaluation
    interval = duration(checkpoint.every_seconds)
    often = _interval(checkpoint.every_steps, checkpoint.every_epochs)
    saves = f"every {interval}{f' or {often}' if often else ''}"
    best = f", the best {checkpoint.keep.best}" if checkpoint.keep.best else ""
    each = f", those of every {counted(checkpoint.keep.every_steps, 'step')}" if checkpoint.keep.every_steps else ""
    decisions = [
        Decision(
            "checkpoints in",
            checkpoint.uri or "the platform's store",
            origin_of(checkpoint, "uri"),
            "checkpoint.uri" if checkpoint.uri else "checkpoint.uri; with sft run: sft-runs in the current folder",
        ),
        Decision(
            "checkpoints",
            f"{saves}; kept: the last {checkpoint.keep.last}{best}{each}",
            origin_of(checkpoint, "every_seconds", "every_steps", "every_epochs", "keep"),
            f"checkpoint.everySeconds, .{'everyEpochs' if checkpoint.every_epochs else 'everySteps'}, .keep",
        ),
    ]
    if spec.data.evaluates:
        often = _interval(evaluation.every_steps, evaluation.every_epochs)
        when = f"{'before, ' if evaluation.before_training else ''}{f'every {often} and ' if often else ''}at the end"
        origin = origin_of(evaluation, "every_steps", "every_epochs", "before_training")
        decisions.append(Decision("evaluation", when, origin, _evaluated_on(spec)))
    if export.at_end:
        where = export.uri or "export/ beside the checkpoints"
        decisions.append(Decision("export to", where, origin_of(export, "uri"), "export.uri"))
        if export.every_steps:
            steps = f"every {counted(export.every_steps, 'step')}, to step-… there"
            decisions.append(Decision("exported on the way", steps, Origin.GIVEN, "export.everySteps"))
        which = {"last": "of the last step", "best": "of the lowest evaluation loss"}[export.checkpoint]
        decisions.append(Decision("exported checkpoint", which, origin_of(export, "checkpoint"), "export.checkpoint"))
        if spec.lora:
            what = "the model with its adapters merged" if export.merge_adapter else "the adapters, for peft"
            decisions.append(Decision("exported", what, origin_of(export, "merge_adapter"), "export.mergeAdapter"))
        if export.hub:
            hub = f"{export.hub.repository}, branch {export.hub.branch}"
            decisions.append(Decision("uploaded to", hub, Origin.GIVEN, "export.hub"))
    else:
        decisions.append(Decision("export", "none", Origin.GIVEN, "export.atEnd: false"))
    return decisions
