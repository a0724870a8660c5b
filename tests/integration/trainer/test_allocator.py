"""What a process of the CPU gives back to the system between steps."""

import os
import subprocess
import sys

PROGRAM = """
import resource, torch
from sft_trainer.distributed import Ranks, device_for

device_for(Ranks(0, 0, 1, 1, "127.0.0.1", 1, "0"), 0)

def step():
    tensors = [torch.ones(2**18 + 2**10 * number) for number in range(200)]
    before = torch.ones(8)  # what lives on is not at the end of the heap
    del tensors
    return before

kept = [step() for _ in range(3)]
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
kept += [step() for _ in range(3)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def faults(**environment: str) -> int:
    """Pages that three steps of 280 MB had to ask for."""
    command = [sys.executable, "-c", PROGRAM]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(command, env={**inherited, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def test_memory_of_one_step_serves_the_next() -> None:
    again = faults()
    given_back = faults(MALLOC_TRIM_THRESHOLD_="131072")

    assert again < 5_000
    assert given_back > 100_000  # where the environment says how, that counts
