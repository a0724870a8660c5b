"""SFTJob itself: metadata, spec and status in one object, with the rules that span several parts of the spec."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from .base import ApiModel, LabelValue, QualifiedKeys, Rule, matches
from .compute import ComputeSpec
from .data import DataSpec
from .lora import LoraSpec, Quantised
from .megatron import WITH_THE_SAME_DATA, WITH_THE_SAME_DATA_IN_WORDS, megatron_of, megatron_rules
from .model_config import ATTENTION_DROPOUTS
from .monitoring import MonitoringSpec
from .places import PLACE_RULES
from .runtime import CheckpointSpec, ExportSpec, FsdpSpec, RunPolicy, StrategySpec
from .status import SFTJobStatus
from .words import does_not_divide
from .workload import ModelSpec, TrainingSpec

GROUP = "sftjob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "SFTJob"
PLURAL = "sftjobs"

JOB_NAME_PATTERN = r"^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$"
RETRY_ANNOTATION = f"{GROUP}/retry"
"""On an SFTJob that has failed: begin again. Each new value counts once (``status.retried``)."""
TAKE_OVER_ENDING = " take-over"
"""A value of it that ends so also takes the place of the run over from whoever is alive there."""

JOB_NAME_MESSAGE = (
    "metadata.name must be at most 50 lower-case letters, digits and -, starting with a letter: it names a Service "
    "and the pods"
)

IMMUTABLE_SPEC_FIELDS = (
    "model",
    "lora",
    "data",
    "training",
    "strategy",
    "compute",
    "checkpoint",
    "export",
    "monitoring",
    "runPolicy.progressDeadlineSeconds",
    "runPolicy.storageDeadlineSeconds",
    "runPolicy.terminationGracePeriodSeconds",
)
"""Dotted paths below ``spec`` that never change: a Job's pod template cannot, a run's numbers must not, and the
supervisor and the trainer read their deadlines once."""


_PROCESSES = (
    "self.compute.nodes * (has(self.compute.processesPerNode) ? self.compute.processesPerNode : "
    "(self.compute.gpusPerNode > 0 ? self.compute.gpusPerNode : 1))"
)
_SEQUENCE = "(has(self.strategy) && has(self.strategy.fsdp) ? self.strategy.fsdp.sequenceParallelDegree : 1)"
_TOGETHER = f"(has(self.strategy) && has(self.strategy.megatron) ? {WITH_THE_SAME_DATA} : {_SEQUENCE})"
_SHARE = (
    f"that compute on the same tokens (strategy.fsdp.sequenceParallelDegree, or {WITH_THE_SAME_DATA_IN_WORDS} of "
    "strategy.megatron)"
)


_FSDP = FsdpSpec()
_HELD_IN_FP32 = "!has(self.training.parameterDtype) || self.training.parameterDtype == 'fp32'"
_EVALUATES = "((has(self.data.eval) && size(self.data.eval) > 0) || has(self.data.heldOut))"
_OVERRIDES = "self.model.configOverrides"
_ROTARY = f"{_OVERRIDES}.rope_parameters"
_ZERO = " && ".join(f"(!has({_OVERRIDES}.{name}) || {_OVERRIDES}.{name} == 0.0)" for name in ATTENTION_DROPOUTS)
_NO_ATTENTION_DROPOUT = f"!has({_OVERRIDES}) || ({_ZERO})"
_ATTENTION_DROPOUT = f"{ATTENTION_DROPOUTS[0]} (or {', '.join(ATTENTION_DROPOUTS[1:])})"


def _batch_in_numbers(spec: "SFTJobSpec") -> str:
    longest = spec.training.max_tokens_per_micro_batch or spec.data.max_length
    groups = -(-spec.compute.processes // spec.processes_a_share)
    which = "processes" if spec.processes_a_share == 1 else "groups"
    given, least = spec.training.global_batch_tokens, groups * longest
    return f"it is {given}, and {groups} {which} of {longest} tokens need at least {least}"


def drops_attention(spec: "SFTJobSpec") -> bool:
    """Whether ``model.configOverrides`` asks for dropout in attention."""
    overrides = spec.model.config_overrides
    return overrides is not None and any(getattr(overrides, name) for name in ATTENTION_DROPOUTS)


class SFTJobSpec(ApiModel):
    """What to train, on what, and where."""

    model: ModelSpec = Field(description="The model to start from.")
    lora: LoraSpec | None = Field(
        default=None,
        description="Adapters are trained, and saved, in place of the model's weights; all weights if absent.",
    )
    data: DataSpec = Field(description="The data, and which tokens of it are trained.")
    training: TrainingSpec = Field(default_factory=TrainingSpec, description="The optimisation.")
    strategy: StrategySpec | None = Field(
        default=None,
        description="How the model is spread over the processes; FSDP2 over all of them when absent.",
    )
    compute: ComputeSpec = Field(description="The pods and processes that train.")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="Durable state of the run.")
    export: ExportSpec = Field(default_factory=ExportSpec, description="The finished model.")
    monitoring: MonitoringSpec = Field(
        default_factory=MonitoringSpec, description="What is looked at besides the figures that every run reports."
    )
    suspend: bool = Field(
        default=False, description="true saves, frees the pods and waits; false goes on from the checkpoint."
    )
    run_policy: RunPolicy = Field(default_factory=RunPolicy, description="Limits of the run.")
    deletion_policy: Literal["Keep", "Delete"] = Field(
        default="Keep",
        description="What deleting the SFTJob does to the place of its run: Keep leaves all of it; Delete removes "
        "checkpoints, records and exports of export.everySteps there, not the one at the end, once all pods have "
        "ended. Only in the platform's store, and not with sft run, which removes nothing.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.data.packing != 'ffd' || !has(self.training.maxTokensPerMicroBatch) || "
            "self.training.maxTokensPerMicroBatch >= self.data.maxLength",
            "training.maxTokensPerMicroBatch must be at least data.maxLength when packing: the longest example must "
            "fit into a micro-batch",
            lambda self: (
                self.data.packing != "ffd"
                or self.training.max_tokens_per_micro_batch is None
                or self.training.max_tokens_per_micro_batch >= self.data.max_length
            ),
        ),
        Rule(
            "self.data.packing == 'ffd' || !(has(self.training.globalBatchTokens) || "
            "has(self.training.maxTokensPerMicroBatch))",
            "training.globalBatchTokens and training.maxTokensPerMicroBatch need data.packing: ffd; without packing "
            "give training.globalBatchSize and training.microBatchSize",
            lambda self: (
                self.data.packing == "ffd"
                or (self.training.global_batch_tokens is None and self.training.max_tokens_per_micro_batch is None)
            ),
        ),
        Rule(
            "self.data.packing == 'none' || self.training.microBatchSize == 1",
            "training.microBatchSize needs data.packing: none; with packing give training.maxTokensPerMicroBatch",
            lambda self: self.data.packing == "none" or self.training.micro_batch_size == 1,
        ),
        Rule(
            f"!has(self.training.globalBatchSize) || self.training.globalBatchSize * {_TOGETHER} % ({_PROCESSES}) == 0",
            "training.globalBatchSize must be divisible by the number of processes (nodes x processes per node), "
            f"divided by those {_SHARE}",
            lambda self: (
                self.training.global_batch_size is None
                or self.training.global_batch_size * self.processes_a_share % self.compute.processes == 0
            ),
        ),
        Rule(
            "self.data.packing == 'ffd' || !has(self.training.globalBatchSize) || "
            f"self.training.globalBatchSize * {_TOGETHER} % (({_PROCESSES}) * self.training.microBatchSize) == 0",
            "training.globalBatchSize must be divisible by the number of processes times training.microBatchSize, "
            f"divided by those {_SHARE}",
            lambda self: (
                self.data.packing == "ffd"
                or self.training.global_batch_size is None
                or self.training.global_batch_size
                * self.processes_a_share
                % (self.compute.processes * self.training.micro_batch_size)
                == 0
            ),
        ),
        Rule(
            f"!has(self.training.globalBatchTokens) || self.training.globalBatchTokens * {_TOGETHER} >= "
            f"({_PROCESSES}) * (has(self.training.maxTokensPerMicroBatch) ? "
            "self.training.maxTokensPerMicroBatch : self.data.maxLength)",
            "training.globalBatchTokens must hold one full micro-batch (training.maxTokensPerMicroBatch, or "
            f"data.maxLength) on every process, or group of those {_SHARE}",
            lambda self: (
                self.training.global_batch_tokens is None
                or self.training.global_batch_tokens * self.processes_a_share
                >= self.compute.processes * (self.training.max_tokens_per_micro_batch or self.data.max_length)
            ),
            remedy=_batch_in_numbers,
        ),
        Rule(
            "!has(self.strategy) || !has(self.strategy.fsdp) || !has(self.strategy.fsdp.shardDegree) || "
            f"({_PROCESSES}) % self.strategy.fsdp.shardDegree == 0",
            "strategy.fsdp.shardDegree must divide the number of processes (compute.nodes x processes per node)",
            lambda self: self.fsdp.shard_degree is None or self.compute.processes % self.fsdp.shard_degree == 0,
            remedy=lambda self: does_not_divide(self.fsdp.shard_degree, self.compute.processes, "processes"),
        ),
        Rule(
            "!has(self.monitoring.memorySnapshot) || self.compute.gpusPerNode > 0",
            "monitoring.memorySnapshot records what is allocated on GPUs: it needs compute.gpusPerNode",
            lambda self: self.monitoring.memory_snapshot is None or self.compute.gpus_per_node > 0,
        ),
        Rule(
            f"({_PROCESSES}) % {_SEQUENCE} == 0",
            "strategy.fsdp.sequenceParallelDegree must divide the number of processes (compute.nodes x processes per "
            "node)",
            lambda self: self.compute.processes % self.sequence_parallel == 0,
            remedy=lambda self: does_not_divide(self.sequence_parallel, self.compute.processes, "processes"),
        ),
        Rule(
            "!has(self.strategy) || !has(self.strategy.fsdp) || !has(self.strategy.fsdp.shardDegree) || "
            "self.strategy.fsdp.shardDegree % self.strategy.fsdp.sequenceParallelDegree == 0",
            "strategy.fsdp.shardDegree must be a multiple of strategy.fsdp.sequenceParallelDegree: processes that "
            "share tokens share a copy of the model",
            lambda self: self.fsdp.shard_degree is None or self.fsdp.shard_degree % self.sequence_parallel == 0,
        ),
        Rule(
            f"{_NO_ATTENTION_DROPOUT} || !has(self.training.compile) || !self.training.compile",
            f"model.configOverrides.{_ATTENTION_DROPOUT} has attention computed document by document, which cannot be "
            "compiled: set it to 0, or leave training.compile out",
            lambda self: not drops_attention(self) or not self.training.compile,
        ),
        Rule(
            f"{_NO_ATTENTION_DROPOUT} || self.compute.gpusPerNode == 0 || "
            "(has(self.training.precision) && self.training.precision == 'fp32')",
            f"model.configOverrides.{_ATTENTION_DROPOUT} must be 0 on GPUs, whose kernel knows none, but with "
            "training.precision: fp32",
            lambda self: (
                not drops_attention(self) or self.compute.gpus_per_node == 0 or self.training.precision == "fp32"
            ),
        ),
        Rule(
            f"{_HELD_IN_FP32} || (has(self.training.precision) ? self.training.precision == 'bf16' : "
            "self.compute.gpusPerNode > 0)",
            "training.parameterDtype: bf16 needs training.precision: bf16 (the default on GPUs alone): weights that "
            "are held in bf16 are computed with in bf16; or leave parameterDtype out",
            lambda self: self.training.held_dtype == "fp32" or self.precision == "bf16",
        ),
        Rule(
            f"{_HELD_IN_FP32} || !has(self.lora)",
            "training.parameterDtype: bf16 is for weights of the model's own, and lora trains adapters, which are fp32 "
            "and small: leave one of them out (lora.basePrecision says how the frozen weights are held)",
            lambda self: self.training.held_dtype == "fp32" or self.lora is None,
        ),
        Rule(
            "!has(self.training.optimizer.type) || self.training.optimizer.type != 'muon' || !has(self.strategy) || "
            "!has(self.strategy.fsdp) || !self.strategy.fsdp.cpuOffload",
            "training.optimizer.type: muon multiplies matrices, and strategy.fsdp.cpuOffload has updates made by the "
            "host's processors, which would take minutes for each: leave one of them out",
            lambda self: not self.training.optimizer.is_muon or not self.fsdp.cpu_offload,
        ),
        Rule(
            f"!has({_OVERRIDES}) || !has({_OVERRIDES}.max_position_embeddings) || "
            f"self.data.maxLength <= {_OVERRIDES}.max_position_embeddings",
            "data.maxLength must be at most model.configOverrides.max_position_embeddings, the longest document that "
            "the model is said to be for",
            lambda self: (
                self.model.config_overrides is None
                or self.model.config_overrides.max_position_embeddings is None
                or self.data.max_length <= self.model.config_overrides.max_position_embeddings
            ),
        ),
        Rule(
            f"!has({_OVERRIDES}) || !has({_ROTARY}) || {_ROTARY}.rope_type != 'yarn' || !has({_ROTARY}.factor) || "
            f"!has({_ROTARY}.original_max_position_embeddings) || double(self.data.maxLength) <= {_ROTARY}.factor * "
            f"double({_ROTARY}.original_max_position_embeddings)",
            "data.maxLength must be at most factor * original_max_position_embeddings in "
            "model.configOverrides.rope_parameters: so far yarn scales",
            lambda self: (
                self.model.config_overrides is None
                or self.model.config_overrides.rope_parameters is None
                or self.data.max_length <= self.model.config_overrides.rope_parameters.reach
            ),
        ),
        Rule(
            f"self.checkpoint.keep.best == 0 || {_EVALUATES}",
            "checkpoint.keep.best needs data.eval or data.heldOut: the best is the one with the lowest evaluation loss",
            lambda self: self.checkpoint.keep.best == 0 or self.data.evaluates,
        ),
        Rule(
            "!has(self.checkpoint.keep.everySteps) || (has(self.checkpoint.everySteps) && "
            "self.checkpoint.keep.everySteps % self.checkpoint.everySteps == 0)",
            "checkpoint.keep.everySteps must be a multiple of checkpoint.everySteps, the steps that are saved",
            lambda self: (
                self.checkpoint.keep.every_steps is None
                or (
                    self.checkpoint.every_steps is not None
                    and self.checkpoint.keep.every_steps % self.checkpoint.every_steps == 0
                )
            ),
        ),
        Rule(
            "!(has(self.training.evaluation.everySteps) || has(self.training.evaluation.everyEpochs) || "
            f"self.training.evaluation.beforeTraining) || {_EVALUATES}",
            "training.evaluation needs data.eval or data.heldOut: name the data to evaluate on, or hold rows out",
            lambda self: (
                not (self.training.evaluation.repeats or self.training.evaluation.before_training)
                or self.data.evaluates
            ),
        ),
        Rule(
            "self.export.checkpoint == 'last' || self.checkpoint.keep.best > 0",
            "export.checkpoint: best needs checkpoint.keep.best, at least 1: the best must still be there at the end",
            lambda self: self.export.checkpoint == "last" or self.checkpoint.keep.best > 0,
        ),
        Rule(
            "!has(self.export.everySteps) || (has(self.checkpoint.everySteps) && "
            "self.export.everySteps % self.checkpoint.everySteps == 0)",
            "export.everySteps must be a multiple of checkpoint.everySteps, the steps that are saved",
            lambda self: (
                self.export.every_steps is None
                or (
                    self.checkpoint.every_steps is not None
                    and self.export.every_steps % self.checkpoint.every_steps == 0
                )
            ),
        ),
        Rule(
            "!has(self.export.everySteps) || self.export.atEnd",
            "export.everySteps is for exports besides the one at the end: leave export.atEnd out",
            lambda self: self.export.every_steps is None or self.export.at_end,
        ),
        Rule(
            "!has(self.export.hub) || self.export.atEnd",
            "export.hub gets a copy of the export at the end: leave export.atEnd out",
            lambda self: self.export.hub is None or self.export.at_end,
        ),
        Rule(
            "!self.export.mergeAdapter || has(self.lora)",
            "export.mergeAdapter needs lora: without it the whole model is exported",
            lambda self: not self.export.merge_adapter or self.lora is not None,
        ),
        Rule(
            "!has(self.lora) || !has(self.lora.adapterUri) || !has(self.checkpoint.resume.from)",
            "lora.adapterUri and checkpoint.resume.from both say from which adapters training starts: leave one out",
            lambda self: self.lora is None or self.lora.adapter_uri is None or self.checkpoint.resume.origin is None,
        ),
        *PLACE_RULES,
        *megatron_rules(_PROCESSES),
        Rule(
            "self.deletionPolicy != 'Delete' || !has(self.checkpoint.uri) || self.checkpoint.uri.startsWith('s3://')",
            "deletionPolicy: Delete needs a place in the platform's store (s3://…, or no checkpoint.uri): the operator "
            "can remove nothing from claims and folders; set deletionPolicy to Keep, or name another place",
            lambda self: (
                self.deletion_policy != "Delete"
                or self.checkpoint.uri is None
                or self.checkpoint.uri.startswith("s3://")
            ),
        ),
    )

    @property
    def fsdp(self) -> FsdpSpec:
        """``strategy.fsdp``; with its defaults where nothing is said of it, as with Megatron."""
        return (self.strategy and self.strategy.fsdp) or _FSDP

    @property
    def sequence_parallel(self) -> int:
        """Processes that share the tokens of a micro-batch, by FSDP."""
        return self.fsdp.sequence_parallel_degree

    @property
    def precision(self) -> Literal["bf16", "fp32"]:
        """Compute precision, also where the manifest leaves it open."""
        return self.training.precision or ("bf16" if self.compute.gpus_per_node else "fp32")

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained: no adapters beside them, nor some of them alone."""
        return self.lora is None and self.training.trainable_modules is None

    @property
    def tokens_with_rows(self) -> list[str]:
        """Tokens of which rows are trained beside adapters, of those tables that are not trained whole."""
        if self.lora is None:
            return []
        return [*dict.fromkeys([*self.model.new_tokens, *(self.lora.trainable_tokens or ())])]

    @property
    def quantised(self) -> Quantised | None:
        """In which 4 bits some frozen weights are held, if they are; the others are in ``frozen_precision``."""
        return self.lora.quantised if self.lora else None

    def frozen_precision(self, computed: str) -> str:
        """In which the weights that are not trained are held, but for those that are quantised, of a run that is
        ``computed`` in this one."""
        given = self.lora.base_precision if self.lora and not self.quantised else None
        return given or computed

    @property
    def processes_a_share(self) -> int:
        """Processes that compute on the same micro-batches together: a step has one share for all of them."""
        megatron = megatron_of(self)
        return megatron.with_the_same_data if megatron else self.sequence_parallel


_OTHER_METADATA = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
    }
)
"""Fields of every object's metadata that the API server looks after: neither read here nor refused."""


class ObjectMeta(ApiModel):
    """The part of an object's metadata that the API itself looks at."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    labels: Annotated[dict[str, LabelValue], QualifiedKeys] = Field(default_factory=dict)
    annotations: Annotated[dict[str, str], QualifiedKeys] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_other_fields(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if key not in _OTHER_METADATA}
        return value


class SFTJob(ApiModel):
    """Supervised fine-tuning of a language model."""

    api_version: Literal["sftjob.dev/v1alpha1"]
    kind: Literal["SFTJob"]
    metadata: ObjectMeta
    spec: SFTJobSpec
    status: SFTJobStatus = Field(default_factory=SFTJobStatus)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.metadata.name.matches('{JOB_NAME_PATTERN}')",
            JOB_NAME_MESSAGE,
            lambda self: matches(JOB_NAME_PATTERN, "").check(self.metadata.name),
        ),
    )

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> "SFTJob":
        """The job a manifest describes, read as the API server reads it: camelCase only, nulls are absent.

        Raises ``pydantic.ValidationError``, whose messages are those of the API server for every rule.
        """
        without_nulls = _drop_nulls(manifest)
        if without_nulls != manifest:
            without_nulls = _drop_nulls(manifest, keep=cls._unknown_fields(manifest))
        return cls.model_validate(without_nulls, by_alias=True, by_name=False)

    @classmethod
    def _unknown_fields(cls, manifest: dict[str, Any]) -> frozenset[tuple[int | str, ...]]:
        """Where ``manifest`` has fields that the API has not.

        The API server names these before it drops nulls. One may be the rest of a value: in ``{steps: 1,000}`` YAML
        sees one step, and a field ``000`` without a value.
        """
        try:
            cls.model_validate(manifest, by_alias=True, by_name=False)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            return frozenset(problem["loc"] for problem in problems if problem["type"] == "extra_forbidden")
        return frozenset()


def _drop_nulls(
    value: Any, keep: frozenset[tuple[int | str, ...]] = frozenset(), at: tuple[int | str, ...] = ()
) -> Any:
    if isinstance(value, dict):
        return {
            key: _drop_nulls(item, keep, (*at, key))
            for key, item in value.items()
            if item is not None or (*at, key) in keep
        }
    if isinstance(value, list):
        return [_drop_nulls(item, keep, (*at, number)) for number, item in enumerate(value)]
    return value
