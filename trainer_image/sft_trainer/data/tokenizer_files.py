"""The chat template of a tokenizer from its files, without transformers, where the files say all there is to know."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .added_tokens import add_tokens
from .tokenizer import Codec, template_of_processor, without_additions

_VARIABLE = re.compile(r"\b[a-z_]+_token\b")


def read_codec(
    folder: Path, chat_template: str | None, tokens: Mapping[str, bool] = MappingProxyType({})
) -> Codec | None:
    """What ``Codec.of(load_tokenizer(folder, chat_template, tokens))`` gives, as far as templates and such tokens go
    that are special or added.

    None where the two could differ: then only transformers can tell. Raises what ``add_tokens`` raises.
    """
    try:
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        templates = {"default": chat_template} if chat_template is not None else _templates(folder, config)
        added = json.loads(tokenizer_json)["added_tokens"]
        declared = config.get("added_tokens_decoder", {})
        special_tokens = _special_tokens(config)
        known = {token["content"]: bool(token["special"]) for token in added}
        says_otherwise = any(
            known.get(token["content"]) != bool(token["special"]) for token in declared.values()
        ) or any(text not in known for text in special_tokens.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    unknown = {name for text in templates.values() for name in _VARIABLE.findall(text)} - special_tokens.keys()
    # Without that key it is in another file, or the default of a class.
    if not templates or says_otherwise or unknown or "eos_token" not in special_tokens:
        return None
    codec = Codec(tokenizer_json=without_additions(tokenizer_json), special_tokens=special_tokens, templates=templates)
    if not tokens:
        return codec
    add_tokens(codec.backend, tokens)
    return replace(codec, tokenizer_json=codec.backend.to_str())


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    if (folder / "additional_chat_templates").exists():
        return {}
    if (file := folder / "chat_template.jinja").is_file():
        return {"default": file.read_text(encoding="utf-8")}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    template = template or template_of_processor(folder)
    return {"default": template} if template else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Name and text of the tokens that a template may name, such as ``eos_token``."""
    texts = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
