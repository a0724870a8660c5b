"""The numbers of a run and their digest, which must stay the same in every later version."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import yaml
from pydantic import BaseModel, Field, create_model

from sft_api import batch
from sft_api import plan as planning
from sft_api.numbers import NOT_NUMBERS, NUMBERS, Numbers, NumbersError
from sft_api.plan import make_plan, warmup_steps
from sft_api.v1alpha1 import SFTJob
from sft_api.v1alpha1.job import SFTJobSpec
from sft_api.v1alpha1.workload import OptimizerSpec, TrainingSpec

GOLDEN = Path(__file__).parent / "numbers_v1"
DIGESTS: dict[str, str] = json.loads((GOLDEN / "digests.json").read_text())
"""Never edited: a new manifest may be added, with the digest that it has then."""
BEFORE_VERSION_1: dict[str, Any] = json.loads((GOLDEN / "before_v1.json").read_text())
"""What checkpoints held of the same manifests before numbers had a version; written by the code of that time."""


def golden(name: str) -> SFTJobSpec:
    return SFTJob.from_manifest(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())).spec


def spec(**sections: Any) -> SFTJobSpec:
    document: dict[str, Any] = {
        "model": {"uri": "hf://org/model"},
        "data": {"train": [{"uri": "hf://org/data"}]},
        "compute": {},
    }
    for section, fields in sections.items():
        document[section] = {**document.get(section, {}), **fields}
    return SFTJobSpec.model_validate(document)


def sources(*train: dict[str, Any]) -> SFTJobSpec:
    return spec(data={"train": list(train)})


# For ever


def test_every_manifest_has_its_digest() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == DIGESTS.keys()
    assert len(set(DIGESTS.values())) == len(DIGESTS)


@pytest.mark.parametrize("name", DIGESTS)
def test_a_digest_never_changes(name: str) -> None:
    assert Numbers.of(golden(name)).digest == DIGESTS[name], (
        "a run that was begun with this manifest could not be resumed any more: whatever was changed, the value that "
        "version 1 knew as the default must be left out, and what was not there in version 1 must not count"
    )


def test_the_manifests_hold_every_number() -> None:
    seen = set()
    for name in DIGESTS:
        for path, value in Numbers.of(golden(name)).values.items():
            if path == "data.train":
                assert isinstance(value, list)
                seen |= {f"data.train[].{field}" for source in value for field in dict(source)}
            else:
                seen.add(path)
    assert seen == NUMBERS


@pytest.mark.parametrize("name", DIGESTS)
def test_the_planner_of_today_does_what_version_1_says(name: str) -> None:
    job = golden(name)
    numbers, plan = Numbers.of(job).values, make_plan(job)
    unit = "globalBatchSize" if "training.globalBatchSize" in numbers else "globalBatchTokens"
    batch = plan.global_batch_size if unit == "globalBatchSize" else plan.global_batch_tokens

    assert batch == numbers.get(f"training.{unit}", 65536)
    assert plan.learning_rate == numbers.get("training.optimizer.learningRate", 1e-5)
    assert plan.precision == numbers.get("training.precision", "bf16")
    assert plan.total_steps == numbers.get("training.steps")
    assert plan.epochs == (None if plan.total_steps else numbers.get("training.epochs", 1))
    if unit == "globalBatchTokens":
        length = numbers.get("data.maxLength", 4096)
        assert plan.max_tokens_per_micro_batch == numbers.get("training.maxTokensPerMicroBatch", length)
    if "training.schedule.type" not in numbers:
        assert warmup_steps(job, 1000) == 30


def fields(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted paths of the leaves below ``model``; an item of a list is written ``[]``."""
    for name, field in model.model_fields.items():
        here = f"{path}{field.alias or name}"
        if here in NOT_NUMBERS:
            yield here
            continue
        inner, is_list = _model_in(field.annotation)
        yield from fields(inner, f"{here}{'[]' * is_list}.") if inner else [here]


def _model_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for argument in get_args(annotation):
        inner, is_list = _model_in(argument)
        if inner:
            return inner, is_list or getattr(annotation, "__origin__", None) is list
    return None, False


def test_every_field_of_the_api_either_counts_or_does_not() -> None:
    """Whoever adds a field puts it on one of the two lists of sft_api.numbers: nothing is forgotten."""
    assert NUMBERS.isdisjoint(NOT_NUMBERS)
    assert set(fields(SFTJobSpec)) == NUMBERS | NOT_NUMBERS


def extended(**default: Any) -> type[SFTJobSpec]:
    """SFTJobSpec of a later version, with one more field in ``training.optimizer`` and one in ``training``."""
    more: dict[str, Any] = {name: (Annotated[Any, Field(default=value)], value) for name, value in default.items()}
    optimizer = create_model("OptimizerSpec", __base__=OptimizerSpec, **more)
    training = create_model(
        "TrainingSpec", __base__=TrainingSpec, **more, optimizer=(optimizer, Field(default_factory=optimizer))
    )
    return create_model("SFTJobSpec", __base__=SFTJobSpec, training=(training, Field(default_factory=training)))


@pytest.mark.parametrize("name", DIGESTS)
def test_a_new_field_with_a_default_changes_no_digest(name: str) -> None:
    document = yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())["spec"]

    later = extended(from_later=0.1).model_validate(document)

    assert later.model_dump()["training"]["optimizer"]["fromLater"] == 0.1
    assert Numbers.of(later).digest == DIGESTS[name]


def test_the_page_of_sft_names_what_counts() -> None:
    """It said that anything else may change, with adapters, frozen weights and another config of the model among it."""
    page = (Path(__file__).parents[3] / "docs/reference/cli.md").read_text()
    counts = page.partition("**The same run.**")[2].partition("Anything else may change")[0]
    in_words = ("data.", "training.", "model.uri", "model.tokenizerUri", "model.chatTemplate", "checkpoint.resume.from")
    named = ("lora", "model.configOverrides", "strategy.fsdp.reduceDtype", "strategy.megatron", "moe_router_dtype")
    named += ("model.addedTokens", "model.addedSpecialTokens")

    assert [path for path in sorted(NUMBERS) if not path.startswith((*in_words, *named))] == []
    for name in ("training.trainableModules", *named):
        assert f"`{name}`" in counts or name == "strategy.megatron"


def test_a_field_that_is_not_on_a_list_is_noticed() -> None:
    missing = set(fields(extended(from_later=0.1))) - NUMBERS - NOT_NUMBERS
    assert missing == {"training.fromLater", "training.optimizer.fromLater"}


def test_another_planner_changes_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "DEFAULT_LEARNING_RATE", 1.0)
    for name in ("TOKENS", "SIZE"):
        monkeypatch.setattr(batch, f"DEFAULT_GLOBAL_BATCH_{name}", 1)
    assert {name: Numbers.of(golden(name)).digest for name in DIGESTS} == DIGESTS


# What counts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (spec(training={"optimizer": {"learningRate": 1e-5}}), spec()),
        (spec(training={"optimizer": {"learningRate": 0.0002}}), spec(training={"optimizer": {"learningRate": 2e-4}})),
        (spec(training={"optimizer": {"maxGradNorm": 2}}), spec(training={"optimizer": {"maxGradNorm": 2.0}})),
        (spec(training={"optimizer": {"betas": [0, 0.5]}}), spec(training={"optimizer": {"betas": [0.0, 5e-1]}})),
        (spec(training={"schedule": {"warmupRatio": 0.03}}), spec()),
        (spec(training={"epochs": 1.0, "seed": 42, "precision": "bf16"}), spec()),
        (spec(training={"globalBatchTokens": 65_536, "maxTokensPerMicroBatch": 4096}), spec()),
        (spec(training={"globalBatchTokens": 66_000}), spec()),
        (spec(training={"loss": "crossEntropy", "labelSmoothing": 0, "neftuneNoiseAlpha": 0.0}), spec()),
        (spec(training={"optimizer": {"type": "adamw"}}), spec()),
        (spec(training={"optimizer": {"type": "muon", "momentum": 0.95}}),
         spec(training={"optimizer": {"type": "muon"}})),
        (sources({"uri": "hf://org/data@main", "split": "train[0:1_000]"}), sources({"uri": "hf://org/data",
         "split": "train[:1000]"})),
        (sources({"uri": "s3://b/rows/", "weight": 2}), sources({"uri": "s3://b/rows", "weight": 2.0})),
        (spec(model={"uri": "hf://org/model@main"}), spec()),
        (spec(model={"tokenizerUri": "hf://org/model@main"}), spec()),
    ],
)  # fmt: skip
def test_equal_values_are_equal_however_they_are_written(one: SFTJobSpec, other: SFTJobSpec) -> None:
    assert Numbers.of(one) == Numbers.of(other)
    assert Numbers.of(one).digest == Numbers.of(other).digest


@pytest.mark.parametrize(
    "same",
    [
        spec(compute={"gpusPerNode": 8}),
        spec(compute={"nodes": 4, "gpusPerNode": 4, "image": "trainer:2"}, strategy={"fsdp": {"shardDegree": 4}}),
        spec(compute={"gpusPerNode": 8}, strategy={"fsdp": {"sequenceParallelDegree": 8}}),
        spec(compute={"gpusPerNode": 8}, strategy={"megatron": {"tensorParallelDegree": 8}}),
        spec(
            compute={"nodes": 4, "gpusPerNode": 8},
            strategy={"megatron": {"pipelineParallelDegree": 2, "expertParallelDegree": 4}},
        ),
        spec(data={"train": [{"uri": "hf://org/data"}], "workers": 3, "eval": [{"uri": "hf://org/e", "name": "e"}]}),
        spec(model={"uri": "hf://org/model", "tokenSecretRef": {"name": "hub"}}),
        spec(training={"activationCheckpointing": "full"}),
        spec(checkpoint={"everySteps": 5}, export={"atEnd": False}, runPolicy={"maxRestarts": 1}),
    ],
)
def test_where_and_how_it_runs_does_not_count(same: SFTJobSpec) -> None:
    assert Numbers.of(same).digest == Numbers.of(spec()).digest


def test_bins_of_another_size_count_only_where_they_decide_which_examples_share_a_step() -> None:
    def packed(**training: Any) -> Numbers:
        return Numbers.of(spec(training=training))

    def unpacked(**training: Any) -> Numbers:
        return Numbers.of(spec(data={"train": [{"uri": "hf://org/data"}], "packing": "none"}, training=training))

    assert packed(maxTokensPerMicroBatch=8192) != packed()
    assert packed(maxTokensPerMicroBatch=8192, globalBatchSize=32) == packed(globalBatchSize=32)
    assert unpacked(microBatchSize=4, globalBatchSize=32) == unpacked(globalBatchSize=32)
    assert unpacked(globalBatchSize=32) == unpacked()


def test_they_count_too_where_experts_are_balanced_over_each() -> None:
    none = {"train": [{"uri": "hf://org/data"}], "packing": "none"}

    def balanced(data: dict[str, Any] | None = None, **training: Any) -> Numbers:
        asked = {"globalBatchSize": 32, "routerAuxLossCoefficient": 0.01, **training}
        return Numbers.of(spec(training=asked, **({"data": data} if data else {})))

    assert balanced(maxTokensPerMicroBatch=8192) != balanced()
    assert balanced(none, microBatchSize=4) != balanced(none)
    assert balanced(routerAuxLossCoefficient=0) == Numbers.of(spec(training={"globalBatchSize": 32}))


def test_the_batch_that_is_left_open_follows_from_the_declared_processes() -> None:
    eight, many = Numbers.of(spec(compute={"gpusPerNode": 8})), Numbers.of(spec(compute={"nodes": 3, "gpusPerNode": 8}))
    given = {"globalBatchTokens": 98_304}

    assert eight.differences(many) == ["training.globalBatchTokens: 65536 -> 98304"]
    assert Numbers.of(spec(compute={"nodes": 3, "gpusPerNode": 8}, training=given)) == many
    assert Numbers.of(spec(training=given)) == many


def test_the_order_of_sources_counts_and_so_does_every_revision() -> None:
    a, b = {"uri": "hf://org/a"}, {"uri": "hf://org/b"}
    assert Numbers.of(sources(a, b)) != Numbers.of(sources(b, a))
    assert Numbers.of(sources(a)) != Numbers.of(sources({"uri": "hf://org/a@v1"}))
    assert Numbers.of(sources(a)) != Numbers.of(sources({**a, "split": "train"})), "which it is, only the data says"


# What is said of a difference


def test_every_difference_is_named_with_both_values() -> None:
    before = spec(
        data={"train": [{"uri": "hf://org/a", "split": "train[:10]"}, {"uri": "hf://org/b"}], "maxLength": 512},
        training={"steps": 10, "optimizer": {"learningRate": 1e-3}},
    )
    now = spec(
        data={"train": [{"uri": "hf://org/a", "systemKey": "sys"}, {"uri": "hf://org/c"}]},
        training={"steps": 20, "optimizer": {"betas": [0.9, 0.99]}},
        model={"chatTemplate": "x" * 199 + "{"},
    )

    assert Numbers.of(before).differences(Numbers.of(now)) == [
        "data.maxLength: 512 -> 4096",
        'data.train[0].split: "train[:10]" -> not set',
        'data.train[0].systemKey: "system" -> "sys"',
        'data.train[1].uri: "hf://org/b" -> "hf://org/c"',
        f'model.chatTemplate: not set -> "{"x" * 119}…',
        "training.optimizer.betas: [0.9, 0.999] -> [0.9, 0.99]",
        "training.optimizer.learningRate: 0.001 -> 1e-05",
        "training.steps: 10 -> 20",
    ]
    assert Numbers.of(before).differences(Numbers.of(before)) == []


def test_of_long_values_that_begin_alike_it_is_said_in_what_they_differ() -> None:
    before, now = (
        Numbers.of(spec(model={"addedTokens": [*(f"<token {number}>" for number in range(50)), last]}))
        for last in ("<a>", "<b>")
    )

    (told,) = before.differences(now)

    assert told == ('model.addedTokens: …"<token 48>", "<token 49>", "<a>"] -> …"<token 48>", "<token 49>", "<b>"]')


def packed(length: int, **training: Any) -> Numbers:
    return Numbers.of(spec(data={"train": [{"uri": "hf://org/a"}], "maxLength": length}, training=training))


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        (
            packed(256, globalBatchTokens=512),
            packed(256, globalBatchSize=8),
            ["training.globalBatchSize: not set -> 8", "training.globalBatchTokens: 512 -> not set"],
        ),
        (
            packed(256, globalBatchSize=8),
            packed(256, globalBatchTokens=512),
            ["training.globalBatchSize: 8 -> not set", "training.globalBatchTokens: not set -> 512"],
        ),
        (
            packed(256, steps=6),
            packed(256, epochs=2),
            ["training.epochs: not set -> 2", "training.steps: 6 -> not set"],
        ),
        (
            packed(256, schedule={"warmupRatio": 0.1}),
            packed(256, schedule={"warmupSteps": 5}),
            ["training.schedule.warmupRatio: 0.1 -> not set", "training.schedule.warmupSteps: not set -> 5"],
        ),
        (
            packed(256, schedule={"type": "warmupStableDecay", "decayRatio": 0.2}),
            packed(256, schedule={"type": "warmupStableDecay", "decaySteps": 5}),
            ["training.schedule.decayRatio: 0.2 -> not set", "training.schedule.decaySteps: not set -> 5"],
        ),
    ],
)
def test_no_default_is_named_where_another_field_stands_for_it(before: Numbers, now: Numbers, named: list[str]) -> None:
    assert before.differences(now) == named


def test_the_size_of_bins_is_named_where_it_is_another() -> None:
    same, open_ = packed(256, maxTokensPerMicroBatch=256, globalBatchTokens=512), packed(256, globalBatchTokens=512)

    assert same.differences(packed(128, maxTokensPerMicroBatch=256, globalBatchTokens=512)) == [
        "data.maxLength: 256 -> 128"
    ]
    assert same.differences(packed(128, globalBatchTokens=512)) == ["data.maxLength: 256 -> 128"]
    assert open_.differences(packed(256, maxTokensPerMicroBatch=512, globalBatchTokens=512)) == [
        "training.maxTokensPerMicroBatch: 256 -> 512"
    ]


def test_numbers_are_different_exactly_when_a_difference_is_named() -> None:
    every = [Numbers.of(golden(name)) for name in DIGESTS]
    for one in every:
        for other in every:
            assert bool(one.differences(other)) == (one.digest != other.digest)


# Records


@pytest.mark.parametrize("name", DIGESTS)
def test_a_record_says_everything(name: str) -> None:
    numbers = Numbers.of(golden(name))
    read = Numbers.read(json.loads(json.dumps(numbers.as_record())))
    assert (read, read.digest) == (numbers, numbers.digest)


@pytest.mark.parametrize("name", BEFORE_VERSION_1)
def test_what_was_recorded_before_version_1_is_adopted(name: str) -> None:
    before, now = Numbers.read(BEFORE_VERSION_1[name]), Numbers.of(golden(name))
    assert before.differences(now) == []
    assert before.digest == DIGESTS[name]


def test_what_was_recorded_before_version_1_says_what_differs() -> None:
    before = Numbers.read(BEFORE_VERSION_1["many-processes"])
    assert before.differences(Numbers.of(golden("smallest"))) == ["training.globalBatchTokens: 98304 -> 65536"]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({}, "it is not recorded with which settings they were made"),
        ({"version": 2, "values": {}}, "their numbers are written in version 2, this program knows version 1"),
        ({"version": 1, "values": 3}, "their numbers cannot be read"),
        ({"version": 1}, "their numbers cannot be read"),
        ({"spec": {"data": 1}, "plan": {}}, "their numbers cannot be read"),
        ({"spec": [], "plan": []}, "their numbers cannot be read"),
        ({"spec": {"data": {"train": [3], "packing": "ffd"}}, "plan": {"learningRate": 1, "precision": "bf16"}},
         "their numbers cannot be read"),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_read_says_so(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NumbersError, match=sentence):
        Numbers.read(record)


# Where a step stands


def test_what_a_step_sees_is_the_same_until_data_batch_or_seed_change() -> None:
    begun = Numbers.of(spec(training={"steps": 10}))
    longer = {"steps": 20, "optimizer": {"learningRate": 1e-3}, "schedule": {"type": "constant"}, "precision": "fp32"}
    origin = {"resume": {"from": {"uri": "s3://bucket/other", "what": "everything"}}}
    assert begun.position_differences(Numbers.of(spec(training=longer, checkpoint=origin))) == []
    other = Numbers.of(spec(training={"steps": 20, "seed": 7}))
    assert begun.position_differences(other) == ["training.seed: 42 -> 7"]
