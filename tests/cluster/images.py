"""Images of the test node: a Debian base made here, and the repository's own Dockerfiles built upon it.

No registry is asked. buildah keeps its layers in the cache, so a change of code builds only the top layers.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.binaries import cache_folder
from tests.cluster.node import PAUSE_IMAGE, install_packages
from tests.cluster.snapshots import import_image

BASE_IMAGE = "docker.io/sft-test/base:bookworm"
OPERATOR_IMAGE = "docker.io/sft-operator/operator:dev"
TRAINER_IMAGE = "docker.io/sft-operator/trainer:dev"
MEGATRON_IMAGE = "docker.io/sft-operator/trainer-megatron:dev"
MEGATRON_ON_CPU_IMAGE = "docker.io/sft-test/trainer-megatron-on-cpu:dev"

REPOSITORY = Path(__file__).resolve().parents[2]
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WITHOUT_CUDA = "--build-arg=WITHOUT_CUDA=1"
DEBIAN_RELEASE = "bookworm"
DEBIAN_PACKAGES = ("python3", "python3-venv", "libpython3-dev", "ca-certificates")


class ImageError(RuntimeError):
    """An image could not be built; the message quotes the end of the tool's output."""


def build_base() -> None:
    """Build base and pause image when they are missing or hold other packages than they should."""
    with _build_lock():
        if _ensure_base() or not _exists(PAUSE_IMAGE):
            _derive(PAUSE_IMAGE, BASE_IMAGE, '--entrypoint=["sleep", "infinity"]', "--cmd=")


def build_operator() -> str:
    """Build `operator/Dockerfile` from the working tree and return the image's name."""
    return build(OPERATOR_IMAGE, "operator/Dockerfile")


def build_trainer() -> str:
    """Build `trainer_image/Dockerfile`, without what only a GPU needs, and return the image's name."""
    return build(TRAINER_IMAGE, "trainer_image/Dockerfile", WITHOUT_CUDA)


def build_megatron() -> str:
    """Build the stage of `trainer_image/Dockerfile` that has Megatron-Core as well, and return the image's name."""
    return build(MEGATRON_IMAGE, "trainer_image/Dockerfile", WITHOUT_CUDA, "--target=megatron")


def build_megatron_on_cpu() -> str:
    """Build upon that what makes Megatron-Core believe in GPUs, for tests, and return the image's name."""
    return build(MEGATRON_ON_CPU_IMAGE, "tests/megatron/Dockerfile", base=build_megatron(), context="tests/megatron")


def build(
    name: str,
    dockerfile: str,
    *arguments: str,
    base: str = BASE_IMAGE,
    context: str = ".",
    repository: Path = REPOSITORY,
) -> str:
    """Build a Dockerfile of the repository from its working tree, upon ``base``, and return the image's name."""
    with _build_lock():
        _ensure_base()
        _buildah(
            "bud",
            "--isolation=chroot",
            "--layers",
            "--pull-never",
            f"--build-arg=BASE_IMAGE={base}",
            *_wheel_cache(),
            *arguments,
            f"--file={repository / dockerfile}",
            f"--tag={name}",
            str(repository / context),
        )
        _buildah("rmi", "--prune", "--force")
    return name


def load(name: str) -> str:
    """Give an image that was built here to the node, which must be up, and return its name."""
    with _build_lock():
        import_image(storage(), name, _inspect(name))
    return name


def storage() -> Path:
    """buildah's own storage, apart from that of the machine."""
    return cache_folder() / "buildah"


def _wheel_cache() -> list[str]:
    """Let the build use this machine's wheel cache and certificates: nothing is fetched twice."""
    wheels = Path(os.environ.get("UV_CACHE_DIR", Path.home() / ".cache" / "uv"))
    wheels.mkdir(parents=True, exist_ok=True)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    return [
        f"--volume={wheels}:/wheel-cache",
        "--build-arg=UV_CACHE_DIR=/wheel-cache",
        f"--volume={certificates}:{certificates}:ro",
    ]


def _ensure_base() -> bool:
    """Build the base image when it is missing or holds other packages than it should; True when it was built."""
    install_packages()  # on a bare machine buildah itself is missing
    packages = ",".join(DEBIAN_PACKAGES)
    if _exists(BASE_IMAGE) and _labels(BASE_IMAGE).get("packages") == packages:
        return False
    _build_base(packages)
    return True


def _build_base(packages: str) -> None:
    """debootstrap straight into the first layer, without documentation and package lists."""
    container = _buildah("from", "scratch").strip()
    try:
        root = Path(_buildah("mount", container).strip())
        _run(["debootstrap", "--variant=minbase", f"--include={packages}", DEBIAN_RELEASE, str(root)])
        for pattern in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / pattern, ignore_errors=True)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        (root / "var/lib/apt/lists/partial").mkdir(parents=True)
        _buildah("umount", container)
        _buildah("config", "--cmd=python3", f"--env=PATH={SEARCH_PATH}", f"--label=packages={packages}", container)
        _buildah("commit", container, BASE_IMAGE)
    finally:
        _buildah("rm", container)


def _derive(name: str, base: str, *settings: str) -> None:
    container = _buildah("from", "--pull-never", base).strip()
    try:
        _buildah("config", *settings, container)
        _buildah("commit", container, name)
    finally:
        _buildah("rm", container)


def _exists(name: str) -> bool:
    command = _command("inspect", "--type=image", name)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _labels(name: str) -> dict[str, str]:
    return json.loads(json.loads(_inspect(name))["Config"])["config"].get("Labels") or {}


def _inspect(name: str) -> str:
    return _buildah("inspect", "--type=image", name)


def _command(*arguments: str) -> list[str]:
    places = [f"--root={storage()}", "--runroot=/run/sft-test-buildah", "--storage-driver=overlay"]
    return ["buildah", *places, *arguments]


def _buildah(*arguments: str) -> str:
    return _run(_command(*arguments))


def _run(command: Sequence[str]) -> str:
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise ImageError(f"`{' '.join(command)}` failed ({done.returncode}):\n{tail}")
    return done.stdout


@contextmanager
def _build_lock() -> Iterator[None]:
    storage().mkdir(parents=True, exist_ok=True)
    with (storage() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
