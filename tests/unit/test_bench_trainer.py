"""How the trainer's benchmark compares runs."""

import pytest

from tests.bench.trainer import Run, check_alike, packer_fill, quartile, ratios


def run(seconds: float, tokens: int = 100, loss: float = 2.0) -> Run:
    return Run(ready=1, tokens=[tokens] * 13, losses=[loss] * 13, seconds=[9.0] * 3 + [seconds] * 10)


def test_a_ratio_is_that_of_the_fastest_runs_after_the_first_steps() -> None:
    runs = {"ours": run(1), "slow": run(4), "theirs": run(2), "also": run(3)}

    assert ratios(runs, ["ours", "slow"], ["theirs", "also"]) == [2.0] * 5
    runs["ours"].seconds[3] = 5.0  # one step that took four seconds more
    assert ratios(runs, ["ours"], ["theirs"], steps=5) == [2 * 5 / 9, 2.0]
    assert quartile([1, 2, 3, 4, 5]) == 2
    assert quartile([1, 2, 3, 4, 5], 0.75) == 4


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("unpacked", run(1, tokens=101), "not .* tokens"),
        ("unpacked", run(1, loss=2.01), "losses"),
        ("trl packed", run(1, tokens=120), "steps of 1.20 of the tokens"),
        ("trl packed", run(1, loss=3.0), "losses of 3.000 on average, not 2.000"),
        ("lora", run(1, tokens=90), "not .* tokens"),
    ],
)
def test_runs_that_train_something_else_are_not_compared(name: str, other: Run, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_alike("128x4", run(1), {name: other})


def test_runs_that_train_the_same_are_compared() -> None:
    check_alike("128x4", run(1), {"unpacked": run(2), "trl packed": run(2, tokens=98, loss=2.05)})


def test_bins_are_full() -> None:
    assert packer_fill() >= 0.99
