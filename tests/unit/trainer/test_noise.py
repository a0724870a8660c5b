"""Noise on embeddings: how much of it each token has, the same however it is computed, and none in evaluations."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sft_trainer.data.feed import BinTensors
from sft_trainer.data.parts import part_of
from sft_trainer.errors import ConfigError
from sft_trainer.models import noise as noise_module
from sft_trainer.models.attention import Boundaries
from sft_trainer.models.noise import Noise
from sft_trainer.strategies.fsdp.grouping import grouped
from tests.bins import RoomFor, random_bin
from tests.unit.trainer.test_fsdp_strategy import BIN_TOKENS, BINS, TRAINED, gradients, strategy
from tests.unit.trainer.test_models import save_model

WIDTH = 64


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which a bin of the tests has several."""
    monkeypatch.setattr(noise_module, "_BLOCK", 4)


def of(bin_: BinTensors, alpha: float = 5.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What is added to the embeddings of ``bin_``."""
    noise = Noise(alpha, bin_.seeds, bin_.sizes, bin_.first)
    return noise.values(torch.zeros(1, len(bin_.input_ids), WIDTH, dtype=dtype), bin_.boundaries.ends)


def test_it_is_uniform_up_to_alpha_over_the_root_of_length_times_width() -> None:
    found = of(random_bin(1, 1000), alpha=5.0)

    bound = 5.0 / (1000 * WIDTH) ** 0.5
    assert found.abs().max() <= bound
    shares = torch.histc(found / bound, bins=10, min=-1, max=1) / found.numel()
    assert shares.tolist() == pytest.approx([0.1] * 10, abs=0.01)
    # No two tokens, and no two numbers of one, have the same
    assert found.unique().numel() > 0.99 * found.numel()


def test_each_document_has_as_much_as_alone_whatever_is_beside_it() -> None:
    lengths = (4, 400, 25)

    parts = of(random_bin(1, *lengths)).split(lengths)

    for part, length in zip(parts, lengths, strict=True):
        bound = 5.0 / (length * WIDTH) ** 0.5
        assert 0.95 * bound < part.abs().max() <= bound
        assert part.square().mean().sqrt() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_it_follows_from_the_place_in_the_run_alone(small_blocks: None) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    bin_ = random_bin(3, 5, 9)
    assert torch.equal(of(bin_), of(bin_))
    assert not torch.equal(of(bin_), of(random_bin(4, 5, 9)))
    # And what else is drawn is what it is without
    assert torch.equal(torch.get_rng_state(), before)
    assert of(bin_, dtype=torch.bfloat16).dtype == torch.bfloat16
    torch.testing.assert_close(of(bin_, dtype=torch.bfloat16).float(), of(bin_), rtol=2**-8, atol=0)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_who_has_a_part_of_the_tokens_adds_to_them_what_one_process_adds(small_blocks: None, degree: int) -> None:
    # Given several bins that go through the model at once
    (together,) = grouped([random_bin(seed, *lengths) for seed, lengths in ((1, (5, 9)), (2, (7,)), (3, (1, 2)))], 3)
    whole = of(together)

    parts = torch.cat([of(part_of(together, place, degree)) for place in range(degree)])

    assert torch.equal(parts[: len(whole)], whole)
    assert not parts[len(whole) :].any(), "what fills up needs none"


def test_bins_that_go_together_have_what_each_has_alone(small_blocks: None) -> None:
    bins = [random_bin(1, 5, 9), random_bin(2, 7), random_bin(3, 1, 2)]
    (together,) = grouped(bins, 3)
    assert torch.equal(of(together), torch.cat([of(bin_) for bin_ in bins]))


def test_a_model_that_looks_its_embeddings_up_otherwise_is_refused() -> None:
    embeddings = nn.Embedding(8, 4)
    ids = torch.tensor([[1, 2]])
    boundaries = Boundaries.of((2,))
    with Noise(5.0, (1,), (2,)).added_to(embeddings, boundaries):
        noisy = embeddings(ids)
    assert not torch.equal(noisy, embeddings(ids)), "and afterwards there is none"

    def look_up(times: int) -> None:
        with Noise(5.0, (1,), (2,)).added_to(embeddings, boundaries):
            for _ in range(times):
                embeddings(ids)

    for times in (0, 2):
        with pytest.raises(ConfigError, match=rf"neftuneNoiseAlpha is 5, and .* up {times} times"):
            look_up(times)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3", path, tie_word_embeddings=True)
    return path


@pytest.mark.usefixtures("process_group")
def test_loss_and_gradients_are_those_of_a_plain_model_whose_embeddings_have_it(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = strategy(folder, neftuneNoiseAlpha=30)
    loss = ours.forward_backward(BINS, TRAINED)

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embeddings, expected = model.get_input_embeddings(), 0.0
    for bin_ in BINS:
        noise = of_width(bin_, model.config.hidden_size)
        ends = bin_.boundaries.ends.tolist()
        for start, end in pairwise(ends):
            ids = bin_.input_ids[start:end]
            logits = model(inputs_embeds=(embeddings(ids) + noise[start:end])[None]).logits[0]
            summed = nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
            (summed / TRAINED).backward()
            expected += summed.item()

    assert loss.item() == pytest.approx(expected, rel=1e-6)
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, theirs[name.removeprefix("huggingface.")], rtol=1e-4, atol=1e-7)
    # And it is as much as to be seen
    assert strategy(folder).forward_backward(BINS, TRAINED).item() != pytest.approx(expected, rel=1e-3)


def of_width(bin_: BinTensors, width: int) -> torch.Tensor:
    """What is added to embeddings of another width than that of the tests above."""
    embedded = torch.zeros(len(bin_.input_ids), width)
    return Noise(30, bin_.seeds, bin_.sizes).values(embedded, bin_.boundaries.ends)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("how", ["full", "selective", "at once", "compiled"])
def test_the_numbers_are_the_same_however_they_are_computed(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sft_trainer.models import compiling

    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch.compiler.reset()
    chosen: dict[str, Any] = {"neftuneNoiseAlpha": 30}
    if how == "at once":
        chosen["memory"] = RoomFor(3, BIN_TOKENS, 14)
    elif how == "compiled":
        chosen["compile"] = True
    else:
        chosen["activationCheckpointing"] = how
    plain, other = strategy(folder, neftuneNoiseAlpha=30), strategy(folder, **chosen)
    for _ in range(2):
        losses = [one.forward_backward(BINS, TRAINED).item() for one in (plain, other)]
        found, expected = gradients(other), gradients(plain)
        for one in (plain, other):
            one.optimizer.zero_grad()

        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)
    assert other._at_once == (3 if how == "at once" else 1)


@pytest.mark.usefixtures("process_group")
def test_an_evaluation_has_none(folder: Path) -> None:
    with_noise, without = strategy(folder, neftuneNoiseAlpha=30), strategy(folder)
    assert torch.equal(with_noise.forward_sums(BINS), without.forward_sums(BINS))
