"""For tests only, as the ``sitecustomize`` of an image: the shim is there before Megatron-Core is."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _Before(MetaPathFinder):
    """Finds nothing. Whoever only asks whether Megatron-Core is there has no torch yet, and gets no shim."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "megatron.core" and "torch" in sys.modules:
            sys.meta_path.remove(self)
            from tests.megatron import shim

            shim.install()


sys.meta_path.insert(0, _Before())
