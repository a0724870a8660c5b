"""A pod whose ranks Ray places, on GPUs that nobody has: Ray is told of them, and counts them itself."""

from .pods import Group


def test_ray_gives_each_rank_the_gpu_of_its_place_in_the_pod(group: Group) -> None:
    # Given a pod with two GPUs of a machine that has more
    group.processes = group.gpus = 2
    group.launcher = "ray"

    # When it runs
    pod = group.start(CUDA_VISIBLE_DEVICES="4,7")

    # Then Ray has placed both ranks, and each sees what it sees without Ray
    assert pod.wait() == 0, pod.log
    assert pod.termination.failure is None
    placed = pod.log_file.with_suffix("") / "ray"
    assert {file.name for file in placed.glob("place-*")} == {"place-0.json", "place-1.json"}
    for rank in (0, 1):
        (start,) = group.starts(rank)
        assert (start["LOCAL_RANK"], start["CUDA_VISIBLE_DEVICES"]) == (str(rank), "4,7")
