"""Tiny models over shapes of processes, and what is compared of them; see ``__main__``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from sft_api.checkpoints import RunState
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.megatron import MegatronSpec
from sft_trainer.boxes import WEIGHT, Box, Rectangle, Writers, boxes_in
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.data.batches import empty_micro_batch
from sft_trainer.data.feed import BinTensors
from sft_trainer.data.parts import part_of
from sft_trainer.distributed import Ranks
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.weights import load_weights
from sft_trainer.names.canonical import Names
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.strategies.megatron.layout import Sizes, stage_boxes
from sft_trainer.topology import Topology
from sft_trainer.trainable import EVERYTHING
from tests.bins import random_bin
from tests.errors import worst
from tests.megatron import shim
from tests.megatron.models import VOCABULARY
from tests.parity.runs import manifest, resolve

RATE = 3e-3


@dataclass(frozen=True)
class Case:
    """A model, and the shape of the processes that compute it."""

    model: str
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    chunks: int = 1
    """Of each stage: interleaved."""
    expert: int = 1
    tokens_too: bool = False
    """Sequence parallel."""
    activations: str = "none"
    precision: str = "fp32"
    fsdp: bool = False
    """The other strategy, over all processes."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """``transformerConfigOverrides``."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """``training.optimizer``."""
    objective: Mapping[str, Any] = field(default_factory=dict)
    """Of ``training`` what says which loss is trained, and with what noise."""

    @property
    def name(self) -> str:
        """Short, for a line of output."""
        degrees = {"tp": self.tensor, "cp": self.context, "pp": self.pipeline, "vpp": self.chunks, "ep": self.expert}
        words = [f"{word}{degree}" for word, degree in degrees.items() if degree > 1]
        words += [self.precision] * (self.precision != "fp32")
        words += ["fsdp"] * self.fsdp + [f"{name}={value}" for name, value in self.overrides.items()]
        words += [f"{name}={value}" for name, value in self.objective.items()]
        words += ["sp"] * self.tokens_too + [self.activations] * (self.activations != "none")
        return "-".join([self.model, *words])

    @property
    def degrees(self) -> dict[str, Any]:
        """As a manifest names them."""
        return {
            "tensorParallelDegree": self.tensor,
            "contextParallelDegree": self.context,
            "pipelineParallelDegree": self.pipeline,
            "virtualPipelineParallelDegree": self.chunks,
            "expertParallelDegree": self.expert,
            "sequenceParallel": self.tokens_too,
            "transformerConfigOverrides": {**self.overrides},
        }

    @property
    def megatron(self) -> MegatronSpec:
        """``strategy.megatron``."""
        return MegatronSpec.model_validate(self.degrees)

    def topology(self, config: TrainerConfig) -> Topology:
        """Of this process in its group: what is not in the shape is data parallel."""
        rank, world = dist.get_rank(), dist.get_world_size()
        return Topology.planned(config.plan, Ranks(rank, rank, world, world, "", 0, ""))


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
OF_TWO = (
    Case("qwen3", tensor=2),
    Case("qwen3", tensor=2, tokens_too=True),
    Case("llama", tensor=2, tokens_too=True),
    Case("llama", pipeline=2),
    Case("qwen2_tied", tensor=2, tokens_too=True, activations="selective"),
    Case("mistral", pipeline=2),
    Case("qwen3_window", pipeline=2),
    Case("qwen3_tied", pipeline=2, activations="full"),
    Case("qwen3"),
    Case("qwen3_moe", expert=2),
    Case("qwen3_moe_raw", tensor=2, expert=2, tokens_too=True),
    Case("qwen3_moe", pipeline=2),
    Case("qwen3_window", context=2),
    Case("qwen3_moe", context=2, expert=2),
    Case(
        "qwen3_window",
        pipeline=2,
        overrides={LAST: 1, "batch_p2p_comm": False, "deallocate_pipeline_outputs": False},
    ),
    Case("qwen3_moe_raw", pipeline=2, overrides={FIRST: 1, "moe_router_dtype": "fp64"}),
    Case("qwen3_window", pipeline=2, chunks=2),
    Case("qwen3_tied", pipeline=2, chunks=2, activations="full"),
    Case("qwen3_moe", pipeline=2, chunks=2),
    Case("qwen3_deep", pipeline=2, chunks=2, overrides={FIRST: 6, "batch_p2p_comm": False}),
    Case("qwen3_moe_window"),
)
OF_THREE = (
    Case("qwen3_moe"),
    Case("qwen3_tied", pipeline=3, overrides={FIRST: 1, LAST: 1}),
)
"""Over which neither rows nor experts divide, and a stage that has no copy of the embedding."""
OF_FOUR = (
    Case("qwen3", tensor=2, pipeline=2, tokens_too=True),
    Case("qwen3_tied", tensor=2, pipeline=2, overrides={FIRST: 3, LAST: 1}),
    Case("qwen3_deep", pipeline=4, chunks=2),
    Case("qwen3_tied", tensor=2, pipeline=2, chunks=2, tokens_too=True),
    Case("llama", tensor=2),
    Case("llama", tensor=2, pipeline=2, tokens_too=True),
    Case("qwen3_moe", pipeline=2, expert=2),
    Case("qwen3_moe", tensor=2, pipeline=2, tokens_too=True),
    Case("qwen3_moe_raw", tensor=2, expert=4, tokens_too=True),
    Case("llama", tensor=2, context=2, tokens_too=True, activations="selective"),
    Case("qwen3_tied", context=2, pipeline=2, activations="full"),
    Case("qwen3_tied", context=2, pipeline=2, chunks=2),
    Case("mistral", context=2),
    Case("qwen3_moe_raw", expert=2),
    Case("qwen3_moe", tensor=2, context=2, expert=2, tokens_too=True),
)
TRAINED = (
    Case("qwen3_tied", tensor=2),
    Case("qwen3_tied", pipeline=2),
    Case("qwen3_tied"),
    Case("qwen3_moe", expert=2),
    Case("qwen3_moe", pipeline=2),
    Case("qwen3_tied", pipeline=2, overrides={FIRST: 3}),
    Case("qwen3_tied", pipeline=2, chunks=2),
    Case("qwen3_tied", tensor=2, tokens_too=True, precision="bf16"),
    Case("qwen3_tied", context=2),
    Case("qwen3_moe", context=2, expert=2),
    Case("qwen3_moe"),
)
"""By two processes, beside FSDP in fp32."""


def bins_of(step: int) -> list[BinTensors]:
    """Of all processes: several documents in each."""
    lengths = ((20, 13, 7), (31, 5), (9, 9, 9, 9))
    return [random_bin(10 * step + place, *each, vocabulary=VOCABULARY) for place, each in enumerate(lengths)]


def share(bins: Sequence[BinTensors], topology: Topology) -> list[BinTensors]:
    """Of this process, as many as of any other: the last ones perhaps empty."""
    mine = list(bins[topology.data_rank :: topology.data_parallel])
    most = -(-len(bins) // topology.data_parallel)
    return mine + [BinTensors.of(empty_micro_batch(), counts=False)] * (most - len(mine))


def counted(bins: Sequence[BinTensors]) -> int:
    """Trained tokens."""
    return sum(len(bin_.labels) for bin_ in bins)


def built(models: Path, case: Case, *, filled: bool = True) -> tuple[Any, Topology]:
    """The strategy of ``case``, and the topology; with the weights of the files where ``filled``."""
    from megatron.core import parallel_state

    from sft_trainer.strategies.megatron.strategy import MegatronStrategy

    parallel_state.destroy_model_parallel()
    path = models / case.model
    training: dict[str, Any] = {"precision": case.precision, "activationCheckpointing": case.activations}
    training.update(case.objective)
    if case.optimizer:
        training["optimizer"] = {"learningRate": RATE, **case.optimizer}
    strategy = {} if case.fsdp else {"strategy": {"megatron": case.degrees}}
    world, model = dist.get_world_size(), {"uri": f"file://{path}"}
    config = resolve(
        manifest(path, path.with_name("store"), processes=world, model=model, training=training, **strategy)
    )
    topology = case.topology(config)
    blueprint, cpu = build_on_meta(path), torch.device("cpu")
    names = blueprint.names
    made: Any
    if case.fsdp:
        made = FsdpStrategy(config, blueprint, EVERYTHING, topology, cpu)
    else:
        made = MegatronStrategy(config, blueprint, EVERYTHING, topology, cpu)
    if filled:
        load_weights(made.boxes("trained"), names, path)
        made.loaded()
    return made, topology


def summed(value: torch.Tensor, topology: Topology) -> float:
    """``value`` of those who count."""
    total = value.double() if topology.counts_loss else torch.zeros_like(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def step(
    strategy: Any, topology: Topology, number: int | Sequence[BinTensors], most: float = 1.0
) -> tuple[float, float]:
    """Mean loss and norm of the gradients of a training step, which is made; of its bins, or those of its number."""
    bins = bins_of(number) if isinstance(number, int) else number
    loss = strategy.forward_backward(share(bins, topology), counted(bins))
    norm = strategy.grad_norm()
    strategy.apply(RATE, most, norm, torch.tensor(True))
    return summed(loss, topology) / counted(bins), float(norm)


# Against Hugging Face


@dataclass
class Expected:
    """Of all bins, each document alone."""

    logits: list[torch.Tensor]
    """Of each bin at its targets."""
    weights: dict[str, torch.Tensor]
    """By canonical name."""
    gradients: dict[str, torch.Tensor]
    """As those, of the mean loss."""
    loss: float
    """Summed."""
    right: int


def expected(path: Path, bins: Sequence[BinTensors], model: Any = None) -> Expected:
    """By transformers' own model, that of ``path`` where none is given, and torch's cross-entropy."""
    from transformers import AutoModelForCausalLM

    model = model or AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    logits, loss, right = [], torch.zeros(()), 0
    for bin_ in bins:
        ends = bin_.boundaries.host_ends.tolist()
        documents = [bin_.input_ids[start:end] for start, end in pairwise(ends)]
        each = torch.cat([model(ids[None], use_cache=False).logits[0] for ids in documents])[bin_.targets]
        loss = loss + cross_entropy(each, bin_.labels, reduction="sum")
        right += int((each.argmax(-1) == bin_.labels).sum())
        logits.append(each.detach())
    (loss / counted(bins)).backward()
    weights = canonical(model, {name: parameter.detach() for name, parameter in model.named_parameters()})
    gradients = canonical(model, {name: parameter.grad for name, parameter in model.named_parameters()})
    return Expected(logits, weights, gradients, float(loss.detach()), right)


def canonical(model: Any, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """``tensors`` of transformers' ``model``, by name of a parameter."""
    names = Names.of(model.config)
    return {
        box.name: box.read()
        for name, tensor in tensors.items()
        for box in boxes_in(
            names.parts(name, tuple(tensor.shape)), WEIGHT, Rectangle.whole(tuple(tensor.shape)), tensor
        )
    }


def error(value: torch.Tensor, wanted: torch.Tensor, most: torch.Tensor | None = None, least: float = 0.0) -> float:
    """The largest difference, relative to the largest number, or to ``least`` where that is less."""
    if not value.numel():
        return 0.0
    largest = max(float((wanted if most is None else most).abs().max()), least)
    return float((value - wanted).abs().max()) / largest


def against_huggingface(models: Path, case: Case, bins: Sequence[BinTensors] = ()) -> dict[str, float]:
    """Relative errors of loss, logits, gradients and their norm, and of an evaluation; a collective call.

    And how many weights are not what the files have, to the last bit.
    """
    from transformers import AutoConfig

    from sft_trainer.strategies.megatron import strategy as module
    from sft_trainer.strategies.megatron.held import updated

    # Some gradients of what is drawn are nothing but rounding: of queries and keys where a token sees itself alone.
    least, bins = (1e-2, bins) if bins else (0.0, bins_of(0))
    wanted = expected(models / case.model, bins)
    strategy, topology = built(models, case)
    weights = {name: whole for (name, kind), whole in everything(strategy).items() if kind == WEIGHT}
    assert weights.keys() == wanted.weights.keys()
    seen: list[torch.Tensor] = []
    plain = module.linear_cross_entropy

    def watched(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any, held: Any, **options: Any) -> Any:
        seen.append(_all_columns(hidden.detach() @ weight.detach().T, held))
        return plain(hidden, weight, *rest, held=held, **options)

    module.linear_cross_entropy = watched
    try:
        loss = summed(strategy.forward_backward(share(bins, topology), counted(bins)), topology)
    finally:
        module.linear_cross_entropy = plain
    norm = float(strategy.grad_norm())
    gradients = {name: rows.grad for name, rows in updated(strategy.held) if rows.grad is not None}
    sizes = Sizes.of(AutoConfig.from_pretrained(models / case.model), case.megatron)
    parts = stage_boxes(gradients, "gradient", sizes, topology, Writers(topology))
    wanted_norm = float(torch.stack([g.square().sum() for g in wanted.gradients.values()]).sum().sqrt())
    sums = strategy.forward_sums(share(bins, topology))
    evaluated, right = (summed(each, topology) for each in sums)
    assert right == wanted.right, (case.name, right, wanted.right)
    multiple = topology.tensor if case.tokens_too else 1
    mine = [
        logits[_are_here(bin_, topology, multiple)]
        for bin_, logits in [*zip(bins, wanted.logits, strict=True)][topology.data_rank :: topology.data_parallel]
    ]
    last = topology.place("pipeline") == topology.pipeline - 1
    rounds = case.pipeline if case.chunks > 1 else 1
    assert len(seen) == (-(-len(share(bins, topology)) // rounds) * rounds if last else 0)
    here = {
        "weights": float(sum(not torch.equal(whole, wanted.weights[name]) for name, whole in weights.items())),
        "loss": abs(loss - wanted.loss) / wanted.loss,
        "eval_loss": abs(evaluated - wanted.loss) / wanted.loss,
        "norm": abs(norm - wanted_norm) / wanted_norm,
        "logits": worst(error(a, b) for a, b in zip(seen, mine, strict=False)),
        "gradient": worst(
            error(box.read(), (whole := wanted.gradients[box.name])[_index(box)], whole, least * wanted_norm)
            for box in parts
        ),
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, here)
    return {key: worst(each[key] for each in every) for key in here}


def _are_here(bin_: BinTensors, topology: Topology, multiple: int) -> torch.Tensor:
    """Of every target of ``bin_`` whether this process has its token."""
    each = len(part_of(bin_, 0, topology.sequence, multiple).input_ids)
    return bin_.targets // each == topology.place("sequence")


def _index(box: Box) -> tuple[slice, ...]:
    return box.place.within(Rectangle.whole(box.shape))


def _all_columns(logits: torch.Tensor, held: Any) -> torch.Tensor:
    if held is None:
        return logits
    every: list[Any] = [None] * held.group.size()
    dist.all_gather_object(every, logits, group=held.group)
    return torch.cat(every, dim=-1)


# Against FSDP, and through checkpoints


def curve(models: Path, case: Case, steps: int) -> list[float]:
    """Loss and norm of so many steps, in turn; a collective call."""
    strategy, topology = built(models, case)
    return [figure for number in range(steps) for figure in step(strategy, topology, number)]


def beside_fsdp(models: Path, cases: Sequence[Case], steps: int) -> dict[str, float]:
    """The largest relative difference of losses and norms from those of FSDP, of each case; a collective call."""
    twins = {case.name: Case(case.model, fsdp=True, objective=case.objective) for case in cases}
    wanted = {twin.name: curve(models, twin, steps) for twin in twins.values()}
    return {
        case.name: worst(
            abs(a - b) / b for a, b in zip(curve(models, case, steps), wanted[twins[case.name].name], strict=True)
        )
        for case in cases
    }


def everything(strategy: Any) -> dict[tuple[str, str], torch.Tensor]:
    """All weights and moments, of the boxes that are written; each element is in one of them. A collective call."""
    boxes = [box for box in strategy.boxes("trained") + strategy.boxes("optimizer") if box.writes]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(box.name, box.kind, box.shape, _index(box), box.read()) for box in boxes])
    whole: dict[tuple[str, str], torch.Tensor] = {}
    for name, kind, shape, index, values in (box for boxes_of_one in every for box in boxes_of_one):
        into = whole.setdefault((name, kind), torch.full(shape, torch.nan))
        assert bool(into[index].isnan().all()), f"{kind} of {name} is written twice"
        into[index] = values
    return whole


def different(left: dict[tuple[str, str], torch.Tensor], right: dict[tuple[str, str], torch.Tensor]) -> int:
    """Tensors that are not equal to the last bit, or in one of them only."""
    same = sum(torch.equal(left[key], right[key]) for key in left.keys() & right.keys())
    return len(left.keys() | right.keys()) - same


class Checkpoints:
    """Of one folder: what the trainer writes and reads."""

    def __init__(self, folder: Path) -> None:
        self._store = LocalStore(folder)

    def _manager(self, topology: Topology) -> CheckpointManager:
        manager = CheckpointManager(self._store, topology)
        manager.claim_attempt("job")
        return manager

    def save(self, strategy: Any, topology: Topology, number: int) -> None:
        """A collective call."""
        boxes = strategy.boxes("trained") + strategy.boxes("optimizer")
        state = RunState(cursor=number, updates=strategy.updates)
        self._manager(topology).save(number, boxes, state, asynchronous=False)

    def load(self, strategy: Any, topology: Topology) -> int:
        """The newest; its step."""
        found = self._manager(topology).load_newest(strategy.boxes("trained") + strategy.boxes("optimizer"))
        assert found is not None
        strategy.updates = found.run.updates
        strategy.loaded()
        return found.step


def resharded(models: Path, folder: Path, shapes: Sequence[Case]) -> int:
    """Tensors that change when a checkpoint goes through ``shapes``, one after the other."""
    checkpoints = Checkpoints(folder)
    strategy, topology = built(models, shapes[0])
    for number in range(2):
        step(strategy, topology, number)
    before, wrong = everything(strategy), 0
    checkpoints.save(strategy, topology, 2)
    for number, case in enumerate(shapes[1:], 3):
        strategy, topology = built(models, case, filled=False)
        checkpoints.load(strategy, topology)
        wrong += different(before, everything(strategy))
        checkpoints.save(strategy, topology, number)
    return wrong


def resumed(models: Path, folder: Path, case: Case) -> int:
    """Figures and tensors that differ where a run goes on from its checkpoint, from one that was not disturbed."""
    checkpoints = Checkpoints(folder)
    strategy, topology = built(models, case)
    figures = [step(strategy, topology, number) for number in range(4)][2:]
    undisturbed = everything(strategy)
    strategy, topology = built(models, case)
    for number in range(2):
        step(strategy, topology, number)
    checkpoints.save(strategy, topology, 2)
    strategy, topology = built(models, case, filled=False)
    first = checkpoints.load(strategy, topology)
    again = [step(strategy, topology, number) for number in range(first, 4)]
    return sum(a != b for a, b in zip(figures, again, strict=True)) + different(undisturbed, everything(strategy))


def skipped(models: Path, case: Case) -> int:
    """Tensors and counts that a step changes whose figures are not finite; a collective call."""
    strategy, topology = built(models, case)
    step(strategy, topology, 0)
    before, count = everything(strategy), strategy.updates
    bins = bins_of(1)
    strategy.forward_backward(share(bins, topology), counted(bins))
    strategy.apply(RATE, 1.0, strategy.grad_norm() * torch.nan, torch.tensor(False))
    return different(before, everything(strategy)) + abs(strategy.updates - count)


# What processes are started with


def compared(models: Path, cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    """Errors of all ``cases`` that as many processes compute as call this together."""
    shim.install()
    return {case.name: against_huggingface(models, case) for case in cases}


def trained(models: Path, folder: Path) -> dict[str, Any]:
    """By two processes: curves beside those of FSDP, and what checkpoints change."""
    shim.install()
    dense, experts, (uneven, chunks, bf16, tokens, *copies) = TRAINED[:3], TRAINED[3:5], TRAINED[5:]
    fsdp = Case("qwen3_tied", fsdp=True)
    return {
        "steps": beside_fsdp(models, TRAINED, 20),
        "reshard_mismatch": resharded(
            models,
            folder / "dense",
            [*dense[:2], uneven, chunks, fsdp, tokens, uneven, chunks, dense[2], bf16, dense[0]],
        )
        + resharded(
            models,
            folder / "experts",
            [*copies, experts[1], Case("qwen3_moe", fsdp=True), copies[1], experts[0], copies[0]],
        ),
        "resume_mismatch": sum(resumed(models, folder / case.name, case) for case in TRAINED),
    }
