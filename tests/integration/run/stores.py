"""Buckets with models, data and checkpoints in them."""

from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from tests.cluster.object_store import ObjectStore


def client(server: ObjectStore) -> Any:
    """An S3 client with the right credentials."""
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=server.region,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(s3={"addressing_style": "path"}),
    )


def upload(server: ObjectStore, bucket: str, prefix: str, *files: Path) -> None:
    """Put ``files`` under ``prefix`` of ``bucket``."""
    for file in files:
        client(server).upload_file(str(file), bucket, f"{prefix}/{file.name}")


def s3_spec(server: ObjectStore) -> dict[str, Any]:
    """``checkpoint.s3`` of a job that uses the server."""
    return {"endpoint": server.endpoint, "region": server.region, "forcePathStyle": True}


def credentials(server: ObjectStore) -> dict[str, str]:
    """The environment of a shell that may use the server."""
    return {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
