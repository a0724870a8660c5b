"""How many bins a large source makes is counted once on a machine, and is never taken for that of other data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft_api.checkpoints import digest_of
from sft_trainer.data import batches, kept_bins
from sft_trainer.data.batches import StepSchedule
from sft_trainer.data.kept_bins import KeptBins
from sft_trainer.data.steps import plan_steps
from tests.parity.runs import manifest, resolve
from tests.unit.data.examples import FakeExamples

EXAMPLES = 20_000
PACK = batches.first_fit_decreasing


class Machine:
    """Starts of a run with one cache; how many windows each has packed before its first step."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = cache
        self.packed = 0
        monkeypatch.setattr(kept_bins, "_LEAST_WINDOWS", 2)
        monkeypatch.setattr(batches, "first_fit_decreasing", self._pack)

    def start(self, *, digest: str = "a", longest: int = 300, passes_of: str = "", **training: Any) -> StepSchedule:
        spec = {"epochs": 2, "steps": None, "globalBatchTokens": 8192, **training}
        sections: dict[str, Any] = {"checkpoint": {"everyEpochs": 1}} if passes_of == "checkpoint" else {}
        if passes_of == "evaluation":
            spec["evaluation"], sections["data"] = {"everyEpochs": 1}, {"heldOut": {"fraction": 0.1}}
        config = resolve(manifest(self.cache, self.cache / "store", training=spec, **sections))
        source: Any = FakeExamples(np.random.default_rng(1).integers(2, longest, EXAMPLES).tolist())
        source.digest = digest
        self.packed = 0
        steps, _ = plan_steps(
            config.spec, config.plan, [source], KeptBins(config.spec, config.plan, [source], self.cache)
        )
        return steps

    def _pack(self, *arguments: Any) -> Any:
        self.packed += 1
        return PACK(*arguments)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_start_packs_what_it_trains_on_alone(machine: Machine) -> None:
    """Of a hundred million rows to pack all takes two minutes, in which all GPUs wait, at each start and twice."""
    first = machine.start()
    assert machine.packed == 10
    again = machine.start()
    assert machine.packed == 0

    assert first.total_steps is not None
    assert first.total_steps == again.total_steps
    for index in (first.total_steps - 1, 0, first.total_steps // 2):
        one, other = first.step(index), again.step(index)
        assert [bin_.rows.tolist() for bin_ in one.bins] == [bin_.rows.tolist() for bin_ in other.bins]
        assert (one.tokens, one.trained_tokens) == (other.tokens, other.trained_tokens)


@pytest.mark.parametrize("field", ["checkpoint", "evaluation"])
def test_a_start_counts_no_pass_again_for_intervals_in_passes(machine: Machine, field: str) -> None:
    bounded: dict[str, Any] = {"steps": 10, "epochs": None}
    alone = machine.start(**bounded)
    assert machine.packed == 0
    asked = machine.start(**bounded, passes_of=field)
    assert machine.packed == 5
    again = machine.start(**bounded, passes_of=field)
    assert again.steps_per_epoch == asked.steps_per_epoch
    assert machine.packed == 0
    # Behind the pass, too, its steps are those of a run that counts none.
    for index in (0, 2 * int(again.steps_per_epoch)):
        one, other = alone.step(index), again.step(index)
        assert [bin_.rows.tolist() for bin_ in one.bins] == [bin_.rows.tolist() for bin_ in other.bins]


@pytest.mark.parametrize("change", [{"digest": "b", "longest": 200}, {"seed": 1}, {"epochs": 3}])
def test_what_decides_the_bins_is_asked_for(machine: Machine, change: dict[str, Any]) -> None:
    machine.start()
    machine.start(**change)
    assert machine.packed in (10, 15)


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"sha256": 1, "bins": [1]}'])
def test_what_is_damaged_is_counted_anew(machine: Machine, damage: str) -> None:
    total = machine.start().total_steps
    (kept,) = (machine.cache / "bins").iterdir()
    whole = json.loads(kept.read_text())
    kept.write_text(damage)
    assert machine.start().total_steps == total
    assert machine.packed == 10
    assert json.loads(kept.read_text()) == whole


def test_a_cache_that_cannot_be_written_stops_nobody(machine: Machine) -> None:
    (machine.cache / "bins").write_text("a file")
    machine.start()
    assert machine.packed == 10


def test_another_number_than_was_kept_ends_the_run(machine: Machine) -> None:
    """As of a version that packs otherwise: nothing is trained of which the steps are not known."""
    machine.start()
    (kept,) = (machine.cache / "bins").iterdir()
    bins = json.loads(kept.read_text())["bins"]
    document = {"bins": [bins[0] + 1, *bins[1:]]}
    kept.write_text(json.dumps({**document, "sha256": digest_of(document)}))

    with pytest.raises(RuntimeError, match=r"window 0 makes .* not as many as the cache says: delete the pods, or"):
        machine.start().step(0)
