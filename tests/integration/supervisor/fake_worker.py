"""A worker without torch: keeps the contract of the run directory, and fails as it is told.

``python -m fake_worker`` with FAKE_SCRIPT naming a JSON file ``{"steps": 5, "stepSeconds": 0.02, "checkpointEvery": 2,
"folder": "...", "prepare": {"1": 4.0}, "faults": [{"rank": 0, "start": 1, "step": 2, "do": "exit 11"}, ...]}``.
``start`` counts the starts of a rank over all generations; ``prepare`` has the seconds that a rank works before it
joins the others. The ranks step together over a socket of rank 0, so the end of one is felt by all.
"""

import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RUN_DIR = Path(os.environ["SFT_RUN_DIR"])
SCRIPT = json.loads(Path(os.environ["FAKE_SCRIPT"]).read_text())
RECORDED = ("SFT_", "MASTER_", "OMP_", "RANK", "LOCAL_", "WORLD_", "GROUP_", "TORCH_", "CUDA_")
FOLDER = Path(SCRIPT["folder"])
"""Stands for the object store: shared by all pods."""
ATTEMPT = 0
"""That this process is part of, once the store has let it in."""


def write_json(path: Path, document: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document))
    temporary.replace(path)


def fail(failure: str, message: str, code: int, step: int, *, outage: bool = False) -> None:
    write_json(
        RUN_DIR / "errors" / f"rank-{RANK}.json",
        {"failure": failure, "message": message, "rank": RANK, "step": step, "outage": outage},
    )
    sys.exit(code)


class Ring:
    """Rank 0 hears of every rank each step, and tells all whether one wants to stop."""

    def __init__(self) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.sockets: list[socket.socket] = []
        hello = f"{os.environ['SFT_GENERATION']:>20}".encode()
        if RANK == 0 and WORLD > 1:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            with socket.create_server(("", address[1]), family=family, dualstack_ipv6=dual) as server:
                while len(self.sockets) < WORLD - 1:
                    peer, _ = server.accept()
                    if self.receive(peer, 20) == hello:
                        self.sockets.append(peer)
        elif RANK > 0:
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    self.sockets.append(socket.create_connection(address))
                    break
                time.sleep(0.01)
            self.sockets[0].sendall(hello)

    @staticmethod
    def receive(peer: socket.socket, size: int) -> bytes:
        data = peer.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise ConnectionResetError("connection closed by peer")
        return data

    def any(self, value: bool) -> bool:
        if RANK == 0:
            value = any([value, *(self.receive(peer, 1) == b"1" for peer in self.sockets)])
        for peer in self.sockets:
            peer.sendall(b"1" if value else b"0")
        if RANK > 0:
            value = self.receive(self.sockets[0], 1) == b"1"
        return value


def carry_incidents() -> None:
    """Rank 0's part of a claim: what ended earlier attempts, from run directory and last claim, into both."""
    here, claim = RUN_DIR / "incidents.json", FOLDER / "claim.json"
    told = [json.loads(file.read_text())["incidents"] for file in (claim, here) if file.exists()]
    incidents = list({incident["id"]: incident for incidents in told for incident in incidents}.values())
    for file in (claim, here):
        write_json(file, {"incidents": incidents})


def tell(phase: str, detail: str, step: int) -> None:
    activity = {"phase": phase, "detail": detail, "step": step, "attempt": ATTEMPT}
    write_json(RUN_DIR / "activity" / f"rank-{RANK}.json", activity)


def look_at_store() -> None:
    """End as the file ``refused`` in the store says, if there is one: like a store that refuses before a claim."""
    refused = FOLDER / "refused"
    if refused.exists():
        failure, code = refused.read_text().split(",")
        fail(failure, f"the store says {failure}", int(code), 0, outage=True)


def do(action: str, step: int) -> None:
    word, _, argument = action.partition(" ")
    if word == "exit":
        print(f"about to exit with {argument}", file=sys.stderr)
        os._exit(int(argument))
    elif word == "fail":
        failure, code = argument.split(",")
        fail(failure, f"{failure} on purpose", int(code), step)
    elif word == "signal":
        os.kill(os.getpid(), getattr(signal, argument))
        time.sleep(10)
    elif word == "hang":
        time.sleep(1000)
    elif word == "stall":
        tell(argument, "and no further", step)
        time.sleep(1000)
    elif word == "work":
        for number in range(5000):
            tell(argument, f"{number} of many", step)
            time.sleep(0.2)
    elif word == "linger":
        # Like a rank 0 that still exports.
        while not (FOLDER / "linger").exists():
            time.sleep(0.01)
    elif word == "orphan":
        # A grandchild that has left session and process group.
        command = ["setsid", "sleep", "987654"]
        subprocess.Popen(command, stdout=subprocess.DEVNULL)
    else:
        raise ValueError(action)


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    starts = FOLDER / f"starts-{RANK}"
    with starts.open("a") as record:
        mine: dict[str, object] = {key: os.environ[key] for key in sorted(os.environ) if key.startswith(RECORDED)}
        record.write(
            json.dumps(
                {
                    "pid": os.getpid(),
                    "time": time.time(),
                    "preloaded": "ssl" in sys.modules,
                    "collects": gc.isenabled(),
                    **mine,
                }
            )
            + "\n"
        )
    global ATTEMPT
    start = len(starts.read_text().splitlines())
    look_at_store()
    ATTEMPT = start
    saved = FOLDER / "checkpoint"
    step = resumed = int(saved.read_text()) if saved.exists() else 0
    if RANK == 0:
        carry_incidents()

    def report(phase: str, detail: str = "") -> None:
        tell(phase, detail, step)
        if RANK == 0:
            latest = None
            if saved.exists():
                latest = {
                    "step": int(saved.read_text()),
                    "attempt": 1,
                    "uri": f"file://{FOLDER}/step-{int(saved.read_text()):08d}-a00001",
                    "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
                    "sizeBytes": 1,
                    "verified": True,
                }
            write_json(
                RUN_DIR / "progress.json",
                {
                    "attempt": start,
                    "phase": phase,
                    "phaseDetail": detail,
                    "step": step,
                    "totalSteps": SCRIPT["steps"],
                    "resumedFromStep": resumed or None,
                    "loss": 1.0 / (step + 1),
                    "medianStepSeconds": SCRIPT["stepSeconds"],
                    "checkpoints": {"latest": latest},
                    "updateTime": datetime.now(UTC).isoformat(),
                },
            )

    report("Loading")
    end = time.monotonic() + SCRIPT.get("prepare", {}).get(str(RANK), 0.0)
    while (left := end - time.monotonic()) > 0:
        report("Tokenizing", f"{left:.1f} to go")
        time.sleep(0.2)
    report("Waiting")
    ring = Ring()
    print(f"rank {RANK} of {WORLD}, start {start}", flush=True)
    try:
        while True:
            for fault in SCRIPT.get("faults", []):
                if (fault["rank"], fault["start"], fault["step"]) == (RANK, start, step):
                    do(fault["do"], step)
            if step >= SCRIPT["steps"]:
                break
            time.sleep(SCRIPT["stepSeconds"])
            stop = ring.any((RUN_DIR / "stop").exists())
            step += 1
            if RANK == 0 and (stop or step == SCRIPT["steps"] or step % SCRIPT["checkpointEvery"] == 0):
                # In one step: it may be killed here.
                (written := saved.with_name("checkpoint.new")).write_text(str(step))
                written.replace(saved)
            report("Training")
            ring.any(False)  # nobody fails in the next step before this one is reported
            if stop:
                # Rank 0 leaves last, as if it were still committing.
                time.sleep(0.3 if RANK == 0 else 0)
                print(f"rank {RANK} saved step {step}", flush=True)
                sys.exit(30)
    except (ConnectionError, BrokenPipeError) as problem:
        fail("PeerLost", str(problem), 35, step)
    report("Complete")


main()
