"""The picture of a recovery in README.md: a run killed with ``kill -9`` at step 60, on the undisturbed one.

    python -m tests.parity.picture docs/images/recovery.svg

Both runs are real: `sft run` on two processes. Fails when a loss of the resumed run differs from the undisturbed one's.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from sft_trainer.curves.chart import Line, draw
from tests.fixtures_inputs import make_inputs

from .checks import sft_run
from .runs import step_records

STEPS, EVERY, KILL_AFTER = 120, 25, 60
TRAINING: dict[str, Any] = {"globalBatchTokens": 4096, "optimizer": {"learningRate": 1e-2}}


def losses_by_attempt(store: Path) -> dict[int, list[tuple[int, float]]]:
    """Loss of every step that was recorded, by the attempt that made it."""
    losses: dict[int, list[tuple[int, float]]] = {}
    for file in sorted((store / "metrics").glob("*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        attempt = losses.setdefault(int(file.stem.rpartition("-a")[2]), [])
        attempt += [(record["step"], record["loss"]) for record in records if "loss" in record]
    return losses


def main() -> None:
    picture = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="sft-picture-") as scratch:
        work = Path(scratch)
        make_inputs(work / "inputs", size="tiny")
        sft_run(work / "inputs", work / "straight", 2, STEPS, every=EVERY, **TRAINING)
        sft_run(work / "inputs", work / "killed", 2, STEPS, every=EVERY, kill_after=KILL_AFTER, **TRAINING)
        straight = [(step, record["loss"]) for step, record in step_records(work / "straight" / "store").items()]
        killed = losses_by_attempt(work / "killed" / "store")
    if sorted(killed) != [1, 2]:
        raise SystemExit(f"there are attempts {sorted(killed)} instead of two")
    first, second = killed[1], killed[2]
    resumed_at = second[0][0] - 1
    different = sum(one != other for one, other in zip(straight, [*first, *second], strict=True))
    values = [loss for _, loss in straight]
    chart = draw(
        "kill -9 at step 60: the resumed run lies on the undisturbed one",
        [
            Line("undisturbed", straight, width=6, colour="#c6dbef"),
            Line("until the last checkpoint", first, colour="#1f77b4"),
            Line(f"resumed from step {resumed_at}", second, colour="#d62728"),
            Line(
                f"kill -9 at step {KILL_AFTER}",
                [(KILL_AFTER, min(values)), (KILL_AFTER, max(values))],
                dashes="4 4",
                colour="#444444",
            ),
        ],
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(chart)
    print(f"{picture}: resumed from step {resumed_at}, {different} of {STEPS} losses differ")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
