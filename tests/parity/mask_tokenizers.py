"""Small tokenizers for the chat templates in tests/unit/data/templates, trained in a second."""

from functools import cache
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent.parent / "unit" / "data" / "templates"

Kind = Literal["words", "crossing", "sentencepiece"]
"""words: byte-level BPE as in GPT-2 and later; crossing: the same with merges across white space and line ends, so
that tokens straddle the border of an answer; sentencepiece: "▁" for spaces and bytes for unknown characters."""

SPECIAL = {
    "chatml": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "marked": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "deepseek_r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "gemma4": (
        "<eos>",
        *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    ),
    "cohere": (
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
    ),
    "glm": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "harmony": ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
}
BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "phi3": "<s>", "mistral": "<s>"} | dict.fromkeys(
    ("deepseek", "deepseek_r1"), "<｜begin▁of▁sentence｜>"
)
EOS = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "marked": "<|endoftext|>",
    "llama3": "<|eot_id|>",
    "gemma": "<eos>",
    "phi3": "<|endoftext|>",
    "mistral": "</s>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "deepseek_r1": "<｜end▁of▁sentence｜>",
    "gemma4": "<eos>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "glm": "<|endoftext|>",
    "harmony": "<|return|>",
}
NOT_SPECIAL = {
    "chatml": ("<tool_call>", "</tool_call>"),
    "qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "glm": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
}

_TEXT = (
    "user\nHow are you? assistant\nThe answer is four. model\nThe weather in Rome is sunny. "
    "system\nYou are a helpful assistant. \n\nThe \n\nHello there, hello world. 你好 ünïcödé 🙂 "
)


@cache
def chat_tokenizer(family: str, kind: Kind = "words") -> PreTrainedTokenizerFast:
    """The tokenizer of a family of chat templates; about 600 tokens."""
    special = [AddedToken(token, special=True, rstrip=family == "phi3") for token in SPECIAL[family]]
    tokenizer = _sentencepiece() if kind == "sentencepiece" else _byte_level(crossing=kind == "crossing")
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token) for token in NOT_SPECIAL.get(family, ())])
    loaded = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS.get(family),
        eos_token=EOS[family],
        chat_template=(TEMPLATES / f"{family}.jinja").read_text().rstrip("\n"),
    )
    if kind != "sentencepiece":
        # As many models have it: offsets without the white space of a token, which makes some of them empty.
        # Set last, because the constructor replaces it.
        loaded.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return loaded


def _byte_level(*, crossing: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not crossing)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    # Crossing merges: short texts, so that "\nThe" and the like become tokens.
    texts = ["\nThe", "\nHello", " The", ". The", "answer is"] * 50 if crossing else [_TEXT] * 20
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=["<unk>", *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator([_TEXT.replace(" 你好 ünïcödé 🙂", "")] * 20, trainer)
    return tokenizer
