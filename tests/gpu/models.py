"""Which models are measured, how each is trained besides, and what share of the time it gets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec

from sft_api.megatron import is_installed

from .inputs import QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B_LORA, SMALL, SMALL_LORA, ModelShape
from .measured import Effort


@dataclass(frozen=True)
class Measured:
    """A model, and what is measured of it."""

    shape: ModelShape
    effort: Effort
    kinds: tuple[str, ...]
    """Of ``measured.KINDS``, in their order."""
    pairs: int = 2
    """1: each kind once, 2: and once more in the order turned round."""
    saves: bool = True
    """Whether a run that saves, and one that goes on from that, are made as well."""
    longer: int = 1
    """Times as long as one of the others a run takes, by its start."""

    @property
    def share(self) -> int:
        """Of the time, beside the others'."""
        return (self.pairs * len(self.kinds) + 2 * self.saves) * self.longer


_ON_GPU = (
    Measured(QWEN3_0_6B, Effort(5, 15, 6.0), ("ours", "plain", "eager", "plain_unpacked")),
    Measured(QWEN3_1_7B, Effort(5, 15, 6.0), ("ours", "plain", "megatron")),
    Measured(QWEN3_8B_LORA, Effort(3, 6, 6.0), ("ours", "plain"), pairs=1, saves=False, longer=3),
)
_ON_CPU = (
    Measured(SMALL, Effort(2, 3, 0.0), ("ours", "plain", "compiled", "megatron", "plain_unpacked")),
    Measured(SMALL_LORA, Effort(2, 3, 0.0), ("ours", "plain"), pairs=1, saves=False),
)


def measured_on(device: str, *, short: bool) -> list[Measured]:
    """What is measured on ``cuda`` or ``cpu``, in this order; ``short`` each once, and none with a compiler."""
    models = list(_ON_GPU if device == "cuda" else _ON_CPU)
    if not short:
        return models
    kinds = [tuple(kind for kind in model.kinds if kind != "compiled") for model in models]
    return [replace(model, kinds=some, pairs=1, saves=False) for model, some in zip(models, kinds, strict=True)]


def lacking(model: Measured) -> Mapping[str, str]:
    """The kinds of ``model`` that this Python cannot run, and the package that it lacks for each."""
    lacks = {}
    if "megatron" in model.kinds and not is_installed():
        lacks["megatron"] = "megatron-core"
    if "plain" in model.kinds and model.shape.rank and find_spec("peft") is None:
        lacks["plain"] = "peft"
    return lacks
