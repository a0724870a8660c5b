"""Copies of an export on the hub, made by the hub's own client: whole, once, and again after whatever went wrong."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from sft_api.place import EXPORT_RECORD, HUB_RECORD, ExportRecord
from sft_api.v1alpha1 import HubSpec, HubStatus
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageUnavailableError, TrainingError
from sft_trainer.export.hub import Repository, upload_error
from sft_trainer.export.uploading import card_for_others, known_copy, upload
from tests.hub_uploads import TOKEN, Fault, UploadHub, serve_uploads

HUB = HubSpec(repository="org/mine")
CARD = "---\nbase_model: org/base\n---\nOf `s3://secret/data/rows` and `hf://org/rows`\n"
WEIGHTS = {f"model-0000{number}-of-00002.safetensors": bytes([number]) * 3000 for number in (1, 2)}
BESIDE = {
    "model.safetensors.index.json": b"{}",
    "config.json": b'{"a": 1}',
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "README.md": CARD.encode(),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[UploadHub]:
    with serve_uploads() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\n")
        monkeypatch.setenv("SFT_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield hub


def export(folder: Path, *, name: str = "run", **files: bytes) -> LocalStore:
    """A finished export, with something of others beside it."""
    store = LocalStore(folder)
    weights = WEIGHTS | {f"{name}.safetensors": content for name, content in files.items()}
    record = ExportRecord(name=name, digest="d" * 64, checkpoint="step-00000003-a00001")
    sizes = {name: len(content) for name, content in weights.items()}
    written = record.model_copy(update={"files": sizes, "beside": [*BESIDE]}).encoded()
    others = {"secrets.json": b"not of the model", "step-00000001/config.json": b"{}"}
    for key, content in {**weights, **BESIDE, **others, EXPORT_RECORD: written}.items():
        store.put(key, content)
    return store


def test_a_repository_gets_the_whole_model_in_one_commit_and_nothing_else(hub: UploadHub, tmp_path: Path) -> None:
    store, told = export(tmp_path), []

    copy = upload(HUB, store, told.append)

    repository = hub.repositories["org/mine"]
    files = repository.files()
    card = b"---\nbase_model: org/base\n---\nOf `s3://\xe2\x80\xa6` and `hf://org/rows`\n"
    wanted = {**WEIGHTS, **BESIDE, EXPORT_RECORD: store.read(EXPORT_RECORD), "README.md": card}
    assert {name: files[name] for name in files if name != ".gitattributes"} == wanted
    assert repository.private
    assert repository.titles == ["initial commit", "Upload the model of run, step-00000003-a00001"]
    assert copy == HubStatus(url=f"{hub.endpoint}/org/mine", revision="main", commit=repository.branches["main"])
    assert any("model-00002-of-00002.safetensors (0 MiB, 2 of 2)" in words for words in told)
    assert known_copy(HUB, store) == copy
    # Another repository, branch or model is another copy
    assert known_copy(HubSpec(repository="org/other"), store) is None
    assert known_copy(HubSpec(repository="org/mine", revision="next"), store) is None
    assert known_copy(HUB, export(tmp_path, name="other")) is None


class Bucket:
    """A store that is no folder of this machine."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_files_of_a_bucket_are_on_this_machine_one_at_a_time(hub: UploadHub, tmp_path: Path) -> None:
    bucket, cache = Bucket(export(tmp_path / "bucket")), tmp_path / "cache" / "uploads"
    most: list[int] = []
    hub.faults.append(Fault("PUT", "/lfs/", 400))
    with pytest.raises(StorageUnavailableError):
        upload(HUB, bucket)  # type: ignore[arg-type]
    assert [path for path in cache.rglob("*") if path.is_file()] == []

    upload(HUB, bucket, lambda words: most.append(sum(path.is_file() for path in cache.rglob("*"))))  # type: ignore[arg-type]

    assert hub.repositories["org/mine"].files().keys() >= {*WEIGHTS, *BESIDE}
    assert [*cache.rglob("part")] == []
    assert set(most) == {0}


def test_what_a_server_wants_in_the_commit_itself_is_in_it_also_from_a_bucket(
    hub: UploadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.hub_uploads._is_large", lambda path: False)

    upload(HUB, Bucket(export(tmp_path / "bucket")))  # type: ignore[arg-type]

    files = hub.repositories["org/mine"].files()
    assert {name: files[name] for name in WEIGHTS} == WEIGHTS


@pytest.mark.parametrize("name", ["config.json", *WEIGHTS])
def test_no_commit_is_made_that_would_lack_a_file(hub: UploadHub, tmp_path: Path, name: str) -> None:
    # Given a repository in which files of that name are ignored
    Repository(HUB, TOKEN).make_ready()
    there = hub.repositories["org/mine"]
    before = there.commit("main", {".gitignore": f"{name}\n".encode()})

    with pytest.raises(ConfigError, match=rf"/org/mine: a .gitignore there leaves out {name}: remove it there"):
        upload(HUB, export(tmp_path))
    assert there.branches["main"] == before


def test_what_is_there_is_neither_sent_nor_committed_again(hub: UploadHub, tmp_path: Path) -> None:
    store = export(tmp_path)
    copy = upload(HUB, store)
    sent = hub.sent()

    # Also where the word that it was done is lost
    store.delete([HUB_RECORD])
    assert upload(HUB, store) == copy
    assert known_copy(HUB, store) == copy
    assert len(hub.repositories["org/mine"].titles) == 2
    assert hub.sent() == sent

    # A file that somebody removed there comes back
    repository = hub.repositories["org/mine"]
    repository.commit("main", {name: raw for name, raw in repository.files().items() if name != "config.json"})
    assert upload(HUB, store).commit != copy.commit
    assert repository.files()["config.json"] == BESIDE["config.json"]
    assert hub.sent() == sent


def test_a_model_of_another_form_is_replaced_and_a_card_stays(
    hub: UploadHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a repository with another model, a card and a file of somebody's own
    first = {"model.safetensors": b"old", "adapter_config.json": b"{}", "adapter_model.safetensors": b"old"}
    upload(HUB, export(tmp_path / "first", name="first"))
    repository = hub.repositories["org/mine"]
    theirs = {"README.md": b"# Written by people\n", "eval.json": b"{}", "model.safetensors.md": b""}
    before = repository.commit("main", {**first, **theirs})
    assert "held another model" not in caplog.text

    upload(HUB, export(tmp_path / "second", name="second"))

    assert repository.files().keys() == {*WEIGHTS, *BESIDE, EXPORT_RECORD, *theirs}
    assert repository.files()["README.md"] == theirs["README.md"]
    assert f"/org/mine held another model: it is in commit {before}" in caplog.text


def test_a_branch_is_made_and_a_public_repository_refused_where_a_private_one_is_asked_for(
    hub: UploadHub, tmp_path: Path
) -> None:
    store = export(tmp_path)
    upload(HubSpec(repository="org/open", private=False, revision="v/2"), store)
    repository = hub.repositories["org/open"]
    assert not repository.private
    assert repository.files("v/2").keys() >= WEIGHTS.keys()
    assert repository.files("main").keys() == {".gitattributes"}
    upload(HubSpec(repository="org/open"), store)

    with pytest.raises(ConfigError, match=r"/org/open is public, and export.hub.private is true"):
        upload(HubSpec(repository="org/open", private=True), store)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET", "/auth-check/write", 503),
        Fault("POST", "/preupload/", "cut"),
        Fault("POST", "/objects/batch", 429),
        Fault("PUT", "/lfs/", 500),
        Fault("PUT", "/lfs/", 403),
        Fault("PUT", "/lfs/", "cut"),
        Fault("POST", "/commit/", 500),
        Fault("POST", "/commit/", "cut"),
        Fault("POST", "/commit/", 401),
        Fault("POST", "/commit/", "lose"),
    ],
    ids=lambda fault: f"{fault.path.strip('/')}-{fault.does}",
)
def test_whatever_goes_wrong_on_the_way_one_commit_has_the_model(
    hub: UploadHub, tmp_path: Path, fault: Fault, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    huggingface_hub.utils.logging.set_verbosity_warning()  # as it does when it is imported
    store = export(tmp_path)
    Repository(HUB, TOKEN).make_ready()
    hub.faults.append(fault)
    expected = AccessDeniedError if fault.does == 401 else StorageUnavailableError
    copy, met = None, []
    while copy is None:
        try:
            copy = upload(HUB, store)
        except TrainingError as error:
            met.append(error)

    assert (hub.faults, [type(error) for error in met]) in (([], []), ([], [expected]))
    assert "Signature" not in str(met)
    assert "Signature" not in caplog.text
    repository = hub.repositories["org/mine"]
    assert len(repository.titles) == 2
    assert repository.branches["main"] == copy.commit
    assert repository.files().keys() >= {*WEIGHTS, *BESIDE}
    # What had arrived was not sent again
    arrived = [digest for digest in hub.sent() if fault.path != "/lfs/"]
    assert len(arrived) == len({*arrived})


def test_who_commits_meanwhile_is_not_written_over_unseen(
    hub: UploadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = export(tmp_path)
    Repository(HUB, TOKEN).make_ready()
    seen = Repository.head

    def then_another(self: Repository) -> object:
        head = seen(self)
        monkeypatch.setattr(Repository, "head", seen)
        upload(HUB, export(tmp_path / "other", name="other"))
        return head

    monkeypatch.setattr(Repository, "head", then_another)
    with pytest.raises(StorageUnavailableError, match="somebody else committed there meanwhile"):
        upload(HUB, store)

    # When it is tried again, then it comes after the other, and both are in the history
    upload(HUB, store)
    titles = hub.repositories["org/mine"].titles
    assert [title.split()[4].strip(",") for title in titles[1:]] == ["other", "run"]


def test_who_may_not_write_there_is_told_what_to_change(
    hub: UploadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = r"/org/mine.*set model.tokenSecretRef \(HF_TOKEN with sft run\) to a token that may write there"
    with pytest.raises(AccessDeniedError, match=wanted):
        Repository(HUB, "hf_read").make_ready()
    hub.repositories.clear()
    upload(HubSpec(repository="org/mine", private=False), export(tmp_path))
    with pytest.raises(AccessDeniedError, match=wanted):
        Repository(HUB, "hf_read").make_ready()
    assert "hf_read" not in str(hub.asked)

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(AccessDeniedError, match=f"nobody may write to .*{wanted}"):
        Repository(HUB, None).make_ready()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE .* forbids asking the hub.*or leave export.hub out"):
        Repository(HUB, TOKEN).make_ready()


def test_a_hub_that_takes_what_it_is_asked_and_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft_trainer.export.hub.ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        # Who waits for longer is cut off, and told otherwise.
        cut = threading.Timer(20.0, silent.close)
        cut.start()
        with pytest.raises(StorageUnavailableError, match=r"/org/mine: the hub does not answer .*ReadTimeout"):
            Repository(HUB, TOKEN).make_ready()
        cut.cancel()
    # Files and commits may take long
    assert huggingface_hub.get_session().timeout.read is None


def test_only_a_whole_model_whose_files_are_known_is_uploaded(hub: UploadHub, tmp_path: Path) -> None:
    store = export(tmp_path)
    record = json.loads(store.read(EXPORT_RECORD))
    store.put(EXPORT_RECORD, json.dumps({**record, "beside": []}).encode())
    with pytest.raises(ConfigError, match="exported by an older version"):
        upload(HUB, store)

    store.put(EXPORT_RECORD, json.dumps({**record, "beside": ["../../etc/passwd"]}).encode())
    with pytest.raises(ConfigError, match="is no key"):
        upload(HUB, store)

    store.delete(["config.json"])
    with pytest.raises(ConfigError, match=f"no whole model in file://{tmp_path}"):
        upload(HUB, store)
    assert not [request for request in hub.asked if "/commit/" in request]


def test_no_word_has_a_login_or_what_signs_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://user:secret@mirror.example/hub/")
    assert Repository(HUB, TOKEN).url == "https://mirror.example/hub/org/mine"
    error = OSError("no answer of https://user:secret@mirror.example/x?X-Amz-Signature=secret&a=b now")
    assert "https://mirror.example/x now" in str(upload_error(error, "u"))
    assert "secret" not in str(upload_error(error, "u"))


def test_a_card_for_others_names_no_places_but_the_hub() -> None:
    card = "`pvc://claim/a/b` s3://b/c, file:///home/me/rows\nhf://org/rows@main"
    assert card_for_others(card) == "`pvc://…` s3://… file://…\nhf://org/rows@main"
