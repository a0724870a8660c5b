"""What the strategy on Megatron-Core refuses, before Megatron is imported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_trainer.errors import ConfigError
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.strategies.megatron.refused import check
from sft_trainer.topology import Topology
from sft_trainer.trainable import EVERYTHING, Trainable
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_model


def refuse(
    path: Path,
    *,
    sections: dict[str, Any] | None = None,
    trainable: Trainable = EVERYTHING,
    sequence_parallel: bool = False,
    kind: str = "qwen3",
    model: dict[str, Any] | None = None,
    **degrees: int,
) -> None:
    save_model(kind, path, **(model or {}))
    blueprint = build_on_meta(path)
    for name, value in (model or {}).items():
        setattr(blueprint.huggingface.config, name, value)
    job = manifest(path, path.with_name("store"), **{"model": {"uri": f"file://{path}"}, **(sections or {})})
    world = 1
    for degree in degrees.values():
        world *= degree
    topology = Topology(0, 0, world, world, **degrees)
    check(resolve(job), blueprint, trainable, topology, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trainable": Trainable(trains=lambda name: "q_proj" in name)}, "adapters"),
        ({"sections": {"training": {"compile": True}}}, r"training\.compile"),
        ({"sections": {"strategy": {"fsdp": {"cpuOffload": True}}}}, "cpuOffload"),
        ({"sections": {"training": {"optimizer": {"stateDtype": "bf16"}}}}, "stateDtype bf16"),
        ({"kind": "qwen3_moe", "sections": {"training": {"routerAuxLossCoefficient": 0.1}}}, "routerAuxLoss"),
        ({"model": {"attention_dropout": 0.1}}, "dropout"),
        ({"sequence": 2}, "share tokens"),
        ({"replicate": 2}, "replicas"),
        ({"sequence_parallel": True}, "sequence parallelism without tensor"),
        ({"kind": "granite", "model": {"logits_scaling": 6.0}}, "scaled or capped"),
        ({"model": {"hidden_act": "gelu"}}, "other than silu"),
        ({"kind": "qwen3_moe", "tensor": 2}, "experts under tensor parallelism"),
    ],
)
def test_what_it_does_not_compute_is_refused_in_words(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy.megatron does not know .*{words}"):
        refuse(tmp_path, **options)


@pytest.mark.parametrize("options", [{}, {"tensor": 2, "sequence_parallel": True}, {"kind": "qwen3_moe", "shard": 2}])
def test_other_jobs_are_not(tmp_path: Path, options: dict[str, Any]) -> None:
    refuse(tmp_path, **options)


def test_neither_the_trainer_nor_these_rules_import_megatron() -> None:
    """It takes seconds, and most images do not have it."""
    program = (
        "import sys, sft_trainer.trainer, sft_trainer.strategies.megatron.refused, "
        "sft_trainer.strategies.megatron.layout; sys.exit(any(name.startswith('megatron') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
