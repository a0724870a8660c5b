"""What would end a run early, looked for before anything heavy is loaded: ``python -m sft_trainer.check``.

The supervisor of index 0 runs it before it imports torch for the workers: a missing bucket or column is said within
seconds. It reads what the workers read, with the same functions, but only the beginning of it, and reports like one of
them. It refuses nothing that they would take: what cannot be seen cheaply is left to them, and so is a source that does
not answer, which may have been read by an earlier start.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from sft_api.model_config import content_of_config
from sft_api.progress import Phase
from sft_api.quantised_files import refused_by_config
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import DataSource

from .adapter_files import layers_by_config, read_adapters
from .cache import cache_directory
from .callbacks.loading import find as find_callbacks
from .checkpoint.catalog import Catalog
from .checkpoint.opening import store_of
from .checkpoint.store import S3Settings, Store
from .data.added_tokens import numbers_of
from .data.first_rows import check_first_rows
from .data.held_out import Part, all_rows, trained_part
from .data.tokenizer import Codec
from .data.tokenizer_files import read_codec
from .errors import ConfigError, ModelError, StorageUnavailableError, TrainingError
from .export.hub import Repository
from .fetch import localise
from .origin import Origin
from .outage import of_the_place
from .place import look, nothing_saved
from .process import begin, leave, report_end
from .reporting import Reporter
from .revisions import pinned
from .storage import check_storage, find_done

log = logging.getLogger("sft_trainer")

SmallFiles = Callable[[str], Path]
"""The folder with the tokenizer and the config of the model at a URI, fetched once."""


def check(config: TrainerConfig, reporter: Reporter) -> None:
    """Raise the first error that the run would end with, as far as it shows at once."""
    if config.spec.training.dummy_run:
        return  # it has no place, and reads no data
    s3 = S3Settings.from_spec(config.spec.checkpoint.s3)
    store = store_of(config)
    with of_the_place():
        done = find_done(config, store, reporter)
        if done is None:
            check_storage(config, store, reporter)
        record = look(config, store)
    if done is not None:
        return  # nothing is trained, and so no data is needed
    recorded = record.revisions if record else {}
    if (origin := Origin.of(config, recorded)) is not None and nothing_saved(store):
        reporter.phase(Phase.STARTING, f"looking at {origin.uri}")
        origin.find()
    # Their modules may import much, which only a run that has any waits for here.
    find_callbacks(config.spec.training.callbacks)
    config = pinned(config, recorded)
    spec = config.spec
    small_files = cache(lambda uri: localise(uri, cache_directory(), s3, os.environ.get("HF_TOKEN"), kind="tokenizer"))
    _look_at_adapters(config, s3, reporter, small_files)
    codec = cache(lambda: _codec(config, reporter, small_files))
    trained = trained_part(spec.data)
    sources: Sequence[tuple[DataSource, Part]] = [
        *((source, all_rows) for source in spec.data.eval),
        *((source, trained) for source in spec.data.train),
    ]
    for source, part in sources:
        reporter.phase(Phase.STARTING, f"looking at {source.uri}")
        with _where_it_answers():
            check_first_rows(
                source,
                spec.data,
                codec,
                part=part,
                cache_dir=cache_directory(),
                s3=s3,
                token=os.environ.get("HF_TOKEN"),
            )
    codec()
    _look_at_model(config, reporter, small_files)
    _look_at_hub(config, store, reporter)
    # What comes now is not for this process to tell.
    reporter.phase(Phase.STARTING)


@contextmanager
def _where_it_answers() -> Iterator[None]:
    """Around a look at a source, which may be away: the workers wait for it, or have what an earlier start read."""
    try:
        yield
    except StorageUnavailableError as error:
        log.info("not looked at: %s", error)


def _look_at_model(config: TrainerConfig, reporter: Reporter, small_files: SmallFiles) -> None:
    """Whether its files have weights that are read, as far as its config.json says it."""
    uri = config.spec.model.uri
    reporter.phase(Phase.STARTING, f"looking at {uri}")
    with _where_it_answers():
        if refused := refused_by_config(content_of_config(small_files(uri))):
            raise ModelError(refused)


def _look_at_adapters(config: TrainerConfig, s3: S3Settings, reporter: Reporter, small_files: SmallFiles) -> None:
    """Whether adapters that the run begins with are those that it trains, as far as that shows without its model."""
    spec = config.spec
    if spec.lora is None or spec.lora.adapter_uri is None:
        return
    uri = spec.lora.adapter_uri
    reporter.phase(Phase.STARTING, f"looking at {uri}")
    with _where_it_answers():
        folder = localise(
            uri,
            cache_directory(),
            s3,
            os.environ.get("HF_TOKEN"),
            kind="adapter",
            on_progress=lambda got: reporter.alive(Phase.STARTING, f"looking at {uri}: {got / 2**20:.0f} MiB"),
        )
        read_adapters(folder, uri, spec.lora, *layers_by_config(small_files(spec.model.uri), spec))


def _look_at_hub(config: TrainerConfig, store: Store, reporter: Reporter) -> None:
    """Whether the run may upload its export; after all else, since what is not there yet is made.

    Once an attempt was claimed it is only logged that it may not: no run that trains ends for a copy.
    """
    hub = config.spec.export.hub
    if hub is None:
        return
    reporter.phase(Phase.STARTING, f"looking at {hub.repository}")
    try:
        with _where_it_answers():
            Repository(hub, os.environ.get("HF_TOKEN")).make_ready()
    except TrainingError as error:
        if not Catalog(store).newest_attempt():
            raise
        log.warning("the export cannot be uploaded as it is now: %s", error)


def _codec(config: TrainerConfig, reporter: Reporter, small_files: SmallFiles) -> Codec | None:
    """The chat template with its tokens; None where that takes more than reading the tokenizer's files, or they are
    away."""
    model = config.spec.model
    uri = model.tokenizer_uri or model.uri
    reporter.phase(Phase.STARTING, f"looking at {uri}")
    codec = None
    with _where_it_answers():
        codec = read_codec(small_files(uri), model.chat_template, model.new_tokens)
    if codec is not None and (tokens := config.spec.tokens_with_rows):
        _check_tokens(codec, tokens)
    if codec is not None and model.chat_template is not None:
        codec.check_templates()
    return codec


def _check_tokens(codec: Codec, tokens: Sequence[str]) -> None:
    """Raise ``ConfigError`` for one of ``tokens`` that is none of the tokenizer.

    Of some tokenizers transformers has rules of its own for spaces, by which it finds ordinary tokens that these files
    do not: what one of theirs is but for spaces is left to the run.
    """
    for token in tokens:
        try:
            numbers_of(codec.backend, [token])
        except ConfigError:
            numbers = [[number] for number in codec.backend.get_vocab(with_added_tokens=True).values()]
            texts = codec.backend.decode_batch(numbers, skip_special_tokens=False)
            if token.strip() not in {text.strip() for text in texts}:
                raise


def main() -> int:
    """Look; returns the exit code, 0 when nothing was found."""
    config, run_dir = begin()
    try:
        check(config, Reporter(run_dir, writes=True))
    except BaseException as error:  # every end is classified and reported
        return report_end(error, run_dir, rank=0)
    return 0


if __name__ == "__main__":
    leave(main())
