"""``sft data``: the first rows of a job's data as the model sees them."""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sft_api.v1alpha1.data import DataSource
from sft_api.v1alpha1.job import SFTJob, SFTJobSpec
from sft_trainer.cache import cache_directory
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.data.held_out import Part, all_rows, held_out_part, trained_part
from sft_trainer.data.preview import Preview, preview_row, render_text, to_jsonl
from sft_trainer.data.sources import open_source
from sft_trainer.data.tokenize import check_named_columns, settings_for, warnings_of
from sft_trainer.data.tokenizer import Codec, load_tokenizer
from sft_trainer.fetch import localise

from .console import coloured, has_all_characters, result, say, warn
from .errors import UserError
from .local import data_out_of_reach
from .trainer_errors import as_user_errors
from .words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def show_data(job: SFTJob, *, rows: int, evaluation: bool, output: str) -> None:
    """Print the first ``rows`` rows of every training set, or of every evaluation set.

    Raises UserError when something cannot be read or has no exact mask.
    """
    sets = sets_of(job, evaluation=evaluation)
    with as_user_errors():
        codec = Codec.of(read_tokenizer(job.spec))
        for source, part in sets:
            _show_source(source, part, job.spec, codec, rows, output)


def sets_of(job: SFTJob, *, evaluation: bool) -> list[tuple[DataSource, Part]]:
    """The sources of training, or of evaluation, each with which of its rows are meant.

    Raises UserError when there are none, or this machine has them not.
    """
    data = job.spec.data
    if not evaluation:
        sets: list[tuple[DataSource, Part]] = [(source, trained_part(data)) for source in data.train]
    else:
        sets = [(source, all_rows) for source in data.eval]
        if (held_out := held_out_part(data)) is not None:
            sets += [(source, held_out) for source in data.train]
    if not sets:
        raise UserError("spec.data has neither eval nor heldOut: there are no evaluation sets to show")
    if problems := data_out_of_reach(job.spec, os.environ, evaluation=evaluation):
        raise UserError(*problems)
    return sets


def read_tokenizer(spec: SFTJobSpec) -> "PreTrainedTokenizerFast":
    """The tokenizer of the job, fetched where it is not on this machine."""
    say("Loading the tokenizer ...", dim=True)
    s3 = S3Settings.from_spec(spec.checkpoint.s3)
    uri = spec.model.tokenizer_uri or spec.model.uri
    path = localise(uri, cache_directory(), s3, os.environ.get("HF_TOKEN"), kind="tokenizer")
    return load_tokenizer(path, spec.model.chat_template, spec.model.new_tokens)


def _show_source(source: DataSource, part: Part, spec: SFTJobSpec, codec: Codec, rows: int, output: str) -> None:
    s3 = S3Settings.from_spec(spec.checkpoint.s3)
    opened = open_source(source, cache_dir=cache_directory(), s3=s3, token=os.environ.get("HF_TOKEN"))
    settings = settings_for(opened, source, spec.data)
    check_named_columns(opened, settings)
    for warning in warnings_of(opened, source, settings, codec):
        warn(warning)
    meant = part(opened)
    previews = (preview_row(place, row, settings, codec) for place, row in meant.read(0, min(rows, len(meant))))
    if output == "jsonl":
        for line in to_jsonl(previews, ensure_ascii=not has_all_characters()):
            result(line)
        return
    of_all = f" of {len(opened):,}" if len(meant) < len(opened) else ""
    result(f"{meant.name}: {counted(len(meant), 'row')}{of_all}, format {settings.row_format}", bold=True)
    shown = list(_print_each(previews))
    tokens, trained = sum(len(preview.tokens) for preview in shown), sum(preview.trained for preview in shown)
    share = f" ({trained / tokens:.0%})" if tokens else ""
    result(f"{counted(len(shown), 'row')} shown: {tokens:,} tokens, {trained:,} trained{share}", bold=True)


def _print_each(previews: Iterator[Preview]) -> Iterator[Preview]:
    """Print rows as soon as they are read: the first one helps even when a later one is an error."""
    for preview in previews:
        result(render_text(preview, color=coloured(sys.stdout)))
        result("")
        yield preview
