"""The scan of Mamba 2: documents together as each is alone, token by token, and as transformers computes it."""

import random
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from sft_trainer.errors import ModelError
from sft_trainer.models import state_space
from sft_trainer.models.delta_rule import rule_operator
from sft_trainer.models.state_space import scan_operator, scanned
from sft_trainer.models.tracking import LiveBytes
from tests.unit.trainer.test_gated_delta import LENGTHS, gradients
from tests.unit.trainer.test_gated_delta import random_inputs as random_rule

HEADS = {"one group": (3, 1), "groups": (4, 2)}
HEAD, STATE = 5, 6


def random_inputs(lengths: list[int], heads: int, groups: int, dtype: torch.dtype = torch.float64) -> Any:
    """Hidden, steps, decay, B, C, D, a gradient, and ends; decays from almost none to almost all of a state."""
    generator = torch.Generator().manual_seed(sum(lengths))

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(1, sum(lengths), *shape, generator=generator, dtype=torch.float64)

    made = [some(heads, HEAD), softplus(some(heads)), -softplus(4 * some(heads) - 2)]
    made += [some(groups, STATE), some(groups, STATE), some(heads)[0, 0]]
    gradient = some(heads, HEAD).to(dtype)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return [each.to(dtype).requires_grad_() for each in made], gradient, ends


def token_by_token(
    hidden: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    writing: torch.Tensor,
    reading: torch.Tensor,
    passing: torch.Tensor,
) -> torch.Tensor:
    """The scan as it is written down, of one document."""
    sharing = hidden.shape[2] // writing.shape[2]
    writing, reading = (each[0].repeat_interleave(sharing, dim=1) for each in (writing, reading))
    state, read = hidden.new_zeros(hidden.shape[2], writing.shape[-1], hidden.shape[-1]), []
    for x, dt, d, b, c in zip(hidden[0], steps[0], decay[0], writing, reading, strict=True):
        state = state * d.exp()[:, None, None] + torch.einsum("hn,hp->hnp", b, x * dt[:, None])
        read.append(torch.einsum("hn,hnp->hp", c, state) + passing[:, None] * x)
    return torch.stack(read)[None]


def each_alone(function: Any, inputs: list[torch.Tensor], ends: torch.Tensor) -> torch.Tensor:
    *of_tokens, passing = inputs
    lengths = ends.diff().tolist()
    documents = zip(*(each.split(lengths, dim=1) for each in of_tokens), strict=True)
    return torch.cat([function(*document, passing) for document in documents], dim=1)


@pytest.mark.parametrize("at_once", [1, 2**17])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", LENGTHS)
def test_the_scan_is_that_of_each_document_token_by_token(
    monkeypatch: pytest.MonkeyPatch, case: str, heads: str, at_once: int
) -> None:
    monkeypatch.setattr(state_space, "_AT_ONCE", at_once)
    inputs, gradient, ends = random_inputs(LENGTHS[case], *HEADS[heads])

    found = gradients(scan_operator(*inputs, ends, 16), inputs, gradient)

    wanted = gradients(each_alone(token_by_token, inputs, ends), inputs, gradient)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("seed", range(8))
def test_the_scan_is_exact_whatever_lengths_and_chunks_there_are(seed: int) -> None:
    drawn = random.Random(seed)
    lengths = [drawn.choice([1, 2, drawn.randint(1, 9), drawn.randint(1, 60)]) for _ in range(drawn.randint(1, 12))]
    inputs, gradient, ends = random_inputs(lengths, 2, 1)
    found = gradients(scan_operator(*inputs, ends, drawn.choice([1, 2, 7, 8, 64])), inputs, gradient)
    wanted = gradients(each_alone(token_by_token, inputs, ends), inputs, gradient)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.5, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stands_in_for_it_is_that_of_transformers_of_each_document(
    dtype: torch.dtype, limits: tuple[float, float]
) -> None:
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

    # Given steps before their softplus, with a bias, and documents of one chunk and more
    inputs, gradient, ends = random_inputs([64, 3, 130, 1, 1, 70], 4, 2)
    hidden, dt, _, writing, reading, passing = (each.detach() for each in inputs)
    rates, bias = -torch.tensor([0.01, 0.5, 2.0, 9.0]), torch.tensor([-3.0, -1.0, 0.0, 2.0])

    def computed(function: Any, dtype: torch.dtype, exact: torch.dtype, *, together: bool) -> tuple[torch.Tensor, ...]:
        given = [each.to(dtype).requires_grad_() for each in (hidden, dt, writing, reading, passing)]
        given += [rates.to(exact).requires_grad_(), bias.to(dtype).requires_grad_()]
        x, step, b, c, d, a, of_steps = given
        options = {"D": d, "dt_bias": of_steps, "dt_softplus": True, "dt_limit": limits}
        if together:
            output = function(x, step, a, b, c, 64, cu_seq_lens_q=ends, **options)
        else:
            lengths = ends.diff().tolist()
            pieces = zip(*(each.split(lengths, dim=1) for each in (x, step, b, c)), strict=True)
            output = torch.cat([function(x, s, a, b, c, 64, **options) for x, s, b, c in pieces], dim=1)
        return gradients(output, given, gradient.to(output.dtype))

    # When both compute them, then no more than the rounding of either differs
    found = computed(scanned, dtype, torch.float32, together=True)
    wanted = computed(mamba2_chunk_scan, dtype, torch.float32, together=False)
    truth = computed(scanned, torch.float64, torch.float64, together=True)
    assert found[0].dtype == dtype
    for one, other, right in zip(found, wanted, truth, strict=True):
        error, their_error = ((each.double() - right).norm() / right.norm() for each in (one, other))
        assert error <= 2 * their_error + (1e-6 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize(
    ("operator", "drawn", "decays"), [(scan_operator, random_inputs, 2), (rule_operator, random_rule, 3)]
)
def test_tokens_that_cut_a_state_off_leave_those_behind_them_exact(operator: Any, drawn: Any, decays: int) -> None:
    # Given decays of next to nothing, but of some tokens of all
    inputs, gradient, ends = drawn([100, 156], 4, 4)
    cut = torch.rand(1, 256, 4, generator=torch.Generator().manual_seed(0)) < 0.1
    inputs[decays] = torch.where(cut, -300.0, inputs[decays].detach() / 1000).requires_grad_()
    truth = gradients(operator(*inputs, ends), inputs, gradient)

    narrow = [each.detach().float().requires_grad_() for each in inputs]
    found = gradients(operator(*narrow, ends), narrow, gradient.float())

    # Then differences of their sums are nowhere: these would be wrong by 5e-5
    for one, right in zip(found, truth, strict=True):
        assert (one.double() - right).norm() <= 1e-6 * right.norm()


def test_what_another_document_holds_changes_no_bit() -> None:
    # Given documents that share chunks, and one of them changed, with decays that leave nothing, and none
    lengths = [20, 50, 1, 70]
    inputs, gradient, ends = random_inputs(lengths, 4, 2, torch.float32)
    others = [each.detach().clone() for each in inputs]
    for place in (0, 1, 3, 4):
        others[place][:, 20:70] *= 1e4
    others[2][:, 20:45], others[2][:, 45:70] = -1e4, 0.0
    others = [each.requires_grad_() for each in others]

    found, wanted = (gradients(scan_operator(*some, ends), some, gradient) for some in (others, inputs))

    # Then all but the gradient of D, which is of all tokens, is as it was in the others
    for one, other in list(zip(found, wanted, strict=True))[:-1]:
        assert one.isfinite().all()
        for rows in (slice(20), slice(70, None)):
            assert torch.equal(one[:, rows], other[:, rows])
        assert not torch.equal(one[:, 20:70], other[:, 20:70])


def test_the_operator_is_what_a_compiler_is_told_of_it() -> None:
    inputs, _, ends = random_inputs([5, 9, 1], 4, 2, torch.float32)
    torch.library.opcheck(scan_operator, (*inputs, ends))


@pytest.mark.parametrize("sizes", [(4, 1, 64, 128), (8, 2, 32, 16), (4, 4, 16, 48), (2, 1, 128, 64)])
def test_what_the_backward_pass_holds_is_what_is_said(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    heads, groups, head, state = sizes
    ends = torch.tensor([0, 100, 300], dtype=torch.int32)
    hidden, shared = torch.randn(1, 300, heads, head), torch.randn(1, 300, groups, state)
    steps, decay, passing = torch.rand(1, 300, heads), -torch.rand(1, 300, heads), torch.rand(heads)
    for at_once in (2**17, 600):
        monkeypatch.setattr(state_space, "_AT_ONCE", at_once)
        live = LiveBytes()
        for given in (hidden, shared, steps, decay, passing):
            live.add(given)
        with live.watching(), torch.no_grad():
            before = live.reset()
            made = state_space._scan_backward(hidden, hidden, steps, decay, shared, shared, passing, ends)
        held = live.most - before - sum(each.nbytes for each in made)
        assert held <= state_space.working_bytes(hidden, shared) <= 1.25 * held


@pytest.mark.parametrize(
    ("otherwise", "words"),
    [
        ({"D": None}, "a scan without D"),
        ({"z": torch.ones(1)}, "or with a gate"),
        ({"initial_states": torch.ones(1)}, "from or to a state"),
        ({"return_final_states": True}, "from or to a state"),
    ],
)
def test_what_a_layer_would_compute_otherwise_is_refused(otherwise: dict[str, Any], words: str) -> None:
    (hidden, steps, _, b, c, d), _, ends = random_inputs([5], 2, 1, torch.float32)
    given = {"D": d, "dt_bias": d, "dt_softplus": True, "cu_seq_lens_q": ends} | otherwise
    with pytest.raises(ModelError, match=words):
        scanned(hidden, steps, d, b, c, 64, **given)
