"""A server that speaks so much of the hub's HTTP API as its client needs to make repositories and commit to them.

Large files go by Git LFS: the client's other protocol, xet, needs a service of its own, and is turned off.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sft_api.place import HUB_RECORD
from tests.answering import Answering, served

TOKEN = "hf_write"


@dataclass
class Repository:
    """One repository: commits of all branches by their id, each with all of its files."""

    private: bool = True
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: Mapping[str, bytes], title: str = "initial commit") -> str:
        """Put ``files``, all of them, into ``branch``; the commit."""
        name = hashlib.sha1(f"{branch} {len(self.titles)}".encode()).hexdigest()
        self.titles.append(title)
        self.commits[name] = dict(files)
        self.branches[branch] = name
        return name

    def files(self, branch: str = "main") -> dict[str, bytes]:
        """What lies in ``branch``."""
        return self.commits[self.branches[branch]]


@dataclass
class Fault:
    """What the server does once in place of an answer to a request of ``method`` with ``path`` in it."""

    method: str
    path: str
    does: int | str
    """A status; ``cut``: close the connection; ``lose``: do what was asked for, and then close it."""


@dataclass
class UploadHub:
    """What the server has, and what it was asked for."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files, by their digest."""
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    writers: set[str] = field(default_factory=lambda: {TOKEN})
    """Tokens that may write."""
    endpoint: str = ""

    def environment(self) -> dict[str, str]:
        """What makes the clients ask this server."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}

    def sent(self) -> list[str]:
        """Digests of the large files that were sent, in their order."""
        return [request.rpartition("/")[2] for request in self.asked if request.startswith("PUT /lfs/")]


def as_exported(folder: Path) -> dict[str, bytes]:
    """Files of the export in ``folder`` that a copy has unchanged: not the model card, and not the word of the copy."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in (HUB_RECORD, "README.md"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class _Refused(Exception):
    def __init__(self, status: int, code: str = "") -> None:
        self.status, self.code = status, code


@contextmanager
def serve_uploads() -> Iterator[UploadHub]:
    """Serve until the block ends."""
    hub = UploadHub()

    class Handler(Answering):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.serve()

        do_POST = do_PUT = do_GET

        def serve(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            body = self.body()
            fault = next((each for each in hub.faults if each.method == self.command and each.path in path), None)
            if fault is not None:
                hub.faults.remove(fault)
            if fault is not None and fault.does == "cut":
                self.close_connection = True
                return
            try:
                if fault is not None and isinstance(fault.does, int):
                    raise _Refused(fault.does)
                # Where it was asked: there may be something between the client and this server.
                here = f"http://{self.headers['Host']}"
                answer = asked(hub, here, self.command, path, body, self.headers.get("Authorization", ""))
            except _Refused as refused:
                self.say({"error": "refused"}, refused.status, {"X-Error-Code": refused.code} if refused.code else {})
                return
            if fault is not None and fault.does == "lose":
                self.close_connection = True
                return
            self.say(answer)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def say(self, answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    with served(Handler) as hub.endpoint:
        yield hub


def asked(hub: UploadHub, here: str, method: str, path: str, body: bytes, login: str) -> Any:
    """The answer to one request; raises _Refused."""
    if method == "PUT" and path.startswith("/lfs/"):
        digest = path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != digest:
            raise _Refused(400)
        hub.objects[digest] = body
        return {}
    writes = login.removeprefix("Bearer ") in hub.writers
    if path == "/api/validate-yaml":
        return {"errors": [], "warnings": []}
    if path == "/api/repos/create":
        return _create(hub, json.loads(body), writes)
    if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
        return {"transfer": "basic", "objects": [_large(hub, here, each) for each in json.loads(body)["objects"]]}
    found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(.*))?", path)
    name, rest = (found[1], found[2] or "") if found else ("", "")
    repository = hub.repositories.get(name)
    if repository is None or (repository.private and not writes):
        raise _Refused(401 if not writes else 404, "RepoNotFound")
    what, _, about = rest.partition("/")
    if what == "auth-check":
        if not writes:
            raise _Refused(403)
        return {}
    if what in ("", "revision"):
        return {"id": name, "private": repository.private, "sha": _commit_of(repository, about or "main")}
    if what == "tree":
        files = repository.commits[_commit_of(repository, about)]
        return [_entry(path, content) for path, content in files.items()]
    if not writes:
        raise _Refused(403)
    if what == "branch":
        if about in repository.branches:
            raise _Refused(409)
        repository.commit(about, repository.files())
        return {}
    if what == "preupload":
        there = repository.files(about)
        return {"files": [_preuploaded(file, there) for file in json.loads(body)["files"]]}
    if what == "commit":
        return _commit(hub, repository, f"{hub.endpoint}/{name}", about, body)
    raise _Refused(404)


def _create(hub: UploadHub, wanted: dict[str, Any], writes: bool) -> Any:
    name = f"{wanted['organization']}/{wanted['name']}"
    if not writes:
        raise _Refused(403)
    if name in hub.repositories:
        raise _Refused(409)
    hub.repositories[name] = Repository(private=wanted.get("visibility") == "private")
    hub.repositories[name].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
    return {"url": f"{hub.endpoint}/{name}"}


def _commit_of(repository: Repository, revision: str) -> str:
    if revision in repository.commits:
        return revision
    if revision not in repository.branches:
        raise _Refused(404, "RevisionNotFound")
    return repository.branches[revision]


def _large(hub: UploadHub, here: str, wanted: dict[str, Any]) -> dict[str, Any]:
    said = {"oid": wanted["oid"], "size": wanted["size"]}
    if wanted["oid"] in hub.objects:
        return said
    return {**said, "actions": {"upload": {"href": f"{here}/lfs/{wanted['oid']}?Signature=secret"}}}


def git_blob(content: bytes) -> str:
    """By which git names a file of ``content``."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": git_blob(content)}
    if _is_large(path):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def _preuploaded(file: dict[str, Any], there: Mapping[str, bytes]) -> dict[str, Any]:
    path, ignored = file["path"], there.get(".gitignore", b"").decode().split()
    mode = "lfs" if _is_large(path) else "regular"
    said = {"path": path, "uploadMode": mode, "shouldIgnore": path in ignored}
    if path in there:
        content = there[path]
        said["oid"] = hashlib.sha256(content).hexdigest() if _is_large(path) else git_blob(content)
    return said


def _commit(hub: UploadHub, repository: Repository, url: str, branch: str, body: bytes) -> Any:
    header, *operations = [json.loads(line) for line in body.splitlines()]
    if header["value"].get("parentCommit") not in (None, repository.branches[branch]):
        raise _Refused(412)
    files = dict(repository.files(branch))
    for operation in operations:
        value = operation["value"]
        if operation["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif operation["key"] == "lfsFile":
            files[value["path"]] = hub.objects[value["oid"]]
        elif operation["key"] == "deletedFile":
            del files[value["path"]]
    commit = repository.commit(branch, files, header["value"]["summary"])
    return {"commitUrl": f"{url}/commit/{commit}", "commitOid": commit}
