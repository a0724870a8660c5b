"""Matrices of which each process holds some rows are orthogonalised, whole, by one process each.

They go in turns of as many as there are holders, of like size: in one exchange each process sends its rows of each to
the process that has that one in this turn, and gets its rows of what became of it in another one. What the next turn
needs comes while this one is computed. Experts are shared out whole, and stay where they are. Replicas take turns, and
tell each other what came of them: none computes what another one has, and all go on with the same bits.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sft_trainer.boxes import share_of_rows
from sft_trainer.muon import Ahead, orthogonalise_, orthogonalise_all
from sft_trainer.topology import Topology

Turn = list[DTensor]
"""As many matrices as there are holders, or fewer; or one stack of them."""


def orthogonalise_shared(
    parameters: Sequence[torch.Tensor], ahead: Ahead, dtype: torch.dtype, topology: Topology
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``sft_trainer.muon.Orthogonalise``, computed in ``dtype``: a collective call where parameters are split by rows.

    All of them are, over one mesh, or none is.
    """
    shared = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not shared:
        yield from orthogonalise_all(parameters, ahead, dtype)
        return
    mesh = shared[0].device_mesh
    copy, holders = topology.place("replicate"), mesh.get_group("shard")
    rounds = rounds_of(shared, topology.holders, topology.replicate)
    # The last one is of nothing: there is none to come.
    mine = [*(turns[copy] if copy < len(turns) else [] for turns in rounds), []]
    coming = _Exchange(mine[0], ahead, dtype, topology, holders)
    for turns, following in zip(rounds, mine[1:], strict=True):
        here = coming
        here.wait()
        coming = _Exchange(following, ahead, dtype, topology, holders)
        own = here.orthogonalised()
        for other, turn in enumerate(turns):
            sizes = [_elements(each, topology.holders, topology.holder) for each in turn]
            # What another replica computed comes from the process that holds the same rows there.
            rows = own if other == copy else torch.empty(sum(sizes), dtype=dtype, device=shared[0].device)
            if topology.replicate > 1:
                dist.broadcast(rows, group=mesh.get_group("replicate"), group_src=other)
            yield from zip(turn, rows.split(sizes), strict=True)


def rounds_of(parameters: Sequence[DTensor], holders: int, copies: int) -> list[list[Turn]]:
    """The turns of ``parameters``, largest first; in each round every one of the ``copies`` has one, as long as there
    are any."""
    matrices = sorted((each for each in parameters if each.ndim == 2), key=lambda each: -each.numel())
    turns = [matrices[first : first + holders] for first in range(0, len(matrices), holders)]
    turns += [[each] for each in parameters if each.ndim > 2]
    return [turns[first : first + copies] for first in range(0, len(turns), copies)]


class _Exchange:
    """One turn of the processes of a group; made, what it needs is on its way."""

    def __init__(
        self, turn: Turn, ahead: Ahead, dtype: torch.dtype, topology: Topology, group: dist.ProcessGroup
    ) -> None:
        self._group, self._work = group, None
        self._leaving: list[int] = []
        self._arriving: list[int] = []
        if not turn:
            self._rows = self._whole = torch.empty(0, dtype=dtype)
            return
        if turn[0].ndim > 2:
            self._rows = self._whole = ahead(turn[0]).to(dtype)
            return
        holders, here = topology.holders, topology.holder
        self._leaving = [_elements(each, holders, here) for each in turn] + [0] * (holders - len(turn))
        mine = turn[here] if here < len(turn) else None
        self._arriving = [0 if mine is None else _elements(mine, holders, holder) for holder in range(holders)]
        self._rows = torch.empty(sum(self._leaving), dtype=dtype, device=turn[0].device)
        for each, rows in zip(turn, self._rows.split(self._leaving), strict=False):
            rows.copy_(ahead(each).view(-1))
        self._whole = self._rows.new_empty((0, 0) if mine is None else tuple(mine.shape))
        self._work = dist.all_to_all_single(
            self._whole.view(-1), self._rows, self._arriving, self._leaving, group=group, async_op=True
        )

    def wait(self) -> None:
        """Until it has come: on a GPU what is launched afterwards waits, and the host does not."""
        if self._work is not None:
            self._work.wait()

    def orthogonalised(self) -> torch.Tensor:
        """This process's rows of what came of each matrix, one behind the other."""
        orthogonalise_(self._whole)
        if self._work is not None:
            dist.all_to_all_single(self._rows, self._whole.view(-1), self._leaving, self._arriving, group=self._group)
        return self._rows.view(-1)


def _elements(parameter: DTensor, holders: int, holder: int) -> int:
    """How many of those of ``parameter`` one of its ``holders`` has."""
    _, rows = share_of_rows(parameter.shape[0], holders, holder)
    return rows * prod(parameter.shape[1:])
