"""A GPU that is slow: from what the workers of three pods write down to what index 0 reports."""

import itertools
import time

import pytest

from sft_api.rundir import GPU_TIMES_FOLDER, GpuTimes
from sft_api.slow_gpus import slow_gpu

from .pods import Group, wait_for


def write(group: Group, look: int, *, slow: int | None) -> None:
    """What a timer of each worker would tell; that of rank ``slow`` took half as long again."""
    for rank in range(3):
        times = GpuTimes(
            look=look,
            gpu=0,
            uuid=f"GPU-{rank}",
            model="H100",
            products=0.0045 if rank == slow else 0.003,
            memory=0.0015,
        )
        file = group.folder / f"pod-{rank}-{rank}" / GPU_TIMES_FOLDER / f"rank-{rank}.json"
        (new := file.with_suffix(".new")).write_text(times.model_dump_json(by_alias=True))
        new.replace(file)


def test_index_0_names_a_slow_gpu_of_another_pod_until_it_is_fast_again(group: Group) -> None:
    # Given three pods of one GPU each that train
    group.nodes, group.gpus, group.steps = 3, 1, 100_000
    first, *_ = [group.start(index, SFT_NODE_NAME=f"node-{index}") for index in range(3)]
    first.wait_for_step(1)
    looks = itertools.count(1)

    def look_until(told: list[str], *, slow: int | None) -> None:
        # Two looks decide; of one that takes long to reach index 0 on a busy machine the next one is.
        for _ in range(20):
            write(group, next(looks), slow=slow)
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                if [each.uuid for each in first.progress.training.slow_gpus] == told:
                    return
                time.sleep(0.1)
        pytest.fail(f"{told} was not told:\n{first.log}")

    # When that of pod 2 takes longer than the others
    look_until(["GPU-2"], slow=2)

    # Then it is named, by itself
    (slow,) = first.progress.training.slow_gpus
    assert (slow.pod, slow.node, slow.rank, slow.gpu) == (2, "node-2", 2, 0)
    assert (slow.products_speed, slow.memory_speed) == (0.667, 1.0)
    assert f"warning: {slow_gpu(slow)}" in first.log
    wait_for(lambda: 'sft_trainer_gpu_work_seconds{rank="2",work="products"} 0.0045' in third_metrics(group), first)

    # And no more once it is as fast again
    look_until([], slow=None)
    assert "GPU 0 of pod 2 (GPU-2, rank 2) is as fast as the others again" in first.log


def third_metrics(group: Group) -> str:
    return group.pods[2].get("/metrics")
