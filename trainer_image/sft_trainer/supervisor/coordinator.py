"""The edge of index 0: feeds the group with reports and progress, and answers over HTTP."""

import asyncio
import secrets
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from pydantic import BaseModel, ValidationError

from sft_api.checkpoints import HANGS_PREFIX, CheckpointId
from sft_api.ports import free_port
from sft_api.progress import BEFORE_TRAINING, EarlierIncidents, Phase, Progress, TrainingProgress
from sft_api.rundir import INCIDENTS_FILE, PROGRESS_FILE, REPORT_FILE, write_atomically
from sft_api.times import timestamp
from sft_api.trainer_config import BEGUN_FILE

from .clock import AwakeClock
from .group import HELD_SECONDS, Group
from .http import Request, Response
from .identity import mismatch, same_token
from .ledger import Ledger
from .liveness import PASSIVE, Hang, find_hang
from .output import Output
from .protocol import HOLD_SECONDS, Generation, Order, OrderKind, RayHead, Report
from .refusals import Refusals
from .settings import Settings
from .slow_gpus import SlowGpus
from .told import ToldFile

_SHOWN_WARNINGS = 10
"""Of machines, in the report of a run."""


class Coordinator:
    """Owns the group on index 0."""

    def __init__(self, settings: Settings, *, instance: str, output: Output, clock: AwakeClock) -> None:
        self._settings = settings
        self._output = output
        self._clock = clock
        self._changed = asyncio.Event()
        file = settings.run_dir / PROGRESS_FILE
        self._progress = ToldFile(
            file, TrainingProgress, lambda problem: output.say(f"{file} is not a progress report: {problem}")
        )
        self._adopted = 0
        """The attempt with whose claim came what earlier supervisors wrote down."""
        self._reported: TrainingProgress | None = None
        """By the workers of this generation."""
        self._slow_gpus = SlowGpus(settings.world_size)
        self.group = Group(
            size=settings.nodes,
            incarnation=instance,
            grace_seconds=settings.grace_seconds,
            lost_after=settings.lost_after,
            ledger=Ledger(run=instance, judged_first=settings.judged_first),
            refusals=Refusals(
                settings.storage_deadline_seconds,
                now=lambda: datetime.now(UTC),
                claimed=_has_begun_before(settings),
            ),
            new_generation=self._new_generation,
            wall_clock=lambda: datetime.now(UTC),
        )

    def step(self, report: Report) -> Order:
        """Take in this pod's own report and everything that has happened; the order for this pod."""
        now = self._clock.now()
        self._read_progress(now)
        if self.group.order.kind is OrderKind.RUN:
            if hang := self._find_hang(now):
                folder = self._traces_folder()
                place = f"{self._settings.place}/{HANGS_PREFIX}{folder}"
                self.group.hang(hang.what, hang.pod, traces=folder, place=place)
            if _nothing_to_save(self._reported):
                self.group.nothing_to_save()
        self._hear(report, now)
        return self.group.order_for(report)

    async def exchange(self, body: bytes) -> Response:
        """``POST /v1/group``: a member's report; answers with its order, at once when it is a new one."""
        try:
            report = Report.model_validate_json(body)
        except ValidationError as problem:
            return Response(400, f"not a report: {problem}\n".encode())
        settings = self._settings
        if report.job_uid != settings.job_uid:
            # Who asks may have meant another pod, whose address this one has now: another connection may lead there.
            return _refusal(f"this is the group of job {settings.job_uid!r}, not {report.job_uid!r}")
        if report.token and not same_token(settings.token, report.token):
            return _refusal(f"this is another run of job {settings.job_uid!r}: one of both is about to end")
        fits = 0 < report.node < settings.nodes
        if fits and report.version != settings.version:
            # One of before there were tokens is told of, but nobody is believed without one that a pod was replaced.
            self.group.refuse(report, self._clock.now(), replaces=bool(report.token))
            return _refusal(mismatch({report.node: report.version}, settings.version))
        if not fits or not report.token or report.processes != settings.processes:
            return _refusal(
                f"node {report.node} with {report.processes} processes does not fit {settings.nodes} nodes with "
                f"{settings.processes} each"
            )
        self._hear(report, self._clock.now())
        if self.group.order_for(report).id == report.received and not report.leaving:
            try:
                async with asyncio.timeout(HOLD_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass
        order = self.group.order_for(report).model_copy(update={"token": settings.token})
        return Response(200, order.model_dump_json(by_alias=True).encode(), "application/json")

    def progress(self) -> Progress:
        """What ``GET /v1/progress`` answers."""
        group = self.group
        training = group.refusals.seen_in(group.training)
        order = group.order
        misfits = mismatch(group.misfits(self._clock.now()), self._settings.version)
        changes: dict[str, object] = {}
        if order.kind is OrderKind.EXIT and order.end is not None:
            changes = {
                "phase": Phase.FAILED if order.end.failure else Phase.COMPLETE,
                "phase_detail": order.end.message,
            }
        elif order.kind is OrderKind.IDLE:
            changes = {"phase": Phase.WAITING, "phase_detail": misfits or group.idle_for(self._clock.now())}
        elif self._reported is None:
            changes = {"phase": Phase.STARTING, "phase_detail": ""}
        elif training.phase is Phase.WAITING and (others := self._what_others_do()):
            changes = {"phase_detail": f"for {others}"}
        if warnings := machine_warnings(member.report for _, member in sorted(group.members.items())):
            changes["warnings"] = [*training.warnings, *warnings]
        if order.kind is not OrderKind.EXIT and (slow := self._slow_gpus.slow):
            changes["slow_gpus"] = slow
        return Progress(
            job_uid=self._settings.job_uid,
            pod_uid=self._settings.pod_uid,
            version_mismatch=misfits if order.kind is OrderKind.IDLE else "",
            generation=group.starts,
            members=len(group.members),
            training=training.model_copy(update=changes),
            incidents=group.ledger.incidents,
            spent=group.spent,
        )

    def _find_hang(self, now: float) -> Hang | None:
        return find_hang(
            self.group.at_work(),
            now,
            step=self.group.training.step,
            stepped=self.group.stepped,
            configured=self._settings.progress_deadline_seconds,
            median_step_seconds=self._reported.median_step_seconds if self._reported else None,
            silent_seconds=self._settings.silent_after,
        )

    def _traces_folder(self) -> str:
        """Where it is kept what those who hang were doing; empty where they have no place, or none claimed yet."""
        reported = self._reported
        if not self._settings.place or reported is None or not reported.attempt:
            return ""
        return CheckpointId(reported.attempt, reported.step).folder

    def _what_others_do(self) -> str:
        """What is done in the pods that rank 0 waits for."""
        reports = (member.report for member in self.group.members.values())
        busy = [(report.node, report.activity) for report in reports if report.activity]
        busy = [(node, activity) for node, activity in busy if activity.phase not in PASSIVE]
        if not busy:
            return ""
        node, activity = min(busy, key=lambda one: one[1].silent_seconds)
        more = f", and {len(busy) - 1} more" if len(busy) > 1 else ""
        return f"pod {node} ({': '.join(filter(None, (activity.phase, activity.detail)))}){more}"

    def leave_report(self) -> None:
        """Write the last report where it can be read after the end: nobody may have asked since things happened."""
        self._leave(REPORT_FILE, self.progress())

    def _leave(self, name: str, document: BaseModel) -> None:
        try:
            write_atomically(self._settings.run_dir / name, document)
        except OSError as problem:
            self._output.say(f"{name} could not be written: {problem}")

    async def answer(self, request: Request) -> Response | None:
        """The answer to ``request`` when it is one of index 0's, else None."""
        match request.method, request.path:
            case "POST", "/v1/group":
                return await self.exchange(request.body)
            case "GET", "/v1/progress":
                body = self.progress().model_dump_json(by_alias=True).encode()
                self.group.ledger.was_read()
                return Response(200, body, "application/json")
        return None

    def metrics(self) -> bytes:
        """The figures of the run, for Prometheus."""
        # Not at the top: a tenth of a second at every start.
        from .metrics import render

        return render(self.progress(), self.group.ledger.counts, datetime.now(UTC))

    def everyone_told(self, *, stopping: bool) -> bool:
        """Whether index 0 may exit; ``stopping``: it was asked to."""
        return self.group.everyone_told(self._clock.now(), stopping=stopping)

    def _hear(self, report: Report, now: float) -> None:
        self.group.hear(report, now)
        generation = self.group.order.generation
        if generation is not None and report.running == generation.id:
            for sentence in self._slow_gpus.hear(report, now, datetime.now(UTC)):
                self._output.say(sentence)
        # By their ids: as many are kept as there is room for, and one more drives out the oldest.
        known = {incident.id for incident in self.group.ledger.incidents}
        refused = self.group.refusals.told
        while self.group.advance(now):
            self._announce()
            self._changed.set()
            self._changed = asyncio.Event()
        for incident in self.group.ledger.incidents:
            if incident.id in known:
                continue
            kind = "disruption" if incident.disruption else "failure"
            rank = "" if incident.rank is None else f" of rank {incident.rank}"
            self._output.say(f"{kind}{rank} at step {incident.step}: {incident.failure}: {incident.message}")
            if self.group.held(now):
                self._output.say(f"the next start waits until that is judged, at most {HELD_SECONDS:.0f} s")

        if (told := self.group.refusals.told) is not None and told != refused:
            since = timestamp(told.since)
            self._output.say(f"nothing can be saved since {since}, and the next start waits for that: {told.message}")

    def _announce(self) -> None:
        order = self.group.order
        if order.kind is OrderKind.RUN and order.generation is not None:
            self._reported = None
            nodes, processes = self._settings.nodes, self._settings.processes
            self._output.say(f"start {order.generation.number} of the workers: {processes} in each of {nodes} pod(s)")
            self._leave(INCIDENTS_FILE, EarlierIncidents(incidents=self.group.ledger.incidents))
        elif order.kind is OrderKind.IDLE:
            self._output.say(f"ending the group: {order.reason}")

    def _read_progress(self, now: float) -> None:
        training = self._progress.news()
        if training is None:
            return
        if training.attempt > self._adopted:
            self._adopted = training.attempt
            self._adopt_incidents()
        self._reported = training
        self.group.observe(training, now)
        self.group.ledger.observe(training, datetime.now(UTC))

    def _adopt_incidents(self) -> None:
        """Take in what rank 0 found in the claims of earlier attempts."""
        try:
            earlier = EarlierIncidents.model_validate_json((self._settings.run_dir / INCIDENTS_FILE).read_bytes())
        except (OSError, ValidationError) as problem:
            self._output.say(f"how earlier attempts ended is not known: {problem}")
            return
        self.group.ledger.adopt(earlier.incidents)

    def _new_generation(self) -> Generation:
        # Time makes it new for workers of pods that nobody here has heard of.
        new = max(self.group.highest_generation + 1, time.time_ns() // 1_000_000)
        ray = RayHead(port=free_port(), token=secrets.token_hex(32)) if self._settings.launcher == "ray" else None
        return Generation(id=new, number=self.group.starts + 1, master_port=free_port(), ray=ray)


def machine_warnings(reports: Iterable[Report]) -> list[str]:
    """Pure: of what machines suffer from, the first few sentences, and how many more there are."""
    told = [warning for report in reports for warning in report.warnings]
    left = len(told) - _SHOWN_WARNINGS
    return [*told[:_SHOWN_WARNINGS], *(["more pods warn of their machines: see their logs"] if left > 0 else [])]


def _refusal(sentence: str) -> Response:
    return Response(409, f"{sentence}\n".encode(), close=True)


def _has_begun_before(settings: Settings) -> bool:
    """Whether the operator says that pods before these have trained. Read once: what comes while they run is of what
    they have done themselves."""
    try:
        told = settings.config.with_name(BEGUN_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return told == settings.job_uid


def _nothing_to_save(training: TrainingProgress | None) -> bool:
    if training is None:
        return True
    return training.phase in (*BEFORE_TRAINING, Phase.EVALUATING) and training.step <= (training.resumed_from_step or 0)
