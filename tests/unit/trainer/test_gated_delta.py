"""Layers of linear attention: documents together as each is alone, token by token, and as transformers computes it."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize, softplus
from transformers import AutoConfig

from sft_trainer.errors import ModelError
from sft_trainer.models import delta_rule, gated_delta
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.delta_rule import rule_operator
from sft_trainer.models.tracking import LiveBytes
from sft_trainer.models.weights import unread_tensors
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")

LENGTHS = {
    "one token": [1],
    "a whole chunk": [16],
    "whole chunks": [16, 32, 16],
    "many in a chunk": [1, 1, 2, 1, 3, 1, 4, 1, 1],
    "one over many": [75],
    "ends beside those of chunks": [15, 1, 1, 15, 17, 31],
    "as they come": [5, 40, 9, 14, 2],
}
HEADS = {"as many keys": (2, 2), "shared keys": (2, 6)}
KEY, VALUE = 6, 5


def random_inputs(lengths: list[int], keys: int, values: int, dtype: torch.dtype = torch.float64) -> Any:
    """Query, key, value, decay, beta, a gradient, and ends; decays from almost none to almost all of a state."""
    generator = torch.Generator().manual_seed(sum(lengths))

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(1, sum(lengths), *shape, generator=generator, dtype=torch.float64)

    made = [some(keys, KEY), some(keys, KEY), some(values, VALUE)]
    made += [-softplus(4 * some(values) - 2), some(values).sigmoid(), some(values, VALUE)]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return [each.to(dtype).requires_grad_() for each in made[:5]], made[5].to(dtype), ends


def token_by_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The rule as it is written down, of one document."""
    sharing = value.shape[2] // key.shape[2]
    query, key = (normalize(each[0], dim=-1).repeat_interleave(sharing, dim=1) for each in (query, key))
    state, read = value.new_zeros(value.shape[2], key.shape[-1], value.shape[-1]), []
    for q, k, v, d, b in zip(query, key, value[0], decay[0], beta[0], strict=True):
        state = state * d.exp()[:, None, None]
        found = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, (v - found) * b[:, None])
        read.append(torch.einsum("hk,hkv->hv", q, state) * query.shape[-1] ** -0.5)
    return torch.stack(read)[None]


def each_alone(function: Any, inputs: list[torch.Tensor], ends: torch.Tensor) -> torch.Tensor:
    lengths = ends.diff().tolist()
    documents = zip(*(each.split(lengths, dim=1) for each in inputs), strict=True)
    return torch.cat([function(*document) for document in documents], dim=1)


def gradients(output: torch.Tensor, inputs: list[torch.Tensor], gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return output, *torch.autograd.grad(output, inputs, gradient)


@pytest.mark.parametrize("at_once", [1, 2**17])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", LENGTHS)
def test_the_rule_is_that_of_each_document_token_by_token(
    monkeypatch: pytest.MonkeyPatch, case: str, heads: str, at_once: int
) -> None:
    monkeypatch.setattr(delta_rule, "_AT_ONCE", at_once)
    # A norm has 1e-6 added, which shows beside numbers of fp64
    monkeypatch.setattr(delta_rule, "_EPSILON", 0.0)
    inputs, gradient, ends = random_inputs(LENGTHS[case], *HEADS[heads])

    found = gradients(rule_operator(*inputs, ends, 16), inputs, gradient)

    wanted = gradients(each_alone(token_by_token, inputs, ends), inputs, gradient)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("seed", range(8))
def test_the_rule_is_exact_whatever_lengths_and_chunks_there_are(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(delta_rule, "_EPSILON", 0.0)
    drawn = random.Random(seed)
    lengths = [drawn.choice([1, 2, drawn.randint(1, 9), drawn.randint(1, 60)]) for _ in range(drawn.randint(1, 12))]
    inputs, gradient, ends = random_inputs(lengths, 1, 2)
    found = gradients(rule_operator(*inputs, ends, drawn.choice([1, 2, 7, 8, 64])), inputs, gradient)
    wanted = gradients(each_alone(token_by_token, inputs, ends), inputs, gradient)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rule_is_that_of_transformers_of_each_document(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    def theirs(query: torch.Tensor, key: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        # Older versions have the layer repeat them.
        query, key = (each.repeat_interleave(2, dim=2) for each in (query, key))
        result: torch.Tensor = torch_chunk_gated_delta_rule(query, key, *others, use_qk_l2norm_in_kernel=True)[0]
        return result

    # Given documents of one chunk and more; decays are in fp32 whatever the rest is in
    inputs, gradient, ends = random_inputs([64, 3, 130, 1, 1, 70], 2, 4)
    inputs = [each.detach().to(torch.float32 if place == 3 else dtype) for place, each in enumerate(inputs)]
    inputs, gradient = [each.requires_grad_() for each in inputs], gradient.to(dtype)

    # When both compute them
    found = gradients(rule_operator(*inputs, ends), inputs, gradient)
    wanted = gradients(each_alone(theirs, inputs, ends), inputs, gradient)

    # Then no more than the rounding of either differs
    exact_inputs = [each.detach().double().requires_grad_() for each in inputs]
    exact = gradients(rule_operator(*exact_inputs, ends), exact_inputs, gradient.double())
    for one, other, truth in zip(found, wanted, exact, strict=True):
        assert one.dtype == other.dtype
        error, their_error = ((each.double() - truth).norm() / truth.norm() for each in (one, other))
        assert error <= 2 * their_error + 1e-7
        assert error <= (1e-5 if dtype == torch.float32 else 2**-8)


def test_what_another_document_holds_changes_no_bit() -> None:
    # Given documents that share chunks, and one of them changed, with decays that leave nothing, and none
    lengths = [20, 50, 1, 70]
    inputs, gradient, ends = random_inputs(lengths, 2, 4, torch.float32)
    others = [each.detach().clone() for each in inputs]
    for each in others[:3]:
        each[:, 20:70] *= 1e4
    others[3][:, 20:45], others[3][:, 45:70] = -1e4, 0.0
    others = [each.requires_grad_() for each in others]

    found, wanted = (gradients(rule_operator(*some, ends), some, gradient) for some in (others, inputs))

    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        for rows in (slice(20), slice(70, None)):
            assert torch.equal(one[:, rows], other[:, rows])
        assert not torch.equal(one[:, 20:70], other[:, 20:70])


def test_the_operator_is_what_a_compiler_is_told_of_it() -> None:
    inputs, _, ends = random_inputs([5, 9, 1], 2, 4, torch.float32)
    torch.library.opcheck(rule_operator, (*inputs, ends))


@pytest.mark.parametrize("sizes", [(2, 4, 64, 64), (4, 4, 32, 16), (1, 4, 16, 48)])
def test_what_the_backward_pass_holds_is_what_is_said(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    keys, values, key_size, value_size = sizes
    ends = torch.tensor([0, 100, 300], dtype=torch.int32)
    key, value = torch.randn(1, 300, keys, key_size), torch.randn(1, 300, values, value_size)
    decay, beta = -torch.rand(1, 300, values), torch.rand(1, 300, values)
    for at_once in (2**17, 600):
        monkeypatch.setattr(delta_rule, "_AT_ONCE", at_once)
        live = LiveBytes()
        with live.watching(), torch.no_grad():
            made = delta_rule._rule_backward(value, key, key, value, decay, beta, ends)
        held = live.most - sum(each.nbytes for each in made)
        assert held <= delta_rule.working_bytes(key, value) <= 1.25 * held


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model("qwen3_next", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8)}, file)
    assert not unread_tensors(build_on_meta(tmp_path), tmp_path)


@pytest.mark.parametrize("keys", [0, 3])
def test_heads_of_values_without_any_of_keys_are_refused(tmp_path: Path, keys: int) -> None:
    # The rule would leave theirs as memory is
    config = {"linear_num_key_heads": keys, "linear_num_value_heads": 4}
    AutoConfig.for_model("qwen3_5_text", **config).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=f"linear_num_value_heads 4 and linear_num_key_heads {keys} .* a multiple"):
        build_on_meta(tmp_path)


def test_what_a_layer_would_compute_otherwise_is_refused() -> None:
    inputs, _, ends = random_inputs([5], 2, 4, torch.float32)
    with pytest.raises(ModelError, match="queries and keys that are not normalised, or a state, is not supported"):
        gated_delta.ruled(*inputs, cu_seqlens=ends)
