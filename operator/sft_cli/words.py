"""Numbers with their nouns."""


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``3,000 processes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
