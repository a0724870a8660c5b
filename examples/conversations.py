"""Conversations about what the standard library documents, made from its docstrings: data for tests and benchmarks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from standard_library import Subject

Row = dict[str, Any]

SYSTEM_PROMPTS = (
    "You are a helpful assistant who knows Python's standard library.",
    "Answer questions about Python shortly and correctly.",
    "You explain Python to beginners.",
)
ASK_PURPOSE = ("What does `{name}` do?", "Explain `{name}` in a few words.", "What is `{name}` for?")
ASK_SIGNATURE = ("What is the signature of `{name}`?", "Which arguments does `{name}` take?", "How do I call `{name}`?")
ASK_MODULE = ("Which module has the {kind} `{short}`?", "Where do I find the {kind} `{short}`?")
ASK_NAME = (
    "Which {kind} of the standard library is described like this? {summary}",
    "I look for a {kind}. Its documentation says: {summary}",
)
ASK_MORE = ("Tell me more.", "What else should I know about it?")


def split_subjects(subjects: Sequence[Subject], seed: int) -> tuple[list[Subject], list[Subject]]:
    """Subjects for training, and a tenth of them held out."""
    shuffled = list(subjects)
    random.Random(f"split {seed}").shuffle(shuffled)
    held_out = len(shuffled) // 10
    return shuffled[held_out:], shuffled[:held_out]


def make_rows(subjects: Sequence[Subject], count: int, seed: int) -> list[Row]:
    """`count` conversations about `subjects`: some of several turns, a quarter with a system turn.

    Raises ValueError when the subjects do not give so many.
    """
    choice = random.Random(f"rows {seed}")
    rows = [row for subject in subjects for row in _conversations(subject, choice)]
    if count > len(rows):
        raise ValueError(f"rows: {count} asked for, this Python's docstrings give {len(rows)}: ask for fewer")
    choice.shuffle(rows)
    return rows[:count]


def _conversations(subject: Subject, choice: random.Random) -> Iterator[Row]:
    def ask(questions: Sequence[str]) -> str:
        return choice.choice(questions).format(
            name=subject.name,
            short=subject.name.removeprefix(f"{subject.module}."),
            kind=subject.kind,
            summary=subject.summary,
        )

    purpose = (ask(ASK_PURPOSE), subject.summary)
    more = (ask(ASK_MORE), subject.more)
    signature = (ask(ASK_SIGNATURE), f"`{subject.signature}`")
    module = (ask(ASK_MODULE), f"It is in the module `{subject.module}`.")
    conversations = [[purpose], [(ask(ASK_NAME), f"That is `{subject.name}`.")]]
    if subject.signature:
        conversations += [[signature], [purpose, ("And how do I call it?", signature[1])]]
    if subject.more:
        conversations += [[(ask(ASK_PURPOSE), subject.summary), more]]
    if subject.kind != "module":
        conversations += [[module, (f"What does this {subject.kind} do?", subject.summary)]]
    if subject.kind in ("class", "function"):
        conversations += [[module]]
    for turns in conversations:
        messages = [{"role": "system", "content": choice.choice(SYSTEM_PROMPTS)}] if choice.random() < 0.25 else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"messages": messages}


def make_alpaca_rows(subjects: Sequence[Subject], count: int) -> list[Row]:
    """Up to `count` rows in Alpaca's format, every second one with an empty `input`."""
    rows = []
    for index, subject in enumerate(subjects[:count]):
        if index % 2:
            row = {"instruction": ASK_PURPOSE[0].format(name=subject.name), "input": ""}
        else:
            row = {"instruction": f"Say what this {subject.kind} does.", "input": subject.signature or subject.name}
        rows.append({**row, "output": subject.summary})
    return rows
