"""A small Qwen3 with random weights, and a tokenizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(rows: Sequence[dict[str, Any]], vocabulary: int) -> Any:
    """A byte-level BPE of at most `vocabulary` tokens (259 at least: 256 bytes and three control tokens)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary < 259:
        raise ValueError(f"vocabulary: {vocabulary} is too small for 256 bytes and three control tokens: at least 259")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (message["content"] for row in rows for message in row["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def initialise_model(tokenizer: Any, *, hidden: int, layers: int, heads: int, seed: int) -> Any:
    """A Qwen3ForCausalLM with random fp32 weights; the caller's random state is left as it was."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    if hidden % (2 * heads):
        raise ValueError(f"hidden: {hidden} is no multiple of twice the number of heads ({2 * heads})")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # A narrow model hardly learns from the usual 0.02, which suits widths of thousands.
        initializer_range=round(hidden**-0.5, 4),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    return model
