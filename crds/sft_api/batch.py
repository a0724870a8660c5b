"""What a step is made of, where a spec leaves it open. Pure."""

from dataclasses import dataclass

from .v1alpha1.job import SFTJobSpec
from .v1alpha1.status import PlanStatus

DEFAULT_GLOBAL_BATCH_TOKENS = 65_536
DEFAULT_GLOBAL_BATCH_SIZE = 32


@dataclass(frozen=True)
class Batch:
    """Of one step, all processes together."""

    examples: int | None
    tokens: int | None
    micro_batch_tokens: int | None
    """With packing, of which no examples are counted out."""
    micro_batches: int | None
    """None where it depends on how long the examples are."""

    def each(self, shares: int) -> int | None:
        """Micro-batches of each of the ``shares`` of a step."""
        return -(-self.micro_batches // shares) if self.micro_batches else None


def declared_shares(spec: SFTJobSpec) -> int:
    """Shares of a step that ``spec`` asks for: processes that compute on the same micro-batches have one together."""
    return spec.compute.processes // spec.processes_a_share


def batch_of(spec: SFTJobSpec) -> Batch:
    """The batch of ``spec``, with what it does not say filled in."""
    training, shares = spec.training, declared_shares(spec)
    if spec.data.packing == "ffd":
        each = training.max_tokens_per_micro_batch or spec.data.max_length
        if training.global_batch_size is not None:
            return Batch(training.global_batch_size, None, each, None)
        at_once = shares * each
        if training.global_batch_tokens is None:
            tokens = _round_up(DEFAULT_GLOBAL_BATCH_TOKENS, at_once)
        else:
            # The rule of the API makes sure that at least one micro-batch a process fits.
            tokens = training.global_batch_tokens // at_once * at_once
        return Batch(None, tokens, each, tokens // each)
    examples = training.global_batch_size
    if examples is None:
        examples = _round_up(DEFAULT_GLOBAL_BATCH_SIZE, shares * training.micro_batch_size)
    return Batch(examples, None, None, examples // training.micro_batch_size)


def with_batch_of(spec: SFTJobSpec, plan: PlanStatus) -> PlanStatus:
    """``plan`` with micro-batches as ``spec`` has them."""
    batch = batch_of(spec)
    each = batch.each(plan.data_parallel)
    return plan.model_copy(
        update={"max_tokens_per_micro_batch": batch.micro_batch_tokens, "gradient_accumulation": each}
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
