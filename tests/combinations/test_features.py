"""What the campaign draws from: every field that changes numbers or flow, and the same manifests for the same seed."""

import itertools
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sft_api.v1alpha1.job import SFTJobSpec

from .features import Draws, features, manifest

INPUTS = Path("/inputs")
LEFT_OUT = {
    # Who computes, where, and how long: not of one machine, or of no number.
    *("compute", "suspend", "runPolicy", "deletionPolicy", "monitoring", "strategy.megatron"),
    *("model.tokenSecretRef", "model.parameters", "data.workers", "data.keepTokenized"),
    *("checkpoint.uri", "checkpoint.s3", "checkpoint.everySeconds", "export.uri", "export.hub", "export.atEnd"),
    # What is no run on data, and of each run another one is made that begins from it.
    *("training.dummyRun", "training.callbacks", "checkpoint.resume"),
    # A minute of a compiler for each case.
    "training.compile",
    # Of models, and rows, that are other ones.
    *("model.tokenizerUri", "model.configOverrides", "data.train.subset", "data.train.toolsKey"),
    # As those of sources that are trained on.
    *(f"data.eval.{field}" for field in ("subset", "format", "columns", "split")),
    *(f"data.eval.{field}Key" for field in ("messages", "tools", "system")),
    "checkpoint.keep.everySteps",
    # Numbers that are another number in all manifests.
    *("training.optimizer.betas", "training.optimizer.weightDecay", "training.schedule.warmupRatio"),
    *("training.schedule.decayRatio", "training.schedule.power"),
}
"""Fields, or sections, that no feature has."""


def test_every_field_of_a_run_is_a_feature_or_left_out() -> None:
    given = set(leaves(manifest([], 1)["spec"]))
    for values in features(INPUTS).values():
        for sections in values.values():
            given |= set(leaves(sections))

    known = {path for path in fields(SFTJobSpec) if not within(path, LEFT_OUT)}

    # Keys of a mapping are part of it.
    missing = {path for path in known if not any(within(leaf, {path}) for leaf in given)}
    assert missing == set(), "give them to tests/combinations/features.py"
    assert {left for left in LEFT_OUT if not any(within(path, {left}) for path in fields(SFTJobSpec))} == set()


def test_a_seed_draws_the_same_manifests_and_every_value_soon() -> None:
    one, other = ([*itertools.islice(Draws(INPUTS, 7), 30)] for _ in range(2))
    assert [drawn.job for drawn in one] == [drawn.job for drawn in other]
    assert one[0].job != next(iter(Draws(INPUTS, 8))).job

    for each in one:
        adapters, model = each.job["spec"].get("lora", {}).get("adapterUri"), each.job["spec"]["model"]["uri"]
        assert adapters is None or adapters.rpartition("/")[2].removesuffix("-rslora") == model.rpartition("/")[2]

    drawn = {pair for each in one for pair in each.values.items()}
    every = {(feature, value) for feature, values in features(INPUTS).items() for value in values}
    assert len(drawn) > 0.95 * len(every), every - drawn


def leaves(sections: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Dotted paths of values; those of all items of a list are the same."""
    for name, value in sections.items():
        here = f"{path}.{name}".removeprefix(".")
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, Mapping) for item in items):
            for item in items:
                yield from leaves(item, here)
        else:
            yield here


def fields(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """The same of all fields that ``model`` has."""
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}".removeprefix(".")
        if inner := next(models_in(field.annotation), None):
            yield from fields(inner, here)
        else:
            yield here


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) is not dict:
        for argument in typing.get_args(annotation):
            yield from models_in(argument)


def within(path: str, sections: set[str]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)
