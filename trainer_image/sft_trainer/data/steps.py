"""All steps of a run, from its tokenised sources."""

from collections.abc import Sequence

from sft_api.plan import Plan
from sft_api.v1alpha1.job import SFTJobSpec

from .batches import ExampleBatches, Examples, PackedBatches, StepSchedule
from .kept_bins import KeptBins
from .stream import ExampleStream


def plan_steps(
    spec: SFTJobSpec, plan: Plan, train: Sequence[Examples], kept: KeptBins | None = None
) -> tuple[StepSchedule, int]:
    """All steps of the run, and the number of examples of an epoch; a function of data and configuration alone.

    ``kept`` is asked for what is long to count, and keeps it.
    """
    weights = [source.weight for source in spec.data.train if source.weight is not None]
    stream = ExampleStream(
        [len(source.lengths) for source in train],
        weights=weights or None,
        seed=spec.training.seed,
        shuffle=spec.data.sampler == "random",
    )
    if plan.global_batch_tokens is not None:
        assert plan.max_tokens_per_micro_batch is not None  # noqa: S101 - the plan gives both or none
        known = kept.read() if kept else None
        packed = PackedBatches(
            train,
            stream,
            bin_tokens=plan.max_tokens_per_micro_batch,
            bins_per_step=plan.global_batch_tokens // plan.max_tokens_per_micro_batch,
            epochs=plan.epochs,
            seed=spec.training.seed,
            shuffle=spec.data.sampler == "random",
            known=known,
        )
        if spec.training.evaluation.every_epochs is not None or spec.checkpoint.every_epochs is not None:
            packed.count_pass()
        if kept and packed.bins and packed.bins != known:
            kept.keep(packed.bins)
        steps: StepSchedule = packed
    else:
        assert plan.global_batch_size is not None  # noqa: S101 - the plan gives tokens or examples
        steps = ExampleBatches(
            train,
            stream,
            global_batch_size=plan.global_batch_size,
            epochs=plan.epochs,
            micro_batch_size=spec.training.micro_batch_size,
            bin_tokens=plan.max_tokens_per_micro_batch,
        )
    return steps, stream.epoch_size
