"""One manifest, run in several ways; every breach of what must hold is a sentence."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sft_api.failures import ExitCode
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import HELD_OUT
from sft_trainer.data.tokenized import TokenizedSource
from sft_trainer.preparation import prepare
from sft_trainer.prepared import Prepared
from sft_trainer.reporting import Reporter

from .inputs import IN_BF16
from .plain import exported_model, first_steps, mean_loss
from .starts import Disturbance, Ended, Run

_REFUSALS = (ExitCode.CONFIG_ERROR, ExitCode.DATA_ERROR, ExitCode.MODEL_ERROR)
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
        self._counts()
        self._evaluates_what_it_exports()
        self._first_losses()
        if len(self._steps) > 1:
            self._random.choice([self._disturbed, self._by_others])()

    def _run_of(self, name: str) -> Run:
        return Run(name, self._job, self._folder / name, self._cache)

    def _refused(self, ended: Ended) -> None:
        """Before the first step, in words about the manifest."""
        self._outcome.refused = ended.message or "nothing"
        if ended.code not in _REFUSALS:
            self._breach(f"ended with {ended.code}: {ended.message} {ended.log}")
        elif ended.step:
            self._breach(f"refused after step {ended.step}: {ended.message}")

    def _counts(self) -> None:
        """Which rows are trained, and how often."""
        self._ask["counts"] += 1
        prepared, spec = self._prepared, self._job["spec"]
        if "heldOut" in spec["data"]:
            whole = Counter(_examples([*prepared.train, *prepared.eval[HELD_OUT].sources]))
            data = {key: value for key, value in spec["data"].items() if key != "heldOut"}
            every = Counter(
                _examples(self._prepare(_without_evaluation(self._first.config(), {**data, "eval": []})).train)
            )
            if whole != every:
                self._breach(f"of {every.total()} rows {whole.total()} are trained or held out")
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
        told = self._whole[exported.step].get("evalLoss")
        if told is None:
            self._breach(f"step {exported.step} was exported, and not evaluated")
            return
        model = exported_model(self._first.config(), self._first.store / "export")
        loss = mean_loss(model, self._prepared.eval.values())
        if not math.isclose(loss, told, rel_tol=self._limit(1e-5, export=True)):
            self._breach(f"the export of step {exported.step} has the evaluation loss {loss}, the run told {told}")

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
        one, other = self._first.weights(), run.weights()
        # Which checkpoints are exported on the way is a matter of time: those that wait are four.
        alike = {name for name in {*one, *other} if (name in one and name in other) or "/" not in name}
        if different := sorted(name for name in alike if one.get(name) != other.get(name)):
            self._breach(f"{how}, it exported other {', '.join(different)}")

    def _goes_on(self, run: Run, disturbance: Disturbance, how: str, **changed: Any) -> bool:
        """Begin ``run``, whose sections are ``changed``, and go on with it as it is asked for; whether it is done."""
        code = -signal.SIGKILL if disturbance.kill else ExitCode.INTERRUPTED
        for ended, wanted in ((run.start(disturbance, **changed), code), (run.start(), 0)):
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
        if not self._goes_on(run, disturbance, how, **changed):
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

    def _prepare(self, config: TrainerConfig) -> Prepared:
        os.environ["SFT_CACHE_DIR"] = str(self._cache)
        return prepare(config, Reporter(self._folder / "prepared", writes=False), torch.device("cpu"))

    def _draws(self) -> bool:
        """Whether each process draws numbers of its own."""
        return "dropout" in self._values["trained"] or self._values["config"] == "attention dropout"


def _without_evaluation(config: TrainerConfig, data: Mapping[str, Any]) -> TrainerConfig:
    """``config`` with other ``data``, of which none is evaluated on."""
    spec = config.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec["training"].pop("evaluation")
    spec["checkpoint"]["keep"].pop("best")
    spec["export"]["checkpoint"] = "last"
    spec["data"] = data
    changed = type(config.spec).model_validate(spec, by_alias=True, by_name=False)
    return config.model_copy(update={"spec": changed})


def _examples(sources: Sequence[TokenizedSource]) -> Iterator[tuple[bytes, bytes]]:
    for source in sources:
        for row in range(len(source.lengths)):
            ids, mask = source.example(row)
            yield ids.tobytes(), mask.tobytes()
