"""A stage of a pipeline, or a chunk of it: consecutive layers of Megatron-Core, without its ``GPTModel``."""

from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module

from sft_trainer.models.activations import forgetting
from sft_trainer.models.noise import Noise
from sft_trainer.topology import Topology

from .layers import Documents, Norm, layer_spec
from .layout import Sizes, own_layers, padded_rows


class Stage(torch.nn.Module):
    """Layers of this process: the first of the model embed, the last ones end in the final norm and have the head."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: Sizes,
        topology: Topology,
        windows: list[int | None],
        activations: Literal["none", "selective", "full"],
        chunk: int = 0,
    ) -> None:
        """``windows`` are those of all layers of the model, ``chunk`` counts those of this process."""
        super().__init__()
        # Names that the schedule asks for.
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = sizes.tied
        self._padding = sizes.padding
        self._part = (topology.place("tensor"), topology.tensor) if config.sequence_parallel else (0, 1)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        stage, chunks = topology.place("pipeline"), own_layers(sizes, topology)
        self._begins = stage == chunk == 0
        self._ends = (stage, chunk) == (topology.pipeline - 1, len(chunks) - 1)
        here, virtual = chunks[chunk], {"vp_stage": chunk} if len(chunks) > 1 else {}
        if self._begins:
            self.embedding = VocabParallelEmbedding(
                padded_rows(sizes, topology) * topology.tensor,
                sizes.width,
                init_method=lambda weight: None,
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                tp_group=groups.tp,
            )
        self.layers = torch.nn.ModuleDict(
            {
                str(number): build_module(
                    layer_spec(config), config=config, layer_number=place, pg_collection=groups, **virtual
                )
                for place, number in enumerate(here, 1)
            }
        )
        for number, layer in self.layers.items():
            attention: Any = layer.get_submodule("self_attention.core_attention")
            attention.window = windows[int(number)]
        self._forwards = [forgetting(layer, activations) for layer in self.layers.values()]
        if self._ends:
            self.norm = Norm(config, sizes.width, config.layernorm_epsilon)
            if not (self._begins and sizes.tied):
                shape = (padded_rows(sizes, topology), sizes.width)
                self.head = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self._input: Any = None

    def set_input_tensor(self, tensors: Any) -> None:
        """What the stage before this one gave: called by the schedule."""
        self._input = tensors[0] if isinstance(tensors, list) else tensors

    @property
    def head_weight(self) -> torch.Tensor:
        """(rows, width) of the head, on the last stage."""
        return self.get_parameter("head" if hasattr(self, "head") else "embedding.weight")

    def forward(self, input_ids: torch.Tensor, documents: Documents, noise: Noise | None = None) -> torch.Tensor:
        """Of ``input_ids`` (tokens,): on the last stage (tokens, width), of others (tokens or a part, 1, width).

        ``noise`` is added to the embeddings.
        """
        hidden: torch.Tensor = self._input
        if self._begins:
            hidden = self.embedding(input_ids.unsqueeze(0))
            if not self.config.sequence_parallel:
                hidden = hidden.transpose(0, 1).contiguous()
            if self._padding is not None:
                # As transformers' embedding, which Megatron's is not told of: its row has no gradient from here.
                place, parts = self._part
                learns = (input_ids != self._padding).chunk(parts)[place]
                hidden = torch.where(learns[:, None, None], hidden, hidden.detach())
            if noise is not None:
                place, parts = self._part
                here = replace(noise, first=noise.first + place * (input_ids.shape[0] // parts))
                ends = documents.boundaries["cu_seq_lens_q"]
                hidden = hidden + here.values(hidden.transpose(0, 1), ends).unsqueeze(1)
        for forward in self._forwards:
            hidden, _ = forward(hidden, attention_mask=None, packed_seq_params=documents)
        if not self._ends:
            return hidden
        hidden = self.norm(hidden)
        # The loss is of all tokens, and its gradient the sum of what all parts of the vocabulary give.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return hidden.squeeze(1)
