"""Exports of checkpoints, and the plain exporter that they are compared with: it gathers the live model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sft_api.checkpoints import CheckpointId, Manifest, RunState
from sft_api.place import EXPORT_RECORD
from sft_trainer.boxes import Box
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.store import Store
from sft_trainer.export.companions import companions
from sft_trainer.export.exporting import Exported, export_checkpoint
from sft_trainer.export.values import Base
from sft_trainer.models.causal_lm import CausalLM, build_on_meta
from sft_trainer.models.digest import base_digest
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.topologies import here

CARD = "# a model\n"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


def save(boxes: list[Box], store: Store, step: int = 6, **run: Any) -> Manifest:
    """The checkpoint of ``boxes``, of all ranks; its manifest on every rank."""
    manager = CheckpointManager(store, here())
    attempt = manager.claim_attempt("job")
    manager.save(step, boxes, RunState(cursor=step, **run), asynchronous=False, keep=KeepPolicy(needed=lambda _: True))
    found = Catalog(store).find(CheckpointId(attempt, step))
    assert isinstance(found, Manifest), found
    return found


def exported(store: Store, manifest: Manifest, folder: Path, model: CausalLM | None = None) -> Exported:
    """The checkpoint of ``manifest``, of a run that started from the model in ``folder``."""
    blueprint = model or build_on_meta(folder)
    return Exported(
        store=store,
        manifest=manifest,
        model=blueprint,
        folder=folder,
        tokenizer=chat_tokenizer("chatml"),
        card=CARD,
        name="tiny",
        base=lambda: Base(folder, base_digest(build_on_meta(folder), folder)),
    )


def export(what: Exported, target: Store, **options: Any) -> None:
    """Of all ranks, or of this process alone."""
    from datetime import timedelta

    export_checkpoint(what, target, CheckpointGroup(here(), timedelta(minutes=2)), **options)


def export_live(model: CausalLM, folder: Path, source: Path, *, file_bytes: int = 2**40, writes: bool = True) -> None:
    """What ``model`` holds now, gathered tensor by tensor; collective where it is sharded."""
    dtype = model.stored_dtype
    files: list[list[tuple[str, torch.Tensor]]] = [[]]
    filled = 0
    for name, tensor in _live_tensors(model, dtype):
        if filled and filled + tensor.nbytes > file_bytes:
            files.append([])
            filled = 0
        files[-1].append((name, tensor))
        filled += tensor.nbytes
    if not writes:
        return
    folder.mkdir()
    count = len(files)
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        file = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, tensor in tensors:
            ends = [position, position + tensor.nbytes]
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
            position += tensor.nbytes
            weight_map[name] = file
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        values = b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in tensors)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + values)
    if count > 1:
        total = sum(tensor.nbytes for tensors in files for _, tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for name, content in companions(model, source, chat_tokenizer("chatml"), CARD).items():
        (folder / name).write_bytes(content)


def _live_tensors(model: CausalLM, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    huggingface: Any = model.huggingface
    for name, parameter in huggingface.named_parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        yield name, whole.to(dtype).cpu().contiguous()
    computed = {name for name, _ in huggingface.named_non_persistent_buffers()}
    yield from ((name, buffer) for name, buffer in huggingface.named_buffers() if name not in computed)


def model_in(folder: Path) -> dict[str, bytes]:
    """The ``content`` of an export but for what says whose it is, which no other program writes."""
    return {name: raw for name, raw in content(folder).items() if name != EXPORT_RECORD}


def content(folder: Path) -> dict[str, bytes]:
    """Every file in ``folder``, also hidden ones."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
