"""Whether a run may save where it is told to, and go on from what it finds there; looked at before anything else."""

from sft_api.checkpoints import Manifest, RunState
from sft_api.numbers import Numbers, NumbersError
from sft_api.progress import Phase
from sft_api.trainer_config import TrainerConfig

from .checkpoint.catalog import Catalog
from .checkpoint.opening import open_store
from .checkpoint.store import S3Settings, Store
from .errors import ConfigError
from .reporting import Reporter


def check_storage(config: TrainerConfig, store: Store, reporter: Reporter) -> None:
    """Raise what is wrong with the places of checkpoints and export, or with the checkpoints that are there.

    For one process, before there is a group, an attempt or any data. Leaves nothing behind.
    """
    reporter.phase(Phase.STARTING, f"checking {config.checkpoint_uri}")
    result = store.probe()
    if not result.conditional_writes:
        reporter.warn(result.message)
    export_uri = config.export_uri
    if export_uri is not None and not export_uri.startswith(f"{config.checkpoint_uri}/"):
        open_store(export_uri, S3Settings.from_spec(config.spec.checkpoint.s3)).probe()
    if config.spec.checkpoint.resume.policy == "auto":
        refuse_other_settings(config, store)


def refuse_other_settings(config: TrainerConfig, store: Store) -> None:
    """Raise ``ConfigError`` when the newest checkpoint of this job was made with other settings.

    Reads one manifest and changes nothing: for one process, before there is a group, an attempt or any data.
    """
    for found in Catalog(store).candidates(config.job.uid):
        if isinstance(found, Manifest):
            check_same_run(config, found.run)
            return


def check_same_base(model_uri: str, recorded: str, here: str) -> None:
    """Refuse to go on on another base than a checkpoint's, which lacks what was not trained.

    ``recorded`` is the digest of the base in the checkpoint's manifest, ``here`` that of the model in ``model_uri``.
    """
    if here != recorded:
        raise ConfigError(
            f"the checkpoints hold only what was trained, and all else comes from the model in {model_uri}, which is "
            f"not the one that this run started from: its digest was {recorded[:16] or 'not recorded'} and is "
            f"{here[:16]}; name that model in model.uri, pinned to a commit (@revision), or give this run another "
            "metadata.name to start anew"
        )


def check_same_run(config: TrainerConfig, run: RunState) -> None:
    """Refuse a checkpoint of other numbers: going on from it would train something nobody asked for."""
    try:
        changes = Numbers.read(run.numbers).differences(config.numbers())
    except NumbersError as error:
        raise ConfigError(
            f"{config.checkpoint_uri} holds checkpoints that cannot be compared with this run: {error}; go on with the "
            "version of the trainer that wrote them, or give this run another metadata.name or checkpoint.uri"
        ) from error
    if changes:
        raise ConfigError(
            f"{config.checkpoint_uri} holds checkpoints of a run with other settings ({', '.join(changes)}): give this "
            "run another metadata.name or checkpoint.uri, or restore the settings"
        )
