"""The training run of one process, readable from top to bottom.

Every process runs the same program; ``run`` is the story, the methods below it are its sentences.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NoReturn

import torch

from sft_api.checkpoints import Manifest, RunState
from sft_api.place import TAKE_OVER_VARIABLE, Done
from sft_api.progress import STOPPED_EARLY_CHARACTERS, Phase
from sft_api.report import finite
from sft_api.rundir import STOP_FILE
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import ExportStatus

from .alike import check_alike, fingerprint
from .alive import check_nobody_came
from .boxes import Box
from .callbacks.telling import Callbacks
from .checkpoint.opening import store_at, store_of
from .checkpoint.store import Store
from .data.feed import Feed, Share, Shares
from .distributed import Ranks, collective_timeout, device_for, gathered, join_group, sum_over_ranks, summed
from .done import end_again
from .due import Intervals
from .entering import Entered, enter
from .errors import StopRequested
from .evaluate import evaluate
from .events import (
    Asking,
    Claimed,
    Committed,
    Control,
    Ended,
    Evaluated,
    Evaluating,
    ExportBegins,
    ExportEnded,
    Finishing,
    Listener,
    Listeners,
    Logged,
    Request,
    Resumed,
    SaveBegins,
    SaveEnded,
    Started,
    StepDone,
)
from .export.at_end import AtEnd
from .export.upload_at_end import UploadAtEnd
from .figures import Figures
from .flops import ModelFlops
from .keeps_tokens import is_shared, kept_tokens, remove_kept
from .late import LateFigures, Launched, Moment, steps_behind
from .listeners import OurListeners
from .models import flash_attention
from .optim import learning_rate
from .origin import Origin
from .outage import of_the_place
from .place import begins_anew, check_record, of_another_start
from .preparation import prepare
from .prepared import Prepared
from .reporting import Reporter
from .revisions import pinned
from .saving import Saving
from .state import Facts, evaluates_on_other_data, resume_warnings, run_state
from .storage import check_room, check_same_base
from .strategies import build, holding_device
from .topology import Topology
from .trainable import Trainable, trainable_of


class Trainer:
    """One process of a run: built from the configuration, then ``run`` once."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: Ranks,
        run_dir: Path,
        listeners: Sequence[Listener] = (),
        trainable: Trainable | None = None,
    ) -> None:
        """``listeners`` watch the run, after our own; ``trainable`` is trained and saved, by ``config`` when None."""
        self.config = config
        self.spec = config.spec
        self.ranks = ranks
        timeout = collective_timeout(self.spec.run_policy.progress_deadline_seconds)
        self.topology = Topology.planned(config.plan, ranks, self._forming, timeout)
        self.reporter = Reporter(run_dir, writes=self.topology.tells, rank=ranks.rank)
        self._stop_file = run_dir / STOP_FILE
        self.attempt = 0
        """Of the run, once it is claimed."""
        self.step = 0
        """Optimizer steps launched: the weights are those after it."""
        self._launched: deque[Launched] = deque()
        """Steps of which the host does not know the figures yet, the oldest first."""
        self.figures = Figures()
        """Of the run, after the last step whose figures the host knows."""
        self._base_digest = ""
        """Of the model that the run started from; unknown where its checkpoints do not say."""
        self.control = Control()
        self.intervals = Intervals(None, None)
        """After which steps it evaluates and saves, once it has a place to save in."""
        self._theirs = [*listeners]
        self.events = Listeners(self._theirs, self.control)
        self._trainable = trainable or trainable_of(config)
        self._place = Entered(None, None)
        self._take_over = os.environ.get(TAKE_OVER_VARIABLE, "")
        """The word by which a user asks to take the place over from another holder that is alive."""

    def run(self) -> None:
        """Train to the end of the run, from the newest checkpoint if there is one.

        Raises ``StopRequested`` after saving when the group was asked to stop, other ``TrainingError``s as they come.
        """
        try:
            self._run()
        except BaseException as error:
            self.events.end(Ended(self.step, error))
            raise
        self.events.end(Ended(self.step))

    def _run(self) -> None:
        self.device = device_for(self.ranks, self.spec.compute.gpus_per_node)
        self._open_store()
        if self._place.done is not None:
            self._end_again(self._place.done)
            return
        self._make_callbacks()
        if self.topology.prepares:
            self.prepared = self._prepare()
        self._meet()
        if not self.topology.prepares:
            self.prepared = self._prepare()
        self._compare()
        self._tell_attention()
        self._compile_alike()

        self._claim()
        self._build()
        self._resume_or_load()
        self._wait_for_weights()
        if self.config.plan.compile:
            self.reporter.phase(Phase.LOADING, "compiling the layers")
        self.strategy.loaded()
        self._begin()
        with closing(self._feed()) as self._shares:
            while not self._is_over():
                self._train_step()
                self._follow()
        self.ours.skipped.check_updates(self.strategy.updates, self.step)
        self._evaluate()
        self._save(final=True)
        self._export()
        self._upload()

    def _is_over(self) -> bool:
        return self.step == self.prepared.total_steps or bool(self.figures.stopped_early)

    def _wait_for_weights(self) -> None:
        """Wait until all processes have read theirs: what is made of them is made together, and whoever waited there
        for one that still reads would say that it is at work itself."""
        if self.topology.alone:
            return
        with self._others("to have read the weights"):
            sum_over_ranks([0.0], self.device)

    def _begin(self) -> None:
        """Wait until all processes are here, which agree on what comes first."""
        self.events.emit(Started(self.step, self.prepared.total_steps))
        with self._others("to begin"):
            self._agree()
        self._follow()

    def _follow(self) -> None:
        """Do what the processes have agreed on."""
        self._agree_before_a_save()
        if self.control.takes(Request.EVALUATE):
            self._evaluate()
            self._agree_before_a_save()
        if self._finishes_now() and self.control.takes(Request.FINISH):
            self._finish()
        if self.control.takes(Request.STOP):
            self._stop()
        if self._is_over():
            return
        if self._saves_now():
            self.control.takes(Request.SAVE)
            self._save()
        elif self.control.wants(Request.SAVE) and self.ours.saves.in_flight:
            self.saving.hurry()

    def _agree_before_a_save(self) -> None:
        """Agree on what was asked for meanwhile where this step is saved: who goes on there hears of it no more."""
        if self._saves_now() or self.control.wants(Request.STOP):
            self._agree()

    def _agree(self) -> None:
        self.control.agree(sum_over_ranks([*self.control.asked()], self.device))

    def _finishes_now(self) -> bool:
        # Of step 0 nothing is saved, and so nothing can be exported.
        return self.control.wants(Request.FINISH) and self.step > 0 and not self._is_over()

    def _finish(self) -> None:
        """End the run with this step. Its checkpoint says so too: whoever is stopped before the end goes on with it."""
        why = self.control.why(Request.FINISH)
        given = [why] if self.topology.alone else gathered(why)
        words = next(filter(None, given), "a callback asked for it")
        told = f"after step {self.step}: {words}"[:STOPPED_EARLY_CHARACTERS]
        self.figures = replace(self.figures, stopped_early=told)
        self.events.emit(Finishing(self.step, self.figures))

    def _saves_now(self) -> bool:
        return self.control.wants(Request.SAVE) and self.ours.saves.may_save(self.step)

    def _stop(self) -> NoReturn:
        if self.ours.skipped.in_a_row:
            # What is saved now would be taken for the newest good state, and is perhaps what broke the gradients.
            self.saving.settle()
            told = self.ours.skipped.why_unsaved(self.step)
        else:
            self._save(final=True)
            told = f"stopped after step {self.step}, which is saved"
        # Where there was nothing left to save no save has said so.
        superseded = self.ours.alive.superseded if self.ours.alive else None
        raise superseded or StopRequested(told)

    # Before the first step

    def _open_store(self) -> None:
        self.store: Store = store_of(self.config)
        self._place = enter(
            self.config, self.store, self.reporter, writes=self.topology.writes, take_over=self._take_over
        )

    def _end_again(self, done: Done) -> None:
        self.step = done.step
        if self.topology.writes:
            with of_the_place():
                end_again(self.config, self.store, done, self._place.revisions, self.reporter, self._copied)
                if is_shared(self.store):
                    remove_kept(self.store)  # who wrote that it is complete may have been killed before that

    def _make_callbacks(self) -> None:
        self._theirs.append(Callbacks(self.config, self.topology))

    def _prepare(self) -> Prepared:
        kept = kept_tokens(self.spec, self.store)
        return prepare(pinned(self.config, self._place.revisions), self.reporter, self.device, kept)

    def _meet(self) -> None:
        if not self.topology.alone:
            self.reporter.phase(Phase.WAITING, "for the other processes")
        join_group(self.ranks, self.device, self._forming, self.topology.timeout)

    def _others(self, what: str) -> AbstractContextManager[None]:
        """Around what no process ends before all have begun: ``what`` they are waited for."""
        return nullcontext() if self.topology.alone else self.reporter.waiting(f"for the other processes, {what}")

    def _forming(self) -> AbstractContextManager[None]:
        return self._others("to form a group")

    def _compare(self) -> None:
        if self.topology.alone:
            return
        self.reporter.phase(Phase.LOADING, "comparing what all processes hold")
        here = fingerprint(self.config, self.prepared)
        with self._others("to compare"):
            check_alike(here)

    def _tell_attention(self) -> None:
        """Tell of other kernels of attention than the first process has, which alone tells of its own."""
        if self.topology.alone or self.device.type != flash_attention.DEVICE_TYPE:
            return
        with self._others("to compare kernels of attention"):
            chosen = gathered(self.prepared.model.attention)
        rank = next((rank for rank, here in enumerate(chosen) if here.used != chosen[0].used), None)
        if rank is None:
            return
        here = chosen[rank]
        why = f", and is not used for {here.not_used}" if here.not_used else ""
        self.reporter.warn(
            f"process {rank} of {len(chosen)} has other kernels of attention than process 0, and a step takes as "
            f"long as the slowest: there FlashAttention 4 computes {here.used or 'nothing'}{why}"
        )

    def _compile_alike(self) -> None:
        """Have layers compiled on all processes or on none: what is reckoned of memory depends on it.

        Why not is told wherever it is so: who tells of the run may be none of those that cannot.
        """
        plan = self.config.plan
        if not plan.compile:
            return
        here = self.prepared.model.uncompiled
        with self._others("to compile alike"):
            reasons = [here] if self.topology.alone else gathered(here)
        rank = next((rank for rank, reason in enumerate(reasons) if reason), None)
        if rank is None:
            return
        where = "" if all(reasons) else f" (process {rank} of {len(reasons)})"
        self.reporter.warn(
            f"the layers are not compiled, and steps take longer than they could: {reasons[rank]}{where}. With "
            "training.compile: false this is not said"
        )
        self.config = self.config.model_copy(update={"plan": plan.model_copy(update={"compile": False})})

    def _claim(self) -> None:
        self.saving = Saving(
            self.config,
            self.store,
            self.reporter,
            device=holding_device(self.config, self.device),
            topology=self.topology,
            on_commit=lambda checkpoints: self.events.emit(Committed(self.step, checkpoints)),
        )
        self._watch()
        incidents = self.reporter.earlier_incidents()
        with of_the_place():
            if self.topology.writes:
                check_nobody_came(self.config, self.store, self._place.sign, take_over=self._take_over)
            self.attempt = self.saving.claim_attempt(
                lambda: check_record(self.config, self.store), incidents, self._take_over
            )
        self.events.emit(Claimed(self.attempt, self.prepared.total_steps, self.saving.incidents))

    def _watch(self) -> None:
        """Register who hears of what happens from here on."""
        self.intervals = Intervals.of(self.spec, lambda: self.prepared.steps.steps_per_epoch)
        self.ours = OurListeners.of(
            self.config,
            self.intervals,
            self.topology,
            self.store,
            self.saving,
            self.reporter,
            self._stop_file,
            self.device,
            lambda: self.prepared.sources,
        )
        self.events = Listeners([*self.ours.in_order(), *self._theirs], self.control)

    def _build(self) -> None:
        self.reporter.phase(Phase.LOADING, "building the model")
        blueprint = self.prepared.model.blueprint
        self._flops = ModelFlops(blueprint, self._trainable.trains, self.device)
        self._saves_all = self._trainable.saves_all(blueprint.huggingface)
        self.strategy = build(self._as_tried(), blueprint, self._trainable, self.topology, self.device)

    def _as_tried(self) -> TrainerConfig:
        """The configuration; what has been trained is not refused for what it is reckoned to take of its GPUs."""
        if not self.spec.compute.gpus_per_node:
            return self.config
        with of_the_place():
            tried = self.saving.anything_saved()
        if not tried:
            return self.config
        compute = self.spec.compute.model_copy(update={"memory_check": "Warn"})
        return self.config.model_copy(update={"spec": self.spec.model_copy(update={"compute": compute})})

    def _resume_or_load(self) -> None:
        self._base_digest = self.prepared.model.digest
        resumed = self.spec.checkpoint.resume.policy == "auto" and self._resume()
        self._warn_of_what_goes()
        if not resumed and self.topology.writes:
            check_room(self.store, sum(prod(box.shape) * box.dtype.itemsize for box in self._boxes()))
        loaded = resumed or self._begin_from_another()
        if loaded and self._saves_all:
            return
        boxes = self.strategy.boxes("base") + ([] if loaded else self.strategy.boxes("trained"))
        self.prepared.model.fill(boxes, self.spec, self.reporter)

    def _resume(self) -> bool:
        self.reporter.phase(Phase.LOADING, "looking for a checkpoint")
        with of_the_place():
            manifest = self.saving.resume(self._boxes(), self._check_own_base)
        if manifest is None:
            return False
        self._base_digest = manifest.run.base_digest
        self._go_on_after(manifest, Figures.recorded(manifest), of_another_start(self.config, manifest))
        return True

    def _warn_of_what_goes(self) -> None:
        if self.spec.checkpoint.resume.policy == "auto":
            return
        with of_the_place():
            saved = self.saving.anything_saved()
        if saved:
            self.reporter.warn(begins_anew(self.config))

    def _begin_from_another(self) -> bool:
        if (origin := Origin.of(self.config, self._place.revisions)) is None:
            return False
        boxes = self._boxes() if origin.goes_on else self.strategy.boxes("trained")
        manifest = origin.read(self.saving, boxes, self._check_base, self.prepared.total_steps)
        if origin.goes_on:
            self._go_on_after(manifest, Figures.recorded(manifest).as_another_run(), [], begins=True)
        elif warning := origin.warning(manifest.run):
            self.reporter.warn(warning)
        return True

    def _go_on_after(self, manifest: Manifest, figures: Figures, warnings: list[str], *, begins: bool = False) -> None:
        self.strategy.updates = manifest.run.updates
        facts = self._facts()
        if evaluates_on_other_data(manifest.run, facts):
            figures = figures.evaluated_on_other_data()
        self.step, self.figures = manifest.step, figures
        warnings += resume_warnings(manifest, facts, self.spec.model.uri)
        if (total := self.prepared.total_steps) < self.step:
            # Rows were taken away, or are read otherwise by this version: there is no step left to be made of them.
            warnings.append(f"the data of now makes {total} steps, and {self.step} are made: the run ends with these")
            self.prepared = replace(self.prepared, total_steps=self.step)
        self.events.emit(Resumed(manifest.id, figures, self.saving.checkpoints, warnings, begins))

    def _check_own_base(self, run: RunState) -> None:
        """Of a checkpoint of this run: the export has the other parts of the model that it began from, and no other."""
        if self.prepared.model.blueprint.whole is not None:
            check_same_base(self.spec.model.uri, run.base_digest, self.prepared.model.digest)
        self._check_base(run)

    def _check_base(self, run: RunState) -> None:
        if not self._saves_all:
            check_same_base(self.spec.model.uri, run.base_digest, self.prepared.model.digest)

    def _facts(self) -> Facts:
        return Facts.of(self.config, self.prepared, self.device, self.topology)

    # One step

    def _feed(self) -> Feed[Share]:
        shares = Shares(
            self.prepared.steps,
            self.prepared.train,
            data_rank=self.topology.data_rank,
            data_parallel=self.topology.data_parallel,
            seed=self.spec.training.seed,
            cost=lambda lengths: self._flops.training([lengths]),
        )
        return Feed(shares, first=self.step, total=self.prepared.total_steps, device=self.device)

    def _train_step(self) -> None:
        """Launch one step, and on a GPU learn of the one before; of all before anything but a step follows."""
        self._launched.append(self._launch())
        # Decided by numbers of steps and what was agreed on, the same on all processes: what follows is collective.
        behind = steps_behind(self.device)
        while self._launched and (len(self._launched) > behind or self._something_follows()):
            self._learn(self._launched.popleft())

    def _something_follows(self) -> bool:
        # A save that waits for the upload before it follows when that has ended: until then no step is waited for.
        asked = self.control.wants(Request.EVALUATE) or self.control.wants(Request.STOP) or self._saves_now()
        asked = asked or self._finishes_now()
        return asked or self.step == self.prepared.total_steps or bool(self.intervals.planned(self.step))

    def _launch(self) -> Launched:
        """Have the device compute a step, without waiting for it."""
        began = Moment(self.device)
        share = next(self._shares)
        given = Moment(self.device)
        step = share.step
        losses = self.strategy.forward_backward(share.bins, step.trained_tokens, step.tokens)
        norm = self.strategy.grad_norm()
        flops = self._flops.training(bin_.boundaries.lengths for bin_ in share.bins if bin_.counts)
        flops /= self.topology.sequence  # it computes its part of the tokens
        # The cross-entropy, and that of routers where there is one.
        loss_sum, *aux_sum = losses if self.strategy.auxiliary else (losses,)
        counted = (loss_sum, flops) if self.topology.counts_loss else (0.0, 0.0)
        self.events.emit(Asking(self.step + 1))
        # One collective carries everything the processes must agree on.
        save_failed_here = self.saving.failed_here()
        in_flight_here = self.saving.in_flight
        flags = [float(save_failed_here), float(in_flight_here), *self.control.asked()]
        sums = summed([*counted, norm, *(aux_sum or [0.0]), *flags], self.device)
        rate = learning_rate(self.spec, self.config.plan.learning_rate, self.step, self.prepared.total_steps)
        # A step whose loss or gradients are not finite changes nothing, on all processes alike.
        ok = torch.isfinite(sums[0] / step.trained_tokens) & torch.isfinite(sums[2])
        # Each replica adds its norm up by itself, perhaps in another order: by one of another last bit they would drift
        # apart, and what is saved is of all of them. The mean is the same for all, and of equal ones it is these.
        norm = (sums[2] / self.topology.world_size).to(norm.dtype)
        waited = self.saving.copied(self.device)  # a save of the step before is copied beside this one, up to here
        self.strategy.apply(rate, self.spec.training.optimizer.max_grad_norm, norm, ok)
        self.step += 1
        return Launched(self.step, step, rate, LateFigures(sums), began, given, waited)

    def _learn(self, launched: Launched) -> None:
        """Wait for the figures of a step, and tell them."""
        total, flops_sum, norm_sum, aux_sum, save_failed, in_flight, *asked = launched.figures.read()
        self.control.agree(asked)
        if save_failed:
            self.saving.settle()
        self.saving.tell()
        step = launched.step
        loss, grad_norm = total / step.trained_tokens, norm_sum / self.topology.world_size
        seconds = launched.began.seconds_until(launched.figures.ready) - launched.waited
        figures = self.figures.after(launched.number, step, loss, seconds)
        epoch = round(figures.examples_seen / self.prepared.epoch_size, 6)
        aux_loss = aux_sum / step.tokens if self.strategy.auxiliary else None
        told = {"epoch": epoch, "learning_rate": launched.rate, "grad_norm": finite(grad_norm)}
        self.figures = replace(figures, last_step={**told, "aux_loss": finite(aux_loss)})
        done = StepDone(
            step=launched.number,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=launched.rate,
            tokens=step.tokens,
            trained_tokens=step.trained_tokens,
            epoch=epoch,
            seconds=seconds,
            time=time.time(),
            processes=self.topology.world_size,
            peak_flops_share=self._flops.share_of_peak(flops_sum, seconds * self.topology.world_size),
            save_in_flight=in_flight > 0,
            figures=self.figures,
            aux_loss=aux_loss,
            data_seconds=launched.began.seconds_until(launched.given),
        )
        self.events.emit(done)
        self.events.emit(Logged(done.step, done.record()))

    # Between steps

    def _evaluate(self) -> None:
        if not self.prepared.eval or self.figures.evaluated_at == self.step:
            return
        self.events.emit(Evaluating(self.step))
        result = evaluate(
            self.strategy,
            self.prepared.eval,
            bin_tokens=self.config.plan.max_tokens_per_micro_batch or self.spec.data.max_length,
            topology=self.topology,
            device=self.device,
            on_batch=lambda done, batches: self.events.emit(Evaluating(self.step, done, batches)),
            adding_up=lambda: self._others("to add the evaluation up"),
            leaving=self._leaving,
        )
        if result is None:
            self.figures = replace(self.figures, evaluation_left=True)
            self._agree()  # its step is saved, too
            if self._finishes_now() and self.control.takes(Request.FINISH):
                self._finish()
            self._stop()
        early = self.spec.training.evaluation.early_stopping
        min_delta = early.min_delta if early else 0.0
        self.figures = self.figures.evaluated(
            result.loss, result.accuracy, result.losses, result.accuracies, min_delta=min_delta
        )
        losses = {"evalLoss": result.loss, "evalLosses": result.losses}
        accuracies = {"evalAccuracy": result.accuracy, "evalAccuracies": result.accuracies}
        self.events.emit(Logged(self.step, {**losses, **accuracies}))
        self.events.emit(
            Evaluated(self.step, result.loss, result.losses, result.accuracy, result.accuracies, self.figures)
        )

    def _leaving(self) -> LateFigures:
        """How many processes were asked to stop: an evaluation may take longer than they are given."""
        return LateFigures(summed([float(self.control.asks(Request.STOP))], self.device))

    def _save(self, *, final: bool = False) -> None:
        begins = SaveBegins(self.step, final=final)
        self.events.emit(begins)
        state = run_state(
            self.config,
            self._facts(),
            self.figures,
            updates=self.strategy.updates,
            base_digest=self._base_digest,
        )
        self.saving.save(self.step, self._boxes(), state, final=final, beside=begins.beside)
        self.events.emit(SaveEnded(self.step, final=final))

    def _boxes(self) -> list[Box]:
        """What this process holds of all that a checkpoint keeps."""
        return self.strategy.boxes("trained") + self.strategy.boxes("optimizer")

    def _export(self) -> None:
        uri = self.config.export_uri
        if uri is None:
            return
        self.events.emit(ExportBegins(uri))
        on_the_way = self.ours.exports
        first = on_the_way.finish if on_the_way else lambda: None
        export = AtEnd(self.config, self.prepared, self.store, self.reporter, self.topology, first)
        target, last = store_at(uri, self.config), self.saving.checkpoint_of(self.step)
        steps: list[int] = []
        self.saving.patiently(lambda: steps.append(export.run(last, uri, target)), f"the export to {uri}")
        self.events.emit(ExportEnded(steps[-1], uri))

    def _upload(self) -> None:
        """By one process, which the others do not wait for: a copy changes nothing of the run, and may take hours."""
        export = self.reporter.progress.export
        if self.ours.done is None or export is None or self.spec.export.hub is None:
            return
        # Who starts the run again, asked to stop meanwhile, has nothing but the upload to do.
        self.ours.done.write(self.step)
        self.reporter.update(export=self._copied(export))

    def _copied(self, export: ExportStatus) -> ExportStatus:
        """``export`` with its copy on the hub, where one is asked for and can be had."""
        if self.spec.export.hub is None:
            return export
        copy = UploadAtEnd(self.config, self.reporter, self._stop_file).run()
        return export.model_copy(update={"hub": copy})
