"""One run of TRL's SFTTrainer, in an environment of its own: step by step as it is told, as ``own_run`` does.

    python trl_run.py MODEL DATA MODE STEPS

MODE is what TRL is asked for: ``padded`` (8 examples at once), ``packed`` (bfd, 512 tokens at once: with 2048 it takes
twice as long), ``wrapped`` (512 tokens at once, whose documents are cut anywhere,
and see one another), ``single`` (one example at once), ``flattened`` (padding-free), each without gradient
checkpointing; ``default``, as TRL comes, with it; ``lora``, padded with peft's adapters. A step has 32 examples, or as
many packed rows as hold about them. The optimizer is the one that TRL takes by itself.
"""

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

# Started by its path: the package of tests needs what this environment does not have. At the end, as other names there
# are those of the standard library.
sys.path.append(str(Path(__file__).parent))

import torch
from datasets import load_dataset
from taking_turns import Turn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

EXAMPLES = 32
AT_ONCE = {"padded": 8, "packed": 1, "wrapped": 1, "single": 1, "flattened": 8, "default": 8, "lora": 8}
PACKING = {"packed": "bfd", "wrapped": "wrapped"}


class CountingTrainer(SFTTrainer):  # type: ignore[misc]
    """Counts the real tokens of every step (no padding), and takes its turns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.real_tokens: dict[int, int] = {}
        self.turn = Turn()

    def log(self, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        super().log(logs, *rest, **named)
        if "loss" in logs:  # after each step, and nothing of it comes later
            self.turn.end(self.real_tokens[self.state.global_step - 1], logs["loss"])

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        mask = inputs.get("attention_mask")
        count = int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
        step = self.state.global_step
        self.real_tokens[step] = self.real_tokens.get(step, 0) + count
        return super().training_step(model, inputs, *rest)


class Beginning(TrainerCallback):  # type: ignore[misc]
    """The first turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._turn.begin()


def main() -> None:
    model_path, data_path, mode, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = load_dataset("json", data_files=data_path, split="train").select_columns(["messages"])
    options: dict[str, Any] = {}
    if mode == "lora":
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")

    def trainer(accumulated: int) -> CountingTrainer:
        config = SFTConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-bench-"),
            max_steps=steps,
            per_device_train_batch_size=AT_ONCE[mode],
            gradient_accumulation_steps=accumulated,
            # It refuses to flatten what it might have to cut; nothing here is longer than 512.
            max_length=None if mode == "flattened" else 512,
            packing=mode in PACKING,
            packing_strategy=PACKING.get(mode, "bfd"),
            padding_free=mode == "flattened",
            assistant_only_loss=True,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            train_sampling_strategy="sequential",
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            **({} if mode == "default" else {"gradient_checkpointing": False}),
        )
        return CountingTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            **options,
        )

    running = trainer(EXAMPLES // AT_ONCE[mode])
    running.add_callback(Beginning(running.turn))
    if mode in PACKING:
        # As many rows of a step as spread all of them over the steps.
        running.args.gradient_accumulation_steps = math.ceil(len(running.train_dataset) / steps)
    running.train()


if __name__ == "__main__":
    main()
