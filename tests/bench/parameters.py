"""What weights held in bf16, and moments in less than fp32, lose: gradients of a step that are added up in bf16, and
the loss that a run comes to.

    python -m tests.bench.parameters [--steps 200] [--rates 1e-5 1e-4] [--micro-batches 1 8 64 256] [--ways fp32 ...]

A small model of the Qwen3 kind learns the bytes of this repository's documents, and is then trained on those of its
Python files, computed in bf16. On the CPU; it prints
- for a step of so many micro-batches: how far its gradients are, as one vector, from those of sums in fp32 (``sums``),
  and from those that are computed in fp32 (``computed``, and with sums in fp32 ``computed_fp32_sums``);
- for each rate and way of holding weights (``fp32``; ``bf16``, rounded stochastically; ``nearest``, torch's own AdamW
  on weights in bf16) and moments (fp32, but for ``moments_bf16`` and ``moments_int8``), and for Muon with all in fp32
  (``muon``) or bf16, the loss on held-out Python files, what of the change that fp32 brings that is, and how far
  weights went.
"""

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from sft_trainer.data.batches import MicroBatch
from sft_trainer.data.feed import BinTensors
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import trainable_of
from tests.parity.runs import manifest, resolve

ROOT = Path(__file__).parents[2]
DOCUMENTS, TOKENS = 4, 256
"""Of a micro-batch."""
LEARNT = 600
"""Steps by which the model learns the documents, in fp32."""
HELD_OUT = 10
"""Every so many-th file, to evaluate on."""
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"parameterDtype": "bf16"},
    "bf16_moments_bf16": {"parameterDtype": "bf16", "optimizer": {"stateDtype": "bf16"}},
    "bf16_moments_int8": {"parameterDtype": "bf16", "optimizer": {"stateDtype": "int8"}},
    "moments_bf16": {"optimizer": {"stateDtype": "bf16"}},
    "moments_int8": {"optimizer": {"stateDtype": "int8"}},
    "nearest": {"parameterDtype": "bf16"},
    "muon": {"optimizer": {"type": "muon"}},
    "bf16_muon_bf16": {"parameterDtype": "bf16", "optimizer": {"type": "muon", "stateDtype": "bf16"}},
}


def read(files: Iterable[Path]) -> torch.Tensor:
    """Their bytes, one behind the other."""
    return torch.tensor(np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8).astype(np.int64))


def bins(text: torch.Tensor, count: int, seed: int, documents: int = DOCUMENTS) -> list[BinTensors]:
    """So many micro-batches of pieces of ``text``."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        starts = torch.randint(len(text) - TOKENS, (documents,), generator=generator).tolist()
        ids = torch.cat([text[start : start + TOKENS] for start in starts]).numpy()
        targets = np.setdiff1d(np.arange(len(ids)), np.arange(TOKENS - 1, len(ids), TOKENS))
        positions = np.tile(np.arange(TOKENS), documents)
        batch = MicroBatch(ids, positions, (TOKENS,) * documents, targets, ids[targets + 1])
        made.append(BinTensors.of(batch, seed=number))
    return made


def labels(of: list[BinTensors]) -> int:
    return sum(len(bin_.labels) for bin_ in of)


def strategy(folder: Path, **training: Any) -> FsdpStrategy:
    """The model in ``folder``, as a run trains it."""
    model = {"uri": f"file://{folder}"}
    layers = {"fsdp": {"reshardAfterForward": False}}
    config = resolve(manifest(folder, folder.with_name("store"), model=model, training=training, strategy=layers))
    made = FsdpStrategy(config, build_on_meta(folder), trainable_of(config), ALONE, torch.device("cpu"))
    load_weights(made.boxes("trained"), made.model.names, folder)
    return made


def train(of: FsdpStrategy, text: torch.Tensor, steps: int, rate: float, seed: int) -> None:
    for step in range(steps):
        batch = bins(text, 1, seed + step)
        of.forward_backward(batch, labels(batch))
        of.apply(rate, 1.0, of.grad_norm(), torch.tensor(True))


def loss(of: FsdpStrategy, held_out: list[BinTensors]) -> float:
    return float(of.forward_sums(held_out)[0]) / labels(held_out)


def vector(of: FsdpStrategy, *, gradients: bool) -> torch.Tensor:
    tensors = [parameter.grad if gradients else parameter for parameter in of.model.parameters()]
    return torch.cat([each.detach().float().flatten() for each in tensors if each is not None])


def gradient_errors(folder: Path, text: torch.Tensor, count: int) -> dict[str, float]:
    """Of a step of ``count`` micro-batches of one document each."""
    batch, found = bins(text, count, 7, documents=1), {}
    ways = {"bf16": WAYS["bf16"] | {"precision": "bf16"}, "sums": {"precision": "bf16"}, "exact": {"precision": "fp32"}}
    for name, training in ways.items():
        made = strategy(folder, **training)
        made.forward_backward(batch, labels(batch))
        found[name] = vector(made, gradients=True)

    def distance(one: str, other: str) -> float:
        return float((found[one] - found[other]).norm() / found[other].norm())

    return {
        "sums": distance("bf16", "sums"),
        "computed": distance("bf16", "exact"),
        "computed_fp32_sums": distance("sums", "exact"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-4])
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    files = sorted((ROOT / "trainer_image").rglob("*.py"))
    documents = read(sorted((ROOT / "docs").rglob("*.md")))
    program = read(file for number, file in enumerate(files) if number % HELD_OUT)
    held_out = bins(read(files[::HELD_OUT]), 8, 3)
    with tempfile.TemporaryDirectory(prefix="sft-parameters-") as scratch:
        folder = Path(scratch) / "model"
        torch.manual_seed(1)
        huggingface: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES), dtype=torch.float32)
        huggingface.save_pretrained(folder)
        learnt = strategy(folder, precision="fp32")
        train(learnt, documents, LEARNT, 1e-3, 10_000)
        # As most models are published, so that all ways begin with the same values.
        huggingface.load_state_dict(
            {name: value.detach().bfloat16() for name, value in learnt.model.huggingface.state_dict().items()}
        )
        huggingface.bfloat16().save_pretrained(folder)

        for count in arguments.micro_batches:
            errors = gradient_errors(folder, program, count)
            print(f"micro_batches={count}", *(f"{name}={error:.5f}" for name, error in errors.items()), flush=True)

        for rate in arguments.rates:
            changes: dict[str, float] = {}
            # What the others are compared with comes first.
            for name in dict.fromkeys(["fp32", *arguments.ways]):
                made = strategy(folder, precision="bf16", **WAYS[name])
                if name == "nearest":
                    made.optimizer = torch.optim.AdamW(made.model.parameters(), weight_decay=0.01, fused=True)
                before, weights = loss(made, held_out), vector(made, gradients=False)
                train(made, program, arguments.steps, rate, 20_000)
                after = loss(made, held_out)
                changes[name] = after - before
                moved = float((vector(made, gradients=False) - weights).norm() / weights.norm())
                print(
                    f"rate={rate:g} held={name} before={before:.4f} after={after:.4f} "
                    f"of_fp32={changes[name] / changes['fp32']:.3f} moved={moved:.5f}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
