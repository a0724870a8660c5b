"""How much of a save works at once: little beside training, all of it when training waits."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sft_api.checkpoints import RunState
from sft_trainer import saving
from sft_trainer.boxes import Box
from sft_trainer.checkpoint import pieces
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.s3_upload import MultipartStream
from sft_trainer.checkpoint.store import WriteStream
from sft_trainer.checkpoint.turns import Turns, beside_training
from sft_trainer.errors import StorageUnavailableError
from sft_trainer.reporting import Reporter
from sft_trainer.saving import Saving
from sft_trainer.topology import ALONE, Topology
from tests.parity.runs import manifest, resolve
from tests.topologies import here
from tests.unit.checkpoint.boxed import whole
from tests.waiting import PATIENCE_SECONDS, wait_until


@pytest.mark.parametrize(
    ("processors", "processes", "threads"), [(2, 1, 1), (1, 1, 1), (16, 1, 15), (64, 8, 7), (4, 8, 1), (9, 4, 1)]
)
def test_each_process_keeps_one_processor_for_its_steps(processors: int, processes: int, threads: int) -> None:
    assert beside_training(processors, processes) == threads


def waiting_for(turns: Turns) -> int:
    """How many threads wait for something of ``turns``."""
    return len(turns._changed._waiters)  # type: ignore[attr-defined]


class Crowd:
    """Threads that take turns and leave when they are told."""

    def __init__(self, turns: Turns, count: int) -> None:
        self.turns = turns
        self.working = 0
        self.leave = threading.Event()
        self.threads = [threading.Thread(target=self._work) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def _work(self) -> None:
        with self.turns:
            self.working += 1
            self.leave.wait(PATIENCE_SECONDS)

    def end(self) -> None:
        self.leave.set()
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)


def test_no_more_than_so_many_work_at_once_until_the_limit_is_lifted() -> None:
    crowd = Crowd(Turns(2), 5)
    # All have come: who does not work waits.
    wait_until(lambda: waiting_for(crowd.turns) == 3)
    assert crowd.working == 2

    crowd.turns.lift()
    wait_until(lambda: crowd.working == 5)
    crowd.end()


def test_who_waits_to_try_again_gives_its_turn_to_others_and_comes_before_who_is_new() -> None:
    turns = Turns(1)
    order: list[str] = []
    threads: list[threading.Thread] = []

    def begin(name: str, work: Callable[[], object]) -> None:
        def take() -> None:
            with turns:
                order.append(name)
                work()

        threads.append(threading.Thread(target=take))
        threads[-1].start()

    def while_one_pauses() -> None:
        wait_until(lambda: turns._returning == 1)
        begin("new", lambda: None)
        wait_until(lambda: waiting_for(turns) == 2)

    with turns:
        begin("another", while_one_pauses)
        while not order:
            turns.pause(0.01)
        order.append("again")
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert order == ["another", "again", "new"]


def test_a_save_that_fails_ends_pauses_too_and_every_turn_is_given_back() -> None:
    turns = Turns(1)

    def fail() -> None:
        with turns:
            turns.stop(OSError("away"))

    def pause() -> None:
        with turns:
            failing.start()
            turns.pause(PATIENCE_SECONDS)

    failing = threading.Thread(target=fail)
    with pytest.raises(OSError, match="away"):
        pause()
    failing.join(PATIENCE_SECONDS)
    assert (turns._taken, turns._returning) == (0, 0)


def test_who_waits_for_a_turn_when_the_save_fails_raises_what_it_failed_with() -> None:
    turns = Turns(1)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            with turns:
                pass
        except OSError as error:
            raised.append(error)

    with turns:
        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        turns.stop(OSError("away"))
        turns.stop(OSError("of another"))
        for thread in waiting:
            thread.join(PATIENCE_SECONDS)
    assert [str(error) for error in raised] == ["away"] * 3


def test_a_turn_that_ends_with_an_error_is_given_back() -> None:
    turns = Turns(1)
    with pytest.raises(OSError, match="full"), turns:
        raise OSError("full")
    with turns:
        pass


def saving_of(folder: Path, store: LocalStore, topology: Topology) -> Saving:
    """The saves of a run in ``folder``."""
    config = resolve(manifest(folder, folder / "store"))
    return Saving(config, store, Reporter(folder, writes=True), device=torch.device("cpu"), topology=topology)


class MeetingStore(LocalStore):
    """Takes bytes of a checkpoint's files once two of them are sent at the same time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.arrived = threading.Semaphore(0)
        self.met = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        stream = super().open_write(key, size_hint)
        if key.endswith(".bin"):
            send = stream._send

            def meet(data: memoryview) -> None:
                with stream._turns:
                    self.arrived.release()
                    self.met.wait()
                stream.take_turns(Turns())
                send(data)

            stream._send = meet  # type: ignore[method-assign]
        return stream


@pytest.fixture
def two_files(monkeypatch: pytest.MonkeyPatch) -> list[Box]:
    """Boxes that are saved in two files."""
    monkeypatch.setattr(pieces, "_BYTES_FOR_ANOTHER_FILE", 32 * 32 * 4)
    return whole({"a": torch.randn(32, 32), "b": torch.randn(32, 8)})


def one_sends_alone(store: MeetingStore, turns: Turns) -> bool:
    """Once one file is being sent: whether the other one waits for that."""
    assert store.arrived.acquire(timeout=PATIENCE_SECONDS)
    wait_until(lambda: waiting_for(turns) == 1)
    return not store.arrived.acquire(blocking=False)


def test_a_save_beside_training_sends_one_after_the_other_until_training_waits_for_it(
    tmp_path: Path, two_files: list[Box]
) -> None:
    # Given a save in two files of a store that takes only two at once
    store = MeetingStore(tmp_path)
    manager = CheckpointManager(store, here(), threads_beside_training=1)
    manager.claim_attempt("job")
    manager.save(1, two_files, RunState(), asynchronous=True)

    # Then one waits alone, while training goes on
    assert one_sends_alone(store, manager._turns)
    assert manager.in_flight

    # When training waits, they meet
    assert manager.wait() is not None
    assert not store.met.broken


def test_when_the_next_save_is_due_the_one_in_flight_sends_all_at_once_though_nobody_waits_for_it(
    tmp_path: Path, two_files: list[Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run on two processors, whose save goes out beside training
    monkeypatch.setattr(saving, "available_cpus", lambda cgroup: 2)
    store = MeetingStore(tmp_path)
    run = saving_of(tmp_path, store, ALONE)
    run.claim_attempt()
    assert run.save(1, two_files, RunState())
    assert one_sends_alone(store, run._manager._turns)

    # When it is told that another one is due
    run.hurry()

    # Then they meet, and training goes on meanwhile
    wait_until(lambda: not run.in_flight)
    assert not store.met.broken
    run.settle()
    assert run.checkpoints.latest is not None


def test_a_save_that_training_waits_for_from_the_beginning_sends_all_at_once(
    tmp_path: Path, two_files: list[Box]
) -> None:
    manager = CheckpointManager(MeetingStore(tmp_path), here(), threads_beside_training=1)
    manager.claim_attempt("job")
    assert manager.save(1, two_files, RunState(), asynchronous=False) is not None


def test_parts_of_an_object_take_turns_too() -> None:
    turns = Turns(1)
    sent: list[str] = []

    class Bucket:
        """Every request that it answers is made in a turn."""

        class settings:
            checksum = "when_required"

        def create_upload(self, key: str) -> str:
            return "upload"

        def request(self, name: str, key: str, *, pause_for: object, **_: object) -> dict[str, str]:
            assert turns._taken == 1
            assert pause_for == turns.pause
            sent.append(name)
            return {"ETag": "e"}

    for size in (100, 10):
        stream = MultipartStream(Bucket(), "key", 40)  # type: ignore[arg-type]
        stream.take_turns(turns)
        stream.lend(bytes(size))
        stream.close()
    assert sent == ["upload_part"] * 3 + ["complete_multipart_upload", "put_object"]


def test_a_store_that_is_away_is_tried_once_not_by_one_part_after_the_other() -> None:
    turns = Turns(1)
    asked: list[str] = []

    class Bucket:
        class settings:
            checksum = "when_required"

        def create_upload(self, key: str) -> str:
            return "upload"

        def abort_upload(self, key: str, upload: str) -> None:
            asked.append("abort")

        def request(self, name: str, key: str, **_: object) -> dict[str, str]:
            asked.append(name)
            raise StorageUnavailableError("it does not answer")

    stream = MultipartStream(Bucket(), "key", 10)  # type: ignore[arg-type]
    stream.take_turns(turns)
    with pytest.raises(StorageUnavailableError), stream:
        stream.lend(bytes(200))
    assert asked == ["upload_part", "abort"]


def test_a_run_counts_the_processors_of_its_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Manager(CheckpointManager):
        def __init__(self, *arguments: object, threads_beside_training: int, **options: object) -> None:
            made.append(threads_beside_training)

    monkeypatch.setattr(saving, "CheckpointManager", Manager)
    monkeypatch.setattr(saving, "available_cpus", lambda cgroup: 12)
    one_of_two = Topology(rank=0, local_rank=0, world_size=2, local_world_size=2, shard=2)
    saving_of(tmp_path, LocalStore(tmp_path), one_of_two)
    assert made == [5]
