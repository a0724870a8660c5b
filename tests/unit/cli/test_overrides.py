"""``--set``: fields given on the command line are read, placed and refused as if they stood in the manifest."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from sft_api.v1alpha1.job import SFTJob
from sft_cli.main import cli
from sft_cli.manifest import ManifestError, load_manifest, load_manifests, load_overridden
from sft_cli.overrides import OverrideError, read_override

from .jobs import manifest


def text(**spec: Any) -> str:
    return yaml.safe_dump(manifest(**spec))


def overridden(source: str, *sets: str, name: str | None = None) -> SFTJob:
    return load_overridden(source, name, [read_override(each) for each in sets])[0]


def refused(source: str, *sets: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        overridden(source, *sets)
    return list(caught.value.problems)


def sft(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "value",
    [
        "1e-5",
        "2e-5",
        "1_0.5",
        "'1e-5'",
        "yes",
        "{betas: [0.9, 0.95]}",
        "train[:100]",
        "0o17",
        "1:30",
        "100.0",
        "'#a' # b",
    ],
)
@pytest.mark.parametrize("path", ["training.optimizer.learningRate", "data.train[0].split", "training.steps"])
def test_a_value_is_what_it_is_in_a_manifest(path: str, value: str) -> None:
    def read(source: str, *sets: str) -> Any:
        try:
            return overridden(source, *sets).spec
        except ManifestError as error:
            return [problem.removeprefix(f"--set {path}: ") for problem in error.problems]

    lines = {
        "training.optimizer.learningRate": "  training: {optimizer: {}}\n",
        "training.steps": "  training: {}\n",
        "data.train[0].split": "",
    }
    head = (
        "apiVersion: sftjob.dev/v1alpha1\nkind: SFTJob\nmetadata: {name: tiny}\nspec:\n  model: {uri: hf://org/model}\n"
    )
    data = "  data:\n    train:\n    - uri: hf://org/data\n"
    written = {
        "training.optimizer.learningRate": f"{data}  training:\n    optimizer:\n      learningRate: {value}\n",
        "training.steps": f"{data}  training:\n    steps: {value}\n",
        "data.train[0].split": f"{data}      split: {value}\n",
    }
    tail = "  compute: {gpusPerNode: 0}\n"

    by_option = read(f"{head}{data}{lines[path]}{tail}", f"{path}={value}")

    assert by_option == read(f"{head}{written[path]}{tail}")


def test_fields_are_set_in_turn_and_blocks_made_for_them() -> None:
    job = overridden(
        text(),
        "training.optimizer.learningRate=2e-5",
        "spec.training.steps=10",
        "training.steps=20",
        "data.train[0].split='train[:100]'",
        "data.train[1]={uri: hf://org/more}",
        "data.eval[0].uri=hf://org/held-out",
        "data.eval[0].name=held-out",
        "metadata.name=demo-2",
    )

    assert job.metadata.name == "demo-2"
    assert (job.spec.training.optimizer.learning_rate, job.spec.training.steps) == (2e-5, 20)
    assert [source.uri for source in job.spec.data.train] == ["hf://org/data", "hf://org/more"]
    assert job.spec.data.train[0].split == "train[:100]"
    assert [source.name for source in job.spec.data.eval] == ["held-out"]


def test_null_takes_out_a_field_and_an_item() -> None:
    data = {"train": [{"uri": "hf://org/a", "split": "train"}, {"uri": "hf://org/b"}]}
    warnings: list[str] = []
    sets = ["lora=null", "data.train[0]=null", "training.steps=null", "training.schedule.warmupSteps=null"]

    job, _ = load_overridden(
        text(lora={}, data=data, training={"steps": 3}),
        None,
        [read_override(each) for each in sets],
        on_warning=warnings.append,
    )

    assert (job.spec.lora, job.spec.training.steps) == (None, None)
    assert [source.uri for source in job.spec.data.train] == ["hf://org/b"]
    assert warnings == []


def test_what_an_alias_of_yaml_shares_is_set_in_one_place() -> None:
    shared = text(data={}).replace("data: {}", "data: {train: [&one {uri: hf://org/data}, *one]}")

    job = overridden(shared, "data.train[0].split=train[:5]")

    assert [source.split for source in job.spec.data.train] == ["train[:5]", None]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            "training.lr=1e-5",
            "--set training.lr: unknown field spec.training.lr; did you mean spec.training.optimizer.learningRate?",
        ),
        ("trainning.steps=1", "--set trainning.steps: unknown field spec.trainning; did you mean training?"),
        ("training.evalution=null", "--set training.evalution: unknown field spec.training.evalution; did you mean "),
        ("training.steps=many", '--set training.steps: spec.training.steps: must be a whole number, got "many"'),
        ("model.uri=null", "--set model.uri: spec.model.uri: is required"),
        ("data.train[1].split=a", "--set data.train[1].split: spec.data.train[1].uri: is required"),
        (
            "data.train[2].uri=hf://a/b",
            "--set data.train[2].uri: spec.data.train has 1 item: the next one is spec.data.",
        ),
        (
            "data.train.uri=hf://a/b",
            "--set data.train.uri: spec.data.train is a list: say which item, as spec.data.tra",
        ),
        (
            "data.train.0.uri=hf://org/rows",
            "--set data.train.0.uri: spec.data.train is a list: say which item, as spec.data.train[0]",
        ),
        ("compute[0]=1", "--set compute[0]: spec.compute is a map, and has no items"),
        ("model.uri.name=a", '--set model.uri.name: spec.model.uri is "hf://org/model", and has no fields'),
        ("training.epochs=2", "--set training.epochs: spec.training: give training.steps or training.epochs, not both"),
        ("kind=SFTJob", "--set kind: unknown field spec.kind; allowed are model, lora, data, "),
        ("name=b", "--set name: unknown field spec.name; did you mean metadata.name or "),
        ("namespace=null", "--set namespace: unknown field spec.namespace; did you mean metadata.namespace?"),
        ("metdata.name=b", "--set metdata.name: unknown field spec.metdata; did you mean metadata?"),
        ("train[0].uri=hf://a/b", "--set train[0].uri: unknown field spec.train; did you mean spec.data.train?"),
        (
            "everySteps=5",
            "--set everySteps: unknown field spec.everySteps; did you mean spec.checkpoint.everySteps or "
            "spec.export.everySteps or spec.training.evaluation.everySteps?",
        ),
    ],
)
def test_what_is_wrong_is_said_as_of_a_manifest_and_whose_it_is(given: str, problem: str) -> None:
    (said,) = refused(text(training={"steps": 5}), given, "training.seed=1")

    assert said.startswith(problem)


def test_a_problem_of_the_manifest_itself_is_not_said_to_be_of_an_option() -> None:
    said = refused(text(compute={"nodes": 0}, training={"steps": 0}), "training.seed=-1")

    assert sorted(said) == [
        "--set training.seed: spec.training.seed: must be at least 0, got -1",
        "spec.compute.nodes: must be at least 1, got 0",
        "spec.training.steps: must be at least 1, got 0",
    ]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("training.steps", "is not PATH=VALUE"),
        ("=5", "is not PATH=VALUE"),
        ("data.train[x].uri=a", "is not PATH=VALUE"),
        ("data.train[0]uri=a", "is not PATH=VALUE"),
        ("training.steps=", "has no value: training.steps=null takes the field out"),
        ("training.steps=#5", "has no value: training.steps=null takes the field out"),
        ("training.steps=[", "is not YAML"),
        ("training.steps=a: b", "is not YAML"),
        ("training.steps=5\nseed: 6", "is more than one value"),
        ("training.steps=.nan", "is not a finite number"),
    ],
)
def test_what_is_no_override_is_wrong_usage(tmp_path: Path, given: str, problem: str) -> None:
    with pytest.raises(OverrideError, match=problem):
        read_override(given)
    (tmp_path / "job.yaml").write_text(text())
    done = sft("plan", tmp_path / "job.yaml", "--set", given)
    assert done.exit_code == 2
    assert "--set" in done.stderr


def test_of_several_jobs_the_one_that_is_named_is_changed_and_validate_changes_all() -> None:
    other = manifest()
    other["metadata"] = {"name": "other"}
    two = yaml.safe_dump_all([manifest(), other])
    steps = read_override("training.steps=7")

    assert overridden(two, "metadata.name=third", "training.steps=7", name="other").metadata.name == "third"
    assert load_manifest(two, "tiny").spec.training.steps is None
    assert [job.spec.training.steps for job in load_manifests(two, [steps])] == [7, 7]
    assert refused(two, "metadata.name=third") == ["the manifest holds 2 SFTJobs (tiny, other): choose one with --job"]


def test_what_is_changed_of_a_value_that_was_given_is_changed_anew_in_each_job() -> None:
    other = manifest()
    other["metadata"] = {"name": "other"}
    sets = ["data.train=[&a {uri: 'hf://org/a'}, *a, {uri: 'hf://org/b'}]", "data.train[0].split=test"]
    sets += ["data.train[2]=null"]

    jobs = load_manifests(yaml.safe_dump_all([manifest(), other]), [read_override(each) for each in sets])

    expected = [("hf://org/a", "test"), ("hf://org/a", None)]
    assert [[(source.uri, source.split) for source in job.spec.data.train] for job in jobs] == [expected, expected]


def test_a_manifest_that_is_valid_only_with_it_is_taken() -> None:
    job, alone = load_overridden(text(model={}), None, [read_override("model.uri=hf://org/model")])

    assert job.spec.model.uri == "hf://org/model"
    assert alone is None


def test_a_plan_says_what_the_command_line_decided(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text(training={"steps": 5, "seed": 1}))

    done = sft("plan", path, "--set", "training.steps=20", "--set", "training.optimizer.learningRate=2e-5")

    rows = {line[2:].split("  ")[0]: line for line in done.stdout.splitlines()[1:]}
    assert "20 steps" in rows["length"]
    assert " --set " in rows["length"]
    assert " --set " in rows["learning rate"]
    assert " given " in rows["seed"]
    assert " default " in rows["schedule"]
    assert "--set" not in sft("plan", path).stdout
    # What is set to its default was decided too, and what a manifest lacks is no reason to say nothing
    assert " --set " in sft("plan", path, "--set", "training.microBatchSize=1", "--set", "data.packing=none").stdout
    path.write_text(text(model={}))
    assert sft("plan", path, "--set", "model.uri=hf://org/model").exit_code == 0


def test_validate_says_with_what_it_is_valid_for_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text())

    done = sft("validate", path, "--set", "data.train[0].split=train[:100]")

    assert done.stdout == f"{path}: valid with --set 'data.train[0].split=train[:100]'\n"
    assert sft("validate", path, "--set", "training.steps=0").exit_code == 10
