"""Llama 4, of which three things are computed here: its experts, and what of its attention depends on positions.

transformers sends every token to all experts, and multiplies what goes to most of them by 0: here a token goes to those
that it is sent to. Its attention looks at no token of another chunk of so many, and has another temperature for later
tokens of a document in layers without rotary positions: both count from the beginning of a document.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import torch

from sft_trainer.versions import with_head

from .grouped_experts import grouped_experts

KIND = "llama4_text"
"""``model_type`` of its text part."""
CHUNKED = "chunked_attention"
"""What its config calls layers whose attention looks at no other chunk."""
CHUNK = "attention_chunk"
"""What of an attention says how many tokens are a chunk; None where it looks at all of a document."""


@cache
def text_class() -> type:
    """The class of its text part: a causal language model of transformers' modules, some of them as they are here."""
    from transformers import Llama4TextModel
    from transformers.models.llama4 import modeling_llama4 as theirs

    base: Any = with_head(Llama4TextModel)
    of_attention: Any = theirs.Llama4TextAttention
    of_experts: Any = theirs.Llama4TextExperts
    of_mixture: Any = theirs.Llama4TextMoe

    class Attention(of_attention):  # type: ignore[misc]
        def forward(self, *arguments: Any, **named: Any) -> Any:
            # Where there are documents attention itself does it, which knows where they begin.
            self.attn_temperature_tuning = self.has_temperature and named.get("document_ends") is None
            return super().forward(*arguments, **named)

    class Experts(of_experts):  # type: ignore[misc]
        has_gate, has_bias, is_transposed = True, False, True
        scales_inputs = swapped_for_peft = True

        def _apply_gate(self, product: torch.Tensor) -> torch.Tensor:
            gate, up = product.chunk(2, dim=-1)
            gated: torch.Tensor = up * self.act_fn(gate)
            return gated

        def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return grouped_experts(self, hidden, chosen, weights)

    class Mixture(of_mixture):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = hidden.reshape(-1, self.hidden_dim)
            scores, logits = self.router(hidden)
            chosen = logits.topk(self.top_k, dim=1).indices
            output = self.shared_expert(hidden) + self.experts(hidden, chosen, scores.gather(1, chosen))
            return output, logits

    own = {of_attention: Attention, of_experts: Experts, of_mixture: Mixture}

    class TextOfLlama4(base):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for module in self.modules():
                module.__class__ = own.get(type(module), type(module))
            for kind, layer in zip(config.layer_types, self.model.layers, strict=True):
                attention = layer.self_attn
                attention.has_temperature = attention.attn_temperature_tuning and not attention.use_rope
                attention.attention_chunk = config.attention_chunk_size if kind == CHUNKED else None

    for made in (*own.values(), TextOfLlama4):
        made.__module__ = base.__module__
    return TextOfLlama4


def at_temperature(module: Any, query: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
    """``query`` (1, heads, tokens, head size) of an attention ``module`` times the temperature of its tokens.

    1 + attn_scale * log(1 + floor(position / floor_scale)), as transformers computes it, with positions from 1 on
    within each document. ``ends`` (documents + 1,) is on the device of ``query``; no document is longer than
    ``longest``.
    """
    if not module.has_temperature or longest < module.floor_scale:
        return query
    tokens = torch.arange(query.shape[2], dtype=ends.dtype, device=query.device)
    begins = ends[torch.searchsorted(ends, tokens, right=True) - 1]
    steps = torch.floor((tokens - begins + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    scaled: torch.Tensor = (query * scales[:, None]).to(query.dtype)
    return scaled


def in_chunks(module: Any, ends: torch.Tensor) -> torch.Tensor | None:
    """Where chunks end in which an attention ``module`` looks at tokens, and documents, whose ``ends`` (documents + 1,)
    are on the CPU; None where those of documents are all."""
    chunk = getattr(module, CHUNK)
    if chunk is None:
        return None
    documents = ends.tolist()
    if all(end - begin <= chunk for begin, end in pairwise(documents)):
        return None
    found = [place for begin, end in pairwise(documents) for place in range(begin, end, chunk)]
    return torch.tensor([*found, documents[-1]], dtype=ends.dtype)
