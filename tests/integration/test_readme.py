"""What README.md prints is what the commands print."""

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.documented import commands
from tests.fixtures_inputs import make_inputs

README = (Path(__file__).parents[2] / "README.md").read_text()
MANIFEST, MINE = re.findall(r"^```yaml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
(ROW,) = re.findall(r"^```json\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def terminal(command: str) -> tuple[str, str]:
    """The command of the terminal that holds ``command``, and what it answers there."""
    blocks = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if command in block]
    (whole,) = commands(block)
    return whole, block.removeprefix(f"$ {whole}\n")


def say(command: str, folder: Path) -> str:
    """What ``command`` prints in ``folder``, where the programs of this environment are in .venv."""
    (folder / ".venv").symlink_to(sys.prefix)
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout if done.stdout else done.stderr


def test_the_near_misses_are_answered_as_shown(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(MANIFEST)
    command, shown = terminal("sft validate -")
    assert say(command, tmp_path) == shown


def test_the_row_is_trained_as_shown(tmp_path: Path) -> None:
    made = make_inputs(tmp_path / "demo", size="demo")
    (tmp_path / "mine.jsonl").write_text(ROW)
    assert len(MINE.splitlines()) == 4
    mine = MINE.replace("/home/me/sft-operator/build/demo/run/export", str(made.model)).replace(
        "/home/me/mine.jsonl", f"{tmp_path}/mine.jsonl"
    )
    (tmp_path / "mine.yaml").write_text(mine)
    command, shown = terminal("sft data mine.yaml")
    said = say(command, tmp_path).replace(f"{tmp_path}/mine.jsonl", "/home/me/mine.jsonl")
    # How many tokens a text has depends on the tokenizer, which is made from the standard library of this Python.
    assert re.sub(r"\d+", "N", said) == re.sub(r"\d+", "N", shown)
