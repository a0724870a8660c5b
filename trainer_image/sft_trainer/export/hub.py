"""A repository on the hub: what lies in it, and a commit that puts a whole model there.

All of this is asked of ``huggingface_hub``, which is imported where it is needed.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_api.place import EXPORT_ADAPTER_CONFIG, EXPORT_CONFIG
from sft_api.v1alpha1 import HubSpec
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageUnavailableError, TrainingError
from sft_trainer.fetch import FOR_GOOD, clean_token, disk_cause, disk_error, hub_endpoint, hub_words
from sft_trainer.versions import is_left_out

log = logging.getLogger("sft_trainer")

_OF_A_MODEL = re.compile(
    rf"(model(-\d{{5}}-of-\d{{5}})?|adapter_model)\.safetensors(\.index\.json)?|{re.escape(EXPORT_CONFIG)}"
    rf"|{re.escape(EXPORT_ADAPTER_CONFIG)}"
)
"""Files by which a model is found, and loaded: one of another model beside these would be taken for theirs."""
_CHANGED_MEANWHILE = (409, 412)
"""What the hub answers to a commit behind which the branch has moved."""
_SIGNED = re.compile(r"(https?://[^\s?]+)\?[^\s'\"]*")
_LOGIN = re.compile(r"(https?://)[^\s/@]+@")
ANSWER_SECONDS = 60.0
"""In which a hub says whether it may be written to; the library itself would wait forever."""
_WHO_MAY_WRITE = "model.tokenSecretRef (HF_TOKEN with sft run) to a token that may write there"


@dataclass(frozen=True)
class Head:
    """The newest commit of a branch."""

    commit: str
    blobs: Mapping[str, str]
    """Git's name of the content of each file, by its path."""
    sizes: Mapping[str, int]
    """Bytes of each file."""


class Repository:
    """The one that a run uploads to. What is asked of it raises TrainingErrors."""

    def __init__(self, spec: HubSpec, token: str | None) -> None:
        """``token`` may be None where somebody has logged in on this machine."""
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils.logging import set_verbosity

        # Its warnings quote whole URLs, with what they are signed with.
        set_verbosity(logging.ERROR)
        self._spec = spec
        self._token = clean_token(token)
        endpoint = hub_endpoint() or constants.ENDPOINT
        self._api = HfApi(token=self._token, endpoint=endpoint)
        self.url = f"{_without_secrets(endpoint)}/{spec.repository}"
        """Without what is secret."""

    def make_ready(self) -> None:
        """Make repository and branch where they are not there.

        Raises AccessDeniedError where the token may not write there, ConfigError where the repository is not what was
        asked for, StorageUnavailableError where the hub does not answer.
        """
        from huggingface_hub import constants, get_session, get_token

        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"export.hub: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids asking the hub, and {self.url} cannot "
                "be written: unset it, or leave export.hub out"
            )
        if not (self._token or get_token()):
            raise AccessDeniedError(f"export.hub: nobody may write to {self.url} without a token: set {_WHO_MAY_WRITE}")
        session = get_session()
        unlimited, session.timeout = session.timeout, ANSWER_SECONDS
        try:
            with _told(self.url):
                self._make()
        finally:
            session.timeout = unlimited

    def _make(self) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        name, private = self._spec.repository, self._spec.private
        try:
            self._api.auth_check(name, write=True)
        except HfHubHTTPError as error:
            # To strangers a private repository is not there; and some mirrors have no such check.
            if error.response.status_code not in (401, 404):
                raise
            self._api.create_repo(name, private=private is not False, exist_ok=True)
        if private and self._api.model_info(name, timeout=ANSWER_SECONDS).private is False:
            raise ConfigError(
                f"{self.url} is public, and export.hub.private is true: make it private there, name another "
                "repository, or leave export.hub.private out"
            )
        if self._spec.revision is not None:
            self._api.create_branch(name, branch=self._spec.branch, exist_ok=True)

    def head(self) -> Head:
        """What lies in the branch now."""
        from huggingface_hub.hf_api import RepoFile

        name = self._spec.repository
        with _told(self.url):
            commit = self._api.model_info(name, revision=self._spec.branch).sha
            if commit is None:
                raise StorageUnavailableError(f"{self.url}: the hub names no commit of {self._spec.branch}")
            tree = self._api.list_repo_tree(name, recursive=True, revision=commit)
            files = [entry for entry in tree if isinstance(entry, RepoFile)]
        return Head(commit, {file.path: file.blob_id for file in files}, {file.path: file.size for file in files})

    def send(self, files: Mapping[str, str | bytes]) -> list[Any]:
        """The operations that add ``files``, by their names there: the content of each, or the path of a file.

        What is large is sent now, where the hub does not have it yet, and may be removed here then. Raises ConfigError
        for those that a .gitignore of the repository names: the commit would lack them, and nobody be told.
        """
        from huggingface_hub import CommitOperationAdd

        with _told(self.url):
            additions = [CommitOperationAdd(name, content) for name, content in files.items()]
            self._api.preupload_lfs_files(self._spec.repository, additions=additions, revision=self._spec.branch)
            if ignored := [each.path_in_repo for each in additions if is_left_out(each)]:
                raise ConfigError(f"{self.url}: a .gitignore there leaves out {', '.join(ignored)}: remove it there")
            for addition in additions:
                # What the commit itself is to bring, as this server wants it, is still a path.
                if isinstance(path := addition.path_or_fileobj, str):
                    addition.path_or_fileobj = Path(path).read_bytes()
        return additions

    def commit(self, additions: Sequence[Any], head: Head, title: str, text: str) -> str:
        """Make the model of ``additions`` the one in the branch, in one commit right behind ``head``; its id.

        Raises StorageUnavailableError also where somebody else has committed meanwhile.
        """
        from huggingface_hub import CommitOperationDelete

        names = {each.path_in_repo for each in additions}
        models = {name for name in head.sizes if _OF_A_MODEL.fullmatch(name)}
        if models:
            log.warning("%s held another model: it is in commit %s", self.url, head.commit)
        with _told(self.url):
            made = self._api.create_commit(
                self._spec.repository,
                [*additions, *map(CommitOperationDelete, sorted(models - names))],
                commit_message=title,
                commit_description=text,
                revision=self._spec.branch,
                parent_commit=head.commit,
            )
        return made.oid


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Around calls of the library: what it raises is said as a TrainingError about the repository at ``url``."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # the library raises many classes, of three HTTP libraries
        raise upload_error(error, url) from error


def upload_error(error: Exception, url: str) -> TrainingError:
    """What an error of the hub's library, or of the disk, means for an upload to the repository at ``url``."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # A RuntimeError is about bytes that were sent to where the hub had said: what that server answers says nothing of
    # the token.
    cause: BaseException | None = None if isinstance(error, RuntimeError) else error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    status = cause.response.status_code if cause is not None else 0
    said = _without_secrets(hub_words(cause) if cause is not None else "")
    if status in (401, 403):
        return AccessDeniedError(f"{url}: the hub refuses this token{said}: set {_WHO_MAY_WRITE}")
    if status == 404:
        return AccessDeniedError(
            f"{url} is not on the hub, or this token may not see it{said}: check export.hub.repository, or set "
            f"{_WHO_MAY_WRITE}"
        )
    if status in _CHANGED_MEANWHILE:
        return StorageUnavailableError(f"{url}: somebody else committed there meanwhile{said}")
    if status in FOR_GOOD or isinstance(error, HFValidationError):
        words = said or f" ({_without_secrets(str(error))})"
        return ConfigError(f"{url}: the hub refuses what it was asked{words}")
    if disk := disk_cause(error):
        return disk_error(disk, constants.HF_HOME)
    return StorageUnavailableError(
        f"{url}: the hub does not answer as it should ({type(error).__name__}: {_without_secrets(str(error))})"
    )


def _without_secrets(text: str) -> str:
    """``text`` in one line, and without what is secret in URLs: logins, and the signatures of those for one upload."""
    return " ".join(_LOGIN.sub(r"\1", _SIGNED.sub(r"\1", text)).split())
