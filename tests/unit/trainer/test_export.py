"""The exported folder: the bytes of the live model, from its checkpoint alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from sft_api.checkpoints import decode_manifest
from sft_trainer.checkpoint import pieces
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import ConfigError
from sft_trainer.export import values
from sft_trainer.export.plan import Plan, plan_adapter, plan_export
from sft_trainer.models.causal_lm import CausalLM, build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.tensors import whole_boxes
from sft_trainer.models.weights import load_weights
from tests.exports import content, export, export_live, exported, model_in, save
from tests.unit.checkpoint.boxed import whole
from tests.unit.trainer.exporting import SMALL, checkpoint, make_model, trained
from tests.unit.trainer.test_names_and_files import EXPERTS, empty
from tests.unit.trainer.test_names_and_files import save as save_random

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("block", [2**27, 3000], ids=["large blocks", "small blocks"])
@pytest.mark.parametrize("file_bytes", [2**40, SMALL], ids=["one file", "many files"])
@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("qwen3", "bfloat16", {"tie_word_embeddings": True}),
        ("llama", "float32", {}),
        ("phi3", "float16", {}),
    ],
    ids=["tied, bf16", "fp32", "fused, fp16"],
)
def test_an_export_has_the_bytes_of_the_live_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, options: Any, file_bytes: int, block: int
) -> None:
    # Given a trained model, what it would be written as, and its checkpoint
    source = make_model(tmp_path / "model", kind, dtype, **options)
    strategy, store = trained(source), LocalStore(tmp_path / "store")
    export_live(strategy.model, tmp_path / "live", source, file_bytes=file_bytes)
    manifest = checkpoint(strategy, store)
    monkeypatch.setattr(values, "BLOCK_BYTES", block)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", block)

    # When it is exported, where neither the live model is nor the weights that the run started from
    (source / "model.safetensors").unlink()
    export(exported(store, manifest, source), LocalStore(tmp_path / "out"), file_bytes=file_bytes)

    # Then every file is the same, and there is no other
    assert model_in(tmp_path / "out") == content(tmp_path / "live")
    files = len(list((tmp_path / "out").glob("*.safetensors")))
    assert files == 1 if file_bytes > SMALL else files > 3


def test_weights_that_are_held_in_bf16_are_exported_to_the_last_bit(tmp_path: Path, source: Path) -> None:
    # Given a model that came in bf16, and is trained in it
    strategy, store = trained(source, precision="bf16", parameterDtype="bf16"), LocalStore(tmp_path / "store")

    export(exported(store, checkpoint(strategy, store), source), LocalStore(tmp_path / "out"))

    found = load_file(tmp_path / "out" / "model.safetensors")
    held = {box.name: box.read() for box in strategy.boxes("trained")}
    assert {value.dtype for value in held.values()} == {torch.bfloat16}
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name], value) for name, value in held.items())


def test_buffers_are_exported_in_their_own_dtype(tmp_path: Path, source: Path) -> None:
    # Given a model with buffers: two that belong to it, such as the correction of a router, and one that is computed
    strategy, store = trained(source), LocalStore(tmp_path / "store")
    correction = torch.tensor([0.1, 1 / 3])
    layer = strategy.model.huggingface.model.layers[1]
    layer.register_buffer("correction_bias", correction)
    layer.register_buffer("seen", torch.tensor([2**40]))
    layer.register_buffer("computed", torch.ones(1), persistent=False)
    export_live(strategy.model, tmp_path / "live", source)

    # When its checkpoint is exported
    export(exported(store, checkpoint(strategy, store), source, strategy.model), LocalStore(tmp_path / "out"))

    # Then those that belong to it are there, unrounded
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["model.layers.1.correction_bias"], correction)
    assert found["model.layers.1.seen"].tolist() == [2**40]
    assert "model.layers.1.computed" not in found
    assert found["model.norm.weight"].dtype == torch.bfloat16
    assert model_in(tmp_path / "out") == content(tmp_path / "live")


def test_a_checkpoint_of_format_1_is_exported(tmp_path: Path) -> None:
    # Given a checkpoint that was written before there was an index, and the model's config
    here = Path(__file__).parents[1] / "checkpoint" / "format_1"
    shutil.copytree(here, tmp_path / "store")
    store = LocalStore(tmp_path / "store")
    (key,) = (entry.key for entry in store.list("checkpoints/") if entry.key.endswith("manifest.json"))
    document = json.loads(store.read(key))
    shapes = {name: tensor["shape"] for name, tensor in document["tensors"].items()}
    source = make_model(tmp_path / "model", **_config_of(shapes))

    export(exported(store, decode_manifest(store.read(key)), source), LocalStore(tmp_path / "out"))

    found = load_file(tmp_path / "out" / "model.safetensors")
    # Which had a tied weight under both of its names
    written = {name.removeprefix("model.huggingface.") for name in shapes if name.startswith("model.")}
    assert {*found, "lm_head.weight"} == written
    name = "model.layers.0.mlp.gate_proj.weight"
    items = document["tensors"][f"model.huggingface.{name}"]["items"]
    folder = tmp_path / "store" / key.rpartition("/")[0]
    raw = b"".join((folder / item["file"]).read_bytes()[item["offset"] :][: item["length"]] for item in items)
    expected = torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(shapes[f"model.huggingface.{name}"])
    assert torch.equal(found[name], expected.bfloat16())


def _config_of(shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Of the Qwen3 whose modules have ``shapes``."""
    stem = "model.huggingface.model."
    vocabulary, hidden = shapes[f"{stem}embed_tokens.weight"]
    head = shapes[f"{stem}layers.0.self_attn.q_norm.weight"][0]
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": shapes[f"{stem}layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": len([name for name in shapes if name.startswith(stem) and "q_norm" in name]),
        "num_attention_heads": shapes[f"{stem}layers.0.self_attn.q_proj.weight"][0] // head,
        "num_key_value_heads": shapes[f"{stem}layers.0.self_attn.k_proj.weight"][0] // head,
        "head_dim": head,
        "tie_word_embeddings": True,
    }


def loaded(folder: Path) -> CausalLM:
    """The model in ``folder``."""
    model = empty(folder)
    load_weights(whole_boxes(model), model.names, folder)
    return model


def read(plan: Plan, filled: values.Values) -> dict[str, torch.Tensor]:
    """The tensors of the files of ``plan``, in fp32, as they would be written."""
    filled.check(plan)
    found = {}
    for file in plan.files:
        raw = b"".join(tensor.numpy().tobytes() for tensor in filled.of(file, lambda count: None))
        position = 0
        for entry in file.entries:
            part = bytearray(raw[position : position + entry.nbytes])
            found[entry.name] = torch.frombuffer(part, dtype=torch.float32).reshape(entry.shape)
            position += entry.nbytes
        assert (position, file.size) == (len(raw), len(file.header) + len(raw))
        assert safetensors.torch.load(file.header + raw).keys() == {entry.name for entry in file.entries}
    return found


@pytest.mark.parametrize(("kind", "experts"), [("qwen3_moe", 2 * 3), ("mixtral", 2 * 3), ("gpt_neox", 0)])
@pytest.mark.parametrize("file_bytes", [2**40, 700], ids=["one file", "experts apart"])
def test_tensors_have_the_names_of_the_hub(
    tmp_path: Path, kind: str, experts: int, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the checkpoint of a model whose modules have other names, with experts that are one tensor there, and blocks
    # that hold a few of them
    save_random(kind, tmp_path / "model", **(EXPERTS if experts else {}))
    hub = load_file(tmp_path / "model" / "model.safetensors")
    model = loaded(tmp_path / "model")
    names, store = model.names, LocalStore(tmp_path / "store")
    manifest = save(whole_boxes(model), store)
    monkeypatch.setattr(values, "BLOCK_BYTES", 300)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 300)

    # When the files are planned and filled
    plan = plan_export(model, torch.float32, file_bytes)
    filled = values.Values(store, manifest, names, base=lambda: pytest.fail("nothing is lacking"))

    # Then all tensors of the hub are there, with their values
    found = read(plan, filled)
    assert found.keys() == hub.keys()
    for name, tensor in hub.items():
        assert torch.equal(found[name], tensor), name
    if file_bytes > SMALL:
        stacked = [part for part in plan.files[0].parts if ".experts." in part.name]
        assert len(stacked) == experts, "of two layers three stacked tensors, each read as one"


@pytest.mark.parametrize(
    ("kind", "options", "module"),
    [
        *((kind, EXPERTS, ".experts.") for kind in ("qwen3_moe", "mixtral", "gpt_oss")),
        ("olmo_hybrid", {"linear_key_head_dim": 6, "linear_value_head_dim": 4}, ".conv1d."),
    ],
)
def test_what_is_trained_beside_adapters_has_the_shape_of_its_module(
    tmp_path: Path, kind: str, options: dict[str, Any], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a checkpoint, which has it by projection, and blocks that hold a few of them
    save_random(kind, tmp_path / "model", **options)
    model = loaded(tmp_path / "model")
    store = LocalStore(tmp_path / "store")
    manifest = save(whole_boxes(model), store)
    monkeypatch.setattr(values, "BLOCK_BYTES", 300)

    # When they are written for peft, which loads into modules
    plan = plan_adapter(model, lambda name: module in name)
    found = read(plan, values.Values(store, manifest, model.names, base=lambda: pytest.fail("nothing is lacking")))

    trained = {name: value for name, value in model.huggingface.named_parameters() if module in name}
    assert found.keys() == {f"base_model.model.{name}" for name in trained}
    for name, value in trained.items():
        assert torch.equal(found[f"base_model.model.{name}"], value), name


def test_no_piece_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a tensor that four ranks wrote, in pieces that a block does not divide
    tensor = torch.randn(40, 8)
    store = LocalStore(tmp_path / "store")
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 7 * 8 * 4)
    manifest = save(whole({"a": tensor}), store)
    monkeypatch.setattr(values, "BLOCK_BYTES", 16 * 8 * 4)
    index, _ = values.open_index(store, manifest)
    number = index.numbers["a", "weight"]

    cut = list(values._cut(whole({"a": tensor})[0].place, 4, values._row_ends(index, number)))

    # Then blocks end where pieces end
    assert [(place.offsets[0], place.sizes[0]) for place in cut] == [(0, 7), (7, 7), (14, 7), (21, 7), (28, 7), (35, 5)]


def part_trained(source: Path) -> tuple[Any, list[Any]]:
    """A model of which only the projections of queries are trained and saved, and the boxes of those."""
    strategy = trained(source)
    for box in strategy.boxes("trained"):
        if "q_proj" not in box.name:
            box.write(torch.zeros(box.shape))  # whatever it is, it is not saved
    return strategy, [box for box in strategy.boxes("trained") if "q_proj" in box.name]


def test_what_a_checkpoint_lacks_comes_from_the_model_that_it_was_trained_on(tmp_path: Path, source: Path) -> None:
    # Given a checkpoint of the projections that were trained, which names its base
    store = LocalStore(tmp_path / "store")
    _, boxes = part_trained(source)
    digest = base_digest(build_on_meta(source), source)
    manifest = save(boxes, store, base_digest=digest)

    export(exported(store, manifest, source), LocalStore(tmp_path / "out"), file_bytes=SMALL)

    base, found = load_file(source / "model.safetensors"), {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    saved = {box.name: box.read() for box in boxes}
    assert found.keys() == base.keys()
    assert len(saved) == 2
    for name, tensor in base.items():
        assert torch.equal(found[name], saved.get(name, tensor).bfloat16()), name


@pytest.mark.parametrize("recorded", ["", "0" * 64])
def test_what_a_checkpoint_lacks_is_taken_from_no_other_model(tmp_path: Path, source: Path, recorded: str) -> None:
    store = LocalStore(tmp_path / "store")
    manifest = save(part_trained(source)[1], store, base_digest=recorded)
    with pytest.raises(ConfigError, match=r"lacks \d+ tensors, the first is .*; name that model, pinned to a commit"):
        export(exported(store, manifest, source), LocalStore(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_digest_of_a_base_sees_each_tensor(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model into which adapters of some layers were merged is another one."""
    # A file of which samples at even distances are as small a part as of a large model's.
    monkeypatch.setattr("sft_trainer.models.digest._SAMPLE_BYTES", 16)
    weights = source / "model.safetensors"
    tensors, found = load_file(weights), {base_digest(build_on_meta(source), source)}
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, weights, {"format": "pt"})
        found.add(base_digest(build_on_meta(source), source))
    assert len(found) == 1 + len(tensors)


def test_the_digest_of_a_base_is_that_of_its_config_layout_and_bytes(tmp_path: Path, source: Path) -> None:
    before = base_digest(build_on_meta(source), source)
    assert base_digest(build_on_meta(source), shutil.copytree(source, tmp_path / "copy")) == before
    weights = source / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert base_digest(build_on_meta(source), source) != before
