"""Weights of gpt-oss in MXFP4, as it is published, made from plain ones."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Of the values of four bits, by their lower three."""
QUANTISED = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
"""What the config of the published models says of it."""


def pack(folder: Path, files: int = 1) -> None:
    """Put the experts of the model in ``folder`` in MXFP4, the rest in bf16; tensors go round so many ``files``."""
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(value)
        else:
            tensors[name] = value.bfloat16()
    (folder / "model.safetensors").unlink()
    shared: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, value) in enumerate(sorted(tensors.items())):
        file = f"model-{number % files + 1:05d}-of-{files:05d}.safetensors" if files > 1 else "model.safetensors"
        shared.setdefault(file, {})[name] = value
    for file, held in shared.items():
        save_file(held, folder / file, metadata={"format": "pt"})
    if files > 1:
        index = {"metadata": {}, "weight_map": {name: file for file, held in shared.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISED}))


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks (experts, outputs, inputs / 32, 16) and scales of ``weight`` (experts, inputs, outputs), rounded."""
    blocks = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    # So that the largest of a block is 4 to 8 times its scale.
    exponents = blocks.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    values = blocks / exponents.exp2()[..., None]
    codes = (values.abs()[..., None] - _SIZES).abs().argmin(-1) + 8 * (values < 0)
    low, high = codes[..., ::2], codes[..., 1::2]
    return (low + 16 * high).to(torch.uint8), (exponents + 127).to(torch.uint8)
