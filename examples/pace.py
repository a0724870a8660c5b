"""How long a run on the CPU will take here: a few steps of it are done, and timed."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

TIMED_STEPS = 4
STARTS = 3
"""Times that torch and transformers are imported, or as much is done: by the trainer, for the export, for answers."""


def expected_seconds(manifest: Path, import_seconds: float) -> float:
    """Seconds of the run that `manifest` (files, CPU, epochs) describes, and of asking its model afterwards.

    `import_seconds`: what importing torch and transformers took just now.
    """
    spec = yaml.safe_load(manifest.read_text())["spec"]
    model, training = _path(spec["model"]["uri"]), spec["training"]
    tokens = training["epochs"] * sum(_tokens(model, _path(source["uri"])) for source in spec["data"]["train"])
    steps = tokens / training["globalBatchTokens"]
    processes = spec["compute"]["processesPerNode"]
    return STARTS * import_seconds + steps * _step_seconds(model, training["globalBatchTokens"], processes)


def in_words(seconds: float) -> str:
    """For people, to ten seconds."""
    minutes, rest = divmod(max(10, round(seconds, -1)), 60)
    return f"about {minutes:.0f} min {rest:.0f} s" if minutes else f"about {rest:.0f} s"


def _path(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


def _tokens(model: Path, rows: Path) -> int:
    from transformers import AutoTokenizer

    conversations = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return sum(len(ids) for ids in tokenizer.apply_chat_template(conversations, return_dict=True)["input_ids"])


def _step_seconds(model: Path, tokens: int, processes: int) -> float:
    """Mean seconds of a step over `tokens` that `processes`, each on one thread, share as those of a run do."""
    with TemporaryDirectory(prefix="sft-pace-") as folder, multiprocessing.get_context("fork").Pool(processes) as pool:
        shares = [(model, tokens // processes, rank, processes, f"{folder}/meeting") for rank in range(processes)]
        return max(pool.starmap(_time_steps, shares, chunksize=1))


def _time_steps(model_path: Path, tokens: int, rank: int, processes: int, meeting: str) -> float:
    import torch
    from torch import distributed
    from transformers import AutoModelForCausalLM

    # One thread as in the run; a fork has none of the threads that torch may believe in.
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path)
    optimizer = torch.optim.AdamW(model.parameters())
    # What a run exchanges in each step: parameters before forward and backward, and gradients after it.
    part = torch.zeros(-(-sum(parameter.numel() for parameter in model.parameters()) // processes))
    whole = part.repeat(processes)
    # Documents of 32 tokens: the length of the demo's rows.
    ids = torch.arange(tokens).remainder(model.config.vocab_size)[: tokens // 32 * 32].reshape(-1, 32)
    began = time.perf_counter()
    for step in range(1 + TIMED_STEPS):
        if step == 1:  # the first one also allocates
            began = time.perf_counter()
        distributed.all_gather_into_tensor(whole, part)
        loss = model(input_ids=ids, labels=ids).loss
        distributed.all_gather_into_tensor(whole, part)
        loss.backward()
        distributed.reduce_scatter_tensor(part, whole)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / TIMED_STEPS
