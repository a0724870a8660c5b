"""What a run has before the processes meet; ``preparation`` makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_api.progress import Phase
from sft_api.v1alpha1 import SFTJobSpec

from .boxes import Box
from .data.batches import StepSchedule
from .data.evaluation_set import EvaluationSet
from .data.tokenized import TokenizedSource
from .first_adapters import FirstAdapters
from .models.attention_choice import Chosen
from .models.causal_lm import CausalLM
from .models.lora import initialize_adapters, is_adapter
from .models.trained_rows import first_rows
from .models.weights import load_weights
from .names.tables import NONE_NEW
from .reporting import Reporter


@dataclass(frozen=True)
class PreparedModel:
    """The model of a run, and what this machine and device can do for it."""

    uri: str
    """Where it came from, at the revision that this run is pinned to."""
    path: Path
    blueprint: CausalLM
    """On the meta device, with its adapters if it has any; the files of its weights were found complete."""
    digest: str
    """Of its files, as it came (``models.digest``)."""
    attention: Chosen
    """What FlashAttention 4 computes in this process."""
    uncompiled: str
    """Why the layers cannot be compiled, as far as this process knows; empty where they can, or are not to be."""
    adapters: FirstAdapters | None = None
    """Those of ``lora.adapterUri``; None where they begin anew, or there are none."""
    new_tokens: range = NONE_NEW
    """Numbers of tokens that were added to its tokenizer."""

    def fill(self, boxes: Sequence[Box], spec: SFTJobSpec, reporter: Reporter) -> None:
        """Give ``boxes`` the values that a run starts with: those in the files of the model, adapters their first."""
        if spec.lora is not None:
            initialize_adapters(boxes, spec.lora, spec.training.seed)
        what = f"reading the weights of {spec.model.uri}"
        reporter.phase(Phase.LOADING, what)
        load_weights(
            [*(box for box in boxes if not is_adapter(box.name)), *first_rows(self.blueprint, boxes)],
            self.blueprint.names,
            self.path,
            on_tensor=lambda done: reporter.alive(Phase.LOADING, f"{what}: {done} tensors"),
        )
        if self.adapters is not None:
            self.adapters.fill(boxes)


@dataclass(frozen=True)
class Prepared:
    """Everything read from outside before training: local files only from here on."""

    model: PreparedModel
    companions: dict[str, str]
    """Digests of the files beside the model's weights, by name."""
    tokenizer: Any
    train: Sequence[TokenizedSource]
    eval: dict[str, EvaluationSet]
    steps: StepSchedule
    total_steps: int
    epoch_size: int

    @property
    def sources(self) -> list[TokenizedSource]:
        """All that was tokenised."""
        return [*self.train, *(source for each in self.eval.values() for source in each.sources)]
