"""The strategy FSDP: ``sft_trainer.strategies.Strategy`` over a sharded model, and its optimizer."""

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Literal

import torch

from sft_api.memory import holds_copies, micro_batch_tokens, offloads
from sft_api.trainer_config import TrainerConfig
from sft_trainer.boxes import Box
from sft_trainer.data.batches import empty_micro_batch
from sft_trainer.data.feed import BinTensors
from sft_trainer.data.parts import part_of
from sft_trainer.errors import ConfigError
from sft_trainer.models.causal_lm import CausalLM, draws_random_numbers
from sft_trainer.models.compiling import failed_to_compile, of_the_machine
from sft_trainer.models.experts import Balance
from sft_trainer.models.noise import Noise
from sft_trainer.models.tensors import stored_tensors
from sft_trainer.optim import build_optimizer, matrices_of, set_updates, update, updates
from sft_trainer.strategies.fitting import check_fits
from sft_trainer.topology import Topology
from sft_trainer.trainable import Trainable

from .boxes import model_boxes, optimizer_boxes, part_by_rows
from .copies import Copies
from .fitting import estimate_blueprint
from .grouping import grouped, with_last
from .memory import BinsPerForward, Memory
from .sharding import (
    add_up_processes,
    add_up_replicas,
    build_model,
    computed_dtype,
    gradient_norm,
    kept_gathered_bytes,
    may_add_up_later,
    whole_gradient_bytes,
)
from .whole_matrices import orthogonalise_shared

_COMPILED_WITH_TOKENS = 1024
"""Of each process at most: what is compiled fits any number, is best for about as many, and memory for more is not
known of."""

log = logging.getLogger("sft_trainer")


class FsdpStrategy:
    """Model and optimizer of one process; see the protocol for what its methods promise."""

    def __init__(
        self,
        config: TrainerConfig,
        blueprint: CausalLM,
        trainable: Trainable,
        topology: Topology,
        device: torch.device,
        memory: Memory | None = None,
    ) -> None:
        """``memory`` of the device decides whether the run fits, else ``ConfigError``, and how many bins are computed
        at once; without it, each goes alone."""
        self._device = device
        self._offloads = offloads(config.spec)
        self._topology = topology
        huggingface: Any = blueprint.huggingface
        self._names = blueprint.names
        self._base = {
            part.name
            for name, tensor in stored_tensors(blueprint)
            if not trainable.saves(name)
            for part in self._names.parts(name, tuple(tensor.shape))
        }
        self._packed = trainable.packed(huggingface)
        spec = config.spec
        bin_tokens = micro_batch_tokens(spec, config.plan)
        self._bin_tokens = bin_tokens * topology.sequence
        self._adds_up_once = topology.replicate > 1 and may_add_up_later(config)
        self._reduces_once = config.plan.reduce_gradients == "oncePerStep"
        self._balance = spec.training.router_aux_loss_coefficient
        self._noise_alpha = spec.training.neftune_noise_alpha or 0.0
        self.auxiliary = self._balance > 0
        if self.auxiliary:
            blueprint.keep_router_logits()
        self._compiles, self._evaluates = config.plan.compile, spec.data.evaluates
        self._together = (
            BinsPerForward(memory, bin_tokens, device) if memory and not draws_random_numbers(blueprint) else None
        )
        if memory is not None:
            check_fits(
                config,
                blueprint,
                memory.total(),
                device,
                lambda: estimate_blueprint(config, blueprint, trainable),
                tells=topology.tells,
            )
        self.model = build_model(config, blueprint, trainable, topology, device)
        copies = holds_copies(spec, config.plan, topology.world_size)
        self._copies = Copies(self.model, computed_dtype(config)) if copies else None
        if self._together:
            self._together.gathered = kept_gathered_bytes(config, self.model)
            if self._reduces_once:
                self._together.held_between = whole_gradient_bytes(self.model)
        self.optimizer = build_optimizer(
            self.model.named_parameters(),
            config.spec,
            config.plan.learning_rate,
            functools.partial(part_by_rows, topology=topology),
            matrices_of(self.model.blocks),
            functools.partial(orthogonalise_shared, dtype=computed_dtype(config), topology=topology),
        )

    def boxes(self, which: Literal["base", "trained", "optimizer"]) -> list[Box]:
        if which == "optimizer":
            return optimizer_boxes(self.model, self.optimizer, self._names, self._topology)
        base = self._base
        held = model_boxes(self.model, self._names, self._topology, self._packed)
        return [box for box in held if (box.name in base) == (which == "base")]

    @property
    def updates(self) -> int:
        return updates(self.optimizer)

    @updates.setter
    def updates(self, count: int) -> None:
        set_updates(self.optimizer, count)

    def loaded(self) -> None:
        """Nothing follows from the weights but, where layers are compiled, that they can be tried."""
        if not self._compiles:
            return
        try:
            self._compile()
        except Exception as error:
            if (cause := of_the_machine(error)) is not None:
                # Not from this one, which comes of it.
                raise cause from None
            if not failed_to_compile(error):
                raise
            text = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the layers of this model cannot be compiled ({type(error).__name__}: {text}): set training.compile: "
                "false"
            ) from error

    def forward_backward(self, bins: Iterable[BinTensors], denominator: int, tokens: int = 0) -> torch.Tensor:
        self.model.train()
        loss_sum, most_tokens, passes = self._zero(), 0, 0
        # The denominators are those of the whole step, so gradients only need to be summed.
        balance = self._balance / tokens if self.auxiliary else None
        for bin_, loss, total in self._passes(bins, 1.0 / denominator, balance):
            loss.backward()
            passes += 1
            if bin_.counts:
                loss_sum += total
                most_tokens = max(most_tokens, bin_.input_ids.shape[0])
        if self._together and self._together.after_pass(most_tokens, passes) and self._topology.tells:
            log.info("there is memory for %s bins in one forward pass: so many are computed at once", self._at_once)
        return loss_sum

    def grad_norm(self) -> torch.Tensor:
        return gradient_norm(self.model, self._device)

    @torch.no_grad()
    def apply(self, rate: float, max_norm: float, norm: torch.Tensor, ok: torch.Tensor) -> None:
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        skips = torch.logical_not(ok).float()
        # What is in host memory is updated by the host, which waits for the verdict.
        update(self.optimizer, rate, skips.cpu() if self._offloads else skips)

    @torch.no_grad()
    def forward_sums(self, bins: Iterable[BinTensors]) -> torch.Tensor:
        self.model.eval()
        sums = torch.zeros((2,), dtype=torch.float64, device=self._device)
        for bin_, *both in self._passes(bins, None):
            if bin_.counts:
                sums += torch.stack(both)
        return sums

    def _compile(self) -> None:
        """Have everything compiled that the run needs, by micro-batches that do not count: no step waits for it.

        Two, as a number that was another once, the longest length, is compiled for any. All tokens have labels:
        the loss is compiled for two at least, and best for about as many.
        """
        sizes = (min(self._bin_tokens, _COMPILED_WITH_TOKENS * self._topology.sequence), 2)
        bins = [BinTensors.of(empty_micro_batch(tokens, trained=tokens), counts=False) for tokens in sizes]
        self.model.train()
        for _, loss, _ in self._passes(bins, 1.0, 0.0 if self.auxiliary else None):
            loss.backward()
        self.optimizer.zero_grad()
        if self._evaluates:
            self.forward_sums(bins)

    def _here(self, bins: Iterable[BinTensors]) -> Iterator[BinTensors]:
        """What this process computes of ``bins``, on its device, as many at once as go through one forward pass."""
        if self._topology.sequence == 1:
            yield from grouped((bin_.to(self._device) for bin_ in bins), self._at_once)
            return
        for together in grouped(bins, self._at_once):
            part = part_of(together, self._topology.place("sequence"), self._topology.sequence)
            # What was put together lies elsewhere than what was pinned.
            yield (part.pinned() if self._device.type == "cuda" else part).to(self._device)

    @property
    def _at_once(self) -> int:
        return self._together.count if self._together else 1

    def _zero(self) -> torch.Tensor:
        return torch.zeros((2,) if self.auxiliary else (), dtype=torch.float64, device=self._device)

    def _passes(
        self, bins: Iterable[BinTensors], scale: float | None, balance: float | None = None
    ) -> Iterator[tuple[BinTensors, torch.Tensor, torch.Tensor]]:
        """What goes through the model at once, and what its forward pass gives, by ``scale`` and that of routers."""
        with self._copies.in_place() if self._copies else nullcontext():
            for bin_, last in with_last(self._here(bins)):
                if self._reduces_once:
                    add_up_processes(self.model, after_this_pass=last)
                elif self._adds_up_once:
                    add_up_replicas(self.model, after_this_pass=last)
                noise = None if scale is None else Noise.of(bin_, self._noise_alpha)
                # Random numbers (dropout) depend on the bin alone: not on what ran before, nor on who computes it.
                torch.manual_seed(bin_.seed)
                one, other = self.model(
                    bin_.input_ids,
                    bin_.position_ids,
                    bin_.boundaries,
                    bin_.targets,
                    bin_.labels,
                    scale if scale is None or bin_.counts else 0.0,
                    None if balance is None else Balance(balance if bin_.counts else 0.0, bin_.sizes, bin_.held),
                    noise,
                )
                yield bin_, one, other
