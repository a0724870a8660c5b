"""Layers that go through tokens in order, of any type: documents together as transformers computes each alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from sft_api.operator_memory import CONVOLUTION_COPIES
from sft_api.sequence_parallel import IN_ORDER, LINEAR_ATTENTION, MAMBA_2, SHORT_CONVOLUTIONS
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import ConfigError, ModelError
from sft_trainer.models import convolution
from sft_trainer.models.attention import Boundaries
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.convolution import convolution_operator, convolved
from sft_trainer.models.exchange import check_heads
from sft_trainer.models.lora import adapted_layers, add_adapters, linear_layers
from sft_trainer.models.tracking import LiveBytes
from sft_trainer.optim import build_optimizer
from tests.architectures import small_config
from tests.exports import export, exported
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.exporting import checkpoint, goes_on_alike
from tests.unit.trainer.test_gated_delta import gradients
from tests.unit.trainer.test_models import build, save_model

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("lengths", [[1], [2], [3, 1, 1, 2, 9], [4, 4], [30]])
@pytest.mark.parametrize(("width", "biased"), [(1, False), (4, False), (7, True)])
def test_the_convolution_is_that_of_transformers_of_each_document(lengths: list[int], width: int, biased: bool) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

    torch.manual_seed(0)
    tokens = torch.randn(1, sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True) if biased else None
    gradient = torch.randn(1, sum(lengths), 6, dtype=torch.float64)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = [tokens, weight, *([] if bias is None else [bias])]

    found = gradients(convolution_operator(tokens, weight, bias, ends), inputs, gradient)

    alone = [causal_conv1d_fn(each.mT, weight, bias).mT for each in tokens.split(lengths, dim=1)]
    wanted = gradients(torch.cat(alone, dim=1), inputs, gradient)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_is_what_a_compiler_is_told_of_it(biased: bool) -> None:
    # Rows of channels, as transformers has them
    tokens, bias = torch.randn(1, 6, 15).mT.requires_grad_(), torch.randn(6, requires_grad=True) if biased else None
    ends = torch.tensor([0, 5, 14, 15], dtype=torch.int32)
    torch.library.opcheck(convolution_operator, (tokens, torch.randn(6, 4, requires_grad=True), bias, ends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_backward_pass_of_the_convolution_holds_is_what_is_said(dtype: torch.dtype) -> None:
    tokens, weight, live = torch.randn(1, 300, 512, dtype=dtype), torch.randn(512, 7, dtype=dtype), LiveBytes()
    for given in (tokens, weight):
        live.add(given)
    with live.watching(), torch.no_grad():
        before = live.reset()
        convolution._convolve_backward(tokens, tokens, weight, torch.tensor([0, 100, 300], dtype=torch.int32))
    held = live.most - before
    # Filters, and which tokens are of one document, are next to nothing.
    assert 0.98 * held <= CONVOLUTION_COPIES * tokens.numel() * 4 <= 1.4 * held


def test_shared_tokens_are_refused() -> None:
    rows = torch.zeros(1, 6, 3)
    with pytest.raises(ModelError, match="short convolution of tokens that processes share is not supported"):
        convolved(rows, torch.zeros(6, 4), cu_seq_lens_q=torch.tensor([0, 3]), shared_tokens=object())


TOGETHER = (70, 3, 64, 1, 130, 9)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", IN_ORDER)
def test_documents_of_several_chunks_train_as_those_of_transformers(tmp_path: Path, kind: str, how: str) -> None:
    # Given a model, and documents that end within chunks and beside them
    reference = save_model(kind, tmp_path)
    trained = build(tmp_path, activationCheckpointing=how)
    ids = torch.randint(3, 128, (sum(TOGETHER),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in TOGETHER])
    targets = (positions.roll(-1) != 0).nonzero()[:, 0]

    # When it is trained on all at once, and transformers on each
    loss, _ = trained.model(ids, positions, Boundaries.of(TOGETHER), targets, ids[targets + 1], 1.0)
    loss.backward()
    trained.grad_norm()
    expected = torch.stack(
        [
            cross_entropy(reference(input_ids=each[None]).logits[0, :-1], each[1:], reduction="sum")
            for each in ids.split(TOGETHER)
        ]
    ).sum()
    expected.backward()

    # Then nothing but rounding differs, in the numbers of these layers too
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    found = {name: gathered(each.grad) for name, each in trained.model.huggingface.named_parameters()}
    for leaf in OWN[kind]:
        assert any(name.endswith(leaf) for name in found)
    wanted = {name: each.grad for name, each in reference.named_parameters() if each.requires_grad}
    whole = torch.nn.utils.get_total_norm(wanted.values())
    for name, gradient in wanted.items():
        # Of a head that forgets at once, what its decay gets is what rounding leaves of sums that cancel.
        assert (found[name] - gradient).norm() <= 5e-6 * gradient.norm() + 1e-8 * whole, name


OWN = {
    **dict.fromkeys(LINEAR_ATTENTION, ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.conv1d.weight")),
    **dict.fromkeys(SHORT_CONVOLUTIONS, ("conv.conv.weight",)),
    **dict.fromkeys(MAMBA_2, (".A_log", ".dt_bias", ".D", ".conv1d.weight", ".conv1d.bias")),
}
"""Parameters that only layers of these have, by type."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lfm2", {"conv_bias": True, "conv_L_cache": 4}),
        ("granitemoehybrid", {"num_local_experts": 0, "mamba_proj_bias": True, "position_embedding_type": "nope"}),
        ("bamba", {"mamba_conv_bias": False, "time_step_limit": (0.5, 0.9)}),
        ("nemotron_h", {"moe_latent_size": 16, "use_bias": True, "n_group": 2, "routed_scaling_factor": 2.5}),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
        # As it is published: without positions.
        ("olmo_hybrid", {"rope_parameters": None, "rope_theta": None, "linear_value_head_dim": 16}),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    ],
)
def test_so_do_others_than_usual(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    reference = save_model(kind, tmp_path, **options)
    trained = build(tmp_path)
    ids = torch.arange(3, 20)
    positions, targets = torch.cat([torch.arange(5), torch.arange(12)]), torch.tensor([0, 1, 2, 3, 5, 8, 15])
    loss, _ = trained.model(ids, positions, Boundaries.of((5, 12)), targets, ids[targets + 1], 1.0)
    loss.backward()
    logits = torch.cat([reference(input_ids=each[None]).logits[0] for each in ids.split((5, 12))])
    expected = cross_entropy(logits[targets], ids[targets + 1], reduction="sum")
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    wanted = {name: each.grad for name, each in reference.named_parameters() if each.requires_grad}
    whole = torch.nn.utils.get_total_norm(wanted.values())
    for name, each in wanted.items():
        gradient = gathered(trained.model.huggingface.get_parameter(name).grad)
        assert (gradient - each).norm() <= 5e-6 * each.norm() + 1e-8 * whole, name


@pytest.mark.parametrize("kind", ["granitemoehybrid", "nemotron_h", "lfm2_moe", "olmo_hybrid"])
def test_a_run_goes_on_from_its_checkpoint_and_transformers_loads_what_is_exported_of_it(
    tmp_path: Path, kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    source, store, out = tmp_path / "model", LocalStore(tmp_path / "store"), tmp_path / "out"
    save_model(kind, source)
    ours, _ = goes_on_alike(source, store)

    export(exported(store, checkpoint(ours, store), source), LocalStore(out))

    again = dict(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).named_parameters())
    for name, value in ours.model.huggingface.named_parameters():
        assert torch.equal(gathered(value), again[name]), name


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "bamba"])
def test_documents_of_no_run_are_computed_as_transformers_does(tmp_path: Path, kind: str) -> None:
    # Given a model of a type that this process trains
    reference = save_model(kind, tmp_path)
    ids = torch.arange(3, 12)[None]
    before = reference(input_ids=ids).logits
    build_on_meta(tmp_path)

    # Then one of its class that is told of no documents is as it was, and may have a cache
    assert torch.equal(reference(input_ids=ids).logits, before)
    generated = reference.generate(ids, max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 12)


_OF_QWEN = {f"linear_attn.{name}.weight": True for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")} | {
    "linear_attn.A_log": False,
    "linear_attn.dt_bias": False,
    "linear_attn.norm.weight": False,
    "linear_attn.conv1d.weight": True,
    "linear_attn.out_proj.weight": True,
}
DECAYED = {
    "qwen3_5_text": _OF_QWEN,
    "olmo_hybrid": {f"linear_attn.{name}_proj.weight": True for name in "abgkoqv"}
    | {f"linear_attn.{name}": False for name in ("A_log", "dt_bias", "o_norm.weight")}
    | {"linear_attn.conv1d.weight": True},
    "lfm2": {"conv.in_proj.weight": True, "conv.conv.weight": True, "conv.out_proj.weight": True},
    "granitemoehybrid": {f"mamba.{name}.weight": True for name in ("in_proj", "conv1d", "out_proj")}
    | {f"mamba.{name}": False for name in ("A_log", "D", "dt_bias", "conv1d.bias", "norm.weight")},
}
"""Parameters of a layer of these, and whether they have weight decay."""


@pytest.mark.parametrize("kind", DECAYED)
def test_weight_decay_is_that_of_matrices_and_filters(tmp_path: Path, kind: str) -> None:
    save_model(kind, tmp_path)
    model: Any = build_on_meta(tmp_path).huggingface
    spec = resolve(manifest(tmp_path, tmp_path)).spec
    named = dict(model.named_parameters())

    decayed = {id(each) for each in build_optimizer(named.items(), spec, 1e-3).param_groups[0]["params"]}

    expected = DECAYED[kind]
    within = next(iter(expected)).split(".")[0]
    layer = f"model.layers.0.{within}."
    assert expected == {
        f"{within}.{name.removeprefix(layer)}": id(each) in decayed
        for name, each in named.items()
        if name.startswith(layer)
    }


@pytest.mark.parametrize(
    ("kind", "projections"),
    [
        (
            "qwen3_5_text",
            [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")],
        ),
        ("qwen3_next", ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"]),
        ("olmo_hybrid", [f"linear_attn.{name}_proj" for name in "abgkoqv"]),
        ("lfm2", ["conv.in_proj", "conv.out_proj"]),
        ("granitemoehybrid", ["mamba.in_proj", "mamba.out_proj"]),
        # peft refuses those of out_proj.
        ("nemotron_h", ["mixer.in_proj"]),
    ],
)
def test_adapters_are_put_beside_all_projections_and_no_filter(
    tmp_path: Path, kind: str, projections: list[str]
) -> None:
    save_model(kind, tmp_path)
    model: Any = build_on_meta(tmp_path).huggingface
    lora = resolve(manifest(tmp_path, tmp_path, lora={"rank": 4})).spec.lora
    assert lora is not None
    wanted = {name for name in linear_layers(model)[0] if name != "lm_head"}

    if kind == "nemotron_h":
        with pytest.raises(ConfigError, match=r"'out_proj', .*; out_proj gets none, as peft would not load it"):
            adapted_layers(model, lora.model_copy(update={"target_modules": ["out_proj"]}))
    assert {*add_adapters(model, lora)} == wanted

    assert {f"model.layers.0.{name}" for name in projections} <= wanted
    assert not any("conv1d" in name or name.endswith("conv.conv") for name in wanted)
    assert ("model.layers.0.mixer.out_proj" in dict(model.named_modules())) == (kind == "nemotron_h")


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("qwen3_5_text", "layers of linear attention"),
        ("lfm2", "layers of short convolutions"),
        ("falcon_h1", "layers of Mamba 2"),
    ],
)
def test_processes_that_share_tokens_are_refused(tmp_path: Path, kind: str, layers: str) -> None:
    save_model(kind, tmp_path)
    config = build_on_meta(tmp_path).huggingface.config
    check_heads(config, 1, 1)
    words = f"sequenceParallelDegree is 2, but a model of type '{kind}' has {layers}.*leave it"
    with pytest.raises(ConfigError, match=words):
        check_heads(config, 2, 2)


def test_a_transformers_that_computes_them_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers.models.lfm2 import modeling_lfm2

    save_model("lfm2", tmp_path)
    monkeypatch.delattr(modeling_lfm2, "causal_conv1d_fn")
    with pytest.raises(ModelError, match=r"'lfm2' is not supported with this version of transformers, .*causal_conv1d"):
        build_on_meta(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("bamba", {"mamba_n_groups": 3}), ("nemotron_h", {"n_groups": 0}), ("granitemoehybrid", {"mamba_n_groups": 8})],
)
def test_heads_that_groups_cannot_share_are_refused(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    small_config(kind, **options).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"4 heads of Mamba 2 in \d groups in its config.json cannot|cannot be trained"
    ):
        build_on_meta(tmp_path)
