"""Compares the loss masks of the product with those marked by hand, token by token.

Which characters a token stands for is found here from the bytes that it decodes to, not from the tokenizer's offsets,
which the product uses.
"""

from collections.abc import Iterator

from sft_trainer.data.examples import Settings, mark_row, to_examples
from sft_trainer.data.formats import Columns
from sft_trainer.data.tokenizer import Codec
from tests.parity.mask_cases import CASES, MaskCase

from .mask_tokenizers import Kind, chat_tokenizer


def expected_mask(case: MaskCase, kind: Kind) -> tuple[list[int], list[int]]:
    """Token ids and loss mask as they must be, from the marks made by hand."""
    tokenizer = chat_tokenizer(case.family, kind)
    ids = tokenizer(case.text, add_special_tokens=False)["input_ids"]
    flags = [
        flag for character, flag in zip(case.text, case.trained_characters, strict=True) for _ in character.encode()
    ]
    mask, position = [], 0
    for start, stop in _bytes_of(ids, case, kind):
        assert start == position, "tokens must cover the text without gaps"
        mask.append(int(any(flags[start:stop])))
        position = stop
    assert position == len(flags)
    mask[0] = 0
    return ids, mask


def _bytes_of(ids: list[int], case: MaskCase, kind: Kind) -> Iterator[tuple[int, int]]:
    """The UTF-8 bytes of the text that each token of a byte-level tokenizer stands for."""
    tokenizer = chat_tokenizer(case.family, kind)
    added = tokenizer.get_added_vocab()
    text = case.text.encode()
    position = 0
    for token in tokenizer.convert_ids_to_tokens(ids):
        # One character of a byte-level token is one byte; added tokens are themselves.
        length = len(token.encode()) if token in added else len(token)
        if token in added and case.family == "phi3":  # these take in the white space behind them
            rest = text[position + length :]
            length += len(rest) - len(rest.lstrip())
        yield position, position + length
        position += length


def actual_mask(case: MaskCase, kind: Kind) -> tuple[str, list[int], list[int], int]:
    """Text, token ids, loss mask and number of straddling tokens from the code that training uses."""
    codec = Codec.of(chat_tokenizer(case.family, kind))
    row = {"messages": case.messages, "tools": case.tools}
    settings = Settings("messages", Columns(), case.train_on, max_length=1_000_000, overlong="error")
    marked = mark_row("the case", row, settings, codec)
    assert marked is not None
    (example,) = to_examples([marked], codec)
    return example.text, list(example.ids), example.mask.tolist(), example.straddling


def mask_mismatches() -> int:
    """Prints and returns how many tokens, over all cases and tokenizers, differ in id or in being trained."""
    mismatches = tokens = 0
    for kind in ("words", "crossing"):
        for case in CASES:
            ids, mask = expected_mask(case, kind)
            _, actual_ids, actual, _ = actual_mask(case, kind)
            wrong = sum(a != b for a, b in zip(zip(ids, mask), zip(actual_ids, actual), strict=False))  # noqa: B905
            wrong += abs(len(ids) - len(actual_ids))
            if wrong:
                print(f"{case.family}, {case.name} ({kind}): {wrong} tokens differ")
            mismatches += wrong
            tokens += len(ids)
    families = len({case.family for case in CASES})
    print(f"loss masks: {mismatches} mismatching tokens of {tokens} ({len(CASES)} cases, {families} template families)")
    return mismatches
