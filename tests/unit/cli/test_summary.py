"""The last lines of a run on this machine."""

from pathlib import Path
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.v1alpha1 import GoodputStatus, LostGpuSeconds
from sft_api.v1alpha1.status import (
    CheckpointsStatus,
    CheckpointStatus,
    ExportStatus,
    HubStatus,
    ProgressStatus,
    RestartsStatus,
    SFTJobStatus,
)
from sft_cli.ending import Ending
from sft_cli.summary import summary
from tests.unit.cli.jobs import job

LATEST = CheckpointStatus(
    step=20, attempt=1, uri="file:///c/step-20", time="2026-11-21T11:59:00Z", size_bytes=1, verified=True
)
COMMAND = "sft run job.yaml"


def lines(ending: Ending, spec: dict[str, Any] | None = None, **status: Any) -> list[str]:
    of = job(training={"steps": 40}, **(spec or {}))
    return list(summary(of, SFTJobStatus(**status), ending, seconds=72, command=COMMAND, log=Path("/c/logs/1.log")))


def progress(**fields: Any) -> ProgressStatus:
    return ProgressStatus(step=40, total_steps=40, summary="40/40", **fields)


def test_a_complete_run_has_four_lines() -> None:
    result, loss, model, following = lines(
        Ending(None),
        progress=progress(first_loss=6.41, loss=1.034, first_eval_loss=6.5, eval_loss=1.1),
        export=ExportStatus(uri="file:///c/export", step=40),
        first_step_time="2026-11-21T11:58:00Z",
    )

    assert result == "Complete    tiny: 40/40 steps in 1m12s"
    assert loss == "Loss        6.4100 → 1.0340, evaluation 6.5000 → 1.1000"
    assert model == "Model       /c/export"
    assert following.startswith("Next        ")


def test_a_model_of_an_earlier_step_says_which() -> None:
    best = ExportStatus(uri="file:///c/export", step=20)
    model = lines(Ending(None), progress=progress(loss=1.0), export=best)[2]

    assert model == "Model       /c/export, of step 20"


def test_a_copy_on_the_hub_is_named() -> None:
    copy = HubStatus(url="https://hub/org/mine", revision="main", commit="abc")
    export = ExportStatus(uri="file:///c/export", step=40, hub=copy)

    model = lines(Ending(None), progress=progress(loss=1.0), export=export)[2]

    assert model == "Model       /c/export, and in https://hub/org/mine"


def test_models_of_steps_on_the_way_are_named() -> None:
    def said(*steps: int) -> str:
        exports = [ExportStatus(uri=f"file:///c/export/step-{step:08d}", step=step) for step in steps]
        end = ExportStatus(uri="file:///c/export", step=40)
        return lines(Ending(None), progress=progress(loss=1.0), export=end, exports=exports)[3]

    assert said(30, 20, 10) == "Exports     steps 10, 20 and 30, in folders step-… of /c/export"
    assert said(10) == "Exports     step 10, in folders step-… of /c/export"
    assert said().startswith("Next")


def test_a_run_that_was_complete_already_does_not_say_that_it_trained() -> None:
    result = lines(Ending(None), progress=progress(loss=1.0))[0]

    assert result == "Complete    tiny: 40/40 steps, all of them done before; --fresh trains anew"


def test_a_run_that_was_stopped_early_says_why() -> None:
    result, why = lines(Ending(None), progress=progress(loss=1.0, stopped_early="after step 40: no better"))[:2]

    assert result.startswith("Complete    ")
    assert why == "Stopped     early, after step 40: no better"


def test_the_picture_of_the_losses_is_named_with_them() -> None:
    drawn = progress(first_loss=6.41, loss=1.034, curve="file:///c/curve.svg")

    assert lines(Ending(None), progress=drawn)[1] == "Loss        6.4100 → 1.0340; drawn in /c/curve.svg"


def test_what_is_not_known_of_before_is_left_out() -> None:
    loss = lines(Ending(None), progress=progress(loss=1.0, eval_loss=1.5))[1]

    assert loss == "Loss        1.0000, evaluation 1.5000"
    known = lines(Ending(None), progress=progress(loss=1.0, eval_loss=1.5, eval_accuracy=0.4812))[1]
    assert known == f"{loss}, 48.1% of its tokens right"


def test_without_an_export_the_checkpoint_is_named() -> None:
    model, following = lines(Ending(None), progress=progress(loss=1.0), checkpoints=CheckpointsStatus(latest=LATEST))[
        2:
    ]

    assert following == "Next        sft export with this manifest makes a model of it; -o yaml says more"
    assert model == "Model       none was exported; the last checkpoint is /c/step-20"


@pytest.mark.parametrize(
    ("failure", "restarts", "said"),
    [
        (None, RestartsStatus(failures=2, total_recovery_seconds=5.1), ["2, 5.1 s in all to the next new step"]),
        (None, RestartsStatus(failures=1, total_recovery_seconds=1234.56), ["1, 1,234.6 s to the next new step"]),
        (FailureClass.INTERRUPTED, RestartsStatus(failures=1), ["1"]),
        (FailureClass.HANG, RestartsStatus(failures=1, total_recovery_seconds=2), ["1, 2.0 s to the next new step"]),
        # The last one was not followed by a start.
        (FailureClass.RESTARTS_EXHAUSTED, RestartsStatus(failures=3), ["2"]),
        (FailureClass.RESTARTS_EXHAUSTED, RestartsStatus(failures=1), []),
        (None, RestartsStatus(), []),
        (None, None, []),
    ],
)
def test_restarts_and_what_they_took_are_said_when_there_were_any(
    failure: FailureClass | None, restarts: RestartsStatus | None, said: list[str]
) -> None:
    ended = lines(Ending(failure, "why"), progress=progress(loss=1.0), restarts=restarts)

    assert [line for line in ended if line.startswith("Restarts")] == [f"Restarts    {text}" for text in said]


def test_a_stopped_run_says_how_to_go_on() -> None:
    stopped = Ending(FailureClass.INTERRUPTED, "stopped")

    assert lines(stopped, progress=progress(loss=1.0), checkpoints=CheckpointsStatus(latest=LATEST)) == [
        "Stopped     tiny: after step 40/40",
        "Loss        1.0000",
        "Checkpoint  step 20, /c/step-20",
        "Next        the same command goes on from step 20:\n  sft run job.yaml",
    ]
    assert lines(stopped, progress=progress(loss=1.0))[-2:] == [
        "Checkpoint  none was written in this run",
        "Next        the same command starts from the model:\n  sft run job.yaml",
    ]


def test_what_is_exported_of_adapters_is_loaded_with_peft() -> None:
    def use(**export: Any) -> str:
        spec = {"lora": {"rank": 8}, "export": {"atEnd": True, **export}}
        return lines(Ending(None), spec, export=ExportStatus(uri="file:///c/export", step=40))[-1]

    assert "load these adapters with peft; " in use()
    assert "load it with from_pretrained; " in use(mergeAdapter=True)


def test_a_run_that_never_goes_on_says_what_becomes_of_its_checkpoints() -> None:
    saved = {"progress": progress(loss=1.0), "checkpoints": CheckpointsStatus(latest=LATEST)}

    never = {"checkpoint": {"resume": {"policy": "never"}}}
    stopped = lines(Ending(FailureClass.INTERRUPTED, "stopped"), never, **saved)
    assert stopped[-1].startswith(
        "Next        the same command begins anew, and takes the place of what is saved "
        "(checkpoint.resume.policy is never; with auto it goes on from step 20):"
    )
    failed = lines(Ending(FailureClass.HANG, "why"), never, **saved)
    assert "With checkpoint.resume.policy never it begins anew" in "".join(failed)


def test_a_run_stopped_before_it_looked_for_checkpoints_does_not_deny_them() -> None:
    assert lines(Ending(FailureClass.INTERRUPTED, "stopped")) == [
        "Stopped     tiny: after step 0",
        "Checkpoint  none was written in this run",
        "Next        the same command goes on from the newest checkpoint, or starts from the model where there is "
        "none:\n  sft run job.yaml",
    ]


def test_a_failed_run_says_what_failed_and_what_to_do() -> None:
    assert lines(Ending(FailureClass.DATA_ERROR, "row 7 has no messages", rank=0)) == [
        "Failed      DataError on rank 0: row 7 has no messages",
        "Checkpoint  none was written in this run",
        "Next        Look at the rows with sft data, mend the data or data.* in the manifest, then run again.\n"
        "  sft run job.yaml",
        "Log         /c/logs/1.log",
    ]


def test_where_the_time_went() -> None:
    goodput = GoodputStatus(
        counted="Processes",
        gpu_seconds=200,
        productive_gpu_seconds=150,
        lost_gpu_seconds=LostGpuSeconds(starting=30, repeated_steps=8, saving=0.05, waiting=11.95),
    )
    text = "\n".join(lines(Ending(None), progress=progress(loss=1.0), goodput=goodput))

    assert (
        """
Time        200.0 process seconds
                 150.0  75%  steps that count
                  30.0  15%  starting and loading
                  11.9   6%  waiting, recovery
                   8.0   4%  steps that were lost
"""
        in text
    )
