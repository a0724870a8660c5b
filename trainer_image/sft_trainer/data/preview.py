"""What is trained, for people to look at: the text and tokens of single rows with their loss mask.

The rows go through the same functions as in training, so what is shown is what is trained.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from .examples import Example, Settings, mark_row, to_examples
from .formats import TokenIds
from .masks import MarkedText
from .readers import Row
from .sources import open_source
from .tokenize import check_named_columns, settings_for
from .tokenizer import Codec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from sft_api.v1alpha1 import DataSource, DataSpec
    from sft_trainer.checkpoint.store import S3Settings

_TRAINED, _CONTEXT, _RESET = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class PreviewToken:
    """One token; ``text`` is the part of the conversation that it stands for."""

    token_id: int
    text: str
    start: int
    trained: bool


@dataclass(frozen=True)
class Segment:
    """A stretch of text that is trained, or is not."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Preview:
    """One row as the model will see it."""

    place: str
    """Where the row stands, such as ``data.jsonl line 3``."""
    verdict: str
    """``kept``, or what happens to the row and why."""
    text: str
    tokens: tuple[PreviewToken, ...]
    straddling: int
    """Trained tokens that begin before the answer does."""
    incomplete: int = 0
    """Trained messages of which the template leaves out text, such as reasoning that it does not know."""
    answers_before: int = 0
    """Answers that are not trained because ``data.trainOn`` says so."""

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return sum(token.trained for token in self.tokens)

    @property
    def segments(self) -> list[Segment]:
        """The text in stretches, cut where the loss mask changes; together they are the whole text."""
        changes = [next(tokens).start for _, tokens in groupby(self.tokens, key=lambda token: token.trained)]
        flags = [trained for trained, _ in groupby(token.trained for token in self.tokens)]
        bounds = [0, *changes[1:], len(self.text)]
        return [
            Segment(self.text[start:stop], trained)
            for start, stop, trained in zip(bounds, bounds[1:], flags, strict=False)
        ]


def preview_source(
    source: "DataSource",
    data: "DataSpec",
    tokenizer: "PreTrainedTokenizerFast",
    count: int,
    *,
    cache_dir: Path,
    s3: "S3Settings | None" = None,
    token: str | None = None,
) -> list[Preview]:
    """The first ``count`` rows of ``source``. Raises what ``tokenize_source`` raises."""
    rows = open_source(source, cache_dir=cache_dir, s3=s3, token=token)
    settings, codec = settings_for(rows, source, data), Codec.of(tokenizer)
    check_named_columns(rows, settings)
    return [preview_row(place, row, settings, codec) for place, row in rows.read(0, min(count, len(rows)))]


def preview_row(place: str, row: Row, settings: Settings, codec: Codec) -> Preview:
    """One row, tokenised, marked and cut as for training. Raises DataError naming ``place``."""
    marked = mark_row(place, row, settings, codec)
    if marked is None:
        return Preview(place, "dropped: nothing of it is trained", "", (), 0)
    (example,) = to_examples([marked], codec)
    text, offsets = example.text, example.offsets
    if isinstance(marked, TokenIds):
        pieces = codec.pieces(marked.ids)
        ends = list(accumulate(map(len, pieces)))
        text, offsets = "".join(pieces), list(zip([0, *ends], ends, strict=False))
    tokens = tuple(
        PreviewToken(token_id, text[start:stop], start, bool(trained))
        for token_id, (start, stop), trained in zip(example.ids, offsets, example.mask, strict=True)
    )
    before = marked.answers_before if isinstance(marked, MarkedText) else 0
    whole = Preview(place, "kept", text, tokens, example.straddling, example.incomplete, before)
    return whole if len(tokens) <= settings.max_length else _overlong(whole, example, settings)


def _overlong(row: Preview, example: Example, settings: Settings) -> Preview:
    """What is left of a row that is too long: its start, pieces of it, or nothing that is trained."""
    limit = f"{len(row.tokens)} tokens, data.maxLength is {settings.max_length}"
    if settings.overlong == "error":
        return replace(row, verdict=f"an error: {limit}")
    pieces = example.pieces(settings)
    if pieces and settings.overlong == "split":
        # The first token of each piece is predicted by nothing.
        firsts = {*range(0, len(row.tokens), settings.max_length)}
        tokens = tuple(replace(t, trained=t.trained and i not in firsts) for i, t in enumerate(row.tokens))
        return replace(row, verdict=f"split into {len(pieces)} examples: {limit}", tokens=tokens)
    if pieces:
        start = row.tokens[: settings.max_length]
        text = row.text[: start[-1].start + len(start[-1].text)]
        return replace(row, verdict=f"truncated: {limit}", text=text, tokens=start)
    why = f"{limit}, and nothing before it is trained" if settings.overlong == "truncate" else limit
    untrained = tuple(replace(token, trained=False) for token in row.tokens)
    return replace(row, verdict=f"dropped: {why}", tokens=untrained, straddling=0, incomplete=0)


def to_jsonl(previews: Iterable[Preview]) -> Iterator[str]:
    """One JSON object per row (without line end): text, input_ids and loss_mask."""
    for preview in previews:
        yield json.dumps(
            {
                "text": preview.text,
                "input_ids": [token.token_id for token in preview.tokens],
                "loss_mask": [int(token.trained) for token in preview.tokens],
            },
            ensure_ascii=False,
        )


def render_text(preview: Preview, *, color: bool) -> str:
    """The row's text with what is trained set off: bold green on a terminal, ⟦in brackets⟧ elsewhere."""
    if color:
        parts = [f"{_TRAINED if s.trained else _CONTEXT}{s.text}{_RESET}" for s in preview.segments]
    else:
        parts = [f"⟦{s.text}⟧" if s.trained else s.text for s in preview.segments]
    head = f"{preview.place}: {preview.verdict}, {len(preview.tokens)} tokens, {preview.trained} trained"
    if preview.straddling:
        head += f", {preview.straddling} of them begin before the answer"
    if preview.incomplete:
        head += ", and the chat template leaves out text of what is trained"
    if preview.trained and preview.answers_before:
        head += f", {_earlier(preview.answers_before)} context only (data.trainOn: lastAssistantMessage)"
    return f"{head}\n{''.join(parts)}"


def _earlier(answers: int) -> str:
    return "1 earlier answer is" if answers == 1 else f"{answers} earlier answers are"


def render_tokens(preview: Preview, *, color: bool) -> str:
    """A line per token: index, id, ``+`` when trained, and its text."""
    lines = []
    for index, token in enumerate(preview.tokens):
        line = f"{index:6} {token.token_id:8} {'+' if token.trained else ' '} {token.text!r}"
        lines.append(f"{_TRAINED if token.trained else _CONTEXT}{line}{_RESET}" if color else line)
    return "\n".join(lines)
