"""The strategy Megatron: ``sft_trainer.strategies.Strategy`` over stages of Megatron-Core's layers, and our AdamW.

Importing it imports Megatron-Core, which takes seconds: it is imported where it is asked for.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.megatron import MegatronSpec, megatron_of
from sft_trainer.boxes import WEIGHT, Box, Writers
from sft_trainer.data.feed import BinTensors
from sft_trainer.data.parts import part_of
from sft_trainer.loss import Objective, evaluation_sums, linear_cross_entropy
from sft_trainer.models.attention import boundary_arguments
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.exchange import shared_tokens
from sft_trainer.models.noise import Noise
from sft_trainer.models.weights import initialize_buffers
from sft_trainer.optim import build_optimizer, moments, set_updates, update, updates
from sft_trainer.strategies.fitting import check_fits
from sft_trainer.topology import Topology
from sft_trainer.trainable import Trainable

from . import gradients, interleaved, layout
from .fitting import estimate_blueprint
from .held import Held, updated
from .layers import Documents, transformer_config, virtual_size, windows
from .refused import check
from .stage import Stage
from .vocabulary import GroupRows


class MegatronStrategy:
    """Model and optimizer of one process; see the protocol for what its methods promise."""

    auxiliary = False

    def __init__(
        self,
        config: TrainerConfig,
        blueprint: CausalLM,
        trainable: Trainable,
        topology: Topology,
        device: torch.device,
        gpu_memory: int | None = None,
    ) -> None:
        """``gpu_memory`` are the bytes of ``device``, where it is no host.

        Raises ``ConfigError`` for what it does not compute, and what does not fit.
        """
        huggingface: Any = blueprint.huggingface
        megatron = megatron_of(config.spec)
        assert megatron is not None  # noqa: S101 - else another strategy is built
        check(megatron, blueprint, trainable, config.plan.processes)
        if gpu_memory is not None:
            estimate = partial(estimate_blueprint, config, blueprint)
            check_fits(config, blueprint, gpu_memory, device, estimate, tells=topology.tells)
        self._sizes, self._topology, self._device = layout.Sizes.of(huggingface.config, megatron), topology, device
        self._sequence_parallel = megatron.shares_tokens
        self._objective = Objective.of(config.spec.training)
        self._noise_alpha = config.spec.training.neftune_noise_alpha or 0.0
        self._form_groups()
        self._dtype = torch.bfloat16 if config.plan.precision == "bf16" else torch.float32
        # transformers' own module rotates as the model says, whatever scaling it has.
        self._rotary = huggingface.base_model.rotary_emb.to_empty(device=device)
        initialize_buffers(blueprint)
        self.chunks = self._build(huggingface.config, megatron, config.spec.training.activation_checkpointing)
        self.held = [
            Held(name, parameter, topology, self._sizes)
            for chunk in self.chunks
            for name, parameter in chunk.named_parameters()
        ]
        self.optimizer = build_optimizer(updated(self.held), config.spec, config.plan.learning_rate)

    def boxes(self, which: Literal["base", "trained", "optimizer"]) -> list[Box]:
        writers = Writers(self._topology)
        if which == "trained":
            return self._boxes({name: rows.detach() for name, rows in updated(self.held)}, WEIGHT, writers)
        if which == "base":
            return []
        of = moments(self.optimizer)
        each = {name: of[rows] for name, rows in updated(self.held)}
        kinds = dict.fromkeys(kind for values in each.values() for kind in values)
        return [
            box
            for kind in kinds
            for box in self._boxes({name: values[kind] for name, values in each.items()}, kind, writers)
        ]

    @property
    def updates(self) -> int:
        return updates(self.optimizer)

    @updates.setter
    def updates(self, count: int) -> None:
        set_updates(self.optimizer, count)

    def loaded(self) -> None:
        gradients.publish(self.held)

    def forward_backward(self, bins: Iterable[BinTensors], denominator: int, tokens: int = 0) -> torch.Tensor:
        for chunk in self.chunks:
            chunk.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)

        def loss(hidden: torch.Tensor, bin_: BinTensors) -> torch.Tensor:
            scaled, total = linear_cross_entropy(
                hidden[bin_.targets],
                self._head(),
                bin_.labels,
                1.0 / denominator if bin_.counts else 0.0,
                held=self._rows,
                objective=self._objective,
            )
            if bin_.counts:
                loss_sum.add_(total)
            return scaled

        self._run(bins, loss, forward_only=False)
        gradients.add_up(self.held, self._topology, sequence_parallel=self._sequence_parallel, tied=self._sizes.tied)
        return loss_sum

    def grad_norm(self) -> torch.Tensor:
        return gradients.norm_of(self.held, self._device)

    @torch.no_grad()
    def apply(self, rate: float, max_norm: float, norm: torch.Tensor, ok: torch.Tensor) -> None:
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_([rows for _, rows in updated(self.held)], max_norm, norm)
        update(self.optimizer, rate, torch.logical_not(ok).float())
        for held in self.held:
            held.forget()
        gradients.publish(self.held)

    @torch.no_grad()
    def forward_sums(self, bins: Iterable[BinTensors]) -> torch.Tensor:
        for chunk in self.chunks:
            chunk.eval()
        sums = torch.zeros((2,), dtype=torch.float64, device=self._device)

        def evaluate(hidden: torch.Tensor, bin_: BinTensors) -> torch.Tensor:
            both = torch.stack(evaluation_sums(hidden[bin_.targets], self._head(), bin_.labels, held=self._rows))
            if bin_.counts:
                sums.add_(both)
            return both[0]

        self._run(bins, evaluate, forward_only=True)
        return sums

    def _form_groups(self) -> None:
        with self._topology.forming():
            parallel_state.initialize_model_parallel(
                self._topology.tensor,
                self._topology.pipeline,
                virtual_size(self._sizes),
                context_parallel_size=self._topology.sequence,
                expert_model_parallel_size=self._topology.expert,
                expert_tensor_parallel_size=1 if self._sizes.experts else None,
                create_gloo_process_groups=False,
                distributed_timeout_minutes=self._topology.timeout.total_seconds() / 60,
            )
        # Nothing draws random numbers: the states of a GPU need not be kept.
        initialize_rng_tracker(inference_rng_tracker=True)
        most = layout.padded_rows(self._sizes, self._topology)
        first = self._topology.place("tensor") * most
        self._tokens = min(self._sizes.vocabulary - first, most)
        group = parallel_state.get_tensor_model_parallel_group()
        self._rows = GroupRows(first, most, self._sizes.vocabulary, group) if self._topology.tensor > 1 else None
        self._shared: dict[str, Any] = {}
        if self._topology.sequence > 1:
            context, place = parallel_state.get_context_parallel_group(), self._topology.place("sequence")
            self._shared["shared_tokens"] = shared_tokens(context, place)

    def _build(
        self, huggingface: Any, megatron: MegatronSpec, activations: Literal["none", "selective", "full"]
    ) -> list[Stage]:
        config = transformer_config(huggingface, self._sizes, self._topology, self._dtype, megatron)
        with torch.device("meta"):
            chunks = [
                Stage(config, self._sizes, self._topology, windows(huggingface), activations, chunk)
                for chunk in range(self._sizes.chunks)
            ]
        for chunk in chunks:
            chunk.to_empty(device=self._device)
            for parameter in chunk.parameters():
                # Rows of no token are in no box: nothing else fills them.
                parameter.detach().zero_()
        return chunks

    def _boxes(self, tensors: dict[str, torch.Tensor], kind: str, writers: Writers) -> list[Box]:
        return layout.stage_boxes(tensors, kind, self._sizes, self._topology, writers)

    def _head(self) -> torch.Tensor:
        """The rows that are tokens."""
        return self.chunks[-1].head_weight[: self._tokens]

    def _run(
        self,
        bins: Iterable[BinTensors],
        loss: Callable[[torch.Tensor, BinTensors], torch.Tensor],
        *,
        forward_only: bool,
    ) -> None:
        """Every bin through all stages; on the last ``loss``, of whose result ``backward`` is called."""
        if self._topology.pipeline == 1:
            for bin_ in map(self._here, bins):
                result = loss(self._forward(self.chunks[0], bin_), bin_)
                if not forward_only:
                    result.backward()
            return

        def step(remaining: Any, chunk: Stage) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
            bin_ = next(remaining)
            # Of tokens the schedule wants a number, by which nothing is divided.
            nothing = torch.zeros((), dtype=torch.int, device=self._device)
            return self._forward(chunk, bin_), lambda hidden: (loss(hidden, bin_), nothing, {})

        several = len(self.chunks) > 1
        every = interleaved.filled(bins, self._topology.pipeline) if several else list(bins)
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[map(self._here, every) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(every),
            # Bins tell their own lengths; this is divided by both.
            seq_length=self._topology.tensor * self._topology.sequence,
            micro_batch_size=1,
            forward_only=forward_only,
            **(interleaved.options(self.chunks[0].config) if several else {}),
        )

    def _forward(self, chunk: Stage, bin_: BinTensors) -> torch.Tensor:
        kind = torch.empty((), dtype=self._dtype, device=self._device)
        cos, sin = self._rotary(kind, bin_.position_ids.unsqueeze(0))
        boundaries = boundary_arguments(bin_.boundaries) | self._shared
        documents = Documents(qkv_format="sbhd", boundaries=boundaries, cos=cos, sin=sin)
        noise = Noise.of(bin_, self._noise_alpha) if chunk.training else None
        hidden: torch.Tensor = chunk(bin_.input_ids, documents, noise)
        return hidden

    def _here(self, bin_: BinTensors) -> BinTensors:
        """What this process computes of ``bin_``, on its device."""
        multiple, degree = self._topology.tensor if self._sequence_parallel else 1, self._topology.sequence
        if degree > 1:
            part = part_of(bin_, self._topology.place("sequence"), degree, multiple)
            # What was cut lies elsewhere than what was pinned.
            return (part.pinned() if self._device.type == "cuda" else part).to(self._device)
        tokens = bin_.input_ids.shape[0]
        return bin_.filled_up(tokens + -tokens % multiple).to(self._device)
