"""Rows of tokens that a run adds: what they begin as, that they are trained as plain transformers does it, and what an
export has of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch.nn.functional import cross_entropy

from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import LoraSpec
from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.data.tokenizer import load_with_new_tokens
from sft_trainer.errors import ConfigError, ModelError
from sft_trainer.export.alone import exported_alone
from sft_trainer.export.companions import _with_overrides
from sft_trainer.export.exporting import Exported
from sft_trainer.export.forms import Adapters
from sft_trainer.export.values import Base
from sft_trainer.first_adapters import FirstAdapters
from sft_trainer.models.added_rows import EnlargedSlices
from sft_trainer.models.attention import Boundaries, boundary_arguments
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.lora import add_adapters, is_adapter
from sft_trainer.models.overrides import in_words
from sft_trainer.models.weights import load_weights
from sft_trainer.names.tables import Table
from sft_trainer.origin import Origin
from sft_trainer.preparation import Loaded, prepare_model
from sft_trainer.reporting import Reporter
from sft_trainer.strategies import build as build_strategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import trainable_of
from sft_trainer.versions import of_texts
from tests.exports import export, exported, save
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.exporting import checkpoint
from tests.unit.trainer.test_models import save_model
from tests.whole_models import save_whole

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
LORA: dict[str, Any] = {"rank": 3, "alpha": 6}
SPEC = LoraSpec.model_validate(LORA)
SPARE, MORE = range(120, 124), range(126, 130)
"""Of tokens for which the models here have rows, and of some that would be beyond their 128."""


class Stored:
    """A slice reader of a tensor in memory."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def get_shape(self) -> list[int]:
        return [*self._values.shape]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        return self._values[place]


def enlarged(values: torch.Tensor, table: Table) -> torch.Tensor:
    """All of it."""
    whole = EnlargedSlices(Stored(values), table)
    return whole[tuple(slice(0, size) for size in whole.get_shape())]


@pytest.mark.parametrize(
    ("stored", "new", "rows", "named"),
    [
        (128, range(100, 128), 128, 128),
        (128, range(100, 129), 192, 129),
        (100, range(100, 101), 128, 101),
        (100, range(99, 100), 100, 100),
        # A tokenizer that knew more than the model
        (100, range(120, 130), 192, 130),
    ],
)
def test_a_table_gets_rows_where_it_has_too_few(stored: int, new: range, rows: int, named: int) -> None:
    assert (Table(stored, new).rows, Table(stored, new).named) == (rows, named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_the_mean_of_those_that_were_known(dtype: torch.dtype) -> None:
    values = torch.randn(5000, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    mean = values[:4990].double().mean(0).to(dtype)

    # In rows that are there, and in more
    spare = enlarged(values, Table(5000, range(4990, 4995)))
    more = enlarged(values, Table(5000, range(4990, 5003)))

    assert torch.equal(spare[:4990], values[:4990])
    assert torch.equal(spare[4995:], values[4995:])
    for rows in (spare[4990:4995], more[4990:]):
        torch.testing.assert_close(rows, mean.expand_as(rows), rtol=2e-7 if dtype == torch.float32 else 0, atol=1e-9)
    assert more.shape == (5056, 7)
    assert torch.equal(more[:4990], values[:4990])
    # Of a bias as well
    assert torch.equal(enlarged(values[:, 0], Table(5000, range(4990, 5003))), more[:, 0])


def test_they_have_the_same_bits_whoever_reads_which_part_of_them() -> None:
    values = torch.randn(9001, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
    table = Table(9001, range(9000, 9100))
    whole, threads = enlarged(values, table), torch.get_num_threads()
    reader = EnlargedSlices(Stored(values), table)

    parts = [torch.cat([reader[slice(a, b), slice(0, 33)] for a, b in ((0, 8000), (8000, 9050), (9050, 9152))])]
    parts.append(torch.cat([reader[slice(0, 9152), slice(a, b)] for a, b in ((0, 1), (1, 20), (20, 33))], 1))
    try:
        torch.set_num_threads(3)
        parts.append(enlarged(values, table))
    finally:
        torch.set_num_threads(threads)

    assert all(torch.equal(part, whole) for part in parts)


def strategy(folder: Path, new: range, **fields: Any) -> Any:
    """A model with rows for ``new`` tokens, as a run begins with it."""
    config = resolve(manifest(folder, folder.with_name("store"), model={"uri": f"file://{folder}"}, **fields))
    built = build_strategy(config, build_on_meta(folder, None, new), trainable_of(config), ALONE, CPU)
    load_weights(built.boxes("base") + built.boxes("trained"), built.model.names, folder)
    return built


@torch.no_grad()
def resized(reference: Any, new: range) -> Any:
    """The model as plain transformers enlarges it, with the mean of all known rows for new ones."""
    before = len(reference.get_input_embeddings().weight)
    table = Table(before, new)
    if new.stop > before:
        reference.resize_token_embeddings(new.stop, pad_to_multiple_of=64, mean_resizing=False)
    modules = (reference.get_input_embeddings(), reference.get_output_embeddings())
    for weight in {weight for module in modules for weight in module.parameters()}:
        for rows in (slice(new.start, new.stop), slice(before, len(weight))):
            weight[rows] = weight[list(table.known)].double().mean(0).float()
    return reference


@pytest.mark.parametrize(
    ("kind", "options", "new"),
    [
        ("llama", {}, SPARE),
        ("llama", {}, MORE),
        ("qwen3", {"tie_word_embeddings": True}, SPARE),
        ("qwen3", {"tie_word_embeddings": True}, MORE),
        ("gemma2", {}, MORE),
        ("gpt_neox", {}, MORE),  # which calls both otherwise
        ("phi", {}, MORE),  # with a bias of the head
        ("qwen3_moe", {}, MORE),
    ],
)
def test_loss_and_gradients_are_those_of_plain_transformers(
    tmp_path: Path, kind: str, options: dict[str, Any], new: range
) -> None:
    reference = resized(save_model(kind, tmp_path / "model", **options), new)
    ours = strategy(tmp_path / "model", new)
    for name, parameter in ours.model.huggingface.named_parameters():
        torch.testing.assert_close(gathered(parameter.detach()), dict(reference.named_parameters())[name].detach())
    ids = torch.tensor([5, new[0], 17, new[-1], new[1], 90, 3, new[-1]])

    loss, _ = ours.model(ids, torch.arange(8), Boundaries.of([8]), torch.arange(7), ids[1:], 1.0)
    loss.backward()
    ours.grad_norm()
    expected = cross_entropy(reference(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum")
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    found = {name: gathered(p.grad) for name, p in ours.model.huggingface.named_parameters()}
    assert found.keys() == wanted.keys()
    whole = torch.nn.utils.get_total_norm(wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-8 * whole, name


def with_adapters(folder: Path, new: range, modules: list[str], first: Path | None = None) -> Any:
    """A run that trains adapters of a model with rows for ``new`` tokens, and ``modules`` besides: random ones that add
    something, or those in ``first``."""
    fields: dict[str, Any] = {"lora": LORA, "training": {"trainableModules": modules}}
    config = resolve(manifest(folder, folder.with_name("store"), model={"uri": f"file://{folder}"}, **fields))
    trainable, blueprint = trainable_of(config), build_on_meta(folder, None, new)
    add_adapters(blueprint.huggingface, SPEC, modules)
    adapters = FirstAdapters.of(first, "hf://org/adapters", SPEC, blueprint, trainable) if first else None
    built = build_strategy(config, blueprint, trainable, ALONE, CPU)
    boxes = [*built.boxes("base"), *built.boxes("trained")]
    load_weights([box for box in boxes if not is_adapter(box.name)], built.model.names, folder)
    if adapters is not None:
        adapters.fill(boxes)
        return built
    generator = torch.Generator().manual_seed(3)
    for box in built.boxes("trained"):
        box.write(torch.randn(box.place.sizes, generator=generator) * 0.1)
    return built


def logits_of_ours(built: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of tokens, (tokens, rows)."""
    huggingface = built.model.huggingface
    hidden = huggingface.base_model(
        input_ids=ids[None],
        position_ids=torch.arange(len(ids))[None],
        use_cache=False,
        **boundary_arguments(Boundaries.of([len(ids)])),
    ).last_hidden_state[0]
    return torch.nn.functional.linear(hidden, gathered(huggingface.get_output_embeddings().weight))


def exported_with(new: range, store: LocalStore, saved: Any, source: Path) -> Exported:
    """The checkpoint ``saved`` of a run on the model in ``source`` that added ``new`` tokens."""
    digest = base_digest(build_on_meta(source, None, new), source)
    of = exported(store, saved, source, build_on_meta(source, None, new))
    return replace(of, base=lambda: Base(source, digest))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spare", [0, 8])
def test_adapters_with_rows_of_new_tokens_load_as_peft_enlarges_their_base(
    tmp_path: Path, tied: bool, spare: int
) -> None:
    # Given a run with adapters on a model that has a few rows more than its tokenizer tokens, or none
    chat_tokenizer("chatml").save_pretrained(tmp_path / "tokenizer")
    tokenizer, new = load_with_new_tokens(tmp_path / "tokenizer", None, {"<a>": False, "<b>": True, "<c>": False})
    source, known = tmp_path / "published", new.start
    save_model("llama", source, vocab_size=known + spare, tie_word_embeddings=tied)
    modules = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    ours, store = with_adapters(source, new, modules), LocalStore(tmp_path / "store")
    saved = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source, None, new), source))

    # When it is exported as adapters, and merged
    def written(form: Literal["adapter", "model"]) -> Path:
        card = in_words(None, rows=new.stop if spare == 0 else 0)
        of = exported_with(new, store, saved, source)
        adapters = Adapters(SPEC, form, f"file://{source}", tuple(modules))
        export(replace(of, tokenizer=tokenizer, card=card, adapters=adapters), LocalStore(tmp_path / form))
        return tmp_path / form

    # Then peft loads them beside the published model, which it enlarges by itself, and transformers the merged model
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([5, *new, 90, 3])
    expected = logits_of_ours(ours, ids).detach()
    of_peft: Any = AutoPeftModelForCausalLM.from_pretrained(written("adapter"))
    beside = of_peft(input_ids=ids[None]).logits[0].detach()
    count = new.stop if spare == 0 else known + spare
    assert beside.shape[1] == count
    torch.testing.assert_close(beside, expected[:, :count], rtol=1e-4, atol=1e-4)
    merged: Any = AutoModelForCausalLM.from_pretrained(written("model"))
    assert merged.config.vocab_size == expected.shape[1]
    torch.testing.assert_close(merged(input_ids=ids[None]).logits[0].detach(), expected, rtol=1e-4, atol=1e-4)

    # And another run begins with them, all but rows that no token has
    again = with_adapters(source, new, modules, tmp_path / "adapter")
    torch.testing.assert_close(logits_of_ours(again, ids)[:, :count], expected[:, :count])

    # And its card says how to load them without that
    if spare == 0:
        code = re.findall(r"```python\n(.*?)\n```", (tmp_path / "adapter" / "README.md").read_text(), re.DOTALL)[0]
        names: dict[str, Any] = {}
        exec(code.replace('adapters = "."', f"adapters = {str(tmp_path / 'adapter')!r}"), names)
        torch.testing.assert_close(names["model"](input_ids=ids[None]).logits[0].detach(), beside)


def test_the_export_of_a_text_part_has_them_in_the_whole_model(tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    save_whole("gemma3", source)
    ours, store = strategy(source, MORE), LocalStore(tmp_path / "store")
    saved = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source, None, MORE), source))

    export(exported_with(MORE, store, saved, source), LocalStore(out))

    from transformers import AutoModelForImageTextToText

    config = json.loads((out / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 192
    whole: Any = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([5, *MORE, 90, 3])
    given = of_texts(whole.eval())(input_ids=ids[None]).logits[0].detach()
    torch.testing.assert_close(given, logits_of_ours(ours, ids).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("beside", "of_text", "expected"),
    [
        # Where both say it, where the text part alone does, and where all lies in one
        ({"vocab_size": 128}, {"vocab_size": 128}, (192, 192)),
        ({"vocab_size": 99}, {"vocab_size": 128}, (99, 192)),
        ({}, {}, (None, 192)),
        ({"vocab_size": 128}, None, (192, None)),
    ],
)
def test_a_whole_config_says_the_number_of_rows_where_it_did(
    beside: dict[str, int], of_text: dict[str, int] | None, expected: tuple[int | None, int | None]
) -> None:
    published = beside | ({} if of_text is None else {"text_config": of_text})
    whole: Any = SimpleNamespace(config=SimpleNamespace(text_config=SimpleNamespace(vocab_size=128)))
    trained = SimpleNamespace(vocab_size=192, to_dict=lambda: {"vocab_size": 192})

    found = _with_overrides(published, whole, trained)

    assert (found.get("vocab_size"), found.get("text_config", {}).get("vocab_size")) == expected


@pytest.mark.parametrize(
    ("options", "modules", "row", "lacking"),
    [
        ({}, ["embed_tokens"], "lm_head.weight", "lm_head"),
        ({}, ["layers.1"], "model.embed_tokens.weight", "embed_tokens, lm_head"),
        ({"tie_word_embeddings": True}, ["layers.1"], "model.embed_tokens.weight", "embed_tokens"),
    ],
)
def test_rows_that_would_not_be_trained_are_refused(
    tmp_path: Path, options: dict[str, Any], modules: list[str], row: str, lacking: str
) -> None:
    save_model("llama", tmp_path / "model", **options)
    fields = {"model": {"uri": f"file://{tmp_path}/model", "addedTokens": ["<a>"]}}
    document = manifest(tmp_path, tmp_path / "store", **fields, training={"trainableModules": modules})

    with pytest.raises(ConfigError) as refused:
        prepare_model(resolve(document), Reporter(tmp_path, writes=False), CPU, lambda _: Loaded(tmp_path, None, MORE))

    assert str(refused.value) == (
        f"tokens of model.addedTokens and model.addedSpecialTokens have rows in {row}, which would stay what they "
        f"begin as, the mean of all others: add {lacking} to training.trainableModules"
    )


@pytest.mark.parametrize(
    ("modules", "tables"),
    [
        (None, "rows of 2 tokens in model.embed_tokens and lm_head"),
        (["lm_head"], "training.trainableModules (lm_head) and rows of 2 tokens in model.embed_tokens"),
    ],
)
def test_beside_adapters_their_rows_are_trained_alone(
    tmp_path: Path, modules: list[str] | None, tables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, said = chat_tokenizer("chatml"), list[str]()
    save_model("llama", tmp_path / "model", vocab_size=len(tokenizer.get_vocab()))
    tokenizer.save_pretrained(tmp_path / "model")
    model = {"uri": f"file://{tmp_path}/model", "addedTokens": ["<a>", "<b>"]}
    training = {"trainableModules": modules} if modules else {}
    document = manifest(tmp_path, tmp_path / "store", model=model, lora=LORA, training=training)
    reporter = Reporter(tmp_path, writes=False)
    monkeypatch.setattr(reporter, "say", lambda text, *given: said.append(text % given))

    prepared = prepare_model(resolve(document), reporter, CPU)

    assert any(f"{tables}: " in line for line in said)
    parameters = dict(prepared.blueprint.huggingface.named_parameters())
    names = [name for name in parameters if name.endswith("trained_rows.weight")]
    expected = ["model.embed_tokens"] if modules else ["model.embed_tokens", "lm_head"]
    assert names == [f"{table}.trained_rows.weight" for table in expected]

    # But tokens of which all rows are trained are not named once more
    document["spec"]["lora"] = {**LORA, "trainableTokens": ["<a>"]}
    document["spec"]["training"]["trainableModules"] = ["embed_tokens", "lm_head"]
    with pytest.raises(ConfigError, match=r"trained whole: leave lora\.trainableTokens out"):
        prepare_model(resolve(document), reporter, CPU)


def test_a_model_with_tables_besides_gets_no_rows(tmp_path: Path) -> None:
    save_model("gemma4_text", tmp_path, hidden_size_per_layer_input=8, vocab_size_per_layer_input=128)
    assert [*build_on_meta(tmp_path, None, SPARE).tables] == ["model.embed_tokens.weight"]
    with pytest.raises(ModelError, match="has tables of tokens besides its embeddings and head"):
        build_on_meta(tmp_path, None, MORE)


@pytest.mark.parametrize("padding", [129, -1])
def test_a_token_for_padding_would_not_be_trained(tmp_path: Path, padding: int) -> None:
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": padding}))
    new = MORE if padding > 0 else range(190, 192)
    with pytest.raises(ModelError, match=rf"token {new[-1]} is for padding \(pad_token_id\)"):
        build_on_meta(tmp_path, None, new)
    assert build_on_meta(tmp_path, None, range(190, 191)).tables


def test_a_file_with_another_number_of_rows_than_its_config_says_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 127}))
    with pytest.raises(ModelError, match=r"has shape \(128, 32\) in the file, but \(192, 32\) in the config"):
        base_digest(build_on_meta(tmp_path, None, MORE), tmp_path)


def test_a_run_begins_with_no_weights_of_one_with_other_tokens(tmp_path: Path) -> None:
    # Given a checkpoint of a run that added one
    def config(place: Path, tokens: list[str] | None, **checkpoint: Any) -> TrainerConfig:
        model = {"uri": f"file://{tmp_path}/model"} | ({"addedTokens": tokens} if tokens else {})
        return resolve(manifest(tmp_path, place, model=model, checkpoint={"uri": f"file://{place}", **checkpoint}))

    store = LocalStore(tmp_path / "first")
    weight = Box("a", WEIGHT, (2,), Rectangle.whole((2,)), torch.zeros(2))
    save([weight], store, numbers=config(tmp_path / "first", ["<a>"]).numbers().as_record())

    def origin(tokens: list[str] | None) -> Origin | None:
        begun = {"resume": {"from": {"uri": f"file://{tmp_path}/first", "what": "weights"}}}
        return Origin.of(config(tmp_path / "second", tokens, **begun), {})

    # Then the same tokens are what its rows are of, and no others
    same, more, none = origin(["<a>"]), origin(["<a>", "<b>"]), origin(None)
    assert same is not None
    assert same.find().step == 6
    for other, words in ((more, '["<a>", "<b>"]'), (none, "none")):
        assert other is not None
        with pytest.raises(ConfigError) as refused:
            other.find()
        assert f'with model.addedTokens ["<a>"] trained, and this one has {words}: export' in str(refused.value)
    # And of a thousand it shows some, as they are written
    many = origin([f"<é{number}>" for number in range(1000)])
    assert many is not None
    with pytest.raises(ConfigError, match=r'this one has \["<é0>", "<é1>", [^:]{1,120}…: export'):
        many.find()


def test_an_export_without_the_run_has_them_too(tmp_path: Path) -> None:
    # Given a checkpoint of a run that added tokens, and no process of it
    source = tmp_path / "model"
    chat_tokenizer("chatml").save_pretrained(source)
    tokens = {"<a>": False, "<b>": True}
    _, new = load_with_new_tokens(source, None, tokens)
    save_model("llama", source, vocab_size=new.start)
    # One that is there already is named too
    model = {"uri": f"file://{source}", "addedTokens": ["<a>"], "addedSpecialTokens": ["<|im_end|>", "<b>"]}
    config = resolve(manifest(tmp_path, tmp_path / "store", model=model))
    ours, store = strategy(source, new), LocalStore(tmp_path / "store")
    saved = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source, None, new), source))

    warned = list[str]()
    made = exported_alone(config, config.spec.model, store, saved, lambda uri, kind: source, warned.append)
    export(made, LocalStore(tmp_path / "out"))

    from transformers import AutoModelForCausalLM, AutoTokenizer

    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor([5, *new, 90])
    given = again(input_ids=ids[None]).logits[0].detach()
    torch.testing.assert_close(given, logits_of_ours(ours, ids).detach(), rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids([*tokens]) == [*new]
    assert "| added tokens | 2 |" in (tmp_path / "out" / "README.md").read_text()
    assert not warned
