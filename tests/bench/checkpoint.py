"""What a checkpoint costs: the time that training loses, and the speed of transfers beside that of bare requests.

    python -m tests.bench.checkpoint [--hidden 768] [--rounds 3] [--store s3|folder] [--folder TMP]

A model of a hundred million parameters is trained by the strategy of the trainer itself, on as many threads as a worker
of this machine has, and saved with both moments of AdamW: 12 bytes a parameter. ``s3`` is versitygw over a temporary
folder, on the same processors.

``stall_ratio``: the seconds by which steps with one asynchronous save among them take longer than as many without, from
the call until the save is committed, by the seconds of a synchronous save. Windows of steps alternate (without, with,
with, without), and each one with is compared with those beside it. The steps take one processor, as those of a GPU do,
and leave the others to the save, which digests and sends, and to the server. ``stall_ratio_none_free`` is the same for
steps that take all processors: what save and server take of them is then lost to the steps, however it is spread;
``stall_ratio_server_yields`` while the server has the lowest priority besides, as if it were elsewhere.
``upload_ratio``: bytes a second of a synchronous save, by those of its bytes put by as many threads in the same parts,
with nothing hashed and nothing signed but the headers. ``resume_read_ratio``: of a load that verifies, by those of
parallel GETs of the same bytes in ranges of as much as a piece may have. Alternating as well (bare, ours, ours, bare).

Prints medians as key=value, and the lowest and the highest of the ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import torch
import torch.distributed as dist
from botocore.config import Config
from transformers import AutoConfig

from sft_api.checkpoints import RunState
from sft_trainer.allocator import keep_freed_memory
from sft_trainer.boxes import Box
from sft_trainer.checkpoint.catalog import KeepPolicy
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.opening import open_store
from sft_trainer.checkpoint.pieces import FILES_PER_RANK, MAX_PIECE_BYTES
from sft_trainer.checkpoint.runs import MOST_READ_THREADS
from sft_trainer.checkpoint.s3 import part_size
from sft_trainer.checkpoint.store import S3Settings, Store
from sft_trainer.checkpoint.turns import beside_training
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import EVERYTHING
from tests.bins import random_bin
from tests.cluster.object_store import object_store
from tests.cluster.processes import Supervisor
from tests.parity.runs import manifest, resolve
from tests.topologies import here

BUCKET = "bench"
BARE_THREADS = 16
VOCABULARY = 16_384
PARTS = ("transfers", "stalls", "none_free")
MOST_STEPS = 12
"""Of a window without a save: beside other work the first save lasts long."""


class Training:
    """Steps of a model on random tokens."""

    def __init__(self, folder: Path, hidden: int, layers: int, tokens: int) -> None:
        config = AutoConfig.for_model(
            "qwen3",
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            head_dim=64,
            vocab_size=VOCABULARY,
            tie_word_embeddings=True,
        )
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        job = manifest(folder, folder.with_name("store"), model={"uri": f"file://{folder}"})
        self._strategy = FsdpStrategy(resolve(job), build_on_meta(folder), EVERYTHING, ALONE, torch.device("cpu"), None)
        for box in self._strategy.boxes("trained"):
            box.write(torch.randn(box.place.sizes) * 0.02)
        self._strategy.loaded()
        self._bin = random_bin(1, *[128] * (tokens // 128), vocabulary=VOCABULARY)

    def boxes(self) -> list[Box]:
        """All that is saved."""
        return self._strategy.boxes("trained") + self._strategy.boxes("optimizer")

    def step(self, copied: Callable[[], None] = lambda: None) -> None:
        """As the trainer makes it: ``copied`` waits until what a save is made of may change."""
        self._strategy.forward_backward([self._bin], len(self._bin.labels))
        norm = self._strategy.grad_norm()
        copied()
        self._strategy.apply(1e-5, 1.0, norm, torch.isfinite(norm))
        float(norm)

    def steps(self, count: int) -> float:
        """Seconds of so many."""
        return seconds_of(lambda: [self.step() for _ in range(count)])


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def a_store(kind: str, folder: Path) -> Iterator[tuple[Store, int | None]]:
    """The store, and the process of its server."""
    if kind == "folder":
        yield open_store(f"file://{folder}/saved"), None
        return
    with object_store(folder / "server") as server:
        os.environ.update(server.environment())
        client().create_bucket(Bucket=BUCKET)
        process = Supervisor(folder / "server").pid("versitygw")
        assert process is not None
        settings = S3Settings(server.endpoint, server.region, force_path_style=True)
        yield open_store(f"s3://{BUCKET}/run", settings), process


def weigh(process: int, nice: int) -> None:
    """Give a process this priority; a server has a session of its own, which may have one apart from its threads'."""
    with suppress(FileNotFoundError):
        Path(f"/proc/{process}/autogroup").write_text(str(nice))
    for thread in os.listdir(f"/proc/{process}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def client() -> Any:
    """One that hashes nothing and signs headers only."""
    config = Config(
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=BARE_THREADS,
    )
    return boto3.client("s3", config=config)


def bare_put(raw: bytearray, pool: ThreadPoolExecutor) -> None:
    """The bytes as as many objects as a rank has files, in parts of the same size."""
    s3 = client()
    share = -(-len(raw) // FILES_PER_RANK)
    part = part_size(share)

    def put(key: str, upload: str, number: int, start: int, end: int) -> dict[str, Any]:
        body = raw[start:end]
        answer = s3.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    uploads = []
    for first in range(0, len(raw), share):
        key, end = f"bare/{first}", min(first + share, len(raw))
        upload = s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        starts = range(first, end, part)
        parts = [
            pool.submit(put, key, upload, number, start, min(start + part, end))
            for number, start in enumerate(starts, 1)
        ]
        uploads.append((key, upload, parts))

    def complete(key: str, upload: str, parts: list[Any]) -> None:
        done = {"Parts": [part.result() for part in parts]}
        s3.complete_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload=done)

    with ThreadPoolExecutor(FILES_PER_RANK) as completing:
        list(completing.map(lambda upload: complete(*upload), uploads))


def bare_get(pool: ThreadPoolExecutor) -> int:
    """The same bytes back, in ranges; how many there were."""
    s3 = client()
    objects = s3.list_objects_v2(Bucket=BUCKET, Prefix="bare/")["Contents"]

    def get(key: str, start: int) -> int:
        span = f"bytes={start}-{start + MAX_PIECE_BYTES - 1}"
        return len(s3.get_object(Bucket=BUCKET, Key=key, Range=span)["Body"].read())

    reads = [
        pool.submit(get, entry["Key"], start) for entry in objects for start in range(0, entry["Size"], MAX_PIECE_BYTES)
    ]
    return sum(read.result() for read in reads)


def processor_seconds(process: int | None) -> float:
    """That it has taken so far."""
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Bench:
    training: Training
    manager: CheckpointManager
    server: int | None
    figures: dict[str, list[float]] = field(default_factory=dict)
    number: int = 0

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)
        print(f"# {name} {value:.3f}", flush=True)

    def median(self, name: str) -> float:
        return statistics.median(self.figures[name])

    def save(self, *, asynchronous: bool) -> None:
        self.number += 1
        boxes, keep = self.training.boxes(), KeepPolicy(last=1)
        self.manager.save(self.number, boxes, RunState(), asynchronous=asynchronous, keep=keep)

    def saved(self) -> None:
        """A synchronous save, timed."""
        worked, served = time.process_time(), processor_seconds(self.server)
        self.note("save_sync_seconds", seconds_of(lambda: self.save(asynchronous=False)))
        self.note("save_sync_processor_seconds", time.process_time() - worked)
        self.note("save_sync_server_processor_seconds", processor_seconds(self.server) - served)

    def steps_with_save(self, at_least: int, how: str = "") -> tuple[int, float]:
        """How many steps there were until an asynchronous save was committed, and their seconds with it."""
        began = time.perf_counter()
        self.save(asynchronous=True)
        called = time.perf_counter()
        steps = 0
        while steps < at_least or self.manager.in_flight:
            self.training.step(self.manager.copied)
            steps += 1
        seconds = time.perf_counter() - began
        outcome = self.manager.wait()
        assert outcome is not None
        self.note("save_async_call_seconds", called - began)
        self.note(f"save_async_seconds{how}", outcome.seconds)
        return steps, seconds

    def stalls(self, steps: int) -> None:
        """Windows of saves, with processors that steps leave free."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.stall(steps, "")
        torch.set_num_threads(threads)

    def stalls_none_free(self, steps: int) -> None:
        """With none, and with a server that yields as well."""
        self.stall(steps, "_none_free")
        if self.server is not None:
            weigh(self.server, 19)
            self.stall(steps, "_server_yields")
            weigh(self.server, 0)

    def stall(self, steps: int, how: str) -> None:
        """Windows of at least ``steps`` steps without, with, with, and without a save."""
        before = self.training.steps(steps)
        windows = [self.steps_with_save(steps, how) for _ in range(2)]
        after = self.training.steps(steps)
        for plain, (count, seconds) in zip((before, after), windows, strict=True):
            self.note("step_seconds", plain / steps)
            self.note(f"stall_seconds{how}", seconds - count * plain / steps)

    def transfers(self, raw: bytearray, pool: ThreadPoolExecutor) -> None:
        """Saves and loads beside bare requests for the same bytes, when there is a server."""
        loaded = [replace(box, local=torch.zeros_like(box.local)) for box in self.training.boxes()]
        if self.server is not None:
            for ours in (False, True, True, False):
                work = partial(self.save, asynchronous=False) if ours else partial(bare_put, raw, pool)
                self.note("put_seconds" if ours else "bare_put_seconds", seconds_of(work))
        with ThreadPoolExecutor(MOST_READ_THREADS) as readers:
            for ours in (False, True, True, False):
                if ours:
                    self.note("load_seconds", seconds_of(lambda: self.manager.load_newest(loaded)))
                elif self.server is not None:
                    self.note("bare_get_seconds", seconds_of(lambda: bare_get(readers)))
        pairs = zip(loaded, self.training.boxes(), strict=True)
        assert all(torch.equal(read.local, box.read()) for read, box in pairs)

    def ratio(self, name: str, above: str, below: str) -> None:
        """Of every pair that was taken beside one another."""
        for one, other in zip(self.figures[above], self.figures[below], strict=True):
            self.note(name, one / other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--store", choices=("s3", "folder"), default="s3")
    parser.add_argument("--folder", type=Path, help="where the store's bytes go; a temporary folder when absent")
    options = parser.parse_args()
    keep_freed_memory()  # as the trainer does
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as name,
        a_store(options.store, Path(name)) as (store, server),
        ThreadPoolExecutor(BARE_THREADS) as pool,
    ):
        training = Training(Path(name) / "model", options.hidden, options.layers, options.tokens)
        training.steps(2)
        size = sum(box.local.nbytes for box in training.boxes())
        beside = beside_training(len(os.sched_getaffinity(0)), 1)
        manager = CheckpointManager(store, here(), threads_beside_training=beside)
        manager.claim_attempt("bench")
        bench = Bench(training, manager, server)
        print(f"store={options.store}")
        print(f"folder={options.folder or tempfile.gettempdir()}")
        print(f"parameters={sum(box.local.numel() for box in training.boxes()) // 3}")
        print(f"mebibytes={size / 2**20:.0f}")
        print(f"threads={torch.get_num_threads()}")
        print(f"processors={len(os.sched_getaffinity(0))}")
        print(f"load={os.getloadavg()[0]:.1f}", flush=True)
        first, _ = bench.steps_with_save(1)
        print(f"first_save_async_call_seconds={bench.figures['save_async_call_seconds'][0]:.3f}", flush=True)
        bench.figures.clear()
        steps = min(max(4, first), MOST_STEPS)
        raw = bytearray(os.urandom(2**20)) * (size // 2**20)
        for _ in range(options.rounds):
            bench.saved()
            if "transfers" in options.parts:
                bench.transfers(raw, pool)
            if "stalls" in options.parts:
                bench.stalls(steps)
            if "none_free" in options.parts:
                bench.stalls_none_free(steps)
    sync = bench.median("save_sync_seconds")
    for how in ("", "_none_free", "_server_yields"):
        for lost in bench.figures.get(f"stall_seconds{how}", []):
            bench.note(f"stall_ratio{how}", lost / sync)
    if "bare_put_seconds" in bench.figures:
        bench.ratio("upload_ratio", "bare_put_seconds", "put_seconds")
        bench.ratio("resume_read_ratio", "bare_get_seconds", "load_seconds")
    print(f"steps_of_a_window={steps}")
    print(f"save_mebibytes_per_second={size / 2**20 / sync:.0f}")
    for figure, values in bench.figures.items():
        print(f"{figure}={statistics.median(values):.3f}  # {min(values):.3f} to {max(values):.3f}, {len(values)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
