"""Tables with a row for each token, embeddings and head, of a run that adds tokens to those that its files know."""

from dataclasses import dataclass

from sft_api.layers import ROWS_MULTIPLE

NONE_NEW = range(0)
"""Numbers of new tokens where there are none."""


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
        return self.stored if self.named == self.stored else -(-self.named // ROWS_MULTIPLE) * ROWS_MULTIPLE

    @property
    def known(self) -> range:
        """Rows of tokens that were known before."""
        return range(min(self.stored, self.new.start))

    @property
    def named(self) -> int:
        """Rows up to that of the last new token, and at least those in files."""
        return max(self.stored, self.new.stop)
