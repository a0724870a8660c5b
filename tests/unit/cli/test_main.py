"""The commands that start nothing: help, validate, plan, and how errors look."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from sft_api.v1alpha1.status import PlanStatus
from sft_cli.console import coloured, harmless
from sft_cli.main import cli
from tests.waiting import wait_until

from .jobs import manifest


def sft(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def written(folder: Path, document: Any, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return written(tmp_path, manifest(), "good.yaml")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return written(tmp_path, manifest(training={"steps": 5, "epochs": 2}, compute={"nodes": 0}), "bad.yaml")


def test_a_reader_that_has_seen_enough_is_no_error(good: Path) -> None:
    command = [sys.executable, "-m", "sft_cli.main", "plan", str(good)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)


def test_ctrl_c_is_no_error_in_sft(good: Path) -> None:
    # Given a command that has begun to read its manifest, of which there is more to come
    command = [sys.executable, "-m", "sft_cli.main", "plan", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        pipe = process.stdin.fileno()
        os.write(pipe, good.read_bytes())
        wait_until(lambda: int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder) == 0)

        process.send_signal(signal.SIGINT)
        said, code = process.stderr.read().decode(), process.wait(timeout=60)

    assert (said, code) == ("\nInterrupted.\n", 130)


def test_a_full_disk_that_standard_output_goes_to_is_no_error_in_sft(good: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "sft_cli.main", "plan", str(good)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == 15
    assert done.stderr == (
        "standard output cannot be written (No space left on device): make room where it goes, then give the command "
        "again\n"
    )


def test_what_is_written_to_a_terminal_that_is_gone_is_no_error(good: Path) -> None:
    terminal, program = os.openpty()
    os.close(terminal)
    command = [sys.executable, "-m", "sft_cli.main", "plan", str(good)]
    done = subprocess.run(command, stdout=program, stderr=subprocess.PIPE, text=True, check=False)
    os.close(program)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_cannot_be_written_is_no_terminal_that_is_gone(good: Path) -> None:
    """Both say EIO: of a disk that fails nothing was told, and what a script went on with was cut off."""
    command = [sys.executable, "-m", "sft_cli.main", "plan", str(good)]
    # What it is opened at, address 0 of this process, is never there.
    with Path("/proc/self/mem").open("wb") as failing:
        done = subprocess.run(command, stdout=failing, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == 10
    assert done.stderr == "standard output cannot be written (Input/output error): send it elsewhere\n"


@pytest.mark.parametrize("command", ["run GOOD", "export GOOD", "checkpoints list tiny", "validate BAD"])
def test_a_current_folder_that_is_gone_is_said(command: str, tmp_path: Path) -> None:
    """As a shell that another one has removed the folder of."""
    good = written(tmp_path, manifest(model={"uri": f"file://{tmp_path}"}, compute={"gpusPerNode": 0}), "good.yaml")
    bad = written(tmp_path, manifest(model={"uri": "./model"}), "bad.yaml")
    words = command.replace("GOOD", str(good)).replace("BAD", str(bad))
    script = f'mkdir "$1" && cd "$1" && rmdir "$1" && "$0" -m sft_cli.main {words}'

    done = subprocess.run(
        ["sh", "-c", script, sys.executable, str(tmp_path / "gone")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 10
    if words.startswith("validate"):
        assert "only an absolute path says the same everywhere" in done.stderr + done.stdout
    else:
        assert done.stderr == "the current folder is no longer there: change into one that is, and run sft again\n"


@pytest.mark.parametrize(
    ("command", "closed"), [("validate", ">&-"), ("plan", "2>&-"), ("validate", "<&- >&- 2>&-"), ("plan", ">&- 2>&-")]
)
def test_streams_that_are_closed_are_no_error(command: str, closed: str, bad: Path) -> None:
    """As some services start programs: what is said there is lost, and the exit code is still that of the command."""
    script = f'"$0" -m sft_cli.main {command} "$1" {closed}'

    done = subprocess.run(["sh", "-c", script, sys.executable, bad], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (10, "")


def test_a_locale_without_our_characters_is_no_error() -> None:
    command = [sys.executable, "-m", "sft_cli.main", "data", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "between \\u27e6 and \\u27e7" in " ".join(done.stdout.split())


def test_valid_manifests_are_said_to_be_valid(good: Path) -> None:
    result = sft("validate", good)

    assert (result.exit_code, result.stdout) == (0, f"{good}: valid\n")


def test_a_model_that_is_not_on_this_machine_is_noted_and_no_error(tmp_path: Path) -> None:
    path = written(tmp_path, manifest(model={"uri": f"file://{tmp_path}/absent"}))
    note = f"model.uri: there is no {tmp_path}/absent on this machine: right where the run has it, and what depends on"

    validated, planned = sft("validate", path), sft("plan", path)

    assert (validated.exit_code, planned.exit_code) == (0, 0)
    assert f"{path}: valid\n{path}: warning: tiny: {note}" in validated.stdout
    assert planned.stderr.startswith(f"Warning: {note}")
    (tmp_path / "absent").mkdir()
    assert note not in sft("validate", path).stdout
    assert note not in sft("plan", path).stderr


def test_data_that_is_not_on_this_machine_is_noted_and_no_error(tmp_path: Path) -> None:
    data = {"train": [{"uri": "hf://org/data"}, {"uri": f"file://{tmp_path}/a.jsonl"}]}
    held_out = {"uri": f"file://{tmp_path}/b/*.jsonl", "name": "held-out"}
    path = written(tmp_path, manifest(data={**data, "eval": [held_out]}))
    note = (
        f"data.train[1].uri: there is no {tmp_path}/a.jsonl on this machine; data.eval[0].uri: there is no "
        f"{tmp_path}/b/*.jsonl on this machine: right where the run has it; a pattern is no path: name the folder, all "
        "of which is read"
    )

    validated, planned = sft("validate", path), sft("plan", path)

    assert (validated.exit_code, planned.exit_code) == (0, 0)
    assert validated.stdout == f"{path}: valid\n{path}: warning: tiny: {note}\n"
    assert planned.stderr == f"Warning: {note}\n"
    (tmp_path / "a.jsonl").touch()
    path = written(tmp_path, manifest(data=data))
    assert sft("validate", path).stdout == f"{path}: valid\n"


def test_every_problem_of_every_file_is_shown(good: Path, bad: Path) -> None:
    result = sft("validate", bad, good)

    assert result.exit_code == 10
    first, second, verdict = result.stdout.splitlines()
    assert first.startswith(f"{bad}: ")
    assert "training.steps or training.epochs" in first
    assert second == f"{bad}: spec.compute.nodes: must be at least 1, got 0"
    assert verdict == f"{good}: valid"


def test_verdicts_for_machines(good: Path, bad: Path) -> None:
    result = sft("validate", "--output", "json", good, bad)

    first, second = json.loads(result.stdout)
    assert result.exit_code == 10
    assert first == {"file": str(good), "valid": True, "jobs": ["tiny"], "problems": [], "warnings": []}
    assert second["valid"] is False
    assert len(second["problems"]) == 2


def test_what_is_valid_and_may_surprise_is_said(good: Path) -> None:
    policy = {"deletionPolicy": "Delete", "runPolicy": {"ttlSecondsAfterFinished": 60}}
    job = yaml.safe_load(good.read_text())
    job["spec"] = {**job["spec"], "checkpoint": {}, **policy}
    good.write_text(yaml.safe_dump(job))

    result = sft("validate", good)

    verdict, warning = result.stdout.splitlines()
    assert (result.exit_code, verdict) == (0, f"{good}: valid")
    assert warning.startswith(f"{good}: warning: tiny: spec.deletionPolicy is Delete and ")
    assert warning.endswith("trains the run anew")


def test_plan_warns_of_all_that_validate_warns_of(tmp_path: Path) -> None:
    deletion = {"deletionPolicy": "Delete", "runPolicy": {"ttlSecondsAfterFinished": 60}}
    of_pods = {"compute": {"gpusPerNode": 1, "podProfile": "h100"}, "export": {"hub": {"repository": "org/mine"}}}
    path = written(tmp_path, manifest(model={"uri": "hf://org/unknown"}, **deletion, **of_pods))

    warnings = sft("validate", path).stdout.splitlines()[1:]

    told = [warning.removeprefix(f"{path}: warning: tiny: ") for warning in warnings]
    for field in ("spec.deletionPolicy is Delete", "compute.podProfile: h100", "export.hub: on a cluster"):
        assert any(warning.startswith(field) for warning in told), field
    assert sft("plan", path).stderr.splitlines() == [f"Warning: {warning}" for warning in told]


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("lora", {"lora": None}),
        ("training.evaluation.earlyStopping", {"training": {"evaluation": {"earlyStopping": None}}}),
        ("training.dummyRun", {"training": {"dummyRun": None}}),
        ("strategy.megatron", {"strategy": {"megatron": None}}),
        ("monitoring.profile", {"monitoring": {"profile": None}}),
        ("monitoring.memorySnapshot", {"monitoring": {"memorySnapshot": None}}),
    ],
)
def test_a_switch_without_a_value_is_off_and_said_to_be(tmp_path: Path, field: str, spec: dict[str, Any]) -> None:
    path = written(tmp_path, manifest(**spec))
    warning = f"tiny: spec.{field} has no value, which is as if it were absent: write {field.rpartition('.')[2]}: {{}} "

    validated, planned = sft("validate", path), sft("plan", path)

    assert (validated.exit_code, planned.exit_code) == (0, 0)
    assert validated.stdout.startswith(f"{path}: valid\n{path}: warning: {warning}")
    assert planned.stderr.startswith(f"Warning: {warning}")
    for other in ({"lora": {}}, {"training": None, "strategy": None, "monitoring": None}):
        assert sft("validate", written(tmp_path, manifest(**other))).stdout == f"{path}: valid\n"


def test_plan_as_table_and_as_status(good: Path) -> None:
    table = sft("plan", good).stdout
    documents = [
        yaml.safe_load(sft("plan", "-o", "yaml", good).stdout),
        json.loads(sft("plan", "-o", "json", good).stdout),
    ]

    assert table.splitlines()[0] == "tiny"
    assert "tokens a step" in table
    assert "\x1b" not in table
    assert documents[0] == documents[1]
    assert PlanStatus.model_validate(documents[0]).global_batch_tokens == 65_536


def test_a_manifest_that_is_not_valid_is_an_error_of_sentences(bad: Path) -> None:
    for command in ("plan", "run", "data"):
        result = sft(command, bad)

        assert result.exit_code == 10
        assert result.stdout == ""
        assert "training.steps or training.epochs" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    result = sft("plan", tmp_path / "none.yaml")

    assert result.exit_code == 2
    assert "none.yaml" in result.stderr


@pytest.mark.parametrize("arguments", [["--debug", "plan"], ["plan", "--debug"]])
def test_debug_shows_where_an_error_comes_from(arguments: list[str], bad: Path) -> None:
    result = sft(*arguments, bad)

    assert result.exit_code == 1
    assert type(result.exception).__name__ == "UserError"


def test_our_own_mistakes_are_said_to_be_ours(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("sft_cli.plan.show_plan", broken)

    result = sft("plan", good)

    assert result.exit_code == 1
    assert "ZeroDivisionError: oops" in result.stderr
    assert "report it" in result.stderr


@pytest.mark.parametrize(
    ("terminal", "environment", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colour_only_where_it_is_wanted(
    terminal: bool, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        def isatty(self) -> bool:
            return terminal

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert coloured(Stream()) is expected  # type: ignore[arg-type]


def test_what_others_wrote_commands_no_terminal() -> None:
    """A row of a data set could write to the clipboard, and over what was said before."""

    class Stream:
        def __init__(self, *, terminal: bool) -> None:
            self.isatty = lambda: terminal

    row = "a\x1b]52;c;cm0=\x07b\x1b[2J\rc\x9b1A\r\n\t\x1b[1;31mred\x1b[0m ü"
    shown = "a\\x1b]52;c;cm0=\\x07b\\x1b[2J\\x0dc\\x9b1A\r\n\t\x1b[1;31mred\x1b[0m ü"

    assert harmless(row, Stream(terminal=True)) == shown  # type: ignore[arg-type]
    assert harmless(row, Stream(terminal=False)) == row  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["run", "data"])
def test_without_the_trainer_its_commands_say_what_to_install(
    command: str, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft_cli.main.importlib.util.find_spec", lambda name: None)

    result = CliRunner().invoke(cli, [command, str(good)])

    assert result.exit_code == 10
    assert "pip install '.[cli,trainer]' in its checkout" in result.stderr


def test_short_commands_import_nothing_heavy(good: Path) -> None:
    program = (
        "import sys; from sft_cli.main import cli\n"
        "for arguments in (['--help'], ['validate', sys.argv[1]], ['plan', sys.argv[1]]):\n"
        "    try:\n        cli.main(arguments)\n    except SystemExit:\n        pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'rich', 'boto3', 'sft_trainer'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", program, str(good)], capture_output=True, text=True, check=True)

    assert done.stderr.strip() == "[]"
    assert "tokens a step" in done.stdout


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_a_name_that_no_file_system_takes_is_no_error_of_sft(tmp_path: Path, command: str) -> None:
    long = f"{tmp_path}/{256 * 'x'}"
    result = sft(command, written(tmp_path, manifest(model={"uri": f"file://{long}"})))
    assert result.exit_code == 10
    assert result.stderr.startswith(long)
    assert "cannot be there: a name between two slashes has at most 255 bytes" in result.stderr


OTHERS_OF_THE_TRAINER = """
    torch transformers tokenizers huggingface_hub datasets pyarrow safetensors jinja2 prometheus_client awscrt certifi
    tensorboardX pygal pynvml ray
"""


def test_checkpoints_need_no_other_packages_than_they_ask_for(tmp_path: Path) -> None:
    """Where one of these is missing the command says what to install; where another is, it would be our error."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[2].split()))\n"
        "from sft_cli.main import cli\ncli.main(['checkpoints', 'list', sys.argv[1]])"
    )

    def listed(missing: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, str(tmp_path), missing]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    without_others = listed(OTHERS_OF_THE_TRAINER)
    assert (without_others.returncode, without_others.stderr) == (0, "")
    assert "There is no checkpoint" in without_others.stdout

    without_digests = listed("blake3")
    assert without_digests.returncode == 10
    assert "the trainer is not installed here: pip install" in without_digests.stderr


def two_jobs() -> str:
    first, second = manifest(), manifest()
    second["metadata"] = {"name": "second"}
    return yaml.safe_dump_all([first, second])


@pytest.mark.parametrize("command", ["plan", "run", "data"])
def test_a_file_with_two_jobs_is_valid_and_one_is_chosen_by_name(tmp_path: Path, command: str) -> None:
    path = written(tmp_path, two_jobs())

    validated, refused = sft("validate", path), sft(command, path)

    assert (validated.exit_code, validated.stdout) == (0, f"{path}: valid, 2 SFTJobs (tiny, second)\n")
    assert refused.exit_code == 10
    assert refused.stderr == f"{path} holds 2 SFTJobs (tiny, second): choose one with --job\n"
    assert sft("plan", path, "--job", "second").stdout.splitlines()[0] == "second"


def test_standard_input_and_folders_are_read_too(tmp_path: Path, bad: Path) -> None:
    def piped(text: str, *arguments: str) -> Result:
        return CliRunner().invoke(cli, arguments, input=text)

    assert piped(yaml.safe_dump(manifest()), "validate", "-").stdout == "standard input: valid\n"
    assert piped(yaml.safe_dump(manifest()), "plan", "-").stdout.splitlines()[0] == "tiny"
    wrong = piped(bad.read_text(), "validate", "-")
    assert (wrong.exit_code, wrong.stdout.splitlines()[0].partition(" spec")[0]) == (10, "standard input:")

    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder, two_jobs(), "two.yaml")
    assert sft("validate", folder).stdout == f"{folder}: valid, 2 SFTJobs (tiny, second)\n"
    written(folder, bad.read_text(), "wrong.yaml")
    result = sft("validate", folder)
    assert result.exit_code == 10
    assert all(line.startswith(f"{folder}/wrong.yaml: ") for line in result.stdout.splitlines())


def test_a_split_that_is_cut_short_is_refused_by_validate(tmp_path: Path) -> None:
    data = {"train": [{"uri": "hf://org/data", "split": "train[:10%"}]}

    result = sft("validate", written(tmp_path, manifest(data=data)))

    assert result.exit_code == 10
    assert "spec.data.train[0].split: must be a split or slices of one" in result.stdout
    assert 'got "train[:10%"' in result.stdout


def test_a_plan_warns_of_data_that_is_small_beside_a_step(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "q" * 100}, {"role": "assistant", "content": "a"}]}] * 40
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": [{"uri": f"file://{file}"}]}

    for training, what in (
        ({"epochs": 2}, "every step holds all 40 rows 2 times"),
        ({}, "one step holds all 40 rows, and the run is that one step"),
        ({"globalBatchSize": 80}, "one step holds all 40 rows, and the run is that one step"),
    ):
        result = sft("plan", written(tmp_path, manifest(data=data, training=training)))
        advice = "set training.globalBatchSize: 4 for 10 steps a pass over the data"
        assert result.stderr == f"Warning: {what}: {advice}\n"
    many = sft("plan", written(tmp_path, manifest(data=data, training={"steps": 3}))).stderr
    assert re.fullmatch(r"Warning: every step holds all 40 rows about \d\d times: set .*\n", many)
    enough = sft("plan", written(tmp_path, manifest(data=data, training={"globalBatchSize": 4})))
    assert (enough.exit_code, enough.stderr) == (0, "")
    dummy = sft("plan", written(tmp_path, manifest(data=data, training={"dummyRun": {}})))
    assert (dummy.exit_code, dummy.stderr) == (0, "")


def test_a_plan_of_data_that_cannot_be_read_here_says_nothing_of_it(tmp_path: Path) -> None:
    result = sft("plan", written(tmp_path, manifest(data={"train": [{"uri": "s3://bucket/rows"}]})))
    assert (result.exit_code, result.stderr) == (0, "")
