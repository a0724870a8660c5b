"""Exports of checkpoints while a run goes on, through the whole product."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_api.place import EXPORT_MARK
from tests.cluster.object_store import ObjectStore
from tests.exports import content
from tests.integration.run.runs import Place
from tests.integration.run.slow_network import Gate, gate
from tests.integration.run.stores import credentials, s3_spec
from tests.integration.run.test_export import sft_export
from tests.integration.run.test_ranks_alike import workers
from tests.waiting import wait_until

BUCKET = "on-the-way"
EXPORT_SECONDS = 240.0
"""Most that the first export of a run takes on a busy machine, imports and all."""
EVERY_TWO: dict[str, Any] = {
    "training": {"steps": 3},
    "checkpoint": {"everySteps": 1},
    "export": {"atEnd": True, "everySteps": 2},
}
LORA = {"lora": {"rank": 4}}


def folders(export: Path) -> list[str]:
    return sorted(each.name for each in export.iterdir() if each.is_dir())


@pytest.mark.parametrize(("sections", "processes"), [({}, 2), (LORA, 1)], ids=["model", "adapters"])
def test_each_is_what_an_export_of_its_checkpoint_is(place: Place, sections: dict[str, Any], processes: int) -> None:
    # Given a run that keeps its checkpoints, and exports every second one on the way
    keeping = {"everySteps": 1, "keep": {"everySteps": 1}}
    ended = place.run(place.job(**{**EVERY_TWO, "checkpoint": keeping, **sections}), "--processes", str(processes))
    assert ended.code == 0, ended.said

    # Then it is, to the last byte, what sft export makes of that checkpoint, and not that of the end
    export = place.store() / "export"
    on_the_way = export / "step-00000002"
    assert folders(export) == [on_the_way.name]
    alone = place.folder / "alone"
    made = sft_export(place, "--step", "2", "--to", f"file://{alone}")
    assert made.returncode == 0, made.stderr
    assert content(on_the_way) == content(alone)
    at_end = {name: data for name, data in content(export).items() if not name.startswith("step-")}
    assert at_end.keys() == content(alone).keys()
    assert at_end != content(alone)

    # And it is told
    assert ended.status["exports"] == [{"uri": f"file://{on_the_way}", "step": 2}]
    assert ended.status["export"] == {"uri": f"file://{export}", "step": 3}
    assert f"Exports     step 2, in folders step-… of {export}" in ended.said
    assert not [text for text in ended.status["warnings"] if "export" in text]


@pytest.fixture
def way(versitygw: ObjectStore) -> Iterator[Gate]:
    """A bucket, and a way to it that does not let the end of the first export through."""
    if BUCKET not in [bucket["Name"] for bucket in versitygw.client().list_buckets()["Buckets"]]:
        versitygw.client().create_bucket(Bucket=BUCKET)
    with gate(versitygw.endpoint, lambda line: line.startswith(b"PUT ") and b"step-00000010/README.md" in line) as made:
        yield made


def begun(process: subprocess.Popen[str], way: Gate) -> subprocess.Popen[str]:
    """The run of ``process``, once its first export has written its weights and comes no further."""
    wait_until(lambda: way.held.is_set() or process.poll() is not None, EXPORT_SECONDS)
    assert process.poll() is None, process.communicate()[1]
    return process


def job_of(place: Place, way: Gate, versitygw: ObjectStore, run: str, steps: int) -> dict[str, Any]:
    where = {"uri": f"s3://{BUCKET}/{run}", "s3": {**s3_spec(versitygw), "endpoint": way.endpoint}}
    return place.job(
        training={"steps": steps},
        checkpoint={"everySteps": 10, "keep": {"last": 1}, **where},
        export={"atEnd": True, "everySteps": 10},
    )


def test_one_that_is_killed_in_the_middle_goes_on_with_what_is_missing(
    place: Place, versitygw: ObjectStore, way: Gate
) -> None:
    # Given a run that keeps one checkpoint, and is through but for its export on the way, of another one
    run = versitygw.folder / BUCKET / "killed"
    export = run / "export" / "step-00000010"
    process = begun(place.start(job_of(place, way, versitygw, "killed", 11), **credentials(versitygw)), way)
    written = (export / "model.safetensors").stat()
    assert (export / EXPORT_MARK).exists()

    # When the process that trains is killed
    (worker,) = workers(place)
    os.kill(worker, signal.SIGKILL)
    way.open.set()
    ended = place.finish(process)

    # Then the next one makes it whole, and its weights are not written again
    assert (ended.code, ended.status["attempt"]) == (0, 2), ended.said
    now = (export / "model.safetensors").stat()
    assert (now.st_ino, now.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert (export / "config.json").exists()
    assert not (export / EXPORT_MARK).exists()
    assert [each["step"] for each in ended.status["exports"]] == [10]

    # And its checkpoint was kept for it, and not longer
    (left,) = (run / "checkpoints").iterdir()
    assert left.name.startswith("step-00000011-")


def test_a_run_that_is_stopped_while_it_exports_makes_it_up(place: Place, versitygw: ObjectStore, way: Gate) -> None:
    # Given a long run, stopped while it exports: it stands still meanwhile, or it would make thousands of steps
    export = versitygw.folder / BUCKET / "stopped" / "export" / "step-00000010"
    job = job_of(place, way, versitygw, "stopped", 1_000_000)
    job["spec"]["checkpoint"]["async"] = False  # its commit would be told with the next step only
    ended = place.interrupt(begun(place.start_standing(job, 12, **credentials(versitygw)), way))
    assert (ended.code, ended.status["state"]) == (30, "Suspended"), ended.said
    way.open.set()
    assert not (export / "config.json").exists()

    # When it goes on, then that export is made
    process = place.start_standing(job, 15, **credentials(versitygw))
    wait_until(lambda: (export / "config.json").exists() or process.poll() is not None, EXPORT_SECONDS)
    again = place.interrupt(process)
    assert (again.code, again.status["state"]) == (30, "Suspended"), again.said
    assert (export / "config.json").exists()
