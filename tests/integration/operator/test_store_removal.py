"""A place of the platform's store is removed whole, in an order that a later start understands, or not at all."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sft_api.checkpoints import AttemptClaim, CheckpointId, attempt_key
from sft_api.numbers import Numbers
from sft_api.place import ALIVE_KEY, DONE_KEY, RUN_KEY
from sft_operator.cluster import store_removal
from sft_operator.cluster.store_reading import StoreError
from sft_operator.cluster.store_removal import PlaceRemover
from sft_operator.config import StoreSettings
from sft_operator.decisions.result import RemovePlace
from sft_operator.picture.memory import RemovalTurn
from tests.cluster.object_store import ObjectStore
from tests.integration.operator.finished import STEP, UID, finished_run, keys_below, put_files
from tests.integration.operator.test_store import BUCKET, URI, settings

NUMBERS = Numbers({"model.uri": "hf://org/model", "data.train": [{"uri": "hf://org/rows"}]})
NOW = datetime(2026, 6, 1, tzinfo=UTC)
EXPORT = {"export/training-run.json", "export/model.safetensors", "export/config.json"}


def order(name: str, *, uid: str = UID, numbers: Numbers = NUMBERS, turn: int = 0) -> RemovePlace:
    return RemovePlace(uid, f"{URI}/team/{name}", "tiny", "team", numbers, turn)


class Remover:
    """Turns of one operator, in this thread."""

    def __init__(self, server: ObjectStore) -> None:
        self._store = StoreSettings.model_validate({**settings(server), "remove": True})
        self.seconds = 0.0
        """Passed since NOW."""
        self.stop = threading.Event()
        self.restart()

    def restart(self) -> None:
        """Another operator, which remembers nothing."""
        self._remover = PlaceRemover(self._store, now=lambda: NOW + timedelta(seconds=self.seconds))

    def turn(self, wanted: RemovePlace) -> RemovalTurn:
        return self._remover._turn(wanted, self.stop)

    def to_the_end(self, wanted: RemovePlace) -> RemovalTurn:
        while (turn := self.turn(wanted)).state == "goes on":
            pass
        return turn


@pytest.fixture
def remover(monkeypatch: pytest.MonkeyPatch, versitygw: ObjectStore) -> Remover:
    for name, value in versitygw.environment().items():
        monkeypatch.setenv(name, value)
    return Remover(versitygw)


@pytest.fixture
def place(s3: Any, request: pytest.FixtureRequest) -> str:
    """The place of a finished run of its own."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:60]
    put_files(s3, f"{URI}/team/{name}", finished_run("tiny", NUMBERS))
    return name


def below(s3: Any, place: str) -> set[str]:
    return keys_below(s3, f"{URI}/team/{place}")


def put(s3: Any, place: str, **files: bytes) -> None:
    put_files(s3, f"{URI}/team/{place}", files)


def claim(s3: Any, place: str, attempt: int, uid: str) -> None:
    made = AttemptClaim(attempt=attempt, job_uid=uid, claim_id="c", host="elsewhere", time=NOW)
    put_files(s3, f"{URI}/team/{place}", {attempt_key(attempt): made.model_dump_json(by_alias=True).encode()})


def test_all_goes_but_the_export_and_what_is_not_the_run_s(s3: Any, remover: Remover, place: str) -> None:
    theirs = {"another/run.json", "notes.txt", "checkpoints/mine/run.json", "metrics/mine/run.json", "attempts/mine/x"}
    theirs |= {"tokenized/mine/a.arrow", "tokenized/train.jsonl", f"tokenized/mine/{'a' * 64}.arrow"}
    theirs |= {"hangs/mine/run.json", "export/step-mine/config.json", "export/step-00000010/deeper/config.json"}
    put_files(s3, f"{URI}/team/{place}", dict.fromkeys(theirs, b"theirs"))
    put_files(s3, f"{URI}/team/{place}", {"checkpoints/step-00000010-a00001/deeper/file": b"of the run"})
    put_files(s3, f"{URI}/team/{place}", {f"tokenized/{'a' * 64}.{end}": b"of the run" for end in ("arrow", "json")})
    begun = {f"sft/team/{place}/tokenized/{'a' * 64}.arrow", f"sft/team/{place}/tokenized/train.jsonl"}
    begun.add(f"sft/team/{place}/export/step-00000020/model-00001-of-00002.safetensors")
    for key in begun:
        s3.create_multipart_upload(Bucket=BUCKET, Key=key)
    step = ("config.json", "additional_chat_templates/tool_use.jinja")
    put_files(s3, f"{URI}/team/{place}", {f"export/step-00000010/{name}": b"of the run" for name in step})
    put_files(s3, f"{URI}/team/{place}-2", {"run.json": b"{}"})

    assert remover.turn(order(place)) == RemovalTurn("gone")

    assert below(s3, place) == EXPORT | theirs
    uploads = s3.list_multipart_uploads(Bucket=BUCKET, Prefix=f"sft/team/{place}/")["Uploads"]
    assert [upload["Key"] for upload in uploads] == [f"sft/team/{place}/tokenized/train.jsonl"]
    assert below(s3, f"{place}-2") == {"run.json"}
    assert remover.turn(order(place)) == RemovalTurn("empty"), "what is gone may be removed again"


def other_record(files: dict[str, bytes]) -> None:
    files[RUN_KEY] = finished_run("other", NUMBERS)[RUN_KEY]


def damaged_record(files: dict[str, bytes]) -> None:
    files[RUN_KEY] = files[RUN_KEY][:-20]


def no_record(files: dict[str, bytes]) -> None:
    del files[RUN_KEY]


def claimed_by_another(files: dict[str, bytes]) -> None:
    claimed = files[attempt_key(1)].replace(b'"attempt":1', b'"attempt":2')
    files[attempt_key(2)] = claimed.replace(UID.encode(), b"another")


def half_a_claim(files: dict[str, bytes]) -> None:
    files[attempt_key(2)] = b'{"attempt": 2'


def begun_by_another_and_never_claimed(files: dict[str, bytes]) -> None:
    files[RUN_KEY] = finished_run("tiny", NUMBERS, uid="another")[RUN_KEY]
    del files[attempt_key(1)]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (other_record, 'belongs to the run other with other settings (metadata.name: "other" -> "tiny")'),
        (damaged_record, "run.json says whose checkpoints these are, and cannot be used"),
        (no_record, "has no run.json, which says whose checkpoints these are"),
        (claimed_by_another, "was last claimed by another start of this run (uid another, on pod-0)"),
        (half_a_claim, "was last claimed by another start of this run, whose claim cannot be read"),
        (begun_by_another_and_never_claimed, "was begun by another start of this run (uid another)"),
    ],
)
def test_nothing_is_touched_where_it_is_not_ours(
    s3: Any, remover: Remover, request: pytest.FixtureRequest, harm: Callable[[dict[str, bytes]], None], words: str
) -> None:
    files = finished_run("tiny", NUMBERS)
    harm(files)
    place = f"not-ours-{request.node.callspec.id[:20].replace('_', '-')}"
    put_files(s3, f"{URI}/team/{place}", files)

    turn = remover.turn(order(place))

    assert turn.state == "kept"
    assert words in turn.why
    assert below(s3, place) == set(files)


def test_a_place_of_other_numbers_stays(s3: Any, remover: Remover, place: str) -> None:
    turn = remover.turn(order(place, numbers=Numbers({**NUMBERS.values, "training.seed": 8})))

    assert turn.state == "kept"
    assert "training.seed" in turn.why


def test_an_empty_place_is_none_that_was_removed(remover: Remover) -> None:
    assert remover.turn(order("never-begun")) == RemovalTurn("empty")


def test_it_may_be_interrupted_after_every_deletion(s3: Any, remover: Remover, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start finds a run that goes on from a checkpoint that is whole, or one that never saved; a later operator
    finishes it."""
    files = finished_run("tiny", NUMBERS)
    older = {key.replace("00000010", "00000005"): files[key] for key in files if key.startswith("checkpoints/")}
    monkeypatch.setattr(store_removal, "BATCH", 2)
    real = store_removal._Place._delete
    for deaths in itertools.count(1):
        place, left = f"interrupted-{deaths}", [deaths]
        put_files(s3, f"{URI}/team/{place}", files | older)

        def die(self: Any, keys: list[str], left: list[int] = left) -> None:
            real(self, keys)
            left[0] -= 1
            if left[0] == 0:
                raise StoreError("killed")

        monkeypatch.setattr(store_removal._Place, "_delete", die)
        try:
            remover.turn(order(place))
        except StoreError:
            pass
        else:
            break
        there = below(s3, place)
        assert RUN_KEY in there
        assert DONE_KEY not in there
        for folder in ("step-00000010-a00001", "step-00000005-a00001"):
            if f"checkpoints/{folder}/manifest.json" in there:
                assert sum(key.startswith(f"checkpoints/{folder}/") for key in there) == 3, "half a checkpoint"
        monkeypatch.setattr(store_removal._Place, "_delete", real)
        remover.restart()
        assert remover.to_the_end(order(place)) == RemovalTurn("gone")
        assert below(s3, place) == EXPORT
    assert deaths > 8


def test_many_objects_go_in_batches_and_turns(
    s3: Any, remover: Remover, place: str, versitygw: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = versitygw.folder / URI.removeprefix("s3://") / "team" / place / "checkpoints" / "step-00000010-a00001"
    for number in range(10_000):
        (folder / f"r{number:05d}-0-1.bin").write_bytes(b"")
    monkeypatch.setattr(store_removal, "TURN_SECONDS", 0.001)

    turns = 0
    while remover.turn(order(place, turn=turns)).state == "goes on":
        turns += 1
        assert turns < 40

    assert turns >= 10
    assert below(s3, place) == EXPORT


def test_exports_of_steps_go_also_behind_a_thousand_names_that_are_nobody_s(
    s3: Any, remover: Remover, place: str, versitygw: ObjectStore
) -> None:
    export = versitygw.folder / URI.removeprefix("s3://") / "team" / place / "export"
    for name in [*(f"step-00000001/of-a-user/{number:04d}" for number in range(1100)), "step-00000009/config.json"]:
        (export / name).parent.mkdir(parents=True, exist_ok=True)
        (export / name).write_bytes(b"")

    assert remover.to_the_end(order(place)).state == "gone"

    left = {key for key in below(s3, place) if "/step-" in key}
    assert len(left) == 1100
    assert "export/step-00000009/config.json" not in left


def test_who_did_not_say_that_he_ended_is_given_time_also_by_the_next_operator(
    s3: Any, remover: Remover, place: str
) -> None:
    # Given a pod that was lost with its node, and may train on there
    beat = json.loads(finished_run("tiny", NUMBERS)[ALIVE_KEY])
    put_files(s3, f"{URI}/team/{place}", {ALIVE_KEY: json.dumps({**beat, "ended": ""}).encode()})

    first = remover.turn(order(place))

    # Then it is told by a newer claim and a newer sign that it has to go, and nothing is removed before it can know
    assert first.state == "waits"
    assert CheckpointId(attempt=1, step=STEP).manifest_key in below(s3, place)
    assert attempt_key(2) in below(s3, place)
    sign = s3.get_object(Bucket="platform", Key=f"sft/team/{place}/{ALIVE_KEY}")["Body"].read()
    told = [json.loads(sign)[name] for name in ("attempt", "uid", "ended")]
    assert told == [2, f"removal-of-{UID}", ""]

    # And an operator that begins meanwhile goes on waiting
    remover.restart()
    remover.seconds = 170
    assert remover.turn(order(place)).state == "waits"
    remover.seconds = 181
    assert remover.turn(order(place)) == RemovalTurn("gone")
    assert below(s3, place) == EXPORT


def test_what_a_lost_pod_saves_meanwhile_goes_too(
    s3: Any, remover: Remover, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = store_removal._Place._delete, []

    def while_somebody_writes(self: Any, keys: list[str]) -> None:
        real(self, keys)
        if len(written) < 3:
            written.append(len(written))
            late = {f"checkpoints/step-0000002{len(written)}-a00001/r0.bin": b"late", "status.json": b"{}"}
            put_files(s3, f"{URI}/team/{place}", late)

    monkeypatch.setattr(store_removal._Place, "_delete", while_somebody_writes)

    assert remover.to_the_end(order(place)) == RemovalTurn("gone")
    assert below(s3, place) == EXPORT


def test_one_that_is_claimed_meanwhile_is_left_to_who_claimed_it(
    s3: Any, remover: Remover, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = "checkpoints/step-00000020-a00003/manifest.json"
    real, deleted = store_removal._Place._delete, []

    def then_claimed(self: Any, keys: list[str]) -> None:
        real(self, keys)
        deleted.append(keys)
        if len(deleted) == 1:
            claim(s3, place, 3, "another")
            put_files(s3, f"{URI}/team/{place}", {newer: b"{}"})

    monkeypatch.setattr(store_removal._Place, "_delete", then_claimed)

    turn = remover.turn(order(place))

    assert turn.state == "kept"
    assert "was claimed while it was removed (uid another, on elsewhere)" in turn.why
    assert {newer, RUN_KEY, attempt_key(3)} <= below(s3, place)
    assert deleted == [[DONE_KEY]]
    assert remover.turn(order(place)).state == "kept"


def test_a_lost_pod_that_begins_again_is_fenced_again(
    s3: Any, remover: Remover, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store_removal._Place._delete
    beat = json.loads(finished_run("tiny", NUMBERS)[ALIVE_KEY])
    alive = {ALIVE_KEY: json.dumps({**beat, "attempt": 3, "ended": ""}).encode()}

    def then_claimed(self: Any, keys: list[str]) -> None:
        real(self, keys)
        claim(s3, place, 3, UID)
        put_files(s3, f"{URI}/team/{place}", alive)

    monkeypatch.setattr(store_removal._Place, "_delete", then_claimed)
    with pytest.raises(StoreError, match="lives on somewhere"):
        remover.turn(order(place))

    monkeypatch.setattr(store_removal._Place, "_delete", real)
    assert remover.turn(order(place)).state == "waits"
    assert attempt_key(4) in below(s3, place)
    remover.seconds = 181
    assert remover.turn(order(place)) == RemovalTurn("gone")
    assert below(s3, place) == EXPORT


def test_one_that_is_no_longer_to_go_is_left_at_once(s3: Any, remover: Remover, place: str) -> None:
    remover.stop.set()

    with pytest.raises(StoreError, match="no longer to be removed"):
        remover.turn(order(place))
    assert DONE_KEY in below(s3, place)


def test_a_server_that_knows_no_batches_is_asked_key_by_key(
    s3: Any, remover: Remover, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import ClientError

    def unknown(**arguments: Any) -> None:
        answer = {"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}
        raise ClientError(answer, "DeleteObjects")

    real = store_removal.connect

    def old_server(store: StoreSettings) -> Any:
        client = real(store)
        monkeypatch.setattr(client, "delete_objects", unknown)
        return client

    monkeypatch.setattr(store_removal, "connect", old_server)

    assert remover.to_the_end(order(place)) == RemovalTurn("gone")
    assert below(s3, place) == EXPORT


def test_wrong_credentials_and_a_read_only_server_say_why(
    s3: Any, remover: Remover, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    remover.restart()

    with pytest.raises(StoreError, match=rf"s3://platform/sft/team/{place}: .*"):
        remover.turn(order(place))
    assert DONE_KEY in below(s3, place)
