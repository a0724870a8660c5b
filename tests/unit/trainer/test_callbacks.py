"""Callbacks of users: found and made, told what happens, heard; what goes wrong with them is said in words."""

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_api.checkpoints import CheckpointId
from sft_api.report import checkpoints_status
from sft_api.v1alpha1 import CallbackSpec, SFTJob
from sft_api.v1alpha1.status import CheckpointStatus
from sft_trainer.callbacks import Callback
from sft_trainer.callbacks.loading import find
from sft_trainer.callbacks.telling import Callbacks
from sft_trainer.check import check
from sft_trainer.errors import CallbackError, ConfigError, StopRequested
from sft_trainer.events import (
    Claimed,
    Committed,
    Control,
    Ended,
    ExportEnded,
    Logged,
    Request,
    Resumed,
    Started,
)
from sft_trainer.figures import Figures
from sft_trainer.reporting import Reporter
from sft_trainer.topology import ALONE, Topology
from sft_trainer.versions import hide_flash_attention_4
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_run_story import Story, alone, step_done  # noqa: F401 - a fixture
from tests.unit.trainer.user_callbacks import Indirect, Typed

MODULE = "tests.unit.trainer.user_callbacks"


def spec(name: str, /, **arguments: str) -> dict[str, Any]:
    return {"class": f"{MODULE}:{name}", "arguments": arguments}


def made(callback: dict[str, Any]) -> Any:
    ((_, make),) = find([CallbackSpec.model_validate(callback, by_alias=True)])
    return make()


def config(folder: Path, *callbacks: dict[str, Any]) -> Any:
    return resolve(manifest(folder, folder / "store", training={"steps": 6, "callbacks": list(callbacks)}))


def diary(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "diary-0.jsonl").read_text().splitlines()]


def test_arguments_are_read_as_the_types_that_the_class_names() -> None:
    given = spec("Typed", rate="1e-3", count="7", loud="true", mode="b", name="07", more="x")
    callback = made(given)
    assert isinstance(callback, Typed)
    assert callback.given == (1e-3, 7, True, "b", "07", {"more": "x"})


def test_methods_may_take_what_they_are_told_in_any_way() -> None:
    assert isinstance(made(spec("Indirect")), Indirect)


@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (
            {"class": "no_such_module.at_all:A"},
            r"there is no module 'no_such_module' \(no_such_module.at_all:A\): the mod",
        ),
        (
            {"class": f"{MODULE}.deeper:A"},
            r"there is no module 'tests.unit.trainer.user_callbacks.deeper'|not a package",
        ),
        (spec("Missing"), r"user_callbacks has no 'Missing'"),
        (spec("NoCallback"), r"is no class that inherits from sft_trainer.callbacks.Callback"),
        ({"class": f"{MODULE}:json"}, r"is no class that inherits"),
        (
            spec("SavesWithoutControl"),
            r"class: .*SavesWithoutControl.on_save cannot .*: write def on_save\(self, checkpoint, control\)",
        ),
        (spec("EndsWithControl"), r"missing a required argument: 'control'\): write def on_end\(self, end\)"),
        (
            spec("Asynchronous"),
            r"class: .*Asynchronous.on_step is called, and not awaited .* write def on_step\(self, step, control\), w",
        ),
        (spec("Yields"), r"class: .*Yields.on_end is called, .* write def on_end\(self, end\), without async or yield"),
        (spec("Plain", loss="1"), r"\.loss: .*:Plain has no such argument; it takes: none"),
        (spec("Typed", count="7", loud="no"), r"cannot be made with these: missing a required argument: 'rate'"),
        (
            spec("Typed", rate="fast", count="7", loud="no"),
            r"\.rate: 'fast' does not fit: Input should be a valid number",
        ),
        (
            spec("Typed", rate="1", count="7", loud="no", mode="c"),
            r"\.mode: 'c' does not fit: Input should be 'a' or 'b'",
        ),
    ],
)
def test_what_is_no_callback_is_refused_with_the_field(callback: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        made(callback)
    assert str(error.value).startswith("training.callbacks[0].")


def test_a_module_that_breaks_is_said_with_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "breaks_at_import.py").write_text("1 / 0\n")
    (tmp_path / "lacks_something.py").write_text("import no_such_tracker\n")
    with pytest.raises(
        CallbackError, match=r"the import of breaks_at_import raised ZeroDivisionError: division by zero"
    ):
        made({"class": "breaks_at_import:A"})
    with pytest.raises(
        ConfigError, match=r"lacks_something cannot be imported: No module named 'no_such_tracker'; inst"
    ):
        made({"class": "lacks_something:A"})
    with pytest.raises(
        CallbackError, match=r"RaisesWhenMade.__init__ raised RuntimeError: no tracker here \(user_callb"
    ):
        made(spec("RaisesWhenMade"))


def test_a_module_may_import_the_flash_attention_of_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given FlashAttention 2 in an image of the user's, and a process that hides what is called so from transformers
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.8.3'\n")
    (tmp_path / "fast.py").write_text(
        "import flash_attn\nfrom sft_trainer.callbacks import Callback\nclass Fast(Callback):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    hide_flash_attention_4()

    # When a callback imports it, then it has it
    try:
        assert [path for path, _ in find([CallbackSpec.model_validate({"class": "fast:Fast"})])] == ["fast:Fast"]
        assert sys.modules["flash_attn"].__version__ == "2.8.3"
    finally:
        sys.modules.pop("flash_attn", None)


def test_it_is_found_before_model_and_data_are_looked_at_and_nothing_is_made(tmp_path: Path) -> None:
    # Given a job whose model is not there either
    job = config(tmp_path, spec("RaisesWhenMade"), spec("Missing"))
    with pytest.raises(ConfigError, match=r"training.callbacks\[1\].class: .* has no 'Missing'"):
        check(job, Reporter(tmp_path, writes=True))


def test_the_public_module_needs_no_library_of_the_trainer() -> None:
    code = "import sys, sft_trainer.callbacks; print(sorted({'torch', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_callbacks_watch_the_whole_run_and_ask_for_more(tmp_path: Path) -> None:
    callback = spec("Diary", folder=str(tmp_path), save="1", evaluate="3", stop="4")
    story = Story(tmp_path, {}, training={"steps": 6, "callbacks": [callback]})

    story.run()

    # What they ask for is done after the step that is agreed on next.
    assert story.told == ["save 2", "evaluate 4", "evaluate 5", "save 5 at the end"]
    why = f"after step 5: it is enough ({MODULE}:Diary)"
    assert story.figures.stopped_early == why
    heard = [[word for word in line if not isinstance(word, float)] for line in diary(tmp_path)]
    assert heard == [
        ["start", "parity", 0, 0, 6, 1, True],
        ["step", 1, 0],
        ["step", 2, 0],
        ["step", 3, 0],
        ["step", 4, 0],
        ["evaluate", 4, {"held-out": 1.0}],
        ["step", 5, 0],
        ["evaluate", 5, {"held-out": 1.0}],
        ["end", 5, "complete", why, None],
    ]


def test_a_run_that_is_stopped_says_so_and_one_that_never_began_nothing(tmp_path: Path) -> None:
    callback = spec("Diary", folder=str(tmp_path))
    with pytest.raises(StopRequested):
        Story(tmp_path / "a", {2: "stop"}, training={"steps": 6, "callbacks": [callback]}).run()
    assert diary(tmp_path)[-1][:3] == ["end", 2, "stopped"]
    (tmp_path / "diary-0.jsonl").unlink()
    Callbacks(config(tmp_path, callback), ALONE).on_end(Ended(0, KeyboardInterrupt()), Control())
    assert not (tmp_path / "diary-0.jsonl").exists()


def test_an_error_ends_the_run_as_the_callback_s_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    story = Story(tmp_path, {}, training={"steps": 6, "callbacks": [spec("RaisesAfterAStep")]})
    sentence = (
        r"user_callbacks:RaisesAfterAStep.on_step raised ValueError: the loss is True \(user_callbacks.py, line \d+\)"
    )
    with pytest.raises(CallbackError, match=sentence):
        story.run()
    assert (story.step, story.told) == (1, [])
    assert "RaisesAfterAStep.on_end failed" in caplog.text


def test_an_interrupt_of_a_callback_is_an_error_of_its_own(tmp_path: Path) -> None:
    # No signal of the system makes one in a worker.
    story = Story(tmp_path, {}, training={"steps": 6, "callbacks": [spec("Interrupts")]})
    with pytest.raises(CallbackError, match=r"user_callbacks:Interrupts.on_step raised KeyboardInterrupt"):
        story.run()


def test_what_is_no_exception_of_python_is_an_error_of_the_callback_too(tmp_path: Path) -> None:
    story = Story(tmp_path, {}, training={"steps": 6, "callbacks": [spec("CancelsItself")]})
    with pytest.raises(CallbackError, match=r"user_callbacks:CancelsItself.on_step raised CancelledError"):
        story.run()


@pytest.mark.parametrize("name", ["RaisesAtTheEnd", "CancelsItselfAtTheEnd"])
def test_an_error_at_the_end_takes_nothing_from_a_run_that_is_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    Story(tmp_path, {}, training={"steps": 6, "callbacks": [spec(name)]}).run()
    assert f"{name}.on_end failed" in caplog.text


def checkpoint(step: int) -> CheckpointStatus:
    time = "2026-01-01T00:00:00Z"
    return CheckpointStatus(step=step, attempt=2, uri=f"file:///c/{step}", time=time, size_bytes=1, verified=True)


def test_the_spec_that_is_told_is_that_of_the_job_but_for_what_pods_are_not_given(tmp_path: Path) -> None:
    job = manifest(tmp_path, tmp_path / "store", runPolicy={"maxRestarts": 3, "ttlSecondsAfterFinished": 60})
    job["spec"]["training"]["callbacks"] = [spec("WritesSpec", folder=str(tmp_path))]
    callbacks = Callbacks(resolve(job), ALONE)

    callbacks.on_start(Started(0, 6), Control())

    said = json.loads((tmp_path / "spec.json").read_text())
    defaults = SFTJob.from_manifest(job).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert "maxRestarts" not in said["runPolicy"]
    assert {**said, "runPolicy": {**said["runPolicy"], "maxRestarts": 3}} == defaults


def test_checkpoints_and_the_export_are_told_once_and_of_a_new_attempt(tmp_path: Path) -> None:
    callbacks = Callbacks(config(tmp_path, spec("Diary", folder=str(tmp_path))), ALONE)
    control = Control()

    callbacks.on_claim(Claimed(2, 6), control)
    callbacks.on_start(Started(3, 6), control)
    callbacks.on_log(Logged(4, {"loss": 1.0, "step": 4}), control)
    for known in ([checkpoint(4)], [checkpoint(4)], [checkpoint(6), checkpoint(4)]):
        callbacks.on_commit(Committed(6, checkpoints_status(known)), control)
    callbacks.on_export(ExportEnded(6, "file:///model"), control)
    callbacks.on_end(Ended(6), control)

    assert diary(tmp_path) == [
        ["start", "parity", 2, 3, 6, 1, True],
        ["log", 4, ["loss", "step"]],
        ["save", 4, "file:///c/4"],
        ["save", 6, "file:///c/6"],
        ["end", 6, "complete", "", "file:///model"],
    ]


@pytest.mark.parametrize("begins", [True, False], ids=["of another run", "of this run"])
def test_a_checkpoint_of_another_run_is_not_taken_for_the_first_of_this_one(tmp_path: Path, begins: bool) -> None:
    # Given a run that goes on after a checkpoint of another one, of the attempt and step of its own first
    callbacks = Callbacks(config(tmp_path, spec("Diary", folder=str(tmp_path))), ALONE)
    resumed = Resumed(CheckpointId(2, 4), Figures(4), checkpoints_status([]), [], begins)
    callbacks.on_resume(resumed, Control())

    # When the evaluation before its first step is saved
    callbacks.on_commit(Committed(4, checkpoints_status([checkpoint(4)])), Control())

    told = [line[:2] for line in diary(tmp_path)] if (tmp_path / "diary-0.jsonl").exists() else []
    assert told == ([["save", 4]] if begins else [])


def test_other_processes_are_told_of_no_checkpoint_and_may_ask_all_the_same(tmp_path: Path) -> None:
    second = Topology(rank=1, local_rank=1, world_size=2, shard=2)
    callbacks = Callbacks(config(tmp_path, spec("Diary", folder=str(tmp_path), stop="3")), second)
    control = Control()

    callbacks.on_commit(Committed(2, checkpoints_status([checkpoint(2)])), control)
    assert not (tmp_path / "diary-0.jsonl").exists()
    callbacks.on_start(Started(2, 6), control)
    assert diary(tmp_path)[0][-2:] == [2, False]
    callbacks.on_step(step_done(3, figures=Figures(3)), control)
    assert control.asks(Request.FINISH)


def test_callbacks_of_the_documentation_take_what_they_are_told() -> None:
    docs = Path(__file__).parents[3] / "docs"
    blocks = [
        block for page in docs.rglob("*.md") for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    ]
    found = [
        node
        for block in blocks
        if "(Callback)" in block
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("on_")
    ]

    assert found
    for method in found:
        expected = list(inspect.signature(getattr(Callback, method.name)).parameters)
        assert [argument.arg for argument in method.args.args][: len(expected)] == expected
