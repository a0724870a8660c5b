"""What a pod on another node saves that reads the tokens of its run: tokenising beside fetching them from a bucket.

    python -m tests.bench.kept [--rows 20000] [--rounds 3]

Conversations of about 320 tokens, tokenised by as many processes as there are processors; versitygw on the same
machine. Both by ``tokenize_source`` with an empty cache, in turn. Prints seconds (medians) and their ratio as
key=value.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from threading import Event

from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_trainer.checkpoint.opening import open_store
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.data.kept import KeptTokens
from sft_trainer.data.sources import open_source
from sft_trainer.data.tokenize import TokenizedSource, tokenize_source
from tests.cluster.object_store import object_store
from tests.parity.mask_tokenizers import chat_tokenizer

BUCKET = "bench"
WORDS = "The weather in Rome is sunny and the answer is four "


def write_rows(path: Path, count: int) -> None:
    """Conversations of four turns."""
    with path.open("w") as file:
        for i in range(count):
            said = [
                f"{i}: {WORDS * 4}" if role == "user" else WORDS * (4 + i % 4) for role in ("user", "assistant") * 2
            ]
            turns = [{"role": ("user", "assistant")[j % 2], "content": text} for j, text in enumerate(said)]
            file.write(json.dumps({"messages": turns}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", options.rows)
        source = TrainSource(uri=f"file://{folder}/rows.jsonl")
        data = DataSpec(train=[source], workers=os.cpu_count() or 1)

        def tokenized(cache: str, kept: KeptTokens | None) -> tuple[float, TokenizedSource]:
            began = time.perf_counter()
            rows = open_source(source, cache_dir=folder / cache)
            made = tokenize_source(rows, source, data, chat_tokenizer("chatml"), cache_dir=folder / cache, kept=kept)
            return time.perf_counter() - began, made

        with object_store(folder / "server") as server:
            os.environ.update(server.environment())
            server.client().create_bucket(Bucket=BUCKET)
            kept = KeptTokens(
                open_store(f"s3://{BUCKET}/run", S3Settings(server.endpoint, server.region, force_path_style=True))
            )
            anew, fetched = [], []
            for i in range(options.rounds):
                seconds, made = tokenized(f"anew-{i}", None)
                anew.append(seconds)
                kept.keep(made, Event())
                seconds, read = tokenized(f"fetched-{i}", kept)
                fetched.append(seconds)
                assert read.digest == made.digest
    print(f"tokens={made.report.lengths.total}")
    print(f"tokenize_s={statistics.median(anew):.2f}")
    print(f"fetch_s={statistics.median(fetched):.2f}")
    print(f"fetch_ratio={statistics.median(fetched) / statistics.median(anew):.3f}")


if __name__ == "__main__":
    main()
