"""A Hugging Face causal language model with the loss inside its forward pass."""

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sft_api.place import EXPORT_ADAPTER_CONFIG
from sft_api.quantised_files import FIELDS, quantised_in, reading_of, refusal
from sft_api.v1alpha1.model_config import ConfigOverrides
from sft_trainer.errors import ConfigError, ModelError
from sft_trainer.loss import CROSS_ENTROPY, PRODUCTS, Logits, Objective, Slopes, evaluation_sums, linear_cross_entropy
from sft_trainer.names.canonical import Names
from sft_trainer.names.tables import NONE_NEW, Table
from sft_trainer.versions import build_of_class

from . import llama4
from .attention import IMPLEMENTATION, Boundaries, boundary_arguments, register
from .documents_told import keep_documents_apart
from .exchange import SharedTokens
from .experts import Balance, check_experts, keep_corrections, kernel_options, load_balance
from .logits import logits_of
from .noise import Noise
from .overrides import config_of
from .probe import check_documents_stay_apart, check_dropouts, check_no_layer_is_skipped
from .routers import Routers
from .text_part import Whole, build_whole, causal_class, is_tied, published_config, whole_of
from .trained_rows import other_rows

_RANDOM = ("drop", "jitter")
"""What the names of a config's probabilities and widths have in common by which a model draws random numbers."""
_FILE_OF_MODULE = re.compile(r"(?<=') from '[^']*'(?=>)")
_INPUTS_OF_BLOCKS = "per_layer"
"""What names of those modules of Gemma 4's decoder have in common; it makes them behind its blocks."""
_MOST_MORE_ROWS = 2**16
"""Than files have: a tokenizer may have any number for a token, and each row takes memory and time."""
_OF_OTHER_HEADS = ("classifier", "summary")
"""How the names of those begin that heads read which no causal language model has: GPT-NeoX has 0.1 of one."""


class CausalLM(nn.Module):
    """The root module that is sharded: its forward returns the loss of a micro-batch.

    The loss is inside the forward pass because only there FSDP2 has gathered the weights of the head.
    """

    def __init__(
        self,
        huggingface: nn.Module,
        stored_dtype: torch.dtype = torch.float32,
        logits: Logits = PRODUCTS,
        *,
        read_as: str = "",
    ) -> None:
        super().__init__()
        self.logits = logits
        self.shared_tokens: SharedTokens | None = None
        """Those among whom the tokens of a micro-batch are shared out; None where this process has them all."""
        self.objective: Objective = CROSS_ENTROPY
        """What is trained; evaluations are of cross-entropy."""
        self.fused: Slopes | None = None
        """What the loss is computed with where anything is compiled: of that objective."""
        self.routers: Routers | None = None
        """What their loss is computed from, where one is trained."""
        self.huggingface = huggingface
        self.stored_dtype = stored_dtype
        """That the model came in, and is exported in; it is trained in another one, or not, whatever this is."""
        self.read_as = read_as
        """In which way its files may have weights otherwise than plain, "fp8" or "mxfp4"; empty in none."""
        self.whole: Whole | None = None
        """The model that this is the text part of; None of a model of text alone."""
        self.tables: dict[str, Table] = {}
        """Embeddings and head, by the names of their parameters, where a run adds tokens."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        boundaries: Boundaries,
        targets: torch.Tensor,
        labels: torch.Tensor,
        scale: float | None,
        balance: Balance | None = None,
        noise: Noise | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss summed over the trained tokens of one micro-batch: times ``scale``, and as it is.

        Two float32 scalars; ``backward`` is called of the first. With ``balance`` that has the load-balancing loss of
        routers added, as it says, and the second is (2,): the loss, and that one times tokens. With ``scale`` None, in
        an evaluation, the cross-entropy summed, and of how many tokens the model finds the right one the most likely.
        ``input_ids`` and ``position_ids`` are (tokens,), ``targets`` the positions whose output is trained and
        ``labels`` the tokens they must predict, both (trained tokens,). With ``shared_tokens`` all of these are this
        process's part of those in ``boundaries``, and so is the loss of routers of those in ``balance``. ``noise`` is
        added to the embeddings.
        """
        model: Any = self.huggingface
        kept = None if balance is None else self.routers
        asked: AbstractContextManager[Any] = nullcontext() if kept is None else kept.asked()
        noisy: AbstractContextManager[Any] = nullcontext()
        if noise is not None:
            noisy = noise.added_to(model.get_input_embeddings(), boundaries)
        with asked as router_logits, noisy:
            output = model.base_model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(0),
                # A cache makes documents see each other.
                use_cache=False,
                # A config may ask for what nobody would take.
                **({"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}),
                **boundary_arguments(boundaries),
                **({} if self.shared_tokens is None else {"shared_tokens": self.shared_tokens}),
            )
        hidden = output.last_hidden_state.squeeze(0)[targets]
        head = model.get_output_embeddings()
        others = other_rows(model.get_input_embeddings(), head)
        if scale is None:
            return evaluation_sums(hidden, head.weight, labels, self.logits, bias=head.bias, others=others)
        loss, total = linear_cross_entropy(
            hidden,
            head.weight,
            labels,
            scale,
            self.logits,
            fused=self.fused,
            objective=self.objective,
            bias=head.bias,
            others=others,
        )
        if balance is None:
            return loss, total
        uneven = load_balance(router_logits, balance, model.config.num_experts_per_tok, self.shared_tokens)
        return loss + balance.scale * uneven, torch.stack([total, uneven.detach()])

    def tie_weights(self) -> None:
        """Make those parameters one again that the architecture says are one."""
        model: Any = self.huggingface
        model.tie_weights()

    def keep_router_logits(self) -> None:
        """Have routers keep what their loss is computed from; before anything is put around the layers."""
        self.routers = Routers(self.huggingface)

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, in order."""
        model: Any = self.huggingface
        blocks: nn.ModuleList = model.base_model.layers
        return blocks

    def first_trained(self, trains: Callable[[str], bool]) -> int:
        """Which of the blocks is the first that a gradient comes to, where ``trains`` says what is trained: their
        number where none does, as only what follows them is, such as the head; 0 where nothing is.

        A head that is tied is the embeddings.
        """
        places = {parameter: place for place, block in enumerate(self.blocks) for parameter in block.parameters()}
        outside, trained = 0, []
        for name, parameter in self.in_order():
            if parameter in places:
                outside = len(self.blocks)
            if trains(name):
                trained.append(places.get(parameter, outside))
        return min(trained, default=0)

    def in_order(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters and their names, in the order in which a model computes with them: that of its modules, but
        for what gives each block an input of its own, which comes before them all."""
        named = [*self.huggingface.named_parameters()]
        inside = {*self.blocks.parameters()}
        return sorted(named, key=lambda each: each[1] in inside or _INPUTS_OF_BLOCKS not in each[0])

    @property
    def vocabulary(self) -> int:
        """Tokens for which it has embeddings, in each of its tables: those of inputs of blocks may have fewer."""
        model: Any = self.huggingface
        tables = [module for name, module in model.named_modules() if _INPUTS_OF_BLOCKS in name]
        embeddings = [each for each in tables if isinstance(each, nn.Embedding)]
        return min(int(each.num_embeddings) for each in (model.get_input_embeddings(), *embeddings))

    def module_of_whole(self, name: str) -> str:
        """What the module or parameter ``name`` is called in the model that is published."""
        return name if self.whole is None else self.whole.modules.outside(name)

    @property
    def names(self) -> Names:
        """The canonical names of this architecture."""
        model: Any = self.huggingface
        place, own = self.whole.files if self.whole else None, Names.of(model.config)
        tables = {part.name: table for name, table in self.tables.items() for part in own.parts(name, (table.rows,))}
        return Names.of(model.config, place, tables)


def build_on_meta(path: Path, overrides: ConfigOverrides | None = None, new_tokens: range = NONE_NEW) -> CausalLM:
    """The model described by ``path/config.json`` and ``overrides``, without memory for its parameters; fp32.

    It has rows for ``new_tokens`` of its tokenizer. Raises ``ModelError`` for a folder without a config and for
    architectures whose numbers would not be exact, ``ConfigError`` for overrides that do not go with the model.
    """
    if not (path / "config.json").is_file():
        adapters = (path / EXPORT_ADAPTER_CONFIG).is_file()
        hint = ", and the adapters that are here belong into lora.adapterUri" if adapters else ""
        raise ModelError(f"{path} has no config.json: spec.model.uri must name a Hugging Face model folder{hint}")
    try:
        published = published_config(path)
        config = config_of(path, overrides)
    except ConfigError:
        raise
    except Exception as error:  # which class depends on the field that is wrong
        raise ModelError(f"{path}/config.json cannot be used: {_sentence(error)}") from error
    if published is None:
        return _built(config, overrides, _reading_of(config), new_tokens)
    read_as = _reading_of(published) or _reading_of(config)
    try:
        whole = build_whole(published)
        config.tie_word_embeddings = is_tied(whole, path)
    except ModelError:
        raise
    except Exception as error:  # packages that are not there, sizes that do not go together
        raise ModelError(f"a model of type {published.model_type!r} cannot be built: {_sentence(error)}") from error
    try:
        model = _built(config, overrides, read_as, new_tokens, published)
    except ModelError as error:
        raise ModelError(
            f"of a model of type {published.model_type!r} the text part would be trained, and that is refused: {error}"
        ) from error
    model.whole = whole_of(published, whole, model.huggingface, model.logits, path)
    return model


def _built(
    config: Any, overrides: ConfigOverrides | None, read_as: str, new_tokens: range, published: Any = None
) -> CausalLM:
    """The model of text that ``config`` describes, whose files may have weights in the way ``read_as``, with rows for
    ``new_tokens``; ``published`` is the config of which that is a part, if any."""
    if published is None and config.model_type == llama4.KIND:
        raise ModelError(
            f"a model of type {llama4.KIND!r} by itself is not supported: name the model of images and texts that it "
            "is the text part of, of type 'llama4', whose text part is trained"
        )
    # Building it in fp32 writes fp32 into the config.
    given = config.dtype if published is None else published.dtype or config.dtype
    stored_dtype = given if given in (torch.bfloat16, torch.float16) else torch.float32
    if read_as:
        # What they are read as; an export has plain weights.
        stored_dtype = torch.bfloat16
    # Tokens that its tokenizer has already may have no rows here, as where they were added to that alone.
    has_more = new_tokens or new_tokens.stop > config.vocab_size
    table = Table(config.vocab_size, new_tokens) if has_more else None
    if table is not None:
        if table.rows - table.stored > _MOST_MORE_ROWS:
            raise ModelError(
                f"the tokenizer has tokens with numbers up to {new_tokens.stop - 1}, and the model rows for "
                f"{table.stored}: so many are not added (at most {_MOST_MORE_ROWS}); set model.tokenizerUri to the "
                "tokenizer that belongs to the model"
            )
        config.vocab_size = table.rows
    register()
    try:
        with torch.device("meta"):
            model = _class_for(config, published)(
                config,
                attn_implementation=IMPLEMENTATION,
                dtype=torch.float32,
                **kernel_options(config),
            )
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise ModelError(
                f"a model of type {config.model_type!r} is not supported: its attention is its own code, which knows "
                "no document boundaries; choose another model"
            ) from error
        if str(error).startswith("Unrecognized configuration class"):
            # What follows are the names of all types that it knows.
            if config.sub_configs:
                raise _of_several_parts(config) from error
            raise ModelError(
                f"a model of type {config.model_type!r} is not supported: transformers has no causal language model of "
                "that type by itself; choose another model"
            ) from error
        raise ModelError(f"a model of type {config.model_type!r} cannot be trained: {_sentence(error)}") from error
    if type(model.config) is not type(config) or config.sub_configs:
        raise _of_several_parts(config)
    head = model.get_output_embeddings()
    # The loss is computed with the weight of the head, whatever else one computes with.
    is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    if not is_linear or not hasattr(model.base_model, "layers"):
        raise ModelError(f"a model of type {config.model_type!r} is not supported: no plain decoder with a linear head")
    if not len(model.base_model.layers):
        raise ModelError(
            f"a model of type {config.model_type!r} without any layer (num_hidden_layers "
            f"{getattr(config, 'num_hidden_layers', None)!r}) is no language model: config.json must say how many "
            "layers the weights beside it have"
        )
    check_no_layer_is_skipped(model.config)
    keep_documents_apart(model)
    check_documents_stay_apart(model)
    check_experts(model)
    keep_corrections(model)
    if overrides is not None:
        check_dropouts(model, overrides.given)
    built = CausalLM(model, stored_dtype, logits_of(model), read_as=read_as)
    if table is not None:
        built.tables = _tables(built, table)
    return built


def _tables(model: CausalLM, table: Table) -> dict[str, Table]:
    """``table`` by the names of the parameters of ``model`` that have its rows; a tied one has one name.

    Raises ``ModelError`` where others would lack rows.
    """
    huggingface: Any = model.huggingface
    names = {parameter: name for name, parameter in huggingface.named_parameters()}
    modules = (huggingface.get_input_embeddings(), huggingface.get_output_embeddings())
    found = {names[weight]: weight for module in modules for weight in module.parameters(recurse=False)}
    if model.vocabulary < table.new.stop or any(len(weight) != table.rows for weight in found.values()):
        raise ModelError(
            f"a model of type {huggingface.config.model_type!r} has tables of tokens besides its embeddings and head, "
            f"or others than its vocab_size says, which get no rows: there are some for {model.vocabulary} tokens, and "
            f"with those of model.addedTokens there are {table.new.stop}; leave these out, or choose another model"
        )
    if (padding := huggingface.get_input_embeddings().padding_idx) in table.new:
        raise ModelError(
            f"config.json says that token {padding} is for padding (pad_token_id), of which embeddings learn nothing, "
            "and it is one of model.addedTokens: correct pad_token_id, null says that there is none"
        )
    return dict.fromkeys(found, table)


def _of_several_parts(config: Any) -> ModelError:
    return ModelError(
        f"a model of type {config.model_type!r} is not supported: its config describes several parts "
        f"({', '.join(config.sub_configs)}); choose a model of text alone"
    )


def _class_for(config: Any, published: Any) -> Callable[..., Any]:
    """What builds a model of ``config``, with options as ``from_config`` of transformers has them."""
    from transformers import AutoModelForCausalLM

    own = None if published is None else causal_class(config)
    if own is None:
        return functools.partial(AutoModelForCausalLM.from_config, trust_remote_code=False)
    return functools.partial(build_of_class, own)


def _reading_of(config: Any) -> str:
    """In which way of those that are read as what they mean ``config`` says that files may have weights; empty where
    it says nothing. It says nothing then, as the model that is built of it is a plain one.

    Raises ``ModelError`` where it says that they are quantised otherwise: other layers compute with those.
    """
    given = {name: getattr(config, name) for name in FIELDS if getattr(config, name, None)}
    field, fields = quantised_in({name: each if isinstance(each, dict) else vars(each) for name, each in given.items()})
    if not fields:
        return ""
    reading = reading_of(fields, packs=Names.of(config).packs)
    if not reading:
        raise ModelError(refusal(config.model_type, field, fields))
    for name in given:
        delattr(config, name)
    return reading


def _sentence(error: Exception) -> str:
    """The beginning of what transformers says, which may go on for paragraphs; of a KeyError more than the key.

    Without the files in which its modules lie.
    """
    text = _FILE_OF_MODULE.sub("", " ".join(str(error).split()))[:300]
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def draws_random_numbers(model: CausalLM) -> bool:
    """Whether a forward pass in training draws any: they are seeded for every bin, which then goes alone."""
    huggingface: Any = model.huggingface
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()) or any(
        isinstance(value, int | float) and value > 0
        for name, value in vars(huggingface.config).items()
        if any(word in name for word in _RANDOM) and not name.startswith(_OF_OTHER_HEADS)
    )
