"""All that is done to the run, each under a name of its own."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sft_api.checkpoints import CheckpointId
from tests.fault_proxy import (
    Answer,
    CutAnswer,
    CutRequest,
    FalseSuccess,
    Fault,
    Hold,
    LostReply,
    Says,
    Slow,
    Stale,
)
from tests.integration.run.disks import fill

from .clock import wrong_clock
from .stage import SAVE_EVERY, Stage
from .told import Stop

WHOM = ("rank0", "rank1", "all", "supervisor", "pod")
SHARD = r"/checkpoints/[^/]+/r\d+-.*\.bin$"
INDEX = r"/checkpoints/[^/]+/.*\.idx$"
MANIFEST = r"/checkpoints/[^/]+/manifest\.json$"
_MODEL = r"/export/model\.safetensors$"
CLAIM = r"/attempts/\d+\.json$"
FOLDERS = r"list-type=2&prefix=[^&]*/checkpoints/&"
FOLDER = r"list-type=2&prefix=[^&]*/checkpoints/step-[^&]*/&"
CLAIMS = r"list-type=2&prefix=[^&]*/attempts/&"


@dataclass
class Scene:
    """The run, whose first process is about to save ``step`` (at the end: for the last time) and waits."""

    stage: Stage
    stop: Stop
    step: int
    dice: random.Random

    def go(self) -> None:
        self.stop.go()

    def until(self, event: threading.Event, what: str) -> None:
        self.stage.wait(event.is_set, what)

    def kill(self, whom: str) -> None:
        """Kill them while what is held is held, which then never arrives; what does not come back alone is started."""
        self.stage.kill(whom)
        self.stage.proxy.clear()
        self.stage.revive()

    def has_committed(self, step: int) -> Callable[[], bool]:
        """Whether the checkpoint of ``step`` is committed, or a later one."""

        def look() -> bool:
            newest: CheckpointId | None = self.stage.oracles.newest()
            return newest is not None and newest.step >= step

        return look


Play = Callable[[Scene], None]


@dataclass(frozen=True)
class Case:
    """One thing that is done to the run.

    ``when``: before the first start, when it saves, when it saves its last step, or after that. ``attempts`` are
    claimed anew because of it. ``last``: the run is over after it.
    """

    name: str
    play: Play
    when: Literal["begin", "save", "final", "end"] = "save"
    attempts: int = 0
    commits: bool = False
    """The step that is saved when it begins is committed by the next save."""
    last: bool = False
    needs_no_weights: bool = False
    """No weights are exported yet: those that are there are not written again."""
    on_disk: bool = False
    """The checkpoints are in a folder on a small disk."""
    leaves_ruins: bool = False
    """A folder with a manifest and without its files may be left: nothing loads it."""


def killed_at(whom: str, method: str, path: str, *, after: bool = False) -> Play:
    """Killed while a request is on its way, or (``after``) its answer."""

    def play(scene: Scene) -> None:
        hold = scene.stage.proxy.add(Hold(method, path, after=after))
        scene.go()
        scene.until(hold.held, f"{method} {path}")
        scene.kill(whom)

    return play


def killed_at_commit(whom: str, *, after: bool) -> Play:
    """Killed at the manifest of the checkpoint that is saved: that of the one before may still be on its way."""

    def play(scene: Scene) -> None:
        killed_at(whom, "PUT", _manifest_of(scene.step), after=after)(scene)

    return play


def killed_once_saved(whom: str, method: str, path: str, *, after: bool = False) -> Play:
    """Killed at a request that follows the manifest: the same one for the save before may still be on its way."""

    def play(scene: Scene) -> None:
        committed = scene.stage.proxy.add(Hold("PUT", _manifest_of(scene.step), after=True))
        scene.go()
        scene.until(committed.held, f"the manifest of step {scene.step}")
        hold = scene.stage.proxy.add(Hold(method, path, after=after))
        committed.let_go()
        scene.until(hold.held, f"{method} {path}")
        scene.kill(whom)

    return play


def _manifest_of(step: int) -> str:
    return rf"/checkpoints/step-{step:08d}-[^/]+/manifest\.json$"


def killed_while_loading(whom: str, method: str, path: str, *, after: bool = False) -> Play:
    """All ranks are killed, and those that come next while that request is on its way."""

    def play(scene: Scene) -> None:
        hold = scene.stage.proxy.add(Hold(method, path, after=after))
        scene.stage.kill("all")
        scene.until(hold.held, f"{method} {path}")
        scene.kill(whom)

    return play


def killed_while_staging(whom: str) -> Play:
    """The first process has not begun to copy its state, the other one has."""
    return lambda scene: scene.kill(whom)


def killed_while_evaluating(whom: str) -> Play:
    def play(scene: Scene) -> None:
        stop = scene.stage.ear.stop_at("evaluating", 0)
        scene.go()
        scene.stage.reach(stop, "the next evaluation")
        scene.kill(whom)

    return play


def killed_at_begin(method: str, path: str, *, after: bool = False) -> Play:
    """The pod is killed while it makes the place its own, before anything is there."""

    def play(scene: Scene) -> None:
        hold = scene.stage.proxy.add(Hold(method, path, after=after))
        scene.stage.start()
        scene.until(hold.held, f"{method} {path}")
        scene.kill("pod")

    return play


def meets(make: Callable[[random.Random], Fault]) -> Play:
    """A request of the save meets a fault, and the save arrives."""

    def play(scene: Scene) -> None:
        fault = scene.stage.proxy.add(make(scene.dice))
        scene.go()
        scene.until(fault.met, "the request that is disturbed")
        scene.stage.wait(scene.has_committed(scene.step), f"the checkpoint of step {scene.step}")

    return play


def meets_and_goes_on(make: Callable[[random.Random], Fault]) -> Play:
    """A request of the save meets a fault; that save may fail, a later one arrives."""

    def play(scene: Scene) -> None:
        fault = scene.stage.proxy.add(make(scene.dice))
        scene.go()
        scene.until(fault.met, "the request that is disturbed")

    return play


def meets_while_loading(make: Callable[[random.Random], Fault]) -> Play:
    def play(scene: Scene) -> None:
        fault = scene.stage.proxy.add(make(scene.dice))
        started = scene.stage.ear.stop_at("started")
        scene.stage.kill("all")
        scene.stage.reach(started, "the next start")
        assert fault.met.is_set(), "nothing has met the fault"
        started.go()

    return play


def meets_at_begin(make: Callable[[random.Random], Fault]) -> Play:
    def play(scene: Scene) -> None:
        fault = scene.stage.proxy.add(make(scene.dice))
        scene.stage.start()
        scene.until(fault.met, "the request that is disturbed")

    return play


def uploads_slowly(scene: Scene) -> None:
    """1 KB/s for uploads while training goes on; then the network is as before."""
    before = scene.stage.oracles.committed()  # perhaps by attempts that had come further

    def has_committed() -> bool:
        return any(one.step >= scene.step for one in scene.stage.oracles.committed() if one not in before)

    slow = scene.stage.proxy.add(Slow("PUT", SHARD, 1024))
    later = scene.stage.ear.stop_at("step", 0, lambda facts: facts["step"] >= scene.step + SAVE_EVERY + 1)
    scene.go()
    scene.until(slow.met, "the upload")
    scene.stage.reach(later, "a step after the next save was due")
    assert not has_committed(), "the upload was over at once"
    slow.stop()
    later.go()
    scene.stage.wait(has_committed, f"the checkpoint of step {scene.step}")


def arrives_late(scene: Scene) -> None:
    """The manifest of those that were killed arrives when the next ones have removed the files that it names."""
    hold = scene.stage.proxy.add(Hold("PUT", MANIFEST))
    started = scene.stage.ear.stop_at("started")
    scene.go()
    scene.until(hold.held, "the manifest")
    scene.stage.kill("all")
    scene.stage.reach(started, "the next start")
    hold.let_go()
    scene.until(hold.over, "the late manifest")
    started.go()


def frozen(whom: str, seconds: float) -> Play:
    """SIGSTOP in the middle of a save, and SIGCONT."""

    def play(scene: Scene) -> None:
        hold = scene.stage.proxy.add(Hold("PUT", MANIFEST))
        scene.go()
        scene.until(hold.held, "the manifest")
        pid = scene.stage.pid_of(whom)
        os.kill(pid, signal.SIGSTOP)
        hold.let_go()
        thaw = threading.Event()
        thaw.wait(seconds)
        os.kill(pid, signal.SIGCONT)
        scene.stage.wait(scene.has_committed(scene.step), f"the checkpoint of step {scene.step}")

    return play


def shifted(seconds: int) -> Play:
    """The pod is killed, and the next one is on a machine whose clock is wrong."""

    def play(scene: Scene) -> None:
        environment = scene.stage.environment
        environment.update(wrong_clock(scene.stage.folder, seconds))
        scene.kill("pod")
        environment.clear()

    return play


def fills_disk(scene: Scene) -> None:
    """Nothing can be written until the run has said so; then somebody makes room."""
    oracles = scene.stage.oracles
    filler = oracles.folder / "filler"
    fill(filler)
    scene.go()
    scene.stage.wait(lambda: oracles.last_report("endpoint").storage_outage is not None, "the word of an outage")
    filler.unlink()


def refuses_the_next_start(scene: Scene) -> None:
    """All ranks are killed, and the store refuses whatever the next ones ask, until the run has said so."""
    refuses = scene.stage.proxy.add(Says(".*", "", _error(403, "AccessDenied"), count=None))
    scene.stage.kill("all")
    scene.stage.wait(
        lambda: scene.stage.oracles.last_report("endpoint").storage_outage is not None, "the word of an outage"
    )
    refuses.stop()


def _error(status: int, code: str) -> Answer:
    return Answer.error(status, code)


def _lost_way() -> Answer:
    """Of a proxy that has no way to the server."""
    return Answer(404, "Not Found", (("Content-Type", "text/plain"),), b"404 page not found\n")


def _kills() -> list[Case]:
    cases = []
    for whom in WHOM:
        shard = SHARD.replace(r"r\d+", "r0*1" if whom == "rank1" else "r0+")
        pruning = killed_once_saved(whom, "DELETE", MANIFEST, after=True)
        cases += [
            Case(f"kill-{whom}-staging", killed_while_staging(whom), attempts=1),
            Case(f"kill-{whom}-upload", killed_at(whom, "PUT", shard), attempts=1),
            Case(f"kill-{whom}-commit", killed_at_commit(whom, after=False), attempts=1),
            Case(f"kill-{whom}-committed", killed_at_commit(whom, after=True), attempts=1, commits=True),
            Case(f"kill-{whom}-prune", pruning, attempts=1, commits=True),
            Case(f"kill-{whom}-load", killed_while_loading(whom, "GET", shard), attempts=2),
            Case(f"kill-{whom}-evaluate", killed_while_evaluating(whom), attempts=1),
            Case(f"kill-{whom}-export", killed_at(whom, "PUT", _MODEL), when="end", attempts=1, needs_no_weights=True),
        ]
    return cases


def _more_kills() -> list[Case]:
    def at(name: str, whom: str, method: str, path: str, *, after: bool = False, commits: bool = False) -> Case:
        play = killed_once_saved if commits else killed_at
        return Case(name, play(whom, method, path, after=after), attempts=1, commits=commits)

    def at_end(name: str, whom: str, method: str, path: str, *, after: bool = False) -> Case:
        return Case(name, killed_at(whom, method, path, after=after), when="end", attempts=1)

    def at_final(name: str, whom: str, *, after: bool) -> Case:
        return Case(name, killed_at_commit(whom, after=after), when="final", attempts=1, commits=after)

    return [
        at("kill-uploaded", "rank1", "PUT", SHARD, after=True),
        at("kill-index", "rank0", "PUT", INDEX),
        at("kill-indexed", "rank0", "PUT", INDEX, after=True),
        at("kill-checking-sizes", "rank0", "GET", FOLDER),
        at("kill-records", "rank0", "PUT", r"/metrics/.*\.jsonl$"),
        at("kill-recorded", "all", "PUT", r"/metrics/.*\.jsonl$", after=True),
        at("kill-latest", "rank0", "PUT", r"/status\.json$", commits=True),
        at("kill-latest-pod", "pod", "PUT", r"/status\.json$", after=True, commits=True),
        at("kill-prune-shards", "rank0", "DELETE", SHARD, commits=True),
        at("kill-pruned-shard", "pod", "DELETE", SHARD, after=True, commits=True),
        # Whose place it is, is looked at before an attempt is claimed.
        Case("kill-look-listing", killed_while_loading("rank0", "GET", FOLDERS), attempts=1),
        Case("kill-look-manifest", killed_while_loading("all", "GET", MANIFEST), attempts=1),
        Case("kill-load-index", killed_while_loading("rank0", "GET", INDEX, after=True), attempts=2),
        # The claim that is never made is none: its number is the next one's.
        Case("kill-claim", killed_while_loading("rank0", "PUT", CLAIM), attempts=1),
        Case("kill-claimed", killed_while_loading("rank0", "PUT", CLAIM, after=True), attempts=1),
        Case("kill-record", killed_at_begin("PUT", r"/run\.json$"), when="begin", attempts=1),
        Case("kill-record-made", killed_at_begin("PUT", r"/run\.json$", after=True), when="begin", attempts=1),
        Case("kill-first-claim", killed_at_begin("PUT", CLAIM, after=True), when="begin", attempts=1),
        at_final("kill-final-commit", "all", after=False),
        at_final("kill-final-committed", "supervisor", after=True),
        at_end("kill-export-record", "rank0", "PUT", r"/export/training-run\.json$", after=True),
        Case(
            "kill-export-written",
            killed_at("rank1", "PUT", _MODEL, after=True),
            when="end",
            attempts=1,
            needs_no_weights=True,
        ),
        at_end("kill-export-config", "rank0", "PUT", r"/export/config\.json$"),
        at_end("kill-export-ends", "pod", "DELETE", r"/export/unfinished-export\.json$"),
        at_end("kill-done", "pod", "PUT", r"/done\.json$"),
        Case(
            "kill-done-written",
            killed_at("pod", "PUT", r"/done\.json$", after=True),
            when="end",
            last=True,
        ),
        Case("403-all-killed", refuses_the_next_start, attempts=1),
        Case("late-manifest", arrives_late, attempts=1, leaves_ruins=True),
    ]


def _faults() -> list[Case]:
    def save(name: str, make: Callable[[random.Random], Fault], *, commits: bool = True) -> Case:
        return Case(name, (meets if commits else meets_and_goes_on)(make), commits=commits)

    def load(name: str, make: Callable[[random.Random], Fault]) -> Case:
        return Case(name, meets_while_loading(make), attempts=1)

    def end(name: str, make: Callable[[random.Random], Fault], *, attempts: int = 0) -> Case:
        play = meets_and_goes_on(make)
        return Case(name, play, when="end", last=True, attempts=attempts, needs_no_weights=True)

    return [
        save("500-shard", lambda dice: Says("PUT", SHARD, _error(500, "InternalError"), count=3)),
        save("500-prune", lambda dice: Says("DELETE", SHARD, _error(500, "InternalError"), count=2)),
        save("503-manifest", lambda dice: Says("PUT", MANIFEST, _error(503, "SlowDown"), count=3)),
        save("503-listing", lambda dice: Says("GET", FOLDER, _error(503, "SlowDown"), count=2)),
        save("403-shard", lambda dice: Says("PUT", SHARD, _error(403, "AccessDenied")), commits=False),
        save("403-manifest", lambda dice: Says("PUT", MANIFEST, _error(403, "AccessDenied")), commits=False),
        save("403-fence", lambda dice: Says("GET", CLAIMS, _error(403, "AccessDenied")), commits=False),
        save("403-prune", lambda dice: Says("DELETE", MANIFEST, _error(403, "AccessDenied")), commits=False),
        save("404-shard", lambda dice: Says("PUT", SHARD, _lost_way()), commits=False),
        save("404-fence", lambda dice: Says("GET", CLAIMS, _lost_way()), commits=False),
        Case("slow-shards", uploads_slowly, commits=True),
        save("cut-shard", lambda dice: CutRequest("PUT", SHARD, dice.randrange(1, 100_000))),
        save("cut-index", lambda dice: CutRequest("PUT", INDEX, dice.randrange(1, 500))),
        save("cut-manifest", lambda dice: CutRequest("PUT", MANIFEST, dice.randrange(1, 1000))),
        save("cut-records", lambda dice: CutRequest("PUT", r"/metrics/", dice.randrange(1, 300))),
        save("cut-listing", lambda dice: CutAnswer("GET", FOLDER, dice.randrange(1, 500))),
        save("false-200-shard", lambda dice: FalseSuccess("PUT", SHARD), commits=False),
        save("false-200-index", lambda dice: FalseSuccess("PUT", INDEX), commits=False),
        save("false-200-manifest", lambda dice: FalseSuccess("PUT", MANIFEST), commits=False),
        save("false-200-document", lambda dice: Says("PUT", MANIFEST, _error(200, "InternalError")), commits=False),
        save("lost-shard", lambda dice: LostReply("PUT", SHARD)),
        save("lost-index", lambda dice: LostReply("PUT", INDEX)),
        save("lost-manifest", lambda dice: LostReply("PUT", MANIFEST)),
        save("lost-records", lambda dice: LostReply("PUT", r"/metrics/")),
        save("lost-prune", lambda dice: LostReply("DELETE", MANIFEST)),
        save("stale-shards", lambda dice: Stale(FOLDER, SHARD), commits=False),
        save("stale-folders", lambda dice: Stale(FOLDERS, MANIFEST)),
        save("stale-claims", lambda dice: Stale(CLAIMS, CLAIM)),
        load("500-load", lambda dice: Says("GET", SHARD, _error(500, "InternalError"), count=3)),
        load("503-load-listing", lambda dice: Says("GET", FOLDERS, _error(503, "SlowDown"), count=3)),
        load("503-claim", lambda dice: Says("PUT", CLAIM, _error(503, "SlowDown"), count=2)),
        load("403-claim", lambda dice: Says("PUT", CLAIM, _error(403, "AccessDenied"))),
        Case(
            "403-load",
            meets_while_loading(lambda dice: Says("GET", SHARD, _error(403, "AccessDenied"))),
            attempts=2,
        ),
        Case(
            "404-load",
            meets_while_loading(lambda dice: Says("GET", SHARD, _lost_way())),
            attempts=2,
        ),
        load("lost-claim", lambda dice: LostReply("PUT", CLAIM)),
        load("cut-load", lambda dice: CutAnswer("GET", SHARD, dice.randrange(1, 2000))),
        load("cut-load-index", lambda dice: CutAnswer("GET", INDEX, dice.randrange(1, 500))),
        load("cut-load-manifest", lambda dice: CutAnswer("GET", MANIFEST, dice.randrange(1, 500))),
        load("stale-load", lambda dice: Stale(FOLDERS, MANIFEST, count=None)),
        load("stale-load-claims", lambda dice: Stale(CLAIMS, CLAIM)),
        Case("lost-record", meets_at_begin(lambda dice: LostReply("PUT", r"/run\.json$")), when="begin", attempts=1),
        Case(
            "cut-record", meets_at_begin(lambda dice: CutRequest("PUT", r"/run\.json$", 100)), when="begin", attempts=1
        ),
        end("500-export", lambda dice: Says("PUT", _MODEL, _error(500, "InternalError"), count=3)),
        end("403-export", lambda dice: Says("PUT", _MODEL, _error(403, "AccessDenied"))),
        end("cut-export", lambda dice: CutRequest("PUT", _MODEL, dice.randrange(1, 50_000))),
        end("lost-export", lambda dice: LostReply("PUT", _MODEL)),
        # What was written and is not there may lie where only another pod looks: the group starts again.
        end("false-200-export", lambda dice: FalseSuccess("PUT", _MODEL), attempts=1),
        end("lost-done", lambda dice: LostReply("PUT", r"/done\.json$")),
        Case("clock-behind", shifted(-600), attempts=1),
        Case("clock-ahead", shifted(600), attempts=1),
        Case("disk-full-save", fills_disk, on_disk=True),
        Case("disk-full-final", fills_disk, when="final", last=True, on_disk=True),
        Case("frozen-rank0", frozen("rank0", 4.0), commits=True),
        Case("frozen-rank1", frozen("rank1", 4.0), commits=True),
        Case("frozen-supervisor", frozen("supervisor", 4.0), commits=True),
    ]


CASES: dict[str, Case] = {case.name: case for case in (*_kills(), *_more_kills(), *_faults())}
