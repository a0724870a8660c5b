"""``sft data --all``: what becomes of all rows, and the steps that they make, before anything is paid for."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sft_api.failures import exit_code
from sft_api.plan import Plan, make_plan
from sft_api.v1alpha1.job import SFTJob, SFTJobSpec
from sft_trainer.cache import cache_directory
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.data.held_out import Part
from sft_trainer.data.sources import open_source
from sft_trainer.data.steps import plan_steps
from sft_trainer.data.tokenize import tokenize_source
from sft_trainer.data.tokenized import TokenizedSource
from sft_trainer.fetch import disk_error

from .console import result, say, warn
from .data import read_tokenizer, sets_of
from .errors import UserError
from .trainer_errors import as_user_errors
from .words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from sft_api.v1alpha1.data import DataSource

_SECONDS = 5.0
"""Between two words of how far it is."""


def show_all_data(job: SFTJob, *, evaluation: bool) -> None:
    """Tokenise all rows of the training sets, or of the evaluation sets, and print what they come to.

    They are then in the cache, for runs on this machine. Raises UserError when something cannot be read or has no exact
    mask, or when no row is left.
    """
    sets = sets_of(job, evaluation=evaluation)
    try:
        with as_user_errors():
            tokenizer = read_tokenizer(job.spec)
            found = [_show_source(source, part, job.spec, tokenizer) for source, part in sets]
    except OSError as error:  # of the cache: rows that cannot be read are a DataError
        disk = disk_error(error, cache_directory())
        raise UserError(str(disk), exit_code=exit_code(disk.failure)) from error
    if not evaluation:
        for line in steps_in_words(job.spec, make_plan(job.spec), found):
            result(line, bold=True)


def _show_source(
    source: "DataSource", part: Part, spec: SFTJobSpec, tokenizer: "PreTrainedTokenizerFast"
) -> TokenizedSource:
    progress = _paced()
    opened = open_source(
        source,
        cache_dir=cache_directory(),
        s3=S3Settings.from_spec(spec.checkpoint.s3),
        token=os.environ.get("HF_TOKEN"),
        on_fetch=lambda size: progress(f"fetching, {size / 2**20:,.0f} MiB so far ..."),
    )
    made = tokenize_source(
        opened,
        source,
        spec.data,
        tokenizer,
        part=part,
        cache_dir=cache_directory(),
        on_progress=lambda done, rows: progress(f"{done:,} of {counted(rows, 'row')} ..."),
        on_wait=lambda _: progress("another process tokenises the same rows ..."),
        on_warning=warn,
    )
    name = part(opened).name
    result(f"{name}: {made.report.summary()}")
    for warning in made.report.warnings():
        warn(f"{name}: {warning}")
    return made


def _paced() -> Callable[[str], None]:
    """Says what it is given, but for what comes soon after."""
    last = time.monotonic()

    def progress(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            say(text, dim=True)

    return progress


def steps_in_words(spec: SFTJobSpec, plan: Plan, train: Sequence[TokenizedSource]) -> list[str]:
    """What an epoch of ``train`` is, and how many of them the run makes."""
    steps, examples = plan_steps(spec, plan.model_copy(update={"epochs": 1}), train)
    count = steps.total_steps or 0
    each = [steps.step(index) for index in range(count)]
    bins, tokens = sum(len(step.bins) for step in each), sum(step.tokens for step in each)
    epoch = f"An epoch is {counted(examples, 'example')} of {tokens:,} tokens in {_bins(bins)}"
    if plan.max_tokens_per_micro_batch:
        full = tokens / (bins * plan.max_tokens_per_micro_batch)
        epoch += f" of {plan.max_tokens_per_micro_batch:,} tokens ({full:.1%} full)"
    size = (
        f"{plan.global_batch_tokens:,} tokens" if plan.global_batch_tokens else f"{plan.global_batch_size:,} examples"
    )
    epoch += f", {counted(count, 'step')} of {size}"
    if spec.training.steps is not None:
        return [
            epoch,
            f"The run makes {counted(spec.training.steps, 'step')}: {spec.training.steps / count:,.2f} epochs",
        ]
    total = plan_steps(spec, plan, train)[0].total_steps or 0
    return [epoch, f"The run makes {counted(total, 'step')} in {counted(plan.epochs or 1, 'epoch')}"]


def _bins(count: int) -> str:
    return f"{count:,} micro-batch{'' if count == 1 else 'es'}"
