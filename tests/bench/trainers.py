"""One small server that answers for the supervisors of any number of jobs, whose training gets on with the time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from sft_api.checkpoints import CheckpointId
from sft_api.progress import Phase, Progress, TrainingProgress
from sft_api.report import checkpoint_status, checkpoints_status
from sft_api.v1alpha1 import CheckpointsStatus
from sft_trainer.supervisor import http

STEP_SECONDS = 3.0
CHECKPOINT_STEPS, KEPT_CHECKPOINTS = 10, 3
TOTAL_STEPS = 100_000


@dataclass
class Trainer:
    """The run of one job."""

    job_uid: str
    pod_uid: str
    """Of its pod of index 0."""
    began: float = field(default_factory=time.monotonic)
    asked: float = 0.0
    """When it was asked last."""

    def report(self) -> Progress:
        """How far it is now."""
        step = int((time.monotonic() - self.began) / STEP_SECONDS)
        training = TrainingProgress(
            attempt=1,
            phase=Phase.TRAINING,
            step=step,
            total_steps=TOTAL_STEPS,
            epoch=step / 1000,
            loss=2.5 / (1 + step / 1000),
            first_loss=2.5,
            learning_rate=1e-5,
            grad_norm=1.0 + step % 7 / 10,
            step_seconds=STEP_SECONDS,
            median_step_seconds=STEP_SECONDS,
            tokens_per_second=20_000.0 + step % 100,
            tokens_per_second_per_gpu=1250.0,
            model_flops_utilization=0.4,
            tokens_seen=60_000 * step,
            trained_tokens_seen=30_000 * step,
            remaining_seconds=STEP_SECONDS * (TOTAL_STEPS - step),
            checkpoints=_checkpoints(step),
        )
        return Progress(job_uid=self.job_uid, pod_uid=self.pod_uid, generation=1, members=2, training=training)


def _checkpoints(step: int) -> CheckpointsStatus:
    """Those that are kept at ``step``, newest first."""
    last = step // CHECKPOINT_STEPS
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    return checkpoints_status(
        [
            checkpoint_status(
                saved := CheckpointId(attempt=1, step=number * CHECKPOINT_STEPS),
                f"s3://bucket/runs/checkpoints/{saved.folder}",
                begin + timedelta(seconds=STEP_SECONDS * CHECKPOINT_STEPS * number),
                10**9,
                None,
            )
            for number in range(last, max(0, last - KEPT_CHECKPOINTS), -1)
        ]
    )


@dataclass
class Trainers:
    """All of them by path; ``url`` is what the operator's setting ``progressUrl`` takes."""

    url: str = ""
    runs: dict[str, Trainer] = field(default_factory=dict)

    def begin(self, namespace: str, name: str, job_uid: str, pod_uid: str) -> None:
        """A job begins to train."""
        self.runs[f"/{namespace}/{name}"] = Trainer(job_uid, pod_uid)

    def asked_since(self, moment: float) -> int:
        """How many were asked since then."""
        return sum(trainer.asked >= moment for trainer in self.runs.values())

    async def answer(self, request: http.Request) -> http.Response:
        """Of the trainer that ``request`` is for."""
        trainer = self.runs.get(request.path)
        if trainer is None:
            return http.Response(404, b"")
        trainer.asked = time.monotonic()
        return http.Response(200, trainer.report().model_dump_json(by_alias=True).encode(), "application/json")


@contextmanager
def serve_trainers() -> Iterator[Trainers]:
    """Serve them on a free port of this machine, as a supervisor serves one."""
    trainers = Trainers()
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(http.serve("127.0.0.1", 0, trainers.answer))
    trainers.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" + "/{namespace}/{name}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield trainers
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
