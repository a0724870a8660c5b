"""One run of TRL's SFTTrainer, in an environment of its own: prints one JSON line with tokens/s and peak memory.

python trl_run.py MODEL DATA packing|padding|padding-free STEPS TOKENS_PER_STEP
"""

import json
import resource
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

WARM_UP_STEPS = 3


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


class CountingTrainer(SFTTrainer):  # type: ignore[misc]
    """Counts the real tokens of every micro-batch: no padding."""

    real_tokens = 0
    counted_from_step = WARM_UP_STEPS

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        if self.state.global_step >= self.counted_from_step:
            mask = inputs.get("attention_mask")
            self.real_tokens += int(mask.sum() if mask is not None else inputs["input_ids"].numel())
        return super().training_step(model, inputs, *rest)


def main() -> None:
    model_path, data_path, mode, steps, tokens_per_step = sys.argv[1:6]
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = load_dataset("json", data_files=data_path, split="train").select_columns(["messages"])
    packing = mode == "packing"
    per_row = int(tokens_per_step) // 512
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-bench-"),
        max_steps=int(steps),
        per_device_train_batch_size=1 if packing else 8,
        gradient_accumulation_steps=per_row if packing else max(1, int(tokens_per_step) // (8 * 80)),
        max_length=512,
        packing=packing,
        packing_strategy="bfd",
        padding_free=mode == "padding-free",
        assistant_only_loss=True,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = CountingTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    seconds = sum(clock.seconds[WARM_UP_STEPS:])
    print(
        json.dumps(
            {
                "tokensPerSecond": trainer.real_tokens / seconds,
                "peakMemoryBytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
