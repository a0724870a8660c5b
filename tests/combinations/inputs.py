"""Small models of many families, and the same few rows in every format, made on the spot."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.architectures import small_config
from tests.fixtures_inputs import make_inputs
from tests.mxfp4 import pack
from tests.whole_models import change_config, save_whole

from .starts import Run

_ROWS, _EVALUATED = 56, 12
TICKET = "<ticket>"
"""Stands in every third row: a token that a run may add, and text where it does not."""
END_OF_TURN = "<|im_end|>"
"""Of the tokenizer of ``examples/small_model.py``."""
# Rows of all weights are whole blocks of 64 numbers, which 4 bits and moments of 8 bits need.
_WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
_EXPERTS: dict[str, Any] = {**_WIDE, "moe_intermediate_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {**_WIDE, "tie_word_embeddings": True},
    "llama": {**_WIDE, "tie_word_embeddings": False},
    "qwen2": {**_WIDE, "tie_word_embeddings": True},
    "gemma2": {**_WIDE, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "gemma3_text": {**_WIDE, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "phi3": {**_WIDE, "tie_word_embeddings": False},
    "stablelm": {**_WIDE, "tie_word_embeddings": False},
    "gpt_oss": {**_EXPERTS, "intermediate_size": 64},
    "qwen3_moe": _EXPERTS,
    "mixtral": {**_WIDE, "intermediate_size": 64},
    "qwen3_next": {**_EXPERTS, "shared_expert_intermediate_size": 64, "linear_value_head_dim": 16},
    "granitemoehybrid": {},
    "lfm2": _WIDE,
}
"""Types of models of text alone, and fields of their configs."""
WHOLES = ("gemma3", "qwen3_5")
"""Types of models of images and texts."""
IN_BF16 = ("llama", "mixtral")
"""Those whose files are in bf16, as most that are published."""
IN_BRACKETS = (
    "{% for turn in messages %}{% if turn.role == 'assistant' %}{{ ' ' + turn.content + eos_token }}"
    "{% elif turn.role == 'user' %}{{ '[Q] ' + turn.content + ' [/Q]' }}"
    "{% else %}{{ '[S] ' + turn.content + ' [/S] ' }}{% endif %}{% endfor %}"
)
"""A template without markers, or anything but white space to begin an answer with."""
MARKED = (
    "{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\n' }}{% if turn.role == 'assistant' %}"
    "{% generation %}{{ turn.content | trim }}{% endgeneration %}{% else %}{{ turn.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)
"""A template whose markers leave out the end of the turn."""
_OF_CHAT_ML = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
ANSWERS = {
    None: _OF_CHAT_ML,
    MARKED: _OF_CHAT_ML,
    IN_BRACKETS: re.compile(r" \[/Q\](.*?<\|im_end\|>)", re.DOTALL),
}
"""By the template, None for that of the tokenizer, what an answer is in its text, as group 1."""


def make(folder: Path) -> Path:
    """``models`` and ``data`` in ``folder``, which is made."""
    from transformers import AutoTokenizer

    inputs = make_inputs(folder / "tiny", size="tiny")
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    for kind in KINDS:
        _save(folder / "models" / kind, inputs.model, _writes(kind, tokenizer))
    for kind in WHOLES:
        _save(folder / "models" / kind, inputs.model, _writes_whole(kind, tokenizer))
    write_rows(folder / "data", inputs)
    return folder


def _save(folder: Path, tokenizer: Path, write: Callable[[Path], None]) -> None:
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(tokenizer / "tokenizer_config.json", folder)
    write(folder)


def _writes(kind: str, tokenizer: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        config = small_config(
            kind,
            vocab_size=len(tokenizer),
            max_position_embeddings=1024,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            **KINDS[kind],
        )
        dtype = torch.bfloat16 if kind in IN_BF16 else torch.float32
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # Weights of one in norms would hide a mix-up of them, and even routers have nothing to learn.
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.to(dtype).save_pretrained(folder)
        if kind == "gpt_oss":
            pack(folder)

    return write


def _writes_whole(kind: str, tokenizer: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_whole(kind, folder, vocab_size=len(tokenizer) + 16)
        last = len(tokenizer)
        config = json.loads((folder / "config.json").read_text())
        for number, name in enumerate(sorted(name for name in config if name.endswith(("token_id", "token_index")))):
            # Words of the rows stand for no image.
            if name not in ("pad_token_id", "bos_token_id", "eos_token_id"):
                change_config(folder, **{name: last + number % 16})

    return write


def write_rows(folder: Path, inputs: Any, count: int = _ROWS) -> None:
    """The first ``count`` chats of ``inputs``, and a few to evaluate on, in every form, into ``folder``, which is
    made."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inputs.model)

    def chats(file: Path, most: int) -> list[list[dict[str, str]]]:
        rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()[:most]]
        return [_with_tickets(turns) if at % 3 == 0 else turns for at, turns in enumerate(rows)]

    folder.mkdir()
    for name, file, most in (("train", inputs.train, count), ("eval", inputs.eval, _EVALUATED)):
        rows = chats(file, most)
        texts = ["\n".join(turn["content"] for turn in turns) for turns in rows]
        forms: dict[str, list[dict[str, Any]]] = {
            "messages": [{"messages": turns} for turns in rows],
            "shareGPT": [{"conversations": _as_share_gpt(turns)} for turns in rows],
            "alpaca": [{"instruction": turns[-2]["content"], "output": turns[-1]["content"]} for turns in rows],
            "promptCompletion": [
                {"prompt": turns[-2]["content"], "completion": turns[-1]["content"]} for turns in rows
            ],
            "questions": [
                {"question": turns[-2]["content"], "reply": turns[-1]["content"], "persona": "Be brief." * (at % 2)}
                for at, turns in enumerate(rows)
            ],
            "dialogs": [{"dialog": _as_share_gpt(turns)} for turns in rows],
            "history": [_with_history(turns) for turns in rows],
            "continued": [_continued(turns, 1 + at % 2) for at, turns in enumerate(rows)],
            "flagged": [{"messages": _flagged(turns, at)} for at, turns in enumerate(rows)],
            "text": [{"text": text} for text in texts],
            "pretokenized": [_tokens(text, tokenizer) for text in texts],
        }
        for form, written in forms.items():
            (folder / f"{name}-{form}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in written))


def _with_tickets(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**turn, "content": f"{TICKET} {turn['content']}{TICKET}"} for turn in turns]


def _as_share_gpt(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]


def _with_history(turns: list[dict[str, str]]) -> dict[str, Any]:
    said = [turn["content"] for turn in turns if turn["role"] != "system"]
    pairs = [[said[at], said[at + 1]] for at in range(0, len(said), 2)]
    system = {"system": turns[0]["content"]} if turns[0]["role"] == "system" else {}
    return {"instruction": pairs[-1][0], "output": pairs[-1][1], "history": pairs[:-1], **system}


def _continued(turns: list[dict[str, str]], answers: int) -> dict[str, Any]:
    """With so many ``answers`` in the completion, where there are as many."""
    begin = max(len(turns) - 2 * answers + 1, 1 + (turns[0]["role"] == "system"))
    return {"prompt": turns[:begin], "completion": turns[begin:]}


def _flagged(turns: list[dict[str, str]], at: int) -> list[dict[str, Any]]:
    """Whatever a run asks for, every second row has earlier answers trained, and every fifth its last one not."""
    if at % 5 == 0:
        return [*turns[:-1], {**turns[-1], "weight": 0}]
    answers = [turn for turn in range(len(turns) - 1) if turns[turn]["role"] == "assistant"][at % 2 :]
    return [{**turn, "train": True} if number in answers else turn for number, turn in enumerate(turns)]


def _tokens(text: str, tokenizer: Any) -> dict[str, Any]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    begin = len(ids) // 3
    return {"input_ids": ids, "labels": [-100] * begin + ids[begin:]}


def make_adapters(made: Path, job: dict[str, Any], folder_of_run: Path) -> None:
    """Those that ``job`` begins with, as peft writes them, where they are not yet there: a run in ``folder_of_run``
    trains them."""
    uri = job["spec"].get("lora", {}).get("adapterUri")
    if uri is None:
        return
    kind = uri.rpartition("/")[2].removesuffix("-rslora")
    folder = made / "adapters" / kind
    if folder.exists():
        return
    spec = {
        "model": {"uri": f"file://{made}/models/{kind}"},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": [{"uri": f"file://{made}/data/train-messages.jsonl"}], "maxLength": 256, "workers": 1},
        "training": {"steps": 2, "globalBatchTokens": 1024, "optimizer": {"learningRate": 1e-2}},
        "compute": {"gpusPerNode": 0},
    }
    run = Run("adapters", {**job, "spec": spec}, folder_of_run, folder_of_run / "cache")
    ended = run.start()
    assert ended.code == 0, ended
    shutil.copytree(run.store / "export", folder)
    shutil.copytree(folder, folder.with_name(f"{kind}-rslora"))
    config = json.loads((folder / "adapter_config.json").read_text())
    # alpha / sqrt(rank) is what alpha / rank was.
    scaled = {**config, "use_rslora": True, "lora_alpha": config["lora_alpha"] / config["r"] ** 0.5}
    (folder.with_name(f"{kind}-rslora") / "adapter_config.json").write_text(json.dumps(scaled))
