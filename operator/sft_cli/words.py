"""Numbers with their nouns."""


def counted(number: float, noun: str) -> str:
    """``1 step``, ``2 steps``, ``3,000 processes``, ``0.5 epochs``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{int(number) if number == int(number) else number:,} {noun if number == 1 else plural}"
