"""What is looked at before the imports, and what is left to the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sft_api.checkpoints import attempt_key
from sft_api.place import DONE_KEY, Done, encode_done
from sft_api.progress import Phase
from sft_trainer import check as looking
from sft_trainer.check import check
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.data.added_tokens import numbers_of
from sft_trainer.data.tokenizer import load_tokenizer
from sft_trainer.errors import (
    AccessDeniedError,
    ConfigError,
    DataError,
    ModelError,
    StorageNotFoundError,
    StorageUnavailableError,
)
from sft_trainer.reporting import Reporter
from tests.hub_uploads import TOKEN, Fault, serve_uploads
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.parity.runs import manifest, resolve
from tests.peft_folders import adapters_in


@pytest.fixture
def job(tmp_path: Path, tiny_inputs: Any) -> dict[str, Any]:
    document = manifest(tmp_path, tmp_path / "store")
    document["spec"]["model"]["uri"] = f"file://{tiny_inputs.model}"
    document["spec"]["data"]["train"] = [{"uri": f"file://{tiny_inputs.train}"}]
    document["spec"]["data"]["eval"] = [{"uri": f"file://{tiny_inputs.eval}", "name": "held-out", "split": "test"}]
    return document


def look(job: dict[str, Any], folder: Path) -> Reporter:
    reporter = Reporter(folder, writes=True)
    check(resolve(job), reporter)
    return reporter


def test_what_is_good_passes_and_leaves_nothing_to_say(job: dict[str, Any], tmp_path: Path) -> None:
    progress = look(job, tmp_path).progress

    assert (progress.phase, progress.phase_detail, progress.warnings) == (Phase.STARTING, "", [])
    assert not [file for file in (tmp_path / "store").rglob("*") if file.is_file()]


def test_evaluation_data_is_looked_at_too(job: dict[str, Any], tmp_path: Path) -> None:
    job["spec"]["data"]["eval"][0]["split"] = "validation"
    with pytest.raises(DataError, match="no split 'validation', found test"):
        look(job, tmp_path)


def test_a_source_of_which_nothing_would_be_held_out_is_refused_at_once(job: dict[str, Any], tmp_path: Path) -> None:
    job["spec"]["data"] |= {"eval": [], "heldOut": {"fraction": 0.05}}
    job["spec"]["data"]["train"][0]["split"] = "train[:19]"
    with pytest.raises(DataError, match=r"of its 19 rows data\.heldOut\.fraction 0\.05 holds out none"):
        look(job, tmp_path)


def test_a_place_that_cannot_be_written_comes_first(job: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    job["spec"]["data"]["train"] = [{"uri": "file:///no/such/rows.jsonl"}]
    with pytest.raises(StorageNotFoundError, match="/store is a file in the way of a folder: remove or rename it"):
        look(job, tmp_path)


def test_a_complete_run_needs_no_place_to_write_to(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any) -> None:
        raise AccessDeniedError("read-only")

    monkeypatch.setattr(LocalStore, "create", denied)
    with pytest.raises(AccessDeniedError):
        look(job, tmp_path)
    (tmp_path / "store").mkdir(exist_ok=True)
    (tmp_path / "store" / DONE_KEY).write_bytes(encode_done(Done(step=4, attempt=1)))

    assert look(job, tmp_path).progress.phase is Phase.STARTING


def test_who_may_write_and_not_remove_is_refused_before_the_first_attempt_and_warned_after_it(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any) -> None:
        raise AccessDeniedError("the right to delete was revoked")

    monkeypatch.setattr(LocalStore, "delete", denied)
    with pytest.raises(AccessDeniedError, match="was revoked"):
        look(job, tmp_path)
    LocalStore(tmp_path / "store").put(attempt_key(1), b"a claim")

    (warning,) = look(job, tmp_path).progress.warnings
    assert "/store fills up, as what is kept no longer cannot be removed: the right to delete was revoked; " in warning


def test_a_source_that_does_not_answer_is_left_to_the_run(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def away(source: Any, *_: Any, **__: Any) -> None:
        looked.append(source.uri)
        raise StorageUnavailableError("the hub does not answer")

    monkeypatch.setattr(looking, "check_first_rows", away)
    look(job, tmp_path)
    assert len(looked) == 2


def test_adapters_that_the_run_does_not_train_are_found_by_the_config_of_the_model(
    job: dict[str, Any], tmp_path: Path
) -> None:
    # Given adapters of some layers, and a manifest that leaves all as it is by default
    folder = tmp_path / "adapters"
    layers = [f"model.layers.{block}.self_attn.{name}" for block in (0, 1) for name in ("q_proj", "v_proj")]
    adapters_in(folder, *layers, r=32, lora_alpha=32)
    job["spec"]["lora"] = {"adapterUri": f"file://{folder}"}
    with pytest.raises(
        ConfigError, match=r"^file://.*/adapters, which lora.adapterUri names: .* targetModules: \[q_proj,"
    ):
        look(job, tmp_path)
    # What it advises passes
    job["spec"]["lora"] |= {"rank": 32, "targetModules": ["q_proj", "v_proj"]}
    look(job, tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model.safetensors"):
        look(job, tmp_path)


def test_a_token_to_train_that_the_tokenizer_lacks_is_found_by_its_files(job: dict[str, Any], tmp_path: Path) -> None:
    job["spec"]["model"]["addedTokens"] = ["<ticket>"]
    job["spec"]["lora"] = {"trainableTokens": ["<ticket>"]}
    look(job, tmp_path)
    job["spec"]["lora"]["trainableTokens"].append("<other>")
    with pytest.raises(ConfigError, match=r"^lora.trainableTokens has '<other>', which is no token of the tokenizer"):
        look(job, tmp_path)


def test_a_token_that_transformers_alone_finds_is_left_to_the_run(job: dict[str, Any], tmp_path: Path) -> None:
    # Given a tokenizer whose files put a space before all texts, and whose class does not
    folder = tmp_path / "tokenizer"
    chat_tokenizer("chatml", "sentencepiece").save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "LlamaTokenizer"}))
    assert numbers_of(load_tokenizer(folder).backend_tokenizer, ["you"])

    job["spec"]["model"]["tokenizerUri"] = f"file://{folder}"
    job["spec"]["lora"] = {"trainableTokens": ["you"]}
    look(job, tmp_path)
    job["spec"]["lora"]["trainableTokens"].append("yóu")
    with pytest.raises(ConfigError, match=r"^lora.trainableTokens has 'yóu', which is no token of the tokenizer"):
        look(job, tmp_path)


def test_weights_that_are_quantised_otherwise_are_found_by_the_config_of_the_model(
    job: dict[str, Any], tmp_path: Path, tiny_inputs: Any
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_inputs.model, model)
    job["spec"]["model"]["uri"] = f"file://{model}"
    content = json.loads((model / "config.json").read_text())

    def asks_for(**fields: Any) -> None:
        (model / "config.json").write_text(json.dumps({**content, "quantization_config": fields}))

    asks_for(quant_method="awq", bits=4)
    with pytest.raises(ModelError, match=r"quant_method 'awq'.* name a checkpoint in model.uri that is not quantised"):
        look(job, tmp_path)
    asks_for(quant_method="fp8", weight_block_size=[128, 128])
    look(job, tmp_path)


def test_who_may_not_upload_is_refused_before_the_first_attempt_and_not_after_it(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_uploads() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_read")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        job["spec"]["export"] = {"hub": {"repository": "org/mine"}}
        with pytest.raises(AccessDeniedError, match=r"/org/mine.*to a token that may write there"):
            look(job, tmp_path)
        LocalStore(tmp_path / "store").put(attempt_key(1), b"{}")
        look(job, tmp_path)
        assert "the export cannot be uploaded as it is now" in caplog.text

        # Who may finds what it needs, and a hub that is away is left to the end
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        look(job, tmp_path)
        assert hub.repositories["org/mine"].private
        hub.faults.append(Fault("GET", "/auth-check/write", 503))
        look(job, tmp_path)
        assert hub.faults == []
    # No run without the field asks the hub
    del job["spec"]["export"]["hub"]
    look(job, tmp_path)
    assert len([request for request in hub.asked if "auth-check" in request]) == 4
