"""Which unfinished uploads go with a place that is removed."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

from sft_api.numbers import Numbers
from sft_operator.cluster.store_removal import _Place
from sft_operator.decisions.result import RemovePlace

OURS = {"checkpoints/step-00000010-a00001/rank-0", f"tokenized/{'a' * 64}.arrow", "export/step-00000020/config.json"}
THEIRS = {"tokenized/train.jsonl", "export/model.safetensors", "rows/train.parquet"}


class Server:
    """Answers with all uploads of its bucket, whatever it was asked for."""

    def __init__(self) -> None:
        self.keys = [*(f"team/run/{key}" for key in sorted(THEIRS | OURS)), "checkpoints/of-another"]

    def list_multipart_uploads(self, **_: Any) -> dict[str, Any]:
        return {"Uploads": [{"Key": key, "UploadId": key} for key in self.keys]}

    def abort_multipart_upload(self, *, Bucket: str, Key: str, UploadId: str) -> None:
        assert UploadId == Key
        self.keys.remove(Key)


def test_uploads_of_others_stay_also_where_a_server_answers_with_more_than_was_asked_for() -> None:
    server, wanted = Server(), RemovePlace("uid", "s3://bucket/team/run", "tiny", "team", Numbers({}), 0)

    _Place(server, wanted, lambda: 0.0, lambda: datetime.now(UTC), threading.Event())._abort_uploads()

    assert set(server.keys) == {*(f"team/run/{key}" for key in THEIRS), "checkpoints/of-another"}
