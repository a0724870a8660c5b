"""The tokenizer and its chat template, checked for what exact masks need."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, pairwise, takewhile
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sft_trainer.errors import ModelError
from sft_trainer.git_lfs import pointer_problem
from sft_trainer.names.tables import NONE_NEW

from .added_tokens import add_tokens
from .chat import ChatTemplate, TemplateRefusal, any_of

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

# Scripts, emoji, runs of white space and line ends: where tokenizers get offsets wrong.
_OFFSETS_PROBE = "Hello  wörld\n\n  你好 🙂👩‍👩‍👧 fin. "
_TEMPLATES_READ = ("default", "tool_use")
"""Names of those templates that rows are rendered with; others, such as one for documents, are for other uses."""


def load_tokenizer(
    path: Path, chat_template: str | None = None, tokens: Mapping[str, bool] = MappingProxyType({})
) -> "PreTrainedTokenizerFast":
    """The tokenizer stored in ``path``, with ``chat_template`` (the template itself) in place of its own if given, and
    ``tokens`` that it may lack (``ModelSpec.new_tokens``).

    No code of the model is ever run. Raises ModelError when there is no fast tokenizer (only those report offsets, and
    exact masks need them), or when ``chat_template`` cannot be used. Its own template is looked at when there are
    conversations to render: many base models have none, or one of which they know nothing.
    """
    tokenizer, _ = load_with_new_tokens(path, chat_template, tokens)
    return tokenizer


def load_with_new_tokens(
    path: Path, chat_template: str | None, tokens: Mapping[str, bool]
) -> tuple["PreTrainedTokenizerFast", range]:
    """As ``load_tokenizer``, and the numbers of those of ``tokens`` that were not there."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # OSError, ValueError, KeyError … depending on which file is missing or odd
        if problem := next(filter(None, map(pointer_problem, sorted(path.glob("token*")))), ""):
            raise ModelError(f"no usable tokenizer: {problem}") from error
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"no usable tokenizer in {path}: {reason}; set model.tokenizerUri to a folder with tokenizer.json and "
            "tokenizer_config.json (tokenizers that need code of the model are not supported)"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"the tokenizer in {path} ({type(tokenizer).__name__}) reports no character offsets, without which loss "
            "masks cannot be exact; set model.tokenizerUri to one with a tokenizer.json"
        )
    if set(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)) <= set(tokenizer.get_added_vocab()):
        # What transformers makes of config.json alone, for Qwen and Gemma: a tokenizer without vocabulary.
        raise ModelError(
            f"no usable tokenizer in {path}: it knows no tokens but special ones, as where its files are missing; put "
            "tokenizer.json and tokenizer_config.json there, or set model.tokenizerUri to a folder that has them"
        )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    elif not tokenizer.chat_template:
        tokenizer.chat_template = template_of_processor(path)
    new = add_tokens(tokenizer.backend_tokenizer, tokens) if tokens else NONE_NEW
    codec = Codec.of(tokenizer)
    codec.check_offsets()
    if chat_template is not None:
        codec.check_templates()
    return tokenizer, new


def template_of_processor(path: Path) -> str | None:
    """The chat template that older models of images have in ``path`` for their processor alone; None without one."""
    try:
        template = json.loads((path / "chat_template.json").read_bytes())["chat_template"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return template if isinstance(template, str) else None


def without_additions(tokenizer_json: str) -> str:
    """A backend tokenizer that does nothing but split text into tokens."""
    backend = json.loads(tokenizer_json)
    backend.update(post_processor=None, truncation=None, padding=None)
    return json.dumps(backend, ensure_ascii=False)


@dataclass(frozen=True)
class Codec:
    """What turns conversations and texts into tokens, in a form that can be sent to other processes.

    ``tokenizer_json`` is the backend tokenizer without post-processor, truncation and padding: chat templates write
    every special token themselves, and some post-processors trim white space off the offsets (a token of white
    space then has no character of its own).
    """

    tokenizer_json: str
    special_tokens: dict[str, Any]
    templates: dict[str, str]
    """By name: ``default`` and, for some models, ``tool_use``; none of many base models."""
    before_texts: tuple[str, ...] = ()
    """Tokens that the tokenizer itself puts before a text: ``bos_token``, as far as it puts any; GLM's are two."""

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerFast") -> "Codec":
        template, backend = tokenizer.chat_template, tokenizer.backend_tokenizer
        probe = backend.encode("a")
        # Some backends pad, too.
        unpadded = compress(zip(probe.tokens, probe.special_tokens_mask, strict=True), probe.attention_mask)
        before = takewhile(itemgetter(1), unpadded)
        return cls(
            tokenizer_json=without_additions(backend.to_str()),
            special_tokens=dict(tokenizer.special_tokens_map),
            templates=dict(template) if isinstance(template, dict) else {"default": template} if template else {},
            before_texts=tuple(token for token, _ in before),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the tokenizer and its templates."""
        parts = [self.tokenizer_json, self.special_tokens, self.templates, self.before_texts]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def backend(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.tokenizer_json)

    @cached_property
    def size(self) -> int:
        """One more than the highest token."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        """All that can be used; ModelError where one cannot."""
        added = tuple(token.content for token in self.backend.get_added_tokens_decoder().values())
        found = {
            name: ChatTemplate(source, self.special_tokens, added)
            for name, source in self.templates.items()
            if name in _TEMPLATES_READ
        }
        _check_templates(found, [*self.templates])
        return found

    def template(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """The template for a conversation with or without tools, chosen as transformers does.

        Raises ModelError when there is none, or one that cannot be used for training.
        """
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]

    @property
    def turn_ends(self) -> list[str]:
        """Tokens with which the templates end an answer, each once; where none can be used that which ends a text."""
        try:
            templates = [self.template(tools) for tools in (None, ["any"])]
        except ModelError:  # of a model that is trained on texts
            end = self.special_tokens.get("eos_token")
            return [end] if end else []
        turns = [template.assistant_turn for template in templates]
        return [*dict.fromkeys(end for turn in turns for end in (turn.last, turn.next_result) if end)]

    @cached_property
    def control_tokens(self) -> re.Pattern[str]:
        """Matches tokens that data must not spell out: special ones, and those that end a turn.

        Added tokens that are not special (``<think>``, ``<tool_call>``) may be part of an answer.
        """
        special = [t.content for t in self.backend.get_added_tokens_decoder().values() if t.special]
        ends = [token for template in self._templates.values() for token in template.assistant_turn.ends]
        return any_of([*dict.fromkeys([*special, *ends])])

    def encode(self, texts: Sequence[str]) -> list["Encoding"]:
        """Token ids and character offsets of rendered texts; no token is added to what the template wrote."""
        encodings: list[Encoding] = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return encodings

    def check_templates(self) -> None:
        """Raises ModelError when there is no chat template, or one that cannot be used for training."""
        _ = self._templates

    def check_ending(self) -> None:
        """Raises ModelError when no token ends a text."""
        if not self.special_tokens.get("eos_token"):
            raise ModelError(
                "the tokenizer has no eos_token to end a text with, so the model would never learn to stop; set "
                "model.tokenizerUri to one that has it"
            )

    def around(self, text: str, ids: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tokens that belong before and behind ``text``, whose own are ``ids``, as the tokenizer and the end of a
        text have it; none where the text has them already. Many chat templates write a line end behind the last one."""
        begin, end = self.before_texts, (self.special_tokens["eos_token"],)
        ended = text.rstrip().endswith(end) and not {*self.numbers(end)}.isdisjoint(ids)
        return () if list(ids[: len(begin)]) == self.numbers(begin) else begin, () if ended else end

    def numbers(self, tokens: Sequence[str]) -> list[int]:
        """The numbers of ``tokens``."""
        return [number for token in tokens if (number := self.backend.token_to_id(token)) is not None]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each of ``ids`` adds to their text; a character of several tokens comes with its last one."""
        from tokenizers.decoders import DecodeStream

        stream, pieces = DecodeStream(skip_special_tokens=False), []
        for token in ids:
            try:
                pieces.append(stream.step(self.backend, token) or "")
            except Exception:  # its own class, for bytes that with those before them are no character
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append(f"\ufffd{stream.step(self.backend, token) or ''}")
        return pieces

    def check_offsets(self) -> None:
        """Raises ModelError when the tokenizer's offsets do not cover a text."""
        offsets = self.encode([_OFFSETS_PROBE])[0].offsets
        ascending = all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(offsets))
        if not offsets or not ascending or offsets[-1][1] < len(_OFFSETS_PROBE.rstrip()):
            raise ModelError(
                "the tokenizer's character offsets do not cover the text, so loss masks cannot be exact; set "
                "model.tokenizerUri to a tokenizer.json with offsets"
            )


def _check_templates(templates: Mapping[str, ChatTemplate], names: Sequence[str]) -> None:
    """Raises ModelError when templates do not compile, or cannot be used for training; ``names`` are those of all."""
    import jinja2

    if not names:
        raise ModelError(
            "the tokenizer has no chat template; set model.chatTemplate (examples/chat_template.jinja is one), or "
            "write the rows as text (prompt and completion) if the model is to read them without one"
        )
    if "default" not in templates:
        raise ModelError(f"no chat template named 'default', only {', '.join(names)}; set model.chatTemplate")
    for name, template in templates.items():
        try:
            template.check_syntax()
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"chat template '{name}' has a syntax error in line {error.lineno}: {error.message}; "
                "correct it or set model.chatTemplate"
            ) from error
        try:
            _ = template.assistant_turn
        except TemplateRefusal as error:
            raise ModelError(f"chat template '{name}' cannot be used for training: {error}") from error
