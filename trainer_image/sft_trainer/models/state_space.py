"""Layers of Mamba 2: the scan of a state space within every document of a micro-batch, in chunks of tokens.

As Dao and Gu 2024 (arXiv 2405.21060) describe it: a state S of a head, (state size, head size), is for each token
multiplied by its decay, has what the token holds added times its step, by its B, and is read by its C; what the token
holds is added to that, times D. It is computed by products of matrices; in order, chunk after chunk, there is one sum
only. No token knows of another document. See docs/design/0038.

One operator with a backward of its own, which a compiler does not look into, and which keeps what came in.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import library
from torch.nn.functional import pad, softplus

from sft_api.operator_memory import HEADS_AT_ONCE, scan_bytes
from sft_trainer.errors import ModelError

from .chunks import CHUNK, Chunks, Decays, exact, in_a_row, in_chunks, of_decay

_AT_ONCE = HEADS_AT_ONCE
"""Tokens times heads that are computed at a time, where one head has no more."""


class Sizes(NamedTuple):
    """Of the states in a layer of a model."""

    heads: int
    groups: int
    """Of heads that share B and C."""
    head_size: int
    state_size: int


def sizes_of(config: Any) -> Sizes:
    """Of the layers of Mamba 2 in a model of ``config``, of transformers."""
    if hasattr(config, "mamba_n_heads"):
        return Sizes(config.mamba_n_heads, config.mamba_n_groups, config.mamba_d_head, config.mamba_d_state)
    return Sizes(config.mamba_num_heads, config.n_groups, config.mamba_head_dim, config.ssm_state_size)


def check_sizes(config: Any) -> None:
    """Raise ``ModelError`` for heads that cannot be shared out among groups: some would be left as memory is."""
    heads, groups, *_ = sizes_of(config)
    if groups < 1 or heads % groups:
        raise ModelError(
            f"a model of type {config.model_type!r} with {heads} heads of Mamba 2 in {groups} groups in its "
            "config.json cannot be computed: the first has to be a multiple of the second; fetch the model again"
        )


def state_flops(config: Any) -> int:
    """Of a token, forwards, in the states of a layer: to each number something is added, and it is read."""
    heads, _, head_size, state_size = sizes_of(config)
    return 4 * int(heads * head_size * state_size)


def not_fused(*_: Any, **__: Any) -> None:
    """In place of transformers' ``mamba2_split_conv1d_scan_combined``, where it would find a kernel for a whole layer:
    nothing, as transformers has it without one. The layer goes on step by step then."""


def scanned(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    z: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor,
    holding: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    **_: Any,
) -> torch.Tensor:
    """In place of transformers' ``mamba2_chunk_scan``; ``holding`` is told what the backward pass holds besides.

    (1, tokens, heads, head size), in the dtype of ``hidden_states``, as the kernels that such models are trained with
    have it. Steps are computed exactly, as by those.
    """
    if D is None or dt_bias is None or not dt_softplus or z is not None:
        raise ModelError("a scan without D, a bias or a softplus of its steps, or with a gate, is not supported")
    if initial_states is not None or return_final_states:
        raise ModelError("a scan from or to a state is not supported; choose another model")
    precise = exact(hidden_states.dtype)
    steps = softplus(dt.to(precise) + dt_bias.to(precise)).clamp(*dt_limit)
    output = scan_operator(hidden_states, steps, steps * A.to(precise), B, C, D, cu_seq_lens_q)
    return output if holding is None else holding(output, working_bytes(hidden_states, B))


class _Inputs(NamedTuple):
    """What is computed of, for some heads of one group: exact, and in chunks but for the last."""

    hidden: torch.Tensor
    """(chunks, tokens, heads, head size)."""
    steps: torch.Tensor
    """(chunks, tokens, heads)."""
    decay: torch.Tensor
    """Logarithms: (chunks, tokens, heads)."""
    writing: torch.Tensor
    """B, by which tokens write into states: (chunks, tokens, state size)."""
    reading: torch.Tensor
    """C, by which they read them: (chunks, tokens, state size)."""
    passing: torch.Tensor
    """D, what of a token goes past the states: (heads,)."""


class _Computed(NamedTuple):
    """What the forward pass comes to on its way, and the backward pass needs."""

    decays: Decays
    written: torch.Tensor
    """By each token, without its B: (chunks, tokens, heads, head size)."""
    resting: torch.Tensor
    """What of it is left at the end of the chunk: (chunks, tokens, heads, head size)."""
    attention: torch.Tensor
    """What each token reads of what is written in its chunk: (chunks, heads, tokens, tokens)."""
    states: torch.Tensor
    """From before each chunk: (chunks, state size, heads, head size)."""
    read: torch.Tensor
    """Of these by each token, as they were before the chunk: (chunks, tokens, heads, head size)."""


def _compute(inputs: _Inputs, chunks: Chunks) -> _Computed:
    hidden, steps, decay, writing, reading, _ = inputs
    decays = Decays.of(decay.transpose(1, 2), chunks)
    written = hidden * steps[..., None]
    resting = written * _by_tokens(decays.rest)
    attention = decays.between * (reading @ writing.mT)[:, None]
    states = hidden.new_zeros(hidden.shape[0], writing.shape[-1], *hidden.shape[2:])
    # All heads side by side: B and C are theirs together.
    torch.matmul(writing[:-1].mT, resting[:-1].flatten(2), out=states[1:].flatten(2))
    for number in range(1, len(states) - 1):
        states[number + 1].addcmul_(decays.left[number][:, None], states[number])
    read = (reading @ states.flatten(2)).unflatten(2, hidden.shape[2:])
    return _Computed(decays, written, resting, attention, states, read)


def _output(inputs: _Inputs, computed: _Computed) -> torch.Tensor:
    """(chunks, tokens, heads, head size)."""
    within = (computed.attention @ computed.written.transpose(1, 2)).transpose(1, 2)
    return computed.read * _by_tokens(computed.decays.reach) + within + inputs.hidden * inputs.passing[:, None]


def _back(gradient: torch.Tensor, inputs: _Inputs, computed: _Computed, chunks: Chunks) -> _Inputs:
    """Gradients of ``inputs`` from that of ``_output``."""
    hidden, steps, _, writing, reading, passing = inputs
    (between, reach, rest, left), written, resting, attention, states, read = computed
    by_heads = gradient.transpose(1, 2)
    # What is read of the chunk itself.
    of_attention = by_heads @ written.transpose(1, 2).mT
    of_written = (attention.mT @ by_heads).transpose(1, 2)
    of_between = of_attention * attention
    of_scores = of_attention.mul_(between).sum(1)
    of_reading, of_writing = of_scores @ writing, of_scores.mT @ reading
    # What is read of states, and these one after the other, from the last to the first.
    reached = gradient * _by_tokens(reach)
    of_reach = (reached * read).sum(-1).transpose(1, 2)
    of_reading += reached.flatten(2) @ states.flatten(2).mT
    of_states = (reading.mT @ reached.flatten(2)).unflatten(2, hidden.shape[2:])
    for number in reversed(range(1, len(states) - 1)):
        of_states[number].addcmul_(left[number][:, None], of_states[number + 1])
    of_next = of_states[1:]
    of_resting = (writing[:-1] @ of_next.flatten(2)).unflatten(2, hidden.shape[2:])
    of_writing[:-1] += resting[:-1].flatten(2) @ of_next.flatten(2).mT
    of_written[:-1] += of_resting * _by_tokens(rest)[:-1]
    of_rest = pad((of_resting * resting[:-1]).sum(-1).transpose(1, 2), (0, 0, 0, 0, 0, 1))
    of_left = pad((of_next * states[:-1]).sum((1, 3)).mul_(left[:-1]), (0, 0, 0, 1))
    decayed = of_decay(Decays(of_between, of_reach, of_rest, of_left), chunks)
    return _Inputs(
        hidden=gradient * passing[:, None] + of_written * steps[..., None],
        steps=(of_written * hidden).sum(-1),
        decay=decayed.transpose(1, 2),
        writing=of_writing,
        reading=of_reading,
        passing=(gradient * hidden).sum((0, 1, 3)),
    )


def _by_tokens(numbers: torch.Tensor) -> torch.Tensor:
    """(chunks, heads, tokens) as what (chunks, tokens, heads, head size) is multiplied by."""
    return numbers.transpose(1, 2)[..., None]


def _some_heads(hidden: torch.Tensor, writing: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """A group, and heads of it so many as are computed at a time."""
    tokens, groups = hidden.shape[1], writing.shape[2]
    sharing = hidden.shape[2] // groups
    count = max(1, _AT_ONCE // tokens)
    for group in range(groups):
        for first in range(0, sharing, count):
            yield group, slice(group * sharing + first, group * sharing + min(first + count, sharing))


def _inputs_of(group: int, heads: slice, given: tuple[torch.Tensor, ...], size: int) -> _Inputs:
    hidden, steps, decay, writing, reading, passing = given
    return _Inputs(
        hidden=in_chunks(hidden[0, :, heads], size),
        steps=in_chunks(steps[0, :, heads], size),
        decay=in_chunks(decay[0, :, heads], size),
        writing=in_chunks(writing[0, :, group], size),
        reading=in_chunks(reading[0, :, group], size),
        passing=passing[heads].to(exact(passing.dtype)),
    )


def _room(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    """For what ``_scan`` gives."""
    return hidden.new_empty(hidden.shape)


def _room_for_gradients(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    writing: torch.Tensor,
    reading: torch.Tensor,
    passing: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For what ``_scan_backward`` gives."""
    of_hidden, of_steps, of_decay, of_writing, of_reading, of_passing = (
        each.new_empty(each.shape) for each in (hidden, steps, decay, writing, reading, passing)
    )
    return of_hidden, of_steps, of_decay, of_writing, of_reading, of_passing


def _scan(
    hidden: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    writing: torch.Tensor,
    reading: torch.Tensor,
    passing: torch.Tensor,
    ends: torch.Tensor,
    size: int = CHUNK,
) -> torch.Tensor:
    """What tokens read of states, and what goes past these, in the shape and dtype of ``hidden``.

    ``hidden`` is (1, tokens, heads, head size). ``steps`` is what a token is written times, ``decay`` the logarithm of
    what a state is multiplied by, both (1, tokens, heads). ``writing`` and ``reading``, B and C, are (1, tokens,
    groups, state size): each for as many heads, one after the other. ``passing``, D, is (heads,). ``ends`` (documents +
    1,) is the cumulative sum of the documents' lengths from 0 on.
    """
    given = (hidden, steps, decay, writing, reading, passing)
    chunks, output = Chunks.of(hidden.shape[1], ends, size), _room(hidden)
    for group, heads in _some_heads(hidden, writing):
        inputs = _inputs_of(group, heads, given, size)
        made = _output(inputs, _compute(inputs, chunks))
        output[0, :, heads] = in_a_row(made, hidden.shape[1]).to(hidden.dtype)
    return output


def _scan_backward(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    writing: torch.Tensor,
    reading: torch.Tensor,
    passing: torch.Tensor,
    ends: torch.Tensor,
    size: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of all that ``_scan`` is given but ``ends``, in their shapes, from that of what it gives."""
    given, tokens = (hidden, steps, decay, writing, reading, passing), hidden.shape[1]
    chunks, found = Chunks.of(tokens, ends, size), _room_for_gradients(gradient, *given)
    # Heads of one group add to the same, exactly.
    shared = [torch.zeros(each.shape[1:], dtype=exact(each.dtype), device=each.device) for each in (writing, reading)]
    for group, heads in _some_heads(hidden, writing):
        inputs = _inputs_of(group, heads, given, size)
        made = _back(in_chunks(gradient[0, :, heads], size), inputs, _compute(inputs, chunks), chunks)
        for whole, part in zip(found[:3], made[:3], strict=True):
            whole[0, :, heads] = in_a_row(part, tokens).to(whole.dtype)
        for sums, part in zip(shared, made[3:5], strict=True):
            sums[:, group] += in_a_row(part, tokens)
        found[5][heads] = made.passing.to(passing.dtype)
        del inputs, made, part
    for whole, sums in zip(found[3:5], shared, strict=True):
        whole[0] = sums.to(whole.dtype)
    return found


def working_bytes(hidden: torch.Tensor, writing: torch.Tensor) -> int:
    """What the backward pass of the scan holds at the most besides tensors of the sizes of what came in."""
    _, tokens, heads, head_size = hidden.shape
    sizes = Sizes(heads, writing.shape[2], head_size, writing.shape[3])
    size = exact(hidden.dtype).itemsize
    return scan_bytes(sizes, tokens, _AT_ONCE) * size // torch.float32.itemsize


scan_operator = library.custom_op("sft::state_space_scan", _scan, mutates_args=())
"""What the scan is to a compiler, to recomputation, and to itself."""
scan_gradients_operator = library.custom_op("sft::state_space_scan_backward", _scan_backward, mutates_args=())
"""Its backward."""


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *scan_gradients_operator(gradient, *ctx.saved_tensors, ctx.size), None, None


scan_operator.register_autograd(_backward, setup_context=_remember)
scan_operator.register_fake(_room)
scan_gradients_operator.register_fake(_room_for_gradients)
