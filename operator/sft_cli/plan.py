"""``sft plan``: what would be run, and where each number comes from."""

from sft_api.failures import ExitCode
from sft_api.plan import Plan, make_plan
from sft_api.small_data import small_data_warning
from sft_api.v1alpha1.job import SFTJob, SFTJobSpec

from .console import document, result, say, warn
from .data_size import measure
from .decisions import show, with_overrides
from .explain import explain
from .local_model import fit_of, model_shape, warnings_of, why_uncounted
from .trained import measure_trained, names_warning


def warning_of(spec: SFTJobSpec, plan: Plan) -> str | None:
    """What to say of data that is small beside a step, as far as this machine has the data.

    None of a dummy run, which reads no data.
    """
    size = measure(spec) if spec.training.dummy_run is None else None
    if size is None:
        return None
    rows, tokens = size
    if plan.global_batch_size is not None:
        step_rows = float(plan.global_batch_size)
    else:
        step_rows = (plan.global_batch_tokens or 0) / max(1.0, min(tokens / rows, spec.data.max_length))
    # Only the last step of all is shorter than the others.
    seen = rows * (plan.epochs or 1)
    steps = plan.total_steps or (1 if seen <= step_rows else None)
    held = step_rows if plan.total_steps else min(step_rows, seen)
    estimated = plan.global_batch_size is None and held == step_rows
    return small_data_warning(spec, rows=rows, step_rows=held, total_steps=steps, estimated=estimated)


def show_plan(job: SFTJob, output: str, alone: SFTJob | None = None) -> int:
    """Print the plan of ``job``: a table, or ``status.plan`` as YAML or JSON. Returns the exit code.

    ``alone``: the job without what the command line changed of it; None where it changed nothing, or that is not valid.
    """
    shape = model_shape(job.spec)
    plan = make_plan(job.spec, shape=shape, uncounted=why_uncounted(job.spec))
    found = measure_trained(job.spec, shape)
    fit = fit_of(job.spec, plan, shape)
    if names := names_warning(found, fit.refused):
        warn(names)
    if fit.refused:
        say(f"Error: {fit.refused}", fg="red")
    for text in warnings_of(job.spec, shape, fit):
        warn(text)
    if warning := warning_of(job.spec, plan):
        warn(warning)
    if output != "text":
        document(plan.model_dump(mode="json", by_alias=True, exclude_none=True), output)
    else:
        result(job.metadata.name, bold=True)
        decisions = explain(job.spec, plan, fit.refused if fit.refused.startswith("lora.") else found)
        if alone is not None:
            shape = model_shape(alone.spec)
            decisions = with_overrides(
                decisions, explain(alone.spec, make_plan(alone.spec, shape=shape), measure_trained(alone.spec, shape))
            )
        show(decisions)
    return int(ExitCode.CONFIG_ERROR) if fit.refused else 0
