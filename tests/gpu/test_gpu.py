"""The short form of ``make gpu DEVICE=cpu``, and how it ends when something is wrong."""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from math import nan
from operator import methodcaller
from pathlib import Path

import pytest
import torch

from sft_api.generate import ROOT
from sft_trainer import versions
from sft_trainer.loss import linear_cross_entropy
from sft_trainer.models.documents import attend
from tests.forks import Forks
from tests.gpu import __main__ as command
from tests.gpu import flash, megatron, models, runs
from tests.gpu.figures import Figures, beside_goals
from tests.gpu.inputs import SMALL
from tests.gpu.isolated import Outcome, Skipped, last_lines, run_isolated
from tests.gpu.measured import Run, same_losses
from tests.gpu.watched import nothing_is_waited_for
from tests.waiting import wait_until


def figures_of(output: str) -> dict[str, str]:
    """The figures at the end of the output, which is nothing else."""
    lines = output.partition("figures:\n")[2].splitlines()
    return dict(line.split("=", 1) for line in lines)


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts the command on the CPU, as forks of one process that has imported what it does."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    forks = Forks(environment, modules=["tests.gpu"], imports=command._PRELOADED)

    def started(*options: str) -> "subprocess.Popen[str]":
        program = [sys.executable, "-m", "tests.gpu", "--device", "cpu", *options]
        return forks.popen(program, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    yield started
    forks.close()


def test_everything_that_a_cpu_can_run_is_ok(start: Start) -> None:
    said, problems = (run := start("--short")).communicate()

    assert run.returncode == 0, said + problems
    figures = figures_of(said)
    checks = {name: value for name, value in figures.items() if name.startswith("check_")}
    assert {
        checks.pop(f"check_{name}")
        for name in ("flash_attention", "flight_recorder", "monitor", "memory", "out_of_memory")
    } == {"skipped=cpu"}
    assert set(checks.values()) == {"ok"}
    assert float(figures["bf16_gradient_cosine"]) > 0.99
    assert float(figures["update_bf16_moments_int8_bytes"]) == pytest.approx(6.03, abs=0.01)
    assert float(figures["small_ratio_to_plain"]) > 0
    assert float(figures["small_lora_ratio_to_plain"]) > 0
    assert float(figures["small_plain_ratio_packed"]) > 0
    assert figures["small_plain_bins_at_once"] in ("1", "2")
    assert float(figures["small_lora_ours_estimate_gib"]) > 0
    assert float(figures["memory_adapters_8b_estimate_gib"]) > 0
    assert float(figures["blocks_eager_gradient_error"]) < 1e-5
    assert float(figures["small_megatron_ratio_to_ours"]) > 0
    assert int(figures["small_megatron_losses_compared"]) >= 3
    assert float(figures["small_megatron_loss_error"]) < 1e-4
    assert float(figures["small_ours_peak_memory_gib"]) > 0
    assert (figures["goals_missed"], figures["left_out"], figures["failures"]) == ("0", "0", "0")


def test_one_that_is_stopped_tells_what_it_knows(start: Start) -> None:
    run = start("--short")
    assert run.stdout is not None
    said = ""
    for line in run.stdout:
        said += line
        if line.startswith("check device"):
            break
    run.send_signal(signal.SIGTERM)
    said += run.communicate()[0]

    assert run.returncode == 128 + signal.SIGTERM
    figures = figures_of(said)
    assert figures["stopped_by"] == "SIGTERM"
    assert figures["device"] == "cpu"


def test_what_there_was_no_time_for_is_no_success(start: Start) -> None:
    said, problems = (run := start("--short", "--minutes", "0.1")).communicate()

    assert run.returncode == 1, said + problems
    figures = figures_of(said)
    assert figures["check_attention"] == "no_time_left"
    assert (int(figures["left_out"]) >= 8, figures["failures"]) == (True, "0")


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_NEEDED", {"os": "os", "no_such_module": "no-such-package"})
    monkeypatch.setattr(sys, "argv", ["gpu"])

    assert command.main() == 2
    assert "lacks no-such-package: " in capsys.readouterr().err


def test_without_megatron_and_peft_it_is_said_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Given a machine without megatron-core and peft
    monkeypatch.setattr(models, "is_installed", lambda: False)
    monkeypatch.setattr(megatron, "is_installed", lambda: False)
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    facts = {"parameters": 1, "lengths": [1], "peak_flops": 0.0, "estimates": []}
    monkeypatch.setattr(command, "_prepared", lambda *_: facts)
    monkeypatch.setattr("tests.gpu.inputs.make_long_rows", lambda *_, **__: None)
    monkeypatch.setattr("tests.gpu.saving.save_and_load", lambda *_: None)
    measured: list[list[str]] = []
    monkeypatch.setattr("tests.gpu.measured.compare", lambda *_, kinds, **__: measured.append(kinds))
    (tmp_path / "inputs").mkdir()
    figures = Figures()

    # When models are measured, and checks run
    options = Namespace(device="cuda", short=False, only=None, record=False)
    command._measure(options, figures, tmp_path, time.monotonic() + 1000)
    with pytest.raises(Skipped, match="no_megatron_core"):
        megatron.beside_fsdp(tmp_path, torch.device("cpu"))

    # Then it is neither a failure nor left out for time
    assert measured == [["ours", "plain", "eager", "plain_unpacked"], ["ours", "plain"], ["ours"]]
    assert figures.with_value("skipped=no_megatron_core") == ["qwen3_1.7b_megatron"]
    assert figures.with_value("skipped=no_peft") == ["qwen3_8b_lora_plain"]
    assert "lacks megatron-core" in (said := capsys.readouterr().out)
    assert "lacks peft" in said


def test_only_what_is_asked_for_is_measured_and_an_unknown_part_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "_PRELOADED", ())
    measured: list[list[str] | None] = []
    monkeypatch.setattr(command, "_check", lambda *_: None)
    monkeypatch.setattr(command, "_measure", lambda options, *_: measured.append(options.only))

    def run(*only: str) -> None:
        options = Namespace(device="cuda", short=False, only=[*only], record=False)
        command._check_and_measure(options, Figures(), tmp_path, 0.0, 1.0)

    run("checks", "qwen3_8b_lora")
    run("attention")
    with pytest.raises(SystemExit, match="2"):
        run("qwen3_8b")

    assert measured == [["checks", "qwen3_8b_lora"], ["attention"]]
    said = capsys.readouterr().err
    assert (
        "no qwen3_8b; there are checks, qwen3_0.6b, qwen3_1.7b, qwen3_8b_lora, and of checks inputs, device, " in said
    )


def test_a_goal_that_is_missed_is_told_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_: object, figures: Figures, *__: object) -> None:
        figures.add({"m_ours_mfu": 0.39, "m_ratio_to_plain": 1.3})
        figures.add(beside_goals(figures.numbers(), {"m_ours_mfu": 0.4, "m_ratio_to_plain": 1.2, "not_measured": 1.0}))

    monkeypatch.setattr(command, "_check_and_measure", measure)
    monkeypatch.setattr(command, "_end_in_words", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu"])
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")

    assert command.main() == 0

    said = capsys.readouterr().out
    assert "not reached: m_ours_mfu is 0.39, its goal is 0.4" in said.splitlines()
    figures = figures_of(said)
    assert (figures["m_ours_mfu_goal"], figures["m_ours_mfu_reached"], figures["goals_missed"]) == ("0.4", "no", "1")
    assert figures["m_ratio_to_plain_reached"] == "yes"
    assert "not_measured_goal" not in figures


@pytest.mark.parametrize(("there", "capability", "why"), [(False, 9, "no_flash_attention_4"), (True, 8, "another_gpu")])
def test_flash_attention_4_is_not_tried_where_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, there: bool, capability: int, why: str
) -> None:
    monkeypatch.setattr(versions, "find_flash_attention_4", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    with pytest.raises(Skipped, match=why):
        flash.flash_attention(torch.device("cuda", 0))


def test_without_ray_that_check_is_skipped_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    checks = dict(runs.checks(tmp_path, tmp_path, torch.device("cpu")))

    with pytest.raises(Skipped, match="no_ray"):
        checks["placed_by_ray"]()


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [({2: 3.0, 3: 2.0}, []), ({2: 3.0, 3: 2.1}, ["m_losses"]), ({4: 1.0}, ["m_losses"]), ({3: nan}, ["m_losses"])],
)
def test_losses_that_differ_are_a_failure(losses: dict[int, float], verdict: list[str]) -> None:
    run, other = (Run(1.0, 1.0, 1.0, losses=each) for each in (losses, {1: 4.0, 2: 3.0, 3: 2.0}))
    figures = Figures()

    figures.add(same_losses("m", run, other, 1e-2))

    assert figures.with_value("failed") == verdict


def test_a_check_that_fails_crashes_or_hangs_hides_no_other(tmp_path: Path) -> None:
    # Given checks of every kind
    def fails() -> dict[str, float]:
        print("on its way")
        raise ValueError("seven is no colour")

    def crashes() -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def hangs() -> dict[str, float]:
        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "child").write_text(str(child.pid))
        time.sleep(1000)
        return {}

    def is_skipped() -> dict[str, float]:
        raise Skipped("cpu")

    def works() -> dict[str, float]:
        return {"answer": 42.0}

    checks = [(check.__name__, check) for check in (fails, crashes, hangs, is_skipped, works)]
    ended: list[Outcome] = []

    # When they are run
    deadline = time.monotonic() + 1000
    run_isolated(checks, tmp_path, deadline=deadline, limit=5.0, at_once=1, on_end=ended.append)  # type: ignore[arg-type]

    # Then each tells its own end, and nothing is left running
    assert [outcome.verdict for outcome in ended] == ["failed", "failed", "failed", "skipped=cpu", "ok"]
    assert ended[0].said == "ValueError: seven is no colour"
    assert last_lines(tmp_path, "fails")[-1] == "ValueError: seven is no colour"
    assert ended[1].said.startswith("ended with -9")
    assert ended[2].said.startswith("not done after 5 s")
    assert ended[4].figures == {"answer": 42.0}
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes())


@pytest.mark.parametrize("read", [methodcaller("item"), methodcaller("tolist"), float, bool, torch.nonzero])
def test_a_launch_that_reads_a_value_is_found_on_a_cpu_too(read: Callable[[torch.Tensor], object]) -> None:
    there = torch.ones(1)
    with pytest.raises(RuntimeError, match="the host reads"), nothing_is_waited_for(torch.device("cpu")):
        read(there)
    assert there.tolist() == [1.0]
    with nothing_is_waited_for(torch.device("cpu")):
        assert (there + 1).shape == (1,)


def test_what_only_a_cpu_reads_is_none_of_them() -> None:
    heads = torch.ones(1, 2, 5, 16, requires_grad=True)
    weight = torch.ones(3, 16, requires_grad=True)
    with nothing_is_waited_for(torch.device("cpu")):
        hidden = attend(heads, heads, heads, torch.tensor([0, 2, 5]), None, None)[0, :, 0]
        linear_cross_entropy(hidden, weight, torch.zeros(5, dtype=torch.long), 1.0)[0].backward()
    assert heads.grad is not None
    assert weight.grad is not None


def test_no_check_is_begun_when_the_time_is_up(tmp_path: Path) -> None:
    ended: list[Outcome] = []

    run_isolated([("late", dict)], tmp_path, deadline=time.monotonic(), limit=5.0, at_once=1, on_end=ended.append)

    assert [outcome.verdict for outcome in ended] == ["no_time_left"]


def test_a_model_for_which_there_is_no_time_has_not_failed(tmp_path: Path) -> None:
    figures = Figures()

    assert command._prepared(SMALL, tmp_path, tmp_path / "small", "cpu", time.monotonic(), figures) is None

    assert figures.with_value("no_time_left") == ["small_inputs"]
    assert figures.with_value("failed") == []
