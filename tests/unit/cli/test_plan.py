"""What `sft plan` says about where numbers come from."""

from typing import Any

from sft_api.plan import make_plan
from sft_cli.plan import Decision, Origin, explain

from .jobs import job


def decisions(**spec: Any) -> dict[str, Decision]:
    asked = job(**spec).spec
    return {decision.subject: decision for decision in explain(asked, make_plan(asked))}


def test_what_the_manifest_leaves_open_is_default_or_computed() -> None:
    shown = decisions(compute={"nodes": 2})

    assert (shown["processes"].value, shown["processes"].origin) == ("2 on GPU", Origin.GIVEN)
    assert shown["copies of the model"].value == "1, each over 2 processes"
    assert (shown["length"].value, shown["length"].origin) == ("1 epoch", Origin.DEFAULT)
    assert (shown["tokens a step"].value, shown["tokens a step"].origin) == ("65,536", Origin.COMPUTED)
    assert shown["tokens a micro-batch"].value == "4,096"
    assert shown["gradient accumulation"].value == "8"
    assert (shown["learning rate"].value, shown["learning rate"].origin) == ("1e-05", Origin.DEFAULT)
    assert shown["schedule"].value == "cosine, warm-up 3% of the steps"
    assert (shown["precision"].value, shown["precision"].origin) == ("bf16", Origin.COMPUTED)
    assert shown["checkpoints"].value == "every 10m0s; kept: the last 2"
    assert "evaluation" not in shown


def test_what_the_manifest_gives_is_marked_so() -> None:
    shown = decisions(
        data={
            "train": [{"uri": "hf://org/data"}],
            "eval": [{"uri": "hf://org/data", "name": "held"}],
            "packing": "none",
        },
        training={
            "steps": 1200,
            "globalBatchSize": 8,
            "microBatchSize": 2,
            "precision": "bf16",
            "optimizer": {"learningRate": 1e-5},
            "schedule": {"type": "linear", "warmupSteps": 10},
            "evaluation": {"everySteps": 100, "beforeTraining": True},
        },
        checkpoint={"uri": "file:///c", "everySteps": 50, "keep": {"best": 1, "everySteps": 500}},
        export={"atEnd": False},
    )

    computed = {subject for subject, decision in shown.items() if decision.origin is not Origin.GIVEN}
    assert computed == {"copies of the model", "gradient accumulation", "seed"}
    assert shown["length"].value == "1,200 steps"
    assert shown["gradient accumulation"].value == "4"
    assert shown["schedule"].value == "linear, warm-up 10 steps"
    assert shown["evaluation"].value == "before, every 100 steps and at the end"
    kept = "the last 2, the best 1, those of every 500 steps"
    assert shown["checkpoints"].value == f"every 10m0s or 50 steps; kept: {kept}"
    assert shown["export"].value == "none"


def test_a_batch_that_was_rounded_says_from_what() -> None:
    shown = decisions(training={"globalBatchTokens": 10_000})

    assert shown["tokens a step"].value == "8,192"
    assert "10,000, rounded down" in shown["tokens a step"].why


def test_accumulation_that_varies_says_so() -> None:
    assert decisions(training={"globalBatchSize": 8})["gradient accumulation"].value == "varies"
