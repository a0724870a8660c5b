"""Hand an image from buildah's storage to containerd without copying a byte of its layers.

Both keep a layer as a folder that is never written again, on the same file system. So a layer becomes a
snapshot by hard links, and only the image's manifest and configuration are imported (an export and import
of the trainer's layers takes minutes and three times their size).
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

from tests.cluster.node import ctr

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_KEPT = "containerd.io/gc.root"


def import_image(storage: Path, name: str, inspected: str) -> None:
    """Make containerd know image `name`; `inspected` is what `buildah inspect --type=image` says of it."""
    image = json.loads(inspected)
    manifest, config = image["Manifest"].encode(), image["Config"].encode()
    manifest_digest = _digest(manifest)
    if _known_images().get(name) == manifest_digest:
        return
    difference_ids = json.loads(config)["rootfs"]["diff_ids"]
    parent = ""
    snapshots = []
    for difference_id, folder in zip(difference_ids, _layer_folders(storage, difference_ids), strict=True):
        chain = _digest(f"{parent} {difference_id}".encode()) if parent else difference_id
        _make_snapshot(chain, parent, folder)
        snapshots.append(chain)
        parent = chain
    ctr("images", "import", "-", stdin=_archive(name, manifest, config))
    for snapshot in snapshots:  # the image holds them from now on; without it they may go
        ctr("snapshots", "label", snapshot, f"{_KEPT}=")
    _remove_replaced_images()


def _known_images() -> dict[str, str]:
    """containerd's image names, each with its manifest's digest."""
    rows = [line.split() for line in ctr("images", "ls").splitlines()[1:]]
    return {row[0]: row[2] for row in rows}


def _remove_replaced_images() -> None:
    """The CRI plugin names every image a second time, by digest; that name would keep a replaced image for ever."""
    known = _known_images()
    current = {digest for name, digest in known.items() if not name.startswith("sha256:")}
    for name, digest in known.items():
        if name.startswith("sha256:") and digest not in current:
            ctr("images", "rm", "--sync", name)


def _layer_folders(storage: Path, difference_ids: list[str]) -> list[Path]:
    """buildah's folders of the layers, lowest first, found by walking up from the top layer."""
    layers = json.loads((storage / "overlay-layers" / "layers.json").read_text())
    by_id = {layer["id"]: layer for layer in layers}
    for top in layers:
        chain = [top]
        while chain[-1].get("parent"):
            chain.append(by_id[chain[-1]["parent"]])
        chain.reverse()
        if [layer.get("diff-digest") for layer in chain] == difference_ids:
            return [storage / "overlay" / layer["id"] / "diff" for layer in chain]
    raise RuntimeError(f"no layers {difference_ids} in {storage}: remove that folder to build the images anew")


def _make_snapshot(chain: str, parent: str, source: Path) -> None:
    if chain in ctr("snapshots", "ls").split():
        return
    key = f"import-{chain}"
    ctr("snapshots", "rm", key, check=False)  # left by an import that was interrupted
    ctr("snapshots", "prepare", key, *([parent] if parent else []))
    target = _writable_folder(ctr("snapshots", "mounts", "/unused", key))
    subprocess.run(["cp", "--archive", "--link", f"{source}/.", target], check=True)
    ctr("snapshots", "commit", chain, key)


def _writable_folder(mount_command: str) -> str:
    """From `mount -t overlay overlay /unused -o ...,upperdir=F,...` or `mount -t bind F /unused -o ...`."""
    words = mount_command.split()
    if words[2] == "bind":
        return words[3]
    options = words[words.index("-o") + 1].split(",")
    return next(option.removeprefix("upperdir=") for option in options if option.startswith("upperdir="))


def _archive(name: str, manifest: bytes, config: bytes) -> bytes:
    """An OCI layout with no layers in it: their snapshots are there already."""
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": OCI_MANIFEST,
                "digest": _digest(manifest),
                "size": len(manifest),
                "annotations": {"io.containerd.image.name": name},
            }
        ],
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps(index).encode(),
        f"blobs/sha256/{_digest(manifest).removeprefix('sha256:')}": manifest,
        f"blobs/sha256/{_digest(config).removeprefix('sha256:')}": config,
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
