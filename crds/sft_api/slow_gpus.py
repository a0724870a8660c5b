"""Pure: slow GPUs in words, the same in the cluster and with ``sft run``."""

from collections.abc import Sequence

from .v1alpha1.status import SlowGpuStatus


def slow_gpu(slow: SlowGpuStatus) -> str:
    """The sentence about one GPU."""
    where = f" on node {slow.node}" if slow.node else ""
    return (
        f"GPU {slow.gpu} of pod {slow.pod}{where} ({slow.model}, {slow.uuid}, rank {slow.rank}) is slow since "
        f"{slow.since}, and every step waits for it: of the usual speed of this run's GPUs it multiplies at "
        f"{100 * slow.products_speed:.0f}%, its memory is read and written at {100 * slow.memory_speed:.0f}%; "
        "nvidia-smi -q -d PERFORMANCE on its node says what slows it down"
    )


def slow_gpus(slow: Sequence[SlowGpuStatus]) -> str:
    """The sentence about all of them; empty without any."""
    if not slow:
        return ""
    more = f". So are {len(slow) - 1} more: status.slowGpus" if len(slow) > 1 else ""
    return f"{slow_gpu(slow[0])}{more}"
