"""What is valid and may surprise, as it is said before a run and in it."""

from typing import Any

import pytest

from sft_api.known_models import known_configs, known_shape
from sft_api.surprises import surprises
from tests.unit.cli.jobs import job

EIGHT_BILLION = "hf://Qwen/Qwen3-8B"
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
LONGER = (
    "data.maxLength is 131072, and the model has 40960 positions (max_position_embeddings): what is longer lies "
    "beyond what it was trained for; scale them by model.configOverrides.rope_parameters, or set data.maxLength to "
    "40960 at most"
)


def said(length: int = 8192, uri: str = EIGHT_BILLION, overrides: Any = None, **parts: Any) -> list[str]:
    model = {"uri": uri, **({} if overrides is None else {"configOverrides": overrides})}
    data = {"train": [{"uri": "hf://a/b"}], "maxLength": length}
    return surprises(job(model=model, data=data, **parts).spec, known_shape(uri))


def test_examples_beyond_the_positions_of_a_model_are_warned_of() -> None:
    assert said(131072) == [LONGER]
    assert said(40960) == said(131072, "s3://models/own") == []
    # Another length of the same shape, and one that is not known
    assert said(131072, "hf://Qwen/Qwen3-4B-Instruct-2507") == said(131072, "hf://microsoft/Phi-4-mini-instruct") == []


@pytest.mark.parametrize("told", [{"rope_parameters": YARN}, {"max_position_embeddings": 131072}])
def test_whoever_says_something_of_positions_is_not_warned(told: dict[str, Any]) -> None:
    assert said(131072, overrides=told) == []
    assert said(131072, overrides={"attention_dropout": 0.0}) == [LONGER]


def test_an_original_length_that_the_model_does_not_have_is_warned_of() -> None:
    (warning,) = said(overrides={"rope_parameters": {**YARN, "original_max_position_embeddings": 99999}})
    assert "original_max_position_embeddings is 99999, and the model has 40960 positions" in warning
    assert warning.endswith("say 40960, or less")
    assert said(overrides={"rope_parameters": {**YARN, "original_max_position_embeddings": 40960}}) == []


def test_lengths_of_the_table_belong_to_models_that_it_has() -> None:
    from sft_api.known_models import _POSITIONS

    names = [name for row in _POSITIONS.values() for name in row.split()]
    assert len(names) == len({*names})
    assert {*names} <= {*known_configs()}


def test_muon_without_a_matrix_of_a_layer_is_warned_of() -> None:
    def warned(*modules: str, **parts: Any) -> list[str]:
        trained = {"trainableModules": [*modules]} if modules else {}
        return said(training={"optimizer": {"type": "muon"}, **trained}, **parts)

    (warning,) = warned("lm_head", "norm")
    assert warning.startswith("training.optimizer.type is muon, and training.trainableModules (lm_head, norm) names no")
    assert warned() == warned("lm_head", "mlp.down_proj") == warned("lm_head", lora={}) == []
    # Adapters may be those of the head alone
    head = {"targetModules": ["lm_head"]}
    (warning,) = warned(lora=head)
    assert "and lora.targetModules (lm_head) names no matrix" in warning
    (warning,) = warned("norm", lora=head)
    assert "and lora.targetModules (lm_head) and training.trainableModules (norm) name no matrix" in warning
    # What an unknown model has nobody knows here
    assert warned("lm_head", uri="s3://models/own") == []


def test_tokens_that_are_shared_out_over_nodes_are_warned_of() -> None:
    def warned(degree: int) -> list[str]:
        compute = {"nodes": 2, "gpusPerNode": 4}
        return said(compute=compute, strategy={"fsdp": {"sequenceParallelDegree": degree}})

    assert warned(4) == []
    (warning,) = warned(8)
    assert "is 8, and a node has 4 processes: " in warning


def test_exports_on_the_way_that_a_run_does_not_come_to_are_warned_of() -> None:
    def warned(every: int) -> list[str]:
        return said(training={"steps": 100}, checkpoint={"everySteps": 10}, export={"everySteps": every})

    assert warned(100) == []
    assert warned(110) == ["export.everySteps is 110, and the run has 100 steps: nothing is exported but at its end"]


def test_evaluations_that_a_run_does_not_come_to_are_warned_of() -> None:
    def warned(every: int) -> list[str]:
        data = {"train": [{"uri": "hf://a/b"}], "eval": [{"uri": "hf://a/b", "name": "held-out"}]}
        training = {"steps": 100, "evaluation": {"everySteps": every}}
        return surprises(job(training=training, data=data).spec, None)

    assert warned(100) == []
    assert warned(110) == [
        "training.evaluation.everySteps is 110, and the run has 100 steps: it is evaluated at its end alone"
    ]


def test_evaluations_after_more_passes_than_a_run_has_are_warned_of() -> None:
    def warned(every: float, **length: int) -> list[str]:
        data = {"train": [{"uri": "hf://a/b"}], "eval": [{"uri": "hf://a/b", "name": "held-out"}]}
        return surprises(job(training={**length, "evaluation": {"everyEpochs": every}}, data=data).spec, None)

    # How many passes so many steps are is known once the data is read.
    assert warned(1) == warned(2, epochs=2) == warned(2, steps=10) == []
    assert warned(1.5) == [
        "training.evaluation.everyEpochs is 1.5, and the run has 1 epoch: it is evaluated at its end alone"
    ]
    assert warned(3, epochs=2) == [
        "training.evaluation.everyEpochs is 3, and the run has 2 epochs: it is evaluated at its end alone"
    ]


def test_a_warm_up_of_all_steps_is_warned_of() -> None:
    def warned(**training: Any) -> list[str]:
        return said(training={"schedule": {"warmupSteps": 100}, **training})

    assert warned(steps=101) == warned(epochs=1) == said(training={"steps": 1, "schedule": {"warmupRatio": 0.5}}) == []
    (warning,) = warned(steps=60)
    assert warning.startswith(
        "training.schedule.warmupSteps is 100, and the run has 60 steps: the learning rate rises to"
    )
    assert warned(steps=100) != []
    for schedule in ({}, {"type": "warmupStableDecay"}, {"type": "warmupStableDecay", "decaySteps": 5}):
        assert said(training={"steps": 20, "schedule": {"warmupRatio": 0.98, **schedule}}) == [
            "training.schedule.warmupRatio is 0.98, and the run has 20 steps: the learning rate rises to its peak in "
            "the last one; lower warmupRatio, or leave it out for 3% of the steps"
        ]


def test_a_decay_that_leaves_no_step_at_the_peak_is_warned_of() -> None:
    def warned(decay: int, **training: Any) -> list[str]:
        schedule = {"type": "warmupStableDecay", "warmupSteps": 10, "decaySteps": decay}
        return said(training={"schedule": schedule, **training})

    assert warned(49, steps=60) == warned(50, epochs=1) == []
    (warning,) = warned(50, steps=60)
    assert warning.startswith("training.schedule.decaySteps is 50, and the run has 60 steps: the learning rate decays")


def test_a_decay_of_less_than_two_steps_is_warned_of() -> None:
    def warned(steps: int, **schedule: Any) -> list[str]:
        return said(training={"steps": steps, "schedule": {"type": "warmupStableDecay", **schedule}})

    assert warned(20) == warned(10, decaySteps=2) == warned(4, decayRatio=0.5) == warned(1) == []
    for steps, schedule, last in ((4, {}, 0), (10, {}, 1), (100, {"decaySteps": 1}, 1)):
        (warning,) = warned(steps, **schedule)
        assert warning.startswith(f"training.schedule decays in the last {last} of {steps} steps, and begins at the")
        assert warning.endswith("; give decaySteps of 2 or more")


def test_cosines_of_one_step_are_warned_of() -> None:
    def warned(steps: int, cycles: int) -> list[str]:
        schedule = {"type": "cosineWithRestarts", "cycles": cycles, "warmupSteps": 10}
        return said(training={"steps": steps, "schedule": schedule})

    assert warned(60, 25) == []
    (warning,) = warned(59, 25)
    assert warning.startswith("training.schedule.cycles is 25, and 49 of 59 steps are left for them: a cosine of one")


def test_a_warm_up_that_leaves_less_than_two_steps_is_what_to_lower() -> None:
    for decay in (1, 50):
        schedule = {"type": "warmupStableDecay", "warmupSteps": 9, "decaySteps": decay}
        (warning,) = said(training={"steps": 10, "schedule": schedule})
        assert warning.startswith("training.schedule decays in the last 1 of 10 steps, and begins at the peak: ")
        assert warning.endswith("; lower warmupSteps, which leaves no more")


@pytest.mark.parametrize(
    ("what", "lost"),
    [("profile", "trace"), ("memorySnapshot", "snapshot")],
)
def test_a_window_behind_the_last_step_is_warned_of(what: str, lost: str) -> None:
    def of(steps: int | None, **training: Any) -> list[str]:
        length = {} if steps is None else {"steps": steps}
        return said(monitoring={what: {"startStep": 5}}, training={**length, **training}, compute={"gpusPerNode": 1})

    assert of(4) == [f"monitoring.{what}.startStep is 5, and the run has 4 steps: no {lost}"]
    assert of(5) == of(None) == []
    dummy = said(monitoring={what: {"startStep": 5}}, training={"dummyRun": {"steps": 20}}, compute={"gpusPerNode": 1})
    assert dummy == [f"monitoring.{what} is left out of a dummy run: no {lost}"]


@pytest.mark.parametrize(
    ("splits", "twice"),
    [
        ([None, "train[:50%]"], "in train[:50%] and in train"),
        (["train[:60%]", "train[40%:]"], "in train[:60%] and in train[40%:]"),
        (["train[:500]", "train[100:200]"], "in train[:500] and in train[100:200]"),
        (["test+train", "train[-10:]"], "in train and in train[-10:]"),
        (["train+train[:10%]"], "in train[:10%] and in train"),
        # The same rows are drawn in both, or no row is in both, as far as one can tell.
        ([None, "train"], ""),
        (["train[:60%]", "train[0%:60%]"], ""),
        (["train[:50%]", "train[50%:]"], ""),
        (["train[:-100]", "train[-100:]"], ""),
        (["train", "test"], ""),
        (["train[:500]", "train[50%:]"], ""),
    ],
)
def test_rows_that_are_named_at_two_places_may_be_held_out_of_one_alone(splits: list[str | None], twice: str) -> None:
    train = [{"uri": "hf://a/b", "split": split} for split in splits]

    def told(train: list[dict[str, Any]], **data: Any) -> list[str]:
        return surprises(job(model={"uri": EIGHT_BILLION}, data={"train": train, **data}).spec, None)

    found = told(train, heldOut={"fraction": 0.05})
    assert [text.split(", and data.heldOut")[0] for text in found] == (
        [f"data.train has rows of hf://a/b twice, {twice}"] if twice else []
    )
    assert told(train) == []
    if len(train) > 1:
        assert told([train[0] | {"subset": "en"}, *train[1:]], heldOut={"fraction": 0.05}) == []


@pytest.mark.parametrize("spellings", [("s3://b/rows", "s3://b/rows/"), ("hf://a/b@main", "hf://a/b")])
def test_two_spellings_of_one_source_are_one(spellings: tuple[str, str]) -> None:
    train = [{"uri": uri, "split": split} for uri, split in zip(spellings, ("train", "train[:50%]"), strict=True)]
    spec = job(model={"uri": EIGHT_BILLION}, data={"train": train, "heldOut": {"fraction": 0.05}}).spec
    (found,) = surprises(spec, None)
    assert found.startswith(f"data.train has rows of {spellings[0].removesuffix('@main')} twice, ")
