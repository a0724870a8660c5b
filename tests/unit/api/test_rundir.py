"""The files between a supervisor and its workers: whoever writes at once, each is whole."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from sft_api.progress import Activity, Phase
from sft_api.rundir import write_also_when_full, write_atomically


@pytest.mark.parametrize("write", [write_atomically, write_also_when_full])
def test_threads_that_write_at_once_do_not_take_each_others_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, BaseModel], object]
) -> None:
    path = tmp_path / "activity.json"
    replace = Path.replace

    def interrupted(temporary: Path, target: Path) -> Path:
        # Another thread of this process writes the same file between this one's content and its name.
        monkeypatch.setattr(Path, "replace", replace)
        other = threading.Thread(target=write, args=(path, Activity(phase=Phase.SAVING)))
        other.start()
        other.join()
        return temporary.replace(target)

    monkeypatch.setattr(Path, "replace", interrupted)
    write(path, Activity(phase=Phase.TRAINING, step=3))
    found = Activity.model_validate_json(path.read_text())
    assert (found.phase, found.step) == (Phase.TRAINING, 3)
    assert list(tmp_path.iterdir()) == [path]
