"""The upload at the end of a run: tried again while the hub is away, given up with words, and left when it is asked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sft_api.place import EXPORT_RECORD, HUB_RECORD, HubRecord
from sft_api.progress import Phase
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import HubStatus
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import AccessDeniedError, ConfigError, StopRequested, StorageFullError, StorageUnavailableError
from sft_trainer.export.process import ExportError
from sft_trainer.export.upload_at_end import UploadAtEnd, UploadProcess
from sft_trainer.export.upload_beside import _bytes_read
from sft_trainer.outage import Outage
from sft_trainer.reporting import Reporter
from tests.parity.runs import manifest, resolve

COPY = HubStatus(url="https://hub.example/org/mine", revision="main", commit="c" * 40)


class Uploading:
    """In the place of the process: raises what it is told to, and then has made the copy."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = [*errors]

    def run(self, on_work: Callable[[str], None], look: Callable[[], None]) -> HubStatus:
        on_work("https://hub.example/org/mine")
        look()
        if self.errors:
            raise self.errors.pop(0)
        return COPY


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Passes when somebody sleeps."""
    now = [0.0]
    monkeypatch.setattr("sft_trainer.export.upload_at_end.time.sleep", lambda seconds: now.append(now[-1] + seconds))
    # Which it has from when it was defined on.
    defaults = Outage.__init__.__kwdefaults__
    assert defaults
    monkeypatch.setitem(defaults, "clock", lambda: now[-1])
    return now


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    policy = {"storageDeadlineSeconds": 60}
    export = {"atEnd": True, "hub": {"repository": "org/mine"}}
    return resolve(manifest(tmp_path, tmp_path / "store", export=export, runPolicy=policy))


def upload(config: TrainerConfig, folder: Path, uploader: Uploading) -> tuple[HubStatus | None, Reporter]:
    reporter = Reporter(folder, writes=True)
    return UploadAtEnd(config, reporter, folder / "stop", uploader).run(), reporter


@pytest.mark.usefixtures("clock")
def test_a_copy_that_is_made_at_once_warns_of_nothing(config: TrainerConfig, tmp_path: Path) -> None:
    copy, reporter = upload(config, tmp_path, Uploading())
    assert (copy, reporter.progress.warnings) == (COPY, [])
    assert reporter.progress.phase is Phase.EXPORTING


def test_a_hub_that_is_away_for_a_while_is_waited_for(
    config: TrainerConfig, tmp_path: Path, clock: list[float]
) -> None:
    away = [StorageUnavailableError("away"), ExportError("its process was killed by signal 9")]
    copy, reporter = upload(config, tmp_path, Uploading(*away))
    assert copy == COPY
    assert clock[-1] >= 10
    assert reporter.progress.warnings == [
        "uploaded to org/mine only after 10s: its process was killed by signal 9",
    ]


@pytest.mark.usefixtures("clock")
def test_one_that_stays_away_is_given_up_with_words(config: TrainerConfig, tmp_path: Path) -> None:
    copy, reporter = upload(config, tmp_path, Uploading(*[StorageUnavailableError("away")] * 99))
    assert copy is None
    assert reporter.progress.warnings == [
        "not uploaded to org/mine: tried for 1m0s (runPolicy.storageDeadlineSeconds), at last: away; the model is in "
        f"{config.export_uri}, and sft export --upload with this manifest uploads it"
    ]


@pytest.mark.parametrize("error", [ConfigError("it is public"), StorageFullError("no room"), ValueError()])
def test_what_no_time_mends_is_given_up_at_once(
    config: TrainerConfig, tmp_path: Path, clock: list[float], error: Exception
) -> None:
    copy, reporter = upload(config, tmp_path, Uploading(error))
    assert (copy, clock) == (None, [0.0])
    (warning,) = reporter.progress.warnings
    assert warning.startswith(f"not uploaded to org/mine: {str(error) or 'ValueError: '}; the model is in ")


def test_who_is_asked_to_leave_leaves_also_while_it_waits(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft_trainer.export.upload_at_end.time.sleep", lambda seconds: (tmp_path / "stop").touch())
    with pytest.raises(StopRequested, match="while the export is uploaded"):
        upload(config, tmp_path, Uploading(*[StorageUnavailableError("away")] * 99))
    never = Uploading()
    with pytest.raises(StopRequested):
        upload(config, tmp_path, never)


@pytest.mark.usefixtures("clock")
def test_a_copy_that_is_known_is_not_made_again(config: TrainerConfig, tmp_path: Path) -> None:
    export, word = LocalStore(tmp_path / "store" / "export"), b"of the model"
    assert config.spec.export.hub is not None
    export.put(EXPORT_RECORD, word)
    export.put(HUB_RECORD, HubRecord.of(config.spec.export.hub, word, COPY).encoded())
    copy, _ = upload(config, tmp_path, Uploading(ConfigError("asked")))
    assert copy == COPY


def test_a_bucket_that_hides_what_is_not_there_is_asked_no_more(
    config: TrainerConfig, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(self: LocalStore, key: str, limit: int | None = None) -> bytes:
        raise AccessDeniedError(f"{key}: AccessDenied")

    monkeypatch.setattr(LocalStore, "read", hidden)
    copy, reporter = upload(config, tmp_path, Uploading())
    assert (copy, clock, reporter.progress.warnings) == (COPY, [0.0], [])


def test_what_is_read_is_counted(tmp_path: Path) -> None:
    before = _bytes_read()
    (tmp_path / "file").write_bytes(b"x" * 2**20)
    assert _bytes_read() - before < 2**16
    (tmp_path / "file").read_bytes()
    assert _bytes_read() - before >= 2**20


def test_a_process_is_heard_and_looked_after_while_it_is_silent(config: TrainerConfig, tmp_path: Path) -> None:
    words = [{"work": "u: a"}, {"bytes": 2**21}, {"done": COPY.model_dump()}]
    said = f"json.load(sys.stdin); [print(json.dumps(each)) for each in {words!r}]"
    heard: list[str] = []
    process = UploadProcess(config, ("-c", f"import json, sys\n{said}"))
    assert process.run(heard.append, lambda: None) == COPY
    assert heard == ["u: a", "u: a, 2 MiB read"]

    def asked_to_stop() -> None:
        raise StopRequested("stop")

    with pytest.raises(StopRequested):
        UploadProcess(config, ("-c", "import time; time.sleep(600)")).run(heard.append, asked_to_stop)
    final = "print(json.dumps({'error': 'public', 'outage': False, 'final': True, 'full': False})); sys.exit(1)"
    with pytest.raises(ConfigError, match=r"^public$"):
        UploadProcess(config, ("-c", f"import json, sys\n{final}")).run(heard.append, lambda: None)
