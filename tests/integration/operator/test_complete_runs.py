"""A run that is complete before its job begins is complete without a Job, where the operator can read its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sft_api.checkpoints import STATUS_KEY, CheckpointId
from sft_api.numbers import Numbers
from sft_api.place import (
    DONE_KEY,
    EXPORT_ADAPTER,
    EXPORT_ADAPTER_CONFIG,
    EXPORT_CONFIG,
    EXPORT_RECORD,
    HUB_RECORD,
    RUN_KEY,
    Done,
    ExportRecord,
    HubRecord,
    encode_done,
)
from sft_api.v1alpha1 import ExportStatus, HubSpec, HubStatus
from sft_operator.cluster.store import CheckpointStore
from sft_operator.cluster.store_reading import StoreError
from sft_operator.config import StoreSettings
from sft_operator.decisions.result import ReadComplete
from sft_operator.decisions.spec import read_spec
from sft_operator.picture.observed import CompleteRun
from tests.cluster.object_store import ObjectStore
from tests.integration.operator.finished import STEP, finished_run, put_files
from tests.integration.operator.scene import Scene, StartOperator, Supervisors
from tests.integration.operator.test_store import URI, place_of, settings
from tests.integration.run.slow_network import gate

NUMBERS = Numbers({"model.uri": "hf://org/model", "data.train": [{"uri": "hf://org/rows"}]})
LAST = CheckpointId(attempt=1, step=STEP)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore) -> Callable[..., CompleteRun | None]:
    """Asks the operator's store."""
    for name, value in versitygw.environment().items():
        monkeypatch.setenv(name, value)
    store = CheckpointStore(StoreSettings.model_validate(settings(versitygw)))

    def ask(
        uri: str, *, export: bool = True, numbers: Numbers = NUMBERS, name: str = "tiny", **form: Any
    ) -> CompleteRun | None:
        wanted = ReadComplete("uid", uri, f"{uri}/export" if export else None, name, numbers, **form)
        return asyncio.run(store.read_complete(wanted))

    return ask


Ask = Callable[..., CompleteRun | None]
Files = dict[str, bytes]


def without(*names: str) -> Callable[[Files], Files]:
    return lambda files: {key: content for key, content in files.items() if not key.startswith(names)}


@pytest.mark.parametrize("harm", [without("nothing"), without(STATUS_KEY)], ids=["", "by its last checkpoint"])
def test_a_complete_run_is_told_as_it_told_itself_last(s3: Any, read: Ask, harm: Callable[[Files], Files]) -> None:
    uri = f"{URI}/team/whole-{len(harm(finished_run('tiny', NUMBERS)))}"
    put_files(s3, uri, harm(finished_run("tiny", NUMBERS)))

    found = read(uri)

    assert found is not None
    progress = found.progress
    assert (progress.step, progress.loss, progress.eval_loss, progress.resumed_from_step) == (STEP, 0.5, 1.5, STEP)
    assert progress.export is not None
    assert progress.export.uri == f"{uri}/export"


@pytest.mark.parametrize(
    ("harm", "with_export", "alone"),
    [
        (without("nothing"), True, True),
        (without(DONE_KEY), False, False),
        (without(RUN_KEY), False, False),
        (without("checkpoints/"), True, False),
        (without(LAST.manifest_key), True, False),
        (without(f"{LAST.prefix}r0"), True, False),
        (without("export/"), False, True),
        (without(f"export/{EXPORT_CONFIG}"), False, True),
        (without("export/model"), False, True),
        (lambda files: files | {"export/model.safetensors": b"half"}, False, True),
        (lambda files: files | {"export/unfinished-export.json": b"{}"}, False, True),
        (lambda files: files | {DONE_KEY: files[DONE_KEY].replace(b"1", b"2")}, False, False),
        (lambda files: files | {STATUS_KEY: b"[" * 10_000}, True, True),
        (lambda files: files | {RUN_KEY: b"x" * 2**21}, None, None),
    ],
    ids=[
        *("whole", "not done", "no record", "no checkpoint", "no manifest", "no shard", "no export", "no config"),
        *("no weights", "half the weights", "export goes on", "damaged word", "no report", "endless record"),
    ],
)
def test_what_is_there_decides(
    s3: Any,
    read: Ask,
    request: pytest.FixtureRequest,
    harm: Callable[[Files], Files],
    with_export: bool | None,
    alone: bool | None,
) -> None:
    uri = f"{URI}/team/{request.node.callspec.id.replace(' ', '-')}"
    put_files(s3, uri, harm(finished_run("tiny", NUMBERS)))

    for export, expected in ((True, with_export), (False, alone)):
        if expected is None:
            with pytest.raises(StoreError, match="has more than"):
                read(uri, export=export)
        else:
            assert (read(uri, export=export) is not None) == expected


def test_the_best_is_the_export_of_a_run_that_asks_for_it(s3: Any, read: Ask) -> None:
    # Given a complete run whose best checkpoint is another than its last, and is what was exported
    uri, best = f"{URI}/team/best", CheckpointId(attempt=1, step=5)
    files = finished_run("tiny", NUMBERS)
    files[DONE_KEY] = encode_done(Done(step=STEP, attempt=1, best=best.folder))
    record = ExportRecord.model_validate_json(files[f"export/{EXPORT_RECORD}"])
    files[f"export/{EXPORT_RECORD}"] = record.model_copy(update={"checkpoint": best.folder}).encoded()
    put_files(s3, uri, files)

    # Then it is complete for who asks for the best, and not for who asks for the last
    found = read(uri, choice="best")
    assert found is not None
    assert found.progress.export is not None
    assert (found.progress.step, found.progress.export.step) == (STEP, 5)
    assert read(uri, choice="last") is None


def test_pods_look_for_the_best_of_a_run_whose_word_names_none(s3: Any, read: Ask) -> None:
    # Given a complete run of a trainer that knew of no choice, with the model of its last checkpoint
    uri = f"{URI}/team/before-there-was-a-choice"
    put_files(s3, uri, finished_run("tiny", NUMBERS))

    # Then that is no answer for who asks for the best, unless no model is asked for
    assert read(uri, choice="last") is not None
    assert read(uri, choice="best") is None
    assert read(uri, choice="best", export=False) is not None


def test_a_run_that_is_to_be_on_the_hub_is_complete_with_its_copy(s3: Any, read: Ask) -> None:
    # Given a complete run, and what a pod that has uploaded its export leaves beside it
    uri, hub = f"{URI}/team/copied", HubSpec(repository="org/mine")
    files = finished_run("tiny", NUMBERS)
    copy = HubStatus(url="https://hub/org/mine", revision="main", commit="abc")
    record = HubRecord.of(hub, files[f"export/{EXPORT_RECORD}"], copy)
    put_files(s3, uri, files)
    put_files(s3, f"{uri}-there", {**files, f"export/{HUB_RECORD}": record.encoded()})
    put_files(s3, f"{uri}-half", {**files, f"export/{HUB_RECORD}": record.encoded()[:-9]})

    # Then it is for the pods to upload what is not known to be where it is asked for
    assert read(uri, hub=hub) is None
    assert read(f"{uri}-half", hub=hub) is None
    assert read(f"{uri}-there", hub=HubSpec(repository="org/mine", revision="next")) is None
    found = read(f"{uri}-there", hub=hub)
    assert found is not None
    assert found.progress.export == ExportStatus(uri=f"{uri}-there/export", step=STEP, hub=copy)


def test_adapters_are_the_export_of_a_run_that_asks_for_them(s3: Any, read: Ask) -> None:
    # Given a complete run whose export holds adapters
    uri = f"{URI}/team/adapters"
    files = finished_run("tiny", NUMBERS)
    del files["export/model.safetensors"], files[f"export/{EXPORT_CONFIG}"]
    record = ExportRecord.model_validate_json(files[f"export/{EXPORT_RECORD}"])
    adapters = record.model_copy(update={"form": "adapter", "files": {EXPORT_ADAPTER: 7}})
    files[f"export/{EXPORT_RECORD}"] = adapters.encoded()
    files |= {f"export/{EXPORT_ADAPTER}": b"weights", f"export/{EXPORT_ADAPTER_CONFIG}": b"{}"}
    put_files(s3, uri, files)

    # Then it is complete for who asks for these, and not for who asks for the merged model
    assert read(uri, form="adapter") is not None
    assert read(uri, form="model") is None

    # And without the file that comes last it is not
    del files[f"export/{EXPORT_ADAPTER_CONFIG}"]
    put_files(s3, f"{uri}-begun", files)
    assert read(f"{uri}-begun", form="adapter") is None


def test_a_run_with_another_name_or_other_numbers_is_not_this_one(s3: Any, read: Ask) -> None:
    uri = f"{URI}/team/others"
    put_files(s3, uri, finished_run("tiny", NUMBERS))

    assert read(uri) is not None
    assert read(uri, name="other") is None
    assert read(uri, numbers=Numbers({**NUMBERS.values, "training.seed": 8})) is None


def finish(s3: Any, scene: Scene, job: dict[str, Any]) -> str:
    """Put the finished run of a job where it saves; its place."""
    uri = f"{URI}/{place_of(job)}"
    numbers = Numbers.of(read_spec(job).spec)
    put_files(s3, uri, finished_run(job["metadata"]["name"], numbers, namespace=scene.namespace))
    return uri


def test_a_job_of_a_complete_run_gets_no_job_and_one_of_another_run_does(
    versitygw: ObjectStore, s3: Any, start_operator: StartOperator, own_scene: Scene
) -> None:
    # Given the place of a run that is complete, as one that was deleted has left it
    first = own_scene.submit("again", checkpoint={})
    uri = finish(s3, own_scene, first)
    own_scene.delete("sftjobs", "again")
    own_scene.until(lambda: own_scene.get("sftjobs", "again") is None)

    # When it is made anew, and another one beside it
    start_operator(namespace=own_scene.namespace, environment=versitygw.environment(), store=settings(versitygw))
    own_scene.submit("again", checkpoint={})
    own_scene.submit("other", checkpoint={})

    # Then it is complete, told as one that index 0 ended, and only the other one begins
    status = own_scene.until_state("again", "Complete")
    own_scene.until_pods("other", 2)
    assert own_scene.get("jobs", "again") is None
    assert own_scene.get("configmaps", "again-config") is None
    assert (status["attempt"], status["progress"]["summary"], status["progress"]["percent"]) == (1, "10/10", 100)
    assert status["export"] == {"uri": f"{uri}/export", "step": STEP}
    assert status["completionTime"]
    sentence = f"the run in {uri} is complete since step {STEP}: nothing is left to train"
    assert status["message"] == sentence
    assert own_scene.condition("again", "Complete")["reason"] == "TrainingComplete"
    told = own_scene.until(lambda: events_of(own_scene, "again"))
    assert [(event["reason"], event["message"]) for event in told] == [("Complete", sentence)]
    checkpoints = own_scene.until(lambda: own_scene.status("again").get("checkpoints"))
    assert (checkpoints["latest"]["step"], checkpoints["latest"]["verified"]) == (STEP, True)


def events_of(scene: Scene, name: str) -> list[dict[str, Any]]:
    return scene.list("events", f"?fieldSelector=involvedObject.name={name},involvedObject.kind=SFTJob")


def test_a_store_that_does_not_answer_holds_up_no_job(
    versitygw: ObjectStore, s3: Any, supervisors: Supervisors, start_operator: StartOperator, own_scene: Scene
) -> None:
    with gate(versitygw.endpoint, holds=lambda line: True) as way:
        platform = settings(versitygw)
        platform["s3"]["endpoint"] = way.endpoint
        start_operator(namespace=own_scene.namespace, environment=versitygw.environment(), store=platform)

        own_scene.submit("waiting", checkpoint={})

        own_scene.until_pods("waiting", 2)
        assert way.held.is_set()


def test_a_store_that_refuses_holds_up_no_job(
    versitygw: ObjectStore, s3: Any, start_operator: StartOperator, own_scene: Scene
) -> None:
    wrong = {**versitygw.environment(), "AWS_ACCESS_KEY_ID": "nobody"}
    start_operator(namespace=own_scene.namespace, environment=wrong, store=settings(versitygw))

    own_scene.submit("refused", checkpoint={})

    own_scene.until_pods("refused", 2)
