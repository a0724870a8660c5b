"""Rows of single tokens that are trained beside adapters: that peft computes the same with them, before an export and
after, and that they begin, are saved and go on as all else that is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from sft_api.v1alpha1 import LoraSpec
from sft_trainer import loss
from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.reading import load_boxes
from sft_trainer.data.added_tokens import numbers_of
from sft_trainer.data.tokenizer import load_tokenizer, load_with_new_tokens
from sft_trainer.errors import ConfigError
from sft_trainer.export.alone import exported_alone
from sft_trainer.export.forms import Adapters
from sft_trainer.first_adapters import FirstAdapters
from sft_trainer.loss import Logits, OtherRows, evaluation_sums, linear_cross_entropy
from sft_trainer.models.attention import Boundaries
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.lora import add_adapters
from sft_trainer.models.trained_rows import add_rows, first_rows, is_row, rows_of
from sft_trainer.models.weights import load_weights
from sft_trainer.prepared import PreparedModel
from sft_trainer.reporting import Reporter
from sft_trainer.strategies import build as build_strategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import trainable_of
from sft_trainer.versions import of_texts
from tests.bins import random_bin
from tests.exports import export
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.topologies import here
from tests.unit.trainer.exporting import checkpoint
from tests.unit.trainer.test_added_rows import exported_with
from tests.unit.trainer.test_models import save_model
from tests.whole_models import save_whole

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
ADDED: dict[str, bool] = {"<a>": False, "<b>": True, "<c>": False}
LORA: dict[str, Any] = {"rank": 3, "alpha": 6, "trainableTokens": ["<|im_end|>", "a"]}


class Run:
    """Adapters and rows of tokens beside the model in ``source``, which has ``spare`` rows more than its tokenizer
    tokens; as a run begins with it."""

    def __init__(self, folder: Path, kind: str = "llama", spare: int = 8, modules: Any = None, **sections: Any) -> None:
        self.source = folder / "published"
        options = sections.pop("options", {})
        if not self.source.exists():
            chat_tokenizer("chatml").save_pretrained(folder / "tokenizer")
            known = len(load_tokenizer(folder / "tokenizer").get_vocab())
            make = save_whole if kind == "gemma3" else save_model
            make(kind, self.source, vocab_size=known + spare, **options)
        self.tokenizer, self.new = load_with_new_tokens(folder / "tokenizer", None, ADDED)
        model = {"uri": f"file://{self.source}", "addedTokens": ["<a>", "<c>"], "addedSpecialTokens": ["<b>"]}
        training = {**sections.pop("training", {}), **({"trainableModules": modules} if modules else {})}
        sections = {"lora": LORA, "training": training, **sections}
        self.config = resolve(manifest(folder, folder / "store", model=model, **sections))
        self.numbers = numbers_of(self.tokenizer.backend_tokenizer, self.config.spec.tokens_with_rows)
        self.blueprint = self.without()
        add_adapters(self.blueprint.huggingface, self.lora, modules or ())
        self.tables = add_rows(self.blueprint, self.numbers, modules or ())
        self.trainable = trainable_of(self.config)

    @property
    def lora(self) -> LoraSpec:
        assert self.config.spec.lora is not None
        return self.config.spec.lora

    def without(self) -> Any:
        return build_on_meta(self.source, None, self.new)

    def begin(self, first: FirstAdapters | None = None) -> Any:
        strategy = build_strategy(self.config, self.blueprint, self.trainable, ALONE, CPU)
        unknown: Any = None
        prepared = PreparedModel("", self.source, self.blueprint, "", unknown, "", first, self.new)
        boxes = strategy.boxes("base") + strategy.boxes("trained")
        prepared.fill(boxes, self.config.spec, Reporter(self.source.parent, writes=False))
        return strategy

    def export(self, saved: Any, store: LocalStore, form: Literal["adapter", "model"]) -> Path:
        of = exported_with(self.new, store, saved, self.source)
        given = Adapters.of(self.config, f"file://{self.source}")
        assert given is not None
        out = self.source.parent / form
        export(replace(of, tokenizer=self.tokenizer, adapters=replace(given, form=form)), LocalStore(out))
        return out


def changed(strategy: Any) -> Any:
    """``strategy`` whose trained values have become others."""
    generator = torch.Generator().manual_seed(3)
    for box in strategy.boxes("trained"):
        box.write(box.read() + torch.randn(box.place.sizes, generator=generator) * 0.1)
    return strategy


def loss_of(strategy: Any, ids: torch.Tensor) -> torch.Tensor:
    count = len(ids)
    one, _ = strategy.model(ids, torch.arange(count), Boundaries.of([count]), torch.arange(count - 1), ids[1:], 1.0)
    assert isinstance(one, torch.Tensor)
    return one


@pytest.mark.parametrize(
    ("kind", "options", "modules"),
    [
        ("llama", {}, None),
        ("llama", {}, ["lm_head"]),
        ("qwen3", {"tie_word_embeddings": True}, None),
        ("gemma2", {}, None),  # tied, scaled and capped
        ("gpt_neox", {}, None),  # which calls both otherwise
        ("biogpt", {}, None),  # scaled by a number
    ],
)
def test_peft_computes_the_same_and_so_does_plain_transformers_with_the_whole_model(
    tmp_path: Path, kind: str, options: dict[str, Any], modules: list[str] | None
) -> None:
    # Given a run that has trained some, and its checkpoint
    run, store = Run(tmp_path, kind, modules=modules, options=options), LocalStore(tmp_path / "store")
    ours = changed(run.begin())
    saved = checkpoint(ours, store, base_digest=base_digest(run.without(), run.source))
    adapters, merged = run.export(saved, store, "adapter"), run.export(saved, store, "model")
    ids = torch.tensor([5, *run.numbers, 17, run.new[1], run.numbers[0], 3])

    # Then peft has the same loss, and the same gradients
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    of_peft: Any = AutoPeftModelForCausalLM.from_pretrained(adapters, is_trainable=True)
    expected = cross_entropy(of_peft(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum")
    expected.backward()
    found = loss_of(ours, ids)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    theirs = dict(of_peft.named_parameters())
    for table in run.tables:
        mine = ours.model.huggingface.get_submodule(table).trained_rows.weight.grad
        (wanted,) = (
            each.grad
            for name, each in theirs.items()
            if name.endswith(f"{table}.token_adapter.trainable_tokens_delta.default")
        )
        torch.testing.assert_close(gathered(mine), wanted, rtol=2e-5, atol=1e-6)
    assert len(run.tables) == (2 if kind in ("llama", "gpt_neox") and not modules else 1)

    # And evaluations are of it, and the model that it is merged into
    sums = ours.model(ids, torch.arange(len(ids)), Boundaries.of([len(ids)]), torch.arange(len(ids) - 1), ids[1:], None)
    torch.testing.assert_close(sums[0], expected.detach(), rtol=1e-6, atol=0)
    whole: Any = AutoModelForCausalLM.from_pretrained(merged)
    of_whole = cross_entropy(whole(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum")
    torch.testing.assert_close(of_whole, expected, rtol=1e-5, atol=0)

    # And another run begins with them
    again = Run(tmp_path, modules=modules)
    first = FirstAdapters.of(adapters, "hf://org/adapters", again.lora, again.blueprint, again.trainable)
    torch.testing.assert_close(loss_of(again.begin(first), ids), found.detach(), rtol=1e-6, atol=0)


def test_a_base_with_too_few_rows_is_enlarged_for_them(tmp_path: Path) -> None:
    run, store = Run(tmp_path, spare=0), LocalStore(tmp_path / "store")
    ours = changed(run.begin())
    saved = checkpoint(ours, store, base_digest=base_digest(run.without(), run.source))
    adapters, merged = run.export(saved, store, "adapter"), run.export(saved, store, "model")
    ids = torch.tensor([5, *run.numbers, 3])

    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    whole: Any = AutoModelForCausalLM.from_pretrained(merged)
    logits = whole(input_ids=ids[None]).logits[0]
    of_whole = cross_entropy(logits[:-1], ids[1:], reduction="sum")
    torch.testing.assert_close(of_whole, loss_of(ours, ids), rtol=1e-5, atol=0)
    of_peft: Any = AutoPeftModelForCausalLM.from_pretrained(adapters)
    torch.testing.assert_close(of_peft(input_ids=ids[None]).logits[0], logits[:, : run.new.stop], rtol=1e-4, atol=1e-4)

    # And whoever exports it without the run writes the same
    chat_tokenizer("chatml").save_pretrained(run.source)
    for form, name in (("adapter", "adapter_model.safetensors"), ("model", "model.safetensors")):
        config = Run(tmp_path, export={"mergeAdapter": form == "model"}).config
        made = exported_alone(config, config.spec.model, store, saved, lambda *_: run.source, lambda _: None)
        export(made, LocalStore(tmp_path / f"alone-{form}"))
        assert (tmp_path / f"alone-{form}" / name).read_bytes() == (tmp_path / form / name).read_bytes()


@pytest.mark.parametrize(("precision", "base"), [("fp32", "nf4"), ("bf16", "bf16")])
def test_beside_a_base_that_is_rounded_they_are_as_in_the_model_that_is_exported(
    tmp_path: Path, precision: str, base: str
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    lora, training = {**LORA, "basePrecision": base}, {"precision": precision}
    run, store = Run(tmp_path, options=sizes, lora=lora, training=training), LocalStore(tmp_path / "store")
    ours = changed(run.begin())
    saved = checkpoint(ours, store, base_digest=base_digest(run.without(), run.source))
    bin_ = random_bin(1, 40, vocabulary=run.new.stop)
    bin_.input_ids[: len(run.numbers)] = torch.tensor(run.numbers)

    found = ours.forward_backward([bin_], 39, 39)

    from transformers import AutoModelForCausalLM

    whole: Any = AutoModelForCausalLM.from_pretrained(run.export(saved, store, "model"), dtype=torch.float32)
    expected = cross_entropy(
        whole(input_ids=bin_.input_ids[None]).logits[0, bin_.targets], bin_.labels, reduction="sum"
    )
    torch.testing.assert_close(
        float(found), float(expected.detach()), rtol=1e-5 if precision == "fp32" else 1e-2, atol=0
    )
    for module in rows_of(ours.model.huggingface).values():
        assert module.weight.grad is not None
        assert gathered(module.weight.grad).any()


def test_of_a_text_part_peft_finds_them_in_the_whole_model(tmp_path: Path) -> None:
    run, store = Run(tmp_path, "gemma3"), LocalStore(tmp_path / "store")
    ours = changed(run.begin())
    saved = checkpoint(ours, store, base_digest=base_digest(run.without(), run.source))
    adapters, merged = run.export(saved, store, "adapter"), run.export(saved, store, "model")
    ids = torch.tensor([5, *run.numbers, 3])

    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    base: Any = AutoModelForImageTextToText.from_pretrained(
        run.source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = loss_of(ours, ids).detach()
    whole: Any = AutoModelForImageTextToText.from_pretrained(
        merged, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for model in (of_texts(whole), of_texts(PeftModel.from_pretrained(base, adapters))):
        logits = model(input_ids=ids[None]).logits[0, :-1]
        torch.testing.assert_close(cross_entropy(logits, ids[1:], reduction="sum"), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", [{}, {"type": "muon"}, {"stateDtype": "int8"}])
def test_a_run_begins_with_the_rows_that_they_stand_for_and_goes_on_to_the_last_bit(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    training = {"optimizer": {"learningRate": 1e-2, **optimizer}}
    options = {"hidden_size": 64}  # a block of moments
    run, other = (Run(tmp_path, training=training, options=options) for _ in range(2))
    ours, again = run.begin(), other.begin()
    held = {box.name: box for box in ours.boxes("trained") if is_row(box.name)}
    tables = {box.name: box.read() for box in ours.boxes("base")}
    for name, box in held.items():
        assert torch.equal(box.read(), tables[name.replace("trained_rows.", "")][run.numbers])
    assert len(held) == 2

    def step(of: Any, seed: int) -> torch.Tensor:
        found: torch.Tensor = of.forward_backward([random_bin(seed, 5, 9, vocabulary=run.new.stop)], 20, 20)
        of.apply(1e-2, 1.0, of.grad_norm(), torch.tensor(True))
        return found

    before = {name: box.read().clone() for name, box in held.items()}
    step(ours, 0)
    store = LocalStore(tmp_path / "store")
    saved = checkpoint(ours, store)
    boxes = again.boxes("trained") + again.boxes("optimizer")
    load_boxes(boxes, store, saved, CheckpointGroup(here(), timedelta(minutes=1)))
    again.updates = ours.updates

    assert torch.equal(step(again, 1), step(ours, 1))
    for one, two in zip(again.boxes("trained"), ours.boxes("trained"), strict=True):
        assert torch.equal(one.read(), two.read()), one.name
    # All rows of the head have changed, and the tables nothing
    changed_rows = held["lm_head.trained_rows.weight"].read() != before["lm_head.trained_rows.weight"]
    assert changed_rows.any(1).all()
    assert all(torch.equal(box.read(), tables[box.name]) for box in ours.boxes("base"))


def test_a_part_of_the_rows_begins_as_in_the_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, spare=0)
    name, shape = "model.embed_tokens.trained_rows.weight", (len(run.numbers), 32)

    def filled(offsets: tuple[int, int], sizes: tuple[int, int]) -> torch.Tensor:
        box = Box(name, WEIGHT, shape, Rectangle(offsets, sizes), torch.empty(sizes))
        load_weights([*first_rows(run.blueprint, [box])], run.blueprint.names, run.source)
        return box.local

    whole = filled((0, 0), shape)
    parts = torch.cat([filled((0, 0), (3, 32)), filled((3, 0), (2, 32)), filled((5, 0), (0, 32))])
    assert torch.equal(parts, whole)
    assert torch.equal(filled((1, 7), (4, 9)), whole[1:5, 7:16])


@pytest.mark.parametrize("logits", [Logits(), Logits(factor=0.5, cap=3.0)])
@pytest.mark.parametrize("at_once", [2**27, 20 * 7 * 3])
def test_the_loss_with_other_rows_is_that_with_them_in_the_head(
    monkeypatch: pytest.MonkeyPatch, logits: Logits, at_once: int
) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", at_once)
    generator = torch.Generator().manual_seed(1)
    hidden, weight, rows = (torch.randn(size, 8, generator=generator) for size in (50, 20, 3))
    numbers, labels = torch.tensor([2, 11, 19]), torch.randint(20, (50,), generator=generator)
    given = [each.clone().requires_grad_() for each in (hidden, rows)]

    scaled, total = linear_cross_entropy(given[0], weight, labels, 0.5, logits, others=OtherRows(numbers, given[1]))
    scaled.backward()

    plain = [each.clone().requires_grad_() for each in (hidden, rows)]
    products = plain[0] @ weight.index_copy(0, numbers, plain[1]).T
    scores = products * logits.factor
    scores = scores if logits.cap is None else logits.cap * torch.tanh(scores / logits.cap)
    expected = cross_entropy(scores, labels, reduction="sum")
    (0.5 * expected).backward()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    for mine, theirs in zip(given, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    sums = evaluation_sums(hidden, weight, labels, logits, others=OtherRows(numbers, rows))
    torch.testing.assert_close(sums[0], expected.detach(), rtol=1e-6, atol=0)
    assert sums[1] == (scores.argmax(1) == labels).sum()


@pytest.mark.parametrize(
    ("kind", "options", "numbers", "sentence"),
    [
        ("phi", {}, [3], "the head of a model of type 'phi' has a bias, beside which peft trains no rows of tokens"),
        ("llama", {}, [3, 128], "names token 128 of the tokenizer, and the model has rows for 128: name it in"),
        ("llama", {"pad_token_id": 3}, [3], r"token 3 is for padding \(pad_token_id\), of which embeddings learn"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], numbers: list[int], sentence: str
) -> None:
    save_model(kind, tmp_path, **options)
    with pytest.raises(ConfigError, match=sentence):
        add_rows(build_on_meta(tmp_path), numbers, ())


def test_a_token_to_train_has_to_be_one_of_the_tokenizer(tmp_path: Path) -> None:
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    backend = load_tokenizer(tmp_path).backend_tokenizer
    end = backend.token_to_id("<|im_end|>")
    assert numbers_of(backend, ["<|im_end|>", "a", "<|im_end|>"]) == sorted([backend.token_to_id("a"), end])
    with pytest.raises(ConfigError, match=r"'a<\|im_end\|>', which is no token .*: name it in model.addedTokens, or"):
        numbers_of(backend, ["a<|im_end|>"])
    # None that begins, or ends, with white space can be added.
    with pytest.raises(ConfigError, match=r"has 'a<\|im_end\|>\\n', which is no token .*\): leave it out$"):
        numbers_of(backend, ["a<|im_end|>\n"])


def test_adapters_with_rows_of_other_tokens_are_no_beginning(tmp_path: Path) -> None:
    run, store = Run(tmp_path), LocalStore(tmp_path / "store")
    saved = checkpoint(run.begin(), store, base_digest=base_digest(run.without(), run.source))
    adapters = run.export(saved, store, "adapter")

    other = Run(tmp_path, lora={**LORA, "trainableTokens": ["a"]})

    with pytest.raises(ConfigError, match=r"has rows of tokens \[.*name the same ones in lora.trainableTokens"):
        FirstAdapters.of(adapters, "hf://org/adapters", other.lora, other.blueprint, other.trainable)


def test_rows_of_a_file_are_in_the_order_in_which_their_tokens_were_named(tmp_path: Path) -> None:
    # Given adapters as peft writes them of tokens that were named in another order
    run, store = Run(tmp_path), LocalStore(tmp_path / "store")
    ours = changed(run.begin())
    saved = checkpoint(ours, store, base_digest=base_digest(run.without(), run.source))
    adapters = run.export(saved, store, "adapter")
    settings, tensors = adapters / "adapter_config.json", load_file(adapters / "adapter_model.safetensors")
    order = [2, 0, 4, 1, 3]
    document = json.loads(settings.read_text())
    named = {table: [each[place] for place in order] for table, each in document["trainable_token_indices"].items()}
    settings.write_text(json.dumps({**document, "trainable_token_indices": named}))
    moved = {name: each[order] if name.endswith("tokens_delta") else each for name, each in tensors.items()}
    save_file(moved, adapters / "adapter_model.safetensors")

    # Then a run begins with the row of each
    def begun(of: Run) -> Any:
        return of.begin(FirstAdapters.of(adapters, "hf://org/adapters", of.lora, of.blueprint, of.trainable))

    for mine, theirs in zip(begun(Run(tmp_path)).boxes("trained"), ours.boxes("trained"), strict=True):
        assert torch.equal(mine.read(), theirs.read()), mine.name

    # But not where each table has another order, nor where nothing says which they are of
    for told in ({**named, "lm_head": sorted(named["lm_head"])}, {**named, "lm_head": None}, [], None):
        settings.write_text(json.dumps({**document, "trainable_token_indices": told}))
        with pytest.raises(ConfigError, match=r"has rows of tokens .*, and this run trains those of \["):
            begun(Run(tmp_path))
