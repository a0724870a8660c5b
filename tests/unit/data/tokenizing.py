"""Sources opened and tokenised at once."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from sft_api.v1alpha1 import DataSource, DataSpec
from sft_trainer.data import tokenize
from sft_trainer.data.sources import open_source
from sft_trainer.data.tokenized import TokenizedSource


def tokenize_source(
    source: DataSource, data: DataSpec, tokenizer: PreTrainedTokenizerFast, *, cache_dir: Path, **options: Any
) -> TokenizedSource:
    """``tokenize.tokenize_source`` of the rows of ``source``, with its ``options``."""
    rows = open_source(source, cache_dir=cache_dir)
    return tokenize.tokenize_source(rows, source, data, tokenizer, cache_dir=cache_dir, **options)
