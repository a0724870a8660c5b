"""The parts of a dummy run: its tokens, its words, and what becomes of memory that is not enough."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sft_trainer.data.random_examples import RandomExamples
from sft_trainer.data.steps import plan_steps
from sft_trainer.dummy_run import DummyRun, sentence
from sft_trainer.errors import ConfigError
from sft_trainer.trainer import Trainer
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_run_story import step_done

GIB = 2.0**30


def config(folder: Path, **sections: Any) -> Any:
    training = {"dummyRun": {}, "steps": 100, **sections.pop("training", {})}
    return resolve(manifest(folder, folder / "store", training=training, **sections))


@pytest.mark.parametrize(
    ("sections", "bins", "tokens"),
    [
        ({"training": {"globalBatchTokens": 4096}}, 8, 4096),
        ({"training": {"globalBatchTokens": 4096, "maxTokensPerMicroBatch": 1024}}, 4, 4096),
        ({"training": {"globalBatchTokens": 4096, "maxTokensPerMicroBatch": 1300}}, 3, 3900),
        ({"training": {"globalBatchTokens": 4096, "maxTokensPerMicroBatch": 1025}}, 3, 3072),
        ({"training": {"globalBatchSize": 6}}, 6, 3072),
        ({"training": {"globalBatchSize": 6, "maxTokensPerMicroBatch": 1300}}, 2, 2600),
        ({"training": {"globalBatchSize": 6, "microBatchSize": 2}, "data": {"packing": "none"}}, 3, 3072),
    ],
    ids=[
        "one a bin",
        "two a bin",
        "with a rest",
        "a rest of one token",
        "examples",
        "examples with a rest",
        "unpacked",
    ],
)
def test_every_step_is_as_full_as_it_may_be(tmp_path: Path, sections: Any, bins: int, tokens: int) -> None:
    resolved = config(tmp_path, **sections)
    examples = RandomExamples.filling(resolved, 1000)
    steps, _ = plan_steps(resolved.spec, resolved.plan, [examples])  # type: ignore[list-item]
    for index in (0, 1, 4):
        step = steps.step(index)
        assert (len(step.bins), step.tokens) == (bins, tokens)
        assert step.trained_tokens == tokens - step.examples


def test_tokens_are_random_and_those_of_an_example_always_the_same() -> None:
    examples = RandomExamples(np.array([512, 100], dtype=np.int32), 1000)
    ids, mask = examples.example(0)
    assert (ids.shape, ids.dtype, mask.sum()) == ((512,), np.int32, 512)
    assert (ids.min() >= 0, ids.max() < 1000, len(set(ids.tolist())) > 300) == (True, True, True)
    assert np.array_equal(RandomExamples(examples.lengths, 1000).example(0)[0], ids)
    assert len(examples.example(1)[0]) == 100


def test_what_was_measured_is_said_without_the_first_steps() -> None:
    seconds = [9.0, 5.0, 0.5, 0.7, 0.6]
    steps = [step_done(n, seconds=s, tokens=60_000, processes=8) for n, s in enumerate(seconds, 1)]
    assert sentence(steps, [2 * GIB, 0, 0, 0], 4096) == (
        "0.6 s a step of 60,000 random tokens in examples of up to 4,096 (the median of the last 3 of 5 steps): "
        "100,000 tokens/s, 12,500 a process; 2.0 GiB of host memory a process at most; "
        "no data was read, and nothing was saved"
    )
    on_gpus = [step_done(n, seconds=1.0, tokens=10, peak_flops_share=0.4523) for n in range(3)]
    said = sentence(on_gpus, [GIB, 71.2 * GIB, 66 * GIB, 79.1 * GIB], 4096)
    assert "10 a process, 45.2% of peak FLOP/s; 71.2 of 79.1 GiB of a GPU's memory at most (66.0 GiB in te" in said


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize("error", [OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=["GPU", "host"])
def test_memory_that_is_not_enough_is_an_answer_and_no_failure_to_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def runs_out(self: Trainer) -> None:
        self.step = 1
        raise error

    monkeypatch.setattr(Trainer, "_run", runs_out)
    ranks: Any = SimpleNamespace(rank=0, local_rank=0, local_world_size=1, world_size=1)
    with pytest.raises(ConfigError, match=r"memory ran out at step 2: .*; found by training.dummyRun"):
        DummyRun(config(tmp_path), ranks, tmp_path).run()
    monkeypatch.setattr(Trainer, "_run", lambda self: (_ for _ in ()).throw(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        DummyRun(config(tmp_path), ranks, tmp_path).run()
