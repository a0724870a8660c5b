"""Buckets with models, data and checkpoints in them."""

from pathlib import Path
from typing import Any

from tests.cluster.object_store import ObjectStore


def upload(server: ObjectStore, bucket: str, prefix: str, *files: Path) -> None:
    """Put ``files`` under ``prefix`` of ``bucket``."""
    for file in files:
        server.client().upload_file(str(file), bucket, f"{prefix}/{file.name}")


def s3_spec(server: ObjectStore) -> dict[str, Any]:
    """``checkpoint.s3`` of a job that uses the server."""
    return {"endpoint": server.endpoint, "region": server.region, "forcePathStyle": True}


def credentials(server: ObjectStore) -> dict[str, str]:
    """The environment of a shell that may use the server."""
    return {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
