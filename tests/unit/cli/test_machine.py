"""What this machine has."""

from pathlib import Path

import pytest

from sft_cli.machine import gpu_memory, visible_gpus


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With an nvidia-smi that lists two GPUs, one of them cut into two instances."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n"
        "echo '  MIG 1g.18gb Device 0: (UUID: MIG-0)'\n"
        "echo '  MIG 1g.18gb Device 1: (UUID: MIG-1)'\n"
        "echo 'GPU 1: NVIDIA H200 (UUID: GPU-1)'\n"
    )
    program.chmod(0o755)
    return {"PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("allowed", "expected"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,1,2,3", 2), ("GPU-1", 1)]
)
def test_gpus_are_those_that_the_processes_would_see(
    environment: dict[str, str], allowed: str | None, expected: int
) -> None:
    if allowed is not None:
        environment["CUDA_VISIBLE_DEVICES"] = allowed

    assert visible_gpus(environment) == expected


def test_no_driver_and_a_broken_driver_mean_no_gpu(environment: dict[str, str], tmp_path: Path) -> None:
    assert visible_gpus({"PATH": "/nowhere"}) == 0

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: odd'\nexit 9\n")
    assert visible_gpus(environment) == 0


def telling(folder: Path, lines: list[str]) -> dict[str, str]:
    """The environment of a driver that says these ``lines`` when it is asked for memory."""
    program = folder / "nvidia-smi"
    asked = '[ "$*" = "--query-gpu=memory.total,mig.mode.current,uuid --format=csv,noheader,nounits" ] || exit 6'
    program.write_text("\n".join(["#!/bin/sh", asked, *(f"echo '{line}'" for line in lines), ""]))
    program.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (["81559, Disabled, GPU-a"], "81559Mi"),
        (["81559, Disabled, GPU-a", "24564, [N/A], GPU-b"], "24564Mi"),
        (["143771, Enabled, GPU-a", "143771, Disabled, GPU-b"], None),
        (["WARNING: infoROM is corrupted at gpu 0000:01:00.0", "143771, Disabled, GPU-a"], None),
        (["[N/A], [N/A], [N/A]"], None),
        ([], None),
    ],
    ids=["one", "the-smallest", "instances", "a-warning", "unsaid", "none"],
)
def test_the_memory_of_a_gpu_is_as_the_driver_says_it(tmp_path: Path, told: list[str], expected: str | None) -> None:
    assert gpu_memory(telling(tmp_path, told)) == expected


@pytest.mark.parametrize(
    ("allowed", "order", "expected"),
    [
        ("1", "PCI_BUS_ID", "81559Mi"),
        ("0,1", "PCI_BUS_ID", "24564Mi"),
        ("GPU-b", "", "81559Mi"),
        ("GPU-a", "", "24564Mi"),
        ("GPU-c", "", None),
        # From the fastest on: which these are the driver does not say
        ("1", "", "24564Mi"),
        ("0", "FASTEST_FIRST", "24564Mi"),
    ],
)
def test_the_memory_is_that_of_gpus_that_the_processes_would_see(
    tmp_path: Path, allowed: str, order: str, expected: str | None
) -> None:
    environment = telling(tmp_path, ["24564, [N/A], GPU-a", "81559, Disabled, GPU-b"])
    chosen = {"CUDA_VISIBLE_DEVICES": allowed, "CUDA_DEVICE_ORDER": order}

    assert gpu_memory(environment | chosen) == expected


def test_the_memory_of_a_gpu_is_not_known_without_a_driver_or_with_one_that_fails(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert gpu_memory({"PATH": "/nowhere"}) is None

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '81559, Disabled, GPU-a'\nexit 9\n")
    assert gpu_memory(environment) is None
