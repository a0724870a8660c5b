"""Manifests from files: which documents count, and how every fault is said."""

from pathlib import Path

import pytest

from sft_cli.manifest import ManifestError, load_manifest, load_manifests
from sft_cli.problems import field_path

MINIMAL = """\
apiVersion: sftjob.dev/v1alpha1
kind: SFTJob
metadata: {name: job}
spec:
  model: {uri: hf://org/name}
  data: {train: [{uri: hf://org/rows}]}
  compute: {}
"""
SECRET = "apiVersion: v1\nkind: Secret\nmetadata: {name: keys}\n"


def job(spec: str) -> str:
    """The minimal manifest with a line of its spec replaced (same first word) or added."""
    word = spec.split(":")[0]
    kept = [line for line in MINIMAL.splitlines() if not line.startswith(f"  {word}:")]
    return "\n".join([*kept, f"  {spec}", ""])


def problems(text: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        load_manifests(text)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def test_a_file_or_text_gives_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())

    assert load_manifest(path) == load_manifest(MINIMAL)
    assert load_manifest(MINIMAL).metadata.name == "job"


def test_other_kinds_in_the_file_are_passed_over() -> None:
    assert load_manifest(f"{SECRET}---\n{MINIMAL}---\n").metadata.name == "job"


def test_lists_are_opened() -> None:
    items = MINIMAL.replace("\n", "\n  ")
    text = f"apiVersion: v1\nkind: List\nitems:\n- {items.rstrip()}\n"

    assert [found.metadata.name for found in load_manifests(text)] == ["job"]


def test_several_jobs_are_for_those_who_ask_for_several() -> None:
    text = f"{MINIMAL}---\n{MINIMAL.replace('name: job', 'name: other')}"

    assert [found.metadata.name for found in load_manifests(text)] == ["job", "other"]
    with pytest.raises(ManifestError, match=r"holds 2 SFTJobs \(job, other\): give a file with one"):
        load_manifest(text)


def test_faults_of_several_jobs_say_which() -> None:
    text = f"{MINIMAL}---\n{job('suspend: 1')}"

    assert problems(text) == ["SFTJob 2 of 2: spec.suspend: must be true or false, got 1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the manifest holds no SFTJob: give apiVersion: sftjob.dev/v1alpha1 and kind: SFTJob"),
        (SECRET, "the manifest holds no SFTJob: give apiVersion: sftjob.dev/v1alpha1 and kind: SFTJob"),
        ("a: [", "the manifest is not a YAML file: line 1: "),
        ("job.yaml", 'must be a map of fields, got "job.yaml"'),
        (MINIMAL.replace("kind: SFTJob", "kind: SftJob"), 'kind: must be SFTJob, got "SftJob"'),
        (MINIMAL.replace("kind: SFTJob\n", ""), "kind: is required"),
        (MINIMAL.replace("v1alpha1", "v1"), 'apiVersion: must be sftjob.dev/v1alpha1, got "sftjob.dev/v1"'),
    ],
)
def test_what_is_no_manifest(text: str, expected: str) -> None:
    (problem,) = problems(text)

    assert problem.startswith(expected)


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"absent\.yaml: No such file or directory"):
        load_manifest(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match=r"binary\.yaml is not a YAML file: "):
        load_manifest(binary)


SENTENCES = {
    "training: {steps: 1, epochs: 1}": "spec.training: give training.steps or training.epochs, not both",
    "data: {train: [{uri: hf://org/rows}], maxlength: 5}": "unknown field spec.data.maxlength; did you mean maxLength?",
    "data: {train: [{uri: hf://org/rows}], max_length: 5}": "unknown field spec.data.max_length; did you mean "
    "maxLength?",
    "model: {uri: hf://org/name, max_length: 5}": "unknown field spec.model.max_length; did you mean "
    "spec.data.maxLength?",
    "learningRate: 1e-5": "unknown field spec.learningRate; did you mean spec.training.optimizer.learningRate?",
    "name: job": "unknown field spec.name",
    "lora: {}": "unknown field spec.lora",
    "data: {train: [{url: hf://org/rows, uri: hf://org/rows}]}": "unknown field spec.data.train[0].url; did you mean "
    "uri?",
    "data: {train: [{split: train}]}": "spec.data.train[0].uri: is required",
    "data: {train: []}": "spec.data.train: must have at least 1 item, got 0",
    "data: {train: [{uri: hf://org/rows}], packing: bfd}": 'spec.data.packing: must be one of none, ffd, got "bfd"',
    "data: {train: [{uri: hf://org/rows}], maxLength: 2000000}": "spec.data.maxLength: must be at most 1048576, "
    "got 2000000",
    "data: {train: [{uri: hf://org/rows}], maxLength: 1}": "spec.data.maxLength: must be at least 8, got 1",
    "data: {train: hf://org/rows}": 'spec.data.train: must be a list, got "hf://org/rows"',
    "data: {train: {uri: hf://org/rows}}": "spec.data.train: must be a list, got a map",
    "model: [hf://org/name]": "spec.model: must be a map of fields, got a list",
    "model: {uri: 5}": "spec.model.uri: must be a string, got 5; put it in quotes",
    "model: {uri: llama}": "spec.model.uri: must be hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path or "
    'file:///absolute/path, got "llama"',
    "compute: {image: yes}": "spec.compute.image: must be a string, got true; put it in quotes",
    "compute: {labels: team}": 'spec.compute.labels: must be a map, got "team"',
    'compute: {image: ""}': "spec.compute.image: must have at least 1 character, got 0",
    "compute: {cacheSize: 5GB}": 'spec.compute.cacheSize: must be a quantity such as 2, 500m or 64Gi, got "5GB"',
    "compute: {env: [{name: RANK, value: a}]}": "spec.compute.env[0].name: this environment variable is set by the "
    'supervisor and cannot be given, got "RANK"',
    'training: {steps: "100"}': 'spec.training.steps: must be a whole number, got "100"; leave the quotes out',
    "training: {steps: many}": 'spec.training.steps: must be a whole number, got "many"',
    "training: {steps: 1.5}": "spec.training.steps: must be a whole number, got 1.5",
    "training: {optimizer: {learningRate: 0}}": "spec.training.optimizer.learningRate: must be greater than 0, got 0",
    "training: {optimizer: {betas: [0.9, 1.0]}}": "spec.training.optimizer.betas[1]: must be less than 1, got 1",
    'training: {optimizer: {learningRate: "1e-5"}}': "spec.training.optimizer.learningRate: must be a number, got "
    '"1e-5"; leave the quotes out',
    "training: {seed: 99999999999}": "spec.training.seed: must be at most 4294967295, got 99999999999",
    "suspend: 'yes'": 'spec.suspend: must be true or false, got "yes"; leave the quotes out',
}


@pytest.mark.parametrize(("spec", "sentence"), SENTENCES.items(), ids=lambda text: text[:50])
def test_every_fault_is_one_sentence_with_path_and_value(spec: str, sentence: str) -> None:
    assert problems(job(spec)) == [sentence]


def test_all_faults_are_said_in_the_order_of_the_fields() -> None:
    text = job("training: {steps: 1, epochs: 1, globalBatchSize: 1, globalBatchTokens: 1}") + "  suspend: 1\n"

    assert problems(text) == [
        "spec.training: give training.steps or training.epochs, not both",
        "spec.training: give training.globalBatchSize or training.globalBatchTokens, not both",
        "spec.suspend: must be true or false, got 1",
    ]


def test_faults_of_the_metadata() -> None:
    assert problems(MINIMAL.replace("name: job", "name: Job")) == [
        "metadata.name must be at most 50 lower-case letters, digits and -, starting with a letter: it names a "
        "Service and the pods"
    ]
    assert problems(MINIMAL.replace("{name: job}", "{generateName: job-}")) == ["metadata.name: is required"]
    assert problems(MINIMAL.replace("{name: job}", "{name: job, lables: {}}")) == [
        "unknown field metadata.lables; did you mean labels?"
    ]


def test_long_values_are_cut() -> None:
    (problem,) = problems(job(f"model: {{uri: {'a' * 500}}}"))

    assert problem.endswith("aaa…")
    assert len(problem) < 250


def test_paths_are_written_as_kubernetes_does() -> None:
    assert field_path(("spec", "data", "train", 0, "uri")) == "spec.data.train[0].uri"
    assert field_path(()) == ""
