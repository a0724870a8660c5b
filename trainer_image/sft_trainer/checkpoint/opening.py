"""From a URI to the store behind it."""

from sft_api.trainer_config import TrainerConfig
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.store import S3Settings, Store, bucket_and_prefix, file_path, pvc_path
from sft_trainer.errors import ConfigError


def store_of(config: TrainerConfig) -> Store:
    """The store in which a run of ``config`` saves; errors as of ``open_store``."""
    return store_at(config.checkpoint_uri, config)


def store_at(uri: str, config: TrainerConfig) -> Store:
    """The store at ``uri``, of buckets by the settings of a run of ``config``; errors as of ``open_store``."""
    return open_store(uri, S3Settings.from_spec(config.spec.checkpoint.s3))


def open_store(uri: str, s3: S3Settings | None = None) -> Store:
    """The store behind ``file:///path``, ``pvc://claim/path`` or ``s3://bucket/prefix``.

    Contacts nothing yet: ``probe`` does. Raises ConfigError for another scheme, StorageNotFoundError for a
    claim that is not mounted.
    """
    if uri.startswith("file://"):
        return LocalStore(file_path(uri), uri=uri)
    if uri.startswith("pvc://"):
        return LocalStore(pvc_path(uri), uri=uri)
    if uri.startswith("s3://"):
        # Not at the top: boto3 is slow to import, and a folder needs none of it.
        from sft_trainer.checkpoint.s3 import S3Store

        bucket, prefix = bucket_and_prefix(uri)
        return S3Store(bucket, prefix, s3 or S3Settings())
    raise ConfigError(f"{uri!r} has no scheme that can be stored to: use s3://, pvc:// or file:///")
