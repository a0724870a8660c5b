"""Folders of adapters as peft saves them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/model",
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "runtime_config": {"ephemeral_gpu_offload": False},
}


def zeros(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> None:
    """A safetensors ``file`` of zeros."""
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        begin, end = end, end + SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def adapters_in(
    folder: Path, *layers: str, ranks: Mapping[str, int] | None = None, dtype: str = "F32", **config: Any
) -> Path:
    """Those of ``layers``, 4 to 6 numbers wide, with ``config`` beside what peft writes of them."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {**CONFIG, **config}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    shapes = dict[str, tuple[int, ...]]()
    for layer in layers:
        rank = (ranks or {}).get(layer, written["r"])
        shapes[f"base_model.model.{layer}.lora_A.weight"] = (rank, 4)
        shapes[f"base_model.model.{layer}.lora_B.weight"] = (6, rank)
    zeros(folder / "adapter_model.safetensors", shapes, dtype)
    return folder
