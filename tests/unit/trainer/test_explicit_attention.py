"""Attention with capped scores and with sinks: transformers' own, one document after the other, in blocks of rows."""

import itertools
from typing import Any

import pytest
import torch
from torch import library

from sft_trainer.errors import ModelError
from sft_trainer.models import explicit_attention
from sft_trainer.models.attention import (
    IMPLEMENTATION,
    Boundaries,
    boundary_arguments,
    document_attention,
    register,
)
from sft_trainer.models.documents import attend
from sft_trainer.models.explicit_attention import (
    attend_explicitly,
    explicit_gradients_operator,
    explicit_operator,
    working_bytes,
)
from tests.architectures import small_config
from tests.live_bytes import LiveBytes

LENGTHS = (5, 1, 23, 2, 11)
HEADS = 4


class Attention(torch.nn.Module):
    """What transformers' functions ask of the module that calls them."""

    is_causal = True

    def __init__(self, shared: int, sinks: torch.Tensor | None) -> None:
        super().__init__()
        self.num_key_value_groups = HEADS // shared
        self.sinks: Any = sinks
        self.training = False


def drawn(
    *, shared: int, sinks: bool, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, size: int = 16
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key, value, and sinks if asked for, as a model's projections lay them out; the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    by_tokens = [
        2 * torch.randn(1, tokens, n, size, generator=generator).to(dtype) for n in (HEADS, shared, shared, HEADS)
    ]
    inputs = [tensor.transpose(1, 2).requires_grad_() for tensor in by_tokens[:3]]
    if sinks:
        inputs.append(torch.randn(HEADS, generator=generator).to(dtype).requires_grad_())
    return inputs, by_tokens[3]


def of_transformers(
    inputs: list[torch.Tensor], window: int | None, scale: float, cap: float | None, lengths: tuple[int, ...]
) -> torch.Tensor:
    """By the eager functions of Gemma 2 (capped) and gpt-oss (sinks), for each document by itself."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

    query, key, value, *sinks = inputs
    module = Attention(key.shape[1], sinks[0] if sinks else None)
    outputs = []
    for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True):
        positions = torch.arange(q.shape[2])
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= (window or len(positions)))
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)[None, None]
        function: Any = with_sinks if sinks else capped
        arguments = {} if sinks else {"softcap": cap}
        outputs.append(function(module, q, k, v, mask, scaling=scale, **arguments)[0])
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize(
    ("sinks", "cap", "dtype", "shared", "window"),
    [
        (sinks, cap, dtype, shared, window)
        for (sinks, cap), dtype, shared, window in itertools.product(
            ((True, None), (False, 3.0)), (torch.float64, torch.float32, torch.bfloat16), (4, 2, 1), (None, 4)
        )
    ],
)
@pytest.mark.parametrize("scores", [2**24, 200])
def test_output_and_all_gradients_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
    sinks: bool,
    cap: float | None,
    dtype: torch.dtype,
    shared: int,
    window: int | None,
    scores: int,
) -> None:
    # Given several documents in one micro-batch, and blocks of all rows or of few
    monkeypatch.setattr(explicit_attention, "_SCORES", scores)
    inputs, upstream = drawn(shared=shared, sinks=sinks, dtype=dtype)

    # When the registered function computes attention within them
    named = {"softcap": cap, "s_aux": inputs[3] if sinks else None, "scaling": 0.3, "sliding_window": window}
    output, _ = document_attention(
        Attention(shared, None), *inputs[:3], None, **named, **boundary_arguments(Boundaries.of(LENGTHS))
    )
    found = torch.autograd.grad(output, inputs, upstream)

    # Then it is what transformers' own functions give; in bf16 as far from the exact numbers as theirs
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = of_transformers(exact, window, 0.3, cap, LENGTHS)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    # The softmax of Gemma 2 is in fp32 whatever comes in.
    limit = {torch.float64: 1e-12 if sinks else 2e-6, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip((output, *found), (expected, *wanted), strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= limit * other.norm()


def test_a_cap_and_sinks_go_together() -> None:
    lengths = (3, 5)
    inputs, _ = drawn(shared=2, sinks=True, dtype=torch.float64, lengths=lengths, size=4)
    query, key, value, sinks = inputs
    ends = Boundaries.of(lengths).host_ends

    def attended(*tensors: torch.Tensor) -> torch.Tensor:
        return attend_explicitly(*tensors[:3], tensors[3], ends, 0.3, 3, 2.0)

    assert torch.autograd.gradcheck(attended, (query, key, value, sinks))


def test_without_either_it_is_the_attention_of_torch() -> None:
    inputs, upstream = drawn(shared=2, sinks=False, dtype=torch.float64)
    ends = Boundaries.of(LENGTHS).host_ends
    output = attend_explicitly(*inputs[:3], None, ends, None, 6, None)
    expected = attend(*inputs[:3], ends, None, 6)
    torch.testing.assert_close(output, expected)
    for one, other in zip(
        torch.autograd.grad(output, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_is_told_the_shapes_strides_and_gradients_that_there_are(sinks: bool, dtype: torch.dtype) -> None:
    inputs, upstream = drawn(shared=2, sinks=sinks, dtype=dtype)
    ends = Boundaries.of(LENGTHS).host_ends
    four = [*inputs, None][:4]
    library.opcheck(explicit_operator, (*four, ends, 0.3, 6, 2.0))
    output, logarithms = explicit_operator(*four, ends, 0.3, 6, 2.0)
    plain = [tensor if tensor is None else tensor.detach() for tensor in (upstream, *four, output, logarithms)]
    library.opcheck(explicit_gradients_operator, (*plain, ends, 0.3, 6, 2.0))


def test_memory_does_not_grow_with_the_square_of_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given few scores at a time, and a document with many more
    monkeypatch.setattr(explicit_attention, "_SCORES", 2**16)
    length = 1024
    inputs, upstream = drawn(shared=2, sinks=True, dtype=torch.float32, lengths=(length,))
    query, key, value, sinks = (tensor.detach() for tensor in inputs)
    ends = Boundaries.of((length,)).host_ends
    output, logarithms = explicit_operator(query, key, value, sinks, ends, 0.3, None, 2.0)

    # When its gradients are computed, then no more is held than is said
    with LiveBytes() as live:
        explicit_attention._gradients(upstream, query, key, value, sinks, output, logarithms, ends, 0.3, None, 2.0)
    assert live.most <= working_bytes(query, key, value) + 6 * query.nbytes
    assert working_bytes(query, key, value) < HEADS * length**2 * 4 / 2


def test_dropout_beside_them_is_refused() -> None:
    inputs, _ = drawn(shared=2, sinks=True, dtype=torch.float32)
    with pytest.raises(ModelError, match="attention dropout beside sinks, capped scores or heads of 16"):
        document_attention(
            Attention(2, None),
            *inputs[:3],
            None,
            dropout=0.1,
            s_aux=inputs[3],
            **boundary_arguments(Boundaries.of(LENGTHS)),
        )


def test_gpt_oss_computes_the_same_with_packed_documents() -> None:
    # Given a gpt-oss with sinks, a layer with a sliding window and one without, and heads that share keys
    from transformers import AutoModel

    register()
    torch.manual_seed(0)
    ours, reference = (
        AutoModel.from_config(
            small_config("gpt_oss", num_local_experts=2, num_experts_per_tok=2, sliding_window=6),
            attn_implementation=implementation,
            dtype=torch.float32,
        )
        for implementation in (IMPLEMENTATION, "eager")
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.2)
    reference.load_state_dict(ours.state_dict())
    ids = torch.randint(3, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))

    # When one computes all documents at once, the other each by itself
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    output = ours(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        **boundary_arguments(Boundaries.of(LENGTHS)),
    ).last_hidden_state[0]
    expected = torch.cat([reference(input_ids=one[None]).last_hidden_state[0] for one in ids.split(LENGTHS)])
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    output.backward(upstream)
    expected.backward(upstream)

    # Then outputs and all gradients are equal to rounding, those of the sinks too
    assert (output - expected).norm() <= 1e-5 * expected.norm()
    wanted = dict(reference.named_parameters())
    for name, parameter in ours.named_parameters():
        if wanted[name].grad is not None:
            assert parameter.grad is not None
            assert (parameter.grad - wanted[name].grad).norm() <= 1e-5 * wanted[name].grad.norm(), name
    assert sum(name.endswith("sinks") and p.grad.norm() > 0 for name, p in ours.named_parameters()) == 2
