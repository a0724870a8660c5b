"""Inputs of the trainer's benchmark: committed lengths, words of a committed vocabulary, models of two sizes.

They are the same bytes on any machine: conversations of ``lengths.json``, whose words are drawn by a seed as often as
those of a language are (the n-th one 1/n as often as the first), and Qwen3 with random weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.fixtures_inputs import EXAMPLES, make_inputs_script

WORDS = 2000
LENGTHS = Path(__file__).with_name("lengths.json")
"""Words of the question and of the answer of 1,024 conversations."""
CONVERSATIONS = 32
"""Of a step."""
TEMPLATE_TOKENS = 6
"""Of a conversation, beside its words."""
SIZES = {"128x4": (128, 4, 4), "256x6": (256, 6, 8)}
"""Width, layers, heads."""


def example_lengths() -> NDArray[np.int64]:
    """Tokens of each conversation."""
    return np.array([sum(words) + TEMPLATE_TOKENS for words in json.loads(LENGTHS.read_text())])


def conversations() -> list[dict[str, Any]]:
    """All of them, as rows of a data set."""
    draw = np.random.default_rng(0)
    share = 1 / np.arange(1, WORDS + 1)
    share /= share.sum()

    def text(words: int) -> str:
        return " ".join(f"w{word}" for word in draw.choice(WORDS, words, p=share))

    return [
        {"messages": [{"role": "user", "content": text(question)}, {"role": "assistant", "content": text(answer)}]}
        for question, answer in json.loads(LENGTHS.read_text())
    ]


def make_bench_inputs(folder: Path, size: str, rows: int) -> None:
    """``folder/model`` and ``folder/data/train.jsonl`` with the first ``rows`` conversations."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    script = make_inputs_script
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "user", "assistant", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:3])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=words[2],
        pad_token=words[0],
        chat_template=(EXAMPLES / "chat_template.jinja").read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    hidden, layers, heads = SIZES[size]
    model = script.initialise_model(fast, hidden=hidden, layers=layers, heads=heads, seed=0)
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    script.write_jsonl(folder / "data" / "train.jsonl", conversations()[:rows])
