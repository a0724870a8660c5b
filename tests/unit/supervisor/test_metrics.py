"""What Prometheus scrapes."""

import inspect
import re
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from sft_api.failures import FailureClass
from sft_api.generate import ROOT
from sft_api.progress import Phase, Progress, TrainingProgress
from sft_api.v1alpha1 import CheckpointsStatus, CheckpointStatus
from sft_trainer.supervisor import metrics
from sft_trainer.supervisor.metrics import render

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_every_figure_that_is_known() -> None:
    latest = CheckpointStatus(
        step=40, attempt=2, uri="s3://b/c", time="2026-01-01T11:59:00Z", size_bytes=1, verified=True
    )
    training = TrainingProgress(
        attempt=2,
        phase=Phase.SAVING,
        step=47,
        loss=1.25,
        aux_loss=2.5,
        data_seconds=0.75,
        checkpoints=CheckpointsStatus(latest=latest),
        update_time=NOW - timedelta(seconds=3),
    )
    text = render(
        Progress(members=2, training=training), Counter({FailureClass.HANG: 2, FailureClass.PEER_LOST: 1}), NOW
    ).decode()

    lines = text.splitlines()
    for line in (
        "sft_trainer_step 47.0",
        "sft_trainer_loss 1.25",
        "sft_trainer_aux_loss 2.5",
        "sft_trainer_steps_at_risk 7.0",
        "sft_trainer_checkpoint_step 40.0",
        "sft_trainer_checkpoint_age_seconds 60.0",
        "sft_trainer_report_age_seconds 3.0",
        "sft_trainer_members 2.0",
        "sft_trainer_data_seconds_total 0.75",
        'sft_trainer_phase{phase="Saving"} 1.0',
        'sft_trainer_phase{phase="Training"} 0.0',
        'sft_trainer_restarts_total{failure="Hang"} 2.0',
        'sft_trainer_restarts_total{failure="PeerLost"} 1.0',
    ):
        assert line in lines
    assert "eval_loss" not in text


@pytest.mark.parametrize("phase", Phase)
def test_how_fast_a_run_is_stands_there_only_while_it_trains(phase: Phase) -> None:
    """A group whose pods are missing, or whose store is away, waits for hours, and its last report stays."""
    last = TrainingProgress(
        phase=phase,
        step=47,
        loss=1.25,
        tokens_per_second=400.0,
        tokens_per_second_per_gpu=100.0,
        model_flops_utilization=0.4,
    )
    text = render(Progress(training=last), Counter(), NOW).decode()

    told = re.findall(r"^sft_trainer_(tokens_per_second\w*|model_flops_utilization) ", text, re.MULTILINE)
    works = phase in (Phase.TRAINING, Phase.EVALUATING, Phase.SAVING, Phase.EXPORTING)
    assert told == (["tokens_per_second", "tokens_per_second_per_gpu", "model_flops_utilization"] if works else [])
    assert "sft_trainer_loss 1.25" in text


def test_ends_of_the_group_are_counted_from_zero_on() -> None:
    """Prometheus's ``increase`` leaves out the first value of a series: a failure that brings its own would be none."""
    text = render(Progress(), Counter(), NOW).decode()
    counts = re.findall(r'sft_trainer_restarts_total\{failure="(\w+)"\} (\S+)', text)

    assert counts == [(failure.value, "0.0") for failure in FailureClass]


def test_steps_at_risk_before_the_first_checkpoint_are_those_of_this_run() -> None:
    for resumed_from, expected in ((None, 47), (40, 7)):
        told = Progress(training=TrainingProgress(attempt=1, step=47, resumed_from_step=resumed_from))
        assert f"sft_trainer_steps_at_risk {expected}.0" in render(told, Counter(), NOW).decode().splitlines()


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "states.md").read_text()
    source = inspect.getsource(metrics)
    counted = [name for name, *_ in metrics._COUNTED_OF_HOST]
    named = re.findall(r'^ +\("(\w+)", "', source, re.MULTILINE)
    gauges = [f"{name}_total" if name in counted else name for name in named]
    families = [
        f"{name}_total" if kind == "Counter" else name
        for kind, name in re.findall(r'(Gauge|Counter)MetricFamily\(\s*"sft_trainer_(\w+)"', source)
    ]

    assert "step" in gauges
    assert "restarts_total" in families
    assert not [name for name in [*gauges, *families] if f"`sft_trainer_{name}`" not in page]
