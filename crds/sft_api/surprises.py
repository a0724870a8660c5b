"""What is valid and may surprise, whatever the memory. Pure.

Examples longer than a model's positions, steps that a run does not come to, a warm-up of all steps, tokens or matrices
over several nodes, stages that wait, what needs GPUs without any, an optimizer with nothing to do.
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from .layers import trained_in_matrices_of_blocks
from .megatron import across_nodes_warning, idle_warning, no_gpu_warning
from .model_shape import ModelShape
from .numbers import one_spelling
from .plan import decay_steps, make_plan, warmup_steps
from .sequence_parallel import nodes_warning
from .splits import MANY_ROWS, parse_split
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import megatron_of

Recorded = Literal["profile", "memorySnapshot"]
RECORDS: Mapping[Recorded, str] = {"profile": "trace", "memorySnapshot": "snapshot"}
"""What comes of each."""


def surprises(spec: SFTJobSpec, shape: ModelShape | None) -> list[str]:
    """What to say of ``spec``, as far as it shows before the run; ``shape`` is that of its model, where it is known."""
    training, monitoring = spec.training, spec.monitoring
    positions = shape.positions if shape else None
    found = [
        positions_warning(spec, positions),
        _original_warning(spec, positions),
        nodes_warning(spec),
        across_nodes_warning(spec),
        no_gpu_warning(spec, shape),
        idle_warning(spec, make_plan(spec)) if megatron_of(spec) else "",
        _muon_warning(spec, shape),
        _export_warning(spec),
        _evaluation_warning(spec),
        _held_out_warning(spec),
        "" if training.steps is None else schedule_warning(spec, training.steps),
    ]
    windows: dict[Recorded, Any] = {"profile": monitoring.profile, "memorySnapshot": monitoring.memory_snapshot}
    for what, window in windows.items():
        if window is not None and training.dummy_run:
            found.append(f"monitoring.{what} is left out of a dummy run: no {RECORDS[what]}")
        elif window is not None:
            found.append(window_warning(what, window.start_step, training.steps))
    return [text for text in found if text]


def positions_warning(spec: SFTJobSpec, positions: int | None) -> str:
    """What to say of examples longer than the ``positions`` of the published model; else empty.

    Nothing where ``spec.model.configOverrides`` says something of them: the rules of the API hold that against lengths.
    """
    overrides, longest = spec.model.config_overrides, spec.data.max_length
    told = overrides and (overrides.rope_parameters or overrides.max_position_embeddings)
    if positions is None or longest <= positions or told:
        return ""
    return (
        f"data.maxLength is {longest}, and the model has {positions} positions (max_position_embeddings): what is "
        "longer lies beyond what it was trained for; scale them by model.configOverrides.rope_parameters, or set "
        f"data.maxLength to {positions} at most"
    )


def _original_warning(spec: SFTJobSpec, positions: int | None) -> str:
    overrides = spec.model.config_overrides
    rotary = overrides.rope_parameters if overrides else None
    original = rotary.original_max_position_embeddings if rotary else None
    if positions is None or original is None or original <= positions:
        return ""
    return (
        "model.configOverrides.rope_parameters.original_max_position_embeddings is "
        f"{original}, and the model has {positions} positions (max_position_embeddings): the trainer refuses that; say "
        f"{positions}, or less"
    )


def _muon_warning(spec: SFTJobSpec, shape: ModelShape | None) -> str:
    if not spec.training.optimizer.is_muon or shape is None or trained_in_matrices_of_blocks(shape, spec):
        return ""
    given = {
        "lora.targetModules": spec.lora and spec.lora.target_modules,
        "training.trainableModules": spec.training.trainable_modules,
    }
    named = [f"{field} ({', '.join(names)})" for field, names in given.items() if names]
    return (
        f"training.optimizer.type is muon, and {' and '.join(named)} {'name' if len(named) > 1 else 'names'} no matrix "
        "of a layer, which it is for: all is trained by AdamW; set the type to adamw, or name layers"
    )


def _export_warning(spec: SFTJobSpec) -> str:
    every, steps = spec.export.every_steps, spec.training.steps
    if every is None or steps is None or every <= steps:
        return ""
    return f"export.everySteps is {every}, and the run has {steps} steps: nothing is exported but at its end"


def _evaluation_warning(spec: SFTJobSpec) -> str:
    training, evaluation = spec.training, spec.training.evaluation
    every, steps, epochs = evaluation.every_steps, training.steps, training.epochs or 1
    if every is not None and steps is not None and every > steps:
        given, run = f"everySteps is {every}", f"{steps} steps"
    elif evaluation.every_epochs is not None and steps is None and evaluation.every_epochs > epochs:
        given, run = f"everyEpochs is {evaluation.every_epochs:g}", f"{epochs:g} {'epoch' if epochs == 1 else 'epochs'}"
    else:
        return ""
    return f"training.evaluation.{given}, and the run has {run}: it is evaluated at its end alone"


def _held_out_warning(spec: SFTJobSpec) -> str:
    """Rows are drawn by their places: those that lie at two may be drawn at the one, and trained at the other."""
    if spec.data.held_out is None:
        return ""
    # Of sources with the same slices the same rows are drawn.
    sources = {
        (one_spelling(source.uri), source.subset, "+".join(map(str, parse_split(source.split or "train"))))
        for source in spec.data.train
    }
    pieces: dict[tuple[str, str | None, str, bool], list[tuple[int, int, str]]] = defaultdict(list)
    for uri, subset, split in sources:
        for piece in parse_split(split):
            # How many rows a percentage is nobody knows here.
            for percent in {True, False} if piece.is_whole else {piece.percent}:
                pieces[uri, subset, piece.split, percent].append((*piece.bounds(MANY_ROWS), str(piece)))
    for (uri, *_), found in sorted(pieces.items(), key=str):
        for (_, stop, one), (start, _, other) in pairwise(sorted(found)):
            if start < stop:
                return (
                    f"data.train has rows of {uri} twice, in {one} and in {other}, and data.heldOut draws by the "
                    "places in each source: rows that are held out of the one are trained in the other; name slices "
                    "that share no rows, or twice the same"
                )
    return ""


def schedule_warning(spec: SFTJobSpec, steps: int) -> str:
    """What to say where warm-up or decay take more or less of the ``steps`` of the run than is meant; else empty."""
    schedule = spec.training.schedule
    warmup, decay = warmup_steps(spec, steps), schedule.decay_steps
    field = "warmupRatio" if schedule.warmup_steps is None else "warmupSteps"
    if warmup >= steps:
        given = schedule.warmup_ratio if schedule.warmup_steps is None else schedule.warmup_steps
        return (
            f"training.schedule.{field} is {given}, and the run has {steps} steps: the learning rate rises to its peak "
            f"in the last one; lower {field}, or leave it out for 3% of the steps"
        )
    if schedule.type == "warmupStableDecay" and steps > 1 and (last := decay_steps(spec, steps)) < 2:
        change = "give decaySteps of 2 or more" if steps - warmup > 1 else f"lower {field}, which leaves no more"
        return (
            f"training.schedule decays in the last {last} of {steps} steps, and begins at the peak: the learning rate "
            f"stays there to the end; {change}"
        )
    if decay is not None and decay >= steps - warmup:
        return (
            f"training.schedule.decaySteps is {decay}, and the run has {steps} steps: the learning rate decays as soon "
            "as it has reached its peak; lower decaySteps, or leave it out for 10% of the steps"
        )
    if schedule.cycles is not None and steps > 1 and 2 * schedule.cycles > steps - warmup:
        return (
            f"training.schedule.cycles is {schedule.cycles}, and {steps - warmup} of {steps} steps are left for them: "
            "a cosine of one step is the peak alone; lower cycles, or set schedule.type: cosine"
        )
    return ""


def window_warning(what: Recorded, first: int, steps: int | None) -> str:
    """What to say where a run of ``steps`` ends before the step ``first``, from which on something is recorded."""
    if steps is None or first <= steps:
        return ""
    return f"monitoring.{what}.startStep is {first}, and the run has {steps} steps: no {RECORDS[what]}"
