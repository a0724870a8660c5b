"""Tokens that a run gives its tokenizer: ``model.addedTokens`` and ``model.addedSpecialTokens``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sft_trainer.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FIELDS = {False: "model.addedTokens", True: "model.addedSpecialTokens"}


def add_tokens(backend: "Tokenizer", tokens: Mapping[str, bool]) -> range:
    """Give ``backend`` those of ``tokens`` that it lacks, special or not; their numbers, which follow all that it had.

    Of those that it has already, as after a run that added them, nothing changes. Raises ``ConfigError`` for tokens
    that mean something else there, ``ModelError`` for a tokenizer whose numbers have gaps that new ones would get into.
    """
    from tokenizers import AddedToken

    vocabulary = backend.get_vocab(with_added_tokens=True)
    new = _lacking(backend, vocabulary, tokens)
    first = 1 + max(vocabulary.values())
    for token in new:
        # As they are written, whatever a normalizer makes of other text, and without the white space around them.
        added = AddedToken(token, normalized=False, special=tokens[token])
        (backend.add_special_tokens if tokens[token] else backend.add_tokens)([added])
    numbers = [backend.token_to_id(token) for token in new]
    if numbers != [*range(first, first + len(new))]:
        raise ModelError(
            f"the tokenizer has numbers up to {first - 1} with gaps between them, and gives new tokens such as others "
            f"have, or may have ({numbers[0]} to {new[0]!r}): none can be added, name another one in model.tokenizerUri"
        )
    return range(first, first + len(new))


def _lacking(backend: "Tokenizer", vocabulary: Mapping[str, int], tokens: Mapping[str, bool]) -> list[str]:
    """Those of ``tokens`` that are not in the ``vocabulary``; a ``ConfigError`` for such as cannot be added."""
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    special = [token for token, is_special in (known | dict(tokens)).items() if is_special]
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
        elif token in vocabulary:
            raise ConfigError(
                f"{field} has {token!r}, which is an ordinary token of the tokenizer already: leave it out"
            )
        elif inner := next((other for other in special if other in token and other != token), None):
            raise ConfigError(
                f"{field} has {token!r}, in which the special token {inner!r} would not be found any more: choose "
                "another name for it"
            )
        else:
            lacking.append(token)
    return lacking
