"""What would end a run early is found before torch is imported by anybody."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.object_store import ObjectStore
from tests.integration.run.runs import Place, assert_refused
from tests.integration.run.stores import credentials, s3_spec

BUCKET = "early-look"
NO_TURN_END = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

Prepared = tuple[dict[str, Any], int, str, str]
"""A job, and how it must end: exit code, class, sentence."""


@pytest.fixture(scope="module")
def server(versitygw: ObjectStore) -> ObjectStore:
    versitygw.client().create_bucket(Bucket=BUCKET)
    return versitygw


def bad_bucket(place: Place, server: ObjectStore) -> Prepared:
    job = place.job(checkpoint={"uri": "s3://no-such-bucket/run", "s3": s3_spec(server)})
    return job, 14, "StorageNotFound", "the bucket 'no-such-bucket' is not there; create it, or correct"


def other_settings(place: Place, _: ObjectStore) -> Prepared:
    from datetime import UTC, datetime

    from sft_api.checkpoints import CheckpointId, Manifest, RunState, StoredIndex, encode_manifest
    from sft_cli.local import local_uid

    store = place.store()
    values = {"model.uri": "hf://org/other", "data.train": [{"uri": "hf://org/other"}]}
    run = RunState(numbers={"version": 1, "values": values})
    manifest = Manifest(
        step=5, attempt=1, job_uid=local_uid(f"file://{store}", store), world_size=1, created=datetime.now(UTC),
        run=run, files=(), index=StoredIndex(name="index.idx", size=0, sha256="0" * 64, tensors=0),
    )  # fmt: skip
    file = store / CheckpointId(1, 5).manifest_key
    file.parent.mkdir(parents=True)
    file.with_name("index.idx").write_bytes(b"")
    file.write_bytes(encode_manifest(manifest))
    return place.job(), 10, "ConfigError", r"other settings \(.*model\.uri: .*hf://org/other.* -> "


def bad_column(place: Place, _: ObjectStore) -> Prepared:
    job = place.job(data={"train": [{"uri": f"file://{place.inputs.train}", "messagesKey": "message"}]})
    return job, 11, "DataError", "no column 'message', which messagesKey names, found messages; did you mean 'messages'"


def bad_column_in_a_bucket(place: Place, server: ObjectStore) -> Prepared:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    file = place.folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    server.client().upload_file(str(file), BUCKET, "rows/rows.jsonl")
    job = place.job(
        data={"train": [{"uri": f"s3://{BUCKET}/rows", "systemKey": "sytem"}]}, checkpoint={"s3": s3_spec(server)}
    )
    return job, 11, "DataError", "s3://early-look/rows: no column 'sytem', which systemKey names, found messages"


def cut_off_in_a_bucket(place: Place, server: ObjectStore) -> Prepared:
    file = place.folder / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(place.inputs.train.read_bytes())[:-5])
    server.client().upload_file(str(file), BUCKET, "packed/rows.jsonl.gz")
    job = place.job(data={"train": [{"uri": f"s3://{BUCKET}/packed"}]}, checkpoint={"s3": s3_spec(server)})
    return job, 11, "DataError", r"rows\.jsonl\.gz cannot be unpacked as gzip \(.*\): it was cut off"


def bad_template(place: Place, _: ObjectStore) -> Prepared:
    job = place.job(model={"chatTemplate": NO_TURN_END})
    return job, 12, "ModelError", "writes no end-of-turn token .* set a model.chatTemplate that writes one"


def no_model(place: Place, server: ObjectStore) -> Prepared:
    job = place.job(model={"uri": f"s3://{BUCKET}/models/absent"}, checkpoint={"s3": s3_spec(server)})
    return job, 12, "ModelError", "s3://early-look/models/absent: there is nothing under this key"


# Read by every Python process of the run: says which of them imports what is heavy.
WATCH = """
import sys

def watch(event, arguments):
    if event == "import" and arguments[0] in ("torch", "transformers"):
        with open({file!r}, "a") as file:
            print(arguments[0], *sys.orig_argv[1:3], file=file)

sys.addaudithook(watch)
"""


def watched(place: Place) -> tuple[dict[str, str], Path]:
    """The environment of a run that is watched, and the file that will list imports, each with who imported it."""
    folder, seen = place.folder / "watch", place.folder / "imports"
    folder.mkdir()
    seen.touch()
    (folder / "sitecustomize.py").write_text(WATCH.format(file=str(seen)))
    return {"PYTHONPATH": str(folder)}, seen


@pytest.mark.parametrize(
    "case",
    [bad_bucket, other_settings, bad_column, bad_column_in_a_bucket, cut_off_in_a_bucket, bad_template, no_model],
)
def test_torch_is_not_imported_to_find_out(
    place: Place, server: ObjectStore, case: Callable[[Place, ObjectStore], Prepared]
) -> None:
    job, code, failure, sentence = case(place, server)

    environment, seen = watched(place)

    ended = place.run(job, **credentials(server), **environment)

    assert_refused(ended, code, failure, sentence)
    heavy = {line.split()[0] for line in seen.read_text().splitlines()}
    assert heavy <= ({"transformers"} if case is bad_template else set()), seen.read_text()


def test_a_good_run_looks_first_and_imports_then(place: Place) -> None:
    environment, seen = watched(place)

    ended = place.run(place.job(), **environment)

    assert ended.code == 0, ended.said
    imports = seen.read_text().splitlines()
    assert "torch -m sft_trainer.supervisor.preload" in imports, "the watch sees it where it is"
    assert not [line for line in imports if line.startswith("torch") and "sft_trainer.check" in line]


def test_data_that_is_small_beside_a_step_is_told_before_the_first_one(place: Place) -> None:
    data = {"train": [{"uri": f"file://{place.inputs.train}", "split": "train[:3]"}]}

    ended = place.run(place.job(data=data, training={"steps": 2, "globalBatchTokens": 8192}))

    (warning,) = ended.status["warnings"]
    advice = "set training.globalBatchSize: 1 instead of globalBatchTokens for 3 steps a pass over the data"
    assert re.fullmatch(rf"every step holds all 3 rows \d+ times: {advice}", warning)
    assert ended.said.count(f"Warning: {warning}") == 1


def test_an_error_of_the_look_itself_stops_nobody(place: Place) -> None:
    folder = place.folder / "broken"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\nif 'sft_trainer.check' in sys.orig_argv:\n    raise SystemExit('the look is broken')\n"
    )

    ended = place.run(place.job(), PYTHONPATH=str(folder))

    assert ended.code == 0, ended.said
