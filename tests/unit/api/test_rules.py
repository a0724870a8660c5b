"""Models: strictness, rules on scalars and objects, and all broken rules of an object at once."""

from typing import Any

import pytest
from pydantic import ValidationError

from sft_api.v1alpha1 import SFTJob, TrainingSpec
from sft_api.v1alpha1.base import ApiModel, Rule, matches
from sft_api.v1alpha1.model_config import RopeParameters
from sft_api.v1alpha1.quantities import quantity_value
from sft_api.v1alpha1.uris import ModelUri

MINIMAL: dict[str, Any] = {
    "apiVersion": "sftjob.dev/v1alpha1",
    "kind": "SFTJob",
    "metadata": {"name": "job"},
    "spec": {
        "model": {"uri": "hf://org/name"},
        "data": {"train": [{"uri": "hf://org/rows"}]},
        "compute": {},
    },
}


def test_all_broken_rules_of_an_object_are_said_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainingSpec(steps=1, epochs=1, global_batch_size=1, global_batch_tokens=1)

    (error,) = caught.value.errors()
    assert error["msg"].splitlines() == [
        "give training.steps or training.epochs, not both",
        "give training.globalBatchSize or training.globalBatchTokens, not both",
    ]


def test_braces_in_a_sentence_stay() -> None:
    class Braced(ApiModel):
        rules = (Rule("false", "write {{ a }} as {b}", lambda _: False),)

    with pytest.raises(ValidationError) as caught:
        Braced()

    assert caught.value.errors()[0]["msg"] == "write {{ a }} as {b}"


def test_a_pattern_ends_where_the_string_ends() -> None:
    rule = matches("^a+$", "must be a")

    assert rule.check("aa")
    assert not rule.check("aa\n")
    assert not rule.check("baa")


def test_patterns_are_quoted_for_cel() -> None:
    assert matches(r"^\d'$", "").cel == r"self.matches('^\\d\'$')"


def test_manifests_are_camel_case_only_and_nulls_are_absent() -> None:
    job = SFTJob.from_manifest({**MINIMAL, "spec": {**MINIMAL["spec"], "training": None}})
    assert job.spec.training == TrainingSpec()

    with pytest.raises(ValidationError, match="run_policy"):
        SFTJob.from_manifest({**MINIMAL, "spec": {**MINIMAL["spec"], "run_policy": {}}})


def test_unknown_fields_without_a_value_are_refused() -> None:
    """The API server names unknown fields before it drops nulls: in ``{steps: 1,000}`` YAML sees the field ``000``."""
    spec = {**MINIMAL["spec"], "training": {"steps": 1, "0": None}, "lora": None, "strategi": None}

    with pytest.raises(ValidationError) as caught:
        SFTJob.from_manifest({**MINIMAL, "spec": spec})

    problems = {(problem["loc"], problem["type"]) for problem in caught.value.errors()}
    assert problems == {(("spec", "training", "0"), "extra_forbidden"), (("spec", "strategi"), "extra_forbidden")}


def test_metadata_of_a_live_object_is_read_and_typos_are_not() -> None:
    live = {
        "name": "job",
        "namespace": "team",
        "uid": "1",
        "generation": 3,
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [],
        "finalizers": ["sftjob.dev/job"],
    }
    assert SFTJob.from_manifest({**MINIMAL, "metadata": live}).metadata.generation == 3

    with pytest.raises(ValidationError, match="lables"):
        SFTJob.from_manifest({**MINIMAL, "metadata": {"name": "job", "lables": {}}})


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), (2, 2), ("500m", 0.5), ("1.5", 1.5), ("1Ki", 1024), ("2G", 2e9), ("1.5Gi", 1.5 * 2**30)],
)
def test_quantities_have_their_kubernetes_value(text: int | str, value: float) -> None:
    assert quantity_value(text) == value


@pytest.mark.parametrize("text", ["", "GB", "1GB", "-1", "1 Gi", "1Gi\n", "1e3x", "٣"])
def test_other_text_is_no_quantity(text: str) -> None:
    assert quantity_value(text) is None


@pytest.mark.parametrize(
    "outside", [{"attention_factor": 1e6}, {"attention_factor": 1e-300}, {"rope_theta": 1e-300}, {"rope_theta": 1.0}]
)
def test_rotary_parameters_that_no_model_has_are_refused(outside: dict[str, float]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    inside = {"rope_theta": 1e4, "attention_factor": 1.5}
    assert RopeParameters.model_validate({**yarn, **inside})
    with pytest.raises(ValidationError, match=next(iter(outside))):
        RopeParameters.model_validate({**yarn, **inside, **outside})


@pytest.mark.parametrize(
    ("strategy", "training", "words"),
    [
        (
            {"fsdp": {"shardDegree": 3}},
            {},
            "strategy.fsdp.shardDegree must divide the number of processes (compute.nodes x processes per node); it is "
            "3, and there are 8 processes: 1, 2, 4 or 8 would do",
        ),
        ({"fsdp": {"sequenceParallelDegree": 6}}, {}, "; it is 6, and there are 8 processes: 1, 2, 4 or 8 would do"),
        (
            {"megatron": {"tensorParallelDegree": 2, "contextParallelDegree": 3}},
            {},
            "; it is 2 x 3 x 1 = 6, and there are 8 processes: 1, 2, 4 or 8 would do",
        ),
        (
            {"megatron": {"pipelineParallelDegree": 2, "expertParallelDegree": 8}},
            {},
            "; it is 8, and there are 4 processes of a stage: 1, 2 or 4 would do",
        ),
        (
            {"megatron": {"pipelineParallelDegree": 3, "expertParallelDegree": 8}},
            {},
            "; it is 8, and there are 8 processes and 3 stages",
        ),
        (
            {"megatron": {"tensorParallelDegree": 2}},
            {"globalBatchTokens": 4096},
            "; it is 4096, and 4 groups of 8192 tokens need at least 32768",
        ),
        ({}, {"globalBatchTokens": 4096}, "; it is 4096, and 8 processes of 8192 tokens need at least 65536"),
    ],
    ids=str,
)
def test_what_does_not_divide_or_suffice_is_said_in_numbers(
    strategy: dict[str, Any], training: dict[str, Any], words: str
) -> None:
    data = {**MINIMAL["spec"]["data"], "maxLength": 8192}
    sections = {"strategy": strategy, "training": training, "compute": {"gpusPerNode": 8}, "data": data}
    with pytest.raises(ValidationError) as caught:
        SFTJob.from_manifest({**MINIMAL, "spec": {**MINIMAL["spec"], **sections}})

    lines = [line for error in caught.value.errors() for line in error["msg"].splitlines()]
    assert any(line.endswith(words) for line in lines)


@pytest.mark.parametrize(
    ("checkpoints", "accepted"),
    [
        ("pvc://c/rows", False),
        ("pvc://c/rows/run", False),
        ("s3://b/held-out/runs/one", False),
        ("pvc://c/rows-run", True),
        ("pvc://c/run", True),
    ],
)
def test_a_run_saves_nowhere_where_its_data_is_read(checkpoints: str, accepted: bool) -> None:
    """All that lies in a folder of data is read: the record of the run itself made it a folder of several kinds."""
    data = {"train": [{"uri": "pvc://c/rows/"}], "eval": [{"uri": "s3://b/held-out", "name": "a"}]}
    spec = {**MINIMAL["spec"], "data": data, "checkpoint": {"uri": checkpoints}, "export": {"atEnd": False}}

    if accepted:
        assert SFTJob.from_manifest({**MINIMAL, "spec": spec}).spec.checkpoint.uri == checkpoints
        return
    with pytest.raises(ValidationError, match="must be neither the uri of data"):
        SFTJob.from_manifest({**MINIMAL, "spec": spec})


@pytest.mark.parametrize("claim", ["my_claim", "Models", "a:b", "[a", "a-", "-a", "a b"])
def test_a_claim_that_cannot_be_is_not_waited_for(claim: str) -> None:
    spec = {**MINIMAL["spec"], "model": {"uri": f"pvc://{claim}/model"}}

    with pytest.raises(ValidationError, match="must name the claim in lower-case letters"):
        SFTJob.from_manifest({**MINIMAL, "spec": spec})


def test_of_a_claim_without_a_path_the_path_alone_is_told() -> None:
    """The API server says all rules that a value breaks: the name of the claim is right."""
    rules = [rule for rule in ModelUri.__metadata__ if isinstance(rule, Rule)]

    broken = [rule.message for rule in rules if not rule.check("pvc://models")]

    assert broken == ["must be hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path or file:///absolute/path"]


@pytest.mark.parametrize("uri", ["pvc://a/model", "pvc://team-a.models-2/b/C_d", "s3://Bucket_1/a", "hf://A_b/C"])
def test_names_of_other_places_are_their_own_matter(uri: str) -> None:
    spec = {**MINIMAL["spec"], "model": {"uri": uri}}

    assert SFTJob.from_manifest({**MINIMAL, "spec": spec}).spec.model.uri == uri
