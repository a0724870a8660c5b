"""Files of adapters: what of them a run can begin with, and what its manifest has to say for that."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_api.layers import linear_of
from sft_api.model_config import shape_of
from sft_api.numbers import Numbers
from sft_api.peft_files import AdapterFilesError, PeftFiles, plain_name
from sft_api.v1alpha1 import LoraSpec, SFTJobSpec
from tests.peft_folders import CONFIG, adapters_in, zeros

LINEAR = [f"model.layers.{block}.self_attn.{name}" for block in (0, 1) for name in ("q_proj", "k_proj", "v_proj")]
Q_AND_V = [name for name in LINEAR if "k_proj" not in name]


def lora(**fields: Any) -> LoraSpec:
    return LoraSpec.model_validate({"rank": 8, "alpha": 16, "targetModules": ["q_proj", "v_proj"], **fields})


def test_those_of_the_manifest_are_taken(tmp_path: Path) -> None:
    files = PeftFiles.read(adapters_in(tmp_path, *Q_AND_V))
    assert files.problem(lora()) == ""
    assert files.problem(lora(), LINEAR, Q_AND_V) == ""
    # By whatever names it means them, and what only training knows is its own
    assert files.problem(lora(targetModules=["all-linear"], excludeModules=["k_proj"], dropout=0.5)) == ""


# As transformers calls the modules of models of images and texts, and as it did before.
@pytest.mark.parametrize("decoder", ["model.language_model", "language_model.model", "model.text_model"])
def test_adapters_of_a_whole_model_are_those_of_its_text_part(tmp_path: Path, decoder: str) -> None:
    named = {name: name.replace("model.", f"{decoder}.", 1) for name in Q_AND_V}
    first = named[Q_AND_V[0]]

    files = PeftFiles.read(
        adapters_in(tmp_path, *named.values(), target_modules=[*named.values()], rank_pattern={f"^{first}": 8})
    )

    assert [*files.ranks] == [*named]
    assert files.problem(lora(), LINEAR, Q_AND_V) == ""
    assert f"targetModules: [{', '.join(sorted(Q_AND_V))}]" in files.problem(lora(rank=4))
    assert plain_name("base_model.model.language_model.lm_head.weight") == "lm_head.weight"
    # Of other parts they are no layers of the text part
    tower = "model.vision_tower.encoder.layers.0.self_attn.q_proj"
    others = PeftFiles.read(adapters_in(tmp_path / "tower", *Q_AND_V, tower))
    with pytest.raises(AdapterFilesError, match=f"it has adapters of {tower}, which is no linear layer of this model"):
        others.problem(lora(), LINEAR, Q_AND_V)


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({"rank": 32}, "q_proj, v_proj"),
        ({"alpha": 8}, "q_proj, v_proj"),
        ({"targetModules": ["q_proj"]}, "q_proj"),
        ({"targetModules": ["q_proj", "k_proj", "v_proj"]}, "q_proj, k_proj, v_proj"),
        ({"targetModules": ["all-linear"], "excludeModules": ["0.self_attn.q_proj"]}, ""),
        ({"targetModules": ["q_proj", "v_proj", "experts"]}, ""),
    ],
)
def test_what_the_manifest_has_to_say_is_said(tmp_path: Path, fields: dict[str, Any], on: str) -> None:
    files = PeftFiles.read(adapters_in(tmp_path, *Q_AND_V))
    problem = files.problem(lora(**fields))
    assert "write lora: {rank: 8, alpha: 16, targetModules: [q_proj, v_proj], adapterUri: …}" in problem
    assert f"on {on}" in problem
    assert problem.endswith("without excludeModules") == ("excludeModules" in fields)


def test_what_the_manifest_may_have_otherwise_stays_in_what_it_has_to_say(tmp_path: Path) -> None:
    problem = PeftFiles.read(adapters_in(tmp_path, *Q_AND_V)).problem(lora(rank=4, dropout=0.1, basePrecision="nf4"))
    assert "targetModules: [q_proj, v_proj], dropout: 0.1, basePrecision: nf4, adapterUri: …}" in problem


def test_layers_that_are_missing_are_seen_where_the_layers_of_the_model_are_known(tmp_path: Path) -> None:
    # Given all that the default means, and files that have less: by their own words nobody knows
    files = PeftFiles.read(adapters_in(tmp_path / "some", *Q_AND_V))
    default = lora(targetModules=["all-linear"])
    assert files.problem(default) == ""
    assert "targetModules: [q_proj, v_proj]" in files.problem(default, LINEAR, LINEAR)
    # By the shape of the model, as a look at its config.json gives it
    sizes = {"hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 4}
    shape = shape_of({"model_type": "llama", "vocab_size": 8, **sizes})
    assert shape is not None
    spec = SFTJobSpec.model_validate(
        {
            "model": {"uri": "hf://org/model"},
            "data": {"train": [{"uri": "hf://org/data"}]},
            "compute": {},
            "lora": {"rank": 8, "targetModules": ["all-linear"], "excludeModules": ["o_proj"]},
        }
    )
    linear, adapted = linear_of(shape, spec)
    assert (len(linear), len(adapted)) == (14, 12)
    assert {*linear} - {*adapted} == {f"model.layers.{block}.self_attn.o_proj" for block in (0, 1)}
    # Of one layer of several that are called so, the whole name
    one = PeftFiles.read(adapters_in(tmp_path / "one", LINEAR[0], layers_to_transform=[0]))
    assert f"targetModules: [{LINEAR[0]}]" in one.problem(lora(targetModules=["v_proj"]))
    assert f"targetModules: [{LINEAR[0]}]" in one.problem(default, LINEAR, LINEAR)
    every = PeftFiles.read(adapters_in(tmp_path / "all", *LINEAR))
    assert "targetModules: [all-linear]" in every.problem(lora(targetModules=["q_proj"]), LINEAR, LINEAR[:1])


def test_what_cannot_be_named_in_a_manifest_is_not_advised(tmp_path: Path) -> None:
    for layer in ("lm_head", "model.layers.0.mlp.experts.0.w1"):
        files = PeftFiles.read(adapters_in(tmp_path / layer, *Q_AND_V, layer))
        with pytest.raises(AdapterFilesError, match=f"it has adapters of {layer}, which is no linear layer of this "):
            files.problem(lora(), LINEAR, Q_AND_V)


@pytest.mark.parametrize(("rank", "alpha"), [(16, "64"), (8, "45.25483399593904")])
def test_what_is_scaled_by_the_root_of_the_rank_has_an_alpha_here(tmp_path: Path, rank: int, alpha: str) -> None:
    files = PeftFiles.read(adapters_in(tmp_path, *Q_AND_V, r=rank, use_rslora=True))
    assert f"rank: {rank}, alpha: {alpha}, " in files.problem(lora(rank=rank))
    assert files.problem(lora(rank=rank, alpha=float(alpha))) == ""
    assert files.problem(lora(rank=rank, alpha=float(alpha) * (1 + 1e-6))) != ""


def test_patterns_that_give_all_the_same_are_read_as_peft_does(tmp_path: Path) -> None:
    config = {"rank_pattern": {"q_proj": 4, "^model.layers.0.self_attn.v_proj": 4, "self_attn.v_proj": 4}}
    ranks = dict.fromkeys(Q_AND_V, 4)
    files = PeftFiles.read(adapters_in(tmp_path, *Q_AND_V, ranks=ranks, alpha_pattern={"q_proj": 16}, **config))
    assert files.problem(lora(rank=4)) == ""


def test_experts_have_a_rank_of_their_own(tmp_path: Path) -> None:
    # Given adapters of experts beside those of layers, with one scale, and some of experts alone
    experts = {"target_parameters": ["experts.gate_up_proj"], "rank_pattern": {"experts.gate_up_proj": 3}}
    inner = "model.layers.0.mlp.experts"
    ranks = {inner: 6}
    both = PeftFiles.read(
        adapters_in(tmp_path, *Q_AND_V, inner, ranks=ranks, alpha_pattern={"experts.gate_up_proj": 6}, **experts)
    )
    names = ["q_proj", "v_proj", "experts.gate_up_proj"]
    assert both.problem(lora(targetModules=names, expertRank=3)) == ""
    for fields in ({"targetModules": names}, {}):
        assert "expertRank: 3, targetModules: [q_proj, v_proj, experts.gate_up_proj]" in both.problem(lora(**fields))
    with pytest.raises(AdapterFilesError, match=r"not one scale .*: 2 of .*q_proj, 5.33333 of .*gate_up_proj; "):
        PeftFiles.read(adapters_in(tmp_path, *Q_AND_V, inner, ranks=ranks, **experts)).problem(lora())
    with pytest.raises(AdapterFilesError, match=r"adapters of model.layers.0.mlp.experts, and target_parameters names"):
        PeftFiles.read(adapters_in(tmp_path, *Q_AND_V, inner, ranks=ranks))
    # As peft has it a pattern may mean the experts of one layer
    pattern = {"experts.gate_up_proj": 6, "layers.0.mlp.experts.gate_up_proj": 7}
    one = {**experts, "alpha_pattern": dict(reversed(pattern.items()))}
    with pytest.raises(AdapterFilesError, match=r"not one scale .*, 2.33333 of .*layers.0.mlp.experts.gate_up_proj"):
        PeftFiles.read(adapters_in(tmp_path, *Q_AND_V, inner, ranks=ranks, **one)).problem(lora())
    alone = PeftFiles.read(
        adapters_in(tmp_path, inner, ranks=ranks, alpha_pattern={"experts.gate_up_proj": 6}, **experts)
    )
    assert alone.problem(lora(rank=4, alpha=8, expertRank=3, targetModules=["experts.gate_up_proj"])) == ""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "LOHA"}, "its peft_type is 'LOHA', and only LORA can be trained here"),
        ({"peft_type": None}, "its peft_type is None"),
        ({"use_dora": True}, '"use_dora": true, which no run begins with here: merge them into the model with peft'),
        ({"bias": "all"}, '"bias": "all"'),
        ({"lora_bias": True}, '"lora_bias": true'),
        ({"fan_in_fan_out": True}, '"fan_in_fan_out": true'),
        ({"layer_replication": [[0, 2]]}, '"layer_replication": [[0, 2]]'),
        ({"alora_invocation_tokens": [1]}, '"alora_invocation_tokens": [1]'),
        ({"something_of_tomorrow": 3}, '"something_of_tomorrow": 3'),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': such adapters belong to weights that were"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"rank_pattern": [1]}, "its rank_pattern is no mapping"),
        ({"rank_pattern": {"q_.*": 8}}, "its rank_pattern has the pattern 'q_.*', and only names are read"),
        (
            {"rank_pattern": {"q_proj": 4}},
            "says rank 4 of model.layers.0.self_attn.q_proj, and its tensor has 8: these",
        ),
        ({"r": 4}, "says rank 4 of model.layers.0.self_attn.q_proj, and its tensor has 8"),
        ({"r": "many"}, 'has r: "many", which is none'),
        ({"r": 8.5}, "says rank 8.5 of"),
    ],
)
def test_what_no_run_can_have_is_refused_whatever_the_manifest_says(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    adapters_in(tmp_path, *Q_AND_V, ranks=dict.fromkeys(Q_AND_V, 8), **config)
    with pytest.raises(AdapterFilesError) as error:
        PeftFiles.read(tmp_path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        ({"rank_pattern": {"q_proj": 4}}, {LINEAR[0]: 4, LINEAR[3]: 4}, r"not one rank: 4 of .*q_proj, 8 of .*v_proj"),
        (
            {"alpha_pattern": {"v_proj": 4}},
            {},
            r"not one scale \(alpha / rank\): 2 of .*q_proj, 0.5 of .*v_proj; a run",
        ),
        ({"lora_alpha": -1}, {}, r"has lora_alpha: -1, which is none"),
        ({"lora_alpha": math.nan}, {}, r"has lora_alpha: NaN, which is none"),
    ],
)
def test_several_ranks_or_scales_are_refused(
    tmp_path: Path, config: dict[str, Any], ranks: dict[str, int], said: str
) -> None:
    files = PeftFiles.read(adapters_in(tmp_path, *Q_AND_V, ranks=ranks, **config))
    with pytest.raises(AdapterFilesError, match=said):
        files.problem(lora())


def test_broken_files_are_told_and_never_raise_anything_else(tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(AdapterFilesError) as error:
            PeftFiles.read(tmp_path)
        return str(error.value)

    assert "has no adapter_config.json" in said()
    (tmp_path / "config.json").write_text("{}")
    assert "holds a model, and no adapters: name it in model.uri" in said()
    weights = adapters_in(tmp_path, *Q_AND_V) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert "has no adapter_model.safetensors (adapter_model.bin is there): only safetensors are read" in said()
    weights.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1} bytes, and its header says {len(whole)}" in said()
    for content in (b"", whole[:30], b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"):
        weights.write_bytes(content)
        assert "is not a safetensors file" in said()
    zeros(weights, {"base_model.model.model.norm.weight": (4,)})
    assert "holds no adapters" in said()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A"
    zeros(weights, {f"{name}.weight": (8, 4), f"{name}.default.weight": (8, 4)})
    assert "save one adapter alone" in said()
    adapters_in(tmp_path, *Q_AND_V, dtype="I8")
    assert "is stored as 'I8': adapters are read in fp32, bf16 or fp16" in said()
    zeros(weights, {f"{name}\x1b[2J.weight": (8, 4)})
    assert r"has a tensor 'base_model.model.model.layers.0.self_attn.q_proj.lora_A\x1b[2J.weight', which no" in said()
    zeros(weights, {f"{name}{'A' * 100_000}.weight": (8, 4)})
    assert ", which no model has" in said()
    assert len(said()) < 1000
    zeros(weights, {f"{name}.weight": (8, 4, 2)})
    assert "has adapters of shape (8, 4, 2), and no matrices" in said()
    for entry in ({"shape": [math.inf, 4]}, {"data_offsets": [0, math.inf]}):
        header = {f"{name}.weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128], **entry}}
        text = json.dumps(header).encode()
        weights.write_bytes(len(text).to_bytes(8, "little") + text + bytes(128))
        assert "is not a safetensors file (cannot convert float infinity to integer)" in said()
    text = json.dumps({f"{name}.weight": {"dtype": "\x1b[2J", "shape": [8, 4], "data_offsets": [0, 128]}}).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + bytes(128))
    assert r"is stored as '\x1b[2J': adapters are read" in said()
    for text in ("{", "[1]", '"'):
        (tmp_path / "adapter_config.json").write_text(text)
        assert "adapter_config.json" in said()


@pytest.fixture
def usual_depth() -> Iterator[None]:
    """How deep Python goes where no library has changed it, as some do in the process that they are imported in."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_depth")
@pytest.mark.parametrize("field", ["r", "tomorrow", "peft_type", "init_lora_weights"])
def test_what_is_nested_as_deep_as_can_be_read_is_told_too(tmp_path: Path, field: str) -> None:
    adapters_in(tmp_path, *Q_AND_V)
    whole = json.dumps({**CONFIG, field: None})
    told = set[str]()
    for depth in range(800, 1000):
        text = whole.replace(f'"{field}": null', f'"{field}": {"[" * depth}{"]" * depth}')
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(AdapterFilesError) as error:
            PeftFiles.read(tmp_path)
        told.add(str(error.value)[-40:])
    assert len(told) > 1  # what can be read, and what cannot


def test_names_are_those_of_the_model_whatever_was_put_around_them() -> None:
    layer = "model.layers.0.self_attn.q_proj"
    for key in (f"base_model.model.{layer}.lora_A.weight", f"{layer}.lora_A.default.weight"):
        assert plain_name(key) == f"{layer}.lora_A.weight"
    assert plain_name("base_model.model.lm_head.modules_to_save.default.weight") == "lm_head.weight"
    inner = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
    assert plain_name(inner) == inner.removeprefix("base_model.model.")


@pytest.mark.parametrize(
    ("base", "uri", "warned"),
    [
        ("org/model", "hf://org/model@v1", False),
        ("/models/Model", "hf://org/model", False),
        ("mirror/model", "s3://bucket/models/model/", False),
        (None, "hf://org/model", False),
        (3, "hf://org/model", False),
        ("org/model-instruct", "hf://org/model", True),
    ],
)
def test_another_name_of_the_model_is_warned_of(tmp_path: Path, base: Any, uri: str, warned: bool) -> None:
    files = PeftFiles.read(adapters_in(tmp_path, *Q_AND_V, base_model_name_or_path=base))
    assert ("were trained beside" in files.other_base(uri)) == warned


def test_a_number_of_the_run_that_changes_neither_what_adapters_mean_nor_which_tokens_are_seen() -> None:
    def numbers(**fields: Any) -> Numbers:
        document = {
            "model": {"uri": "hf://org/model"},
            "data": {"train": [{"uri": "hf://org/data"}]},
            "compute": {},
            "lora": {"rank": 8, **fields},
        }
        return Numbers.of(SFTJobSpec.model_validate(document))

    begun, anew = numbers(adapterUri="hf://org/adapters"), numbers()
    assert begun.differences(anew) == ['lora.adapterUri: "hf://org/adapters" -> not set']
    assert begun.digest == numbers(adapterUri="hf://org/adapters@main").digest != anew.digest
    # So that a checkpoint of a run that began with adapters is one to begin from like any other
    assert begun.trained_differences(anew) == begun.position_differences(anew) == []
