"""What each rank writes and reads: boxes of tensors, of bounded size, and nothing but tensors.

torch's own planners pickle whatever is no tensor, and unpickle it without any restriction. These refuse it
on both sides.
"""

import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.errors import ConfigError

MAX_ITEM_BYTES = 128 * 2**20
"""Larger boxes are saved in pieces along their first dimension: readers hold whole items in memory, because
they check an item's digest before they use any of it."""

Stage = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class TensorSavePlanner(DefaultSavePlanner):
    """Plans a save once, at construction, so that the save itself can run in the background.

    ``state_dict`` maps names to tensors (plain, DTensor, or anything that DCP can shard); TypeError for
    anything else. ``stage`` is called with this rank's boxes and returns copies to save in their place.
    """

    def __init__(self, state_dict: Mapping[str, torch.Tensor], stage: Stage | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes: dict[MetadataIndex, torch.Tensor] = {}
        self._items: list[WriteItem] = []
        for name, value in state_dict.items():
            _check_saveable(name, value)
        self.state_dict = dict(state_dict)
        self.is_coordinator = False
        items = [item for item in super().create_local_plan().items if not _is_empty_share(item)]
        boxes: Sequence[torch.Tensor] = [self.lookup_object(item.index).detach() for item in items]
        self.state_dict = {}  # the boxes are what is saved; once they are staged, parameters may change
        for item, box in zip(items, stage(boxes) if stage else boxes, strict=True):
            self._add(item, box)

    def _add(self, item: WriteItem, box: torch.Tensor) -> None:
        assert item.tensor_data is not None  # noqa: S101 - only tensors got here
        for start, piece in _pieces(box):
            offsets = _shifted(item.tensor_data.chunk.offsets, start)
            index = MetadataIndex(item.index.fqn, offsets)
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(piece.shape))
            self._boxes[index] = piece
            self._items.append(
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
                )
            )

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._boxes[write_item.index]


def _is_empty_share(item: WriteItem) -> bool:
    """Ranks beyond the end of an unevenly sharded tensor hold none of it."""
    data = item.tensor_data
    return data is not None and math.prod(data.chunk.sizes) == 0 and math.prod(data.size) > 0


def _check_saveable(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}: a checkpoint holds tensors only, put scalars into the manifest"
        )
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.layout != torch.strided or local.is_quantized or local.is_meta:
        raise TypeError(f"{name!r} is a {local.layout} tensor on {local.device}: only dense tensors can be saved")


def _pieces(box: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """``box`` in pieces of at most MAX_ITEM_BYTES where rows allow, each with its first row."""
    if box.dim() == 0 or box.nbytes <= MAX_ITEM_BYTES:
        return [(0, box)]
    rows = max(1, MAX_ITEM_BYTES * box.shape[0] // box.nbytes)
    return [(start, box[start : start + rows]) for start in range(0, box.shape[0], rows)]


def _shifted(offsets: torch.Size, rows: int) -> torch.Size:
    return torch.Size((offsets[0] + rows, *offsets[1:])) if offsets else offsets


class TensorLoadPlanner(DefaultLoadPlanner):
    """Plans which boxes fill the tensors of a state dict, in place.

    ConfigError when a tensor is missing in the checkpoint or has another shape or dtype there; tensors that
    only the checkpoint has are left alone, so a part of a state (the weights, say) can be loaded.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None  # noqa: S101 - the reader always has one
        for name, value in state_dict.items():
            _check_saveable(name, value)
            _check_matches(name, value, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        read: dict[str, int] = {}
        for item in plan.items:
            read[item.dest_index.fqn] = read.get(item.dest_index.fqn, 0) + math.prod(item.lengths)
        for name, value in self.state_dict.items():
            wanted = _local_elements(value)
            if read.get(name, 0) != wanted:
                raise CheckpointCorruptError(
                    f"the checkpoint's items hold {read.get(name, 0)} of the {wanted} elements of {name!r} needed here"
                )
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointCorruptError(f"{read_item.storage_index.fqn!r} is no tensor; pickled objects are never read")


def _check_matches(name: str, value: torch.Tensor, metadata: Metadata) -> None:
    stored = metadata.state_dict_metadata.get(name)
    advice = "resume from a checkpoint of the same model and settings, or start anew with another checkpoint.uri"
    if not isinstance(stored, TensorStorageMetadata):
        raise ConfigError(f"the checkpoint has no tensor {name!r}; {advice}")
    shape = tuple(getattr(value, "global_shape", value.shape))
    if tuple(stored.size) != shape or stored.properties.dtype != value.dtype:
        raise ConfigError(
            f"{name!r} has shape {list(stored.size)} and {stored.properties.dtype} in the checkpoint, "
            f"{list(shape)} and {value.dtype} in this run; {advice}"
        )


def _local_elements(value: torch.Tensor) -> int:
    if isinstance(value, DTensor):
        return value.to_local().numel() if value.device_mesh.get_coordinate() is not None else 0
    boxes = getattr(value, "local_sizes", None)
    return value.numel() if boxes is None else sum(math.prod(sizes) for sizes in boxes)
