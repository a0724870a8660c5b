"""The one attention path: documents of a micro-batch are concatenated, never padded, and never see one another.

The model calls the registered function with the boundaries among its keyword arguments: variable-length kernels on
the GPU, one operator for all documents on the CPU (``documents``), and one causal attention per document where neither
can be: on the GPU in fp32, with dropout, and on the CPU where values have a size of their own. What no kernel has, a
cap on the scores, sinks, and on the GPU heads of more than 256, is computed in plain torch (``explicit_attention``).
Whatever it does not know is refused, because an argument that is silently dropped trains a different model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sft_trainer.errors import ModelError
from sft_trainer.versions import variable_length_attention

from .documents import attend, window_mask
from .exchange import SharedTokens, by_heads, by_tokens, sinks_here
from .explicit_attention import attend_explicitly
from .flash_attention import Kind, attend_on_gpu, kind_of, serves
from .llama4 import CHUNK, at_temperature, in_chunks
from .windows import held

IMPLEMENTATION = "sft_documents"
"""Name under which the function is registered with transformers."""

_SHORTEST_BUCKET = 8
"""Power of 2: documents of up to so many tokens are all of one length to what depends on it."""
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_WITHOUT_DROPOUT = (
    "set model.configOverrides.attention_dropout: 0 (attention_probs_dropout_prob where the model's config.json calls "
    "it so)"
)
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
)


@dataclass(frozen=True)
class Boundaries:
    """Where the documents of a micro-batch begin and end."""

    lengths: tuple[int, ...]
    """Tokens of every document."""
    ends: torch.Tensor
    """Their cumulative sum from 0 on, int32, (documents + 1,), on the device of the tokens."""
    host_ends: torch.Tensor
    """The same on the CPU, where they are read without waiting for a device."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Boundaries":
        """Of documents of the given lengths, on the CPU."""
        ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(tuple(lengths), ends, ends)

    def to(self, device: torch.device) -> "Boundaries":
        """The same on ``device``; nothing waits for the copy."""
        return replace(self, ends=self.ends.to(device, non_blocking=True))


def boundary_arguments(boundaries: Boundaries) -> dict[str, Any]:
    """Keyword arguments of the model that carry the document boundaries.

    ``document_ends`` for this module; the ``cu_seq_lens`` and ``max_length`` names of transformers for layers that
    know boundaries themselves (linear attention, state spaces). ``max_length`` is an upper bound, one of few: kernels
    are chosen, and code is compiled, for it.
    """
    longest = 1 << max(_SHORTEST_BUCKET, (max(boundaries.lengths) - 1).bit_length())
    return {
        "document_ends": boundaries.host_ends,
        "cu_seq_lens_q": boundaries.ends,
        "cu_seq_lens_k": boundaries.ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    document_ends: torch.Tensor | None = None,
    shared_tokens: SharedTokens | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within every document.

    ``query`` is (1, heads, tokens, head size); ``key`` and ``value`` may have fewer heads (grouped-query attention).
    ``softcap`` caps the scores, ``s_aux`` (heads,) are sinks: see ``attend_explicitly``.
    Returns (1, tokens, heads, head size). Raises ``ModelError`` for anything it cannot compute exactly. With
    ``shared_tokens`` the tokens are this process's part of those whose documents ``document_ends`` tells.
    """
    # In this order: what is compiled depends on all that was looked at.
    unknown = sorted(name for name, given in arguments.items() if name not in _HARMLESS and given is not None)
    if unknown:
        raise ModelError(
            f"{type(module).__name__} needs attention features that are not supported: {', '.join(unknown)}"
        )
    if document_ends is None:
        raise ModelError(f"{type(module).__name__} does not pass document boundaries on to its attention")
    if attention_mask is not None or is_causal is False or not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__} is not a plain causal attention")
    if sliding_window is None:
        # Some hand it to masks alone, which are not made here.
        sliding_window = held(module)
    if shared_tokens is not None:
        query, key, value = by_heads(query, key, value, shared_tokens)
        output, _ = document_attention(
            module,
            query,
            key,
            value,
            None,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=None if s_aux is None else sinks_here(s_aux, shared_tokens),
            document_ends=document_ends,
            **arguments,
        )
        return by_tokens(output, shared_tokens), None
    # What is compiled depends on all that is looked at: of other models nothing is.
    if hasattr(module, CHUNK):
        ends = arguments.get("cu_seq_lens_q", document_ends)
        query = at_temperature(module, query, ends, arguments.get("max_length_q") or query.shape[2])
        chunks = in_chunks(module, document_ends)
        if chunks is not None:
            document_ends = chunks
            arguments["cu_seq_lens_q"] = arguments["cu_seq_lens_k"] = chunks.to(query.device, non_blocking=True)
    kind = kind_of(query, key, value, sliding_window, softcap, s_aux)
    if not dropout and serves(query.device, query.dtype, kind):
        return _on_gpu(query, key, value, s_aux, scaling, sliding_window, softcap, arguments), None
    if goes_by_blocks(kind, query.device.type, query.dtype):
        if dropout:
            raise ModelError(
                f"{type(module).__name__} has attention dropout beside sinks, capped scores or heads of "
                f"{query.shape[-1]}, which is not supported: {_WITHOUT_DROPOUT}"
            )
        output = attend_explicitly(query, key, value, s_aux, document_ends, scaling, sliding_window, softcap)
        return output, None
    if query.device.type == "cuda" and query.dtype in _VARLEN_DTYPES:
        return _varlen(query, key, value, dropout, scaling, sliding_window, arguments), None
    if query.device.type == "cpu" and not dropout and query.shape[-1] == value.shape[-1]:
        return attend(query, key, value, document_ends, scaling, sliding_window), None
    return _per_document(query, key, value, document_ends.diff().tolist(), dropout, scaling, sliding_window), None


def goes_by_blocks(kind: Kind, device_type: str, dtype: torch.dtype) -> bool:
    """Whether no kernel of torch computes attention of this ``kind`` on such a device: it is done in plain torch.

    Those of a CPU, and those for fp32, take heads of any size.
    """
    has_any_size = device_type != "cuda" or dtype not in _VARLEN_DTYPES
    return kind.cap is not None or kind.sinks or not (has_any_size or kind.has_kernel_of_torch)


def _per_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_lengths: list[int],
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    if query.device.type == "cuda":
        # Of the fp32 kernels only the one that holds all scores in memory knows groups.
        key, value = _repeated(key, query), _repeated(value, query)
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for q, k, v in zip(
        query.split(document_lengths, dim=2),
        key.split(document_lengths, dim=2),
        value.split(document_lengths, dim=2),
        strict=True,
    ):
        length = q.shape[2]
        mask = None
        if sliding_window is not None and length > sliding_window:
            mask = window_mask(length, sliding_window, q.device)
        outputs.append(
            scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    arguments: dict[str, Any],
) -> torch.Tensor:
    if dropout:
        raise ModelError(f"attention dropout is not supported on the GPU: {_WITHOUT_DROPOUT}")
    size, value = value.shape[-1], filled_up(value, query)
    output = variable_length_attention(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        arguments["cu_seq_lens_q"],
        arguments["max_length_q"],
        scale=scaling,
        # (left, right) neighbours a token sees; -1 is unlimited, 0 on the right is causal.
        window=(-1 if sliding_window is None else sliding_window - 1, 0),
    )
    return output[..., :size].unsqueeze(0)


def filled_up(value: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """``value`` with zeros behind it up to the head size of ``query``, for a kernel that knows one size for all: they
    give zeros behind the output, which are cut off."""
    missing = query.shape[-1] - value.shape[-1]
    return pad(value, (0, missing)) if missing > 0 else value


def _on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    arguments: dict[str, Any],
) -> torch.Tensor:
    output = attend_on_gpu(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        sinks,
        arguments["cu_seq_lens_q"],
        arguments["max_length_q"],
        scaling,
        sliding_window,
        softcap,
    )
    return output.unsqueeze(0)


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values, (1, heads, tokens, head size), once for every head of ``query`` that shares them."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def register() -> None:
    """Make the function known to transformers under ``IMPLEMENTATION``."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, document_attention)
