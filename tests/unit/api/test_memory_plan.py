"""Whether a run fits its GPUs, what is said when it does not, and what the manifest says of the GPUs."""

from typing import Any

import pytest

from sft_api.gpus import declared_gpu_memory, product_memory
from sft_api.known_models import known_configs, known_shape
from sft_api.memory_needed import gibibytes, memory_of, parameter_count
from sft_api.memory_plan import Fit, judge, sentences, staging_warning
from sft_api.memory_remedies import remedies
from sft_api.model_config import shape_of
from sft_api.plan import make_plan
from sft_api.v1alpha1.job import SFTJobSpec
from tests.unit.cli.jobs import job

GIB = 2**30
EIGHT_BILLION = {"uri": "hf://meta-llama/Llama-3.1-8B"}


def spec(gpus: int = 8, model: dict[str, Any] | None = None, length: int = 8192, **parts: Any) -> SFTJobSpec:
    """Of layers that are not compiled, where nothing else is said."""
    compute = {"gpusPerNode": gpus, "gpuMemory": "80Gi", **parts.pop("compute", {})}
    data = {"train": [{"uri": "hf://a/b"}], "maxLength": length}
    training = {"compile": False, **parts.pop("training", {})}
    return job(model=model or EIGHT_BILLION, compute=compute, data=data, training=training, **parts).spec


def verdict(asked: SFTJobSpec, **known: Any) -> Fit:
    return judge(asked, make_plan(asked, **known), **known)


def total(asked: SFTJobSpec) -> str | None:
    memory = make_plan(asked).memory
    return memory and memory.total


def test_what_fits_needs_no_words() -> None:
    assert verdict(spec(gpus=8, length=4096)) == Fit()


def test_what_does_not_fit_is_refused_with_parts_and_remedies() -> None:
    refused = verdict(spec(gpus=2)).refused

    taken = total(spec(gpus=2))
    assert refused.startswith(f"it does not fit: {taken} of each GPU's 80.0Gi would be taken (activations 4")
    remedies = [part.split(" (")[0] for part in refused.partition("several of: ")[2].split("), ")]
    assert remedies == [
        "training.activationCheckpointing: selective",
        "training.activationCheckpointing: full",
        "8 GPUs in compute",
        "strategy.fsdp.sequenceParallelDegree: 2",
        "lora",
        "data.maxLength: 4096",
        "training.optimizer.stateDtype: bf16",
        "training.optimizer.stateDtype: int8",
        "training.parameterDtype: bf16",
        "strategy.fsdp.cpuOffload: true",
    ]
    assert "compute.memoryCheck: Warn has it tried" in refused


def test_of_muon_no_remedy_is_named_that_it_does_not_go_with() -> None:
    refused = verdict(spec(gpus=2, training={"optimizer": {"type": "muon"}})).refused
    assert "training.optimizer.stateDtype: bf16" in refused
    assert "int8" not in refused
    assert "cpuOffload" not in refused


def test_weights_in_bf16_are_named_where_they_can_be_and_go_with_no_adapters() -> None:
    def told(**training: Any) -> str:
        return verdict(spec(gpus=1, training=training)).refused

    assert "training.parameterDtype: bf16 (" in told()
    # What is computed in fp32 is held so
    assert "parameterDtype" not in told(precision="fp32")
    in_bf16 = told(parameterDtype="bf16")
    assert "training.parameterDtype" not in in_bf16
    assert "lora, without parameterDtype (" in in_bf16


def test_between_90_and_110_percent_there_is_a_warning() -> None:
    tight = verdict(spec(gpus=2, compute={"gpuMemory": "120Gi"}))
    loose = verdict(spec(gpus=2, compute={"gpuMemory": "131Gi"}))

    assert (tight.refused, tight.warning.split(":")[0]) == ("", "it may not fit")
    assert loose == Fit()
    assert verdict(spec(gpus=2, compute={"gpuMemory": "105Gi"})).refused


def test_who_knows_better_is_warned_only() -> None:
    fit = verdict(spec(gpus=1, compute={"memoryCheck": "Warn"}))

    assert (fit.refused, fit.warning.split(":")[0]) == ("", "it may not fit")


def test_compiled_layers_keep_less() -> None:
    compiled = spec(gpus=2, training={"compile": True}, compute={"gpuMemory": "105Gi"})

    assert verdict(compiled).refused == ""
    assert verdict(spec(gpus=2, compute={"gpuMemory": "105Gi"})).refused
    assert verdict(spec(gpus=1, training={"compile": True})).refused


def test_what_compiled_layers_of_experts_keep_is_not_held_against_a_run() -> None:
    mixture, compiled = {"uri": "hf://Qwen/Qwen3-30B-A3B"}, {"compile": True}

    assert verdict(spec(gpus=8, model=mixture, length=65536)).refused
    assert verdict(spec(gpus=8, model=mixture, length=65536, training=compiled)).warning.startswith("it may not fit")


def test_what_blocks_of_which_some_weights_are_trained_keep_is_not_held_against_a_run() -> None:
    # Given blocks of which one layer is trained: what they keep is reckoned as if all were, which is a third more
    def asked(gpu: str, modules: list[str]) -> SFTJobSpec:
        compute = {"gpuMemory": gpu}
        return spec(8, {"uri": "hf://Qwen/Qwen3-8B"}, 8192, training={"trainableModules": modules}, compute=compute)

    some, whole = ["self_attn.o_proj"], ["model.layers"]
    taken = total(asked("60Gi", some))

    # Then it is warned of, where it may fit, and refused where not even blocks of frozen weights did
    assert taken is not None
    assert 1.1 * 60 < float(taken.removesuffix("Gi")) < 70
    assert verdict(asked("60Gi", some)).warning.startswith(f"it may not fit: {taken} of each")
    assert "it does not fit" in verdict(asked("30Gi", some)).refused
    # Who has seen what they keep, as the trainer has of layers that are not compiled, is sure of it
    tight = asked("60Gi", some)
    plan, shape = make_plan(tight), known_shape("hf://Qwen/Qwen3-8B")
    memory = memory_of(tight, plan, shape)
    assert memory is not None
    assert sentences(tight, plan, shape, memory, 60 * GIB, seen=True).refused
    # Of those of which all are trained it is known
    assert "it does not fit" in verdict(asked("60Gi", whole)).refused


def test_remedies_are_those_that_make_a_difference() -> None:
    adapters = spec(
        gpus=1, lora={"rank": 8}, training={"activationCheckpointing": "full"}, compute={"gpuMemory": "20Gi"}
    )
    hybrid = spec(gpus=8, strategy={"fsdp": {"shardDegree": 1}})

    told = verdict(adapters).refused
    assert "activationCheckpointing" not in told
    assert ", lora" not in told
    over_all = f"strategy.fsdp.shardDegree: 8 ({total(spec(gpus=8))})"
    assert over_all in verdict(hybrid).refused
    bins = spec(gpus=4, training={"maxTokensPerMicroBatch": 65536})
    assert "training.maxTokensPerMicroBatch: 8192 (" in verdict(bins).refused
    unpacked = job(
        model=EIGHT_BILLION,
        compute={"gpusPerNode": 8, "gpuMemory": "80Gi"},
        data={"train": [{"uri": "hf://a/b"}], "packing": "none", "maxLength": 8192},
        training={"microBatchSize": 4, "compile": False},
    ).spec
    assert f"training.microBatchSize: 1 ({total(spec(gpus=8))})" in verdict(unpacked).warning


def test_a_base_in_4_bits_is_a_remedy_where_adapters_beside_another_do_not_fit() -> None:
    def told(lora: dict[str, Any] | None, model: str = "meta-llama/Llama-3.1-70B", gpus: int = 1) -> list[str]:
        adapters = {"lora": lora} if lora is not None else {}
        refused = verdict(spec(gpus=gpus, model={"uri": f"hf://{model}"}, length=512, **adapters)).refused
        return refused.partition("several of: ")[2].partition(". Where")[0].split(", ")

    uri = "hf://meta-llama/Llama-3.1-70B"
    half, packed = (spec(1, {"uri": uri}, 512, lora={"basePrecision": base}) for base in ("bf16", "nf4"))
    memory = memory_of(packed, make_plan(half), known_shape(uri))
    assert memory is not None
    taken = gibibytes(memory.total)
    assert verdict(packed) == Fit()

    # Then it is told with what is taken then, before what cuts examples, and with adapters where there are none yet
    assert f"lora.basePrecision: nf4 ({taken})" in told({})
    places = [words.partition(" (")[0] for words in told({"basePrecision": "fp32"})]
    assert (
        places.index("lora.basePrecision: nf4")
        == next(i for i, words in enumerate(places) if "GPUs in compute" in words) + 1
    )
    assert [words for words in told(None) if "lora" in words][1] == f"lora with basePrecision: nf4 ({taken})"
    # As it is published, where it is in 4 bits
    assert [words for words in told({}, "openai/gpt-oss-120b") if words.startswith("lora.basePrecision: mxfp4 (")]
    # And rounded, where it is a plain copy of that
    plain = shape_of({**known_configs()["openai/gpt-oss-120b"], "quantization_config": None})
    copied = spec(1, {"uri": "file:///plain"}, 512, lora={})
    refused = judge(copied, make_plan(copied, shape=plain), shape=plain).refused
    assert "lora.basePrecision: nf4 (" in refused
    assert "mxfp4" not in refused
    # Nor of adapters that fit as they are, nor of a base that is so already
    assert [words.partition(" (")[0] for words in told(None, "meta-llama/Llama-3.1-8B") if "lora" in words] == ["lora"]
    assert [words for words in told({}, "mistralai/Mixtral-8x7B-v0.1") if "nf4" in words]
    assert not [words for words in told({"basePrecision": "nf4"}, "Qwen/Qwen2.5-72B") if "nf4" in words]
    own = verdict(spec(gpus=1, model={"uri": "s3://models/own", "parameters": "70B"}, length=512, lora={})).refused
    assert "it does not fit" in own
    assert "nf4" not in own


def test_a_lower_rank_of_experts_is_a_remedy_where_these_have_adapters() -> None:
    model = {"uri": "hf://Qwen/Qwen3-30B-A3B"}
    shape = known_shape(model["uri"])

    def asked(*names: str, **fields: Any) -> SFTJobSpec:
        return spec(1, model, 512, lora={"rank": 16, "targetModules": ["all-linear", *names], **fields})

    def told(of: SFTJobSpec) -> str:
        return remedies(of, make_plan(of), shape, GIB)

    plan = make_plan(asked("experts"))
    half = memory_of(asked("experts", expertRank=8), plan, shape)
    assert half is not None
    assert f"lora.expertRank: 8 ({gibibytes(half.total)})" in told(asked("experts"))
    assert "lora.expertRank: 64 (" in told(asked("experts", expertRank=128))
    # Of the others it is none, nor one that is less than 1
    assert "expertRank" not in told(asked())
    assert "expertRank" not in told(asked("experts", expertRank=1))
    # Adapters that are there have the rank that they have
    assert "expertRank" not in told(asked("experts", adapterUri="hf://org/adapters"))


def test_two_changes_that_fit_together_are_named_where_none_fits_alone() -> None:
    eight = {"uri": "hf://Qwen/Qwen3-8B"}

    def asked(gpu: str, base: str = "bf16", how: str = "none") -> SFTJobSpec:
        lora, training = {"rank": 16, "basePrecision": base}, {"activationCheckpointing": how}
        return spec(1, eight, 4096, compute={"gpuMemory": gpu}, lora=lora, training=training)

    def told(gpu: str) -> str:
        return verdict(asked(gpu)).refused.partition("change one")[2].partition(". Where")[0].partition(";")[2]

    memory = memory_of(asked("16Gi", "nf4", "full"), make_plan(asked("16Gi")), known_shape(eight["uri"]))
    assert memory is not None
    words = "training.activationCheckpointing: full and lora.basePrecision: nf4 fit together"
    assert told("16Gi") == f" {words} ({gibibytes(memory.total)})"
    assert verdict(asked("16Gi", "nf4", "full")) == Fit()
    # One does, or no two do, whatever more GPUs and shorter examples would do
    assert told("24Gi") == ""
    assert told("6Gi") == ""
    own = spec(gpus=1, model={"uri": "s3://models/own", "parameters": "70B"}, lora={})
    assert "together" not in verdict(own).refused


def test_a_base_in_4_bits_of_a_number_of_parameters_takes_at_least_all_of_it_in_4_bits() -> None:
    model = {"uri": "s3://models/own", "parameters": "70B"}
    plan = make_plan(spec(gpus=1, model=model, lora={"basePrecision": "nf4"})).memory
    offloaded = make_plan(
        spec(gpus=1, model=model, lora={"basePrecision": "nf4"}, strategy={"fsdp": {"cpuOffload": True}})
    ).memory

    assert plan is not None
    assert offloaded is not None
    # 9/16 byte each
    assert plan.parameters == offloaded.host_offload == f"{70e9 * 9 / 16 / GIB:.1f}Gi"


@pytest.mark.parametrize("strategy", [{}, {"strategy": {"fsdp": {"shardDegree": 4}}}], ids=["left out", "given"])
def test_to_shard_over_all_nodes_is_a_remedy_that_can_be_followed(strategy: dict[str, Any]) -> None:
    # Given nodes that each have a replica of their own, for whose size there is room, but not much
    nodes: dict[str, Any] = {"compute": {"nodes": 8, "memoryCheck": "Warn"}}
    crowded = spec(length=6144, **nodes, **strategy)
    plan = make_plan(crowded)
    assert plan.shard_degree < plan.processes

    told = remedies(crowded, plan, known_shape(EIGHT_BILLION["uri"]), 80 * GIB)

    # Then what is told is what a run takes that follows it, and keeps nothing gathered for that there is room again
    wide = {"shardDegree": 64, "reshardAfterForward": True}
    followed = spec(length=6144, strategy={"fsdp": wide}, **nodes)
    assert make_plan(followed).shard_degree == 64
    assert f"strategy.fsdp.shardDegree: 64 ({total(followed)})" in told


@pytest.mark.parametrize(
    ("fsdp", "training", "besides"),
    [
        ({"shardDegree": 2}, {}, {"strategy.fsdp.shardDegree": 8}),
        ({}, {"globalBatchSize": 4}, {"training.globalBatchSize": 8}),
        ({}, {"globalBatchSize": 16}, {}),
        ({}, {"globalBatchTokens": 4 * 8192}, {"training.globalBatchTokens": 8 * 8192}),
        (
            {"shardDegree": 2},
            {"globalBatchSize": 12},
            {"strategy.fsdp.shardDegree": 8, "training.globalBatchSize": 16},
        ),
    ],
)
def test_more_gpus_are_a_remedy_that_can_be_followed(
    fsdp: dict[str, Any], training: dict[str, Any], besides: dict[str, int]
) -> None:
    # Given what a model does not fit, and a degree or a step that would keep more GPUs from helping
    fsdp = {"reshardAfterForward": True, **fsdp}
    crowded = spec(2, training=training, strategy={"fsdp": fsdp})

    told = verdict(crowded).refused

    # Then it is told what else grows with them, and what is taken then is what a run takes that follows it
    for name, value in besides.items():
        of = fsdp if name.startswith("strategy") else training
        of[name.rpartition(".")[2]] = value
    followed = spec(8, training=training, strategy={"fsdp": fsdp})
    words = " and ".join(f"{name}: {value}" for name, value in besides.items())
    assert make_plan(followed).shard_degree == 8
    assert f", 8 GPUs in compute{' with ' if words else ''}{words} ({total(followed)})" in told


def test_more_gpus_need_not_hold_whole_gradients_between_the_micro_batches_that_fewer_have() -> None:
    # Given a step of two micro-batches for each process, and of one for each of twice as many
    def asked(gpus: int) -> SFTJobSpec:
        once = {"fsdp": {"reduceGradients": "oncePerStep", "reshardAfterForward": True}}
        training = {"activationCheckpointing": "full", "globalBatchTokens": 8 * 4096}
        return spec(gpus, {"uri": "hf://Qwen/Qwen3-14B"}, 4096, training=training, strategy=once)

    assert "it does not fit" in verdict(asked(4)).refused

    # Then as many are told of as make it fit, and no more
    assert verdict(asked(8)) == Fit()
    assert f"8 GPUs in compute ({total(asked(8))})" in verdict(asked(4)).refused


def test_tokens_are_shared_out_to_as_few_as_make_it_fit() -> None:
    # Given contexts that no GPU alone has memory for
    long = spec(gpus=8, length=49152, training={"activationCheckpointing": "selective"})

    refused = verdict(long).refused
    shared = {
        degree: spec(
            gpus=8,
            length=49152,
            training={"activationCheckpointing": "selective"},
            strategy={"fsdp": {"sequenceParallelDegree": degree}},
        )
        for degree in (2, 4, 8)
    }

    # Then the smallest degree that fits is named, with what is taken then
    assert f"strategy.fsdp.sequenceParallelDegree: 4 ({total(shared[4])})" in refused
    assert verdict(shared[2]) != Fit()
    assert verdict(shared[4]) == Fit()
    assert make_plan(shared[8]).data_parallel == 1


def test_fewer_shares_of_a_step_hold_whole_gradients_between_their_micro_batches() -> None:
    # Given steps of one micro-batch for each process: gradients are held from none to the next
    def asked(**fsdp: int) -> SFTJobSpec:
        strategy = {"fsdp": {"reduceGradients": "oncePerStep", **fsdp}}
        training = {"activationCheckpointing": "full", "globalBatchTokens": 262144}
        return spec(2, {"uri": "hf://Qwen/Qwen3-8B"}, 131072, strategy=strategy, training=training)

    shared = asked(sequenceParallelDegree=2)
    assert (make_plan(asked()).gradient_accumulation, make_plan(shared).gradient_accumulation) == (1, 2)

    # Then of processes that share tokens it is said what they take who share a step among fewer
    assert f"strategy.fsdp.sequenceParallelDegree: 2 ({total(shared)})" in verdict(asked()).refused


@pytest.mark.parametrize("coefficient", [0, 0.001])
def test_tokens_are_shared_out_also_where_the_loss_of_routers_is_trained(coefficient: float) -> None:
    mixture = {"uri": "hf://Qwen/Qwen3-30B-A3B"}

    refused = verdict(spec(gpus=2, model=mixture, training={"routerAuxLossCoefficient": coefficient})).refused

    assert "strategy.fsdp.sequenceParallelDegree: 2" in refused


@pytest.mark.parametrize("gpus", [0, 8])
def test_what_a_known_model_cannot_be_trained_with_is_refused(gpus: int) -> None:
    own, mixture = {"uri": "s3://models/own"}, {"uri": "hf://Qwen/Qwen3-30B-A3B"}
    small = {"uri": "hf://Qwen/Qwen3-0.6B"}
    balanced, compiled = {"routerAuxLossCoefficient": 0.001}, {"compile": True}

    def refused(model: dict[str, Any], training: dict[str, Any]) -> str:
        return verdict(spec(gpus=gpus, model=model, length=512, training=training)).refused

    # Of a dense model and of a mixture what the other one can have, and of any other nothing is known
    assert refused(small, balanced) == (
        "training.routerAuxLossCoefficient is 0.001, but hf://Qwen/Qwen3-0.6B sends no tokens to experts: leave the "
        "field out"
    )
    assert refused({"uri": "hf://zai-org/GLM-4.5-Air"}, balanced) == (
        "training.routerAuxLossCoefficient is 0.001, but hf://zai-org/GLM-4.5-Air was not trained with a "
        "load-balancing loss: transformers knows none for its type: leave the field out"
    )
    assert refused(small, compiled) == refused(own, balanced) == refused(own, compiled) == ""
    assert refused(mixture, compiled) == refused(mixture, {})
    assert "training.routerAuxLossCoefficient is" not in refused(mixture, balanced)
    assert refused({"uri": "hf://openai/gpt-oss-20b"}, compiled) == (
        "training.compile is true, but hf://openai/gpt-oss-20b has experts with biases, whose layers cannot be "
        "compiled: leave the field out"
    )
    assert "has attention in chunks" in refused({"uri": "hf://meta-llama/Llama-4-Scout-17B-16E"}, compiled)


@pytest.mark.parametrize(
    ("uri", "parameters", "uncounted", "words"),
    [
        (
            "hf://own/model",
            None,
            "",
            [
                "is not in the table",
                "model.parameters, e.g. 8B",
                "hf download own/model config.json) and docs/memory.md has a formula",
            ],
        ),
        ("hf://own/model@v2", "8B", "", ["the least", "(hf download own/model config.json --revision v2)"]),
        ("hf://own/model", None, "of whose type 'arcee' there is no formula", ["'arcee'", "training.dummyRun"]),
        ("s3://own/model", None, "", ["is not in the table", "the trainer counts the rest"]),
    ],
)
def test_of_a_model_that_is_not_known_it_is_said_who_counts_it(
    uri: str, parameters: str | None, uncounted: str, words: list[str]
) -> None:
    asked = spec(model={"uri": uri, **({"parameters": parameters} if parameters else {})})
    memory = make_plan(asked, uncounted=uncounted).memory

    assert memory is not None
    for word in words:
        assert word in memory.unknown
    assert ("hf download" in memory.unknown) == any("hf download" in word for word in words)


def test_layers_of_linear_attention_are_not_shared_out() -> None:
    model = {"uri": "hf://Qwen/Qwen3.5-9B"}
    shared = {"fsdp": {"sequenceParallelDegree": 2}}
    asked = spec(gpus=2, model=model, strategy=shared)
    plan = make_plan(asked)

    # By the table alone, in the words of the trainer
    assert "layers of linear attention" in judge(asked, plan).refused
    crowded = spec(gpus=8, model=model, length=131072)
    told = remedies(crowded, make_plan(crowded), known_shape(model["uri"]), 80 * GIB)
    assert "activationCheckpointing" in told
    assert "sequenceParallelDegree" not in told


def test_a_config_of_any_number_of_layers_or_heads_is_looked_at_soon() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    asked = spec(gpus=8, model={"uri": "file:///own"}, lora={"targetModules": ["query"]})

    def judged(**sizes: int) -> str:
        shape = shape_of({**config, "vocab_size": 256, "head_dim": 16, **sizes})
        return judge(asked, make_plan(asked, shape=shape), shape=shape).refused

    assert "'query'" in judged(num_hidden_layers=1024)
    assert "'query'" in judged(num_hidden_layers=1, num_attention_heads=2**31 - 1)
    assert judged(num_hidden_layers=2**31 - 1) == "", "it is not reckoned with"


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["layers.27", "model.layers.0.mlp", "embed_tokens", "lm_head", "27", "mlp"], ""),
        (
            ["model.norm", "layers.28"],
            "training.trainableModules names 'layers.28', and hf://Qwen/Qwen3-0.6B has 28 layers, from layers.0 to "
            "layers.27",
        ),
        (["model.layers.99.mlp.up_proj"], "names 'model.layers.99.mlp.up_proj', and hf://Qwen/Qwen3-0.6B has 28"),
        (
            ["lm_head", "layers.0"],
            "training.trainableModules names 'lm_head', which is the same tensor as model.embed_tokens in "
            "hf://Qwen/Qwen3-0.6B: name that too, or instead",
        ),
        (
            ["layers.3.self_attn.q_norm", "mlp.fc1"],
            "training.trainableModules names 'mlp.fc1', and no module of the model with weights is called so: there "
            "are model.embed_tokens, model.layers.N.self_attn.q_proj, model.layers.N.self_attn.k_proj, ",
        ),
        (["layer.3"], "training.trainableModules names 'layer.3', and no module"),
        (["q_proj.weight"], "training.trainableModules names 'q_proj.weight', and no module"),
    ],
)
def test_modules_of_a_known_model_are_those_that_it_has(modules: list[str], words: str) -> None:
    asked = spec(gpus=0, model={"uri": "hf://Qwen/Qwen3-0.6B"}, training={"trainableModules": modules})

    refused = judge(asked, make_plan(asked)).refused
    assert words in refused
    assert bool(words) == bool(refused)


@pytest.mark.parametrize(
    ("model", "lora", "words"),
    [
        ("Qwen/Qwen3-0.6B", {}, ""),
        ("Qwen/Qwen3-30B-A3B", {}, ""),
        ("Qwen/Qwen3-30B-A3B", {"targetModules": ["q_proj", "layers.7.self_attn.v_proj"]}, ""),
        ("Qwen/Qwen3-0.6B", {"targetModules": ["up_proj"], "excludeModules": ["layers.0.mlp.up_proj"]}, ""),
        (
            "Qwen/Qwen3-0.6B",
            {"targetModules": ["query"]},
            "lora.targetModules names 'query', and no linear layer of the model is called so: its linear layers are "
            "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
        (
            "Qwen/Qwen3-30B-A3B",
            {"targetModules": ["q_proj", "up_proj"]},
            "lora.targetModules names 'up_proj', and no linear layer of the model is called so: its linear layers are "
            "q_proj, k_proj, v_proj, o_proj; routers get no adapters, and experts where lora.targetModules "
            "names them: experts, or experts.down_proj",
        ),
        ("Qwen/Qwen3-30B-A3B", {"targetModules": ["all-linear", "experts"], "expertRank": 4}, ""),
        ("openai/gpt-oss-20b", {"targetModules": ["experts"], "excludeModules": ["layers.3.mlp.experts"]}, ""),
        (
            "Qwen/Qwen3-30B-A3B",
            {"targetModules": ["experts.down_proj"], "excludeModules": ["mlp.experts"]},
            "lora.excludeModules leaves nothing to train of down_proj: take a name out of it; routers get no adapters, "
            "and experts where lora.targetModules names them: experts, or experts.down_proj",
        ),
        (
            "Qwen/Qwen3-0.6B",
            {"targetModules": ["all-linear", "experts"]},
            "lora.targetModules names 'experts', and the model has no experts: its linear layers are q_proj, k_proj, "
            "v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
    ],
)
def test_adapters_of_a_known_model_are_for_layers_that_it_has(model: str, lora: dict[str, Any], words: str) -> None:
    asked = spec(gpus=0, model={"uri": f"hf://{model}"}, length=512, lora=lora)
    assert verdict(asked).refused == words


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_base_that_cannot_be_held_in_4_bits_is_refused(gpus: int) -> None:
    def refused(model: str, **parts: Any) -> str:
        shape = shape_of({**small, "model_type": "llama"}) if model == "own" else None
        uri = f"file:///{model}" if model == "own" else f"hf://{model}"
        parts = {"lora": {"basePrecision": "nf4"}, **parts}
        asked = spec(gpus=gpus, model={"uri": uri}, length=512, **parts)
        return judge(asked, make_plan(asked, shape=shape), shape=shape).refused

    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    small["intermediate_size"] = 224
    assert refused("Qwen/Qwen3-0.6B") == ""
    assert refused("Qwen/Qwen3-30B-A3B") == ""
    assert refused("own") == (
        "lora.basePrecision is nf4, but rows of mlp.down_proj of file:///own have 224 weights: they must be a multiple "
        "of 64, which share a scale; take bf16, or another model"
    )
    mxfp4 = {"lora": {"basePrecision": "mxfp4"}}
    assert refused("openai/gpt-oss-20b", **mxfp4) == ""
    assert refused("Qwen/Qwen3-30B-A3B", **mxfp4) == (
        "lora.basePrecision is mxfp4, and hf://Qwen/Qwen3-30B-A3B is not, as gpt-oss is published: take nf4, or bf16"
    )
    # Nor is a copy of gpt-oss whose weights are plain
    plain = {**known_configs()["openai/gpt-oss-20b"], "quantization_config": None}
    asked = spec(gpus=gpus, model={"uri": "file:///plain"}, length=512, **mxfp4)
    words = "lora.basePrecision is mxfp4, and file:///plain is not, as gpt-oss is published: take nf4, or bf16"
    assert judge(asked, make_plan(asked), shape=shape_of(plain)).refused == words
    # What is trained is held as it is
    assert refused("own", training={"trainableModules": ["down_proj"]}) == ""


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    fourteen = {"uri": "hf://Qwen/Qwen2.5-0.5B"}
    asked = spec(gpus=8, model=fourteen, length=512, strategy={"fsdp": {"sequenceParallelDegree": 4}})

    assert verdict(asked).refused == (
        "strategy.fsdp.sequenceParallelDegree is 4, which does not divide the 14 attention heads of the model: "
        "set it to 1 or 2"
    )
    # What is said can be set: it divides the processes, and those that a copy of the model is on
    twenty_eight = {"uri": "hf://Qwen/Qwen2.5-7B"}
    eight = {"fsdp": {"sequenceParallelDegree": 8}}
    assert verdict(spec(gpus=8, model=twenty_eight, length=512, strategy=eight)).refused.endswith("to 1, 2 or 4")
    nine = {"uri": "hf://HuggingFaceTB/SmolLM2-135M"}
    two = {"sequenceParallelDegree": 2}
    assert verdict(spec(gpus=6, model=nine, strategy={"fsdp": two})).refused.endswith("to 1 or 3")
    assert verdict(spec(gpus=6, model=nine, strategy={"fsdp": {**two, "shardDegree": 2}})).refused.endswith("to 1")
    assert verdict(spec(gpus=8, model=fourteen, length=512, strategy={"fsdp": {"sequenceParallelDegree": 2}})) == Fit()
    assert verdict(spec(gpus=8, model={"uri": "s3://b/own"}, strategy={"fsdp": {"sequenceParallelDegree": 4}})) == Fit()


def test_of_a_number_of_parameters_what_is_sure_is_judged() -> None:
    own = {"uri": "s3://models/own", "parameters": "8B"}

    refused = verdict(spec(gpus=1, model=own)).refused
    assert "at least 119.8Gi of each GPU's 80.0Gi would be taken" in refused
    assert verdict(spec(gpus=2, model=own)) == Fit()
    assert verdict(spec(gpus=1, model={"uri": "s3://models/own"})) == Fit()
    counts = [parameter_count(text) for text in ("8B", "0.6B", "350M", "1T")]
    assert counts == [8_000_000_000, 600_000_000, 350_000_000, 10**12]


def test_without_gpus_nothing_is_judged() -> None:
    asked = job(model=EIGHT_BILLION, compute={"gpusPerNode": 0, "gpuMemory": "1Gi"}).spec

    assert verdict(asked) == Fit()
    assert make_plan(asked).memory is None


def test_the_size_of_a_gpu_is_that_of_the_manifest_then_of_the_cluster() -> None:
    asked = job(model=EIGHT_BILLION, compute={"gpusPerNode": 1}).spec

    assert verdict(asked) == Fit()
    assert verdict(asked, gpu_memory=80 * GIB).refused
    assert verdict(spec(gpus=1, compute={"gpuMemory": "300Gi"}), gpu_memory=GIB) == Fit()


@pytest.mark.parametrize(
    ("compute", "gibibytes"),
    [
        ({}, None),
        ({"gpuMemory": "80Gi"}, 80),
        ({"nodeSelector": {"nvidia.com/gpu.memory": "81920"}}, 80),
        ({"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}, 80),
        ({"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"}, "gpuMemory": "20Gi"}, 20),
        ({"nodeSelector": {"nvidia.com/gpu.memory": "large"}}, None),
        # Where boards are cut into slices of several kinds the labels tell of the whole one.
        (
            {
                "gpuResourceName": "nvidia.com/mig-1g.10gb",
                "nodeSelector": {"nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
            },
            10,
        ),
        ({"gpuResourceName": "nvidia.com/mig-3g.40gb"}, 40),
        ({"gpuResourceName": "nvidia.com/gpu.shared"}, None),
    ],
)
def test_what_the_manifest_says_of_its_gpus(compute: dict[str, Any], gibibytes: int | None) -> None:
    assert declared_gpu_memory(job(compute=compute).spec) == (gibibytes and gibibytes * GIB)


@pytest.mark.parametrize(
    ("product", "gibibytes"),
    [
        ("NVIDIA-A100-SXM4-40GB", 40),
        ("Tesla-V100-SXM2-16GB", 16),
        ("NVIDIA-H200", 140),
        ("NVIDIA-H200-NVL", 140),
        ("NVIDIA-H100-NVL", 93.5),
        ("NVIDIA-H100-PCIe", 79.5),
        ("NVIDIA-A100-PCIE-40GB", 40),
        ("NVIDIA-GH200-480GB", 95),
        ("NVIDIA-GH200-144G-HBM3e", 140),
        ("NVIDIA-L40S", 45),
        ("Tesla-T4", 15),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", 5),
        ("NVIDIA-H100-80GB-HBM3-SHARED", None),
        ("NVIDIA-GB200-something", None),
        ("", None),
    ],
)
def test_what_a_product_label_says(product: str, gibibytes: float | None) -> None:
    assert product_memory(product) == (gibibytes and gibibytes * GIB)


def test_a_limit_of_lengths_alone_refuses_nothing() -> None:
    def unpacked(length: int, gpus: int) -> Fit:
        data = {"train": [{"uri": "hf://a/b"}], "maxLength": length, "packing": "none"}
        given = {"gpusPerNode": gpus, "gpuMemory": "80Gi"}
        training = {"microBatchSize": 8, "compile": False}
        return verdict(job(model=EIGHT_BILLION, compute=given, data=data, training=training).spec)

    assert unpacked(4096, 8).refused == ""
    assert "it may not fit: 219" in unpacked(4096, 8).warning
    # weights, gradients and moments are there whatever the lengths
    assert "it does not fit" in unpacked(128, 1).refused


def test_a_dummy_run_is_warned_only() -> None:
    asked = spec(gpus=1, training={"dummyRun": {}})

    assert verdict(asked).refused == ""
    assert "it may not fit" in verdict(asked).warning
    often = asked.model_copy(update={"export": asked.export.model_copy(update={"every_steps": 100})})
    for nothing_saved in (asked, often):
        assert staging_warning(nothing_saved, known_shape(EIGHT_BILLION["uri"]), 1) == ""


def test_the_plan_shows_the_parts_and_what_is_not_known() -> None:
    memory = make_plan(spec(gpus=8)).memory
    assert memory is not None
    assert (memory.parameters, memory.optimizer, memory.total) == ("3.7Gi", "7.5Gi", total(spec(gpus=8)))
    assert (memory.gpu_memory, memory.host_staging, memory.unknown) == ("80.0Gi", "89.7Gi", "")
    own = make_plan(job(model={"uri": "s3://models/own"}, compute={"gpusPerNode": 1}).spec).memory
    assert own is not None
    assert own.total is None
    assert "the shape of s3://models/own" in own.unknown
    assert "give compute.gpuMemory" in own.unknown
    counted = make_plan(job(model={"uri": "s3://m/o", "parameters": "8B"}, compute={"gpusPerNode": 1}).spec).memory
    assert counted is not None
    assert (counted.activations, counted.total) == (None, "119.8Gi")
    assert "activations" in counted.unknown


def test_a_host_that_does_not_hold_a_save_is_warned_of() -> None:
    shape = known_shape(EIGHT_BILLION["uri"])

    assert "98.7Gi of the memory of each node with its uploads," in staging_warning(spec(), shape, 64 * GIB)
    assert staging_warning(spec(), shape, 100 * GIB) == ""
    assert staging_warning(spec(), shape, None) == ""
    assert staging_warning(spec(checkpoint={"async": False}), shape, GIB) == ""
    assert staging_warning(spec(lora={"rank": 8}), shape, GIB) == ""


def test_a_host_that_does_not_hold_an_export_beside_training_is_warned_of() -> None:
    shape = known_shape(EIGHT_BILLION["uri"])
    often: dict[str, Any] = {"export": {"everySteps": 100}}

    saved = staging_warning(spec(checkpoint={"everySteps": 100}, **often), shape, 100 * GIB)
    assert (
        "98.7Gi of the memory of each node with its uploads beside 2.0Gi of an export (export.everySteps), and" in saved
    )
    at_once = staging_warning(spec(checkpoint={"everySteps": 100, "async": False}, **often), shape, GIB)
    assert at_once.startswith("an export beside training (export.everySteps) takes 2.0Gi of the memory of a node")


def test_a_pod_that_does_not_hold_what_is_offloaded_is_warned_of() -> None:
    shape = known_shape(EIGHT_BILLION["uri"])
    offload = spec(strategy={"fsdp": {"cpuOffload": True}})
    held = "cpuOffload holds 119.7Gi in the memory of each node, and its pod asks for 64.0Gi"
    assert held in staging_warning(offload, shape, 64 * GIB)
    assert "takes 98.7Gi of the memory of each node with its uploads beside 119.7Gi" in staging_warning(
        offload, shape, 200 * GIB
    )
    assert staging_warning(offload, shape, 220 * GIB) == ""


NODES = {"nodes": 8, "gpusPerNode": 8, "gpuMemory": "80Gi"}


def degree(length: int = 4096, model: dict[str, Any] | None = None, compute: dict[str, Any] | None = None) -> int:
    return make_plan(spec(8, model, length, compute={**NODES, **(compute or {})})).shard_degree


def test_a_model_is_sharded_within_a_node_where_a_copy_of_it_fits_there() -> None:
    assert degree() == 8
    # It takes more than 90% of a GPU, or it is not known whether it does: over all
    assert degree(length=16384) == 64
    assert degree(model={"uri": "hf://meta-llama/Llama-3.1-70B"}) == 64
    assert degree(model={"uri": "s3://models/own", "parameters": "8B"}) == 64
    # One process a node has a copy of its own
    assert degree(model={"uri": "hf://Qwen/Qwen3-0.6B"}, compute={"nodes": 4, "gpusPerNode": 1}) == 1


def test_whole_gradients_that_are_asked_for_are_counted_where_a_copy_is_to_fit_a_node() -> None:
    # Given a model of which each node has room for a copy, but not for the gradients of the whole model beside it
    def asked(**fsdp: Any) -> SFTJobSpec:
        training = {"activationCheckpointing": "full", "globalBatchTokens": 4096 * 128}
        model, compute = {"uri": "hf://Qwen/Qwen3-14B"}, {"nodes": 4}
        return spec(8, model, 4096, training=training, compute=compute, strategy={"fsdp": fsdp})

    assert make_plan(asked()).shard_degree == 8
    within = asked(reduceGradients="oncePerStep", shardDegree=8)
    assert "it does not fit" in verdict(within).refused

    # Then it is sharded over all of them where these are asked for, and fits
    once = asked(reduceGradients="oncePerStep")
    assert make_plan(once).shard_degree == 32
    assert verdict(once) == Fit()


def test_what_is_asked_for_and_what_nobody_knows_is_sharded_as_before() -> None:
    given = spec(8, length=4096, compute=NODES, strategy={"fsdp": {"shardDegree": 32}})
    assert make_plan(given).shard_degree == 32
    unknown = job(model=EIGHT_BILLION, compute={"nodes": 8, "gpusPerNode": 8}).spec
    assert make_plan(unknown).shard_degree == 64
    assert make_plan(unknown, gpu_memory=80 * GIB).shard_degree == 8
    offloaded = spec(8, length=4096, compute=NODES, strategy={"fsdp": {"cpuOffload": True}})
    assert make_plan(offloaded).shard_degree == 64
    # Fewer processes than the nodes have, as with sft run
    assert make_plan(spec(8, length=4096, compute=NODES), processes=4).shard_degree == 4
    # What only one machine knows of a model changes no plan
    own = spec(8, {"uri": "file:///models/own"}, 4096, compute=NODES)
    assert make_plan(own, shape=known_shape(EIGHT_BILLION["uri"])).shard_degree == 64
