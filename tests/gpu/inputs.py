"""Models and data for the GPU command, made on the spot: random weights in the shapes of real models, no network."""

import importlib
import json
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .figures import Figure

EXAMPLES = Path(__file__).parents[2] / "examples"
_ROWS = 600
_WORDS = (300, 0.6)
"""Of an answer: the median of their number, and the spread of its logarithm."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen3, and how it is trained."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    bin_tokens: int
    """Tokens of one bin."""
    bins: int
    """Of one step."""
    tied: bool = True
    """Whether the head is the embedding."""
    rank: int = 0
    """Of adapters on all linear layers, beside a base in bf16; 0: all weights are trained."""
    utilisation_goal: float = 0.0
    """Share of the peak that the trainer is to reach; 0: none is set."""
    published: str = ""
    """The model whose shape it has; empty for none."""

    def training_flops(self, lengths: list[int]) -> float:
        """Model FLOPs of forward and backward over documents of ``lengths``: PaLM, appendix B, causal attention.

        A weight that is frozen has no gradient of its own: 4 for each of its tokens in place of 6.
        """
        width = self.head_size
        layer = sum(inputs * outputs for inputs, outputs in self._linear_layers())
        matrices = self.layers * layer + self.vocabulary * self.hidden
        each = 4.0 * matrices + 6.0 * self.adapter_parameters() if self.rank else 6.0 * matrices
        attention = 6.0 * self.layers * self.heads * width * sum(length * length for length in lengths)
        return each * sum(lengths) + attention

    def adapter_parameters(self) -> int:
        """Of all layers but the head."""
        return self.layers * self.rank * sum(inputs + outputs for inputs, outputs in self._linear_layers())

    def _linear_layers(self) -> list[tuple[int, int]]:
        """Inputs and outputs of those of one block."""
        heads, key_heads = self.heads * self.head_size, self.key_heads * self.head_size
        attention = [(self.hidden, heads), (self.hidden, key_heads), (self.hidden, key_heads), (heads, self.hidden)]
        wide = (self.hidden, self.intermediate)
        return [*attention, wide, wide, (self.intermediate, self.hidden)]


QWEN3_0_6B = ModelShape(
    "qwen3_0.6b",
    1024,
    3072,
    28,
    16,
    8,
    128,
    151_936,
    bin_tokens=4096,
    bins=4,
    utilisation_goal=0.40,
    published="Qwen/Qwen3-0.6B",
)
QWEN3_1_7B = ModelShape(
    "qwen3_1.7b",
    2048,
    6144,
    28,
    16,
    8,
    128,
    151_936,
    bin_tokens=4096,
    bins=4,
    utilisation_goal=0.45,
    published="Qwen/Qwen3-1.7B",
)
QWEN3_8B_LORA = ModelShape(
    "qwen3_8b_lora",
    4096,
    12288,
    36,
    32,
    8,
    128,
    151_936,
    bin_tokens=4096,
    bins=4,
    tied=False,
    rank=16,
    utilisation_goal=0.50,
    published="Qwen/Qwen3-8B",
)
SMALL = ModelShape("small", 64, 128, 2, 4, 2, 16, 2048, bin_tokens=512, bins=2)
SMALL_LORA = ModelShape("small_lora", 64, 128, 2, 4, 2, 16, 2048, bin_tokens=512, bins=2, tied=False, rank=4)
"""The two in the place of the others on a CPU."""


def make_small_inputs(folder: Path) -> dict[str, Figure]:
    """Conversations, a tokenizer and a small model below ``folder``, by examples/make_inputs.py; heads of 64."""
    sys.path.insert(0, str(EXAMPLES))
    script: Any = importlib.import_module("make_inputs")
    tiny = script.SHAPES["tiny"]
    script.make_inputs_of_shape(
        folder, script.Shape(rows=200, hidden=128, layers=2, heads=2, vocabulary=512, modules=tiny.modules), 0
    )
    return {}


def make_long_rows(small: Path, target: Path, *, scale: float) -> None:
    """Conversations with long answers, of words from the data of ``small``; ``scale`` times the usual length."""
    rows = [json.loads(line) for line in (small / "data" / "train.jsonl").read_text().splitlines()]
    words = " ".join(row["messages"][-1]["content"] for row in rows).split()
    draw = random.Random(0)
    lines = []
    for row in rows * (_ROWS // len(rows)):
        count = max(4, round(scale * _WORDS[0] * draw.lognormvariate(0.0, _WORDS[1])))
        start = draw.randrange(len(words))
        answer = " ".join((words * 2)[start : start + count])
        question = next(turn for turn in row["messages"] if turn["role"] == "user")
        lines.append(json.dumps({"messages": [question, {"role": "assistant", "content": answer}]}))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines) + "\n")


def make_model(shape: ModelShape, small: Path, target: Path, device: torch.device) -> int:
    """A model of ``shape`` with random bf16 weights, and the tokenizer of ``small``, in ``target``; its parameters."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_size,
        max_position_embeddings=max(4096, shape.bin_tokens),
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target)
    for file in (small / "model").iterdir():
        if not (target / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, target)
    return sum(parameter.numel() for parameter in model.parameters())
