"""The export of a whole run: at its end or later, by several processes or by `sft export`, the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from sft_api.place import EXPORT_MARK
from tests.cluster.object_store import ObjectStore
from tests.exports import content
from tests.integration.run.hub import serve_hub
from tests.integration.run.runs import Place
from tests.integration.run.slow_network import gate
from tests.integration.run.stores import credentials, s3_spec
from tests.integration.run.test_ranks_alike import workers

BUCKET = "exports"


def test_an_export_at_the_end_and_one_later_are_the_same(place: Place) -> None:
    # Given a run of two processes that exported at its end, from a model of its own
    model = place.folder / "model"
    shutil.copytree(place.inputs.model, model)
    sections = {
        "model": {"uri": f"file://{model}"},
        "data": {
            "train": [{"uri": f"file://{place.inputs.train}", "split": "train[:60]"}],
            "eval": [{"uri": f"file://{place.inputs.eval}", "name": "held-out"}],
        },
        # Saved with each step: one that finds the save before it on its way is left out
        "checkpoint": {"everySteps": 1, "async": False},
    }
    ended = place.run(place.job(**sections, export={"atEnd": True}), "--processes", "2")
    assert ended.code == 0, ended.said
    export = place.store() / "export"
    assert ended.status["export"] == {"uri": f"file://{export}", "step": 3}
    at_end = content(export)
    card = at_end["README.md"].decode()
    assert f"| evaluation loss | {ended.status['progress']['evalLoss']:.6g} |" in card
    (newest, *_) = sorted((place.store() / "checkpoints").iterdir(), reverse=True)
    digest = json.loads((newest / "manifest.json").read_text())["run"]["baseDigest"]

    # When it is exported once more by itself, without the weights that the run started from
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    shutil.rmtree(export)
    later = sft_export(place)
    assert (later.returncode, later.stdout) == (0, f"{export}\n"), later.stderr

    # Then it is the same to the last byte
    assert content(export) == at_end

    # And so is what the run exports that goes on there and finds no step to do, on one process and another model
    (place.store() / "done.json").unlink()
    shutil.rmtree(export)
    (model / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    again = place.run(place.job(**sections, export={"atEnd": True}))
    assert again.code == 0, again.said
    assert again.status["attempt"] == 2
    assert content(export) == at_end
    (warning,) = (text for text in again.status["warnings"] if "not the one that this run started from" in text)
    assert f"its digest was {digest[:16]} and is " in warning

    # And the step before is another model
    before = sft_export(place, "--step", "2", "--to", f"file://{place.folder}/before")
    assert before.returncode == 0, before.stderr
    assert content(place.folder / "before").keys() == at_end.keys()
    assert content(place.folder / "before")["model.safetensors"] != at_end["model.safetensors"]


def test_of_a_model_on_the_hub_only_config_and_tokenizer_are_fetched(place: Place) -> None:
    # Given a run on a model of the hub, which no other test has fetched, that exported nothing, and another machine
    job = place.job(model={"uri": "hf://org/exported"}, training={"steps": 1, "globalBatchTokens": 512})
    with serve_hub({"org/exported": place.inputs.model}) as hub:
        trained = place.run(job)
        assert trained.code == 0, trained.said
        assert "model.safetensors" in hub.downloads
        hub.downloads.clear()

        done = sft_export(place, HF_HOME=str(place.folder / "another"))

    assert done.returncode == 0, done.stderr
    assert {"config.json", "tokenizer.json"} <= set(hub.downloads)
    assert not [name for name in hub.downloads if name.endswith(".safetensors")]
    names = {path.name for path in (place.store() / "export").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"} <= names


def sft_export(place: Place, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = place.popen(
        [sys.executable, "-m", "sft_cli.main", "export", "tiny.yaml", *options],
        cwd=place.folder,
        env={**place.environment, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, said = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, said)


@pytest.mark.parametrize("stopped", [False, True], ids=["worker killed", "run stopped"])
def test_an_export_that_is_ended_in_the_middle_goes_on_with_what_is_missing(
    place: Place, versitygw: ObjectStore, stopped: bool
) -> None:
    # Given a run whose weights are written, and whose next file does not get through
    run = f"stopped-{stopped}"
    if BUCKET not in [bucket["Name"] for bucket in versitygw.client().list_buckets()["Buckets"]]:
        versitygw.client().create_bucket(Bucket=BUCKET)
    folder = versitygw.folder / BUCKET / run / "export"
    with gate(versitygw.endpoint, lambda line: line.startswith(b"PUT ") and b"/export/README.md" in line) as way:
        job = place.job(
            checkpoint={"uri": f"s3://{BUCKET}/{run}", "s3": {**s3_spec(versitygw), "endpoint": way.endpoint}},
            export={"atEnd": True},
            runPolicy={"terminationGracePeriodSeconds": 10},
        )
        process = place.start(job, **credentials(versitygw))
        place.wait_until(way.held.is_set)
        written = (folder / "model.safetensors").stat()
        assert (folder / EXPORT_MARK).exists()
        assert not (folder / "config.json").exists()

        # When it is stopped and started again, or its worker is killed, and the network is back
        if stopped:
            ended = place.interrupt(process)
            assert (ended.code, ended.status["state"], ended.latest) == (30, "Suspended", 3), ended.said
            way.open.set()
            ended = place.run(job, **credentials(versitygw))
        else:
            (worker,) = workers(place)
            os.kill(worker, signal.SIGKILL)
            way.open.set()
            ended = place.finish(process)
            assert ended.status["restarts"]["failures"] == 1

    # Then the export comes to its end, and the weights were not written again
    assert (ended.code, ended.status["attempt"]) == (0, 2), ended.said
    now = (folder / "model.safetensors").stat()
    assert (now.st_ino, now.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert (folder / "config.json").exists()
    assert not (folder / EXPORT_MARK).exists()
