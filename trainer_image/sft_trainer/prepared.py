"""What a run has before the processes meet; ``preparation`` makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_api.progress import Phase
from sft_api.v1alpha1 import SFTJobSpec

from .boxes import Box
from .data.batches import StepSchedule
from .data.tokenized import TokenizedSource
from .models.attention_choice import NOTHING_CHOSEN, Chosen
from .models.causal_lm import CausalLM
from .models.lora import initialize_adapters, is_adapter
from .models.weights import load_weights
from .reporting import Reporter


@dataclass(frozen=True)
class Prepared:
    """Everything read from outside before training: local files only from here on."""

    model_uri: str
    """Where the model came from, at the revision that this run is pinned to."""
    model_path: Path
    model: CausalLM
    """On the meta device, with its adapters if it has any; the files of its weights were found complete."""
    base_digest: str
    """Of the model, as it came (``models.digest``)."""
    companions: dict[str, str]
    """Digests of the files beside its weights, by name."""
    tokenizer: Any
    train: Sequence[TokenizedSource]
    eval: dict[str, TokenizedSource]
    steps: StepSchedule
    total_steps: int
    epoch_size: int
    uncompiled: str
    """Why the layers cannot be compiled, as far as this process knows; empty where they can, or are not to be."""
    attention: Chosen = NOTHING_CHOSEN
    """What FlashAttention 4 computes in this process."""

    def fill(self, boxes: Sequence[Box], spec: SFTJobSpec, reporter: Reporter) -> None:
        """Give ``boxes`` the values that a run starts with: those in the files of the model, adapters their first."""
        if spec.lora is not None:
            initialize_adapters(boxes, spec.lora, spec.training.seed)
        what = f"reading the weights of {spec.model.uri}"
        reporter.phase(Phase.LOADING, what)
        load_weights(
            [box for box in boxes if not is_adapter(box.name)],
            self.model.names,
            self.model_path,
            on_tensor=lambda done: reporter.alive(Phase.LOADING, f"{what}: {done} tensors"),
        )
