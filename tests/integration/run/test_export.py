"""The export of a whole run: at its end or later, by several processes or by `sft export`, the same bytes."""

import json
import shutil
import subprocess
import sys

from tests.exports import content
from tests.integration.run.runs import Place


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
        "checkpoint": {"everySteps": 1},
    }
    ended = place.run(place.job(**sections, export={"atEnd": True}), "--processes", "2")
    assert ended.code == 0, ended.said
    export = place.store() / "export"
    assert ended.status["export"] == {"uri": f"file://{export}", "step": 3}
    at_end = content(export)
    card = at_end["README.md"].decode()
    assert f"| evaluation loss | {ended.status['progress']['evalLoss']} |" in card
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

    # And so is what the run exports that goes on there and finds all done, on one process and another model
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


def sft_export(place: Place, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sft_cli.main", "export", "tiny.yaml", *options],
        cwd=place.folder,
        env=place.environment,
        capture_output=True,
        text=True,
    )
