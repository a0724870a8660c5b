"""A worker that runs the real trainer and writes down the gradients of every step, before they are clipped.

Started with the environment of a worker, and SFT_CAPTURE: the file rank 0 writes.
"""

import os
from pathlib import Path
from unittest.mock import patch

import torch

from sft_api.trainer_config import TrainerConfig
from sft_trainer import trainer
from sft_trainer.distributed import Ranks
from sft_trainer.strategies.fsdp import FsdpStrategy
from tests.tensors import gathered


def main() -> None:
    ranks = Ranks.from_environment()
    config = TrainerConfig.model_validate_json(Path(os.environ["SFT_CONFIG"]).read_text())
    captured: list[dict[str, torch.Tensor]] = []

    norm = FsdpStrategy.grad_norm

    def captured_norm(strategy: FsdpStrategy) -> torch.Tensor:
        captured.append(
            {
                name: gathered(parameter.grad).clone()
                for name, parameter in strategy.model.huggingface.named_parameters()
                if parameter.requires_grad
            }
        )
        return norm(strategy)

    with patch.object(FsdpStrategy, "grad_norm", captured_norm):
        trainer.Trainer(config, ranks, Path(os.environ["SFT_RUN_DIR"])).run()
    if ranks.rank == 0:
        torch.save(captured, os.environ["SFT_CAPTURE"])


if __name__ == "__main__":
    main()
