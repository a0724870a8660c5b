"""The text part of a model of several, such as images and texts: what is trained of it, and where that lies in it.

Built is the text part alone, as a causal language model of its own: no memory goes to the others. That a text makes the
same of it as of the whole is computed at every start, with a small one.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sft_trainer.errors import ModelError
from sft_trainer.loss import Logits
from sft_trainer.names.canonical import Names
from sft_trainer.names.places import Place, place_in_files
from sft_trainer.versions import of_texts, with_head

from . import llama4
from .attention import Boundaries, boundary_arguments
from .probe import small_model
from .weight_files import equal_tensors, weight_files

_TOKENS = 12
_TOLERANCE = 1e-4
"""Of the largest logarithm of a probability; rounding is 1e-6."""


@dataclass(frozen=True)
class Whole:
    """The model that is published, of which another one is the text part."""

    config: Any
    """Of transformers, as it is published."""
    kind: type
    """Its class."""
    modules: Place
    """What the text part's modules are called in it."""
    files: Place
    """What its tensors are called in the files of the whole."""
    linear: tuple[str, ...]
    """Names of all linear layers of the other parts, and of what wraps one."""


def published_config(path: Path) -> Any:
    """The config in the folder ``path`` of a model of several parts with one of text; None of any other model."""
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if "text_config" not in config.sub_configs or type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return None
    return config if hasattr(config.text_config, "model_type") else None


def is_part(path: Path) -> bool:
    """Whether of the model in ``path`` a part is trained, as far as its config can be read."""
    try:
        return published_config(path) is not None
    except Exception:  # who builds it says what is wrong
        return False


def build_whole(config: Any) -> Any:
    """The model of ``config``, of several parts, on the meta device."""
    from transformers import AutoModelForMultimodalLM

    with torch.device("meta"):
        return AutoModelForMultimodalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32, trust_remote_code=False
        ).eval()


def causal_class(config: Any) -> type | None:
    """The class for a text part of ``config`` where transformers has none of its own with a head, or one that is not
    trained as it is; else None."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    if config.model_type == llama4.KIND:
        return llama4.text_class()
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind not in MODEL_MAPPING:
        return None
    return with_head(MODEL_MAPPING[kind])


def is_tied(whole: Any, path: Path) -> bool:
    """Whether embedding and head of the ``whole`` model in ``path``, on the meta device, are one.

    What its own config says goes for it, whatever that of the text part does. Where files have two tensors of other
    values transformers ties none all the same, and configs that leave the field out mean that.
    """
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    files = _files(path)
    names = {module: name for name, module in whole.named_modules()}
    decoder, _, leaf = names[embedding].rpartition(".")
    place = place_in_files(Place(("decoder", decoder), ("head", names[head])), f"decoder.{leaf}.weight", (), files)
    here, there = place.outside(f"decoder.{leaf}.weight"), place.outside("head.weight")
    return not (here in files and there in files) or equal_tensors(files[here], here, files[there], there)


def whole_of(config: Any, whole: Any, text: Any, logits: Logits, path: Path) -> Whole:
    """Where ``text`` lies in the ``whole`` model of ``config``, both on the meta device, whose files are in ``path``.

    Raises ``ModelError`` where the whole makes something else of a text, or that cannot be found out.
    """
    kind, decoder = config.model_type, text.base_model
    found = [name for name, module in whole.named_modules() if type(module) is type(decoder)]
    head = whole.get_output_embeddings()
    heads = [name for name, module in whole.named_modules() if module is head]
    if len(found) != 1 or len(heads) != 1:
        raise ModelError(
            f"a model of type {kind!r} is not supported: where its text part, a {type(text).__name__}, lies in it is "
            "not known; choose a model of text alone"
        )
    (text_head,) = (name for name, module in text.named_modules() if module is text.get_output_embeddings())
    modules = Place((text.base_model_prefix, found[0]), (text_head, heads[0]))
    names = Names.of(text.config)
    embedding = next(name for name, module in text.named_modules() if module is text.get_input_embeddings())
    canonical_head = names.stored(f"{text_head}.weight").removesuffix(".weight")
    stored = Place(modules.decoder, (canonical_head, heads[0]))
    linear = tuple(
        name for name, module in whole.named_modules() if _is_linear(module) and not modules.has(f"{name}.weight")
    )
    _check_same(whole, text, modules, logits)
    stacked = [name for name, weight in text.named_parameters() if ".experts." in name and weight.ndim > 2]
    files = place_in_files(stored, names.stored(f"{embedding}.weight"), stacked, _files(path))
    return Whole(config, type(whole), modules, files, linear)


def _is_linear(module: nn.Module) -> bool:
    # Gemma 4's tower has them within modules that clip, which are called as layers of its text part are.
    inside = [*module.children()]
    return isinstance(module, nn.Linear) or (len(inside) == 1 and isinstance(inside[0], nn.Linear))


def _files(path: Path) -> dict[str, Path]:
    """Files of the tensors in ``path``; none where only the files beside the weights are."""
    try:
        return weight_files(path)
    except ModelError:  # who reads them says what is wrong
        return {}


@torch.no_grad()
def _check_same(whole: Any, text: Any, modules: Place, logits: Logits) -> None:
    """Raise ``ModelError`` where ``whole`` makes something else of a text than ``text`` does: with a small one in it.

    ``whole`` is of no use afterwards. Its other parts stay on the meta device: nothing may be computed with them.
    """
    kind = whole.config.model_type
    try:
        small = small_model(text)
        inside = copy.deepcopy(small)
        inside.set_attn_implementation("eager")
        whole.set_submodule(modules.decoder[1], inside.base_model)
        whole.set_submodule(modules.head[1], inside.get_output_embeddings())
        whole.config.text_config = inside.config
        ids = _ordinary_tokens(whole.config, small.config.vocab_size)
        attended = torch.ones_like(ids)[None]
        given = of_texts(whole)(input_ids=ids[None], attention_mask=attended, use_cache=False).logits[0]
        hidden = small.base_model(
            input_ids=ids[None],
            position_ids=torch.arange(_TOKENS)[None],
            use_cache=False,
            **boundary_arguments(Boundaries.of((_TOKENS,))),
        ).last_hidden_state[0]
        head = small.get_output_embeddings()
        found, _ = logits.log_probabilities(nn.functional.linear(hidden, head.weight, head.bias))
        expected = given.float().log_softmax(-1)
        difference = float((found - expected).abs().max() / expected.abs().max())
    except Exception as error:  # parts that are computed with all the same, or want other arguments
        sentence = " ".join(str(error).split())[:300]
        raise ModelError(
            f"a model of type {kind!r} is not supported: whether it makes of a text what its text part does cannot be "
            f"found out ({type(error).__name__}: {sentence}); choose a model of text alone"
        ) from error
    if not difference <= _TOLERANCE:
        raise ModelError(
            f"a model of type {kind!r} is not supported: it makes something else of a text than its text part does "
            f"(they differ by {difference:.1g}); choose a model of text alone"
        )


def _ordinary_tokens(config: Any, vocabulary: int) -> torch.Tensor:
    """Tokens of a text, (tokens,): none that stands for something else."""
    others = {value for name, value in vars(config).items() if "token" in name and isinstance(value, int)}
    ordinary = torch.tensor([token for token in range(3, vocabulary) if token not in others])
    return ordinary[torch.randint(len(ordinary), (_TOKENS,), generator=torch.Generator().manual_seed(0))]
