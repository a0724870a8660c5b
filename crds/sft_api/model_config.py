"""What a model's config.json says of its blocks, as a ``ModelShape``; or why no formula counts it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .families import FAMILIES, Family
from .model_shape import GatedDelta, Latent, ModelShape, StateSpace
from .quantised_files import quantised_in

_SHOWN = 40
"""Characters of a value that a sentence quotes."""
LARGEST_SIZE = 2**31 - 1
"""Of what a config counts: of larger ones memory is no number that says anything."""
_MOST_LAYERS = 1024
"""Of a model, and of what a config lists of them: each is counted by itself, again and again, and none has more."""
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a config of which one says how many experts there are: transformers writes one for another. Some types
say it of each block."""
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
_SPARSE_BLOCKS, _EVERY = "moe_layers", "interleave_moe_layer_step"
_ROTATED, _UNROTATED, _UNROTATED_EVERY = "no_rope_layers", "unrotated", "no_rope_layer_interval"
"""Of Llama 4: the first lists, whatever its name says, 1 for each block with rotary positions."""
_LAYERED_OTHERWISE = ("use_parallel_residual", "qk_layernorm", "hidden_dropout")
"""Fields by which blocks of StableLM are others than those that are counted."""
_INTERVAL = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
_LINEAR, _FULL, _CONVOLUTION, _DENSE, _SPARSE = "linear_attention", "full_attention", "conv", "mlp", "moe"
_WORDS: Mapping[str, Mapping[str, str]] = {
    "": {_LINEAR: _LINEAR, _FULL: _FULL},
    "states": {_LINEAR: _LINEAR, _FULL: _FULL, "mamba": _LINEAR, "attention": _FULL},
    "states alone": {word: word for word in (_LINEAR, _FULL, _DENSE, _SPARSE)} | {"mamba": _LINEAR, "attention": _FULL},
    "convolutions": {_CONVOLUTION: _CONVOLUTION, _FULL: _FULL},
}
"""What configs say of what a block has for attention or in place of all, and in which of these words it is known."""
_LETTERS = {"M": _LINEAR, "*": _FULL, "-": _DENSE, "E": _SPARSE}
"""The same in a pattern of letters."""
_PATTERN = "hybrid_override_pattern"
_LISTS = ("layer_types", "layers_block_type")
_ATTENDING = ("attn_layer_indices", "full_attn_idxs")
"""Fields that say which blocks have attention."""
_SHARING = "num_kv_shared_layers"
_BESIDE = "enable_moe_block"
"""Of Gemma 4: whether it has experts, whose number it may say in any case."""
_CONVOLVED = "conv_L_cache"
_ADJUSTED, _FACTOR, _MULTIPLE = "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
_NARROWED = "block_ff_dim"
"""What configs of LFM2 on the hub call ``intermediate_size``."""
_BIASED = ("mlp_bias", "use_bias", "conv_bias", "mamba_proj_bias", "projectors_bias")
"""Fields that say that linear layers beside attention have biases: the first two of an MLP."""
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Types of several parts whose configs may have what they say of the text part among their own fields."""


def content_of_config(folder: Path) -> dict[str, Any]:
    """What the config.json in ``folder`` has; nothing where it cannot be read: a run says why."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that ``config``, the content of a model's config.json, describes; None where no formula counts it.

    Of a model of several parts it is that of its text part: no other is held.
    """
    if uncounted(config):
        return None
    is_part, config = _is_whole(config), of_text(config)
    family = _family_of(config)
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
    tied = config.get("tie_word_embeddings", config.get("tie_embedding"))
    scaled = family.scaled and config.get(family.scaled) not in (None, 1)
    shape = ModelShape(
        family=family,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else _size(config, "num_key_value_heads") or heads,
        head_size=size,
        intermediate_size=(_adjusted(config) if family.mixers == "convolutions" else 0)
        or _known(config, family.expert_size),
        vocabulary=_known(config, "vocab_size"),
        tied=family.tied if tied is None else bool(tied),
        attention_bias=bias,
        output_bias=bool(output_field) and (bias if same else bool(config.get(output_field))),
        dropped=bool(family.dropout_field and config.get(family.dropout_field)),
        capped=bool(family.capped and config.get(family.capped)),
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


def _family_of(config: Mapping[str, Any]) -> Family:
    """Of the type of ``config``, which it names; one of mixtures without experts where it says that there are none."""
    family = FAMILIES[str(config["model_type"])]
    if not family.without_experts:
        return family
    listed = _listed_mixers(config, family) if family.mixers == "states alone" else None
    if family.beside:
        has_experts = bool(config.get(_BESIDE))
    else:
        has_experts = any(config.get(name) for name in _EXPERTS) if listed is None else _SPARSE in listed
    if has_experts:
        return family
    return replace(family, mixture=False, expert_size=family.without_experts)


def _of_kinds(shape: ModelShape, config: Mapping[str, Any]) -> ModelShape:
    """``shape``, whose blocks are what most of its type are, with those that ``config`` says to be otherwise."""
    family = shape.family
    if family.handing:
        return _handing(shape, config)
    if not (family.delta or family.dense or family.mixers):
        return shape
    mixers = _mixers(config, shape) if family.delta or family.mixers else [_FULL] * shape.layers
    sparse = _sparse_blocks(config, shape) if family.mixture else [False] * shape.layers
    pairs = [*zip(mixers, sparse, strict=True)]
    kinds = {pair: _kind(shape, config, *pair) for pair in dict.fromkeys(pairs)}
    if len({*kinds.values()}) == 1:
        return next(iter(kinds.values()))
    if not any(sparse):
        shape = replace(next(iter(kinds.values())), attends=True, delta=None, states=None, convolved=0)
    return _ordered(shape, [kinds[pair] for pair in pairs])


def _ordered(shape: ModelShape, blocks: Sequence[ModelShape]) -> ModelShape:
    """``shape`` with these ``blocks``, of which some are alike."""
    distinct = tuple(dict.fromkeys(blocks))
    return replace(shape, kinds=distinct, order=tuple(map(distinct.index, blocks)))


def _handing(shape: ModelShape, config: Mapping[str, Any]) -> ModelShape:
    """``shape`` of Gemma 4, whose blocks differ in their heads, and in whose keys and values they use.

    The last ones use those of the last block of their kind that has some.
    """
    shared, layers = config.get(_SHARING) or 0, shape.layers
    own, kinds = layers - shared, _words_of_gemma(config, layers)
    width = _size(config, "hidden_size_per_layer_input") or 0
    shape = replace(shape, input_width=width, inputs=_size(config, "vocab_size_per_layer_input") or shape.vocabulary)
    if not width:
        shape = replace(shape, inputs=0)
    blocks = []
    for block, kind in enumerate(kinds):
        made, is_full = shape, kind == _FULL
        if is_full:
            same, heads = bool(config.get("attention_k_eq_v")), _size(config, "num_global_key_value_heads")
            overrides = _overrides(config, block)
            made = replace(
                made,
                head_size=_size(overrides, "head_dim") or _size(config, "global_head_dim") or 512,
                kv_heads=_size(overrides, "num_key_value_heads") or (heads if same and heads else shape.kv_heads),
                values_are_keys=same,
            )
        if block >= own:
            wide = 2 if config.get("use_double_wide_mlp") else 1
            made = replace(made, reuses=True, intermediate_size=wide * shape.intermediate_size)
        elif kind not in kinds[block + 1 : own]:
            # Also where none takes them.
            made = replace(made, hands_on=True)
        blocks.append(made)
    return _ordered(shape, blocks)


def _words_of_gemma(config: Mapping[str, Any], layers: int) -> list[str]:
    """What kind of attention each block of Gemma 4 has; the last one looks at all of a document, whatever is said."""
    given = config.get("layer_types") or [_FULL if (block + 1) % 6 == 0 else "sliding" for block in range(layers)]
    return [*given[:-1], _FULL]


def _overrides(config: Mapping[str, Any], block: int) -> Mapping[str, Any]:
    """What ``config``, as transformers writes it, says of this block alone."""
    given = config.get("per_layer_config")
    found = given.get(f"{block:02}", given.get(str(block))) if isinstance(given, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _kind(shape: ModelShape, config: Mapping[str, Any], mixer: str, is_sparse: bool) -> ModelShape:
    """A model of blocks with this ``mixer``, and with experts or one MLP, of those that ``shape`` has."""
    family = shape.family
    if family.mixers == "states alone" and mixer in (_LINEAR, _FULL):
        shape = replace(shape, experts=0, chosen=0, shared=0, intermediate_size=0)
    elif family.mixture and not is_sparse:
        width = _known(config, family.dense_size)
        shape = replace(shape, experts=0, chosen=0, shared=0, intermediate_size=width)
    if mixer == _FULL:
        return shape
    if mixer == _UNROTATED:
        return replace(shape, family=replace(family, query_key_norm=""))
    if mixer == _CONVOLUTION:
        return replace(shape, attends=False, convolved=_known(config, _CONVOLVED))
    if family.delta:
        family = replace(family, norms=family.norms_of_delta or family.norms)
        delta = GatedDelta(*(_known(config, name) for name in _OF_DELTA))
        return replace(shape, family=family, attends=False, delta=delta)
    if mixer in (_DENSE, _SPARSE):
        return replace(shape, attends=False)
    heads, groups, size, state, kernel = (_known(config, name) for name in family.states_fields)
    states = StateSpace(heads, groups, size, state, kernel, biased=bool(config[family.states_bias_field]))
    return replace(shape, attends=family.mixers == "states beside", states=states)


def _mixers(config: Mapping[str, Any], shape: ModelShape) -> Sequence[str]:
    """What each block has for attention, beside it, or in place of all else."""
    if shape.family.mixers == "unrotated":
        every, blocks = config.get(_UNROTATED_EVERY) or 4, range(1, shape.layers + 1)
        rotated = config.get(_ROTATED) or [block % every for block in blocks]
        return [_FULL if each else _UNROTATED for each in rotated]
    if (listed := _listed_mixers(config, shape.family)) is not None:
        return listed
    if shape.family.mixers:
        return [_FULL if shape.family.mixers == "convolutions" else _LINEAR] * shape.layers
    every = config.get("full_attention_interval", 4)
    return [_FULL if (block + 1) % every == 0 else _LINEAR for block in range(shape.layers)]


def _listed_mixers(config: Mapping[str, Any], family: Family) -> list[str] | None:
    """The same where ``config`` says it of each block; None where it does not, or in words that are not known."""
    if family.mixers == "states beside":
        return None
    words = _WORDS[family.mixers]
    for name in _LISTS:
        if isinstance(given := config.get(name), list | tuple):
            are_known = all(isinstance(word, str) and word in words for word in given)
            return [words[word] for word in given] if are_known else None
    if family.mixers == "states alone" and isinstance(pattern := config.get(_PATTERN), str):
        return [_LETTERS[letter] for letter in pattern] if {*pattern} <= {*_LETTERS} else None
    others = _CONVOLUTION if family.mixers == "convolutions" else _LINEAR
    for name in _ATTENDING:
        if family.mixers in ("states", "convolutions") and isinstance(given := config.get(name), list | tuple):
            return [_FULL if block in given else others for block in range(_known(config, "num_hidden_layers"))]
    return None


def _sparse_blocks(config: Mapping[str, Any], shape: ModelShape) -> list[bool]:
    """Which blocks of a mixture have experts."""
    blocks, family = range(shape.layers), shape.family
    if family.mixers == "states alone":
        return [mixer == _SPARSE for mixer in _mixers(config, shape)]
    match family.dense:
        case "first":
            if (listed := config.get("mlp_layer_types")) is not None:
                return [kind == "sparse" for kind in listed]
            return [block >= config[family.first_dense] for block in blocks]
        case "listed":
            dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
            return [block not in dense and (block + 1) % every == 0 for block in blocks]
        case "between":
            first, last, every = (config.get(name, usual) for name, usual in zip(_INTERVAL, (1, -1, 1), strict=True))
            last = shape.layers - 1 if last == -1 else last
            return [(block + 1) % every == 0 and first <= block <= last for block in blocks]
        case "others":
            chosen, every = config.get(_SPARSE_BLOCKS), config.get(_EVERY, 1)
            return [(block + 1) % every == 0 if chosen is None else block in chosen for block in blocks]
    return [True] * shape.layers


def _unclear_blocks(config: Mapping[str, Any], family: Family) -> list[str]:
    """The fields of ``config`` that should say which blocks are of which kind, and do not."""
    layers = _known(config, "num_hidden_layers")

    def listed(name: str, words: tuple[str | int, ...]) -> bool:
        given = config.get(name)
        is_list = isinstance(given, list | tuple) and len(given) == layers
        return given is None or (is_list and all(each in words for each in given))

    def number(name: str, least: int) -> bool:
        given = config.get(name, least)
        return isinstance(given, int) and not isinstance(given, bool) and given >= least

    def blocks(name: str) -> bool:
        given = config.get(name)
        return given is None or (isinstance(given, list | tuple) and len(given) <= _MOST_LAYERS)

    known: dict[str, bool] = {}
    if family.mixers == "unrotated":
        known[_ROTATED] = not config.get(_ROTATED) or listed(_ROTATED, (0, 1))
        known[_UNROTATED_EVERY] = number(_UNROTATED_EVERY, 1)
    elif family.mixers != "states beside" and (family.delta or family.mixers):
        known |= {name: listed(name, tuple(_WORDS[family.mixers])) for name in _LISTS}
    if family.handing:
        known["layer_types"] = listed("layer_types", (_FULL, "sliding_attention"))
        shared = config.get(_SHARING)
        known[_SHARING] = shared is None or (number(_SHARING, 0) and shared < layers)
    if family.layered:
        known |= {name: not config.get(name) for name in _LAYERED_OTHERWISE}
    if family.delta:
        known["full_attention_interval"] = number("full_attention_interval", 1)
    if family.mixers:
        known |= {name: blocks(name) for name in _ATTENDING}
    if family.mixers == "states alone":
        pattern = config.get(_PATTERN)
        is_pattern = isinstance(pattern, str) and len(pattern) == layers and {*pattern} <= {*_LETTERS}
        known[_PATTERN] = is_pattern or (pattern is None and any(config.get(name) is not None for name in _LISTS))
        known["moe_latent_size"] = config.get("moe_latent_size") is None
    if family.mixers == "convolutions" and config.get(_ADJUSTED):
        factor = config.get(_FACTOR)
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        known[_FACTOR] = factor is None or (is_number and 0 < factor <= _MOST_LAYERS)
        known[_MULTIPLE] = _size(config, _MULTIPLE) is not None
    if family.mixers == "states beside":
        known["mamba_rms_norm"] = not config.get("mamba_rms_norm")
    if family.dense == "first":
        known["mlp_layer_types"] = listed("mlp_layer_types", ("dense", "sparse"))
        known[family.first_dense] = number(family.first_dense, 0)
        known["moe_layer_freq"] = config.get("moe_layer_freq", 1) == 1
    if family.dense == "listed":
        known["mlp_only_layers"] = blocks("mlp_only_layers")
        known["decoder_sparse_step"] = number("decoder_sparse_step", 1)
    if family.dense == "others":
        known |= {_SPARSE_BLOCKS: blocks(_SPARSE_BLOCKS), _EVERY: number(_EVERY, 1)}
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
    family = _family_of(config)
    if wrong := wrong_sizes(config):
        return f"whose config.json has no size in {', '.join(wrong)}"
    for name in _BIASED:
        if config.get(name):
            return f"whose {'MLPs' if name in _BIASED[:2] else 'layers'} have biases ({name}), as those of no formula"
    if family.latent and config.get("attention_bias"):
        return "whose latent attention has biases (attention_bias), as that of no formula"
    if family.mixture and (uneven := _listed_counts(config)):
        return _differing(config, uneven)
    lacking = [name for name in _sizes_of(family) if name not in _OPTIONAL and _size(config, name) is None]
    if family.mixture:
        lacking += [names[0] for names in (_EXPERTS, _CHOSEN) if _any_size(config, names) is None]
        lacking += [family.shared_field] if family.shared and _size(config, family.shared_field) is None else []
    if lacking:
        return f"whose config.json lacks {', '.join(lacking)}"
    if (layers := _known(config, "num_hidden_layers")) > _MOST_LAYERS:
        return f"whose config.json has num_hidden_layers: {layers}, and no formula counts more than {_MOST_LAYERS}"
    if states_problem := _states_problem(config, family):
        return states_problem
    if family.delta and (values := _known(config, _OF_DELTA[1])) % (keys := _known(config, _OF_DELTA[0])):
        return f"with {values} heads of values ({_OF_DELTA[1]}), which cannot be shared out to {keys} of keys"
    unclear = _unclear_blocks(config, family)
    return _differing(config, unclear) if unclear else ""


def _differing(config: Mapping[str, Any], names: Iterable[str]) -> str:
    fields = (f"{name}: {str(config.get(name))[:_SHOWN]}" for name in names)
    return f"whose blocks differ in a way that no formula counts ({', '.join(fields)})"


def _listed_counts(config: Mapping[str, Any]) -> list[str]:
    """Those fields that should say how many experts there are, or are chosen, and say it of each block."""
    return [name for name in (*_EXPERTS, *_CHOSEN) if isinstance(config.get(name), list)]


def _states_problem(config: Mapping[str, Any], family: Family) -> str:
    """Why nothing can be computed with the sizes of layers of Mamba 2 in ``config``, as a relative clause."""
    if not family.mixers.startswith("states"):
        return ""
    heads, groups = (_known(config, name) for name in family.states_fields[:2])
    return f"with {heads} heads of Mamba 2, which cannot be shared out to {groups} groups" if heads % groups else ""


def wrong_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``config`` by which a formula would count, and that are no such size; of other models none."""
    config = of_text(config)
    if str(config.get("model_type")) not in FAMILIES:
        return {}
    family = _family_of(config)
    counts = (*_EXPERTS, *_CHOSEN) if family.mixture else ()
    names = [*_sizes_of(family), *(name for name in counts if not isinstance(config.get(name), list))]
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
    if family is None:
        return config
    for name in _listed_counts(config):
        if len({*map(repr, given := config[name])}) == 1:
            config = {**config, name: given[0]}
    if _NARROWED in config:
        config = {**config, "intermediate_size": config[_NARROWED]}
    if family.mixers == "states alone" and config.get("num_hidden_layers") is None:
        listed = _listed_mixers(config, family)
        config = {**config, "num_hidden_layers": None if listed is None else len(listed)}
    return {**dict(family.unsaid), **config} if family.unsaid else config


def _is_whole(config: Mapping[str, Any]) -> bool:
    """Whether ``config`` describes a model of several parts, of which one is of text."""
    return isinstance(config.get("text_config"), Mapping) or str(config.get("model_type")) in _FLAT


def _sizes_of(family: Family) -> tuple[str, ...]:
    """The fields by which a model of ``family`` is counted, but those of experts."""
    dense = (family.dense_size,) if family.mixture and family.dense else ()
    latent, delta = _OF_LATENT if family.latent else (), _OF_DELTA if family.delta else ()
    states = family.states_fields if family.mixers.startswith("states") else ()
    convolved = (_CONVOLVED,) if family.mixers == "convolutions" else ()
    return tuple(dict.fromkeys((*_SIZES, family.expert_size, *dense, *latent, *delta, *states, *convolved)))


def _shared(config: Mapping[str, Any], family: Family) -> int:
    """Width of the MLP that all tokens go to beside the experts."""
    if not family.shared:
        return 0
    given = _known(config, family.shared_field)
    return given if family.shared_field.endswith("_size") else given * _known(config, family.expert_size)


def _adjusted(config: Mapping[str, Any]) -> int:
    """Width of an MLP of LFM2 where it is not the one that its config says, but made of that; else 0."""
    if not config.get(_ADJUSTED):
        return 0
    width = int(2 * _known(config, "intermediate_size") / 3)
    factor, multiple = config.get(_FACTOR), _known(config, _MULTIPLE)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _is_in_mxfp4(config: Mapping[str, Any]) -> bool:
    return quantised_in(config)[1].get("quant_method") == "mxfp4"


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
