"""Pure: data that is small beside a step. Then a run is a few steps, each with every row many times."""

from .batch import declared_shares
from .v1alpha1.job import SFTJobSpec

_STEPS_A_PASS = 10
"""Of the batch that is recommended: few enough for stable gradients, enough for a schedule."""


def small_data_warning(
    spec: SFTJobSpec, *, rows: int, step_rows: float, total_steps: int | None, estimated: bool = False
) -> str | None:
    """What to say, with the value to set, when a step of about ``step_rows`` examples holds all ``rows`` of the data.

    ``total_steps`` is None where it is not known yet. None when a step holds less than all of it, or exactly that in a
    run of several steps, which may be meant.
    """
    times = step_rows / rows
    if times < 1 or (times == 1 and total_steps != 1) or spec.training.steps == 1:
        return None
    data = f"all {rows:,} rows" if rows > 1 else "the only row"
    if times >= 1.5:
        what = f"every step holds {data} {'about ' if estimated else ''}{round(times):,} times"
    elif total_steps == 1:
        what = f"one step holds {data}, and the run is that one step"
    else:
        what = f"every step holds {data} once and some of them again"
    return f"{what}: {_advice(spec, rows)}"


def _advice(spec: SFTJobSpec, rows: int) -> str:
    processes = declared_shares(spec)
    # What the rules of the API allow: every process has as many examples, in whole micro-batches.
    unit = processes * (spec.training.micro_batch_size if spec.data.packing == "none" else 1)
    size = max(unit, rows // _STEPS_A_PASS // unit * unit)
    if size >= rows:
        return f"train on more rows{f', or on fewer than {processes} processes' if processes > 1 else ''}"
    instead = " instead of globalBatchTokens" if spec.training.global_batch_tokens is not None else ""
    return f"set training.globalBatchSize: {size}{instead} for {-(-rows // size)} steps a pass over the data"
