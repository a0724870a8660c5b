"""``spec.strategy``, ``spec.compute``, ``spec.checkpoint``, ``spec.export`` and ``spec.runPolicy``: where it runs."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import AnnotationMap, ApiModel, Epochs, LabelMap, Name, Rule, ShortText, matches, not_both
from .megatron import MegatronSpec
from .quantities import RESOURCE_RULES, Quantity, at_least, at_most
from .uris import HubBranch, HubRepository, StorageUri


class FsdpSpec(ApiModel):
    """PyTorch FSDP2: parameters, gradients and optimizer state sharded over the processes."""

    shard_degree: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        default=None,
        description="Processes that share one copy of the model (hybrid sharding). When absent those of a node, where "
        "the plan knows that a copy fits there, else all.",
    )
    reshard_after_forward: bool | None = Field(
        default=None,
        description="Free a layer's gathered parameters after its forward pass, and gather them again for its backward "
        "pass: less memory, more traffic. When absent they are kept where the plan knows that this takes the place of "
        "nothing, else freed.",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Precision in which gradients are summed over the processes: bf16 halves that traffic and its "
        "buffers, and rounds.",
    )
    reduce_gradients: Literal["auto", "everyMicroBatch", "oncePerStep"] = Field(
        default="auto",
        description="How often gradients are summed over the processes that share a copy of the model. oncePerStep: "
        "the micro-batches of a step are added up by each process for itself first, which takes 4 bytes for each "
        "trained parameter of the whole model, and saves the traffic of all but the last. auto: that where the plan "
        "knows that it takes the place of nothing, and for adapters that are small.",
    )
    cpu_offload: bool = Field(
        default=False,
        description="Hold parameters, gradients and moments in host memory, and update them there: a GPU holds what it "
        "computes with only. Takes up to 16 bytes a trained parameter of the nodes' memory, and time for copies and "
        "updates.",
    )
    sequence_parallel_degree: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Processes that share the tokens of each micro-batch (Ulysses): its activations and logits are "
        "divided by it, and so are the shares of a step. Must divide the model's attention heads, and its heads of "
        "keys or be a multiple of them.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.reduceGradients != 'oncePerStep' || self.reduceDtype == 'fp32'",
            "strategy.fsdp.reduceGradients: oncePerStep needs strategy.fsdp.reduceDtype: fp32: in bf16 what the last "
            "micro-batches of a step add would get lost",
            lambda self: self.reduce_gradients != "oncePerStep" or self.reduce_dtype == "fp32",
        ),
        Rule(
            "self.reduceGradients != 'oncePerStep' || !self.cpuOffload",
            "strategy.fsdp.reduceGradients: oncePerStep holds the gradients of the whole model on each GPU, and "
            "strategy.fsdp.cpuOffload none: leave one of them out",
            lambda self: self.reduce_gradients != "oncePerStep" or not self.cpu_offload,
        ),
    )


class StrategySpec(ApiModel):
    """How the model is spread over the processes."""

    fsdp: FsdpSpec | None = Field(default=None, description="FSDP2, the default strategy.")
    megatron: MegatronSpec | None = Field(
        default=None,
        description="Megatron-Core, in place of FSDP2: for models of which a layer or its activations are too large "
        "for it. Needs an image that has it (docs/megatron.md).",
    )

    rules: ClassVar[tuple[Rule, ...]] = (not_both("strategy", "fsdp", "megatron"),)


ResourceMap = Annotated[dict[str, Quantity], Field(max_length=16), *RESOURCE_RULES]


VolumeSize = at_least("1Mi", "must be at least 1Mi: 64 alone is 64 bytes; write 64Gi")


class ResourcesSpec(ApiModel):
    """Resources of one pod besides its GPUs."""

    requests: ResourceMap = Field(default_factory=dict, description="What one pod asks for: cpu, memory, any name.")
    limits: ResourceMap = Field(default_factory=dict, description="What one pod may use.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
            "!isQuantity(string(self.requests[name])) || !isQuantity(string(self.limits[name])) || "
            "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
            "compute.resources.requests must not exceed compute.resources.limits",
            lambda self: at_most(self.requests, self.limits),
        ),
    )


class TolerationSpec(ApiModel):
    """A taint of a node that the pods tolerate."""

    key: Annotated[str, Field(max_length=317)] | None = Field(default=None, description="Key of the taint.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How key and value are compared.")
    value: Annotated[str, Field(max_length=63)] | None = Field(default=None, description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint; all when absent."
    )
    toleration_seconds: Annotated[int, Field(ge=0, le=31_536_000)] | None = Field(
        default=None, description="Seconds for which NoExecute is tolerated; for ever when absent."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.operator) || self.operator == 'Equal' || !has(self.value)",
            "a toleration with operator: Exists has no value",
            lambda self: self.operator == "Equal" or self.value is None,
        ),
        Rule(
            "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            "a toleration without key needs operator: Exists",
            lambda self: self.key is not None or self.operator == "Exists",
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds needs effect: NoExecute",
            lambda self: self.toleration_seconds is None or self.effect == "NoExecute",
        ),
    )


class KeySelector(ApiModel):
    """One key of a Secret or ConfigMap of the job's namespace."""

    name: Name = Field(description="Name of the object.")
    key: ShortText = Field(description="Key in the object.")


class EnvSource(ApiModel):
    """Where the value of an environment variable comes from."""

    secret_key_ref: KeySelector | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeySelector | None = Field(default=None, description="A key of a ConfigMap.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.secretKeyRef) != has(self.configMapKeyRef)",
            "give valueFrom.secretKeyRef or valueFrom.configMapKeyRef",
            lambda self: (self.secret_key_ref is None) != (self.config_map_key_ref is None),
        ),
    )


_OF_THE_GROUP = (
    r"^(SFT_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|"
    r"JOB_COMPLETION_INDEX)$"
)
"""Says where a process stands in its group: the supervisor, or the Job controller, sets it. With TORCHELASTIC_*
torch would look for a store that torchrun keeps, and here nobody does."""

_OF_THE_IMAGE = r"^(PATH|PYTHONHOME|PYTHONPATH|PYTHONPLATLIBDIR|PYTHONINSPECT)$"
"""Without the image's own values Python or the trainer is not found; with PYTHONINSPECT every process ends with exit
code 1, the finished one too. Whatever else is read at the start (LD_PRELOAD, LD_LIBRARY_PATH, HOME, PYTHONHASHSEED) has
honest uses, and at worst fails at once and in so many words."""


class EnvVar(ApiModel):
    """An environment variable of the training container."""

    name: Annotated[
        str,
        Field(max_length=253),
        matches(r"^[A-Za-z_][A-Za-z0-9_]*$", "must be letters, digits and _, not starting with a digit"),
        Rule(
            f"!self.matches('{_OF_THE_GROUP}')",
            "this environment variable is set by the supervisor and cannot be given",
            lambda value: not matches(_OF_THE_GROUP, "").check(value),
        ),
        Rule(
            f"!self.matches('{_OF_THE_IMAGE}')",
            "this environment variable belongs to the image, which does not start without it: set it in an image of "
            "your own",
            lambda value: not matches(_OF_THE_IMAGE, "").check(value),
        ),
    ] = Field(
        description="Name of the variable; not one of the group (RANK, MASTER_ADDR, SFT_* …) or of the image's start "
        "(PATH, PYTHONPATH …)."
    )
    value: Annotated[str, Field(max_length=4096)] | None = Field(default=None, description="Its value.")
    value_from: EnvSource | None = Field(default=None, description="Where its value comes from.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.value) != has(self.valueFrom)",
            "give value or valueFrom",
            lambda self: (self.value is None) != (self.value_from is None),
        ),
    )


class ComputeSpec(ApiModel):
    """The pods and processes that train."""

    nodes: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Pods of the job. The scheduler places them: on a node that has room for several, several may run.",
    )
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = Field(
        default=1, description="GPUs of each pod; 0 trains on the CPU."
    )
    processes_per_node: Annotated[int, Field(ge=1, le=256)] | None = Field(
        default=None, description="Training processes of each pod; one a GPU, or 1 on the CPU, when absent."
    )
    launcher: Literal["supervisor", "ray"] = Field(
        default="supervisor",
        description="Who places the training processes: the pods' own supervisors, or ray: a Ray cluster made of the "
        "job's pods, new at each start, in which callbacks may start tasks and actors of their own. Numbers, restarts "
        "and checkpoints are the same.",
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="Trainer image; the operator's default when absent."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled."
    )
    image_pull_secrets: Annotated[list[Name], Field(max_length=8)] = Field(
        default_factory=list, description="Names of Secrets with registry credentials."
    )
    pod_profile: Name | None = Field(
        default=None,
        description="Name of a profile of pods that the administrator has written (the chart's pods.profiles): what "
        "its kind of nodes needs. What this spec says itself wins.",
    )
    service_account_name: Name | None = Field(
        default=None, description="Service account of the pods (its token is never mounted)."
    )
    gpu_resource_name: ShortText = Field(
        default="nvidia.com/gpu",
        description="Resource name of the GPUs, or of slices (nvidia.com/mig-3g.40gb), of which a pod takes one.",
    )
    gpu_memory: (
        Annotated[Quantity, at_least("1Gi", "must be at least 1Gi: 80 alone is 80 bytes; write 80Gi")] | None
    ) = Field(
        default=None,
        description="Memory of one GPU (80Gi), for the plan: what does not fit is refused before any pod is made. By "
        "a slice that gpuResourceName names (nvidia.com/mig-3g.40gb), nvidia.com/gpu.memory or nvidia.com/gpu.product "
        "of nodeSelector, or as the profile or the chart's pods.gpuMemory say, when absent.",
    )
    memory_check: Literal["Refuse", "Warn"] = Field(
        default="Refuse",
        description="What is done with a run that by the plan takes more than 110% of a GPU's memory: Refuse says what "
        "to change; Warn has it tried.",
    )
    resources: ResourcesSpec = Field(
        default_factory=ResourcesSpec,
        description="Resources of each pod besides its GPUs. Of CPU and memory that are named neither in requests nor "
        "in limits it asks for 2 and 8Gi a GPU, or 1 and 2Gi a process without GPUs, unless the profile or the chart's "
        "pods.resources say otherwise; with the launcher ray for 1Gi of memory more.",
    )
    node_selector: LabelMap = Field(default_factory=dict, description="Labels that nodes must have.")
    tolerations: Annotated[list[TolerationSpec], Field(max_length=32)] = Field(
        default_factory=list, description="Taints that the pods tolerate."
    )
    priority_class_name: Name | None = Field(default=None, description="Priority class of the pods.")
    runtime_class_name: Name | None = Field(default=None, description="Runtime class of the pods.")
    env: Annotated[list[EnvVar], Field(max_length=64)] = Field(
        default_factory=list, description="Environment variables of the training container."
    )
    shared_memory_size: Annotated[Quantity, VolumeSize] | None = Field(
        default=None,
        description="Size of /dev/shm; 1Gi a process when absent. At most half of the memory limit, against which it "
        "counts: what is more is cut to that.",
    )
    cache_size: Annotated[Quantity, VolumeSize] = Field(
        default="50Gi", description="Size limit of the emptyDir that holds models, data and compiled kernels."
    )
    labels: LabelMap = Field(default_factory=dict, description="Labels added to the pods.")
    annotations: AnnotationMap = Field(default_factory=dict, description="Annotations added to the pods.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.gpusPerNode == 0 || !has(self.processesPerNode) || self.processesPerNode == self.gpusPerNode",
            "compute.processesPerNode must equal compute.gpusPerNode when there are GPUs: leave it out",
            lambda self: (
                self.gpus_per_node == 0
                or self.processes_per_node is None
                or self.processes_per_node == self.gpus_per_node
            ),
        ),
        Rule(
            "!has(self.env) || self.env.all(a, self.env.exists_one(b, b.name == a.name))",
            "names of compute.env must differ: give each variable once",
            lambda self: len({variable.name for variable in self.env}) == len(self.env),
        ),
        Rule(
            "!has(self.resources) || ((!has(self.resources.requests) || !(self.gpuResourceName in "
            "self.resources.requests)) && (!has(self.resources.limits) || !(self.gpuResourceName in "
            "self.resources.limits)))",
            "GPUs are asked for with compute.gpusPerNode, not with compute.resources",
            lambda self: (
                self.gpu_resource_name not in self.resources.requests
                and self.gpu_resource_name not in self.resources.limits
            ),
        ),
        # CUDA shows a process one slice alone, whichever its pod has: no second process would find a GPU.
        Rule(
            "!self.gpuResourceName.contains('/mig-') || self.gpusPerNode <= 1",
            "a pod trains on one slice of a GPU (MIG): give compute.gpusPerNode: 1, and a larger slice in "
            "compute.gpuResourceName where that is too little",
            lambda self: "/mig-" not in self.gpu_resource_name or self.gpus_per_node <= 1,
        ),
    )

    @property
    def effective_processes_per_node(self) -> int:
        """Training processes of one pod."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def processes(self) -> int:
        """Training processes of all pods."""
        return self.nodes * self.effective_processes_per_node


class S3Spec(ApiModel):
    """How s3:// URIs of this job (model, data, checkpoints, export) are reached."""

    endpoint: (
        Annotated[
            str,
            Field(max_length=512),
            matches(r"^https?://[^/]+/?$", "must be http://host[:port] or https://…"),
        ]
        | None
    ) = Field(default=None, description="URL of the S3 server; AWS when absent.")
    region: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="Region of the bucket."
    )
    force_path_style: bool = Field(default=False, description="Address buckets as endpoint/bucket.")
    checksum: Literal["whenSupported", "whenRequired"] = Field(
        default="whenRequired",
        description="When requests carry a CRC checksum besides ours; some servers refuse them.",
    )
    credentials_secret_ref: Name | None = Field(
        default=None,
        description="Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and optionally AWS_SESSION_TOKEN).",
    )


class KeepSpec(ApiModel):
    """Which checkpoints stay; never fewer than the last verified one."""

    last: Annotated[int, Field(ge=1, le=1000)] = Field(default=2, description="The newest so many.")
    best: Annotated[int, Field(ge=0, le=100)] = Field(
        default=0, description="Besides them, so many with the lowest evaluation loss; each evaluation is then saved."
    )
    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None,
        description="Besides them, for ever, each that was saved at a multiple of so many steps; a multiple of "
        "checkpoint.everySteps.",
    )


class OriginSpec(ApiModel):
    """A checkpoint of another run, from which this one begins."""

    uri: StorageUri = Field(
        description="checkpoint.uri of the other run, reached like this run's own; it is only read."
    )
    step: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None,
        description="Its checkpoint of that step; the newest verified one of when this run begins if absent.",
    )
    what: Literal["weights", "everything"] = Field(
        default="weights",
        description="weights: this run begins at step 0 with those weights; everything: it goes on after that step, "
        "with the optimizer's state too, and needs the same data, batch and seed.",
    )


class ResumeSpec(ApiModel):
    """Where training starts."""

    policy: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: from the newest verified checkpoint of this run, whichever start of it saved that; "
        "never: from its beginning, also after a crash, a lost pod or a suspension, and only where no other has saved.",
    )
    origin: OriginSpec | None = Field(
        default=None,
        alias="from",
        description="A checkpoint of another run where this one begins; with the weights of the model if absent.",
    )


class CheckpointSpec(ApiModel):
    """Durable state of the run."""

    uri: StorageUri | None = Field(default=None, description="Where checkpoints go; the platform's store when absent.")
    s3: S3Spec = Field(default_factory=S3Spec, description="How s3:// URIs of this job are reached.")
    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Save after every so many steps."
    )
    every_epochs: Epochs | None = Field(
        default=None,
        description="Save each time that so much of a pass over the data is done: 1 at its end, 0.5 twice.",
    )
    every_seconds: Annotated[int, Field(ge=1, le=604_800)] = Field(
        default=600, description="Save when so many seconds have passed since the last save."
    )
    keep: KeepSpec = Field(default_factory=KeepSpec, description="Which checkpoints stay.")
    asynchronous: bool = Field(
        default=True,
        alias="async",
        description="Upload while training goes on; needs host memory for one copy, and waits where there is none.",
    )
    resume: ResumeSpec = Field(default_factory=ResumeSpec, description="Where training starts.")

    rules: ClassVar[tuple[Rule, ...]] = (not_both("checkpoint", "every_steps", "every_epochs"),)


class HubSpec(ApiModel):
    """A repository that gets a copy of the finished model."""

    repository: HubRepository = Field(description="org/name; made when the run starts where it is not there.")
    revision: HubBranch | None = Field(
        default=None, description="Branch that gets it, made where it is not there; main when absent."
    )
    private: bool | None = Field(
        default=None,
        description="Whether a repository that is made is private; it is when absent. With true a public one is "
        "refused.",
    )

    @property
    def branch(self) -> str:
        """That gets it."""
        return self.revision or "main"


class ExportSpec(ApiModel):
    """The finished model in Hugging Face format."""

    at_end: bool = Field(default=True, description="Export when training is complete.")
    checkpoint: Literal["last", "best"] = Field(
        default="last",
        description="Which checkpoint is exported then: that of the last step, or the best by evaluation loss.",
    )
    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None,
        description="Export also each checkpoint of a multiple of so many steps, while training goes on, to the folder "
        "step-<8 digits> of the place of the export; a multiple of checkpoint.everySteps.",
    )
    uri: StorageUri | None = Field(default=None, description="Where it goes; export/ beside the checkpoints if absent.")
    merge_adapter: bool = Field(
        default=False,
        description="With lora: export the whole model, adapters added to its weights and rounded as these are; else "
        "the adapters alone, in the format of peft.",
    )
    hub: HubSpec | None = Field(
        default=None,
        description="Upload the export at the end to the hub (HF_ENDPOINT), with the token of model.tokenSecretRef, "
        "which must be allowed to write there. The export stays, and the run is complete, also where that fails.",
    )


Seconds = Annotated[int, Field(ge=1, le=31_536_000)]


MOST_RESTARTS = 1000


class RunPolicy(ApiModel):
    """Limits of the run."""

    max_restarts: Annotated[int, Field(ge=0, le=MOST_RESTARTS)] = Field(
        default=10, description="Failures that are retried; preemptions and lost nodes do not count."
    )
    active_deadline_seconds: Seconds | None = Field(
        default=None,
        description="The run fails when it has been active for longer; the time starts anew at every resume.",
    )
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = Field(
        default=None,
        description="The SFTJob is deleted so long after it ended; its export stays, and so do its checkpoints unless "
        "deletionPolicy is Delete.",
    )
    progress_deadline_seconds: Seconds | None = Field(
        default=None,
        description="The workers are restarted when no step was made for so long; when absent, 1800 to the first "
        "step, then the larger of 180 and 20 median steps. Outside of training (loading, saving) any word of a worker "
        "counts for it, and the limit is at least 1800, or 600 where all workers wait for one another.",
    )
    start_deadline_seconds: Seconds = Field(
        default=300,
        description="When some pods have been placed for so long and others find no room, or no quota in their "
        "namespace, at the start or after a loss, all give their places back and try again after a pause that grows. "
        "Not in a queue: Kueue's waitForPodsReady is for that.",
    )
    storage_deadline_seconds: Seconds = Field(
        default=3600,
        description="The run fails when nothing could be saved for so long, because the store is away, full, or "
        "refuses what it took before. Training goes on meanwhile; the last save, the export and a new start wait.",
    )
    termination_grace_period_seconds: Annotated[int, Field(ge=5, le=3600)] = Field(
        default=300, description="Time to save between SIGTERM and SIGKILL."
    )
