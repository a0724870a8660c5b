"""One run of our trainer, or of a bare loop beside it, for the benchmark: step by step, as it is told.

    python -m tests.bench.own_run trainer|bare

Started with the environment of a worker. Waits for a line before every step, and prints one after it
(``taking_turns``). Times are of this process on the processor: what else the machine does does not count. ``bare`` is
the model of the trainer with its attention and its loss over the same bins, without sharding, checkpoints, reports, and
all else that a trainer does.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from sft_api.trainer_config import TrainerConfig
from sft_trainer.data.feed import Shares
from sft_trainer.distributed import Ranks
from sft_trainer.events import Control, Listener, Started, StepDone
from sft_trainer.models.attention import IMPLEMENTATION, register
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.optim import build_optimizer
from sft_trainer.preparation import prepare
from sft_trainer.reporting import Reporter
from sft_trainer.trainer import Trainer

from .taking_turns import Turn


class Turns(Listener):
    """Tells of every step, and waits until the next one may begin."""

    def __init__(self) -> None:
        self._turn = Turn()

    def on_start(self, event: Started, control: Control) -> None:
        self._turn.begin()

    def on_step(self, event: StepDone, control: Control) -> None:
        self._turn.end(event.tokens, event.loss)


def bare(config: TrainerConfig, run_dir: Path) -> None:
    """The same steps by a loop of a few lines."""
    from transformers import AutoModelForCausalLM

    prepared = prepare(config, Reporter(run_dir, writes=False), torch.device("cpu"))
    register()
    model = CausalLM(
        AutoModelForCausalLM.from_pretrained(
            prepared.model.path, attn_implementation=IMPLEMENTATION, dtype=torch.float32
        )
    ).train()
    rate = config.plan.learning_rate
    optimizer = build_optimizer(model.named_parameters(), config.spec, rate)
    shares = Shares(prepared.steps, prepared.train, data_rank=0, data_parallel=1, seed=config.spec.training.seed)
    turn = Turn()
    turn.begin()
    for index in range(prepared.total_steps):
        share, total = shares.share(index), 0.0
        for bin_ in share.bins:
            scale = 1.0 / share.step.trained_tokens
            loss, figure = model(bin_.input_ids, bin_.position_ids, bin_.boundaries, bin_.targets, bin_.labels, scale)
            loss.backward()
            total += float(figure)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.spec.training.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        turn.end(share.step.tokens, total / share.step.trained_tokens)


def main() -> None:
    config = TrainerConfig.model_validate_json(Path(os.environ["SFT_CONFIG"]).read_text())
    run_dir = Path(os.environ["SFT_RUN_DIR"])
    torch.set_num_threads(1)
    if sys.argv[1] == "bare":
        run_dir.mkdir(parents=True, exist_ok=True)
        bare(config, run_dir)
    else:
        Trainer(config, Ranks.from_environment(), run_dir, [Turns()]).run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
