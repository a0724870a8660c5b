"""Tables with a row for each token, embeddings and head, of a run that adds tokens to those that its files know."""

from dataclasses import dataclass

_MULTIPLE = 64
"""Of rows where a table gets more: products with a head of an odd number of columns are slow on GPUs."""


@dataclass(frozen=True)
class Table:
    """One of them."""

    stored: int
    """Rows in files."""
    new: range
    """Tokens that are added."""

    @property
    def rows(self) -> int:
        """That it has in the run: as many as in files, where these are enough."""
        return max(self.stored, -(-self.new.stop // _MULTIPLE) * _MULTIPLE if self.new.stop > self.stored else 0)

    @property
    def known(self) -> range:
        """Rows of tokens that were known before."""
        return range(min(self.stored, self.new.start))

    @property
    def named(self) -> int:
        """Rows up to that of the last token, where it got more than files have; all of them else."""
        return self.new.stop if self.rows > self.stored else self.rows
