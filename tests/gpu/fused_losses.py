"""The loss of the head, as it is and compiled, beside the fused ones of kept libraries, of which one might take its
place."""

from typing import Any

import torch

from tests.bench.loss import SIZES, Case, candidates, measure

from .figures import Figure
from .kernels import require

_SMALL = (128, 64, 2048)


def fused_losses(device: torch.device) -> dict[str, Figure]:
    """Time of theirs by ours (below 1 they win), and the most memory of each, for one large head in bf16; and of ours
    with the part that is compiled, and as no GPU computes it (``apart``)."""
    on_gpu = device.type == "cuda"
    size = SIZES["cuda"][0] if on_gpu else _SMALL
    figures: dict[str, Any] = {}
    case = Case(device.type, torch.bfloat16 if on_gpu else torch.float32, *size)
    for name, (ratio, megabytes, error) in measure(case, candidates(device.type, size[2]), 3).items():
        figures |= {f"loss_{name}_time_by_ours": ratio, f"loss_{name}_megabytes": megabytes}
        figures[f"loss_{name}_gradient_error"] = error
    for name in ("ours", "compiled"):
        require(f"loss_{name}_gradient_error", figures[f"loss_{name}_gradient_error"], 2e-2)
    del figures["loss_ours_time_by_ours"]
    return figures
