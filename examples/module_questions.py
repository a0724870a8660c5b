"""The demo's task: which module of the standard library has this function? Asked anew in words that were not trained.

Every function is asked about in every one of TRAINED_WORDINGS, after some opening and with words left out at random;
those rows are the training data. The held-out questions ask about the same functions in HELD_OUT_WORDINGS, none of
which occurs in training, for any function. So the facts are learned by heart, and what is tested is that they are
known however one asks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from standard_library import Fact

Row = dict[str, Any]

TRAINED_WORDINGS = (
    "Which module has the function `{function}`?",
    "Where do I find `{function}`?",
    "In which module is `{function}`?",
    "What do I import to call `{function}`?",
    "`{function}`: which module is that?",
    "Name the module of `{function}`.",
    "I want to call `{function}`. Which module do I need?",
    "Tell me where `{function}` is defined.",
    "From which module comes `{function}`?",
    "My code needs `{function}`. What do I import?",
    "I read `{function}` in a script. Which module is it from?",
    "The function `{function}` is part of which module?",
    "Please name the module that has `{function}`.",
    "Where does the function `{function}` come from?",
    "Which import gives me `{function}`?",
    "I forgot the module of `{function}`. Which one is it?",
    "Which module must be imported before `{function}` can be called?",
    "What is the home of `{function}`?",
    "Do you know which module `{function}` is in?",
    "For `{function}` I need an import. Which one?",
    "Which import is the right one for `{function}`?",
    "A program calls `{function}`. From which module?",
    "`{function}` has its home in which module?",
    "My own script has `{function}` in it. What module is that?",
)
# What comes before a question, and the share of its words that get lost: people ask as they like.
OPENINGS = ("", "", "", "Hello. ", "Please help me. ", "A question: ", "I am new to Python. ", "Quickly: ")
LOST_WORDS = 0.3
HELD_OUT_WORDINGS = (
    "Which module do I import for `{function}`?",
    "My script calls `{function}`. Where is that defined?",
    "I need the function `{function}`. What is its module?",
)


def make_module_rows(facts: Sequence[Fact], functions: int, seed: int) -> tuple[list[Row], list[Row]]:
    """About so many `functions`: training rows, one for each function and wording, and a held-out question for each.

    Raises ValueError when there are not so many functions.
    """
    if not 0 < functions <= len(facts):
        raise ValueError(f"functions: {functions} asked for, this Python's modules give {len(facts)}: ask for fewer")
    choice = random.Random(f"modules {seed}")
    asked = choice.sample(list(facts), functions)
    training = [_row(_asked_somehow(wording, choice), fact) for fact in asked for wording in TRAINED_WORDINGS]
    held_out = [_row(HELD_OUT_WORDINGS[index % len(HELD_OUT_WORDINGS)], fact) for index, fact in enumerate(asked)]
    choice.shuffle(training)
    choice.shuffle(held_out)
    return training, held_out


def _asked_somehow(wording: str, choice: random.Random) -> str:
    """`wording` after some opening, without some of its words."""
    kept = [word for word in wording.split() if "{function}" in word or choice.random() >= LOST_WORDS]
    return choice.choice(OPENINGS) + " ".join(kept)


def _row(wording: str, fact: Fact) -> Row:
    question = {"role": "user", "content": wording.format(function=fact.function)}
    return {"messages": [question, {"role": "assistant", "content": f"It is in `{fact.module}`."}]}
