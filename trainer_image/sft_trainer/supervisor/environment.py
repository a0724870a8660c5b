"""Pure: the environment of a worker."""

from collections.abc import Mapping

from .settings import Settings


def worker_environment(
    settings: Settings,
    inherited: Mapping[str, str],
    *,
    local_rank: int,
    generation: int,
    master_address: str,
    master_port: int,
    cpus: int,
) -> dict[str, str]:
    """``inherited``, the worker's place in the group, and threads so that its processes share ``cpus`` processors.

    SFT_THREADS, then OMP_NUM_THREADS of ``inherited`` overrule the number of threads. Where matrices are split a GPU
    has one queue: Megatron-Core launches what is sent before the product that it shall go on beside.
    """
    share = str(max(1, cpus // settings.processes))
    environment = {
        # Read by Python and torch; the user may say otherwise.
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": share,
        # Read when the compiler is imported, by the process that forks workers too. Its own: one for each processor.
        "TORCHINDUCTOR_COMPILE_THREADS": share,
        **({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if settings.splits_matrices else {}),
        **inherited,
        "SFT_CONFIG": str(settings.config),
        "SFT_RUN_DIR": str(settings.run_dir),
        "SFT_GENERATION": str(generation),
        "RANK": str(settings.ranks[local_rank]),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(settings.world_size),
        "LOCAL_WORLD_SIZE": str(settings.processes),
        "GROUP_RANK": str(settings.node),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
    }
    if threads := inherited.get("SFT_THREADS"):
        environment["OMP_NUM_THREADS"] = threads
    return environment
