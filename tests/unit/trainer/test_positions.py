"""Documents of a micro-batch change nothing of one another, also not by their length."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.v1alpha1.model_config import ConfigOverrides
from sft_trainer.errors import ConfigError
from sft_trainer.models.overrides import config_of
from sft_trainer.models.positions import check_positions
from sft_trainer.preparation import prepare, prepare_model
from sft_trainer.reporting import Reporter
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_config, save_model

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}


class Config:
    """What is read of a model's configuration."""

    model_type = "some"
    max_position_embeddings = 256

    def __init__(self, rope_parameters: Any) -> None:
        self.rope_parameters = rope_parameters


@pytest.mark.parametrize(
    ("parameters", "longest"),
    [
        (LONGROPE, 64),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}, 64),
        ({"rope_type": "llama3", "original_max_position_embeddings": 64}, None),
        ({"rope_type": "default"}, None),
        ({"rope_type": "dynamic", "alpha": 1000.0}, 256),
        (None, 256),
    ],
)
def test_examples_are_not_longer_than_positions_and_where_they_change(parameters: Any, longest: int | None) -> None:
    check_positions(Config(parameters), longest or 100_000)
    if longest is not None:
        with pytest.raises(
            ConfigError, match=f"data.maxLength is {longest + 1}, .* data.maxLength to {longest} at most"
        ):
            check_positions(Config(parameters), longest + 1)


def test_frequencies_of_hunyuan_that_alpha_fixes_bound_no_length(tmp_path: Path) -> None:
    fixed = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    save_config("hunyuan_v1_dense", tmp_path, rope_parameters=fixed, max_position_embeddings=256)
    check_positions(config_of(tmp_path, None), 257)
    assert config_of(tmp_path, ConfigOverrides(max_position_embeddings=512)).max_position_embeddings == 512
    del fixed["alpha"]
    save_config("hunyuan_v1_dense", tmp_path, rope_parameters=fixed, max_position_embeddings=256)
    with pytest.raises(ConfigError, match=r"data\.maxLength is 257"):
        check_positions(config_of(tmp_path, None), 257)


def test_that_is_found_out_before_anything_is_tokenised(tmp_path: Path) -> None:
    save_model(
        "llama",
        tmp_path / "model",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        max_position_embeddings=256,
    )
    document = manifest(tmp_path, tmp_path / "store")
    document["spec"]["model"] = {"uri": f"file://{tmp_path}/model"}

    with pytest.raises(ConfigError, match=r"data\.maxLength is 512"):
        prepare(resolve(document), Reporter(tmp_path, writes=False), torch.device("cpu"))


def test_examples_beyond_the_positions_of_the_model_are_warned_of(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model", max_position_embeddings=256)
    document = manifest(tmp_path, tmp_path / "store")
    document["spec"]["model"] = {"uri": f"file://{tmp_path}/model"}
    reporter = Reporter(tmp_path, writes=False)

    prepare_model(resolve(document), reporter, torch.device("cpu"))
    (warning,) = reporter.progress.warnings
    assert warning.startswith("data.maxLength is 512, and the model has 256 positions")

    document["spec"]["model"]["configOverrides"] = {"max_position_embeddings": 512}
    reporter = Reporter(tmp_path, writes=False)
    prepare_model(resolve(document), reporter, torch.device("cpu"))
    assert reporter.progress.warnings == []
