"""``spec.compute``: its pods, and where they run."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import AnnotationMap, ApiModel, LabelMap, Name, Rule, ShortText, matches
from .quantities import RESOURCE_RULES, Quantity, at_least, at_most

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
