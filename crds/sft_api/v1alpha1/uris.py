"""URIs of models, data and stores: what they may be, one name for one place, and what was meant by near misses."""

from typing import Annotated

from pydantic import Field

from .base import Edited, NearMiss, Rule, matches

CLAIMS_FOLDER = "/mnt/pvc"
"""Where pods find the volumes of ``pvc://claim``: ``/mnt/pvc/claim``."""

_HUB = "https://huggingface.co/"
_REVISION = r"@([^/@]+|refs/(pr/[0-9]+|convert/[^/@]+))"
"""A commit, a branch, a tag, or what the hub itself keeps below refs/: a pull request, a data set made into parquet."""
_PATHS = (
    NearMiss(r"^file://[^/.~][^/]*(/[^/]+)*$", ("did you mean ", Edited(replace=(("file://", "file:///"),)), "?")),
    NearMiss(r"^/[^/]+(/[^/]+)*$", ("did you mean ", Edited(prefix="file://"), "?")),
    NearMiss(
        r"^(file://)?([.]{1,2}|~)(/|$)", ("only an absolute path says the same everywhere: file:///absolute/path",)
    ),
    NearMiss(
        r"(?i)^[^:]*[.]((jsonl?|ndjson|csv|tsv)([.](gz|zst|bz2))?|parquet|arrow|safetensors)$",
        ("only an absolute path says the same everywhere: file:///absolute/path",),
    ),
)
_HUB_NAMES = (
    NearMiss(
        rf"^({_HUB.replace('.', '[.]')}|hf://)(datasets/)?[^/@]+/[^/@]+(/tree/[^/@]+)?$",
        ("did you mean ", Edited(replace=((_HUB, "hf://"), ("hf://datasets/", "hf://"), ("/tree/", "@"))), "?"),
    ),
    NearMiss(r"^[A-Za-z0-9][-A-Za-z0-9_.]*/[-A-Za-z0-9_.]+(@[^/@]+)?$", ("did you mean ", Edited(prefix="hf://"), "?")),
)

_NOT_ONE_NAME = r"[^:/]//|:////|/[.]{1,2}(/|$)"
_ONE_NAME = Rule(
    f"!self.matches('{_NOT_ONE_NAME}')",
    "must have no empty part and no part . or .. between its slashes: one place has one name",
    lambda uri: matches(_NOT_ONE_NAME, "").check(uri) is False,
)
_NAMED_CLAIM = "^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/|$)"
_CLAIM_NAME = Rule(
    f"!self.startsWith('pvc://') || self.matches('{_NAMED_CLAIM}')",
    "must name the claim in lower-case letters, digits, - and .: Kubernetes has no others",
    lambda uri: not uri.startswith("pvc://") or matches(_NAMED_CLAIM, "").check(uri),
)
_NO_CLAIMS_BY_PATH = Rule(
    f"!(self + '/').startsWith('file://{CLAIMS_FOLDER}/')",
    f"must name the claim: pvc://claim/path is what pods find in {CLAIMS_FOLDER}/claim/path",
    lambda uri: not f"{uri}/".startswith(f"file://{CLAIMS_FOLDER}/"),
)

ModelUri = Annotated[
    str,
    Field(max_length=1024),
    matches(
        rf"^(hf://[^/@]+/[^/@]+({_REVISION})?|s3://[^/]+/.+|pvc://[^/]+/.+|file:///.+)$",
        "must be hf://org/name[@revision], s3://bucket/prefix, pvc://claim/path or file:///absolute/path",
        *_PATHS,
        *_HUB_NAMES,
    ),
    _ONE_NAME,
    _CLAIM_NAME,
    _NO_CLAIMS_BY_PATH,
]
DataUri = ModelUri
StorageUri = Annotated[
    str,
    Field(max_length=1024),
    matches(
        r"^(s3://[^/]+(/.*)?|pvc://[^/]+/.+|file:///.+)$",
        "must be s3://bucket/prefix, pvc://claim/path or file:///absolute/path",
        *_PATHS,
        NearMiss("^hf://", ("the hub holds no checkpoints, and of an export a copy: export.hub.repository",)),
    ),
    _ONE_NAME,
    _CLAIM_NAME,
    _NO_CLAIMS_BY_PATH,
]

_REPOSITORY = "[A-Za-z0-9][-A-Za-z0-9_.]*/[A-Za-z0-9][-A-Za-z0-9_.]*"
_NOT_ON_THE_HUB = "--|[.][.]|[-.]/|([-.]|[.]git)$"
HubRepository = Annotated[
    str,
    Field(max_length=160),
    matches(
        f"^{_REPOSITORY}$",
        "must be org/name, a repository for models on the hub",
        NearMiss(
            rf"^({_HUB.replace('.', '[.]')}|hf://){_REPOSITORY}$",
            ("did you mean ", Edited(replace=((_HUB, ""), ("hf://", ""))), "?"),
        ),
        NearMiss(
            rf"^({_HUB.replace('.', '[.]')}|hf://)?{_REPOSITORY}(@|/tree/)[^@]+$",
            ("the branch is export.hub.revision",),
        ),
        NearMiss("^[A-Za-z0-9][-A-Za-z0-9_.]*$", ("the organisation, or user, is missing",)),
    ),
    Rule(
        f"!self.matches('{_NOT_ON_THE_HUB}')",
        "must have no -- and no .., and no -, . or .git at an end: the hub takes no such names",
        lambda name: matches(_NOT_ON_THE_HUB, "").check(name) is False,
    ),
]
HubBranch = Annotated[
    str,
    Field(max_length=100),
    matches(
        "^[A-Za-z0-9][-A-Za-z0-9_.]*(/[A-Za-z0-9][-A-Za-z0-9_.]*)*$",
        "must be the name of a branch: letters, digits, -, _ and . between slashes",
    ),
]


def within(uri: str, folder: str) -> bool:
    """Whether ``uri`` is ``folder`` or below it; both as the rules above want them, with or without a last slash."""
    return f"{uri}/".startswith(folder if folder.endswith("/") else f"{folder}/")


def overlap(one: str, other: str) -> bool:
    """Whether what is written to one of the two may be written into the other."""
    return within(one, other) or within(other, one)


def within_in_cel(uri: str, folder: str) -> str:
    """``within`` of two CEL expressions."""
    return f"({uri} + '/').startsWith({folder}.endsWith('/') ? {folder} : {folder} + '/')"


def overlap_in_cel(one: str, other: str) -> str:
    """``overlap`` of two CEL expressions."""
    return f"({within_in_cel(one, other)} || {within_in_cel(other, one)})"
