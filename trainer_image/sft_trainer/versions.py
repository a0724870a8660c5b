"""The calls that differ, or may, between the versions of the libraries that the trainer runs with.

Those are all that have private names, and no other file makes any.
``requirements/trainer.txt`` names the newest of them, ``requirements/oldest.txt`` the oldest. Which call is right is
told by the signature of what is called, never by the number of a version: a machine may have any of its own.
"""

import http.client
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # a supervisor, and what reads data only, import no torch
    import jinja2
    import torch

SLOW_IMPORTS = ("torch._dynamo",)
"""Modules that the first step of a process imports, and that take seconds: to be imported before, where that helps."""

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_REMEMBERED_ALLOCATIONS = 200_000
"""Some hundred bytes of host memory each; a step of an 8B model makes some 20,000."""

_KINDS_OF_LAYERS = 64
"""That a compiler is let have code for, at most: Gemma 4 has up to six, each in training and in evaluations."""

_FLASH_ATTENTION = "flash_attn"

_INSTEAD = "sft_in_place_of"
"""Under which a function of ours that stands in a module of transformers has what it stands for."""

_KNOW_GROUPS: dict[Any, bool] = {}
"""Whether a kernel has an argument for fewer heads of keys than of queries: torch 2.11's has none, and takes them."""


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Have collectives of the process group ``group`` end with an error after ``timeout``, from the next one on."""
    import torch.distributed as dist

    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


def variable_length_attention(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    ends: "torch.Tensor",
    longest: int,
    *,
    scale: float | None,
    window: tuple[int, int],
) -> "torch.Tensor":
    """Attention within each of several documents, by torch's kernel for it; (tokens, heads, head size), bf16 or fp16.

    ``key`` and ``value`` may have fewer heads than ``query``. ``ends`` (documents + 1,) is the cumulative sum of the
    documents' lengths from 0 on, int32, ``longest`` the largest of them. ``window`` is (left, right) neighbours that a
    token sees: -1 is unlimited, 0 on the right is causal.
    """
    import torch
    from torch.nn.attention.varlen import varlen_attn

    # Before there was an argument for it, it needed none.
    grouped = query.shape[1] != key.shape[1] and _knows_groups(varlen_attn)
    groups: dict[str, Any] = {"enable_gqa": True} if grouped else {}
    output = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, window_size=window, **groups)
    assert isinstance(output, torch.Tensor)  # noqa: S101 - a tuple only with return_aux
    return output


def _knows_groups(kernel: Any) -> bool:
    if kernel not in _KNOW_GROUPS:
        _KNOW_GROUPS[kernel] = "enable_gqa" in inspect.signature(kernel).parameters
    return _KNOW_GROUPS[kernel]


def look_at_attention() -> None:
    """Find out how ``variable_length_attention`` calls its kernel: what first does so within a compilation changes what
    that has seen, and the layer is compiled once more."""
    from torch.nn.attention.varlen import varlen_attn

    _knows_groups(varlen_attn)


def hide_flash_attention_4() -> None:
    """Have transformers not find the package flash-attn-4: where it does, its import asks CUDA whether there is a GPU,
    which starts it, and no process can be forked from one with CUDA."""
    sys.modules.setdefault(_FLASH_ATTENTION, None)  # type: ignore[arg-type]


def show_flash_attention() -> None:
    """End what ``hide_flash_attention_4`` did: in a process that none is forked from, other code may import what is
    called so, an older package too."""
    if sys.modules.get(_FLASH_ATTENTION, ...) is None:
        del sys.modules[_FLASH_ATTENTION]


def find_flash_attention_4() -> bool:
    """Whether the package flash-attn-4 is there, and have it found from here on. Older ones of that name are others."""
    show_flash_attention()
    try:
        importlib.metadata.distribution("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def flash_attention_4(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    sinks: "torch.Tensor | None",
    ends: "torch.Tensor",
    longest: int,
    scale: float,
    window: int | None,
    cap: float | None,
    output: "torch.Tensor",
    logarithms: "torch.Tensor",
) -> None:
    """Causal attention within documents by the package flash-attn-4, into ``output`` and ``logarithms``.

    See ``sft_trainer.models.flash_attention`` for what is given.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    _flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        softcap=cap,
        learnable_sink=sinks,
        out=output,
        lse=logarithms,
        **_seen_by_flash_attention(window),
    )


def flash_attention_4_backward(
    gradient: "torch.Tensor",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    sinks: "torch.Tensor | None",
    output: "torch.Tensor",
    logarithms: "torch.Tensor",
    ends: "torch.Tensor",
    longest: int,
    scale: float,
    window: int | None,
    cap: float | None,
    gradients: "Sequence[torch.Tensor]",
) -> "torch.Tensor | None":
    """Gradients of query, key and value, into ``gradients``, from that of the output of ``flash_attention_4``.

    Returns that of ``sinks``.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    of_query, of_key, of_value = gradients
    made = _flash_attn_bwd(
        query,
        key,
        value,
        output,
        gradient,
        logarithms,
        softmax_scale=scale,
        softcap=cap or 0.0,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        dq=of_query,
        dk=of_key,
        dv=of_value,
        learnable_sink=sinks,
        **_seen_by_flash_attention(window),
    )
    of_sinks: torch.Tensor | None = None if sinks is None else made[3]
    return of_sinks


def _seen_by_flash_attention(window: int | None) -> dict[str, Any]:
    if window is None:
        return {"causal": True}
    return {"causal": False, "window_size_left": window - 1, "window_size_right": 0}


def attention_on_cpu(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    mask: "torch.Tensor | None",
    scale: float | None,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """What torch's attention is on a CPU: output (1, heads, tokens, head size), and logarithms for its backward.

    Those of the softmax's denominators, (1, heads, tokens). ``key`` and ``value`` may have fewer heads than ``query``.
    ``mask`` is added to the scores; None is causal.
    """
    import torch

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    output, logarithms = kernel(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)
    return output, logarithms


def attention_on_cpu_backward(
    gradient: "torch.Tensor",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    output: "torch.Tensor",
    logarithms: "torch.Tensor",
    mask: "torch.Tensor | None",
    scale: float | None,
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Gradients of query, key and value from that of the output of ``attention_on_cpu``, whose arguments these are."""
    import torch

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    of_query, of_key, of_value = kernel(
        gradient, query, key, value, output, logarithms, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return of_query, of_key, of_value


_ATTENTION_KERNELS = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "torch_attn._varlen_attn",
    "sft.document_attention",
    "sft.explicit_attention",
    "sft.flash_attention",
    "sft.gated_delta_rule",
    "sft.state_space_scan",
)


@cache
def attention_kernels() -> "frozenset[Any]":
    """Operators that compute attention in one piece, those of them that this torch has: theirs and our own."""
    import torch
    import torch.nn.attention.varlen  # registers its own

    packets = (getattr(getattr(torch.ops, name.split(".")[0]), name.split(".")[1], None) for name in _ATTENTION_KERNELS)
    return frozenset(packet.default for packet in packets if packet is not None)


def dropout_of(operator: Any, arguments: "Sequence[Any]", options: "Mapping[str, Any]") -> float:
    """The share of its attention that a call of ``operator``, one of ``attention_kernels``, drops at random."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = arguments[place] if place < len(arguments) else options.get(argument.name, argument.default_value)
            return float(given)
    return 0.0


GROUPED_PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
"""Operators of one product of matrices for each of several groups of rows: torch's, and transformers' for a compiler
that does not take that one."""


def gated(experts: Any, product: "torch.Tensor") -> "torch.Tensor":
    """What ``experts``, a module of transformers with those of a layer, makes of the ``product`` of gate and up."""
    result: torch.Tensor = experts._apply_gate(product)
    return result


def compute_with(model: Any, functions: "Mapping[str, Callable[..., Any]]") -> None:
    """Have the layers of the Hugging Face ``model`` call ``functions`` in place of those of the same names beside its
    class, where they are given ``document_ends``; without it they call their own.

    Raises ``AttributeError`` where there is none of a name.
    """
    home = sys.modules[type(model).__module__]
    for name, function in functions.items():
        theirs = getattr(home, name)
        if not hasattr(theirs, _INSTEAD):
            setattr(home, name, _with_documents(theirs, function))


def _with_documents(theirs: "Callable[..., Any]", ours: "Callable[..., Any]") -> "Callable[..., Any]":
    def either(*arguments: Any, **named: Any) -> Any:
        return (theirs if named.get("document_ends") is None else ours)(*arguments, **named)

    setattr(either, _INSTEAD, theirs)
    return either


def activated(numbers: "torch.Tensor", activation: str | None) -> "torch.Tensor":
    """What the activation function that transformers calls so makes of ``numbers``; themselves where there is none."""
    from transformers.activations import ACT2FN

    result: torch.Tensor = numbers if activation is None else ACT2FN[activation](numbers)
    return result


def router_of(model: Any) -> tuple[type, int] | None:
    """The class of the routers of the Hugging Face ``model``, and where in what they return their logits are."""
    # Its decoder's, where the type has none for the model with a head.
    recorded = getattr(model, "_can_record_outputs", None) or getattr(model.base_model, "_can_record_outputs", None)
    known: Any = (recorded or {}).get("router_logits")
    kind = getattr(known, "target_class", None)
    return None if kind is None else (kind, known.index)


def keep_what_layers_tell() -> None:
    """Have compiled layers give out more than they return also from what is computed again: once, not once more then.

    Otherwise they are not compiled.
    """
    import torch._dynamo

    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def compile_many_kinds() -> None:
    """Have layers that differ in what they hold be compiled each, in training and in evaluations, all by one forward
    pass: of more than 8 the others would be left as they are without a word."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _KINDS_OF_LAYERS)


def leave_what_cannot_be_compiled(leaves: bool) -> None:
    """Whether code that the compiler fails at is run as it is from here on, with a warning in the log, or is an error.

    Of the whole process: an earlier run in it may have wanted the other.
    """
    import torch._dynamo

    torch._dynamo.config.suppress_errors = leaves


def mark_dynamic(tensor: "torch.Tensor", dimension: int) -> None:
    """Tell the compiler that the size of ``dimension`` may be any: code for ``tensor`` shall not depend on it."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, dimension)


def keep_compiled_in(folder: Path) -> None:
    """Have the compiler keep there what it makes, where the environment does not name another place."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Its import, which that of transformers' models brings, has named its own place by now.
    if os.environ.get(_COMPILED, "") in ("", os.path.abspath(default_cache_dir())):
        os.environ[_COMPILED] = str(folder)


def copy_all(targets: "Sequence[torch.Tensor]", sources: "Sequence[torch.Tensor]") -> None:
    """Give each of ``targets`` the values of its source, cast to its dtype, by as few kernels as there can be."""
    import torch

    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def initialize(model: Any, module: Any) -> None:
    """Give the parameters and buffers of ``module``, a part of the Hugging Face ``model``, their first values."""
    model._init_weights(module)


def build_of_class(kind: Any, config: Any, **options: Any) -> Any:
    """A model of the class ``kind`` of transformers, by ``config``; ``options`` as for ``from_config``."""
    return kind._from_config(config, **options)


@cache
def with_head(decoder: Any) -> type:
    """A causal language model of the class ``decoder`` of transformers and a linear head."""
    from torch import nn
    from transformers.modeling_outputs import CausalLMOutputWithPast

    base: Any = decoder.__base__

    class TextPart(base):  # type: ignore[misc]
        config_class = decoder.config_class
        base_model_prefix = "model"
        _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
        _can_record_outputs = getattr(decoder, "_can_record_outputs", None)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: "torch.Tensor", **arguments: Any) -> Any:
            hidden = self.model(input_ids=input_ids, **arguments).last_hidden_state
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    TextPart.__name__ = TextPart.__qualname__ = f"{decoder.__name__}WithHead"
    # By what stands beside the decoder transformers knows what it can do.
    TextPart.__module__ = decoder.__module__
    return TextPart


def of_texts(whole: Any) -> Any:
    """``whole``, a model of several parts, able to compute with texts alone.

    Llama 4's of transformers 5.24 asks the output of its text part for those of images, which it never has.
    """
    text_part = getattr(whole, "language_model", None)
    if whole.config.model_type == "llama4" and text_part is not None:
        text_part.register_forward_hook(lambda module, given, output: setattr(output, "image_outputs", None))
    return whole


def is_left_out(addition: Any) -> bool:
    """Whether a commit of ``huggingface_hub`` would be made without this ``CommitOperationAdd``, which was looked at
    before: a .gitignore in the repository names its file."""
    return bool(addition._should_ignore)


def passed_over(model: Any) -> list[str]:
    """Patterns, found anywhere in them, of names that files of the Hugging Face ``model`` may have, and it does not."""
    return [*(model._keys_to_ignore_on_load_unexpected or ())]


def keeps_state(model: Any) -> bool:
    """Whether the Hugging Face ``model`` has a recurrent state, which its authors say of it."""
    return bool(getattr(model, "_is_stateful", False))


def template_environment(source: str) -> "jinja2.Environment":
    """The environment in which transformers renders the chat template ``source``; jinja's errors in its syntax."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: jinja2.Environment = _compile_jinja_template(source).environment
    return environment


def plain_response(body: Any) -> tuple[Any, http.client.HTTPResponse] | None:
    """What urllib3 and http.client have of the ``body`` of botocore's answer; None where there is no such thing."""
    response = getattr(body, "_raw_stream", None)
    plain = getattr(response, "_fp", None)
    return (response, plain) if isinstance(plain, http.client.HTTPResponse) else None


def add_socket_options(client: Any, options: Sequence[tuple[int, int, int]]) -> None:
    """Have the connections of botocore's ``client``, which has made none yet, set ``options`` of their sockets.

    Its settings know TCP's keepalive, with the kernel's two hours before the first probe, and no other option.
    """
    found = getattr(getattr(getattr(client, "_endpoint", None), "http_session", None), "_socket_options", None)
    if isinstance(found, list):
        found.extend(options)


def fake_tensors() -> AbstractContextManager[Any]:
    """Within it tensors have a shape, a dtype and a device, and no memory; those of before may be mixed with them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def watching_operators(after: Callable[[list["torch.Tensor"]], None]) -> AbstractContextManager[Any]:
    """Within it ``after`` is called with the tensors that each operator of torch has returned."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            made = function(*arguments, **(options or {}))
            after(tensors_in(made))
            return made

    mode: Any = Watching
    watching: AbstractContextManager[Any] = mode()
    return watching


def tensors_in(value: Any) -> list["torch.Tensor"]:
    """All tensors in ``value``: in lists, tuples and dictionaries within one another, and what a wrapper (DTensor) is
    made of in its place."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves

    found = []
    for leaf in tree_leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            found += tensors_in([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


class AllocationHistory:
    """What the allocator of this process's GPU was asked for, with the lines of Python that asked."""

    def begin(self) -> None:
        """Remember from here on, the last ones of very many."""
        import torch

        torch.cuda.memory._record_memory_history(max_entries=_REMEMBERED_ALLOCATIONS, stacks="python")

    def write(self, file: Path) -> None:
        """What is held, and what was asked for since ``begin``: a pickle, as PyTorch's viewer takes it."""
        import torch

        torch.cuda.memory._dump_snapshot(str(file))

    def end(self) -> None:
        """Forget it all."""
        import torch

        torch.cuda.memory._record_memory_history(enabled=None)
