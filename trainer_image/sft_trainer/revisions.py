"""What model and training data are now, so that every later start of a run trains on the same.

What lies on the hub is pinned to a commit, the checkpoint of another run to its content. Of a bucket only a digest of
its listing can be kept: what changed there is told, and cannot be had back.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping

from sft_api.peft_files import FIELD as ADAPTER_FIELD
from sft_api.place import ORIGIN_FIELD
from sft_api.trainer_config import TrainerConfig

from .checkpoint.store import S3Settings
from .errors import TrainingError
from .fetch import Kind, hub_commit, hub_error, listing
from .origin import Origin

_HUB = "hf://"
_OF_ADAPTERS = "a start before the first checkpoint begins with what is there now"


def revisions(config: TrainerConfig) -> dict[str, str]:
    """Commit or digest of a listing by field of the manifest, of all that counts and is neither file nor volume.

    Raises what fetching it would: ModelError, DataError, AccessDeniedError, StorageUnavailableError.
    """
    found = {}
    for field, uri, kind in _sources(config):
        if uri.startswith(_HUB):
            found[field] = _commit(uri, kind)
        elif uri.startswith("s3://"):
            found[field] = _listed(uri, S3Settings.from_spec(config.spec.checkpoint.s3), kind)
    if (origin := Origin.of(config, {})) is not None:
        found[ORIGIN_FIELD] = str(origin.pin())
    return found


def changed(config: TrainerConfig, recorded: Mapping[str, str]) -> list[str]:
    """A sentence for everything in a bucket that is no longer what ``recorded`` says."""
    s3 = S3Settings.from_spec(config.spec.checkpoint.s3)
    return [
        f"{uri} ({field}) is not what it was when this run began: a file was added, removed or written anew; "
        + (_OF_ADAPTERS if field == ADAPTER_FIELD else "steps from now on see what is there now")
        for field, uri, kind in _sources(config)
        if field in recorded and uri.startswith("s3://") and _listed(uri, s3, kind) != recorded[field]
    ]


def pinned(config: TrainerConfig, recorded: Mapping[str, str]) -> TrainerConfig:
    """``config`` with the commits that are ``recorded`` in place of branches, for who fetches.

    Not for who compares: the numbers of a run are those of its manifest. Evaluation data is at the commit of training
    data where it is of the same source: of two commits rows that are held back from one may be trained in the other.
    """

    def at(field: str, uri: str) -> str:
        commit = recorded.get(field)
        return f"{uri.partition('@')[0]}@{commit}" if commit and uri.startswith(_HUB) else uri

    spec = config.spec
    other = spec.model.tokenizer_uri
    model = {"uri": at("model.uri", spec.model.uri), "tokenizer_uri": other and at("model.tokenizerUri", other)}
    train = [
        source.model_copy(update={"uri": at(f"data.train[{index}].uri", source.uri)})
        for index, source in enumerate(spec.data.train)
    ]
    commits = {_named(source.uri): fetched.uri for source, fetched in zip(spec.data.train, train, strict=True)}
    evaluation = [
        source.model_copy(update={"uri": commits.get(_named(source.uri), source.uri)}) for source in spec.data.eval
    ]
    lora = spec.lora
    if lora is not None and lora.adapter_uri:
        lora = lora.model_copy(update={"adapter_uri": at(ADAPTER_FIELD, lora.adapter_uri)})
    parts = {
        "model": spec.model.model_copy(update=model),
        "lora": lora,
        "data": spec.data.model_copy(update={"train": train, "eval": evaluation}),
    }
    return config.model_copy(update={"spec": spec.model_copy(update=parts)})


def _named(uri: str) -> str:
    """``uri`` as others may write it that mean the same."""
    return uri.removesuffix("@main") if uri.startswith(_HUB) else uri


def _sources(config: TrainerConfig) -> Iterator[tuple[str, str, Kind]]:
    model, data = config.spec.model, config.spec.data
    yield "model.uri", model.uri, "model"
    if model.tokenizer_uri:
        yield "model.tokenizerUri", model.tokenizer_uri, "tokenizer"
    if (lora := config.spec.lora) is not None and lora.adapter_uri:
        yield ADAPTER_FIELD, lora.adapter_uri, "adapter"
    for index, source in enumerate(data.train):
        yield f"data.train[{index}].uri", source.uri, "dataset"


def _commit(uri: str, kind: Kind) -> str:
    try:
        return hub_commit(uri, kind, os.environ.get("HF_TOKEN"))[1]
    except TrainingError:
        raise
    except Exception as error:  # the library raises many classes, of three HTTP libraries
        raise hub_error(error, uri, kind) from error


def _listed(uri: str, s3: S3Settings, kind: Kind) -> str:
    """Digest of names, sizes and tags; not of the server, which has other names elsewhere."""
    _, _, objects = listing(uri, s3, kind)
    lines = "\n".join(f"{entry.key} {entry.size} {entry.etag}" for entry in objects)
    return hashlib.sha256(lines.encode()).hexdigest()
