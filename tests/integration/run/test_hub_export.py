"""A run whose export goes to a repository on the hub, by the hub's own client."""

import json
import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.hub_uploads import TOKEN, UploadHub, as_exported, serve_uploads
from tests.integration.run.hub import usual_address
from tests.integration.run.runs import Place, assert_refused
from tests.integration.run.slow_network import Gate, gate
from tests.integration.run.test_export import sft_export

MINE = {"export": {"atEnd": True, "hub": {"repository": "org/mine"}}}


@pytest.fixture
def hub() -> Iterator[UploadHub]:
    with serve_uploads() as hub:
        yield hub


@pytest.fixture
def way(hub: UploadHub) -> Iterator[Gate]:
    """To the hub, where all runs look for one; weights are not let through yet."""
    with gate(hub.endpoint, lambda line: line.startswith(b"PUT /lfs/"), at=usual_address()) as way:
        hub.endpoint = way.endpoint
        yield way


def uploaded(place: Place, hub: UploadHub) -> dict[str, bytes]:
    """What the repository has of the export, all of which it has; the model card is another."""
    here, there = as_exported(place.store() / "export"), hub.repositories["org/mine"].files()
    assert {name: there[name] for name in here} == here
    return there


def test_a_copy_is_made_whatever_comes_between(place: Place, hub: UploadHub, way: Gate) -> None:
    # Given adapters that two processes train, in a run that is stopped while it uploads
    model = place.folder / "model"
    shutil.copytree(place.inputs.model, model)
    policy = {"storageDeadlineSeconds": 1}
    job = place.job(model={"uri": f"file://{model}"}, lora={"rank": 2}, runPolicy=policy, **MINE)
    process = place.start(job, "--processes", "2", **hub.environment())
    place.wait_until(way.held.is_set)
    ended = place.interrupt(process, signal.SIGTERM)
    way.open.set()
    assert ended.status["state"] == "Suspended", ended.said
    assert json.loads((place.store() / "done.json").read_text())["step"] == 3

    # When it is started again, by who may not write there any more and without what it was trained on
    for file in model.glob("*.safetensors"):
        file.unlink()
    hub.writers.clear()
    refused = place.run(job, **hub.environment())

    # Then it is complete all the same, and says so
    export = {"uri": f"file://{place.store()}/export", "step": 3}
    assert (refused.code, refused.status["state"]) == (0, "Complete"), refused.said
    assert refused.status["export"] == export
    warning = refused.status["warnings"][-1]
    assert warning.startswith("not uploaded to org/mine: tried for 1s (runPolicy.storageDeadlineSeconds), at last: ")
    assert warning.endswith("and sft export --upload with this manifest uploads it")

    # When it may again, then nothing else is left to do
    hub.writers.add(TOKEN)
    after = place.run(job, **hub.environment())
    assert after.code == 0, after.said
    commit = hub.repositories["org/mine"].branches["main"]
    copy = {"url": f"{hub.endpoint}/org/mine", "revision": "main", "commit": commit}
    assert after.status["export"] == {**export, "hub": copy}
    card = uploaded(place, hub)["README.md"].decode()
    assert "Supervised fine-tuning of `file://…`" in card
    assert str(model) not in card

    # What somebody removed there comes back with the command
    hub.repositories["org/mine"].commit("main", {})
    done = sft_export(place, "--upload", **hub.environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{place.store()}/export\n{hub.endpoint}/org/mine\n"
    uploaded(place, hub)


@pytest.mark.usefixtures("way")
def test_a_token_that_may_not_write_there_is_refused_before_the_first_step(place: Place, hub: UploadHub) -> None:
    ended = place.run(place.job(**MINE), **{**hub.environment(), "HF_TOKEN": "hf_read"})

    assert_refused(ended, 13, "AccessDenied", r"/org/mine.*set model.tokenSecretRef .* to a token that may write there")
    assert "hf_read" not in ended.said
