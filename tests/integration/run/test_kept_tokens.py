"""Data that was tokenised once is read by the next node, from beside the checkpoints in a bucket."""

import json
import re
from pathlib import Path
from typing import Any

from sft_trainer.data.kept import LEAST_TOKENS
from tests.cluster.object_store import ObjectStore
from tests.integration.run.runs import Ended, Place, step_numbers
from tests.integration.run.stores import credentials, s3_spec

BUCKET = "kept"
ROW_TOKENS = 1000


def log_of(ended: Ended) -> str:
    """All that the run has written down."""
    found = re.search(r"^Log: +(.+)$", ended.said, re.MULTILINE)
    assert found
    return Path(found[1]).read_text()


def test_another_node_trains_on_by_the_tokens_of_the_first(
    place: Place, versitygw: ObjectStore, tmp_path: Path
) -> None:
    # Given a run on much data, of which the first node has written tokens and two checkpoints
    versitygw.client().create_bucket(Bucket=BUCKET)
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for i in range(LEAST_TOKENS // ROW_TOKENS):
            ids = [(i + 7 * j) % 500 for j in range(ROW_TOKENS)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * ROW_TOKENS}) + "\n")

    def job(run: str, **data: Any) -> dict[str, Any]:
        return place.job(
            data={"train": [{"uri": f"file://{rows}"}], "maxLength": 1024, **data},
            training={"steps": 4, "globalBatchTokens": 1024, "optimizer": {"learningRate": 1e-3}},
            checkpoint={"uri": f"s3://{BUCKET}/{run}", "s3": s3_spec(versitygw), "everySteps": 1},
        )

    def tokens(run: str) -> list[str]:
        folder = versitygw.folder / BUCKET / run / "tokenized"
        return sorted(path.suffix for path in folder.iterdir()) if folder.exists() else []

    process = place.start_standing(job("one"), 2, **credentials(versitygw))
    place.wait_until(lambda: ".json" in tokens("one"))
    stopped = place.interrupt(process)
    assert stopped.latest is not None
    assert tokens("one") == [".arrow", ".json"]

    # When another node goes on
    ended = place.run(job("one"), **credentials(versitygw), SFT_CACHE_DIR=str(tmp_path / "another"))

    # Then it has not tokenised them, the curve is that of a run that kept none, and nothing is left of them
    assert ended.code == 0, ended.said
    assert ended.status["progress"]["step"] == 4
    assert "is used, and the rows are not tokenised again" in log_of(ended)
    assert tokens("one") == []
    alone = place.run(job("two", keepTokenized=False), **credentials(versitygw))
    assert alone.code == 0, alone.said
    assert "tokenised again" not in log_of(alone)
    assert not (versitygw.folder / BUCKET / "two" / "tokenized").exists()
    assert step_numbers(versitygw.folder / BUCKET / "one") == step_numbers(versitygw.folder / BUCKET / "two")
