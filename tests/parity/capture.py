"""A worker that runs the real trainer and writes down loss and gradients of every step.

Started with the environment of a worker, and SFT_CAPTURE: the file rank 0 writes.
"""

import os
from pathlib import Path

import torch

from sft_api.trainer_config import TrainerConfig
from sft_trainer.distributed import Ranks
from sft_trainer.models.causal_lm import clean_name
from sft_trainer.trainer import Trainer


class CapturingTrainer(Trainer):
    """The trainer as it is, with a look at the gradients just before the weights change."""

    captured: list[dict[str, torch.Tensor]]

    def _update(self, rate: float, *, is_finite: bool) -> None:
        gradients = {
            clean_name(name): parameter.grad.full_tensor().clone()  # type: ignore[union-attr, attr-defined]
            for name, parameter in self.model.named_parameters()
        }
        self.captured.append(gradients)
        super()._update(rate, is_finite=is_finite)


def main() -> None:
    ranks = Ranks.from_environment()
    config = TrainerConfig.model_validate_json(Path(os.environ["SFT_CONFIG"]).read_text())
    trainer = CapturingTrainer(config, ranks, Path(os.environ["SFT_RUN_DIR"]))
    trainer.captured = []
    trainer.run()
    if ranks.rank == 0:
        torch.save(trainer.captured, os.environ["SFT_CAPTURE"])


if __name__ == "__main__":
    main()
