"""What can be known of a model before its data is read, found out with a small one of the same architecture.

Does it train on this device, in this precision? And do documents of one micro-batch see one another?

Attention refuses what it does not know, but it is not asked by layers that mix tokens without it: convolutions, state
spaces, linear attention other than that of ``gated_delta``, an attention of their own. Those would train wrongly
without a word.
"""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sft_api.v1alpha1.model_config import DROPOUTS
from sft_trainer.errors import ConfigError, DeviceUnavailableError, ModelError
from sft_trainer.versions import build_of_class, keeps_state

from . import llama4
from .attention import IMPLEMENTATION, Boundaries, boundary_arguments
from .flash_attention import Kind
from .in_order import layers_in_order
from .layer_configs import head_size, heads_of_keys, layer_configs, varying
from .windows import held

_SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
_VOCABULARY = 64
_WIDTH = 32
_HEADS = 2
_EXPERTS = 4
_MOST_LAYERS = 4
_REUSING = "num_kv_shared_layers"
"""Of a config: so many of the last layers use keys and values of the last one of their type before these."""
_MOST_PARAMETERS = 100_000_000
_DOCUMENTS = (5, 7, 6)
_FIRST = 3
_LOOKED_AT = "sft_looked_at"
"""Name under which transformers calls what only looks at attention."""
_TOLERANCE = 1e-4
"""Of the largest output; rounding is 1e-6, what leaks from another document around 0.1."""

# Everything else stays as it is: a smaller head size or fewer frequencies would not fit the rotary parameters.
_SMALL: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": 2 * _HEADS,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def check_documents_stay_apart(model: Any) -> None:
    """Raise ``ModelError`` when documents of a micro-batch would see one another in ``model`` (on the meta device)."""
    kind = model.config.model_type
    _refuse_recurrent(model, kind)
    try:
        difference = _largest_difference(small_model(model))
    except ModelError:
        raise
    except Exception as error:  # sizes that do not go together in this architecture, layers that want other arguments
        text = " ".join(str(error).split())[:300]
        raise ModelError(
            f"a model of type {kind!r} is not supported: whether it keeps the documents of a micro-batch apart cannot "
            f"be found out ({type(error).__name__}: {text}); choose another model"
        ) from error
    if not difference <= _TOLERANCE:
        raise ModelError(
            f"a model of type {kind!r} is not supported: its layers do not keep the documents of a micro-batch apart "
            f"(together and alone they differ by {difference:.1g}); choose a model with attention layers only"
        )


def check_no_layer_is_skipped(config: Any) -> None:
    """Raise ``ModelError`` where layers are left out at random in training: sharded ones need every process."""
    if rate := getattr(config, "layerdrop", 0):
        raise ModelError(
            f"a model of type {config.model_type!r} with layerdrop {rate} in its config.json is not supported: every "
            "process would leave out other layers, and wait for ever for those that have them; set layerdrop to 0 "
            "there, or choose another model"
        )


def check_dropouts(model: Any, given: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a dropout among ``given``, fields of the config, by which ``model`` drops nothing.

    ``model`` is on the meta device. Classes of configs have fields that no layer reads.
    """
    for name, value in given.items():
        if name in DROPOUTS and value and torch.equal(*(_dropped(model, name, rate) for rate in (0.0, 0.5))):
            raise ConfigError(
                f"model.configOverrides.{name} is {value!r}, but a model of type {model.config.model_type!r} has the "
                "field, and computes nothing with it: leave it out"
            )


def _dropped(model: Any, name: str, rate: float) -> torch.Tensor:
    """What a small ``model`` gives in training, with ``rate`` for the dropout ``name``; the same random numbers."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        small = small_model(model, {name: rate}).train()
        torch.manual_seed(0)
        return _output(small)


def check_trains_on(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """One forward and backward of a small ``model`` on ``device`` in ``dtype``, with its own head size and layers.

    ``model`` is on the meta device. Raises ``ConfigError`` when no kernel does it, ``ModelError`` for what the
    attention refuses there, ``DeviceUnavailableError`` when the device itself does not work.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            _forward_backward(small_model(model).to(device, dtype).train())
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # kernels raise what they like
        text = " ".join(str(error).split())[:300]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        broken = "CUDA error" in text and "no kernel image" not in text
        if broken or isinstance(error, torch.OutOfMemoryError):
            raise DeviceUnavailableError(
                f"{name} ({device}) fails at a model of {_WIDTH} dimensions: see whether another process uses it, and "
                f"what the node's driver says of it ({text})"
            ) from error
        given, other = ("bf16", "fp32") if dtype == torch.bfloat16 else ("fp32", "bf16")
        raise ConfigError(
            f"a model of type {model.config.model_type!r} with heads of {_head_sizes(model.config)} cannot be trained "
            f"in {given} on {name} with PyTorch {torch.__version__}: set training.precision: {other}, or use another "
            f"kind of GPU ({type(error).__name__}: {text})"
        ) from error


def _forward_backward(model: Any) -> None:
    _output(model).float().square().sum().backward()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # what a kernel did wrong shows here at the latest


def _output(model: Any) -> torch.Tensor:
    """The last hidden states of a few documents, (1, tokens, width)."""
    ids = torch.arange(sum(_DOCUMENTS), device=model.device) % _VOCABULARY
    output: torch.Tensor = model.base_model(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(length, device=ids.device) for length in _DOCUMENTS])[None],
        use_cache=False,
        **boundary_arguments(Boundaries.of(_DOCUMENTS).to(ids.device)),
    ).last_hidden_state
    return output


def attention_of(model: Any, key_repeats: Callable[[int], int] = lambda keys: 1) -> frozenset[Kind]:
    """The kinds of attention in the layers of ``model`` (on the meta device), with as many heads for each of keys.

    Of so many heads of keys each goes to ``key_repeats`` processes, which share those of queries that go with it.
    """
    from transformers import AttentionInterface

    found, layers = set[Kind](), layer_configs(model.config)
    sharing = [layer.num_attention_heads // (keys := heads_of_keys(layer)) // key_repeats(keys) for layer in layers]
    # As the small one has them.
    sharing = [sharing[index] for index in _chosen(model.config)] if len(layers) > 1 else sharing

    def look(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        window = held(module) if sliding_window is None else sliding_window
        shared = sharing[module.layer_idx] if len(sharing) > 1 else sharing[0]
        found.add(Kind(shared, query.shape[-1], value.shape[-1], window is not None, softcap, s_aux is not None))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    small = small_model(model)
    AttentionInterface.register(_LOOKED_AT, look)
    small.set_attn_implementation(_LOOKED_AT)
    with torch.no_grad():
        _output(small)
    return frozenset(found)


def _refuse_recurrent(model: Any, kind: str) -> None:
    reason = _recurrent(model)
    if reason:
        raise ModelError(
            f"a model of type {kind!r} is not supported: it has {reason}, and what is no attention would mix the "
            "documents of a micro-batch; choose a model with full or sliding attention layers only"
        )


def _recurrent(model: Any) -> str:
    """What says without any computation that documents would be mixed; empty when nothing does."""
    in_order = layers_in_order(model.config)
    supported = {*_SUPPORTED_LAYERS, *in_order}
    if model.config.model_type == llama4.KIND:
        supported.add(llama4.CHUNKED)
    layers = sorted({*(getattr(model.config, "layer_types", None) or ())} - supported)
    if layers:
        return f"layers of type {', '.join(layers)}"
    modules = model.base_model.layers.modules()
    convolutions = sorted({type(module).__name__ for module in modules if isinstance(module, nn.Conv1d)})
    if convolutions and not in_order:
        return f"{', '.join(convolutions)} in its layers"
    if keeps_state(model) and not in_order:
        return "a recurrent state"
    if not isinstance(getattr(model.config, "num_attention_heads", None), int):
        return "no num_attention_heads in its config"
    return ""


def small_model(model: Any, changed: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A model of the same class with a few narrow layers, on the CPU; fields of its config as ``changed`` has them."""
    config = _small_config(model.config)
    for name, value in changed.items():
        setattr(config, name, value)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in _of_config(model, config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"a small one has {size} parameters")
    # Random numbers of the caller stay as they would be without this.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = _of_config(model, config).eval()
        for parameter in small.parameters():
            # Usual initial weights are so small that little of what a layer mixes would reach the output.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return small


def _of_config(model: Any, config: Any) -> Any:
    return build_of_class(type(model), config, attn_implementation=IMPLEMENTATION, dtype=torch.float32)


def _small_config(config: Any) -> Any:
    chosen, own = _chosen(config), varying(config)
    small = copy.deepcopy(config)
    for name, value in _per_layer(config).items():
        setattr(small, name, [value[i] for i in chosen])
    layers = layer_configs(config)
    if own:
        # What layers say for themselves would be read of none of the others.
        small.per_layer_config = None
    # Behind those of each layer: a config may have the experts of a token so.
    for name, value in _SMALL.items():
        if hasattr(small, name):
            setattr(small, name, value)
    for name, value in _small_mamba(config).items():
        setattr(small, name, value)
    small.num_hidden_layers = len(chosen)
    small.hidden_size = _HEADS * head_size(layers[0])
    if reusing := getattr(config, _REUSING, 0):
        setattr(small, _REUSING, sum(index >= config.num_hidden_layers - reusing for index in chosen))
    if own:
        small.per_layer_config = {
            place: {name: _SMALL.get(name, getattr(layers[index], name)) for name in own}
            for place, index in enumerate(chosen)
        }
    return small


def _per_layer(config: Any) -> dict[str, list[Any]]:
    """Fields of ``config`` with as many values as there are layers."""
    count = config.num_hidden_layers
    return {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}


def _small_mamba(config: Any) -> dict[str, Any]:
    """Of a small model the fields of its layers of Mamba 2: their heads are as wide as those of attention."""
    if hasattr(config, "mamba_num_heads"):
        return {"mamba_num_heads": 2 * _HEADS, "n_groups": min(_HEADS, config.n_groups)}
    if not hasattr(config, "mamba_n_heads"):
        return {}
    size = head_size(config)
    fields = {"mamba_n_heads": 2 * _HEADS, "mamba_n_groups": min(_HEADS, config.mamba_n_groups), "mamba_d_head": size}
    if getattr(config, "mamba_d_ssm", None) is not None:
        fields["mamba_d_ssm"] = 2 * _HEADS * size
    # One type says which of its layers have attention by their numbers.
    attending = {"attn_layer_indices": [1]} if getattr(config, "attn_layer_indices", None) else {}
    return {**fields, "mamba_expand": 2, **attending}


def _chosen(config: Any) -> list[int]:
    """Which layers of ``config`` a small one has: the first of every kind, and two at least where there are so many."""
    count, own = config.num_hidden_layers, sorted(varying(config))
    reused = count - getattr(config, _REUSING, 0)
    said = [[getattr(layer, name) for name in own] for layer in layer_configs(config)] if own else [[]] * count
    lists = list(zip(*_per_layer(config).values(), strict=True)) or [()] * count
    kinds: dict[str, int] = {}
    for index, kind in enumerate(zip(lists, said, strict=True)):
        kinds.setdefault(repr((kind, index >= reused)), index)
    return sorted({*list(kinds.values())[:_MOST_LAYERS], *range(min(2, count))})


def _head_sizes(config: Any) -> str:
    return " and ".join(map(str, sorted({head_size(layer) for layer in layer_configs(config)})))


@torch.no_grad()
def _largest_difference(model: Any) -> float:
    """Between tokens of documents computed together and alone, as a share of the largest output.

    "Alone" is done twice: whole documents, and only their first tokens, which must not know of the later ones.
    """
    ids = torch.randint(3, _VOCABULARY, (sum(_DOCUMENTS),), generator=torch.Generator().manual_seed(0))

    def hidden(*documents: torch.Tensor) -> torch.Tensor:
        lengths = tuple(len(document) for document in documents)
        output: torch.Tensor = model.base_model(
            input_ids=torch.cat(documents)[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            use_cache=False,
            **boundary_arguments(Boundaries.of(lengths)),
        ).last_hidden_state[0]
        return output

    documents = ids.split(_DOCUMENTS)
    together = hidden(*documents)
    alone = torch.cat([hidden(document) for document in documents])
    first = torch.cat([hidden(document[:_FIRST]) for document in documents])
    firsts_together = torch.cat([document[:_FIRST] for document in together.split(_DOCUMENTS)])
    difference = max((together - alone).abs().max(), (firsts_together - first).abs().max())
    return float(difference / alone.abs().max().clamp(min=1e-6))
