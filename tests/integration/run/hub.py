"""A server that speaks the hub's HTTP API for a few repositories, each a folder: enough for the hub's own clients."""

import functools
import hashlib
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.answering import Answering, served

COMMIT = "c" * 40


@dataclass
class Hub:
    """``repositories`` maps ``org/name`` and ``datasets/org/name`` to folders; those in ``gated`` need a login."""

    repositories: Mapping[str, Path]
    gated: frozenset[str]
    commit: str = COMMIT
    endpoint: str = ""
    downloads: list[str] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """What makes the clients ask this server."""
        return environment_of(self.endpoint)


def environment_of(endpoint: str) -> dict[str, str]:
    """What makes the hub's clients ask ``endpoint``: they read it as they are imported."""
    return {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}


@functools.cache
def _held() -> socket.socket:
    """Keeps one port for the hubs of this process, at which nobody answers while there is none."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


def usual_address() -> tuple[str, int]:
    """Where ``serve_hub`` serves, one hub after another: all runs have it, and may be forks of one process."""
    address: tuple[str, int] = _held().getsockname()
    return address


def usual_endpoint() -> str:
    """The URL of that."""
    return "http://{}:{}".format(*usual_address())


class _Sharing(ThreadingHTTPServer):
    """Listens at a port that is held."""

    allow_reuse_port = True


@contextmanager
def serve_hub(
    repositories: Mapping[str, Path],
    *,
    gated: frozenset[str] = frozenset(),
    commit: str = COMMIT,
    port: int | None = None,
) -> Iterator[Hub]:
    """Serve until the block ends; every branch of every repository is at ``commit``.

    ``port`` is for a second hub beside another: 0 for any.
    """
    hub = Hub(repositories, gated, commit)

    class Handler(Answering):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/").removeprefix("api/").removeprefix("models/")
            length = 3 if path.startswith("datasets/") else 2
            parts = path.split("/")
            name, rest = "/".join(parts[:length]), parts[length:]
            if name in hub.gated:
                self.refuse(403, "GatedRepo")
            elif name not in hub.repositories:
                # The hub does not tell strangers which private repositories there are.
                self.refuse(401, "RepoNotFound")
            elif rest[:1] == ["resolve"]:
                self.send_file(hub.repositories[name] / "/".join(rest[2:]))
            elif rest[:1] == ["tree"]:
                recursive = "recursive=true" in self.path.lower()
                self.send_tree(hub.repositories[name], "/".join(rest[2:]), recursive=recursive)
            else:
                siblings = [{"rfilename": file} for file in files_below(hub.repositories[name])]
                self.answer(json.dumps({"id": name, "sha": hub.commit, "siblings": siblings}).encode())

        def send_file(self, path: Path) -> None:
            if not path.is_file():
                self.refuse(404, "EntryNotFound")
                return
            data = path.read_bytes()
            if self.command == "GET":
                hub.downloads.append(path.name)
            self.answer(data, 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": hub.commit})

        def send_tree(self, root: Path, folder: str, *, recursive: bool) -> None:
            found = sorted((root / folder).rglob("*") if recursive else (root / folder).glob("*"))
            self.answer(json.dumps([entry(root, path) for path in found]).encode())

        def refuse(self, status: int, code: str) -> None:
            self.answer(b"{}", status, {"X-Error-Code": code})

    with served(Handler, _Sharing, usual_address()[1] if port is None else port) as hub.endpoint:
        yield hub


def entry(root: Path, path: Path) -> dict[str, object]:
    """A file or folder in the listing of a repository."""
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
    data = path.read_bytes()
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def files_below(root: Path) -> dict[str, Path]:
    """All files of a repository by their names in it."""
    return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
