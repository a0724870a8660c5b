"""``sft export``: the model in a checkpoint of a job as a Hugging Face folder, without GPUs and without a cluster."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from sft_api.checkpoints import Manifest
from sft_api.failures import FailureClass, exit_code
from sft_api.report import best_of
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.job import SFTJob
from sft_api.v1alpha1.places import default_export
from sft_api.v1alpha1.runtime import CheckpointSpec, ExportSpec, HubSpec
from sft_api.v1alpha1.workload import ModelSpec
from sft_trainer.cache import cache_directory
from sft_trainer.checkpoint.catalog import Catalog, Skipped, status_of
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.inspecting import is_gone
from sft_trainer.checkpoint.opening import open_store
from sft_trainer.checkpoint.store import S3Settings, Store
from sft_trainer.export.alone import exported_alone
from sft_trainer.export.exporting import export_checkpoint
from sft_trainer.export.uploading import upload as upload_export
from sft_trainer.fetch import localise
from sft_trainer.place import check_same_run, read_record
from sft_trainer.revisions import pinned
from sft_trainer.topology import ALONE

from .console import result, say, warn
from .errors import UserError
from .files import FILE_SCHEME
from .local import local_checkpoints, missing_logins, overwritten
from .problems import sentences
from .told import Counted, Told
from .trainer_errors import as_user_errors

_TRIES = 5
"""The run may remove one after the other while it is exported."""


def export_job(
    job: SFTJob,
    *,
    step: int | None,
    best: bool,
    to: str | None,
    checkpoints: str | None,
    uid: str | None,
    upload: bool = False,
) -> None:
    """Export a checkpoint of ``job``, the newest unless ``step`` or ``best`` choose another, and print where it is.

    ``to`` and ``checkpoints`` are places other than the manifest's, ``uid`` names one of several jobs that saved there.
    With ``upload`` the hub gets a copy, and its URL is printed too. Raises UserError.
    """
    hub = job.spec.export.hub if upload else None
    if upload and hub is None:
        raise UserError("--upload: the manifest names no repository: add --set export.hub.repository=org/name")
    placed = _placed(job, to, checkpoints, hub)
    uri, target = placed.spec.checkpoint.uri, placed.spec.export.uri
    assert uri is not None  # noqa: S101 - given just above
    assert target is not None  # noqa: S101
    problems = [*missing_logins(placed.spec, os.environ)]
    problems += [f"--to {to}: {problem}" if to else problem for problem in overwritten(placed.spec, uri)]
    if problems:
        raise UserError(*problems)
    with as_user_errors():
        config = TrainerConfig.resolve(placed, uid=uid or "", default_checkpoint_uri=uri)
        s3 = S3Settings.from_spec(job.spec.checkpoint.s3)
        store, goal = open_store(uri, s3), open_store(target, s3)
        record = read_record(store)
        # The card names the model as the manifest does; what is fetched is what the run began with.
        files = pinned(config, record.revisions if record else {}).spec.model
        for _ in range(_TRIES):
            found = list(Catalog(store).candidates())
            if uid:
                found = [each for each in found if isinstance(each, Skipped) or each.job_uid == uid]
            manifest = choose(found, uri, step=step, best=best, one_run=record is not None)
            check_same_run(config, manifest.run)
            if _export(config, files, store, manifest, goal, s3, found):
                break
            say(f"{manifest.id.folder} was removed meanwhile, by the run that trains there", fg="yellow")
        else:
            raise UserError(
                f"the run that trains in {uri} removes its checkpoints (checkpoint.keep) sooner than they are "
                "exported: have it keep more, or give the command again once it has ended",
                exit_code=exit_code(FailureClass.PLACE_IN_USE),
            )
        copy = None
        if hub is not None:
            # Also where a copy is known to have been made: it may be gone there.
            copy = upload_export(hub, goal, lambda words: say(f"Uploading to {words}", dim=True))
    result(target.removeprefix(FILE_SCHEME))
    if copy is not None:
        result(copy.url)


def _placed(job: SFTJob, to: str | None, checkpoints: str | None, hub: HubSpec | None) -> SFTJob:
    """``job`` with all places given: as ``sft run`` chooses them, unless they are given here; ``hub`` gets a copy."""
    spec = job.spec
    try:
        option = "--from"
        # What nobody has given is no URI that somebody wrote: the current folder may be where pods find a claim.
        given = CheckpointSpec(uri=checkpoints or spec.checkpoint.uri).uri
        uri = (given or local_checkpoints(Path.cwd(), job)).rstrip("/")
        option = "--to"
        asked = ExportSpec(at_end=True, uri=to or spec.export.uri, merge_adapter=spec.export.merge_adapter, hub=hub)
        export = asked.model_copy(update={"uri": (asked.uri or default_export(uri)).rstrip("/")})
    except ValidationError as error:
        raise UserError(*(f"{option}: {problem}" for problem in sentences(error))) from error
    changed = {"checkpoint": spec.checkpoint.model_copy(update={"uri": uri}), "export": export}
    return job.model_copy(update={"spec": spec.model_copy(update=changed)})


def choose(found: Sequence[Manifest | Skipped], uri: str, *, step: int | None, best: bool, one_run: bool) -> Manifest:
    """The checkpoint that is meant, of those ``found`` in ``uri``, newest first.

    ``one_run``: there is a record that says so, whatever jobs saved. Raises UserError when there is none, or when
    several jobs saved there before there was a record.
    """
    verified = [each for each in found if isinstance(each, Manifest)]
    skipped = [each for each in found if isinstance(each, Skipped)]
    for each in skipped:
        warn(f"checkpoint {each} (it is not used)")
    if not verified:
        raise UserError(
            f"there is no checkpoint in {uri} that can be used: checkpoint.uri, or --from if given, names the folder "
            "in which a run keeps its folder checkpoints; check it, and --uid if given"
        )
    jobs = list(dict.fromkeys(each.job_uid for each in verified))
    if len(jobs) > 1 and not one_run:
        listed = "; ".join(f"--uid {job} has {_steps([m for m in verified if m.job_uid == job])}" for job in jobs)
        raise UserError(f"checkpoints of {len(jobs)} jobs lie in {uri}, choose one: {listed}")
    if best:
        scored = best_of([status_of(each, uri) for each in verified])
        if not scored:
            raise UserError(
                f"no checkpoint in {uri} was evaluated, so that none is the best: give --step ({_steps(verified)}), or "
                "train with data.eval or data.heldOut, and training.evaluation.everySteps or everyEpochs"
            )
        return next(each for each in verified if (each.attempt, each.step) == (scored[0].attempt, scored[0].step))
    chosen = [each for each in verified if step in (None, each.step)]
    if not chosen:
        raise UserError(f"there is no checkpoint of step {step} in {uri}, but of {_steps(verified)}")
    return chosen[0]


def _steps(checkpoints: Sequence[Manifest]) -> str:
    steps = sorted({each.step for each in checkpoints})
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _export(
    config: TrainerConfig,
    files: ModelSpec,
    store: Store,
    manifest: Manifest,
    target: Store,
    s3: S3Settings,
    found: Sequence[Manifest | Skipped],
) -> bool:
    """Whether it could be exported: not where it was removed meanwhile, as a run that trains there removes old ones.

    Raises UserError, which names others of those ``found``, where it is damaged.
    """
    say(f"Exporting step {manifest.step} of {config.job.name} from {store.uri}/{manifest.id.prefix}", bold=True)

    def fetch(uri: str, kind: Literal["model", "tokenizer"]) -> Path:
        if kind == "model":
            say(f"The checkpoint holds what was trained; the rest is that of {uri}", dim=True)
        return _fetched(uri, kind, s3)

    group = CheckpointGroup(ALONE)
    try:
        exported = exported_alone(config, files, store, manifest, fetch, warn)
        export_checkpoint(exported, target, group, on_bytes=Counted(Told("read and written")))
    except CheckpointCorruptError as error:
        if is_gone(store, manifest.id):
            return False
        others = [each for each in found if isinstance(each, Manifest) and each != manifest]
        advice = f", or export another one with --step: there is {_steps(others)}" if others else ": there is no other"
        # As for sft checkpoints verify: bytes that lie there do not mend themselves, whoever tries again.
        raise UserError(
            f"{error}; restore it{advice} (sft checkpoints list {store.uri} shows what there is, verify reads all of "
            "it)",
            exit_code=exit_code(FailureClass.CONFIG_ERROR),
        ) from error
    return True


def _fetched(uri: str, kind: Literal["model", "tokenizer"], s3: S3Settings) -> Path:
    """Where the files of ``uri`` are on this machine; what is downloaded is told."""
    if not uri.startswith(("file://", "pvc://")):
        say(f"Fetching {uri} ...", dim=True)
    told = Told(f"of {uri} fetched")
    return localise(uri, cache_directory(), s3, os.environ.get("HF_TOKEN"), kind=kind, on_progress=told)
