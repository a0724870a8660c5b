"""The commands of a page of documentation, run as they stand there.

What a test machine has not, a registry and the programs around it, is stood in for by ``python -m tests.e2e.documented
PROGRAM …``: images are built by the Dockerfiles, pushed to the node itself, and files go to the bucket by boto3.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import boto3

from tests.cluster import images

REPOSITORY = Path(__file__).resolve().parents[2]
STAND_INS = ("docker", "kind", "aws", "make")

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[list[str]]:
    """The commands of each block of a page that begins with ```` ```console ````."""
    return [commands(block) for block in _BLOCK.findall(page.read_text())]


def commands(block: str) -> list[str]:
    """What stands behind the prompts of a block, without what was answered."""
    found: list[str] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif found and found[-1].endswith("\\"):
            found[-1] += f"\n{line}"
    return found


def put_stand_ins(folder: Path) -> None:
    """Programs of the names of STAND_INS in ``folder``."""
    folder.mkdir()
    for name in STAND_INS:
        program = folder / name
        # In the copy of the repository that they are called from, so that its files are what is built.
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.e2e.documented {name} "$@"\n')
        program.chmod(0o755)


class Shell:
    """Runs commands one after the other; what one exports the next one has."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self.exported: dict[str, str] = {}

    def run(self, command: str, *, replaced: Mapping[str, str] | None = None) -> str:
        """Run one command and return what it printed; AssertionError with all it said when it fails.

        ``replaced`` names variables whose documented value is an example: they get the value of here.
        """
        if command.startswith("export "):
            names = [word.partition("=")[0] for word in shlex.split(command)[1:]]
            self.exported |= {name: (replaced or {})[name] for name in names}
            return ""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self._folder,
            env=self._environment | self.exported,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


def _docker(arguments: Sequence[str]) -> None:
    verb, *rest = arguments
    if verb == "push":
        images.load(*rest)
        return
    options = dict(zip(rest[:-1:2], rest[1:-1:2], strict=True))
    assert (verb, rest[-1]) == ("build", "."), arguments
    assert options.keys() <= {"--tag", "--file", "--build-arg"}, arguments
    images.build(
        options["--tag"], options["--file"], *([images.WITHOUT_CUDA] if "trainer" in options["--file"] else [])
    )


def _kind(arguments: Sequence[str]) -> None:
    assert arguments[:2] == ["load", "docker-image"], arguments
    for name in arguments[2:]:
        images.load(name)


def _aws(arguments: Sequence[str]) -> None:
    *command, endpoint, source, target = arguments
    assert command == ["s3", "cp", "--recursive", "--endpoint-url"], arguments
    client = boto3.client("s3", endpoint_url=endpoint, region_name=os.environ["AWS_REGION"])
    if target.startswith("s3://"):
        bucket, _, prefix = target.removeprefix("s3://").partition("/")
        for file in (path for path in Path(source).rglob("*") if path.is_file()):
            client.upload_file(str(file), bucket, f"{prefix}{file.relative_to(source)}")
        return
    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    for entry in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        file = Path(target) / entry["Key"].removeprefix(prefix)
        file.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, entry["Key"], str(file))


def _make(arguments: Sequence[str]) -> None:
    assert arguments == ["setup"], arguments
    Path(".venv").symlink_to(sys.prefix)


if __name__ == "__main__":
    stand_ins = {"docker": _docker, "kind": _kind, "aws": _aws, "make": _make}
    stand_ins[sys.argv[1]](sys.argv[2:])
