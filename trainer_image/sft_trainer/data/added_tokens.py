"""Tokens that a run gives its tokenizer: ``model.addedTokens`` and ``model.addedSpecialTokens``."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from typing import TYPE_CHECKING

from sft_api.v1alpha1.workload import CAN_BE_ADDED
from sft_trainer.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PIECES_SHOWN = 5
_FIELDS = {False: "model.addedTokens", True: "model.addedSpecialTokens"}


def add_tokens(backend: "Tokenizer", tokens: Mapping[str, bool]) -> range:
    """Give ``backend`` those of ``tokens`` that it lacks, special or not; their numbers, which follow all that it had.

    Of those that it has already, as after a run that added them, nothing changes; where it has them all there are no
    numbers, and they would begin behind the last of ``tokens``. Raises ``ConfigError`` for tokens that mean something
    else there, ``ModelError`` for a tokenizer whose numbers have gaps that new ones would get into.
    """
    from tokenizers import AddedToken

    vocabulary = backend.get_vocab(with_added_tokens=True)
    new = _lacking(backend, vocabulary, tokens)
    if not new:
        behind = 1 + max(vocabulary[token] for token in tokens)
        return range(behind, behind)
    first = 1 + max(vocabulary.values())
    # As they are written, whatever a normalizer makes of other text, and without the white space around them. All at
    # once: whatever finds tokens in a text is made anew by each call.
    backend.add_tokens([AddedToken(token, normalized=False, special=tokens[token]) for token in new])
    numbers = [backend.token_to_id(token) for token in new]
    if numbers != [*range(first, first + len(new))]:
        raise ModelError(
            f"the tokenizer has numbers up to {first - 1} with gaps between them, and gives new tokens such as others "
            f"have, or may have ({numbers[0]} to {new[0]!r}): none can be added, name another one in model.tokenizerUri"
        )
    return range(first, first + len(new))


def _lacking(backend: "Tokenizer", vocabulary: Mapping[str, int], tokens: Mapping[str, bool]) -> list[str]:
    """Those of ``tokens`` that are not in the ``vocabulary``; a ``ConfigError`` for such as cannot be added."""
    added = [*backend.get_added_tokens_decoder().values()]
    known = {token.content: token.special for token in added}
    normalized = [token.content for token in added if token.normalized]
    special = [token for token, is_special in (known | dict(tokens)).items() if is_special]
    begins = {other[:length]: other for other in reversed(special) for length in range(1, len(other))}
    lacking = list[str]()
    for token, is_special in tokens.items():
        field = _FIELDS[is_special]
        if token in known:
            if known[token] != is_special:
                how = "a special token" if known[token] else "a token that is not special"
                raise ConfigError(
                    f"{field} has {token!r}, which is {how} of the tokenizer already: write it into "
                    f"{_FIELDS[known[token]]}, or leave it out"
                )
        elif token in vocabulary or _is_ordinary(token, backend):
            raise ConfigError(
                f"{field} has {token!r}, which is an ordinary token of the tokenizer already: leave it out"
            )
        elif inner := next((other for other in special if other in token and other != token), None):
            raise ConfigError(
                f"{field} has {token!r}, in which the special token {inner!r} would not be found any more: choose "
                "another name for it"
            )
        elif end := next((end for end in _ends(token) if begins.get(end, token) != token), None):
            raise ConfigError(
                f"{field} has {token!r}, whose end {end!r} is how the special token {begins[end]!r} begins, which "
                f"would not be found behind {token.removesuffix(end)!r} any more: choose another name for it"
            )
        elif outer := next((other for other in normalized if token in other), None):
            # Of those that are normalised only what the others have left is searched.
            raise ConfigError(
                f"{field} has {token!r}, which is a part of {outer!r}: the tokenizer has that already, and would not "
                "find it any more: choose another name for it"
            )
        else:
            lacking.append(token)
    return lacking


def numbers_of(backend: "Tokenizer", tokens: Iterable[str]) -> list[int]:
    """The numbers of ``tokens``, ascending; a ``ConfigError`` for text that is not one token of ``backend``."""
    added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
    found = set[int]()
    for token in tokens:
        number = added.get(token, _number_of(token, backend))
        if number is None:
            pieces = [backend.decode([one], skip_special_tokens=False) for one in _encoded(token, backend)]
            added_instead = "name it in model.addedTokens, or " if CAN_BE_ADDED.check(token) else ""
            raise ConfigError(
                f"lora.trainableTokens has {token!r}, which is no token of the tokenizer, but {len(pieces)} "
                f"({', '.join(map(repr, pieces[:_PIECES_SHOWN]))}{', …' * (len(pieces) > _PIECES_SHOWN)}): "
                f"{added_instead}leave it out"
            )
        found.add(number)
    return sorted(found)


def _ends(token: str) -> Iterator[str]:
    """What is left of ``token`` without its first characters, the longest first."""
    return (token[start:] for start in range(1, len(token)))


def _is_ordinary(token: str, backend: "Tokenizer") -> bool:
    """Whether ``backend`` makes one token of it, by whatever name: byte-level vocabularies spell 你好 as ä½łå¥½."""
    return _number_of(token, backend) is not None


def _number_of(token: str, backend: "Tokenizer") -> int | None:
    """What ``backend`` makes of it; None where that is not one token."""
    numbers = _encoded(token, backend)
    # One that stands for all that is unknown, or for the text in lower case, is another text.
    if len(numbers) == 1 and backend.decode(numbers, skip_special_tokens=False) == token:
        return numbers[0]
    return None


def _encoded(token: str, backend: "Tokenizer") -> list[int]:
    encoding = backend.encode(token, add_special_tokens=False)
    return [*compress(encoding.ids, encoding.attention_mask)]  # some backends pad
