"""The short form of `make kill-matrix`: some of its cases, in one run, and some of its flips."""

import random
from collections.abc import Iterator

import pytest

from .cases import CASES
from .flips import flips_missed
from .matrix import Matrix, open_matrix

SHORT = ("kill-rank0-commit", "lost-manifest", "kill-all-prune")

# Quick on a quiet machine; on one that is ten times too busy each start of a run takes minutes.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with open_matrix(tmp_path_factory.mktemp("kill-matrix") / "runs") as opened:
        yield opened


def test_what_is_killed_or_disturbed_comes_to_the_same_end(matrix: Matrix) -> None:
    results = matrix.play([CASES[name] for name in SHORT], random.Random(1))

    assert {result.name: result.breaches for result in results} == {name: [] for name in SHORT}


def test_a_byte_that_was_changed_is_never_used(matrix: Matrix) -> None:
    assert flips_missed(matrix.undisturbed.oracles.folder, 50, random.Random(1)) == []
