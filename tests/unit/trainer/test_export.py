"""The exported folder: the bytes of the live model, from its checkpoint alone; the weights of two steps never mix."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft_api.checkpoints import Manifest, decode_manifest
from sft_trainer.checkpoint import pieces
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.store import StoredObject, WriteStream
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageFullError, StorageUnavailableError
from sft_trainer.export import values
from sft_trainer.export.companions import companions, model_card
from sft_trainer.export.exporting import MARK
from sft_trainer.export.plan import plan_export
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.weights import load_weights
from sft_trainer.sharded import model_boxes
from tests.exports import CARD, content, export, export_live, exported, save
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.parity.runs import manifest as job
from tests.parity.runs import resolve
from tests.unit.checkpoint.boxed import whole
from tests.unit.trainer.test_models import build, process_group, save_model  # noqa: F401 - a fixture
from tests.unit.trainer.test_names_and_files import EXPERTS, empty
from tests.unit.trainer.test_names_and_files import save as save_random

SMALL = 8_000
"""Bytes of a file, so that the model has several."""


def make_model(folder: Path, kind: str = "qwen3", dtype: str = "bfloat16", **options: Any) -> Path:
    """A model to start from, that says of itself that it has ``dtype``."""
    save_model(kind, folder, **options)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", tie_word_embeddings=True)


def trained(folder: Path, seed: int = 7) -> Any:
    """The strategy of a run on the model in ``folder``, whose weights have become others."""
    strategy = build(folder)
    generator = torch.Generator().manual_seed(seed)
    for box in strategy.boxes("trained"):
        box.write(box.read() + torch.randn(box.shape, generator=generator) * 0.01)
    return strategy


def checkpoint(strategy: Any, store: LocalStore, step: int = 6, **run: Any) -> Manifest:
    return save(strategy.boxes("trained") + strategy.boxes("optimizer"), store, step, **run)


@pytest.fixture
def steps(folder: Path, tmp_path: Path) -> tuple[LocalStore, list[Manifest]]:
    """Checkpoints of two steps of one run; their weights differ in every number."""
    store = LocalStore(tmp_path / "store")
    return store, [checkpoint(trained(folder, step), store, step) for step in (2, 4)]


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
    assert content(tmp_path / "out") == content(tmp_path / "live")
    files = len(list((tmp_path / "out").glob("*.safetensors")))
    assert files == 1 if file_bytes > SMALL else files > 3


def test_buffers_are_exported_in_their_own_dtype(tmp_path: Path, folder: Path) -> None:
    # Given a model with buffers: two that belong to it, such as the correction of a router, and one that is computed
    strategy, store = trained(folder), LocalStore(tmp_path / "store")
    correction = torch.tensor([0.1, 1 / 3])
    layer = strategy.model.huggingface.model.layers[1]
    layer.register_buffer("correction_bias", correction)
    layer.register_buffer("seen", torch.tensor([2**40]))
    layer.register_buffer("computed", torch.ones(1), persistent=False)
    export_live(strategy.model, tmp_path / "live", folder)

    # When its checkpoint is exported
    export(exported(store, checkpoint(strategy, store), folder, strategy.model), LocalStore(tmp_path / "out"))

    # Then those that belong to it are there, unrounded
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["model.layers.1.correction_bias"], correction)
    assert found["model.layers.1.seen"].tolist() == [2**40]
    assert "model.layers.1.computed" not in found
    assert found["model.norm.weight"].dtype == torch.bfloat16
    assert content(tmp_path / "out") == content(tmp_path / "live")


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


@pytest.mark.parametrize(("kind", "experts"), [("qwen3_moe", 2 * 3), ("mixtral", 2 * 3), ("gpt_neox", 0)])
@pytest.mark.parametrize("file_bytes", [2**40, 700], ids=["one file", "experts apart"])
def test_tensors_have_the_names_of_the_hub(
    tmp_path: Path, kind: str, experts: int, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the checkpoint of a model whose modules have other names, with experts that are one tensor there, and blocks
    # that hold a few of them
    save_random(kind, tmp_path / "model", **(EXPERTS if experts else {}))
    hub = load_file(tmp_path / "model" / "model.safetensors")
    model = empty(tmp_path / "model")
    names, store = model.names, LocalStore(tmp_path / "store")
    load_weights(model_boxes(model, names), names, tmp_path / "model")
    manifest = save(model_boxes(model, names), store)
    monkeypatch.setattr(values, "BLOCK_BYTES", 300)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 300)

    # When the files are planned and filled
    plan = plan_export(model, torch.float32, file_bytes)
    filled = values.Values(store, manifest, names, base=lambda: pytest.fail("nothing is lacking"))
    filled.check(plan)

    # Then all tensors of the hub are there, with their values
    found = {}
    for file in plan.files:
        raw = b"".join(tensor.numpy().tobytes() for tensor in filled.of(file, lambda count: None))
        position = 0
        for entry in file.entries:
            part = bytearray(raw[position : position + entry.nbytes])
            found[entry.name] = torch.frombuffer(part, dtype=torch.float32).reshape(entry.shape)
            position += entry.nbytes
        assert (position, file.size) == (len(raw), len(file.header) + len(raw))
    assert found.keys() == hub.keys()
    for name, tensor in hub.items():
        assert torch.equal(found[name], tensor), name
    if file_bytes > SMALL:
        stacked = [part for part in plan.files[0].parts if ".experts." in part.name]
        assert len(stacked) == experts, "of two layers three stacked tensors, each read as one"


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


class Watched(LocalStore):
    """Tells what is written and removed, and does something before a file appears."""

    def __init__(self, path: Path, before: Callable[[str], None] = lambda key: None) -> None:
        super().__init__(path)
        self.told: list[str] = []
        self.before = before

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        self.before(key)
        self.told.append(key)
        return super().open_write(key, size_hint)

    def delete(self, keys: Any) -> None:
        keys = list(keys)
        self.told += [f"-{key}" for key in keys]
        super().delete(keys)


def full_at(name: str) -> Callable[[str], None]:
    def before(key: str) -> None:
        if name in key:
            raise StorageFullError(f"no room for {key}")

    return before


def test_what_was_finished_is_not_written_again(tmp_path: Path, folder: Path, steps: Any) -> None:
    # Given an export that ended in the middle
    store, (_, manifest) = steps
    what = exported(store, manifest, folder)
    export(what, LocalStore(tmp_path / "undisturbed"), file_bytes=SMALL)
    with pytest.raises(StorageFullError):
        export(what, Watched(tmp_path / "out", full_at("model-00003")), file_bytes=SMALL)
    assert not (tmp_path / "out" / "config.json").exists()
    assert (tmp_path / "out" / MARK).exists()

    # When it is tried again, by another process
    target = Watched(tmp_path / "out")
    export(exported(store, manifest, folder), target, file_bytes=SMALL)

    # Then only what was missing is written, and the folder is that of an export in one go
    written = [key for key in target.told if key.endswith(".safetensors")]
    assert written[0].startswith("model-00003")
    assert not any(key.startswith(("model-00001", "model-00002")) for key in target.told)
    assert target.told[-2:] == ["config.json", f"-{MARK}"]
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "complete"])
def test_the_weights_of_two_steps_never_lie_beside_a_config(
    tmp_path: Path, folder: Path, steps: Any, begun: bool
) -> None:
    # Given the export of an earlier step with more files, complete or ended in the middle
    store, (earlier, later) = steps
    export(exported(store, later, folder), LocalStore(tmp_path / "undisturbed"), file_bytes=SMALL)
    before = full_at("model-00004") if begun else lambda key: None
    try:
        export(exported(store, earlier, folder), Watched(tmp_path / "out", before), file_bytes=SMALL // 2)
    except StorageFullError:
        assert begun
    assert (tmp_path / "out" / "config.json").exists() != begun
    (tmp_path / "out" / "notes.txt").write_text("mine")

    # When another step is exported there
    seen: list[bool] = []
    target = Watched(
        tmp_path / "out", lambda key: seen.append("safetensors" in key and (target.path / "config.json").exists())
    )
    export(exported(store, later, folder), target, file_bytes=SMALL)

    # Then the config went before the first file came, and nothing of the earlier step is left
    assert target.told[0] == "-config.json"
    assert len(seen) > 3
    assert not any(seen)
    left = content(tmp_path / "out")
    assert left.pop("notes.txt") == b"mine"
    assert left == content(tmp_path / "undisturbed")


def test_two_exports_to_one_place_do_not_mix(tmp_path: Path, folder: Path, steps: Any) -> None:
    # Given an export, while which another one begins in the same place
    store, (one, other) = steps

    def another_begins(key: str) -> None:
        if key.startswith("model-00002"):
            with pytest.raises(StorageFullError):
                export(
                    exported(store, other, folder), Watched(tmp_path / "out", full_at("model-00001")), file_bytes=SMALL
                )

    target = Watched(tmp_path / "out", another_begins)
    with pytest.raises(StorageUnavailableError, match=r"out: another export was begun or ended there meanwhile"):
        export(exported(store, one, folder), target, file_bytes=SMALL)

    assert sorted(content(tmp_path / "out")) == [MARK], "the file that was being written is dropped"


def test_a_damaged_checkpoint_is_named_and_leaves_no_model(tmp_path: Path, folder: Path, steps: Any) -> None:
    # Given a bit that flipped in the last tensor, which nothing but its digest tells
    store, (_, manifest) = steps
    (file,) = (entry.key for entry in store.list(manifest.id.prefix) if entry.key.endswith(".bin"))
    raw = bytearray(store.read(file))
    raw[: len(raw) // 2] = bytes(len(raw) // 2)
    store.put(file, bytes(raw))

    with pytest.raises(CheckpointCorruptError, match=r"step-00000004-a00002 is damaged, and is not exported: .*digest"):
        export(exported(store, manifest, folder), LocalStore(tmp_path / "out"), file_bytes=SMALL)

    assert "config.json" not in content(tmp_path / "out")
    assert not [name for name in content(tmp_path / "out") if name.startswith(".incomplete")]


def test_a_checkpoint_that_cannot_be_exported_costs_nothing_of_an_older_export(
    tmp_path: Path, folder: Path, steps: Any
) -> None:
    store, (earlier, later) = steps
    export(exported(store, earlier, folder), LocalStore(tmp_path / "out"))
    before = content(tmp_path / "out")
    # Given a model of other sizes
    other = make_model(tmp_path / "other", tie_word_embeddings=True, intermediate_size=48)
    with pytest.raises(ConfigError, match=r"has shape \[64, 32\] in the checkpoint .*, but \[48, 32\] by the config"):
        export(exported(store, later, other), LocalStore(tmp_path / "out"))
    # Or no index
    assert later.index is not None
    store.delete([f"{later.id.prefix}{later.index.name}"])
    with pytest.raises(CheckpointCorruptError, match="step-00000004-a00002 is damaged"):
        export(exported(store, later, folder), LocalStore(tmp_path / "out"))
    assert content(tmp_path / "out") == before


def test_where_files_cannot_be_listed_all_are_written_anew(
    tmp_path: Path, folder: Path, steps: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class WriteOnly(Watched):
        def list(self, prefix: str) -> list[StoredObject]:
            raise AccessDeniedError("no listing")

    store, (_, manifest) = steps
    export(exported(store, manifest, folder), LocalStore(tmp_path / "undisturbed"))
    target = WriteOnly(tmp_path / "out")
    export(exported(store, manifest, folder), target)
    export(exported(store, manifest, folder), target)
    assert target.told.count("model.safetensors") == 2
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")
    assert "is not looked for, but written again: no listing" in caplog.text


def test_pods_that_see_other_places_are_found_out(tmp_path: Path, folder: Path, steps: Any) -> None:
    class Elsewhere(Watched):
        def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
            other = LocalStore(tmp_path / "elsewhere")
            return other.open_write(key, size_hint) if key.endswith("safetensors") else super().open_write(key)

    store, (_, manifest) = steps
    with pytest.raises(StorageUnavailableError, match=r"model\.safetensors has no bytes instead of \d+ right after"):
        export(exported(store, manifest, folder), Elsewhere(tmp_path / "out"))
    assert "config.json" not in content(tmp_path / "out")


def test_remains_of_an_export_that_was_killed_are_dropped(tmp_path: Path, folder: Path, steps: Any) -> None:
    # Given an export that was killed in the middle of its weights, and files of others beside and below it
    store, (_, manifest) = steps
    target = LocalStore(tmp_path / "out")
    for key in ("model.safetensors", "model-00001-of-00002.safetensors", "mine.bin", "jobs/a/model.safetensors"):
        target.open_write(key).write(b"x")

    export(exported(store, manifest, folder), target)

    left = sorted(path.name.split("-", 2)[2] for path in (tmp_path / "out").rglob(".incomplete-*"))
    assert left == ["mine.bin", "model.safetensors"]
    assert (tmp_path / "out" / "jobs" / "a").is_dir()


def test_an_export_tells_its_bytes(tmp_path: Path, folder: Path, steps: Any) -> None:
    store, (_, manifest) = steps
    told: list[int] = []
    export(exported(store, manifest, folder), LocalStore(tmp_path / "out"), on_bytes=told.append)
    tensors = load_file(tmp_path / "out" / "model.safetensors").values()
    read, written = sum(tensor.numel() * 4 for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
    assert sum(told) == read + written


def part_trained(folder: Path) -> tuple[Any, list[Any]]:
    """A model of which only the projections of queries are trained and saved, and the boxes of those."""
    strategy = trained(folder)
    for box in strategy.boxes("trained"):
        if "q_proj" not in box.name:
            box.write(torch.zeros(box.shape))  # whatever it is, it is not saved
    return strategy, [box for box in strategy.boxes("trained") if "q_proj" in box.name]


def test_what_a_checkpoint_lacks_comes_from_the_model_that_it_was_trained_on(tmp_path: Path, folder: Path) -> None:
    # Given a checkpoint of the projections that were trained, which names its base
    store = LocalStore(tmp_path / "store")
    _, boxes = part_trained(folder)
    digest = base_digest(build_on_meta(folder), folder)
    manifest = save(boxes, store, base_digest=digest)

    export(exported(store, manifest, folder), LocalStore(tmp_path / "out"), file_bytes=SMALL)

    base, found = load_file(folder / "model.safetensors"), {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    saved = {box.name: box.read() for box in boxes}
    assert found.keys() == base.keys()
    assert len(saved) == 2
    for name, tensor in base.items():
        assert torch.equal(found[name], saved.get(name, tensor).bfloat16()), name


@pytest.mark.parametrize("recorded", ["", "0" * 64])
def test_what_a_checkpoint_lacks_is_taken_from_no_other_model(tmp_path: Path, folder: Path, recorded: str) -> None:
    store = LocalStore(tmp_path / "store")
    manifest = save(part_trained(folder)[1], store, base_digest=recorded)
    with pytest.raises(ConfigError, match=r"lacks \d+ tensors, the first is .*; name that model, pinned to a commit"):
        export(exported(store, manifest, folder), LocalStore(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_digest_of_a_base_is_that_of_its_config_layout_and_bytes(tmp_path: Path, folder: Path) -> None:
    before = base_digest(build_on_meta(folder), folder)
    assert base_digest(build_on_meta(folder), shutil.copytree(folder, tmp_path / "copy")) == before
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert base_digest(build_on_meta(folder), folder) != before


@pytest.mark.parametrize(("eos", "added"), [(0, True), ([0], True), (None, True), ("end", False), (["end", 0], False)])
def test_generation_keeps_its_settings_and_stops_at_the_end_of_a_turn(
    folder: Path, caplog: pytest.LogCaptureFixture, eos: Any, added: bool
) -> None:
    # Given settings of the model's own, some of which do not know the token that ends a turn
    end = chat_tokenizer("chatml").convert_tokens_to_ids("<|im_end|>")
    stops = json.loads(json.dumps(eos).replace('"end"', str(end)))
    # temperature without do_sample is what transformers refuses to write
    own = {"temperature": 0.6, "top_p": 0.95, "do_sample": False, "eos_token_id": stops}
    (folder / "generation_config.json").write_text(json.dumps(own))

    with caplog.at_level(logging.INFO, "sft_trainer"):
        written = generation_config(folder)

    before = stops if isinstance(stops, list) else [] if stops is None else [stops]
    assert written == ({**own, "eos_token_id": [*before, end]} if added else own)
    assert ("added <|im_end|>, which ends a turn, to eos_token_id" in caplog.text) == added


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_without_settings_of_its_own_a_model_has_those_of_its_config(folder: Path, text: str | None) -> None:
    (folder / "generation_config.json").unlink()
    if text is not None:
        (folder / "generation_config.json").write_text(text)
    end = chat_tokenizer("chatml").convert_tokens_to_ids("<|im_end|>")
    assert generation_config(folder)["eos_token_id"] == [2, end]


def generation_config(folder: Path) -> Any:
    files = companions(build_on_meta(folder), folder, chat_tokenizer("chatml"), CARD)
    assert list(files)[-1] == "config.json"
    return json.loads(files["generation_config.json"])


def test_the_model_can_be_built_from_its_export(tmp_path: Path, folder: Path, steps: Any) -> None:
    store, (_, manifest) = steps
    export(exported(store, manifest, folder), LocalStore(tmp_path / "out"))
    assert build_on_meta(tmp_path / "out").stored_dtype == torch.bfloat16


def test_the_card_says_what_the_checkpoint_says(tmp_path: Path) -> None:
    config = resolve(job(Path("/inputs"), Path("/store")))
    metrics = {"loss": 1.25, "evalLoss": None}
    manifest = save(whole({"a": torch.zeros(2)}), LocalStore(tmp_path), metrics=metrics, tokens_seen=512)
    card = model_card(config, manifest)
    assert "# parity\n" in card
    assert "of `file:///inputs/model` on\n\n- `file:///inputs/data/train.jsonl`\n" in card
    rows = [line for line in card.splitlines() if line.startswith("| ") and "|---" not in line]
    assert rows[1:] == [
        "| steps | 6 |",
        "| tokens | 512 |",
        "| training loss | 1.25 |",
        "| peak learning rate | 0.001 |",
    ]
