"""FSDP2: parameters, gradients and optimizer state sharded over the processes."""

from .sharding import build_model
from .strategy import FsdpStrategy

__all__ = ["FsdpStrategy", "build_model"]
