"""``spec.data``: what is trained on."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sft_api.splits import SPLIT_PATTERN, SPLIT_SENTENCE

from .base import ApiModel, Rule, ShortText, matches
from .uris import DataUri

Split = Annotated[ShortText, matches(SPLIT_PATTERN, SPLIT_SENTENCE)]

COLUMNS = {
    "messages": [],
    "shareGPT": [],
    "alpaca": ["instruction", "input", "output"],
    "promptCompletion": ["prompt", "completion"],
    "text": ["text"],
    "pretokenized": ["input_ids", "loss_mask", "labels"],
}
"""What each format calls its columns; those of turns, tools and system prompts have fields of their own."""
_ALL_COLUMNS = [name for names in COLUMNS.values() for name in names]

KnownColumns = Rule(
    f"self.all(name, name in {_ALL_COLUMNS})",
    f"names before the colons are those of the format ({', '.join(_ALL_COLUMNS)}), those behind them the data's: write "
    "for example {instruction: question, output: answer}; messagesKey, toolsKey and systemKey tell the other ones",
    lambda value: set(value) <= set(_ALL_COLUMNS),
)


class DataSource(ApiModel):
    """One data set, or a slice of one."""

    uri: DataUri = Field(
        description="Where the rows are: a hub data set, or a file or folder of parquet, jsonl, arrow, csv or "
        "save_to_disk data."
    )
    split: Split | None = Field(
        default=None,
        description='Split in Hugging Face slice syntax, for example "train[:5000]" or "train[:10%]".',
    )
    subset: ShortText | None = Field(default=None, description="Configuration (subset) of a hub data set.")
    format: Literal["auto", "messages", "shareGPT", "alpaca", "promptCompletion", "text", "pretokenized"] = Field(
        default="auto",
        description="Row format: messages (turns with role and content), shareGPT (turns with from and value), alpaca "
        "(instruction, input, output), promptCompletion (prompt, completion), text (all of it is trained) or "
        "pretokenized (input_ids with loss_mask or labels); auto looks at the columns.",
    )
    messages_key: ShortText = Field(
        default="messages",
        description="Column that holds the messages, conversations of shareGPT when absent; another name than messages "
        "must be in the data.",
    )
    columns: Annotated[dict[str, ShortText], Field(max_length=16), KnownColumns] = Field(
        default_factory=dict,
        description="Columns that the data has under other names than its format, by those of the format: "
        "{instruction: question, output: answer}.",
    )
    tools_key: ShortText = Field(
        default="tools", description="Column that holds the tools, if any; another name than tools must be in the data."
    )
    system_key: ShortText = Field(
        default="system",
        description="Column with a system prompt, put first when a row does not begin with a system turn; another name "
        "than system must be in the data.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.format) || self.format == 'auto' || !has(self.columns) || "
            f"self.columns.all(name, name in {COLUMNS}[self.format])",
            "columns names a column that the format does not have: leave it out, or correct format",
            lambda self: self.format == "auto" or set(self.columns) <= set(COLUMNS[self.format]),
        ),
    )


class TrainSource(DataSource):
    """A data set to train on."""

    weight: Annotated[float, Field(gt=0, le=1_000_000)] | None = Field(
        default=None,
        description="Share of examples drawn from this source, relative to the others; either all sources have "
        "one, or none (then every row is seen once an epoch).",
    )


class EvalSource(DataSource):
    """A data set to evaluate on."""

    name: Annotated[
        str, Field(max_length=63), matches(r"^[a-zA-Z0-9][-_.a-zA-Z0-9]*$", "must be letters, digits, - _ .")
    ] = Field(description="Name of the set in metrics and status.")


HELD_OUT = "held-out"
"""What the set of rows that ``data.heldOut`` holds out is called, beside those of ``data.eval``."""


class HeldOutSpec(ApiModel):
    """Rows of the training data that are not trained, and evaluated on instead."""

    fraction: Annotated[float, Field(gt=0, le=0.5)] = Field(
        description="Which part of the rows of each data.train source is held out: of 0.05 one of every 20 rows, drawn "
        "at random, the same ones in every run."
    )


class DataSpec(ApiModel):
    """The data, and which tokens of it are trained."""

    train: Annotated[list[TrainSource], Field(min_length=1, max_length=64)] = Field(
        description="Data sets to train on."
    )
    eval: Annotated[list[EvalSource], Field(max_length=16)] = Field(
        default_factory=list, description="Data sets to evaluate on."
    )
    held_out: HeldOutSpec | None = Field(
        default=None,
        description="Hold rows of the training data back, and evaluate on them: a set called held-out, beside those of "
        "data.eval.",
    )
    train_on: Literal["lastAssistantMessage", "allAssistantMessages", "allTokens"] = Field(
        default="lastAssistantMessage",
        description="Which turns are trained; all others only give context. allTokens: all that the model reads, what "
        "users say, prompts and the template's own words too.",
    )
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = Field(
        default=4096, description="Longest example, in tokens."
    )
    overlong: Literal["drop", "truncate", "split", "error"] = Field(
        default="drop",
        description="What happens to longer examples. truncate keeps the first maxLength tokens, without the "
        "end-of-turn token; split makes several examples of one, which do not see one another.",
    )
    packing: Literal["none", "ffd"] = Field(
        default="ffd",
        description="ffd: examples share micro-batches (first-fit-decreasing) without seeing one another; none: "
        "microBatchSize examples at a time. Nothing is padded either way.",
    )
    sampler: Literal["random", "sequential"] = Field(
        default="random",
        description="random: shuffled anew every epoch from the seed; sequential: as stored, but that steps "
        "which are counted in tokens have neighbours, of up to 4096 examples, together where they fill micro-batches "
        "best.",
    )
    workers: Annotated[int, Field(ge=1, le=256)] = Field(default=8, description="Processes that tokenise.")
    keep_tokenized: bool = Field(
        default=True,
        description="Keep the data as tokens beside the checkpoints (s3:// and pvc://) until the run is complete, so "
        "that a pod on another node does not tokenise it again.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.eval) || self.eval.all(a, self.eval.exists_one(b, b.name == a.name))",
            "names of data.eval must differ: each names its own metric",
            lambda self: len({source.name for source in self.eval}) == len(self.eval),
        ),
        Rule(
            f"!has(self.heldOut) || !has(self.eval) || self.eval.all(s, s.name != '{HELD_OUT}')",
            f"data.eval has a set called {HELD_OUT}, as data.heldOut calls its own: give it another name",
            lambda self: self.held_out is None or all(source.name != HELD_OUT for source in self.eval),
        ),
        Rule(
            "self.train.all(s, has(s.weight)) || self.train.all(s, !has(s.weight))",
            "give every data.train source a weight, or none of them",
            lambda self: len({source.weight is None for source in self.train}) == 1,
        ),
        Rule(
            "self.sampler == 'random' || self.train.all(s, !has(s.weight))",
            "weights need data.sampler: random",
            lambda self: self.sampler == "random" or all(s.weight is None for s in self.train),
        ),
    )

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.eval) or self.held_out is not None
