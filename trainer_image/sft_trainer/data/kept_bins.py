"""How many bins each window of large data makes, kept in the cache: every process asks for it at every start."""

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sft_api.checkpoints import digest_of
from sft_api.plan import Plan
from sft_api.v1alpha1.job import SFTJobSpec

from .batches import PACKING_WINDOW
from .tokenized import TokenizedSource

log = logging.getLogger("sft_trainer")

VERSION = 1
"""To be raised with every change of the stream or of packing that changes how many bins a window makes."""
_LEAST_WINDOWS = 256
"""Fewer are packed in a second."""


class KeptBins:
    """Of the training data of one run, in a cache folder."""

    def __init__(self, spec: SFTJobSpec, plan: Plan, train: Sequence[TokenizedSource], cache: Path) -> None:
        decides = {
            "version": VERSION,
            "window": PACKING_WINDOW,
            "data": [source.digest for source in train],
            "weights": [source.weight for source in spec.data.train],
            "sampler": spec.data.sampler,
            "seed": spec.training.seed,
            "epochs": plan.epochs,
            "tokens": plan.max_tokens_per_micro_batch,
        }
        self._path = cache / "bins" / f"{digest_of(decides)}.json"

    def read(self) -> list[int] | None:
        """The bins of every window; None where nothing whole is kept of them."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            document = json.loads(self._path.read_bytes())
            stated = document.pop("sha256")
            if stated == digest_of(document):
                bins: list[int] = document["bins"]
                return bins
        return None

    def keep(self, bins: Sequence[int]) -> None:
        """Keep them where it is worth it, and can be done."""
        if len(bins) < _LEAST_WINDOWS:
            return
        document: dict[str, object] = {"bins": [*bins]}
        partial = self._path.with_name(f".{self._path.name}-{os.uname().nodename}-{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({**document, "sha256": digest_of(document)}))
            partial.replace(self._path)
        except OSError as error:
            log.warning("%s is not kept, and counted again at the next start: %s", self._path, error)
