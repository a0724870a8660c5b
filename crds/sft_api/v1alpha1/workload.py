"""``spec.model`` and ``spec.training``: what is trained, and how."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import ApiModel, Epochs, Name, NearMiss, Rule, ShortText, matches, not_both
from .lora import WeightsName
from .model_config import ConfigOverrides
from .uris import ModelUri

ChatTemplate = Annotated[
    str,
    Field(min_length=1, max_length=65536),
    Rule(
        "self.contains('{')",
        "must be the text of a Jinja template, not its place: put the text below chatTemplate: |",
        lambda value: "{" in value,
    ),
]


CAN_BE_ADDED = matches(
    r"^[^ \t\n\r]([^\n\r]*[^ \t\n\r])?$",
    "must be a token as it stands in texts, such as <ticket>: in one line, and without white space around it",
)
AddedToken = Annotated[str, Field(min_length=1, max_length=128), CAN_BE_ADDED]


class SecretKeyRef(ApiModel):
    """One key of a Secret in the job's namespace."""

    name: Name = Field(description="Name of the Secret.")
    key: ShortText = Field(default="token", description="Key in the Secret that holds the value.")


class ModelSpec(ApiModel):
    """The model to start from."""

    uri: ModelUri = Field(
        description="Where the model is: hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path or "
        "file:///path (in the image, or on this machine with `sft run`)."
    )
    tokenizer_uri: ModelUri | None = Field(
        default=None, description="Where the tokenizer is, when it is not beside the model."
    )
    chat_template: ChatTemplate | None = Field(
        default=None,
        description="Text of a Jinja chat template used instead of the tokenizer's own; saved with the export.",
    )
    added_tokens: Annotated[list[AddedToken], Field(min_length=1, max_length=1024)] | None = Field(
        default=None,
        description="Tokens that the tokenizer gets, where it lacks them, and the model rows for; they may stand "
        "anywhere in the data. See docs/added-tokens.md.",
    )
    added_special_tokens: Annotated[list[AddedToken], Field(min_length=1, max_length=128)] | None = Field(
        default=None,
        description="Others that are control tokens, as those of turns are: the chat template writes them, messages "
        "may not have them, and decoders leave them out.",
    )
    config_overrides: ConfigOverrides | None = Field(
        default=None,
        description="Fields of the model's config.json that are others in this run, by the names they have there: "
        "scaling of its positions, its longest document, its sliding window, its dropouts. Nothing else: what changes "
        "shapes or layers is another model. See docs/long-context.md.",
    )
    parameters: (
        Annotated[
            str,
            Field(max_length=16),
            matches(r"^[0-9]{1,4}([.][0-9]{1,4})?[MBT]$", "must be a number of parameters such as 8B, 0.6B or 350M"),
            Rule(
                "!self.matches('^[0.]+[MBT]$')",
                "no model has no parameters: give their number, such as 8B, or leave it out",
                lambda value: not matches("^[0.]+[MBT]$", "").check(value),
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="How many parameters the model has (8B, 350M), where the plan cannot know: by it the memory of "
        "weights, gradients and optimizer is reckoned, and a run that cannot fit is refused. Not needed for models "
        "in the table of docs/memory.md.",
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Hub token for hf:// models and data, and for export.hub, from a Secret of the job's namespace.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.addedTokens) || !has(self.addedSpecialTokens) || "
            "self.addedSpecialTokens.all(token, !(token in self.addedTokens))",
            "model.addedTokens and model.addedSpecialTokens have a token in common, which is special or is not: leave "
            "it in one of them",
            lambda self: {*(self.added_tokens or ())}.isdisjoint(self.added_special_tokens or ()),
        ),
    )

    @property
    def new_tokens(self) -> dict[str, bool]:
        """Tokens that the tokenizer gets where it lacks them, in the order of their numbers, and whether each is
        special."""
        return dict.fromkeys(self.added_tokens or (), False) | dict.fromkeys(self.added_special_tokens or (), True)


Beta = Annotated[float, Field(ge=0, lt=1)]
MUON_MOMENTUM = 0.95
"""Of Muon where a manifest leaves it open: for ever, since the digest of such a run says nothing of it."""


class OptimizerSpec(ApiModel):
    """AdamW, or Muon for the matrices of layers: decoupled weight decay on matrices, none on norms and biases."""

    type: Literal["adamw", "muon"] | None = Field(
        default=None,
        description="adamw when absent. muon updates the matrices of layers, those of experts and routers among them, "
        "by their orthogonalised momentum, as large as updates of AdamW are; embeddings, head, norms, biases and "
        "convolutions are AdamW's.",
    )
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Peak learning rate; 1e-5 when absent, with lora 1e-4."
    )
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [0.9, 0.999], description="Decay rates of the first and second moment."
    )
    momentum: Beta | None = Field(
        default=None, description="Of muon: decay rate of the momentum, with Nesterov's look ahead; 0.95 when absent."
    )
    eps: Annotated[float, Field(gt=0, le=1)] = Field(default=1e-8, description="Added to the denominator.")
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.01,
        description="Decoupled weight decay, of matrices only, embeddings among them: norms and biases are exempt.",
    )
    max_grad_norm: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        default=1.0, description="Gradients are clipped to this global norm; 0 turns clipping off."
    )
    state_dtype: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32",
        description="Precision in which the two moments are held: with bf16 4 bytes a trained parameter instead of 8, "
        "on GPUs and in checkpoints, with int8 2.03. What changes by less than such numbers can tell apart is rounded "
        "stochastically. int8 holds moments of matrices: a byte each, and one for every 64 in a row, to whose power of "
        "two they are relative. Norms, biases, and matrices whose rows are no multiple of 64 keep moments in fp32.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.momentum) || (has(self.type) && self.type == 'muon')",
            "optimizer.momentum is for type muon alone: of adamw it is the first of optimizer.betas",
            lambda self: self.momentum is None or self.is_muon,
        ),
        Rule(
            "!has(self.type) || self.type != 'muon' || self.stateDtype != 'int8'",
            "optimizer type muon has its momentum in fp32 or bf16: set optimizer.stateDtype to one of these",
            lambda self: not self.is_muon or self.state_dtype != "int8",
        ),
    )

    @property
    def is_muon(self) -> bool:
        """Whether matrices of layers are updated by Muon."""
        return self.type == "muon"

    @property
    def effective_momentum(self) -> float:
        """Decay rate of Muon's momentum."""
        return MUON_MOMENTUM if self.momentum is None else self.momentum


class ScheduleSpec(ApiModel):
    """Learning rate over the steps."""

    type: Literal[
        "constant",
        "constantWithWarmup",
        "linear",
        "cosine",
        "warmupStableDecay",
        "polynomial",
        "inverseSqrt",
        "cosineWithRestarts",
    ] = Field(
        default="cosine",
        description="Shape after the warm-up; warmupStableDecay stays at the peak, and decays linearly at the end; "
        "polynomial is the share of the steps that is left, to a power; cosineWithRestarts is several cosines, each "
        "from the peak; inverseSqrt is the root of w / (w + n), n steps after a warm-up of w (10,000 where there is "
        "none), and never arrives. The first step of a decay has the peak still, and the lowest rate would be that of "
        "the step after the last.",
    )
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Share of the steps used to warm up, rounded to the nearest number of them; 0.03 when neither "
        "ratio nor steps are given.",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = Field(
        default=None,
        description="Steps used to warm up, all where the run has fewer: the rate rises by the same in each, from 0 "
        "before the first to the peak in the last.",
    )
    min_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Lowest rate of a decay, as a share of the peak."
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Of warmupStableDecay: share of the steps in which the rate decays, rounded to the nearest number "
        "of them, as far as the warm-up leaves them; 0.1 when neither ratio nor steps are given.",
    )
    decay_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Of warmupStableDecay: steps in which the rate decays."
    )
    power: Annotated[float, Field(gt=0, le=100)] | None = Field(
        default=None, description="Of polynomial, which needs it: 2 decays as a parabola does, 1 would be linear."
    )
    cycles: Annotated[int, Field(ge=2, le=1_000_000)] | None = Field(
        default=None,
        description="Of cosineWithRestarts, which needs it: how many cosines there are, all as long.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        not_both("schedule", "warmup_ratio", "warmup_steps"),
        Rule(
            "self.type != 'constant' || !(has(self.warmupRatio) || has(self.warmupSteps))",
            "schedule type constant has no warm-up: use constantWithWarmup",
            lambda self: self.type != "constant" or (self.warmup_ratio is None and self.warmup_steps is None),
        ),
        not_both("schedule", "decay_ratio", "decay_steps"),
        Rule(
            "self.type == 'warmupStableDecay' || !(has(self.decayRatio) || has(self.decaySteps))",
            "schedule.decayRatio and schedule.decaySteps are for type warmupStableDecay alone",
            lambda self: self.type == "warmupStableDecay" or (self.decay_ratio is None and self.decay_steps is None),
        ),
        Rule(
            "!has(self.type) || self.type != 'polynomial' || has(self.power)",
            "schedule type polynomial needs schedule.power, such as 2; 1 is type linear",
            lambda self: self.type != "polynomial" or self.power is not None,
        ),
        Rule(
            "self.type == 'polynomial' || !has(self.power)",
            "schedule.power is for type polynomial alone",
            lambda self: self.type == "polynomial" or self.power is None,
        ),
        Rule(
            "!has(self.type) || self.type != 'cosineWithRestarts' || has(self.cycles)",
            "schedule type cosineWithRestarts needs schedule.cycles, 2 or more; 1 is type cosine",
            lambda self: self.type != "cosineWithRestarts" or self.cycles is not None,
        ),
        Rule(
            "self.type == 'cosineWithRestarts' || !has(self.cycles)",
            "schedule.cycles is for type cosineWithRestarts alone",
            lambda self: self.type == "cosineWithRestarts" or self.cycles is None,
        ),
    )


class EarlyStoppingSpec(ApiModel):
    """When a run that gets no better is complete before its last step."""

    patience: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=3, description="Evaluations in a row that are not better, after which the run ends."
    )
    min_delta: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        default=0.0,
        description="An evaluation is better when its loss, over all sets, is lower than the best so far by more.",
    )


class EvaluationSpec(ApiModel):
    """When the evaluation sets are run; always at the end."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Also after every so many steps."
    )
    every_epochs: Epochs | None = Field(
        default=None,
        description="Also each time that so much of a pass over the data is done: 1 at its end, 0.25 four times.",
    )
    before_training: bool = Field(default=False, description="Also before the first step.")
    early_stopping: EarlyStoppingSpec | None = Field(
        default=None, description="Ends the run, as complete, when evaluations get no better; never when absent."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        not_both("training.evaluation", "every_steps", "every_epochs"),
        Rule(
            "!has(self.earlyStopping) || has(self.everySteps) || has(self.everyEpochs)",
            "training.evaluation.earlyStopping needs training.evaluation.everySteps or everyEpochs: how often to look",
            lambda self: self.early_stopping is None or self.repeats,
        ),
    )

    @property
    def repeats(self) -> bool:
        """Whether the sets are run on the way too."""
        return self.every_steps is not None or self.every_epochs is not None


ArgumentNames = Rule(
    "self.all(name, name.matches('^[A-Za-z_][A-Za-z0-9_]{0,62}$'))",
    "names of arguments are those of Python: letters, digits and _, at most 63",
    lambda value: all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", name, re.ASCII) for name in value),
)


class CallbackSpec(ApiModel):
    """A class of the user's that is told what happens in the run, and may ask for a save, an evaluation or its end."""

    import_path: Annotated[
        str,
        Field(max_length=256),
        matches(
            r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
            "must be package.module:Class, where Python finds it in the image",
            NearMiss(r"^[A-Za-z0-9_.]+$", ("put a colon before the name of the class",)),
        ),
    ] = Field(
        alias="class",
        description="package.module:Class, where Python finds it in the image; it inherits from "
        "sft_trainer.callbacks.Callback.",
    )
    arguments: Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=16), ArgumentNames] = (
        Field(
            default_factory=dict,
            description="Keyword arguments of the class, as strings, which are read as the types in its __init__.",
        )
    )


class DummyRunSpec(ApiModel):
    """A probe of speed and memory."""

    steps: Annotated[int, Field(ge=3, le=1000)] = Field(
        default=5, description="Steps that it makes; the first two are not measured."
    )


class TrainingSpec(ApiModel):
    """The optimisation."""

    steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Optimizer steps to train."
    )
    epochs: Epochs | None = Field(
        default=None,
        description="Passes over the data, or a part of one: of 0.5 half the rows are seen, rounded up to a whole one. "
        "1 when neither steps nor epochs are given.",
    )
    global_batch_size: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Examples per optimizer step, over all processes; without packing 32 when absent, rounded up to "
        "whole micro-batches on every process.",
    )
    global_batch_tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None,
        description="Tokens per optimizer step, over all processes, with packing; rounded down to whole "
        "micro-batches on every process. When globalBatchSize is absent too 65,536, rounded up to those.",
    )
    micro_batch_size: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=1, description="Examples of one micro-batch of one process, without packing."
    )
    max_tokens_per_micro_batch: Annotated[int, Field(ge=8, le=16_777_216)] | None = Field(
        default=None,
        description="Tokens of one micro-batch of one process, with packing; data.maxLength when absent. Where a GPU "
        "has memory, several micro-batches go through one forward pass.",
    )
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec, description="The optimizer.")
    schedule: ScheduleSpec = Field(default_factory=ScheduleSpec, description="The learning-rate schedule.")
    precision: Literal["bf16", "fp32"] | None = Field(
        default=None,
        description="Compute precision; parameters are fp32, and so are sums of gradients and moments unless "
        "parameterDtype, strategy and optimizer say otherwise. bf16 on GPUs and fp32 on CPU when absent. On GPUs fp32 "
        "is slow: attention is computed document by document.",
    )
    parameter_dtype: Literal["fp32", "bf16"] | None = Field(
        default=None,
        description="Precision in which trained weights are held, fp32 when absent: with bf16 they take 2 bytes in "
        "place of 4, on GPUs and in checkpoints, and so do their gradients. Updates are computed in fp32, and weights "
        "rounded stochastically, because most updates are smaller than what bf16 can tell apart. Needs precision: "
        "bf16, and weights of the model's own: no lora.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="What layers compute again in the backward pass: selective, all but products of matrices and "
        "attention (about half the memory of activations, some percent slower); full, everything (least memory, a "
        "third slower).",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile the layers (torch.compile) before the first step: steps that take about two thirds of the "
        "time on a GPU, a start that takes up to a minute longer; numbers differ in their last bits. When absent they "
        "are on GPUs in bf16, but those of experts, where strategy, model and image allow it, and not on CPU.",
    )
    loss: Literal["crossEntropy", "dft"] | None = Field(
        default=None,
        description="What is trained of each token, crossEntropy when absent; dft, dynamic fine-tuning, is that times "
        "the probability that the model gives the token, taken for a constant: what it finds unlikely teaches it less. "
        "The loss of a step is that of what is trained, that of an evaluation is cross-entropy whatever it is.",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None,
        description="Share of what is to be predicted that all tokens of the vocabulary have alike, the right one too; "
        "none when absent. Not in evaluations, nor with dft.",
    )
    neftune_noise_alpha: Annotated[float, Field(ge=0, le=1000)] | None = Field(
        default=None,
        description="Noise on the embeddings of tokens in training (NEFTune), uniform up to this over the root of "
        "length times width, of each document by its own length; none when absent. Not in evaluations.",
    )
    router_aux_loss_coefficient: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0,
        description="Of a mixture of experts: what the load-balancing loss of its routers is multiplied by and added "
        "to the loss that is trained, for each micro-batch by its share of the step's tokens; 0 leaves it out, "
        "whatever the model's config says. Loss and evaluation stay those without it; it is reported as auxLoss.",
    )
    trainable_modules: Annotated[list[WeightsName], Field(min_length=1, max_length=128)] | None = Field(
        default=None,
        description="Modules whose weights are trained, by name or the end of it (layers.27, mlp.down_proj, lm_head); "
        "all others stay as they are, and take no gradients, moments or room in checkpoints. With lora they are "
        "trained besides the adapters. When absent all are, with lora none. A name that the model does not have is an "
        "error.",
    )
    seed: Annotated[int, Field(ge=0, le=4_294_967_295)] = Field(
        default=42, description="Seed of the order of the data and of everything random."
    )
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec, description="When the evaluation sets are run.")
    dummy_run: DummyRunSpec | None = Field(
        default=None,
        description="Makes a few steps on random tokens in full batches, and tells their speed and memory, in place of "
        "the run: no data is read, nothing is saved or exported, and the place of the run is left alone.",
    )
    callbacks: Annotated[list[CallbackSpec], Field(max_length=16)] = Field(
        default_factory=list,
        description="Classes of yours that are told what happens in the run, in this order, on every process.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        not_both("training", "steps", "epochs"),
        not_both("training", "global_batch_size", "global_batch_tokens"),
        Rule(
            "!has(self.loss) || self.loss != 'dft' || !has(self.labelSmoothing) || self.labelSmoothing == 0.0",
            "training.loss: dft is of the right token alone, and training.labelSmoothing of all: leave one out",
            lambda self: self.loss != "dft" or not self.label_smoothing,
        ),
    )

    @property
    def held_dtype(self) -> Literal["fp32", "bf16"]:
        """Precision in which trained weights are held."""
        return self.parameter_dtype or "fp32"
