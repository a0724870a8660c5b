"""What a model's config.json says of its blocks, as a ``ModelShape``; or why no formula counts it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .families import FAMILIES, Family
from .model_shape import GatedDelta, Latent, ModelShape

_SHOWN = 40
"""Characters of a value that a sentence quotes."""
LARGEST_SIZE = 2**31 - 1
"""Of what a config counts: of larger ones memory is no number that says anything."""
_MOST_LAYERS = 1024
"""Of a model, and of what a config lists of them: each is counted by itself, again and again, and none has more."""
_CHOSEN = ("num_experts_per_tok", "moe_k")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a config of which one says how many experts there are: transformers writes one for another."""
_SIZES = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers"),
    "vocab_size",
)
_OPTIONAL = ("num_key_value_heads", "head_dim", "q_lora_rank")
"""Of these sizes those that follow from others where a config does not say them, or say by that that there is none."""
_OF_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_OF_DELTA = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
_INTERVAL = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
_LINEAR, _FULL = "linear_attention", "full_attention"
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Types of several parts whose configs may have what they say of the text part among their own fields."""


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that ``config``, the content of a model's config.json, describes; None where no formula counts it.

    Of a model of several parts it is that of its text part: no other is held.
    """
    if uncounted(config):
        return None
    is_part, config = _is_whole(config), of_text(config)
    family = FAMILIES[str(config["model_type"])]
    heads, hidden, layers = (
        _known(config, name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    latent, size = None, _size(config, "head_dim") or family.head_size or hidden // heads
    if family.latent:
        keys, rotated, others, values = (_known(config, name) for name in _OF_LATENT[1:])
        size, latent = rotated + others, Latent(_size(config, "q_lora_rank") or 0, keys, rotated, values)
    if family.query_key_norm_field and not config.get(family.query_key_norm_field):
        family = replace(family, query_key_norm="")
    bias = bool(config.get(family.bias_field, family.attention_bias))
    output_field, same = family.output_bias_field, family.output_bias_field == family.bias_field
    tied = config.get("tie_word_embeddings")
    scaled = family.scaled and config.get("logits_scaling") not in (None, 1)
    shape = ModelShape(
        family=family,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else _size(config, "num_key_value_heads") or heads,
        head_size=size,
        intermediate_size=_known(config, family.expert_size),
        vocabulary=_known(config, "vocab_size"),
        tied=family.tied if tied is None else bool(tied),
        attention_bias=bias,
        output_bias=bool(output_field) and (bias if same else bool(config.get(output_field))),
        logits="capped" if config.get("final_logit_softcapping") else "scaled" if scaled else "",
        experts=_any_size(config, _EXPERTS) or 0 if family.mixture else 0,
        chosen=_any_size(config, _CHOSEN) or 0 if family.mixture else 0,
        shared=_shared(config, family) if family.mixture else 0,
        latent=latent,
        kind=str(config["model_type"]),
        positions=_size(config, "max_position_embeddings"),
        in_mxfp4=family.biased and _is_in_mxfp4(config),
        is_part=is_part,
    )
    return _of_kinds(shape, config)


def _of_kinds(shape: ModelShape, config: Mapping[str, Any]) -> ModelShape:
    """``shape``, whose blocks are what most of its type are, with those that ``config`` says to be otherwise."""
    family = shape.family
    if not (family.delta or family.dense):
        return shape
    delta = GatedDelta(*(_known(config, name) for name in _OF_DELTA)) if family.delta else None
    linear = _linear_blocks(config, shape.layers) if family.delta else [False] * shape.layers
    sparse = _sparse_blocks(config, shape) if family.mixture else [False] * shape.layers
    pairs = [*zip(linear, sparse, strict=True)]
    kinds: dict[tuple[bool, bool], ModelShape] = {}
    for pair in pairs:
        is_linear, is_sparse = pair
        if pair in kinds:
            continue
        kind = replace(shape, delta=delta) if is_linear else shape
        if family.mixture and not is_sparse:
            kind = replace(kind, experts=0, chosen=0, shared=0, intermediate_size=_known(config, "intermediate_size"))
        kinds[pair] = kind
    if len(kinds) == 1:
        return next(iter(kinds.values()))
    numbers = {pair: number for number, pair in enumerate(kinds)}
    if not any(sparse):
        shape = replace(next(iter(kinds.values())), delta=None)
    return replace(shape, kinds=tuple(kinds.values()), order=tuple(numbers[pair] for pair in pairs))


def _linear_blocks(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Which blocks have linear attention in place of attention."""
    given = config.get("layer_types")
    if given is not None:
        return [kind == _LINEAR for kind in given]
    every = config.get("full_attention_interval", 4)
    return [(block + 1) % every != 0 for block in range(layers)]


def _sparse_blocks(config: Mapping[str, Any], shape: ModelShape) -> list[bool]:
    """Which blocks of a mixture have experts."""
    blocks = range(shape.layers)
    match shape.family.dense:
        case "first":
            if (listed := config.get("mlp_layer_types")) is not None:
                return [kind == "sparse" for kind in listed]
            return [block >= config["first_k_dense_replace"] for block in blocks]
        case "listed":
            dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
            return [block not in dense and (block + 1) % every == 0 for block in blocks]
        case "between":
            first, last, every = (config.get(name, usual) for name, usual in zip(_INTERVAL, (1, -1, 1), strict=True))
            last = shape.layers - 1 if last == -1 else last
            return [(block + 1) % every == 0 and first <= block <= last for block in blocks]
    return [True] * shape.layers


def _unclear_blocks(config: Mapping[str, Any], family: Family) -> list[str]:
    """The fields of ``config`` that should say which blocks are of which kind, and do not."""
    layers = _known(config, "num_hidden_layers")

    def listed(name: str, words: tuple[str, ...]) -> bool:
        given = config.get(name)
        is_list = isinstance(given, list | tuple) and len(given) == layers
        return given is None or (is_list and all(each in words for each in given))

    def number(name: str, least: int) -> bool:
        given = config.get(name, least)
        return isinstance(given, int) and not isinstance(given, bool) and given >= least

    known = {}
    if family.delta:
        known["layer_types"] = listed("layer_types", (_LINEAR, _FULL))
        known["full_attention_interval"] = number("full_attention_interval", 1)
    if family.dense == "first":
        known["mlp_layer_types"] = listed("mlp_layer_types", ("dense", "sparse"))
        known["first_k_dense_replace"] = number("first_k_dense_replace", 0)
        known["moe_layer_freq"] = config.get("moe_layer_freq", 1) == 1
    if family.dense == "listed":
        given = config.get("mlp_only_layers")
        known["mlp_only_layers"] = given is None or (isinstance(given, list | tuple) and len(given) <= _MOST_LAYERS)
        known["decoder_sparse_step"] = number("decoder_sparse_step", 1)
    if family.dense == "between":
        known |= {name: number(name, least) for name, least in zip(_INTERVAL, (0, -1, 1), strict=True)}
    return [name for name, is_known in known.items() if not is_known]


def uncounted(config: Mapping[str, Any]) -> str:
    """Why ``shape_of`` has none for ``config``, as a relative clause on the model; empty where it has one."""
    config = of_text(config)
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        return f"of whose type {kind!r} there is no formula" if kind else "whose config.json names no model_type"
    if wrong := wrong_sizes(config):
        return f"whose config.json has no size in {', '.join(wrong)}"
    for name in ("mlp_bias", "use_bias"):
        if config.get(name):
            return f"whose MLPs have biases ({name}), as those of no formula"
    if family.latent and config.get("attention_bias"):
        return "whose latent attention has biases (attention_bias), as that of no formula"
    lacking = [name for name in _sizes_of(family) if name not in _OPTIONAL and _size(config, name) is None]
    if family.mixture:
        lacking += [names[0] for names in (_EXPERTS, _CHOSEN) if _any_size(config, names) is None]
        lacking += [family.shared_field] if family.shared and _size(config, family.shared_field) is None else []
    if lacking:
        return f"whose config.json lacks {', '.join(lacking)}"
    if (layers := _known(config, "num_hidden_layers")) > _MOST_LAYERS:
        return f"whose config.json has num_hidden_layers: {layers}, and no formula counts more than {_MOST_LAYERS}"
    if family.delta and (values := _known(config, _OF_DELTA[1])) % (keys := _known(config, _OF_DELTA[0])):
        return f"with {values} heads of values ({_OF_DELTA[1]}), which cannot be shared out to {keys} of keys"
    if unclear := _unclear_blocks(config, family):
        fields = (f"{name}: {str(config.get(name))[:_SHOWN]}" for name in unclear)
        return f"whose blocks differ in a way that no formula counts ({', '.join(fields)})"
    return ""


def wrong_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``config`` by which a formula would count, and that are no such size; of other models none."""
    config = of_text(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return {}
    names = (*_sizes_of(family), *((*_EXPERTS, *_CHOSEN) if family.mixture else ()))
    wrong = {name: config[name] for name in names if config.get(name) is not None and _size(config, name) is None}
    experts, chosen = _any_size(config, _EXPERTS), _any_size(config, _CHOSEN)
    if family.mixture and experts and chosen and chosen > experts:
        wrong[next(name for name in _CHOSEN if _size(config, name))] = chosen
    return wrong


def of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config``, or that of the text part where it describes several; with the sizes that its type leaves unsaid.

    Whether embedding and head are one is then what ``config`` itself says.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        tied = config.get("tie_word_embeddings")
        config = {**text, **({} if tied is None else {"tie_word_embeddings": tied})}
    elif _is_whole(config):
        config = {**config, "model_type": _FLAT[str(config["model_type"])]}
    family = FAMILIES.get(str(config.get("model_type")))
    return config if family is None or not family.unsaid else {**dict(family.unsaid), **config}


def _is_whole(config: Mapping[str, Any]) -> bool:
    """Whether ``config`` describes a model of several parts, of which one is of text."""
    return isinstance(config.get("text_config"), Mapping) or str(config.get("model_type")) in _FLAT


def _sizes_of(family: Family) -> tuple[str, ...]:
    """The fields by which a model of ``family`` is counted, but those of experts."""
    dense = ("intermediate_size",) if family.dense else ()
    latent, delta = _OF_LATENT if family.latent else (), _OF_DELTA if family.delta else ()
    return tuple(dict.fromkeys((*_SIZES, family.expert_size, *dense, *latent, *delta)))


def _shared(config: Mapping[str, Any], family: Family) -> int:
    """Width of the MLP that all tokens go to beside the experts."""
    if not family.shared:
        return 0
    given = _known(config, family.shared_field)
    return given if family.shared_field.endswith("_size") else given * _known(config, family.expert_size)


def _is_in_mxfp4(config: Mapping[str, Any]) -> bool:
    given = config.get("quantization_config")
    return isinstance(given, Mapping) and given.get("quant_method") == "mxfp4"


def _any_size(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The first of ``names`` that ``config`` says."""
    return next((size for name in names if (size := _size(config, name)) is not None), None)


def _known(config: Mapping[str, Any], name: str) -> int:
    """``_size`` where there is one: ``KeyError`` where there is none."""
    size = _size(config, name)
    if size is None:
        raise KeyError(name)
    return size


def _size(config: Mapping[str, Any], name: str) -> int | None:
    """What ``config`` says of it; None where it says nothing, or something that is no size."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE else None
