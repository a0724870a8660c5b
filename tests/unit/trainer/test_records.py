"""What a run leaves beside its checkpoints, from the events of its loop: step records, curve, ``status.json``."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_api.checkpoints import STATUS_KEY, CheckpointId, Manifest
from sft_api.progress import Phase, TrainingProgress
from sft_trainer import trainer
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.curves.listener import Curve
from sft_trainer.curves.writer import CurveWriter
from sft_trainer.data.batches import Step
from sft_trainer.errors import StopRequested, StorageUnavailableError
from sft_trainer.events import Claimed, Control, Ended, Evaluated, Logged, SaveBegins
from sft_trainer.figures import Figures
from sft_trainer.models.attention_choice import NOTHING_CHOSEN
from sft_trainer.place import open_place
from sft_trainer.prepared import Prepared, PreparedModel
from sft_trainer.records import RecordsFile, StatusFile
from sft_trainer.trainer import Trainer
from tests.parity.runs import manifest, resolve
from tests.unit.checkpoint.boxed import whole
from tests.unit.trainer.test_run_story import step_done
from tests.waiting import PATIENCE_SECONDS

COMPANIONS = {"config.json": "0123456789abcdef"}


class AwayStore(LocalStore):
    """Does not answer who writes one of ``away``."""

    away: tuple[str, ...] = ()

    def put(self, key: str, data: bytes) -> None:
        if key.startswith(self.away):
            raise StorageUnavailableError(f"{key}: the storage is away")
        super().put(key, data)


class Run(Trainer):
    """A run that has come to its loop, of a model of one tensor; steps are told, not computed."""

    store: AwayStore

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        config = resolve(manifest(folder, folder / "store", checkpoint={"async": False}))
        ranks = SimpleNamespace(rank=rank, local_rank=rank, local_world_size=rank + 1, world_size=rank + 1)
        if rank:
            config = config.model_copy(update={"plan": config.plan.model_copy(update={"shard_degree": rank + 1})})
        super().__init__(config, ranks, folder)  # type: ignore[arg-type]
        self.device = torch.device("cpu")
        self.store = AwayStore(folder / "store")
        model: Any = SimpleNamespace(huggingface=torch.nn.Module(), whole=None)
        steps: Any = None  # No step is read from it.
        prepared = PreparedModel(config.spec.model.uri, folder, model, "", NOTHING_CHOSEN, uncompiled="")
        self.prepared = Prepared(prepared, COMPANIONS, None, [], {}, steps, total_steps=6, epoch_size=6)

    def go_to_the_loop(self) -> None:
        self.store.path.mkdir(exist_ok=True)
        open_place(self.config, self.store, conditional=True, revisions=dict)
        self._claim()
        self._build()
        self.strategy = SimpleNamespace(  # type: ignore[assignment]
            updates=0, boxes=lambda which: whole({"model.weight": torch.ones(4)}) if which == "trained" else []
        )
        self._resume()
        self._begin()

    def do(self, step: int, **figures: Any) -> None:
        self.step = step
        self.figures = self.figures.after(step, Step((), 2, 30, 10), figures.get("loss", 1.0), 0.0)
        done = step_done(step, **figures, figures=self.figures)
        self.events.emit(done)
        self.events.emit(Logged(step, done.record()))

    def evaluated(self, loss: float) -> None:
        self.events.emit(Logged(self.step, {"evalLoss": loss, "evalLosses": {"a": loss}}))
        self.figures = self.figures.evaluated(loss)
        self.events.emit(Evaluated(self.step, loss, {"a": loss}, 0.5, {"a": 0.5}, self.figures))

    def recorded(self, step: int, attempt: int = 1) -> list[dict[str, Any]]:
        lines = self.store.read(f"metrics/step-{step:08d}-a{attempt:05d}.jsonl").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def status(self) -> TrainingProgress:
        for listener in self.ours.in_order():
            if isinstance(listener, StatusFile):
                listener._writer.finish(PATIENCE_SECONDS)
        return TrainingProgress.model_validate_json(self.store.read(STATUS_KEY))


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A run in its loop; another one goes on from the checkpoints of the one before."""
    monkeypatch.setattr(trainer, "sum_over_ranks", lambda values, device: values)
    monkeypatch.setattr(trainer, "build", lambda *_: None)
    monkeypatch.setattr(trainer, "ModelFlops", lambda *_: None)

    def begun(**options: Any) -> Run:
        run = Run(tmp_path, **options)
        run.go_to_the_loop()
        return run

    return begun


def test_the_evaluation_before_training_is_recorded_once(begin: Callable[..., Run]) -> None:
    run = begin()
    run.evaluated(2.5)
    run.do(1)
    run._save()
    assert [(each["step"], each.get("evalLoss")) for each in run.recorded(1)] == [(0, 2.5), (1, None)]
    run.do(2)
    run._save(final=True)
    assert [each["step"] for each in run.recorded(2)] == [2]


def test_the_records_of_the_steps_since_the_last_save_are_beside_it(begin: Callable[..., Run]) -> None:
    run = begin()
    run.do(1, seconds=1.23456789)
    run.do(2, loss=0.1 + 0.2, grad_norm=float("nan"))
    run.evaluated(1.5)
    run._save()
    run.do(3)
    run._save(final=True)

    figures = {"gradNorm": 1.0, "learningRate": 1.0, "tokens": 1, "trainedTokens": 1, "epoch": 0.5, "time": 0.0}
    assert run.recorded(2) == [
        {"step": 1, "loss": 1.0, **figures, "seconds": 1.234568},
        {
            "step": 2,
            "loss": 0.30000000000000004,
            **figures,
            "gradNorm": None,
            "seconds": 1.0,
            "evalLoss": 1.5,
            "evalLosses": {"a": 1.5},
        },
    ]
    assert [record["step"] for record in run.recorded(3)] == [3]


@pytest.mark.parametrize("fails", [False, True], ids=["written", "failed"])
def test_a_save_that_waits_for_the_one_before_writes_no_step_again(tmp_path: Path, fails: bool) -> None:
    # Given a save that is on its way when the next one begins, as the last one does
    store, control = LocalStore(tmp_path / "store"), Control()
    file = RecordsFile(store)
    file.on_claim(Claimed(1, 2), control)
    saves = []
    for step in (1, 2):
        file.on_log(Logged(step, {"loss": 1.0}), control)
        saves.append(SaveBegins(step, final=step == 2))
        file.on_save_begins(saves[-1], control)

    # When both are through, the second after another try, or the first has come to nothing
    for begins in [*([] if fails else saves[:1]), saves[1], saves[1]]:
        for write in begins.beside:
            write()

    # Then each step is recorded once
    lines = [line for entry in store.list("metrics/") for line in store.read(entry.key).splitlines()]
    assert sorted(json.loads(line)["step"] for line in lines) == [1, 2]


def test_a_loss_that_is_not_finite_is_null_in_the_records(begin: Callable[..., Run]) -> None:
    run = begin()
    run.do(1, loss=math.inf)
    run.evaluated(math.nan)
    run._save()
    text = run.store.read("metrics/step-00000001-a00001.jsonl").decode()
    record = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (record["loss"], record["evalLoss"], record["evalLosses"]) == (None, None, {"a": None})


def test_no_checkpoint_counts_without_the_records_of_its_steps(begin: Callable[..., Run]) -> None:
    run = begin()
    run.store.away = ("metrics/",)
    run.do(1)
    run._save()
    outage = run.reporter.progress.storage_outage
    assert outage is not None
    assert "metrics/step-00000001-a00001.jsonl: the storage is away" in outage.message
    assert not list(run.store.path.glob("checkpoints/*/manifest.json"))
    run.store.away = ()
    run.do(2)
    run._save()
    assert [folder.name for folder in run.store.path.glob("checkpoints/*")] == ["step-00000002-a00001"]
    assert [record["step"] for record in run.recorded(2)] == [1, 2]


def test_an_evaluation_of_the_step_that_was_resumed_is_recorded(begin: Callable[..., Run]) -> None:
    # Given a run whose last step was saved before it could be evaluated
    run = begin()
    run.do(6)
    run._save()

    # When another attempt goes on there, evaluates it, and ends
    again = begin()
    again.evaluated(1.5)
    again._save(final=True)

    # Then the loss is beside the checkpoints, and in the same curve
    assert again.recorded(6, attempt=2) == [{"step": 6, "evalLoss": 1.5, "evalLosses": {"a": 1.5}}]
    assert again.reporter.progress.curve_uri == f"file://{again.store.path}/curve.svg"


def test_a_run_goes_on_with_its_own_figures_whatever_was_shown(begin: Callable[..., Run]) -> None:
    # Given a run of two steps, the second of which is evaluated, and a display that shows something else
    run = begin()
    run.do(1, loss=4.0)
    run.do(2, loss=3.0)
    run.evaluated(3.5)
    run.reporter.update(step=7, loss=9.0, first_loss=9.0, eval_loss=9.0, tokens_seen=9, trained_tokens_seen=9)

    # When its checkpoint is resumed from
    run._save()
    again = begin()

    # Then it has what it had, an evaluation of this attempt excepted, and shows it
    judged = {"best_eval_loss": 3.5, "judged_at": 2, "begins_evaluated": True}
    assert again.figures == Figures(2, 4, 60, 20, loss=3.0, first_loss=4.0, eval_loss=3.5, **judged)
    shown = again.reporter.progress
    assert (shown.step, shown.loss, shown.first_loss, shown.eval_loss) == (2, 3.0, 4.0, 3.5)
    assert (shown.tokens_seen, shown.trained_tokens_seen) == (60, 20)
    assert (shown.attempt, shown.total_steps, shown.resumed_from_step) == (2, 6, 2)
    assert shown.checkpoints.latest is not None

    # And the evaluation of a step is none of those after it, though it is the last one until the next
    again.do(3, loss=math.nan)
    again._save()
    latest = again.reporter.progress.checkpoints.latest
    assert latest is not None
    assert (latest.step, latest.eval_loss) == (3, None)
    third = begin().figures
    assert (third.loss, third.eval_loss, third.first_loss, third.tokens_seen) == (None, 3.5, 4.0, 90)
    assert not third.begins_evaluated


def test_a_checkpoint_tells_which_files_lay_beside_the_weights(begin: Callable[..., Run]) -> None:
    run = begin()
    run.do(1)
    run._save()
    found = Catalog(run.store).find(CheckpointId(attempt=1, step=1))
    assert isinstance(found, Manifest)
    assert (found.run.model_extra or {})["companions"] == COMPANIONS


def test_the_status_is_that_of_the_last_commit_and_of_the_end(begin: Callable[..., Run]) -> None:
    run = begin()
    run.do(1)
    run._save()
    assert (run.status.step, run.status.steps_at_risk, run.status.phase) == (1, 0, Phase.SAVING)
    run.do(2)
    run.events.end(Ended(2))
    assert (run.status.step, run.status.steps_at_risk, run.status.phase) == (2, 1, Phase.COMPLETE)


def test_a_stop_tells_what_was_not_saved_and_nothing_twice(begin: Callable[..., Run]) -> None:
    run = begin()
    run.do(1)
    run._save(final=True)
    told = run.status
    run.events.end(Ended(1, StopRequested("stopped after step 1, which is saved")))
    assert run.status == told, "it is the second that a pod has left"
    run.do(2)
    run.events.end(Ended(2, StopRequested("stopped after step 2, which is not saved")))
    assert run.status.step == 2


def test_a_failure_leaves_the_status_of_the_last_commit(begin: Callable[..., Run]) -> None:
    run = begin()
    run.do(1)
    run._save()
    run.do(2)
    run.events.end(Ended(2, RuntimeError("broken")))
    assert run.status.step == 1


def test_a_status_that_the_storage_does_not_take_ends_no_run(
    begin: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = begin()
    run.store.away = (STATUS_KEY,)
    run.do(1)
    run._save(final=True)
    run.events.end(Ended(1))
    assert caplog.text.count("status.json was not written") == 2


def test_training_goes_on_after_a_save_that_failed(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin()
    run.do(1)

    # When the storage does not take one save, and takes the next
    def away(*_: Any, **__: Any) -> None:
        raise StorageUnavailableError("it does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(run.saving._manager, "save", away)
        run._save()

    # Then it is judged by its steps again, not as one that saves, and nobody takes it for saved
    assert run.reporter.progress.phase is Phase.TRAINING
    assert run.saving.checkpoints.latest is None
    run.do(2)
    run._save()
    assert run.reporter.progress.phase is Phase.TRAINING
    run.saving.settle()
    assert run.saving.checkpoints.latest is not None
    assert run.saving.checkpoints.latest.step == 2


def test_the_end_is_published_before_its_curve_is_waited_for(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is asked to stop may be killed meanwhile."""
    run = begin()
    published: list[int] = []
    finish = CurveWriter.finish

    def status_step() -> int:
        return TrainingProgress.model_validate_json(run.store.read(STATUS_KEY)).step

    monkeypatch.setattr(
        CurveWriter, "finish", lambda self, *rest: published.append(status_step()) or finish(self, *rest)
    )
    run.do(1)
    run._save()
    assert published == []
    run.do(2)
    run._save(final=True)
    assert published == [2]
    assert run.reporter.progress.curve_uri == f"file://{run.store.path}/curve.svg"


def test_one_process_writes_for_all(tmp_path: Path, begin: Callable[..., Run]) -> None:
    files = (RecordsFile, StatusFile, Curve)
    assert [type(one) for one in begin().ours.in_order() if isinstance(one, files)] == [*files]
    other = Run(tmp_path / "other", rank=1)
    other.saving = SimpleNamespace()  # type: ignore[assignment]
    other._watch()
    assert not any(isinstance(one, files) for one in other.ours.in_order())
