"""One manifest, run in several ways; every breach of what must hold is a sentence."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoTokenizer

from sft_api.failures import ExitCode
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import HELD_OUT
from sft_trainer.preparation import prepare
from sft_trainer.prepared import Prepared
from sft_trainer.reporting import Reporter

from .inputs import IN_BF16
from .plain import exported_model, first_steps, mean_losses
from .rows import Example, examples, tokenizer_of
from .starts import Disturbance, Ended, Run

_REFUSALS = (ExitCode.CONFIG_ERROR, ExitCode.DATA_ERROR, ExitCode.MODEL_ERROR)
_UNCHANGED: Mapping[str, Any] = MappingProxyType({})
_ROUNDING = re.compile("bf16|8 bits|4 bits|muon|dropout|noise")


@dataclass
class Outcome:
    """What came of a manifest."""

    refused: str = ""
    """In the run's words why it does not train; empty where it does."""
    breaches: list[str] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    """Which questions were asked."""


class Trial:
    """A manifest with its places."""

    def __init__(self, job: dict[str, Any], values: Mapping[str, str], folder: Path, cache: Path, seed: int) -> None:
        self._job, self._values, self._random = job, values, random.Random(seed)
        self._folder, self._cache = folder, cache
        self._outcome = Outcome()
        self._ask = self._outcome.asked

    def run(self) -> Outcome:
        """All of it."""
        try:
            self._run()
        except Exception as error:
            self._breach("".join(traceback.format_exception(error)[-4:]))
        return self._outcome

    def _breach(self, sentence: str) -> None:
        self._outcome.breaches.append(sentence)

    def _run(self) -> None:
        self._first = self._run_of("whole")
        ended = self._first.start()
        if ended.code:
            self._refused(ended)
            return
        self._whole = self._first.numbers()
        self._steps = {step: record for step, record in self._whole.items() if step}
        self._prepared = self._prepare(self._first.config())
        self._rows()
        self._counts()
        self._evaluates_what_it_exports()
        self._first_losses()
        if len(self._steps) > 1:
            ways = [
                self._disturbed,
                self._by_others,
                self._continued,
                self._begun_with_weights,
                self._begun_with_export,
            ]
            self._random.choice(ways)()

    def _run_of(self, name: str) -> Run:
        return Run(name, self._job, self._folder / name, self._cache)

    def _refused(self, ended: Ended) -> None:
        """Before the first step, in words about the manifest."""
        self._outcome.refused = ended.message or "nothing"
        if ended.code not in _REFUSALS:
            self._breach(f"ended with {ended.code}: {ended.message} {ended.log}")
        elif ended.step:
            self._breach(f"refused after step {ended.step}: {ended.message}")

    def _rows(self) -> None:
        """What is read and trained is what is documented, by the tokenizer of the model and that of the export."""
        self._ask["rows"] += 1
        prepared, spec = self._prepared, self._job["spec"]
        exported = AutoTokenizer.from_pretrained(self._first.store / "export")
        held_out = prepared.eval[HELD_OUT].sources if "heldOut" in spec["data"] else ()
        pairs = [("trained or held out", spec["data"]["train"], [*prepared.train, *held_out])]
        for source in spec["data"].get("eval", []):
            pairs.append((f"in {source['name']}", [source], [prepared.eval[source["name"]]]))
        for whose, tokenizer in (("the model", tokenizer_of(spec)), ("the export", exported)):
            for where, sources, ours in pairs:
                wanted = sum((examples(spec, source, tokenizer) for source in sources), Counter[Example]())
                found = Counter(_examples(ours))
                if wanted != found:
                    lacking, more = next(iter(wanted - found), None), next(iter(found - wanted), None)
                    self._breach(
                        f"by the tokenizer of {whose} {wanted.total()} examples are {where}, and {found.total()} are: "
                        f"{lacking} is lacking, {more} is there"
                    )

    def _counts(self) -> None:
        """How often rows are trained."""
        self._ask["counts"] += 1
        prepared, spec = self._prepared, self._job["spec"]
        records = list(self._steps.values())
        weighted = any("weight" in source for source in spec["data"]["train"])
        passes = spec["training"].get("epochs")
        if passes == 1 and not weighted and not self._stopped_early():
            tokens = sum(int(source.lengths.sum()) for source in prepared.train)
            trained = sum(record["tokens"] for record in records)
            if trained != tokens:
                self._breach(f"a pass over {tokens} tokens trained {trained}")
        if (
            passes
            and not weighted
            and not self._stopped_early()
            and not math.isclose(records[-1]["epoch"], passes, rel_tol=0.05)
        ):
            self._breach(f"{passes} passes ended after {records[-1]['epoch']}")
        if sorted(self._whole) != list(range(min(self._whole), max(self._whole) + 1)):
            self._breach(f"steps are {sorted(self._whole)}")

    def _stopped_early(self) -> bool:
        return "earlyStopping" in self._job["spec"]["training"].get("evaluation", {})

    def _evaluates_what_it_exports(self) -> None:
        """The model in the export, loaded by libraries, has the loss that the run told of it."""
        if not self._prepared.eval:
            return
        self._ask["export"] += 1
        exported = self._first.progress().export
        assert exported is not None
        record = self._whole[exported.step]
        if record.get("evalLoss") is None:
            self._breach(f"step {exported.step} was exported, and not evaluated")
            return
        model = exported_model(self._first.config(), self._first.store / "export")
        loss, losses = mean_losses(model, self._prepared.eval)
        for name, one, told in (
            ("all", loss, record["evalLoss"]),
            *((name, losses[name], record["evalLosses"].get(name)) for name in losses),
        ):
            if told is None or not math.isclose(one, told, rel_tol=self._limit(1e-5, export=True)):
                self._breach(f"the export of step {exported.step} has the loss {one} of {name}, the run told {told}")

    def _first_losses(self) -> None:
        """A plain loop has the same ones."""
        steps = first_steps(self._first.config(), self._prepared, self._values)
        if not steps:
            return
        self._ask["plain loop"] += 1
        for number, (loss, norm) in enumerate(steps, 1):
            if number not in self._whole:
                break
            record = self._whole[number]
            limit = self._limit(1e-5 if number == 1 else 1e-4)
            if not math.isclose(record["loss"], loss, rel_tol=limit):
                self._breach(f"step {number} of a plain loop has the loss {loss}, the run {record['loss']}")
            if number == 1 and not math.isclose(record["gradNorm"], norm, rel_tol=max(limit, 1e-3)):
                self._breach(f"step {number} of a plain loop has gradients of {norm}, the run {record['gradNorm']}")

    def _limit(self, exact: float, *, export: bool = False) -> float:
        """How far two ways to compute a loss may be from one another."""
        values = " ".join(self._values.values())
        rounded = "bf16" in values or self._values["gradients"] == "in bf16"
        stored = export and self._values["model"] in (*IN_BF16, "gpt_oss")
        # Adapters lack the rows behind the last added token, which share the loss of the run.
        lacking = export and self._values["new tokens"] != "none" and "adapters" in self._values["trained"]
        return 3e-2 if rounded or stored or lacking else exact

    def _disturbed(self) -> None:
        """Stopped or killed after a step, and begun again: the same numbers to the last bit, and the same model."""
        self._ask["disturbed"] += 1
        run, last = self._run_of("disturbed"), max(self._steps)
        step, kill = self._random.randrange(1, last), self._random.random() < 0.5
        evaluated = "evalLoss" in self._whole[step]
        disturbance = Disturbance(step, kill=kill, evaluating=evaluated and self._random.random() < 0.5)
        how = f"{disturbance} of {last}"
        if not self._goes_on(run, disturbance, how):
            return
        numbers = run.numbers()
        for number in sorted({*self._whole, *numbers}):
            one, other = self._whole.get(number), numbers.get(number)
            if one != other:
                self._breach(f"{how}, step {number} is {other} in place of {one}")
                break
        self._exports_alike(run, how)

    def _exports_alike(self, run: Run, how: str) -> None:
        one, other = self._first.weights(), run.weights()
        # Which checkpoints are exported on the way is a matter of time: those that wait are four.
        alike = {name for name in {*one, *other} if (name in one and name in other) or "/" not in name}
        if different := sorted(name for name in alike if one.get(name) != other.get(name)):
            self._breach(f"{how}, it exported other {', '.join(different)}")

    def _goes_on(
        self,
        run: Run,
        disturbance: Disturbance,
        how: str,
        begins: Mapping[str, Any] = _UNCHANGED,
        then: Mapping[str, Any] = _UNCHANGED,
    ) -> bool:
        """Begin ``run`` with the sections ``begins``, and go on with those of ``then``; whether it is done."""
        code = -signal.SIGKILL if disturbance.kill else ExitCode.INTERRUPTED
        for ended, wanted in ((run.start(disturbance, **begins), code), (run.start(**then), 0)):
            if ended.code != wanted:
                self._breach(f"{how}, it ended with {ended.code}: {ended.message} {ended.log}")
                return False
        return True

    def _by_others(self) -> None:
        """Begun by another number of processes, and gone on with by that which is asked for."""
        spec = self._job["spec"]
        others = 3 - spec["compute"].get("processesPerNode", 1)
        strategy = dict(spec.get("strategy", {}).get("fsdp", {}))
        strategy.pop("sequenceParallelDegree", None)
        strategy.pop("shardDegree", None)
        self._ask["other processes"] += 1
        changed = {"compute": {**spec["compute"], "processesPerNode": others}, "strategy": {"fsdp": strategy}}
        run, last = self._run_of("others"), max(self._steps)
        disturbance = Disturbance(self._random.randrange(1, last), kill=False)
        how = f"begun by {others} processes, and {disturbance} of {last}"
        if not self._goes_on(run, disturbance, how, changed):
            return
        numbers = run.numbers()
        exact = self._limit(1e-4)
        loose = max(exact, 5e-2 if _ROUNDING.search(" ".join(self._values.values())) else 1e-3)
        drawn = self._draws()
        for number, record in self._whole.items():
            other = numbers.get(number)
            if other is None:
                if not self._stopped_early():
                    self._breach(f"{how}, step {number} is missing")
                break
            for name in ("tokens", "trainedTokens", "learningRate", "epoch"):
                if record.get(name) != other.get(name):
                    self._breach(f"{how}, {name} of step {number} is {other.get(name)} in place of {record.get(name)}")
            limit = loose if drawn or number > 1 else exact
            for name in ("loss", "evalLoss"):
                one, two = record.get(name), other.get(name)
                if one is None and two is None:
                    continue
                if one is None or two is None or not math.isclose(one, two, rel_tol=limit):
                    self._breach(f"{how}, {name} of step {number} is {two} in place of {one}")
                    return

    def _continued(self) -> None:
        """By another run, from a checkpoint of one that was stopped: the same steps to the last bit."""
        origin, last = self._run_of("origin"), max(self._steps)
        if last < 3:
            self._disturbed()
            return
        self._ask["continued"] += 1
        ended = origin.start(Disturbance(self._random.randrange(1, last - 1), kill=False))
        latest = origin.progress().checkpoints.latest
        if ended.code != ExitCode.INTERRUPTED or latest is None:
            self._breach(f"stopped for another run, it ended with {ended.code}: {ended.message} {ended.log}")
            return
        step = latest.step  # processes agree on a stop in the next step
        how = f"begun from another run's step {step} of {last}"
        begins, run = self._from(origin, "everything"), self._run_of("continued")
        if step + 1 < last and self._random.random() < 0.5:
            disturbance = Disturbance(self._random.randrange(step + 1, last), kill=self._random.random() < 0.5)
            how = f"{how}, and {disturbance}"
            if not self._goes_on(run, disturbance, how, begins, begins):
                return
        elif (ended := run.start(**begins)).code:
            self._breach(f"{how}, it ended with {ended.code}: {ended.message} {ended.log}")
            return
        numbers = run.numbers()
        for number in range(step + 1, last + 1):
            if numbers.get(number) != self._whole[number]:
                self._breach(f"{how}, step {number} is {numbers.get(number)} in place of {self._whole[number]}")
                return
        # Which is its best one, and that its evaluations get worse, a run says by its own.
        if not self._stopped_early() and self._values["export"] != "best":
            self._exports_alike(run, how)

    def _begun_with_weights(self) -> None:
        """By another run, with the weights of this one: before its first step it has the loss of this one's last."""
        if not self._prepared.eval:
            self._continued()
            return
        self._ask["begun with weights"] += 1
        self._begins_with(self._whole[max(self._whole)], 0.0, self._from(self._first, "weights"))

    def _begun_with_export(self) -> None:
        """By another run, whose model, or adapters, are the export of this one."""
        spec, uri = self._job["spec"], f"file://{self._first.store}/export"
        adapters = (self._first.store / "export" / "adapter_config.json").exists()
        plain = self._values["trained"] in ("adapters", "adapters, B faster") and self._values["new tokens"] == "none"
        if not self._prepared.eval or (adapters and not plain):
            self._begun_with_weights()
            return
        self._ask["begun with export"] += 1
        if adapters:
            changed = {"lora": {**spec["lora"], "adapterUri": uri}}
        else:
            export = {name: value for name, value in spec.get("export", {}).items() if name != "mergeAdapter"}
            changed = {"model": {**spec["model"], "uri": uri}, "lora": None, "export": export}
        exported = self._first.progress().export
        assert exported is not None
        self._begins_with(self._whole[exported.step], self._limit(1e-5, export=True), changed)

    def _begins_with(self, told: Mapping[str, Any], limit: float, changed: Mapping[str, Any]) -> None:
        """A run with ``changed`` sections, and its evaluation before the first step, which is ``told`` already."""
        evaluation = self._job["spec"]["training"].get("evaluation", {})
        training = {**self._job["spec"]["training"], "evaluation": {**evaluation, "beforeTraining": True}}
        run, how = self._run_of("begun"), f"begun with {', '.join(changed)} of another run"
        ended = run.start(Disturbance(1, kill=False), training=training, **changed)
        if ended.code not in (0, ExitCode.INTERRUPTED):  # it may stop early
            self._breach(f"{how}, it ended with {ended.code}: {ended.message} {ended.log}")
            return
        first = run.numbers()[0]
        losses = {"all": first["evalLoss"], **first["evalLosses"]}
        for name, one in {"all": told["evalLoss"], **told["evalLosses"]}.items():
            if not math.isclose(losses[name], one, rel_tol=limit):
                self._breach(f"{how}, it begins with the loss {losses[name]} of {name} in place of {one}")

    def _from(self, origin: Run, what: str) -> dict[str, Any]:
        """Sections of a run that begins with ``what`` of ``origin``."""
        spec = self._job["spec"]
        resume = {"from": {"uri": f"file://{origin.store}", "what": what}}
        changed = {"checkpoint": {**spec.get("checkpoint", {}), "resume": resume}}
        if "adapterUri" in spec.get("lora", {}):  # both say from which adapters training starts
            changed["lora"] = {name: value for name, value in spec["lora"].items() if name != "adapterUri"}
        return changed

    def _prepare(self, config: TrainerConfig) -> Prepared:
        os.environ["SFT_CACHE_DIR"] = str(self._cache)
        return prepare(config, Reporter(self._folder / "prepared", writes=False), torch.device("cpu"))

    def _draws(self) -> bool:
        """Whether each process draws numbers of its own."""
        return "dropout" in self._values["trained"] or self._values["config"] == "attention dropout"


def _examples(sources: Iterable[Any]) -> Iterator[Example]:
    for source in sources:
        for row in range(len(source.lengths)):
            ids, mask = source.example(row)
            yield (*ids.tolist(),), (*mask.tolist(),)
