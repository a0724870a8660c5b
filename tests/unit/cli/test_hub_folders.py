"""Where things of the hub are on this machine is what its own library says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft_cli.hub_folders import hub_cache, hub_token_file
from sft_cli.local_model import model_shape

from .jobs import job


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"XDG_CACHE_HOME": "/c"},
        {"HF_HOME": "~/hub"},
        {"HF_HOME": "$HOME/hub", "XDG_CACHE_HOME": "/c"},
        {"HF_HUB_CACHE": "/h", "HUGGINGFACE_HUB_CACHE": "/old", "HF_TOKEN_PATH": "~/t"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hub"},
    ],
)
def test_folders_are_those_of_the_library(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"HOME": "/home/me", "PATH": os.environ["PATH"], **given}
    program = "from huggingface_hub import constants as c; print(c.HF_HUB_CACHE, c.HF_TOKEN_PATH)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    monkeypatch.setenv("HOME", "/home/me")

    assert [str(hub_cache(environment)), str(hub_token_file(environment))] == done.stdout.split()


def test_a_user_without_a_home_has_no_cache_and_that_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a container runs with a number of its own for the user."""
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)

    assert model_shape(job(model={"uri": "hf://org/model"}).spec) is None


def test_a_model_is_known_by_its_config_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "vocab_size": 512, "intermediate_size": 128, **sizes}
    folder = tmp_path / "models--org--own"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    assert model_shape(job(model={"uri": "hf://org/own"}).spec) is not None
