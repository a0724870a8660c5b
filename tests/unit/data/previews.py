"""Rows as ``sft data`` shows them."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from sft_api.v1alpha1 import DataSource, DataSpec
from sft_trainer.data.preview import Preview, preview_row
from sft_trainer.data.sources import open_source
from sft_trainer.data.tokenize import check_named_columns, settings_for
from sft_trainer.data.tokenizer import Codec


def preview_source(
    source: DataSource, data: DataSpec, tokenizer: PreTrainedTokenizerFast, count: int, *, cache_dir: Path
) -> list[Preview]:
    """The first ``count`` rows of ``source``. Raises what ``tokenize_source`` raises."""
    rows = open_source(source, cache_dir=cache_dir)
    settings, codec = settings_for(rows, source, data), Codec.of(tokenizer)
    check_named_columns(rows, settings)
    return [preview_row(place, row, settings, codec) for place, row in rows.read(0, min(count, len(rows)))]
