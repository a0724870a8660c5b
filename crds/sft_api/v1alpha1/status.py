"""``status``: what an SFTJob reports. The operator writes it in the cluster, ``sft run`` prints the same."""

from typing import Annotated, Literal

from pydantic import Field

from .base import WHOLE_AS_SUCH, ApiModel
from .goodput import GoodputStatus

Text = Annotated[str, Field(max_length=4096)]
Timestamp = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]

ConditionType = Literal["Accepted", "Running", "Suspended", "Complete", "Failed", "Reconciling", "Stalled"]
State = Literal[
    "Preparing",
    "Queued",
    "Starting",
    "Running",
    "Suspending",
    "Suspended",
    "Recovering",
    "Complete",
    "Failed",
]


class Condition(ApiModel):
    """One aspect of the job's state, as in all Kubernetes APIs."""

    type: ConditionType = Field(description="Name of the aspect.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, Field(max_length=256)] = Field(description="One CamelCase word; stable.")
    message: Annotated[str, Field(max_length=8192)] = Field(
        default="", description="A sentence for people: what happened, and what to change."
    )
    last_transition_time: Timestamp = Field(description="When status last changed.")
    observed_generation: int = Field(default=0, description="metadata.generation this was computed from.")


class ProgressStatus(ApiModel):
    """Where training stands."""

    step: int = Field(default=0, description="Optimizer steps done.")
    total_steps: int | None = Field(default=None, description="Optimizer steps of the whole run.")
    summary: Text = Field(default="", description="step/totalSteps, for kubectl get.")
    percent: int | None = Field(default=None, description="Steps done, in percent.")
    phase: Text = Field(default="", description="What the trainer is doing: Loading, Training, Saving, …")
    epoch: float | None = Field(default=None, description="Passes over the data done.")
    loss: float | None = Field(default=None, description="Mean loss per trained token of the last step.")
    first_loss: float | None = Field(default=None, description="Loss of the first step.")
    eval_loss: float | None = Field(default=None, description="Mean loss per trained token over all evaluation sets.")
    first_eval_loss: float | None = Field(
        default=None, description="The same before the first step, with training.evaluation.beforeTraining."
    )
    eval_accuracy: float | None = Field(
        default=None,
        description="Share of the trained tokens of all evaluation sets that the model finds the most likely ones.",
    )
    learning_rate: float | None = Field(default=None, description="Learning rate of the last step.")
    grad_norm: float | None = Field(default=None, description="Global gradient norm before clipping.")
    aux_loss: float | None = Field(
        default=None,
        description="Load-balancing loss of the routers in the last step, with training.routerAuxLossCoefficient.",
    )
    tokens_per_second: float | None = Field(default=None, description="Tokens a second, over all processes.")
    tokens_per_second_per_gpu: float | None = Field(default=None, description="Tokens a second of one process.")
    model_flops_utilization: float | None = Field(
        default=None, description="Share of the GPUs' peak FLOP/s that goes into the model; absent on CPU."
    )
    tokens_seen: int = Field(default=0, description="Tokens trained on so far, context included.")
    stopped_early: Text = Field(
        default="", description="Why the run is complete before totalSteps: early stopping, or a callback."
    )
    dummy_run: Text = Field(default="", description="What training.dummyRun measured: speed and memory of its steps.")
    curve: Annotated[str, Field(max_length=2048)] = Field(
        default="", description="Losses over the steps, as SVG; files for TensorBoard are in tensorboard/ beside it."
    )
    remaining: Text = Field(default="", description="Estimated time left, for example 3h12m.")
    update_time: Timestamp | None = Field(default=None, description="When the trainer reported this.")


class CheckpointStatus(ApiModel):
    """One committed checkpoint."""

    step: int = Field(description="Steps done when it was taken.")
    attempt: int = Field(description="Attempt that wrote it.")
    uri: Annotated[str, Field(max_length=2048)] = Field(description="Its folder.")
    time: Timestamp = Field(description="When it was committed.")
    size_bytes: int = Field(description="Size of all its files.")
    verified: bool = Field(description="Manifest read, and every file there with the size it names.")
    eval_loss: float | None = Field(default=None, description="Evaluation loss at that step, when known.")
    eval_data: Annotated[str, Field(max_length=64)] = Field(
        default="", description="Digest of what was evaluated on: only losses of the same can be compared."
    )


class CheckpointsStatus(ApiModel):
    """Checkpoints in the store."""

    latest: CheckpointStatus | None = Field(default=None, description="The one a restart would go on from.")
    best: CheckpointStatus | None = Field(
        default=None, description="The one with the lowest evaluation loss, on the data evaluated on last."
    )
    kept: Annotated[list[CheckpointStatus], Field(max_length=10)] = Field(
        default_factory=list, description="All that are kept, newest first, at most 10."
    )


class RepeatedFailure(ApiModel):
    """Failures of one class in a row, none of which got further than the first of them."""

    reason: Text = Field(description="Their class.")
    times: int = Field(description="How many; three that span two minutes end the run.")
    step: int = Field(default=0, description="Furthest step at which the run has failed.")
    checkpoint_step: int = Field(default=0, description="Step of the newest checkpoint then.")
    phase: Text = Field(default="", description="What was done; stands for the step before step 1.")
    last_message: Text = Field(default="", description="Of the last of them: what happened, and what to change.")
    first_time: Timestamp = Field(description="When the first of them happened.")
    last_time: Timestamp = Field(description="When the last of them happened.")


class NodeFailures(ApiModel):
    """Failures of the run that speak against one node: none like it began on another one at the same time."""

    node: Annotated[str, Field(max_length=253)] = Field(description="Name of the node.")
    failures: int = Field(description="How many, each within a day of the one before; two keep the run off the node.")
    last_reason: Text = Field(default="", description="Class of the last one.")
    last_time: Timestamp = Field(description="When it happened.")


class HurriedLoss(ApiModel):
    """The last loss from outside for whose pods the Job controller did not have to wait."""

    step: int = Field(default=0, description="Furthest step of the run then.")
    checkpoint_step: int = Field(default=0, description="Step of the newest checkpoint then.")
    newest_pod: Timestamp = Field(
        description="When the newest of its pods was made; younger ones wait until the run has got further."
    )


class RestartsStatus(ApiModel):
    """What went wrong so far, and what it cost."""

    failures: int = Field(default=0, description="Failures retried; limited by runPolicy.maxRestarts.")
    disruptions: int = Field(default=0, description="Preemptions, evictions and lost nodes; free.")
    last_reason: Text = Field(default="", description="Class of the last one.")
    last_message: Text = Field(default="", description="Its message: what happened, and what to change.")
    lost_steps: int = Field(default=0, description="Steps computed twice because of restarts.")
    recovery_seconds: float | None = Field(
        default=None,
        description="From the last failure or lost pod to the next new step; absent until then, and where the run was "
        "suspended, or had failed and began again, between them.",
    )
    total_recovery_seconds: float = Field(default=0.0, description="The same, of all failures and lost pods so far.")
    last_time: Timestamp | None = Field(default=None, description="When the last one happened.")
    last_failure: Text = Field(
        default="", description="Class and message of the last one that counts among the failures."
    )
    repeated: RepeatedFailure | None = Field(
        default=None, description="The last failures that were the run's own, as long as they are of one kind."
    )
    echoes: RepeatedFailure | None = Field(
        default=None,
        description="Since then: PeerLost, or Interrupted, where no pod was lost and none was asked to stop.",
    )
    nodes: Annotated[list[NodeFailures], Field(max_length=20)] = Field(
        default_factory=list, description="Nodes against which failures of the last day speak, the latest first."
    )
    hurried: HurriedLoss | None = Field(
        default=None, description="The last loss whose pods were replaced without the Job controller's wait."
    )
    replaced_pods: int = Field(
        default=0, description="Lost pods that the Job controller tells of and that are counted in here."
    )
    counted: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=20000)] = Field(
        default_factory=list, description="Incidents and pods already counted, so that none is counted twice."
    )


class MemoryStatus(ApiModel):
    """What a run is reckoned to take of each GPU when it takes most, by what takes it."""

    parameters: Text | None = Field(default=None, description="A process's share of the weights.")
    gradients: Text | None = Field(default=None, description="Their gradients.")
    optimizer: Text | None = Field(default=None, description="Their moments.")
    gathered: Text | None = Field(default=None, description="Whole layers, and their gradients, while in use.")
    activations: Text | None = Field(default=None, description="What layers keep for the backward pass.")
    logits: Text | None = Field(default=None, description="Logits, and gradients of the head.")
    reserve: Text | None = Field(default=None, description="CUDA's context and buffers of NCCL.")
    total: Text | None = Field(default=None, description="Of the parts that are known.")
    gpu_memory: Text | None = Field(default=None, description="What a GPU has, where that is known.")
    host_staging: Text | None = Field(
        default=None, description="Of each node's host memory, for a save in the background."
    )
    host_offload: Text | None = Field(
        default=None, description="Host memory of a node that weights, gradients and moments take with cpuOffload."
    )
    unknown: Text = Field(default="", description="What is not known, and how to say it.")


class PlanStatus(ApiModel):
    """What was decided where the spec left it open."""

    processes: int = Field(description="Training processes in all.")
    data_parallel: int = Field(description="Shares of a step: processes, or groups of them, that see different data.")
    sequence_parallel: int = Field(default=1, description="Processes that share the tokens of each micro-batch.")
    tensor_parallel: int = Field(default=1, description="Processes that share every matrix (Megatron).")
    pipeline_parallel: int = Field(default=1, description="Stages of consecutive layers (Megatron).")
    expert_parallel: int = Field(default=1, description="Processes over which experts are spread (Megatron).")
    shard_degree: int = Field(description="Processes that share one copy of the model, or of what updates it.")
    reduce_gradients: Literal["everyMicroBatch", "oncePerStep"] = Field(
        default="everyMicroBatch",
        description="How often gradients are summed over the processes that share one copy of the model.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Whether a layer's gathered parameters are freed after its forward pass, and gathered once more.",
    )
    precision: Literal["bf16", "fp32"] = Field(description="Compute precision.")
    compile: bool = Field(default=False, description="Whether layers are compiled before the first step.")
    learning_rate: float = Field(description="Peak learning rate.")
    global_batch_size: int | None = Field(default=None, description="Examples per optimizer step.")
    global_batch_tokens: int | None = Field(default=None, description="Tokens per optimizer step, at most.")
    max_tokens_per_micro_batch: int | None = Field(default=None, description="Tokens of one micro-batch, at most.")
    gradient_accumulation: int | None = Field(
        default=None,
        description="Micro-batches per step and process; absent when it varies with the examples.",
    )
    total_steps: int | None = Field(default=None, description="Steps in all, when known before the data was read.")
    epochs: Annotated[float, WHOLE_AS_SUCH] | None = Field(
        default=None, description="Passes over the data, when steps are not given."
    )
    memory: MemoryStatus | None = Field(default=None, description="What is taken of each GPU; absent on CPU.")


class HubStatus(ApiModel):
    """The copy of an exported model on the hub."""

    url: Annotated[str, Field(max_length=2048)] = Field(description="Its repository.")
    revision: Annotated[str, Field(max_length=100)] = Field(description="Branch that got it.")
    commit: Annotated[str, Field(max_length=64)] = Field(description="Commit in which it is there.")


class ExportStatus(ApiModel):
    """The exported model."""

    uri: Annotated[str, Field(max_length=2048)] = Field(description="Its folder.")
    step: int = Field(description="Steps done when it was written.")
    hub: HubStatus | None = Field(default=None, description="Its copy on the hub, once export.hub has got one.")


class SlowGpuStatus(ApiModel):
    """A GPU that is slower than the run's others of its model. A speed of 0.7 is 30% below their median."""

    pod: Annotated[int, Field(ge=0)] = Field(description="Index of its pod.")
    node: Annotated[str, Field(max_length=253)] = Field(default="", description="Node that the pod runs on.")
    gpu: Annotated[int, Field(ge=0)] = Field(description="Its number among those of the pod.")
    rank: Annotated[int, Field(ge=0)] = Field(description="Of the process that trains on it.")
    uuid: Annotated[str, Field(max_length=64)] = Field(description="As nvidia-smi -L tells it.")
    model: Annotated[str, Field(max_length=128)] = Field(description="Name of the device.")
    products_speed: Annotated[float, Field(ge=0)] = Field(description="How fast it multiplies matrices.")
    memory_speed: Annotated[float, Field(ge=0)] = Field(description="How fast it reads and writes its memory.")
    since: Timestamp = Field(description="When that was first seen.")


class SFTJobStatus(ApiModel):
    """What the job reports."""

    state: State | None = Field(default=None, description="Where the job stands, in one word, for people.")
    observed_generation: int = Field(default=0, description="metadata.generation this status belongs to.")
    message: Text = Field(
        default="", description="What holds the job up or ended it, in a sentence; for kubectl get -o wide."
    )
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field(default_factory=list, description="Conditions, one a type.")
    attempt: int = Field(
        default=0, description="Attempt that is running, or ran last, since the job began or was retried; 0: none yet."
    )
    progress: ProgressStatus | None = Field(default=None, description="Where training stands.")
    checkpoints: CheckpointsStatus | None = Field(default=None, description="Checkpoints in the store.")
    steps_at_risk: int | None = Field(
        default=None, description="Steps since the last durable checkpoint: what a preemption would cost now."
    )
    restarts: RestartsStatus | None = Field(default=None, description="What went wrong so far, and what it cost.")
    goodput: GoodputStatus | None = Field(default=None, description="Where the time of the GPUs went.")
    plan: PlanStatus | None = Field(default=None, description="What was decided where the spec left it open.")
    export: ExportStatus | None = Field(default=None, description="The exported model.")
    exports: Annotated[list[ExportStatus], Field(max_length=10)] = Field(
        default_factory=list, description="Models of export.everySteps, newest first, at most 10."
    )
    warnings: Annotated[list[Text], Field(max_length=20)] = Field(
        default_factory=list, description="What the user should know about data, settings and losses, the newest last."
    )
    slow_gpus: Annotated[list[SlowGpuStatus], Field(max_length=10)] = Field(
        default_factory=list,
        description="GPUs that hold all others up now, as they are slower than those of their model, at most 10.",
    )
    retried: Annotated[str, Field(max_length=256)] = Field(
        default="",
        description="Value of the annotation sftjob.dev/retry for which the job began again last, or that stood there "
        "when it ended.",
    )
    avoided_nodes: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=10)] = Field(
        default_factory=list, description="Nodes that the pods are kept off, after failures there."
    )
    job_ref: Text = Field(default="", description="Name of the Job that runs the pods.")
    pods_ready: Text = Field(default="", description="Ready pods of all, for example 2/2.")
    start_time: Timestamp | None = Field(default=None, description="When the job was first accepted.")
    first_step_time: Timestamp | None = Field(default=None, description="When the first step was reported.")
    completion_time: Timestamp | None = Field(default=None, description="When the job was complete or failed.")

    def condition(self, kind: str, status: str | None = None) -> Condition | None:
        """The condition of that type; where a ``status`` is given only if it has that."""
        return next((item for item in self.conditions if item.type == kind and status in (None, item.status)), None)

    @property
    def latest_checkpoint(self) -> CheckpointStatus | None:
        """The one that a restart would go on from."""
        return self.checkpoints.latest if self.checkpoints else None
