"""Rows of tokens that a run adds: what embeddings and head begin with where files know nothing of them."""

from typing import Any

import torch

from sft_trainer.names.tables import Table

_AT_ONCE = 4096
"""Rows of a table that are read at a time for the mean of all."""


class EnlargedSlices:
    """A slice reader of a ``table`` in files, with the rows that it has in the run.

    Rows of new tokens, and those behind the last one of the file, are the mean of the rows of all tokens that were
    known, in the dtype of the file: the same to the last bit, whoever reads which part of them.
    """

    def __init__(self, stored: Any, table: Table) -> None:
        self._stored = stored
        self._table = table

    def get_shape(self) -> list[int]:
        rows, *columns = self._stored.get_shape()
        # Another number than the config says is found to be that where shapes are compared.
        return [self._table.rows if rows == self._table.stored else rows, *columns]

    def get_dtype(self) -> str:
        dtype: str = self._stored.get_dtype()
        return dtype

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        rows, *columns = place
        there = slice(min(rows.start, self._table.stored), min(rows.stop, self._table.stored))
        values: torch.Tensor = self._stored[(there, *columns)]
        numbers = torch.arange(rows.start, rows.stop)
        begun = (numbers >= self._table.stored) | (
            (numbers >= self._table.new.start) & (numbers < self._table.new.stop)
        )
        if bool(begun.any()):
            more = values.new_empty(len(numbers) - len(values), *values.shape[1:])
            values = torch.cat([values, more])
            values[begun] = self._mean(columns).to(values.dtype)
        return values

    def _mean(self, columns: list[slice]) -> torch.Tensor:
        """Of the rows that were known, (columns,) in fp64."""
        count, total = len(self._table.known), torch.zeros((), dtype=torch.float64)
        for begin in range(0, count, _AT_ONCE):
            block = self._stored[(slice(begin, min(begin + _AT_ONCE, count)), *columns)]
            total = total + _sum_of_rows(block.double())
        return total / count


def _sum_of_rows(block: torch.Tensor) -> torch.Tensor:
    """Of ``block``, (rows, …): halves are added to one another, in an order that no number of threads changes."""
    while len(block) > 1:
        half = len(block) // 2
        block = torch.cat([block[:half] + block[half : 2 * half], block[2 * half :]])
    return block[0]
