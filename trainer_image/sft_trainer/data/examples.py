"""One row as tokens, with those marked that are trained: what training, looking ahead and showing have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from sft_trainer.errors import DataError

from .chat import Span, TemplateRefusal
from .formats import Columns, Format, PlainText, TokenIds, read_row
from .masks import MarkedText, TrainOn, foreign_control_token, mark, token_mask
from .readers import Row
from .tokenizer import Codec

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True)
class Settings:
    """How rows become examples; everything but the rows and the tokenizer."""

    row_format: Format
    columns: Columns
    train_on: TrainOn
    max_length: int
    overlong: Literal["drop", "truncate", "split", "error"]


@dataclass(frozen=True)
class Example:
    """One row as the model sees it, whatever its length."""

    ids: Sequence[int]
    mask: NDArray[np.uint8]
    """1 for each token that is trained; shape (tokens,)."""
    text: str
    offsets: Sequence[Span]
    """Of each token, its characters of ``text``. Of rows that were tokenised already there are neither."""
    straddling: int = 0
    """Trained tokens that begin before, or end behind, the text that is trained."""
    incomplete: int = 0
    """Trained messages of which the template leaves out text."""
    context_answers: int = 0
    """Answers that ``data.trainOn`` leaves untrained."""
    empty: int = 0
    """Trained answers that say nothing."""
    answers: int = 1
    """Trained answers; a text is one."""

    def pieces(self, settings: Settings) -> list[tuple[Sequence[int], NDArray[np.uint8]]]:
        """Tokens and masks of what is kept of it: as many as ``settings`` allow at once, those that train something."""
        overlong = len(self.ids) > settings.max_length
        if overlong and settings.overlong in ("drop", "error"):
            return []
        starts = range(0, len(self.ids), settings.max_length)
        found = []
        for start in starts if settings.overlong == "split" else starts[:1]:
            mask = self.mask[start : start + settings.max_length].copy()
            mask[:1] = 0  # nothing predicts the first token of an example
            if mask.any():
                found.append((self.ids[start : start + settings.max_length], mask))
        return found


Marked = MarkedText | PlainText | TokenIds
"""One row with what of it is trained."""


def mark_row(place: str, row: Row, settings: Settings, codec: Codec) -> Marked | None:
    """``row``, rendered where it is a conversation; None when nothing of it is trained.

    Raises DataError naming ``place``, and ModelError where the tokenizer lacks what rows of the format need.
    """
    try:
        content = read_row(row, settings.row_format, settings.columns)
        if isinstance(content, TokenIds):
            _check_ids(content, settings, codec)
            return content if any(content.trained[1:]) else None  # nothing predicts the first one
        if isinstance(content, PlainText):
            codec.check_ending()
            content.text.encode()
            return replace(content, whole=settings.train_on == "allTokens") if content.text else None
        template = codec.template(content.tools).given(content.variables)
        if foreign := foreign_control_token(content, codec.control_tokens):
            raise DataError(f"{foreign}; remove or reword it, or the tokenizer takes it for the real one")
        marked = mark(template, content, settings.train_on)
        if marked is not None:
            marked.text.encode()
        return marked
    except (DataError, TemplateRefusal) as error:
        raise DataError(f"{place}: {error}") from error
    except UnicodeEncodeError as error:  # JSON may escape one half of a surrogate pair; no tokenizer takes that
        half = error.object[error.start]
        raise DataError(
            f"{place}: {half!r} is half a character (a lone surrogate); correct or remove the row"
        ) from error
    except RecursionError as error:
        raise DataError(f"{place}: its values are nested too deeply; flatten or remove the row") from error


def _check_ids(row: TokenIds, settings: Settings, codec: Codec) -> None:
    for i, token in enumerate(row.ids):
        if not 0 <= token < codec.size:
            raise DataError(
                f"column '{settings.columns.of('input_ids')}' has token {token} at place {i + 1}, and the tokenizer of "
                f"the model has tokens 0 to {codec.size - 1}; tokenise the rows with that one, or correct "
                "model.tokenizerUri"
            )


def to_examples(rows: Sequence[Marked], codec: Codec) -> list[Example]:
    """Each of ``rows`` as tokens, in their order."""
    encodings = iter(codec.encode([row.text for row in rows if not isinstance(row, TokenIds)]))
    return [_of_ids(row) if isinstance(row, TokenIds) else _of_text(row, next(encodings), codec) for row in rows]


def _of_ids(row: TokenIds) -> Example:
    mask = np.asarray(row.trained, np.uint8)
    mask[:1] = 0
    return Example(row.ids, mask, "", ())


def _of_text(row: MarkedText | PlainText, encoding: "Encoding", codec: Codec) -> Example:
    if isinstance(row, MarkedText):
        mask, straddling = token_mask(row.text, encoding.offsets, row.spans)
        return Example(
            encoding.ids,
            mask,
            row.text,
            encoding.offsets,
            straddling,
            row.incomplete,
            context_answers=row.context_answers,
            empty=row.empty,
            answers=row.answers,
        )
    # Put around the tokens, not around the text: behind a special token some tokenizers split what follows otherwise.
    first, last = codec.around(row.text, encoding.ids)
    text = "".join([*first, row.text, *last])
    ends = [0, *accumulate(map(len, (*first, row.text, *last)))]
    spans, shift = [*pairwise(ends)], ends[len(first)]
    offsets = [(start + shift, stop + shift) for start, stop in encoding.offsets]
    offsets = [*spans[: len(first)], *offsets, *spans[len(first) + 1 :]]
    begin = shift + (0 if row.whole else len(row.prompt))
    mask, straddling = token_mask(text, offsets, [(begin, len(text))])
    ids = [*codec.numbers(first), *encoding.ids, *codec.numbers(last)]
    return Example(ids, mask, text, offsets, straddling, empty=not row.trained.strip())
