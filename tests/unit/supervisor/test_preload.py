"""The process that forks workers: what they do not share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, time
from sft_trainer.supervisor.preload import READY
from sft_trainer.supervisor.descriptors import raise_limit
from sft_trainer.supervisor.spawn import ForkServer
from sft_trainer.supervisor.workers import adopt_orphans

raise_limit()
for _ in range({connections}):
    os.open(os.devnull, os.O_RDONLY)
adopt_orphans()
server = ForkServer("draws", ["numpy.random"], dict(os.environ))
while not server.listen():
    time.sleep(0.01)
assert server.word == READY, server.word
for _ in range(2):
    os.waitpid(server.start_worker(dict(os.environ), stdout=1, stderr=2), 0)
server.end()
"""


@pytest.mark.parametrize("connections", [0, 1100])
def test_each_worker_draws_numbers_of_its_own(connections: int, tmp_path: Path) -> None:
    """Also in a pod of index 0 that has a connection to each of a thousand others."""
    (tmp_path / "draws.py").write_text(
        "import numpy, random\nprint(numpy.random.random(), random.random(), flush=True)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    drawn = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(connections=connections)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert drawn.returncode == 0, drawn.stderr
    assert len(set(drawn.stdout.split())) == 4, drawn.stdout
