"""``spec.strategy``, ``spec.checkpoint``, ``spec.export`` and ``spec.runPolicy``: how it runs, and what it leaves."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import ApiModel, Epochs, Name, Rule, matches, not_both
from .megatron import MegatronSpec
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
