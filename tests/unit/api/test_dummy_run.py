"""What a dummy run makes of a manifest: its steps, and nowhere to save."""

import pytest

from sft_api.dummy_run import as_dummy_run
from sft_api.numbers import Numbers
from sft_api.plan import make_plan
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import SFTJob
from sft_api.v1alpha1.workload import DummyRunSpec
from sft_cli.manifest import load_manifest
from tests.integration.good_manifests import GOOD


def dummy(text: str) -> SFTJob:
    """The job of the manifest ``text``, with the block."""
    job = load_manifest(text)
    training = job.spec.training.model_copy(update={"dummy_run": DummyRunSpec(steps=7)})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})


@pytest.mark.parametrize("name", sorted(GOOD))
def test_of_any_manifest_it_makes_a_configuration_that_the_trainer_takes(name: str) -> None:
    job = dummy(GOOD[name])
    config = TrainerConfig.resolve(job, uid="uid", default_checkpoint_uri="s3://platform/sft/ns/tulu-0123")

    again = TrainerConfig.model_validate_json(config.model_dump_json(by_alias=True, exclude_none=True))

    assert again.spec.training.dummy_run is not None
    assert (again.plan.total_steps, again.plan.epochs, again.spec.training.steps) == (7, None, 7)
    assert again.export_uri is None
    place = (job.spec.checkpoint.uri or "s3://platform/sft/ns/tulu-0123").rstrip("/")
    assert again.checkpoint_uri == f"{place}/dummy-run"
    assert (again.spec.data.evaluates, again.spec.training.callbacks) == (False, [])
    assert again.spec.checkpoint.every_steps is None


def test_what_decides_the_cost_of_a_step_stays() -> None:
    job = dummy(GOOD["every field, packed"])
    left = as_dummy_run(job.spec)
    for field in ("model", "lora", "strategy", "compute"):
        assert getattr(left, field) == getattr(job.spec, field)
    kept = {"steps": None, "epochs": None, "evaluation": None, "callbacks": []}
    assert left.training.model_copy(update=kept) == job.spec.training.model_copy(update=kept)
    assert (left.data.max_length, left.data.packing) == (job.spec.data.max_length, job.spec.data.packing)
    assert left.checkpoint.s3 == job.spec.checkpoint.s3
    before = make_plan(
        job.spec.model_copy(update={"training": job.spec.training.model_copy(update={"dummy_run": None})})
    )
    same = {"total_steps": None, "epochs": None, "memory": None}
    assert make_plan(left).model_copy(update=same) == before.model_copy(update=same)


def test_it_is_the_run_of_its_manifest_and_a_manifest_without_it_stays_as_it_is() -> None:
    job = dummy(GOOD["every field, packed"])
    bare = job.spec.model_copy(update={"training": job.spec.training.model_copy(update={"dummy_run": None})})
    assert Numbers.of(bare).digest == Numbers.of(job.spec).digest
    assert as_dummy_run(bare) is bare
