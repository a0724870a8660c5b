"""Which place of checkpoints is meant: a URI, a folder, a manifest, an object of a cluster, or a run of this folder."""

import re
from pathlib import Path

from pydantic import ValidationError

from sft_api.checkpoints import CHECKPOINTS_PREFIX, checkpoint_id, run_place
from sft_api.place import RUN_KEY
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.job import SFTJob
from sft_trainer.checkpoint.opening import open_store
from sft_trainer.checkpoint.store import S3Settings, Store

from .errors import UserError
from .files import FILE_SCHEME
from .local import CONFIG_FILE, local_checkpoints, runs_folder
from .manifest import STANDARD_INPUT, ManifestError, load_manifest

_URI = re.compile(r"(?:s3|pvc|file)://.+")
_MANIFESTS = (".yaml", ".yml", ".json")


def store_of(place: str, name: str | None, working_folder: Path) -> Store:
    """The store that ``place`` means; ``name`` chooses one of several SFTJobs. Raises UserError."""
    return store_and_job(place, name, working_folder)[0]


def store_and_job(place: str, name: str | None, working_folder: Path) -> tuple[Store, SFTJob | None]:
    """The store that ``place`` means, and the job where it is a manifest. Raises UserError."""
    path = Path(place)
    if _URI.fullmatch(place):
        return open_store(_run_of(place.rstrip("/"))), None
    if path == STANDARD_INPUT or (path.is_file() and path.suffix.lower() in _MANIFESTS):
        try:
            job = load_manifest(path, name)
        except ManifestError as error:
            raise UserError(*error.problems) from error
        return open_store(_run_of(_place_of(job, working_folder)), S3Settings.from_spec(job.spec.checkpoint.s3)), job
    if path.is_dir():
        return open_store(_run_of(f"{FILE_SCHEME}{path.resolve()}")), None
    run = runs_folder(working_folder) / place
    if "/" not in place and run.is_dir():
        return _saved_by(run), None
    raise UserError(
        f"{place} is no URI, folder or manifest, and there is no {run}: give s3://, pvc:// or file:///, the manifest "
        f"of the job, or for an object of a cluster: kubectl get sftjob {path.name} -o yaml | sft checkpoints list -"
    )


def _saved_by(run: Path) -> Store:
    """Where the run saves whose files ``sft run`` keeps in the folder ``run``: there, or where its manifest said."""
    here = open_store(f"{FILE_SCHEME}{run}")
    if (run / RUN_KEY).exists() or (run / CHECKPOINTS_PREFIX).exists():
        return here
    try:
        config = TrainerConfig.model_validate_json((run / CONFIG_FILE).read_bytes())
    except (OSError, ValidationError):
        return here
    return open_store(config.checkpoint_uri, S3Settings.from_spec(config.spec.checkpoint.s3))


def _place_of(job: SFTJob, working_folder: Path) -> str:
    """Where ``job`` saves: what its status says, which only an object of a cluster has, else as ``sft run`` does.

    Raises UserError for an object of a cluster that does not say it: a run of this folder with its name is another.
    """
    if job.spec.checkpoint.uri is not None:
        return job.spec.checkpoint.uri.rstrip("/")
    latest = job.status.latest_checkpoint
    if latest is not None and (saved := run_place(latest.uri)):
        return saved
    if not job.metadata.uid:
        return local_checkpoints(working_folder, job)
    name, namespace = job.metadata.name, job.metadata.namespace
    raise UserError(
        f"{name} is an object of a cluster (uid {job.metadata.uid}), and neither spec.checkpoint.uri nor "
        "status.checkpoints says where it saves: give that place itself, which the annotation "
        f"sftjob.dev/checkpoint-uri of its ConfigMap names: kubectl get configmap {name}-config -n {namespace} -o yaml"
    )


def _run_of(uri: str) -> str:
    """``uri`` itself, unless it is that of one checkpoint."""
    parent, _, folder = uri.rpartition("/")
    identity = checkpoint_id(folder)
    if identity is None:
        return uri
    run = parent.removesuffix(f"/{CHECKPOINTS_PREFIX}".rstrip("/"))
    raise UserError(f"{uri} is one checkpoint: give the place of its run, {run}, and for verify --step {identity.step}")
