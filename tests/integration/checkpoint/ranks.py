"""Processes that import torch once between them: single ones, and groups of ranks over gloo."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.forks import IMPORTED_LATER
from tests.waiting import PATIENCE_SECONDS

CONTEXT = multiprocessing.get_context("forkserver")
"""Whose processes have their imports from one that forks them."""
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",  # the first step of any optimizer imports it, which takes seconds
        "torch.distributed.fsdp",
        "sft_trainer.checkpoint.manager",
        "sft_trainer.trainer",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        *IMPORTED_LATER,
        "boto3",
        "pytest",
    ]
)


class RankFailed(AssertionError):
    """A process raised; the message is its traceback."""


def _child(
    connection: Connection,
    environment: Mapping[str, str],
    rendezvous: str | None,
    rank: int,
    size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    # Whatever makes a semaphore here (a bar of progress) lets its name go at once: nothing is cleaned up at the end.
    multiprocessing.set_start_method("fork", force=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if rendezvous is not None:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
        connection.send((True, function(*arguments)))
        # A process that ends takes with it what its peers have not read of the last thing all did together: each stays
        # until the answers of all are there.
        connection.poll(None)
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        # Without waiting for peers that may be dead; results are sent.
        os._exit(0)


def start(
    function: Callable[..., Any], *arguments: Any, rank: int = 0, size: int = 1, rendezvous: str | None = None
) -> tuple[BaseProcess, Connection]:
    """One process that calls ``function``; its answer comes through the connection, unless it is killed."""
    ours, theirs = CONTEXT.Pipe()
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    process = CONTEXT.Process(
        target=_child, args=(theirs, environment, rendezvous, rank, size, function, arguments), daemon=True
    )
    process.start()
    theirs.close()
    return process, ours


def answers(started: Iterable[tuple[BaseProcess, Connection]], seconds: float = PATIENCE_SECONDS) -> list[Any]:
    """What processes that work together have sent, each within ``seconds``; None of one that was killed before."""
    processes = list(started)
    found = [_answer(*process, seconds) for process in processes]
    for process, connection in processes:
        connection.close()
        process.join(PATIENCE_SECONDS)
    for fine, value in found:
        if not fine:
            raise RankFailed(value)
    return [value for _, value in found]


def answer(process: BaseProcess, connection: Connection, seconds: float = PATIENCE_SECONDS) -> Any:
    """What a process that works alone has sent; None when it was killed before."""
    return answers([(process, connection)], seconds)[0]


def _answer(process: BaseProcess, connection: Connection, seconds: float) -> tuple[bool, Any]:
    try:
        if not connection.poll(seconds):
            process.kill()
            return False, f"no answer within {seconds} s"
        fine, value = connection.recv()
    except EOFError:
        return True, None
    return fine, value


def run(
    size: int, folder: Path, function: Callable[..., Any], *arguments: Any, seconds: float = PATIENCE_SECONDS
) -> list[Any]:
    """Answers of ``size`` ranks that call ``function`` together, each within ``seconds``; they meet in ``folder``."""
    rendezvous = folder / f"rendezvous-{len(list(folder.glob('rendezvous-*')))}"
    ranks = [start(function, *arguments, rank=rank, size=size, rendezvous=str(rendezvous)) for rank in range(size)]
    return answers(ranks, seconds)
