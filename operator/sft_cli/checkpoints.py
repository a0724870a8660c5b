"""``sft checkpoints``: what lies in the place of a run, whether its bytes are what was written, and what may go."""

import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

from sft_api.checkpoints import CheckpointId, checkpoint_id
from sft_api.failures import FailureClass, exit_code
from sft_api.place import Beat
from sft_api.report import best_of
from sft_trainer.alive import WATCH_SECONDS, name_of, next_sign, read_beat
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy
from sft_trainer.checkpoint.errors import NoUsableCheckpointError
from sft_trainer.checkpoint.inspecting import Folder, damage, folders_of, is_gone
from sft_trainer.checkpoint.protocol import Protocol, Pruning
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import ConfigError, StorageNotFoundError, StorageRefusedError
from sft_trainer.place import read_done, read_record

from .checkpoint_list import Place, document_of, lines_of, size_text
from .console import document, result, say
from .errors import UserError
from .stores import store_and_job, store_of
from .told import Counted, Told
from .trainer_errors import as_user_errors
from .words import counted

_SHOWN_PROBLEMS = 20
"""Of one checkpoint."""


def list_checkpoints(place: str, *, name: str | None, output: str) -> None:
    """Print what lies in ``place``. Raises UserError."""
    with as_user_errors():
        found = _look(store_of(place, name, Path.cwd()))
    if output == "json":
        document(document_of(found), output)
    else:
        for line in lines_of(found):
            result(line)


def verify_checkpoints(place: str, *, name: str | None, step: int | None, newest: bool, output: str) -> int:
    """Read every byte of the checkpoints that are meant and print the verdict on each; returns the exit code."""
    with as_user_errors():
        store = store_of(place, name, Path.cwd())
        folders = _meant(store, step=step, newest=newest)
        told = Counted(Told("read and compared"))
        looked = [(folder, _verdict(store, folder, told)) for folder in folders]
        verdicts = [(folder, problems) for folder, problems in looked if problems is not None]
    if output == "json":
        document([_verdict_document(*item) for item in verdicts], output)
    else:
        for folder, problems in verdicts:
            _print_verdict(folder, problems)
    return int(exit_code(NoUsableCheckpointError.failure)) if any(found for _, found in verdicts) else 0


def prune_checkpoints(
    place: str,
    *,
    name: str | None,
    keep: KeepPolicy | None,
    best_of_job: bool = False,
    unfinished: bool,
    yes: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Print what goes, and remove it when ``yes``. Raises UserError, before anything is removed.

    ``keep``: which of the checkpoints stay; None: all. Where ``place`` is a manifest, those that it keeps for ever
    (checkpoint.keep.everySteps) stay as well, and with ``best_of_job`` as many of the best as it says (keep.best).
    ``unfinished``: folders without a manifest go, except those that a living run may be writing.
    """
    with as_user_errors():
        store, job = store_and_job(place, name, Path.cwd())
        if keep is not None and job is not None:
            said = job.spec.checkpoint.keep
            keep = replace(keep, best=said.best if best_of_job else keep.best, every_steps=said.every_steps)
        catalog = Catalog(store)
        attempt = catalog.newest_attempt()
        lives = _may_live(store, attempt)
        if lives and yes:
            lives = _is_alive(store, sleep)
            if lives and keep is not None:
                raise UserError(
                    f"{name_of(read_beat(store))} trains in {store.uri} now, and removes old checkpoints itself "
                    "(checkpoint.keep): suspend it first; --unfinished alone removes what earlier attempts left",
                    exit_code=exit_code(FailureClass.PLACE_IN_USE),
                )

        def is_over(identity: CheckpointId) -> bool:
            # What is not of the newest attempt can be committed by nobody any more, whoever lives.
            return unfinished and (identity.attempt < attempt or not lives)

        protocol = Protocol(store)
        planned = protocol.pruning(keep, None, is_over)
        pruning = _without_final(store, planned)
        staying = {entry.step for entry in pruning.staying} | {one.step for one in planned.going.keys() - pruning.going}
        result(f"Place     {store.uri}")
        _print_pruning(pruning, staying, yes=yes)
        if keep is not None and keep.best and pruning.going and not best_of(pruning.staying):
            say(
                "no checkpoint here has an evaluation loss (data.eval, data.heldOut): none of them stays for being the "
                "best",
                fg="yellow",
            )
        if not yes:
            if lives:
                say(
                    f"{name_of(read_beat(store))} trained here and did not say that it ended: with --yes it is watched "
                    f"for up to {WATCH_SECONDS:.0f} s first"
                )
            return
        if catalog.newest_attempt() != attempt:
            raise UserError(
                f"a run has started in {store.uri} meanwhile, nothing was removed: give the command again once it "
                "has ended",
                exit_code=exit_code(FailureClass.PLACE_IN_USE),
            )
        protocol.remove(pruning)
        if unfinished and not lives:
            protocol.drop_unfinished_uploads()


def _look(store: Store) -> Place:
    problems: list[str] = []
    record = done = None
    try:
        record = read_record(store)
    except StorageRefusedError:
        raise
    except ConfigError as error:
        problems.append(str(error))
    try:
        done = read_done(store)
    except StorageRefusedError:
        raise
    except ConfigError as error:
        problems.append(str(error))
    folders = folders_of(store)  # says it when there is no such place
    return Place(store.uri, record, done, read_beat(store), Catalog(store).newest_attempt(), folders, problems)


def _meant(store: Store, *, step: int | None, newest: bool) -> list[Folder]:
    """The folders that are asked for, newest first; unfinished ones only by their step. Raises UserError."""
    folders = folders_of(store)
    committed = [folder for folder in folders if not folder.is_unfinished]
    if step is None:
        if not committed:
            raise UserError(f"there is no checkpoint in {store.uri}: check the place", exit_code=_NOT_FOUND)
        return committed[:1] if newest else committed
    chosen = [folder for folder in committed if folder.id.step == step]
    chosen = chosen or [folder for folder in folders if folder.id.step == step]
    if not chosen:
        steps = ", ".join(map(str, sorted({folder.id.step for folder in folders}))) or "none"
        raise UserError(f"there is no checkpoint of step {step} in {store.uri}, found {steps}", exit_code=_NOT_FOUND)
    return chosen[:1] if newest else chosen


_NOT_FOUND = int(exit_code(StorageNotFoundError.failure))


def _verdict(store: Store, folder: Folder, on_bytes: Callable[[int], None]) -> list[str] | None:
    """What is wrong with a checkpoint; None where it is no longer there, of which nothing can be said."""
    say(f"Reading {folder.id.folder} ({size_text(folder.size)})", dim=True)
    problems = damage(store, folder, on_bytes)
    if problems and not folder.is_unfinished and is_gone(store, folder.id):
        say(f"{folder.id.folder} was removed meanwhile, by the run that trains there", fg="yellow")
        return None
    return problems


def _verdict_document(folder: Folder, problems: list[str]) -> dict[str, object]:
    identity = folder.id
    return {
        "folder": identity.folder,
        "step": identity.step,
        "attempt": identity.attempt,
        "sound": not problems,
        "problems": problems,
    }


def _print_verdict(folder: Folder, problems: list[str]) -> None:
    if not problems:
        result(f"{folder.id.folder}: every byte is as it was written", fg="green")
        return
    for problem in problems[:_SHOWN_PROBLEMS]:
        result(f"{folder.id.folder}: {problem}", fg="red")
    if len(problems) > _SHOWN_PROBLEMS:
        result(f"{folder.id.folder}: and {len(problems) - _SHOWN_PROBLEMS} more", fg="red")


def _may_live(store: Store, attempt: int) -> bool:
    """Whether somebody may train there: an attempt was claimed whose writer did not say how it ended."""
    sign = read_beat(store)
    ended = isinstance(sign, Beat) and sign.ended != "" and sign.attempt >= attempt
    return attempt > 0 and not ended


def _is_alive(store: Store, sleep: Callable[[float], None]) -> bool:
    first = read_beat(store)
    say(
        f"{name_of(first)} trained in {store.uri} and did not say that it ended: it is watched for a sign of life, for "
        f"up to {WATCH_SECONDS:.0f} s",
        fg="yellow",
    )
    sign, _ = next_sign(store, first, lambda waited: None, sleep=sleep)
    return sign is not None


def _without_final(store: Store, pruning: Pruning) -> Pruning:
    """What a complete run ended with stays, its last checkpoint and its best: who starts it again looks for the one
    that it has exported."""
    done = read_done(store)
    if done is None:
        return pruning
    stays = (CheckpointId(done.attempt, done.step), checkpoint_id(done.best))
    return replace(pruning, going={one: files for one, files in pruning.going.items() if one not in stays})


def _print_pruning(pruning: Pruning, staying: Set[int], *, yes: bool) -> None:
    if not pruning.going:
        result("Nothing goes.")
        return
    verb = "Removing" if yes else "Would go"
    for identity, files in pruning.going.items():
        result(f"{verb:<10}{identity.folder}  {size_text(sum(files.values()))}")
    total = size_text(sum(sum(files.values()) for files in pruning.going.values()))
    stays = ", ".join(map(str, sorted(staying, reverse=True))) or "none"
    say(f"{counted(len(pruning.going), 'folder')}, {total}; what stays: step {stays}{'' if yes else '; --yes does it'}")
