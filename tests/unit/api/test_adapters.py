"""Which layers get adapters, by name, and what of them is a number of a run."""

from typing import Any

import pytest

from sft_api.adapters import AdapterError, adapted, adapter_parameters, ends, shortest
from sft_api.numbers import Numbers
from sft_api.place import continued_from
from sft_api.plan import make_plan
from sft_api.v1alpha1 import LoraSpec, SFTJobSpec

LAYERS = [
    f"model.layers.{layer}.{name}"
    for layer in range(12)
    for name in ("self_attn.q_proj", "self_attn.out_proj", "mlp.up_proj")
]
LINEAR = [*LAYERS, "lm_head"]


def chosen(*targets: str, without: tuple[str, ...] = ()) -> list[str]:
    return adapted(LINEAR, "lm_head", targets, without)


STACKED = [f"model.layers.{block}.mlp.experts.{name}" for block in range(2) for name in ("gate_up_proj", "down_proj")]


@pytest.mark.parametrize(
    ("targets", "without", "meant"),
    [
        (["all-linear"], [], []),
        (["q_proj", "up_proj"], [], []),
        (["experts"], [], STACKED),
        (["all-linear", "mlp.experts"], ["experts.down_proj"], STACKED[::2]),
        (["layers.1.mlp.experts", "out_proj"], [], STACKED[2:]),
        (["experts.gate_up_proj"], ["layers.0.mlp.experts"], STACKED[2:3]),
    ],
)
def test_experts_are_meant_by_names_that_say_so(targets: list[str], without: list[str], meant: list[str]) -> None:
    found = adapted(LINEAR, "lm_head", targets, without, stacked=STACKED)
    assert [name for name in found if "experts" in name] == meant
    linear = [name for name in targets if "experts" not in name]
    assert found == [*(chosen(*linear) if linear else []), *meant]


def test_experts_that_are_trained_whole_or_excluded_get_none() -> None:
    assert adapted(LINEAR, "lm_head", ["experts"], [], ["layers.0.mlp"], STACKED) == STACKED[2:]
    with pytest.raises(AdapterError, match=r"excludeModules and .* leave nothing to train of gate_up_proj, down_proj"):
        adapted(LINEAR, "lm_head", ["experts"], ["experts.down_proj"], ["experts"], STACKED)
    # What no manifest says is not named.
    with pytest.raises(AdapterError, match=r"^training.trainableModules leaves no layer .* of gate_up_proj, down_proj"):
        adapted(LINEAR, "lm_head", ["experts"], [], ["experts"], STACKED)
    for name in ("layers.2.mlp.experts", "experts.gate_proj"):
        with pytest.raises(AdapterError) as refused:
            adapted(LINEAR, "lm_head", ["all-linear", name], [], (), STACKED)
        assert str(refused.value) == (
            f"lora.targetModules names {name!r}, and no experts of the model are called so: they are "
            "model.layers.0.mlp.experts.gate_up_proj to model.layers.1.mlp.experts.down_proj"
        )
    with pytest.raises(AdapterError, match=r"lora.targetModules names 'experts', and the model has no experts"):
        adapted(LINEAR, "lm_head", ["experts"], [])


def test_all_linear_layers_but_the_head() -> None:
    assert chosen("all-linear") == LAYERS
    assert chosen("all-linear", without=("lm_head",)) == LAYERS
    assert chosen("all-linear", without=("up_proj",)) == [name for name in LAYERS if "up_proj" not in name]


def test_a_name_is_whole_or_an_end_after_a_dot() -> None:
    assert chosen("q_proj") == [name for name in LAYERS if name.endswith("q_proj")]
    assert chosen("1.mlp.up_proj") == ["model.layers.1.mlp.up_proj"]
    assert chosen("model.layers.11.mlp.up_proj") == ["model.layers.11.mlp.up_proj"]


@pytest.mark.parametrize(
    ("targets", "without", "words"),
    [
        (("q_proj", "t_proj"), (), "lora.targetModules names 't_proj', .* are q_proj, out_proj, up_proj$"),
        (("_proj",), (), "names '_proj'"),
        (("layers.1",), (), "names 'layers.1'"),
        (("all-linear",), ("k_proj",), "lora.excludeModules names 'k_proj'"),
        (("q_proj", "lm_head"), (), "lora.targetModules names lm_head, the head of the model"),
        (("q_proj",), ("q_proj",), "lora.excludeModules leaves nothing to train of q_proj: take a name out"),
    ],
)
def test_what_fits_nothing_is_refused(targets: tuple[str, ...], without: tuple[str, ...], words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        chosen(*targets, without=without)


@pytest.mark.parametrize("layers", [LAYERS, LAYERS[:2], chosen("q_proj"), [name for name in LAYERS if ".3." in name]])
def test_the_shortest_names_mean_the_same_layers(layers: list[str]) -> None:
    names = shortest(layers, LINEAR)
    assert sorted(chosen(*names)) == sorted(layers)
    assert len(names) <= len(layers)


def test_the_shortest_names_are_ends_where_these_will_do() -> None:
    assert shortest(LAYERS, LINEAR) == ends(LAYERS) == ["q_proj", "out_proj", "up_proj"]


def test_an_adapter_has_rank_times_inputs_and_outputs() -> None:
    linear = {"a": (8, 4), "b": (3, 4)}
    assert adapter_parameters(linear, 2, 5) == 2 * (8 + 4) + 2 * (3 + 4)
    assert adapter_parameters(linear, 2, 5, dora=True) == 2 * (8 + 4) + 2 * (3 + 4) + 8 + 3
    assert adapter_parameters({**linear, "of 6 experts": (6, 8, 4)}, 2, 5) == 2 * (8 + 4) + 2 * (3 + 4) + 6 * 5 * 12


def spec(**sections: Any) -> SFTJobSpec:
    document = {"model": {"uri": "hf://org/model"}, "data": {"train": [{"uri": "hf://org/data"}]}, "compute": {}}
    return SFTJobSpec.model_validate({**document, **sections})


def test_adapters_learn_faster_unless_told_otherwise() -> None:
    given = {"optimizer": {"learningRate": 3e-5}}
    assert make_plan(spec(lora={})).learning_rate == 1e-4
    assert make_plan(spec()).learning_rate == 1e-5
    assert make_plan(spec(lora={}, training=given)).learning_rate == 3e-5


def test_alpha_and_the_base_are_as_rank_and_precision() -> None:
    written = spec(
        lora={"rank": 32, "alpha": 32, "basePrecision": "bf16", "targetModules": ["all-linear"]},
        training={"optimizer": {"learningRate": 1e-4}},
    )
    assert Numbers.of(spec(lora={})) == Numbers.of(written)
    assert Numbers.of(spec(lora={"rank": 8})).values["lora.alpha"] == 8
    assert "lora.excludeModules" not in Numbers.of(written).values, "what is as by default is left out"
    cpu = spec(lora={}, compute={"gpusPerNode": 0})
    assert Numbers.of(cpu).values["lora.basePrecision"] == "fp32"
    assert not any(path.startswith("lora.") for path in Numbers.of(spec()).values)


def test_ranks_and_alpha_are_told() -> None:
    experts = ["all-linear", "experts"]
    assert LoraSpec(rank=8).in_words == "rank 8, alpha 8"
    assert LoraSpec(rank=8, alpha=12.5, target_modules=experts).in_words == "rank 8, of experts 8, alpha 12.5"
    assert LoraSpec(rank=8, expert_rank=2, target_modules=experts).in_words == "rank 8, of experts 2, alpha 8"


def test_a_rank_of_experts_that_is_that_of_the_others_is_no_number() -> None:
    names = {"rank": 8, "targetModules": ["all-linear", "experts"]}
    without = Numbers.of(spec(lora=names))
    assert Numbers.of(spec(lora={**names, "expertRank": 8})) == without
    other = Numbers.of(spec(lora={**names, "expertRank": 4}))
    assert without.trained_differences(other) == ["lora.expertRank: not set -> 4"]


def test_names_count_in_any_order_and_once() -> None:
    one, other = (Numbers.of(spec(lora={"targetModules": names})) for names in (["b", "a"], ["a", "b", "a"]))
    assert one == other


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("rank", 8, False),
        ("targetModules", ["all-linear", "experts"], False),
        ("alpha", 7, False),
        ("targetModules", ["q_proj"], False),
        ("excludeModules", ["q_proj"], False),
        ("dropout", 0.1, True),
        ("initMethod", "gaussian", True),
        ("learningRateRatio", 16, True),
        ("useDora", True, False),
        ("basePrecision", "fp32", True),
    ],
)
def test_whose_values_another_run_can_begin_with(field: str, value: Any, fits: bool) -> None:
    mine, theirs = Numbers.of(spec(lora={field: value})), Numbers.of(spec(lora={}))
    assert (theirs.trained_differences(mine) == []) == fits
    assert (continued_from("s3://bucket/a", 5, theirs, mine) != "") == fits
    assert mine.digest != theirs.digest


@pytest.mark.parametrize(
    ("changed", "goes_on"),
    [
        ({"lora": {"dropout": 0.1}}, False),
        ({"lora": {"initMethod": "gaussian"}}, True),
        ({"lora": {"learningRateRatio": 16}}, True),
        ({"training": {"precision": "fp32"}}, True),
    ],
)
def test_after_whose_steps_another_run_can_go_on(changed: Any, goes_on: bool) -> None:
    """A dropout draws other random numbers; first values and precisions decide no place in the data."""
    mine, theirs = Numbers.of(spec(**{"lora": {}, **changed})), Numbers.of(spec(lora={}))
    assert (theirs.position_differences(mine) == []) == goes_on


@pytest.mark.parametrize(
    ("theirs", "mine", "what"),
    [
        ("fp32", "bf16", "everything"),
        ("int8", "int8", "everything"),
        ("bf16", "int8", "weights"),
        ("fp32", "int8", "weights"),
    ],
)
def test_moments_of_8_bits_are_made_of_no_others(theirs: str, mine: str, what: str) -> None:
    one, other = (Numbers.of(spec(training={"optimizer": {"stateDtype": each}})) for each in (theirs, mine))
    assert one.has_moments_for(other) == other.has_moments_for(one) == (what == "everything")
    assert f"what: {what}" in continued_from("s3://bucket/a", 5, one, other)


def test_the_state_of_an_optimizer_is_that_of_no_other() -> None:
    adamw, muon = (Numbers.of(spec(training={"optimizer": {"type": each}})) for each in ("adamw", "muon"))
    assert "what: weights" in continued_from("s3://bucket/a", 5, adamw, muon)
    assert "what: weights" in continued_from("s3://bucket/a", 5, muon, adamw)
    assert "what: everything" in continued_from("s3://bucket/a", 5, muon, muon)


def test_all_weights_and_adapters_fit_one_another_not() -> None:
    whole, adapters = Numbers.of(spec()), Numbers.of(spec(lora={}))
    assert (whole.has_adapters, adapters.has_adapters) == (False, True)
    assert whole.trained_differences(adapters)
    assert adapters.trained_differences(whole)
    assert continued_from("s3://bucket/a", 5, whole, adapters) == ""


def test_adapters_fit_no_other_model() -> None:
    mine, theirs = (Numbers.of(spec(lora={}, model={"uri": f"hf://org/{name}"})) for name in ("one", "other"))
    assert continued_from("s3://bucket/a", 5, theirs, mine) == ""
