"""``sft checkpoints``: what it shows, which damage it finds, and what it never removes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from sft_api.checkpoints import CheckpointId, attempt_key
from sft_api.numbers import Numbers
from sft_api.place import ALIVE_KEY, DONE_KEY, RUN_KEY, Beat, Done, RunRecord, encode_record
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import SFTJob
from sft_cli.checkpoints import prune_checkpoints
from sft_cli.errors import UserError
from sft_cli.main import cli
from sft_trainer.checkpoint.catalog import KeepPolicy
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.s3 import S3Store
from sft_trainer.checkpoint.store import RangeStream, S3Settings, Store
from sft_trainer.errors import StorageRefusedError
from tests.cluster.object_store import ObjectStore
from tests.integration.checkpoint.managers import a_file_of, folders, save, started, truncate
from tests.integration.run.stores import credentials, s3_spec


def sft(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["checkpoints", *arguments])


def document(uri: str | None = None, **s3: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "model": {"uri": "hf://a/b"},
        "data": {"train": [{"uri": "hf://a/c"}]},
        "compute": {"gpusPerNode": 0},
    }
    if uri is not None:
        spec["checkpoint"] = {"uri": uri, **({"s3": s3} if s3 else {})}
    return {"apiVersion": "sftjob.dev/v1alpha1", "kind": "SFTJob", "metadata": {"name": "tiny"}, "spec": spec}


def beat(store: Store, *, attempt: int = 1, count: int = 1, ended: str = "") -> None:
    written = Beat(attempt=attempt, name="tiny", namespace="team", uid="u", host="node-7", count=count, ended=ended)
    store.put(ALIVE_KEY, written.model_dump_json(by_alias=True).encode())


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


@pytest.fixture
def run(store: LocalStore) -> LocalStore:
    """A complete run with three checkpoints, of which the first is the best."""
    numbers = Numbers.of(SFTJob.from_manifest(document()).spec)
    manager = started(store)
    for step, loss in ((2, 1.0), (4, 1.5), (6, 1.2)):
        save(manager, step, numbers=numbers.as_record(), metrics={"loss": loss + 1, "evalLoss": loss})
    record = RunRecord(
        name="tiny",
        digest=numbers.digest,
        numbers=numbers.as_record(),
        namespace="team",
        uid="job-a",
        created="2026-01-02T03:04:05Z",  # type: ignore[arg-type]
        record_id="r",
    )
    store.put(RUN_KEY, encode_record(record))
    store.put(DONE_KEY, Done(step=6, attempt=1).model_dump_json(by_alias=True).encode())
    beat(store, ended="complete")
    return store


def unfinished(store: Store, attempt: int, step: int) -> str:
    """The folder of a save that came to no manifest."""
    identity = CheckpointId(attempt, step)
    store.put(f"{identity.prefix}rank-00000.bin", b"half")
    return identity.folder


def flip(store: Store, key: str, at: int) -> None:
    raw = bytearray(store.read(key))
    raw[at] ^= 1
    store.put(key, bytes(raw))


# list


@pytest.mark.parametrize("key", [RUN_KEY, DONE_KEY])
def test_what_a_proxy_says_is_not_said_of_the_run(run: LocalStore, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    read = LocalStore.read

    def through_a_proxy(store: LocalStore, name: str, most: int | None = None) -> bytes:
        if key in name:
            raise StorageRefusedError("what answers there is no S3 server")
        return read(store, name, most)

    monkeypatch.setattr(LocalStore, "read", through_a_proxy)
    done = sft("list", str(run.path))
    assert done.exit_code != 0
    assert "what answers there is no S3 server" in done.stderr
    assert "Run " not in done.stdout


def test_the_run_and_its_checkpoints(run: LocalStore) -> None:
    half = unfinished(run, 1, 8)
    truncate(run, CheckpointId(1, 4))
    done = sft("list", str(run.path))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == f"Place   {run.uri}"
    assert lines[1] == "Run     tiny, begun 2026-01-02T03:04:05Z in namespace team (uid job-a)"
    assert "State   complete since step 6" in lines
    rows = {line.split()[0]: line for line in lines if line[:1].isdigit()}
    assert list(rows) == ["8", "6", "4", "2"]
    assert rows["6"].endswith("complete    newest, final")
    assert rows["2"].split()[-2:] == ["complete", "best"]
    assert "2.0000  1.0000" in rows["2"]
    assert rows["4"].endswith("unusable")
    assert rows["8"].endswith("unfinished")
    assert f"{half}: it has no manifest: a save that goes on, or was interrupted" in lines
    assert any("step-00000004-a00001: " in line and "bytes instead of" in line for line in lines)


def test_the_same_for_programs(run: LocalStore) -> None:
    unfinished(run, 1, 8)
    found = json.loads(sft("list", run.uri, "-o", "json").stdout)
    assert found["run"]["name"] == "tiny"
    assert found["complete"] == {"version": 1, "step": 6, "attempt": 1, "stoppedEarly": "", "best": ""}
    assert found["writer"]["ended"] == "complete"
    assert [(each["step"], each["state"], each["is"]) for each in found["checkpoints"]] == [
        (8, "unfinished", []),
        (6, "complete", ["newest", "final"]),
        (4, "complete", []),
        (2, "complete", ["best"]),
    ]
    assert found["checkpoints"][1]["evalLoss"] == 1.2


def test_a_damaged_index_is_no_checkpoint(run: LocalStore) -> None:
    key = next(entry.key for entry in run.list(CheckpointId(1, 6).prefix) if entry.key.endswith(".idx"))
    flip(run, key, 100)
    done = sft("list", run.uri)
    assert "the index does not match its digest" in done.stdout
    assert [each["is"] for each in json.loads(sft("list", run.uri, "-o", "json").stdout)["checkpoints"]] == [
        [],
        ["newest"],
        ["best"],
    ]


def test_where_a_place_is_looked_for(run: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(document(run.uri)))
    assert sft("list", "job.yaml").stdout == sft("list", run.uri).stdout
    # An object of a cluster that names no place says in its status where it saves
    latest = {
        "step": 6,
        "attempt": 1,
        "uri": f"{run.uri}/checkpoints/step-00000006-a00001",
        "time": "2026-01-02T03:04:05Z",
        "sizeBytes": 1,
        "verified": True,
    }
    manifest.write_text(yaml.safe_dump({**document(), "status": {"checkpoints": {"latest": latest}}}))
    assert sft("list", "job.yaml").stdout == sft("list", run.uri).stdout
    # The name of a run of this folder, as sft run makes it
    (tmp_path / "sft-runs").mkdir()
    run.path.rename(tmp_path / "sft-runs" / "tiny")
    manifest.write_text(yaml.safe_dump(document()))
    assert "complete since step 6" in sft("list", "tiny").stdout
    assert "complete since step 6" in sft("list", "job.yaml").stdout
    # and saves elsewhere, as its manifest said
    elsewhere = run.path.with_name("elsewhere")
    (tmp_path / "sft-runs" / "tiny").rename(elsewhere)
    (tmp_path / "sft-runs" / "tiny").mkdir()
    resolved = TrainerConfig.resolve(
        SFTJob.from_manifest(document(f"file://{elsewhere}")), uid="u", default_checkpoint_uri=""
    )
    (tmp_path / "sft-runs" / "tiny" / "config.json").write_text(resolved.model_dump_json(by_alias=True))
    assert sft("list", "tiny").stdout == sft("list", str(elsewhere)).stdout
    # What is none of these is said
    nothing = sft("list", "tinny")
    assert nothing.exit_code == 10
    assert "kubectl get sftjob tinny -o yaml | sft checkpoints list -" in nothing.stderr
    one = sft("list", "file:///data/run/checkpoints/step-00000006-a00001")
    assert "give the place of its run, file:///data/run, and for verify --step 6" in one.stderr


@pytest.mark.parametrize("version", [1, 2])
def test_checkpoints_are_listed_verified_and_pruned_without_torch(run: LocalStore, version: int) -> None:
    # Given a program that has no torch, and a checkpoint of an older format beside others
    older = CheckpointId(1, 4)
    program = (
        "import sys; sys.modules['torch'] = None; from sft_cli.main import cli; cli(['checkpoints', *sys.argv[1:]])"
    )

    def without_torch(*arguments: str) -> str:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    source = Path(__file__).parents[2] / "unit" / "checkpoint" / f"format_{version}"
    run.delete([entry.key for entry in run.list(older.prefix)])
    shutil.copytree(source / older.prefix, run.path / older.prefix)

    # When it looks, reads and removes
    expected = sft("list", run.uri).stdout
    listed = without_torch("list", run.uri)
    verified = without_torch("verify", run.uri)
    without_torch("prune", run.uri, "--keep-last", "1", "--yes")

    # Then nothing is missing
    assert listed == expected
    assert f"{older.folder}: of format {version}, which is read, and written no more" in listed
    assert verified.count("every byte is as it was written") == 3
    assert folders(run) == ["step-00000006-a00001", older.folder], "that of another run stays"


def test_an_empty_place_and_one_that_is_not_there(tmp_path: Path) -> None:
    assert "There is no checkpoint." in sft("list", str(tmp_path)).stdout
    assert sft("list", f"file://{tmp_path}/not").exit_code == 14
    assert sft("verify", str(tmp_path)).exit_code == 14


def test_the_folder_that_holds_them_is_no_place_where_nothing_was_trained(run: LocalStore) -> None:
    assert f"There is no checkpoint: those of a run in {run.uri} are" in sft("list", f"{run.uri}/checkpoints").stdout


# verify


def test_every_byte_is_compared(run: LocalStore) -> None:
    done = sft("verify", run.uri)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("every byte is as it was written") == 3

    # One bit of one file, which neither manifest nor sizes tell
    key = a_file_of(run, CheckpointId(1, 4))
    flip(run, key, 1000)
    assert "unusable" not in sft("list", run.uri).stdout
    done = sft("verify", run.uri)
    assert done.exit_code == 10
    assert done.stdout.count("every byte is as it was written") == 2
    (damaged,) = [line for line in done.stdout.splitlines() if "do not match their digest" in line]
    assert damaged.startswith(f"step-00000004-a00001: {key}: bytes ")
    assert "weight of 'model.weight'" in damaged or "of 'model.weight'" in damaged

    # What is asked for decides the verdict
    assert sft("verify", run.uri, "--newest").exit_code == 0
    assert sft("verify", run.uri, "--step", "2").exit_code == 0
    assert sft("verify", run.uri, "--step", "4").exit_code == 10
    found = json.loads(sft("verify", run.uri, "--step", "4", "-o", "json").stdout)
    assert [(each["step"], each["sound"], len(each["problems"])) for each in found] == [(4, False, 1)]


def test_what_is_not_there_and_what_is_unfinished(run: LocalStore) -> None:
    unfinished(run, 1, 8)
    missing = sft("verify", run.uri, "--step", "5")
    assert missing.exit_code == 14
    assert "there is no checkpoint of step 5" in missing.stderr
    assert sft("verify", run.uri).exit_code == 0, "an unfinished save is no checkpoint"
    half = sft("verify", run.uri, "--step", "8")
    assert half.exit_code == 10
    assert "it has no manifest" in half.stdout


def test_a_checkpoint_that_is_pruned_meanwhile_is_no_damage(run: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    identity, open_range = CheckpointId(1, 2), LocalStore.open_range

    def gone(self: LocalStore, key: str, offset: int, length: int) -> AbstractContextManager[RangeStream]:
        if key.startswith(identity.prefix) and key.endswith(".bin"):
            run.delete([entry.key for entry in run.list(identity.prefix)])
        return open_range(self, key, offset, length)

    monkeypatch.setattr(LocalStore, "open_range", gone)
    done = sft("verify", run.uri)
    assert done.exit_code == 0, done.output
    assert "step-00000002-a00001 was removed meanwhile" in done.stderr
    assert "step-00000002" not in done.stdout, "nothing is said of bytes that were not read"


def test_a_checkpoint_that_is_pruned_while_it_is_listed_is_not_unusable(
    run: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, read = CheckpointId(1, 2), LocalStore.read

    def gone(self: LocalStore, key: str, *limit: int) -> bytes:
        if key == identity.manifest_key:
            run.delete([entry.key for entry in run.list(identity.prefix)])
        return read(self, key, *limit)

    monkeypatch.setattr(LocalStore, "read", gone)
    done = sft("list", run.uri)
    assert done.exit_code == 0, done.output
    assert "unusable" not in done.stdout
    assert "step-00000002" not in done.stdout


# prune


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--keep-last", "1"), [6]),
        (("--keep-last", "2"), [6, 4]),
        (("--keep-best", "1"), [6, 2]),
        (("--keep-last", "2", "--keep-best", "1"), [6, 4, 2]),
        (("--unfinished",), [6, 4, 2]),
    ],
)
def test_what_stays(run: LocalStore, options: tuple[str, ...], left: list[int]) -> None:
    half = unfinished(run, 1, 8)
    before = folders(run)
    shown = sft("prune", run.uri, *options)
    assert shown.exit_code == 0, shown.output
    assert folders(run) == before, "nothing goes without --yes"
    assert sft("prune", run.uri, *options, "--yes").exit_code == 0
    wanted = [f"step-{step:08d}-a00001" for step in left]
    assert folders(run) == (wanted if "--unfinished" in options else [half, *wanted])
    gone = [folder for folder in before if folder not in folders(run)]
    assert [line.split()[2] for line in shown.stdout.splitlines() if line.startswith("Would go")] == gone


@pytest.mark.parametrize("evaluated", [False, True])
def test_it_is_said_where_there_is_nothing_to_compare(store: LocalStore, evaluated: bool) -> None:
    manager = started(store)
    for step in (2, 4):
        save(manager, step, metrics={"loss": 1.0, **({"evalLoss": float(step)} if evaluated else {})})
    beat(store, ended="complete")
    said = "no checkpoint here has an evaluation loss"
    assert (said in sft("prune", store.uri, "--keep-best", "1").output) is not evaluated
    assert said not in sft("prune", store.uri, "--keep-last", "1").output


def test_the_last_checkpoint_of_a_complete_run_and_damaged_ones_stay(run: LocalStore) -> None:
    run.put(DONE_KEY, Done(step=4, attempt=1).model_dump_json(by_alias=True).encode())
    truncate(run, CheckpointId(1, 2))
    assert sft("prune", run.uri, "--keep-last", "1", "--yes").exit_code == 0
    assert folders(run) == ["step-00000006-a00001", "step-00000004-a00001", "step-00000002-a00001"]


def test_the_best_checkpoint_of_a_complete_run_stays(run: LocalStore) -> None:
    done = Done(step=6, attempt=1, best="step-00000002-a00001")
    run.put(DONE_KEY, done.model_dump_json(by_alias=True).encode())
    assert sft("prune", run.uri, "--keep-last", "1", "--yes").exit_code == 0
    assert folders(run) == ["step-00000006-a00001", "step-00000002-a00001"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [({"best": 0}, [6]), ({"best": 1}, [6, 2]), ({"everySteps": 4}, [6, 4]), ({"everySteps": 2}, [6, 4, 2])],
)
def test_of_a_manifest_what_it_keeps_for_ever_and_as_many_of_the_best_stay_as_it_says(
    run: LocalStore, tmp_path: Path, keep: dict[str, int], left: list[int]
) -> None:
    job = document(run.uri)
    job["spec"]["data"]["eval"] = [{"name": "held-out", "uri": "hf://org/rows"}]
    job["spec"]["checkpoint"] |= {"everySteps": 2, "keep": keep}
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    assert sft("prune", str(manifest), "--keep-last", "1", "--yes").exit_code == 0
    assert folders(run) == [f"step-{step:08d}-a00001" for step in left]


def test_what_is_meant_and_what_stays_is_said(run: LocalStore) -> None:
    run.put(DONE_KEY, Done(step=4, attempt=1).model_dump_json(by_alias=True).encode())
    shown = sft("prune", run.uri, "--keep-last", "1")
    assert shown.stdout.splitlines()[0] == f"Place     {run.uri}"
    assert "what stays: step 6, 4; --yes does it" in shown.stderr


def test_an_object_of_a_cluster_is_no_run_of_this_folder(
    run: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run of this folder with the name of an object that has saved nothing yet
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft-runs").mkdir()
    local = LocalStore(run.path.rename(tmp_path / "sft-runs" / "tiny"))
    before = folders(local)
    job = document()
    job["metadata"] |= {"uid": "6ed1", "namespace": "team"}

    # When that object's checkpoints are to go
    command = ["checkpoints", "prune", "-", "--keep-last", "1", "--yes"]
    done = CliRunner().invoke(cli, command, input=yaml.safe_dump(job))

    # Then those of the run stay, and it is said where to look
    assert (done.exit_code, folders(local)) == (10, before)
    assert "uid 6ed1" in done.stderr
    assert "kubectl get configmap tiny-config -n team -o yaml" in done.stderr


def test_the_newest_that_can_be_used_stays(run: LocalStore) -> None:
    truncate(run, CheckpointId(1, 6))
    assert sft("prune", run.uri, "--keep-last", "1", "--yes").exit_code == 0
    assert folders(run) == ["step-00000006-a00001", "step-00000004-a00001"]


def pruned(run: Store, during: Callable[[float], None] = lambda at: None, **options: Any) -> float:
    """Seconds for which it was watched before anything went."""
    waited = 0.0

    def sleep(seconds: float) -> None:
        nonlocal waited
        waited += seconds
        during(waited)

    wanted = {"keep": None, "unfinished": False, "yes": True, **options}
    prune_checkpoints(run.uri, name=None, sleep=sleep, **wanted)
    return waited


def test_while_a_run_lives_only_leftovers_of_earlier_attempts_go(run: LocalStore) -> None:
    old = unfinished(run, 1, 8)
    started(run)  # drops it, and claims attempt 2
    assert old not in folders(run)
    unfinished(run, 1, 8)
    being_written = unfinished(run, 2, 10)
    beat(run, attempt=2, count=1)

    def next_beat(at: float) -> None:
        if at == 60:
            beat(run, attempt=2, count=2)

    # Then checkpoints are left to the run, and nothing goes
    before = folders(run)
    with pytest.raises(UserError, match=r"team/tiny .* trains in .* now") as refused:
        pruned(run, next_beat, keep=KeepPolicy(last=1), unfinished=True)
    assert refused.value.exit_code == 18
    assert folders(run) == before

    # Leftovers of attempts that can commit no more go, what it is writing stays
    beat(run, attempt=2, count=1)
    assert pruned(run, next_beat, unfinished=True) == 60
    assert folders(run)[0] == being_written
    assert old not in folders(run)


def test_silence_for_three_minutes_is_an_end(run: LocalStore) -> None:
    half = unfinished(run, 1, 8)
    beat(run, count=4)
    assert pruned(run, keep=KeepPolicy(last=1), unfinished=True) == 180
    assert folders(run) == ["step-00000006-a00001"]
    assert half not in folders(run)


def test_a_claim_without_a_sign_is_watched_and_a_sign_meanwhile_counts(run: LocalStore) -> None:
    started(run)  # attempt 2, which has not given a sign yet: the one that is there is of attempt 1
    with pytest.raises(UserError, match="trains in"):
        pruned(run, lambda at: beat(run, attempt=2) if at == 5 else None, keep=KeepPolicy(last=1))
    assert len(folders(run)) == 3


def test_a_run_that_starts_meanwhile_stops_it(run: LocalStore) -> None:
    beat(run, count=4)

    def start(at: float) -> None:
        if at == 180:
            run.create(attempt_key(2), b"{}")

    with pytest.raises(UserError, match="a run has started"):
        pruned(run, start, keep=KeepPolicy(last=1))
    assert len(folders(run)) == 3


def test_something_must_be_said(run: LocalStore) -> None:
    done = sft("prune", run.uri, "--yes")
    assert done.exit_code == 2
    assert "--keep-last" in done.stderr


def test_a_bucket(versitygw: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in credentials(versitygw).items():
        monkeypatch.setenv(key, value)
    versitygw.client().create_bucket(Bucket="listed")
    settings = S3Settings(endpoint=versitygw.endpoint, region=versitygw.region, force_path_style=True)
    store = S3Store("listed", f"run-{uuid.uuid4().hex}", settings, retry_seconds=30)
    manager = started(store)
    for step in (2, 4):
        save(manager, step)
    beat(store, ended="stopped")
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(document(store.uri, **s3_spec(versitygw))))
    key = a_file_of(store, CheckpointId(1, 4))
    flip(store, key, 5)
    assert sft("verify", str(manifest)).exit_code == 10
    assert sft("verify", str(manifest), "--step", "2").exit_code == 0
    assert sft("prune", str(manifest), "--keep-last", "1", "--yes").exit_code == 0
    assert folders(store) == ["step-00000004-a00001"]
