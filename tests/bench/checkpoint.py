"""How long saves and loads take, and how long they keep training waiting.

    python -m tests.bench.checkpoint [--parameters 50_000_000] [--store folder|s3|URI] [--repeats 5]

Saves 12 bytes a parameter (fp32 weights and both moments of AdamW) from one process. ``s3`` starts versitygw over a
temporary folder; a URI is used as it is, with the AWS environment of the shell. The stall of an asynchronous save is
measured twice: the call itself, and the whole: a loop of steps with saves in it minus the same loop without.
Prints medians as key=value.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import boto3
import torch

from sft_api.checkpoints import RunState
from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.checkpoint.catalog import KeepPolicy
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.opening import open_store
from sft_trainer.checkpoint.store import S3Settings, Store
from tests.cluster.object_store import object_store
from tests.topologies import here


def state(parameters: int) -> list[Box]:
    """Layers of at most 16 Mi parameters each, as in a transformer."""
    boxes = []
    for number, start in enumerate(range(0, parameters, 2**24)):
        rows = max(1, min(2**24, parameters - start) // 1024)
        place = Rectangle((0, 0), (rows, 1024))
        for kind in (WEIGHT, "exp_avg", "exp_avg_sq"):
            boxes.append(Box(f"layer.{number}", kind, place.sizes, place, torch.randn(rows, 1024)))
    return boxes


@contextmanager
def a_store(name: str) -> Iterator[Store]:
    if "://" in name:
        yield open_store(name, S3Settings(os.environ.get("AWS_ENDPOINT_URL_S3")))
        return
    with tempfile.TemporaryDirectory() as folder:
        if name == "folder":
            yield open_store(f"file://{folder}")
            return
        with object_store(Path(folder)) as server:
            os.environ.update(server.environment())
            boto3.client("s3").create_bucket(Bucket="bench")
            yield open_store("s3://bench/run", S3Settings(server.endpoint, server.region, force_path_style=True))


def step_loop(steps: int, weight: torch.Tensor) -> float:
    """Seconds of ``steps`` steps of arithmetic, as training would do them."""
    began = time.perf_counter()
    for _ in range(steps):
        weight = (weight @ weight).tanh_()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--store", default="folder")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    boxes = state(options.parameters)
    size = sum(box.local.nbytes for box in boxes)
    loaded = [replace(box, local=torch.empty_like(box.local)) for box in boxes]
    weight = torch.randn(512, 512)
    with a_store(options.store) as store:
        manager = CheckpointManager(store, here())
        manager.claim_attempt("bench")
        keep = KeepPolicy(last=1)
        sync, cpu, load, call, total, stall = [], [], [], [], [], []
        number = 0
        for _ in range(options.repeats):
            worked = time.process_time()
            outcome = manager.save(number := number + 1, boxes, RunState(), asynchronous=False, keep=keep)
            cpu.append(time.process_time() - worked)
            assert outcome is not None
            sync.append(outcome.seconds)

            began = time.perf_counter()
            manager.load_newest(loaded)
            load.append(time.perf_counter() - began)

            # About as many steps as one save takes, so that the loop sees all of it.
            steps = max(1, int(outcome.seconds / (step_loop(20, weight) / 20)))
            plain = step_loop(steps, weight)
            began = time.perf_counter()
            manager.save(number := number + 1, boxes, RunState(), asynchronous=True, keep=keep)
            call.append(time.perf_counter() - began)
            step_loop(steps, weight)
            stall.append(time.perf_counter() - began - plain)
            outcome = manager.wait()
            assert outcome is not None
            total.append(outcome.seconds)
    assert all(torch.equal(read.local, box.local) for read, box in zip(loaded, boxes, strict=True))

    print(f"store={options.store}")
    print(f"parameters={options.parameters}")
    print(f"mebibytes={size / 2**20:.0f}")
    for name, seconds in (
        ("save_sync", sync),
        ("save_sync_cpu", cpu),
        ("load", load),
        ("save_async_call", call),
        ("save_async_stall", stall),
        ("save_async_total", total),
    ):
        print(f"{name}_seconds={statistics.median(seconds):.3f}")
    print(f"save_mebibytes_per_second={size / 2**20 / statistics.median(sync):.0f}")
    print(f"load_mebibytes_per_second={size / 2**20 / statistics.median(load):.0f}")


if __name__ == "__main__":
    main()
