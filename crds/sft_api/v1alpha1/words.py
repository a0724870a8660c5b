"""Numbers in words, for messages that say which would do. Pure."""

from collections.abc import Sequence


def either(numbers: Sequence[int]) -> str:
    """``numbers`` in words: 1, 2 or 4."""
    words = list(map(str, numbers))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def divisors(number: int) -> list[int]:
    """Of a ``number`` above 0 all that divide it, the smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


def does_not_divide(degree: int, number: int, what: str, product: str = "") -> str:
    """In figures that ``degree`` does not divide a ``number`` of ``what``, and what does.

    ``product`` says, where it is one, of what.
    """
    return f"it is {product}{degree}, and there are {number} {what}: {either(divisors(number))} would do"
