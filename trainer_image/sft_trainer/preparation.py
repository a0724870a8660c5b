"""What happens before the processes meet: the model's files, the tokenizer, and the tokenised data."""

import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from sft_api.adapters import OF_EXPERTS, ends
from sft_api.place import form_of
from sft_api.progress import Phase
from sft_api.sequence_parallel import key_repeats
from sft_api.small_data import small_data_warning
from sft_api.surprises import positions_warning, schedule_warning
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import HELD_OUT, DataSource, SFTJobSpec
from sft_api.v1alpha1.lora import LoraSpec
from sft_api.v1alpha1.megatron import megatron_of

from .cache import cache_directory
from .checkpoint.store import S3Settings
from .data.added_tokens import numbers_of
from .data.evaluation_set import EvaluationSet
from .data.held_out import Part, all_rows, held_out_part, trained_part
from .data.kept import KeptTokens
from .data.kept_bins import KeptBins
from .data.source_rows import SourceRows
from .data.sources import open_source
from .data.steps import plan_steps
from .data.tokenize import tokenize_source
from .data.tokenized import TokenizedSource
from .data.tokenizer import load_with_new_tokens
from .errors import ConfigError, ModelError
from .fetch import localise
from .first_adapters import FirstAdapters
from .models.attention_choice import choose_attention
from .models.causal_lm import CausalLM, build_on_meta
from .models.compiling import why_not
from .models.digest import base_digest, companion_digests
from .models.exchange import check_heads
from .models.experts import check_balances, has_experts
from .models.grouped_experts import use_if_packed
from .models.lora import add_adapters, stacked_weights, taken_for_experts
from .models.positions import check_positions
from .models.probe import check_trains_on
from .models.quantised import would_be_rounded
from .models.trained_rows import add_rows
from .models.weights import check_tied, unread_tensors, untrained_tensors
from .names.tables import NONE_NEW, Table
from .prepared import Prepared, PreparedModel
from .reporting import Reporter
from .strategies.megatron import layout, refused
from .trainable import check_modules, check_tables, trainable_of


class Loaded(NamedTuple):
    """The tokenizer of a run."""

    folder: Path
    """With its files."""
    tokenizer: Any
    new: range
    """Numbers of tokens that it lacked."""


def _tokenizer(spec: SFTJobSpec, reporter: Reporter, model: Path) -> Loaded:
    """That of ``spec``, whose model is in the folder ``model``."""
    uri = spec.model.tokenizer_uri
    folder = _fetched(uri, "tokenizer", spec, reporter) if uri else model
    return Loaded(folder, *load_with_new_tokens(folder, spec.model.chat_template, spec.model.new_tokens))


def prepare_model(
    config: TrainerConfig,
    reporter: Reporter,
    device: torch.device,
    tokenizer: Callable[[Path], Loaded] | None = None,
) -> PreparedModel:
    """The model of a run, from its files.

    What is wrong with it is found here: ``device`` is tried. Called like ``prepare``, as a part of it, which has loaded
    the ``tokenizer`` once where both need it.
    """
    spec = config.spec
    path = _fetched(spec.model.uri, "model", spec, reporter)
    load = tokenizer or functools.partial(_tokenizer, spec, reporter)
    new_tokens, rows = NONE_NEW, list[int]()
    if spec.model.new_tokens or spec.tokens_with_rows:
        _, loaded, new_tokens = load(path)
        rows = numbers_of(loaded.backend_tokenizer, spec.tokens_with_rows) if spec.tokens_with_rows else []
    model = build_on_meta(path, spec.model.config_overrides, new_tokens)
    check_positions(model.huggingface.config, spec.data.max_length)
    positions = getattr(model.huggingface.config, "max_position_embeddings", None)
    if warning := positions_warning(spec, positions):
        reporter.warn(warning)
    check_heads(model.huggingface.config, spec.sequence_parallel, config.plan.shard_degree)
    if (megatron := megatron_of(spec)) is not None:
        refused.check(megatron, model, trainable_of(config), config.plan.processes)
        refused.check_device(megatron, layout.Sizes.of(model.huggingface.config), device)
    if spec.training.router_aux_loss_coefficient:
        check_balances(model.huggingface)
    digest = base_digest(model, path)
    check_tied(model, path)
    if unread := unread_tensors(model, path):
        reporter.warn(
            f"of the tensors in {spec.model.uri} {len(unread)} are none of a model of its config.json and not read, "
            f"the first is {unread[0]!r}: if they belong to it, correct config.json (its number of layers, its biases)"
        )
    if model.whole is not None:
        # What no export could have is found here, and not by one after the last step.
        others = len(untrained_tensors(model, path).others)
        kinds = model.whole.config.model_type, model.huggingface.config.model_type  # type: ignore[union-attr]
        reporter.say("of a model of type %s the text part (%s) is trained; %d tensors stay as they are", *kinds, others)
    if not spec.trains_all:
        reporter.say("%s", _part_that_is_trained(model, config, rows))
    if model.tables:
        check_tables(model, trainable_of(config))
        table, *_ = model.tables.values()
        reporter.say("%s", _added_in_words(len(spec.model.new_tokens), new_tokens, table))
    adapters = _first_adapters(config, model, reporter)
    if form_of(spec) == "adapter" and spec.lora is not None and (lost := taken_for_experts(model.huggingface)):
        taken = f"peft takes {', '.join(ends(lost))} of this model for its experts"
        instead = "name them in lora.excludeModules, or set export.mergeAdapter"
        if spec.lora.use_dora:
            raise ConfigError(f"{taken}, and loads no adapters with magnitudes (lora.useDora) of these: {instead}")
        if spec.quantised == "nf4":
            reporter.warn(
                f"{taken}, and beside weights in 4 bits loads no adapters of other layers that are called so: {instead}"
            )
    computed = torch.bfloat16 if config.plan.precision == "bf16" else torch.float32
    attention = choose_attention(model.huggingface, device, computed, _key_repeats(spec))
    if attention.used:
        reporter.say("FlashAttention 4 computes %s", attention.used)
    if attention.not_used:
        reporter.warn(f"FlashAttention 4 is not used for {attention.not_used}: PyTorch's own operators are")
    check_trains_on(model.huggingface, device, computed)
    uncompiled = _uncompiled(config, model.huggingface, device, computed)
    return PreparedModel(spec.model.uri, path, model, digest, attention, uncompiled, adapters, new_tokens)


def _key_repeats(spec: SFTJobSpec) -> Callable[[int], int]:
    """How many of the processes that share tokens have each head of keys, of so many."""
    megatron = megatron_of(spec)
    if megatron is None:
        return lambda heads: key_repeats(heads, spec.sequence_parallel)
    tensor, context = megatron.tensor_parallel_degree, megatron.context_parallel_degree
    return lambda heads: key_repeats(max(1, heads // tensor), context)


def _uncompiled(config: TrainerConfig, huggingface: Any, device: torch.device, computed: torch.dtype) -> str:
    """Why layers that the plan has compiled are not; an error where somebody asked for it and it cannot be done."""
    asked = config.spec.training.compile
    if not config.plan.compile:
        return ""
    if has_experts(huggingface) and not asked:
        return "layers of experts are compiled only where training.compile: true asks for it"
    reason = why_not(huggingface, device, computed, cache_directory())
    if reason and asked:
        raise ConfigError(f"training.compile is true, but {reason}: set it to false, or leave it out")
    return reason


def _fetched(uri: str, kind: Literal["model", "adapter", "tokenizer"], spec: SFTJobSpec, reporter: Reporter) -> Path:
    """The folder of it on this machine."""
    reporter.phase(Phase.LOADING, f"looking for {uri}")
    path = localise(
        uri,
        cache_directory(),
        S3Settings.from_spec(spec.checkpoint.s3),
        os.environ.get("HF_TOKEN"),
        kind=kind,
        on_progress=_fetching(uri, reporter),
    )
    reporter.phase(Phase.LOADING, f"reading {uri}")
    return path


def _fetching(uri: str, reporter: Reporter) -> Callable[[int], None]:
    # Said when bytes come: of what is in the cache nothing is downloaded.
    return lambda downloaded: reporter.alive(Phase.DOWNLOADING, f"{uri}: {downloaded / 2**30:.1f} GiB")


def prepare(
    config: TrainerConfig, reporter: Reporter, device: torch.device, kept: KeptTokens | None = None
) -> Prepared:
    """Fetch, tokenise and lay out the steps; cached, so that a restart takes seconds. ``device`` is tried first.

    ``kept`` is asked for tokenised data that is not in the cache. Called by the first process of a machine before it
    joins the group, and by the others after: they find the cache.
    """
    spec = config.spec
    loaded = functools.cache(functools.partial(_tokenizer, spec, reporter))
    # A model that cannot be trained must not be found out about after hours of tokenising.
    model = prepare_model(config, reporter, device, loaded)
    tokenizer_path, tokenizer, _ = loaded(model.path)

    def opened(source: DataSource) -> SourceRows:
        reporter.phase(Phase.LOADING, f"looking for {source.uri}")
        return open_source(
            source,
            cache_dir=cache_directory(),
            s3=S3Settings.from_spec(spec.checkpoint.s3),
            token=os.environ.get("HF_TOKEN"),
            on_fetch=_fetching(source.uri, reporter),
        )

    def tokenized(source: DataSource, rows: SourceRows, part: Part, warn: Callable[[str], None]) -> TokenizedSource:
        name = part(rows).name
        result = tokenize_source(
            rows,
            source,
            spec.data,
            tokenizer,
            cache_dir=cache_directory(),
            part=part,
            kept=kept,
            on_progress=lambda done, total: reporter.phase(Phase.TOKENIZING, f"{name}: {done}/{total} rows"),
            on_fetch=_fetching(name, reporter),
            on_wait=lambda written: reporter.alive(
                Phase.TOKENIZING, f"{name}: another process is at it, {written / 2**20:.0f} MiB so far"
            ),
            on_warning=warn,
        )
        reporter.say("%s: %s", name, result.report.summary())
        for warning in result.report.warnings():
            warn(f"{name}: {warning}")
        return result

    # What is wrong with the small evaluation sets shows before the large ones are read.
    evaluation = {
        source.name: EvaluationSet([tokenized(source, opened(source), all_rows, reporter.warn)])
        for source in spec.data.eval
    }
    train, held_out = list[TokenizedSource](), list[TokenizedSource]()
    evaluated, trained = held_out_part(spec.data), trained_part(spec.data)
    for source in spec.data.train:
        rows = opened(source)
        if evaluated is not None:
            # What there is to say of these rows is said of the others of the source, which are no fewer.
            held_out.append(tokenized(source, rows, evaluated, lambda text: None))
        train.append(tokenized(source, rows, trained, reporter.warn))
    if held_out:
        evaluation[HELD_OUT] = EvaluationSet(held_out)
    sources = [*train, *(source for each in evaluation.values() for source in each.sources)]
    check_vocabulary(tokenizer, spec.model.new_tokens, sources, model.blueprint)
    steps, epoch_size = plan_steps(spec, config.plan, train, KeptBins(spec, config.plan, train, cache_directory()))
    total_steps = spec.training.steps or steps.total_steps
    assert total_steps is not None  # noqa: S101 - a run has steps or epochs
    warning = small_data_warning(spec, rows=epoch_size, step_rows=steps.step(0).examples, total_steps=total_steps)
    for text in filter(None, (warning, schedule_warning(spec, total_steps))):
        reporter.warn(text)
    return Prepared(
        model,
        companion_digests(model.path, tokenizer_path),
        tokenizer,
        train,
        evaluation,
        steps,
        total_steps,
        epoch_size,
    )


def _part_that_is_trained(model: CausalLM, config: TrainerConfig, rows: Sequence[int]) -> str:
    """Put adapters into ``model``, if the run has some, and ``rows`` of such tokens; what there is to train then, in
    words."""
    huggingface, lora, parts = model.huggingface, config.spec.lora, list[str]()
    modules = config.spec.training.trainable_modules or ()
    if lora is not None:
        layers = add_adapters(huggingface, lora, modules)
        parts += _adapters_in_words(lora, layers, {*stacked_weights(huggingface)})
    if modules:
        check_modules(huggingface, modules)
        parts.append(f"training.trainableModules ({', '.join(modules)})")
    if rows:
        tables = add_rows(model, rows, modules)
        if not tables and lora is not None and lora.trainable_tokens:
            raise ConfigError(
                "training.trainableModules names what has the rows of all tokens, which is trained whole: leave "
                "lora.trainableTokens out"
            )
        if tables:
            parts.append(f"rows of {len(rows)} tokens in {' and '.join(tables)}")
    if config.spec.quantised == "mxfp4" and model.read_as != "mxfp4":
        raise would_be_rounded(config.spec.model.uri)
    trainable = trainable_of(config)
    sizes = {name: parameter.numel() for name, parameter in huggingface.named_parameters()}
    trained = sum(size for name, size in sizes.items() if trainable.trains(name))
    weights = trainable.packed(huggingface)
    # Where a device has no product for packed experts, the look at it finds that out.
    use_if_packed(huggingface, weights)
    packed = sum(sizes[name] for name in weights)
    of_4_bits = f", of which {packed:,} are held in 4 bits" if packed else ""
    alone = f"; {OF_EXPERTS}" if lora is not None and not lora.names_experts and has_experts(huggingface) else ""
    return (
        f"{' and '.join(parts)}: {trained:,} parameters are trained, {sum(sizes.values()) - trained:,} are not"
        f"{of_4_bits}{alone}"
    )


def _added_in_words(asked: int, new: range, table: Table) -> str:
    """How many of the tokens that were ``asked`` for are new, their numbers, and where their rows are."""
    which = f"{new.start} to {new.stop - 1}" if len(new) > 1 else f"{new.start}"
    had = f"{asked - len(new)} were there already" if len(new) < asked else ""
    which = ", ".join(filter(None, (which if new else "", had)))
    rows = f"{table.rows} rows, of which files have {table.stored}" if table.rows > table.stored else "rows that it has"
    return f"added tokens: {len(new)} ({which}); in {rows}, they begin as the mean of all that were known"


def _first_adapters(config: TrainerConfig, model: CausalLM, reporter: Reporter) -> FirstAdapters | None:
    """Those that the run begins with, if it names some, for ``model``, which has its adapters."""
    spec = config.spec
    if spec.lora is None or spec.lora.adapter_uri is None:
        return None
    uri = spec.lora.adapter_uri
    found = FirstAdapters.of(_fetched(uri, "adapter", spec, reporter), uri, spec.lora, model, trainable_of(config))
    if warning := found.files.other_base(spec.model.uri):
        reporter.warn(f"{uri}: {warning}")
    reporter.say("adapters begin as those of %s", uri)
    return found


def _adapters_in_words(lora: LoraSpec, layers: Sequence[str], stacked: Collection[str]) -> Iterator[str]:
    """Which of ``layers`` have adapters: linear ones, and experts where they are ``stacked`` tensors."""
    linear = [name for name in layers if name not in stacked]
    experts = [name for name in layers if name in stacked]
    if linear:
        yield f"adapters of rank {lora.rank} on {len(linear)} layers ({', '.join(ends(linear))})"
    if experts:
        modules = {name.rpartition(".")[0] for name in experts}
        where = f"the experts of {len(modules)} layers ({', '.join(ends(experts))})"
        yield f"adapters of rank {lora.rank_of_experts} on {where}"


def check_vocabulary(tokenizer: Any, named: Iterable[str], sources: Sequence[TokenizedSource], model: CausalLM) -> None:
    """Raise ``ModelError`` when ``sources`` hold tokens for which the files of ``model`` have no embedding, but for
    those that are ``named`` to get one.

    Some models come with a tokenizer that has more tokens than the model: that alone is no error.
    """
    embeddings = min([model.vocabulary, *(table.stored for table in model.tables.values())])
    numbers = tokenizer.get_vocab()
    # In each table: those of inputs of blocks get none.
    with_rows = {number for token in named if (number := numbers[token]) < model.vocabulary}
    if max({*numbers.values()} - with_rows, default=0) < embeddings:
        return
    lacking = {token for source in sources for token in source.tokens_from(embeddings)} - with_rows
    if lacking:
        raise ModelError(
            f"the tokenizer gives token {max(lacking)}, but the model has embeddings for {embeddings} tokens only: set "
            "model.tokenizerUri to the tokenizer that belongs to the model, or, where it is that, name tokens that "
            "were added to it in model.addedTokens, which then get some"
        )
