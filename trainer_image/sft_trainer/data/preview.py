"""What is trained, for people to look at: the text and tokens of single rows with their loss mask.

The rows go through the same functions as in training, so what is shown is what is trained.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from .examples import Example, Settings, mark_row, to_examples
from .formats import TokenIds
from .readers import Row
from .tokenizer import Codec

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
    context_answers: int = 0
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
    verdict, mask = _verdict(example, settings)
    tokens = tuple(
        PreviewToken(token_id, text[start:stop], start, bool(trained))
        for token_id, (start, stop), trained in zip(example.ids, offsets, mask, strict=False)
    )
    if len(mask) < len(example.ids):
        text = text[: offsets[len(mask) - 1][1]]
    if not mask.any():
        return Preview(place, verdict, text, tokens, 0)
    return Preview(place, verdict, text, tokens, example.straddling, example.incomplete, example.context_answers)


def _verdict(example: Example, settings: Settings) -> tuple[str, NDArray[np.uint8]]:
    """What becomes of a row, and which tokens of it are trained: of one that is cut, of those that are left."""
    if len(example.ids) <= settings.max_length:
        return "kept", example.mask
    limit = f"{len(example.ids)} tokens, data.maxLength is {settings.max_length}"
    if settings.overlong == "error":
        return f"an error: {limit}", example.mask
    pieces = example.pieces(settings)
    if pieces and settings.overlong == "split":
        mask = example.mask.copy()
        mask[:: settings.max_length] = 0  # the first token of each piece is predicted by nothing
        return f"split into {len(pieces)} examples: {limit}", mask
    if pieces:
        return f"truncated: {limit}", pieces[0][1]
    why = f"{limit}, and nothing before it is trained" if settings.overlong == "truncate" else limit
    return f"dropped: {why}", np.zeros_like(example.mask)


def to_jsonl(previews: Iterable[Preview], *, ensure_ascii: bool = False) -> Iterator[str]:
    """One JSON object per row (without line end): text, input_ids and loss_mask."""
    for preview in previews:
        yield json.dumps(
            {
                "text": preview.text,
                "input_ids": [token.token_id for token in preview.tokens],
                "loss_mask": [int(token.trained) for token in preview.tokens],
            },
            ensure_ascii=ensure_ascii,
        )


def render_text(preview: Preview, *, color: bool) -> str:
    """The row's text with what is trained set off: bold green on a terminal, ⟦in brackets⟧ elsewhere.

    With colours those of the text itself are written out: it would end ours, or have what is trained not be seen.
    """
    place = preview.place
    if color:
        place = _without_colours(place)
        parts = [f"{_TRAINED if s.trained else _CONTEXT}{_without_colours(s.text)}{_RESET}" for s in preview.segments]
    else:
        parts = [f"⟦{s.text}⟧" if s.trained else s.text for s in preview.segments]
    head = f"{place}: {preview.verdict}, {len(preview.tokens)} tokens, {preview.trained} trained"
    if preview.straddling:
        head += f", {preview.straddling} of them begin before the answer"
    if preview.incomplete:
        head += ", and the chat template leaves out text or tools of what is trained"
    if preview.trained and preview.context_answers:
        head += f", {_earlier(preview.context_answers)} context only (data.trainOn: lastAssistantMessage)"
    return f"{head}\n{''.join(parts)}"


def _without_colours(text: str) -> str:
    return text.replace("\x1b", "\\x1b")


def _earlier(answers: int) -> str:
    return "1 earlier answer is" if answers == 1 else f"{answers} earlier answers are"
