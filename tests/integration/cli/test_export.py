"""``sft export``: which checkpoint it takes, where it writes, and what it refuses in words."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result

import sft_cli.export
from sft_api.checkpoints import RunState
from sft_api.numbers import Numbers
from sft_api.v1alpha1 import LoraSpec, SFTJob
from sft_cli.main import cli
from sft_trainer.checkpoint.catalog import KeepPolicy
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest, companion_digests
from sft_trainer.models.lora import add_adapters, is_adapter
from sft_trainer.models.tensors import whole_boxes
from tests.exports import save
from tests.topologies import here
from tests.unit.checkpoint.boxed import whole

Place = Any


def manifest(inputs: Any, folder: Path, **sections: Any) -> dict[str, Any]:
    spec = {
        "model": {"uri": f"file://{inputs.model}"},
        "data": {"train": [{"uri": f"file://{inputs.train}"}]},
        "checkpoint": {"uri": f"file://{folder}/run"},
        "compute": {"gpusPerNode": 0},
        **sections,
    }
    return {"apiVersion": "sftjob.dev/v1alpha1", "kind": "SFTJob", "metadata": {"name": "tiny"}, "spec": spec}


def sft(folder: Path, document: dict[str, Any], *options: str) -> Result:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    return CliRunner().invoke(cli, ["export", str(file), *options])


def checkpoint(
    inputs: Any,
    document: dict[str, Any],
    step: int,
    uid: str = "job",
    companions: dict[str, str] | None = None,
    **metrics: float,
) -> None:
    """One whose norms hold the number of its step."""
    model = build_on_meta(inputs.model)
    tensors = {
        box.name: torch.full(box.shape, float(step)) if box.name.endswith("norm.weight") else torch.zeros(box.shape)
        for box in whole_boxes(model)
    }
    store = LocalStore(document["spec"]["checkpoint"]["uri"].removeprefix("file://"))
    numbers = Numbers.of(SFTJob.from_manifest(document).spec).as_record()
    if uid == "job":
        save(whole(tensors), store, step, numbers=numbers, metrics=metrics, companions=companions)
        return
    manager = CheckpointManager(store, here())
    manager.claim_attempt(uid)
    manager.save(step, whole(tensors), RunState(numbers=numbers), asynchronous=False, keep=KeepPolicy(last=99))


def exported_step(folder: Path) -> int:
    """Of which step the model in ``folder`` is, which transformers can load."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).chat_template
    return int(AutoModelForCausalLM.from_pretrained(folder).base_model.norm.weight[0])


@pytest.fixture
def run(tmp_path: Path, tiny_inputs: Any) -> dict[str, Any]:
    """The manifest of a run with three checkpoints, of which the second is the best."""
    document = manifest(tiny_inputs, tmp_path)
    for step, loss in ((2, 1.5), (4, 1.0), (6, 1.2)):
        checkpoint(tiny_inputs, document, step, evalLoss=loss)
    return document


@pytest.mark.parametrize(("options", "step"), [((), 6), (("--best",), 4), (("--step", "2"), 2)])
def test_the_newest_the_best_or_any_step(tmp_path: Path, run: dict[str, Any], options: Any, step: int) -> None:
    done = sft(tmp_path, run, *options)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path}/run/export\n"), done.stderr
    assert f"Exporting step {step} of tiny from file://{tmp_path}/run/checkpoints/step-" in done.stderr
    assert exported_step(tmp_path / "run" / "export") == step
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert f"| steps | {step} |" in card


def test_a_folder_that_no_manifest_could_name_is_no_reason_to_refuse_what_sft_run_saved_there(
    tmp_path: Path, tiny_inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is one below /mnt/pvc, where a pod with a shell finds a claim: a manifest has to name the claim."""
    folder = tmp_path / "of two\nlines"
    folder.mkdir()
    monkeypatch.chdir(folder)
    document = manifest(tiny_inputs, tmp_path)
    checkpoint(tiny_inputs, document, 2)
    (folder / "sft-runs").mkdir()
    (tmp_path / "run").rename(folder / "sft-runs" / "tiny")
    del document["spec"]["checkpoint"]

    done = sft(tmp_path, document)

    assert (done.exit_code, done.stdout) == (0, f"{folder}/sft-runs/tiny/export\n"), done.stderr
    assert "--from: uri: must be s3://" in sft(tmp_path, document, "--from", str(folder)).stderr


def test_adapters_are_exported_alone_or_merged_as_the_manifest_says(tmp_path: Path, tiny_inputs: Any) -> None:
    # Given the checkpoint of a run with adapters
    document = manifest(tiny_inputs, tmp_path, lora={"rank": 2})
    model = build_on_meta(tiny_inputs.model)
    digest = base_digest(model, tiny_inputs.model)
    add_adapters(model.huggingface, LoraSpec(rank=2))
    tensors = {box.name: torch.full(box.shape, 0.1) for box in whole_boxes(model) if is_adapter(box.name)}
    numbers = Numbers.of(SFTJob.from_manifest(document).spec).as_record()
    save(whole(tensors), LocalStore(tmp_path / "run"), 5, numbers=numbers, base_digest=digest)

    # When it is exported by two manifests
    alone = sft(tmp_path, document)
    document["spec"]["export"] = {"mergeAdapter": True}
    merged = sft(tmp_path, document, "--to", f"file://{tmp_path}/merged")

    # Then the one has adapters, the other a model
    assert (alone.exit_code, merged.exit_code) == (0, 0), alone.stderr + merged.stderr
    assert {file.name for file in (tmp_path / "run" / "export").glob("*.safetensors")} == {"adapter_model.safetensors"}
    from transformers import AutoModelForCausalLM

    name = "model.layers.0.mlp.up_proj.weight"
    base, with_them = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_parameter(name)
        for folder in (tiny_inputs.model, tmp_path / "merged")
    )
    torch.testing.assert_close(with_them, base + 2 * 0.1 * 0.1, rtol=2**-7, atol=1e-3)


def test_another_place_to_read_and_to_write(tmp_path: Path, run: dict[str, Any]) -> None:
    (tmp_path / "run").rename(tmp_path / "moved")
    done = sft(tmp_path, run, "--from", f"file://{tmp_path}/moved/", "--to", f"file://{tmp_path}/model")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path}/model\n"), done.stderr
    assert exported_step(tmp_path / "model") == 6
    named = {**run, "spec": {**run["spec"], "export": {"atEnd": False, "uri": f"file://{tmp_path}/named"}}}
    assert sft(tmp_path, named, "--from", f"file://{tmp_path}/moved").stdout == f"{tmp_path}/named\n"


def test_files_that_changed_since_are_named(tmp_path: Path, tiny_inputs: Any) -> None:
    # Given checkpoints of a model, the last of which tell what lay beside its weights
    model = Path(shutil.copytree(tiny_inputs.model, tmp_path / "model"))
    document = manifest(tiny_inputs, tmp_path, model={"uri": f"file://{model}"})
    checkpoint(tiny_inputs, document, 2)
    checkpoint(tiny_inputs, document, 4, companions=companion_digests(model, model))
    assert "Warning" not in sft(tmp_path, document).stderr

    # When files of the model become others
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text((model / name).read_text() + "\n")

    # Then the export goes on and names them; of what a checkpoint does not tell nothing is said
    done = sft(tmp_path, document)
    assert done.exit_code == 0
    assert re.search(
        r"Warning: files beside .* \(config\.json: .*, tokenizer_config\.json: '\w+' -> '\w+'\)", done.stderr
    )
    assert "Warning" not in sft(tmp_path, document, "--step", "2").stderr


def test_one_of_several_jobs_is_asked_for(tmp_path: Path, run: dict[str, Any], tiny_inputs: Any) -> None:
    checkpoint(tiny_inputs, run, 3, uid="another")
    asked = sft(tmp_path, run)
    assert asked.exit_code == 10
    assert "of 2 jobs lie in" in asked.stderr
    assert "--uid another has step 3; --uid job has steps 2, 4, 6" in asked.stderr
    assert sft(tmp_path, run, "--uid", "another").exit_code == 0
    assert exported_step(tmp_path / "run" / "export") == 3
    assert "there is no checkpoint in" in sft(tmp_path, run, "--uid", "nobody").stderr


def test_what_cannot_be_exported_is_refused_in_words(tmp_path: Path, run: dict[str, Any], tiny_inputs: Any) -> None:
    def refused(document: dict[str, Any], *options: str, code: int = 10) -> str:
        done = sft(tmp_path, document, *options)
        assert done.exit_code == code, done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "run" / "export").exists()
        return str(done.stderr)

    assert "there is no checkpoint of step 5 in" in (said := refused(run, "--step", "5"))
    assert "/run, but of steps 2, 4, 6" in said
    assert "--step and --best choose a checkpoint in two ways" in refused(run, "--step", "2", "--best", code=2)
    # Places that it would overwrite
    for to, words in (
        (f"file://{tiny_inputs.model}", "overwrite what the run starts from"),
        (f"file://{Path(tiny_inputs.train).parent}", "among the data"),
        (f"file://{tmp_path}/run/checkpoints", "among the checkpoints"),
        (f"file://{tmp_path}", "among the checkpoints"),
    ):
        assert re.search(rf"--to {to}: spec: export\.uri .*{words}", refused(run, "--to", to))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert "among the checkpoints" in refused(run, "--to", f"file://{tmp_path}/link")
    assert 'must be s3://bucket/prefix, pvc://claim/path or file:///absolute/path, got "model"' in refused(
        run, "--to", "model"
    )
    assert "the claim 'c' is not mounted" in refused(run, "--to", "pvc://c/model", code=14)
    # Another run than that of the manifest
    other = {**run, "spec": {**run["spec"], "training": {"steps": 9}}}
    assert "of a run with other settings (training.steps" in refused(other)
    assert "of a run with other settings (training.steps" in refused(run, "--set", "training.steps=9")
    # Nothing there
    assert "there is no checkpoint in" in refused(
        run, "--from", f"file://{tiny_inputs.model}", "--to", f"file://{tmp_path}/x"
    )
    assert "the folder" in refused(run, "--from", f"file://{tmp_path}/none", code=14)


def test_without_an_evaluation_none_is_the_best(tmp_path: Path, tiny_inputs: Any) -> None:
    document = manifest(tiny_inputs, tmp_path)
    checkpoint(tiny_inputs, document, 2)
    done = sft(tmp_path, document, "--best")
    assert done.exit_code == 10
    assert "was evaluated, so that none is the best: give --step (step 2)" in done.stderr


def test_a_damaged_checkpoint_is_named_with_others_to_take(tmp_path: Path, run: dict[str, Any]) -> None:
    # Given the newest with other bytes, and the one before it cut short
    newest = tmp_path / "run" / "checkpoints" / "step-00000006-a00003"
    (file,) = newest.glob("*.bin")
    file.write_bytes(bytes(file.stat().st_size))
    (file,) = newest.with_name("step-00000004-a00002").glob("*.bin")
    file.write_bytes(b"")

    done = sft(tmp_path, run)

    assert done.exit_code == 10
    assert "Warning: checkpoint step-00000004-a00002: " in done.stderr
    assert f"the checkpoint file://{newest} is damaged, and is not exported: " in done.stderr
    assert (
        f"restore it, or export another one with --step: there is step 2 (sft checkpoints list file://{tmp_path}"
        in (done.stderr)
    )
    assert not (tmp_path / "run" / "export" / "config.json").exists()


def test_a_checkpoint_that_a_run_removes_meanwhile_is_not_called_damaged(
    tmp_path: Path, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one of now is taken then; of a step that was asked for it is said that it is not there."""
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    really = sft_cli.export.export_checkpoint

    def removed_meanwhile(*arguments: Any, **options: Any) -> None:
        if len(folders) > 1:
            shutil.rmtree(folders.pop())
        really(*arguments, **options)

    monkeypatch.setattr(sft_cli.export, "export_checkpoint", removed_meanwhile)

    asked = sft(tmp_path, run, "--step", "6")
    assert asked.exit_code == 10
    assert "step-00000006-a00003 was removed meanwhile, by the run that trains there\n" in asked.stderr
    assert "there is no checkpoint of step 6 in " in asked.stderr
    done = sft(tmp_path, run)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path}/run/export\n"), done.stderr
    assert exported_step(tmp_path / "run" / "export") == 2
    assert "damaged" not in asked.stderr + done.stderr


def test_of_a_damaged_checkpoint_that_is_the_only_one_that_is_said(tmp_path: Path, tiny_inputs: Any) -> None:
    document = manifest(tiny_inputs, tmp_path)
    checkpoint(tiny_inputs, document, 2)
    (file,) = (tmp_path / "run" / "checkpoints").glob("*/*.bin")
    file.write_bytes(bytes(file.stat().st_size))

    done = sft(tmp_path, document)

    assert done.exit_code == 10
    assert "is damaged, and is not exported: " in done.stderr
    assert "; restore it: there is no other (sft checkpoints list file://" in done.stderr


def test_what_is_fetched_is_told(
    tmp_path: Path, run: dict[str, Any], tiny_inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a model and a tokenizer in buckets that answer slowly
    def localise(uri: str, *_: Any, on_progress: Any, **__: Any) -> Path:
        on_progress(5 * 2**20)
        on_progress(12 * 2**20)
        return Path(tiny_inputs.model)

    monkeypatch.setattr("sft_cli.export.localise", localise)
    monkeypatch.setattr("sft_cli.told._SECONDS_BETWEEN_LINES", 0.0)
    places = {"uri": "s3://bucket/model", "tokenizerUri": "s3://bucket/tokenizer"}
    monkeypatch.setattr("sft_cli.export.check_same_run", lambda *_: None)

    done = sft(tmp_path, {**run, "spec": {**run["spec"], "model": places}})

    assert done.exit_code == 0, done.stderr
    for uri in places.values():
        assert f"Fetching {uri} ...\n5 MiB of {uri} fetched\n12 MiB of {uri} fetched\n" in done.stderr
    assert "\n0 MiB read and written\n" in done.stderr
