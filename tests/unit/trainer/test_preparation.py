"""What a process says while it fetches what it trains."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.progress import Activity, Phase
from sft_api.rundir import ACTIVITY_FOLDER
from sft_trainer import preparation
from sft_trainer.data.source_rows import SourceRows
from sft_trainer.errors import StorageUnavailableError
from sft_trainer.preparation import prepare
from sft_trainer.prepared import Prepared
from sft_trainer.reporting import Reporter
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_model

TOKENIZER = "s3://bucket/tokenizer"


def looks(folder: Path) -> tuple[Phase, str]:
    activity = Activity.model_validate_json((folder / ACTIVITY_FOLDER / "rank-0.json").read_bytes())
    return activity.phase, activity.detail


def test_a_download_of_another_tokenizer_says_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a model whose tokenizer is somewhere else, and takes long
    save_model("llama", tmp_path / "model")
    document = manifest(tmp_path, tmp_path / "store")
    document["spec"]["model"] = {"uri": f"file://{tmp_path}/model", "tokenizerUri": TOKENIZER}
    reporter = Reporter(tmp_path, writes=False)
    said: list[tuple[Phase, str]] = []

    def localise(uri: str, *_: Any, kind: str, on_progress: Any, **__: Any) -> Path:
        if kind == "model":
            return tmp_path / "model"
        said.append(looks(tmp_path))
        reporter._last_alive = 0.0
        on_progress(3 * 2**29)
        said.append(looks(tmp_path))
        raise StorageUnavailableError("that is enough")

    monkeypatch.setattr(preparation, "localise", localise)

    # When it is fetched
    with pytest.raises(StorageUnavailableError, match="that is enough"):
        prepare(resolve(document), reporter, torch.device("cpu"))

    # Then this process says what it does, and how far it is
    assert said == [(Phase.LOADING, f"looking for {TOKENIZER}"), (Phase.DOWNLOADING, f"{TOKENIZER}: 1.5 GiB")]


def test_what_became_of_rows_is_said_with_the_source_that_had_them(
    tmp_path: Path, tiny_inputs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given two sources, one of which has three rows and one of them without an answer
    monkeypatch.setenv("SFT_CACHE_DIR", str(tmp_path / "cache"))
    rows = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [json.dumps({"messages": turns}) for turns in (rows, rows, rows[:1])]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    sources = [{"uri": f"file://{path}"} for path in (tiny_inputs.train, tmp_path / "few.jsonl")]
    reporter = Reporter(tmp_path, writes=True)

    # When they are tokenised
    document = manifest(tiny_inputs.model.parent, tmp_path, data={"train": sources}, training={"globalBatchSize": 4})
    with caplog.at_level(logging.INFO):
        prepare(resolve(document), reporter, torch.device("cpu"))

    # Then the warning names the source, and the log counts what is trained of each, also where nothing was dropped
    (warning,) = reporter.progress.warnings
    assert warning.startswith(f"{sources[1]['uri']}: 1 rows (33.3%) were dropped because no token of them is trained")
    (whole,) = (text for text in caplog.messages if text.startswith(f"{sources[0]['uri']}: 300 rows; 300 examples of "))
    assert " tokens in all, " in whole
    assert f"{sources[1]['uri']}: 3 rows, 1 dropped without a trained token; 2 examples of " in caplog.text


def test_rows_of_all_sources_that_are_held_out_are_one_set_beside_the_others(
    tmp_path: Path, tiny_inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two sources, of which one in ten rows is held out, and an evaluation set besides
    monkeypatch.setenv("SFT_CACHE_DIR", str(tmp_path / "cache"))
    train = [{"uri": f"file://{tiny_inputs.train}", "split": f"train[{part}]"} for part in (":40", "40:60")]
    evaluation = [{"uri": f"file://{tiny_inputs.eval}", "split": "test[:5]", "name": "other"}]

    def prepared(seed: int, **data: Any) -> Prepared:
        sections = {"data": {"train": train, "eval": evaluation, **data}, "training": {"seed": seed}}
        config = resolve(manifest(tiny_inputs.model.parent, tmp_path, **sections))
        return prepare(config, Reporter(tmp_path, writes=False), torch.device("cpu"))

    # When they are prepared
    ready, whole = prepared(1, heldOut={"fraction": 0.1}), prepared(1)

    # Then they are trained without it, and it is the set that comes last
    assert [each.report.rows for each in ready.train] == [36, 18]
    assert (ready.epoch_size, whole.epoch_size) == (54, 60)
    assert [*ready.eval] == ["other", "held-out"]
    assert [each.report.rows for each in ready.eval["held-out"].sources] == [4, 2]
    assert len(ready.sources) == 5

    # And the same rows are held out with another seed
    assert prepared(2, heldOut={"fraction": 0.1}).eval["held-out"].digest == ready.eval["held-out"].digest


def test_a_warm_up_of_more_steps_than_the_data_gives_is_warned_of(
    tmp_path: Path, tiny_inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_CACHE_DIR", str(tmp_path / "cache"))
    document = manifest(tiny_inputs.model.parent, tmp_path)
    document["spec"]["training"] = {"epochs": 1, "globalBatchSize": 30, "schedule": {"warmupSteps": 50}}
    reporter = Reporter(tmp_path, writes=False)

    prepare(resolve(document), reporter, torch.device("cpu"))

    (warning,) = reporter.progress.warnings
    assert warning.startswith("training.schedule.warmupSteps is 50, and the run has 10 steps: ")


def test_data_is_looked_for_downloaded_and_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path / "model")
    reporter = Reporter(tmp_path, writes=False)
    said = []

    def open_source(source: Any, *, on_fetch: Any, **_: Any) -> SourceRows:
        said.append(looks(tmp_path))
        on_fetch(2**29)
        said.append(looks(tmp_path))
        return SourceRows(source.uri, "", ())

    def tokenize_source(*_: Any, on_progress: Any, **__: Any) -> None:
        on_progress(0, 5)
        said.append(looks(tmp_path))
        raise StorageUnavailableError("that is enough")

    monkeypatch.setattr(preparation, "load_with_new_tokens", lambda *_: (None, range(0)))
    monkeypatch.setattr(preparation, "open_source", open_source)
    monkeypatch.setattr(preparation, "tokenize_source", tokenize_source)
    with pytest.raises(StorageUnavailableError, match="that is enough"):
        prepare(resolve(manifest(tmp_path, tmp_path / "store")), reporter, torch.device("cpu"))

    uri = f"file://{tmp_path}/data/train.jsonl"
    assert said == [
        (Phase.LOADING, f"looking for {uri}"),
        (Phase.DOWNLOADING, f"{uri}: 0.5 GiB"),
        (Phase.TOKENIZING, f"{uri}: 0/5 rows"),
    ]
