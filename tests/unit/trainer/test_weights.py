"""Weights that are missing, damaged or not what the config says are found before anything is trained."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_trainer.errors import ModelError
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.tensors import whole_boxes
from sft_trainer.models.weights import unread_tensors, weights_layout
from sft_trainer.names.rules import RULES
from sft_trainer.preparation import prepare_model
from sft_trainer.reporting import Reporter
from tests.git_lfs import GIT_LFS_POINTER
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.test_models import build, save_mixture, save_model

pytestmark = pytest.mark.usefixtures("process_group")

INDEX = "model.safetensors.index.json"


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], index: dict[str, str] | None = None) -> None:
    """``tensors`` in two files; ``index`` instead of the true one."""
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + 2 * i // len(names)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": index or places}))


def check(folder: Path) -> None:
    model = build_on_meta(folder)
    weights_layout(whole_boxes(model), model.names, folder)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def truncated(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    cut(folder / "model.safetensors")


def truncated_shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(folder, tensors)
    cut(folder / "model-00002-of-00002.safetensors")


def missing_shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(folder, tensors)
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_of_another_model(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(folder, tensors, index=dict.fromkeys(tensors, "model-00001-of-00002.safetensors"))


def index_of_files_elsewhere(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "../secret.safetensors")}))


def index_of_an_absolute_path(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, str(file))}))


def index_that_is_none(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text("<html>")


def index_that_is_nested_too_deeply(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text("[" * 100_000 + "]" * 100_000)


def pointer_of_git_lfs(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").write_text(GIT_LFS_POINTER)


def quantised(folder: Path, tensors: dict[str, torch.Tensor], *, dtype: torch.dtype) -> None:
    small = {name: t.to(dtype) if t.ndim == 2 else t for name, t in tensors.items()}
    save_file(small, folder / "model.safetensors")


def one_tensor_short(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, r"model\.safetensors is not a whole safetensors file"),
        (truncated_shard, r"model-00002-of-00002\.safetensors is not a whole safetensors file"),
        (pointer_of_git_lfs, r"model\.safetensors is a pointer of Git LFS .*: fetch that with git lfs pull"),
        (missing_shard, r"incomplete: .* lacks model-00002-of-00002\.safetensors"),
        (index_of_another_model, "does not hold tensor .* as the index says"),
        (index_of_files_elsewhere, r"names .*secret\.safetensors, which is not in the folder of the model"),
        (index_of_an_absolute_path, r"names .*secret\.safetensors, which is not in the folder of the model"),
        (index_that_is_none, "is not an index of weights"),
        (index_that_is_nested_too_deeply, "is not an index of weights"),
        (partial(quantised, dtype=torch.float8_e4m3fn), "stored as F8_E4M3: no tensor of its scales is beside it"),
        (partial(quantised, dtype=torch.int8), "stored as I8: such weights cannot be trained, give the model in bf16"),
        (one_tensor_short, r"lacks 1 of the \d+ tensors of the model, the first is 'model\.norm\.weight'"),
    ],
)
def test_damage_is_found_in_the_headers(
    tmp_path: Path, damage: Callable[[Path, dict[str, torch.Tensor]], None], words: str
) -> None:
    folder = tmp_path / "model"
    save_model("llama", folder)
    damage(folder, load_file(folder / "model.safetensors"))
    with pytest.raises(ModelError, match=words):
        check(folder)


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    reference = save_model("llama", tmp_path)
    write_shards(tmp_path, load_file(tmp_path / "model.safetensors"))
    check(tmp_path)

    model = build(tmp_path).model

    for name, tensor in reference.state_dict().items():
        assert torch.equal(gathered(model.huggingface.state_dict()[name]), tensor), name


def test_one_file_counts_beside_the_index_of_shards_as_for_transformers(tmp_path: Path) -> None:
    # Given a model in shards
    reference = save_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    write_shards(tmp_path, {name: tensor + 1 for name, tensor in tensors.items()})

    # When it is saved anew there as one file, then that is the model, for both
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = type(reference).from_pretrained(tmp_path).state_dict()
    ours = build(tmp_path).model.huggingface.state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(theirs[name], tensor), name
        assert torch.equal(gathered(ours[name]), tensor), name

    # And so it is when only the index is left of the shards
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    check(tmp_path)


def test_files_of_one_name_in_several_folders_all_count_for_the_digest(tmp_path: Path) -> None:
    # Given weights in two files that have their name from their folders
    save_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    folders = {name: "head" if name == "lm_head.weight" else "body" for name in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {n: f"{f}/model.safetensors" for n, f in folders.items()}}))

    def digest() -> str:
        for folder in ("body", "head"):
            (tmp_path / folder).mkdir(exist_ok=True)
            held = {name: tensor for name, tensor in tensors.items() if folders[name] == folder}
            save_file(held, tmp_path / folder / "model.safetensors")
        return base_digest(build_on_meta(tmp_path), tmp_path)

    # When a tensor of either changes, then it is another model
    found = {digest()}
    for name in ("lm_head.weight", "model.norm.weight"):
        tensors[name] += 1
        found.add(digest())
    assert len(found) == 3


@pytest.mark.parametrize(
    ("dtype", "exported"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float64", torch.float32), (None, torch.float32)],
)
def test_a_model_is_exported_in_the_dtype_it_came_in(tmp_path: Path, dtype: str, exported: torch.dtype) -> None:
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    model = build_on_meta(tmp_path)
    assert model.stored_dtype == exported
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' of the model holds NaN or inf"):
        build(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_tied_weight_that_has_values_of_its_own_is_refused(tmp_path: Path, kind: str) -> None:
    # Given files as safetensors has them: with the tied weight once
    folder = tmp_path / "model"
    reference = save_model(kind, folder, tie_word_embeddings=True)
    document = manifest(tmp_path, tmp_path / "store", data={"maxLength": 16})
    prepare = partial(prepare_model, resolve(document), Reporter(tmp_path, writes=False), torch.device("cpu"))
    prepare()
    tensors = load_file(folder / "model.safetensors")
    first, second = ("gpt_neox.embed_in", "embed_out") if kind == "gpt_neox" else ("model.embed_tokens", "lm_head")

    # When they have it twice, as those that were made of others, then that is as good
    tensors[f"{second}.weight"] = tensors[f"{first}.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    prepare()

    # When the head is another tensor, then transformers ties nothing, and nor may a run
    tensors[f"{second}.weight"][-1, 0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    again = type(reference).from_pretrained(folder)
    assert not torch.equal(again.get_output_embeddings().weight, again.get_input_embeddings().weight)
    with pytest.raises(ModelError, match=rf"says that '{second}\.weight' is '{first}\.weight' \(tie_word_embeddings\)"):
        prepare()


def test_tensors_that_the_config_does_not_know_are_told(tmp_path: Path) -> None:
    # Given files with what old versions wrote beside the weights, which nobody needs
    folder = tmp_path / "model"
    save_model("llama", folder, tie_word_embeddings=True, attention_bias=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    document = manifest(tmp_path, tmp_path / "store", data={"maxLength": 16})
    reporter = Reporter(tmp_path, writes=True)
    prepare = partial(prepare_model, resolve(document), reporter, torch.device("cpu"))
    prepare()
    assert not reporter.progress.warnings

    # When the config says that there are no biases
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    prepare()

    # Then it is told that those in the files are not read
    (warning,) = reporter.progress.warnings
    first = "model.layers.0.self_attn.k_proj.bias"
    assert f"8 are none of a model of its config.json and not read, the first is '{first}'" in warning


@pytest.mark.parametrize("kind", sorted(RULES))
def test_all_tensors_of_an_architecture_are_known(tmp_path: Path, kind: str) -> None:
    save_mixture(kind, tmp_path)
    assert unread_tensors(build_on_meta(tmp_path), tmp_path) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "wide"}, r"config\.json cannot be used: .*hidden_size"),
        ({"num_attention_heads": 0}, r"config\.json cannot be used: ZeroDivisionError"),
        ({"hidden_act": "unheard"}, "cannot be trained: KeyError: 'unheard'"),
        ({"model_type": "unheard"}, r"config\.json cannot be used: .*unheard"),
        (
            {"model_type": "qwen2_5_vl"},
            r"of a model of type 'qwen2_5_vl' the text part would be trained, and that is refused: a model of type "
            r"'qwen2_5_vl_text' is not supported",
        ),
    ],
)
def test_configs_that_make_no_model_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=words):
        build_on_meta(tmp_path)
