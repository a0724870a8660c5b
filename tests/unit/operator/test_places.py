"""Whose folder of the platform's store a place lies in."""

from __future__ import annotations

import pytest

from sft_api.v1alpha1 import S3Spec
from sft_operator.config import StoreSettings
from sft_operator.decisions.places import PlaceNotAllowed, check_place, is_readable

STORE = StoreSettings(uri="s3://platform/sft/", s3=S3Spec(endpoint="http://minio:9000", credentials_secret_ref="keys"))
BUCKET = StoreSettings(uri="s3://platform", s3=STORE.s3)
OWN_SERVER = S3Spec(endpoint="http://elsewhere:9000")
OWN_KEYS = S3Spec(endpoint="http://MINIO:9000/", credentials_secret_ref="mine")

MINE = [
    "s3://platform/sft/team/run",
    "s3://platform/sft/team/run/",
    "s3://platform/sft/team",
    "s3://platform/sft/team/a..b/.c",
]
OF_OTHERS = [
    "s3://platform/sft/other/run",
    "s3://platform/sft/teams/run",
    "s3://platform/sft/tea",
    "s3://platform/sft",
    "s3://platform/sft/",
    "s3://platform/sft/team/../other/run",
    "s3://platform/sft/./other/run",
    "s3://platform//sft/other/run",
    "s3://platform/sft//other/run",
    "s3://platform/x/../sft/other",
    "s3://platform/sft/%6fther/run",
    "s3://platform/sft/team/%2e%2e/other",
    "s3://platform/sft/team/%252e%252e/other",
    "s3://platform/sft/team/..%2fother",
    "s3://platform/sft/team\\..\\other",
]
NOBODYS = [
    "s3://platform/sft-of-someone-else/team/run",
    "s3://platform/team/run",
    "s3://elsewhere/sft/other/run",
    "pvc://platform/sft/other",
]
ODD = ["s3://platform/sft/team/lr%3D1", "s3://platform/sft/team//run", "s3://platform/sft/team/./run"]


@pytest.mark.parametrize("uri", MINE)
def test_the_operator_reads_in_the_folder_of_the_jobs_namespace(uri: str) -> None:
    assert is_readable(uri, S3Spec(), STORE, "team")
    assert is_readable(uri, STORE.s3, STORE, "team")
    check_place("spec.checkpoint.uri", uri, STORE.s3, STORE, "team")


@pytest.mark.parametrize("uri", [*OF_OTHERS, *NOBODYS, *ODD])
def test_and_nowhere_else(uri: str) -> None:
    assert not is_readable(uri, S3Spec(), STORE, "team")


@pytest.mark.parametrize("s3", [OWN_SERVER, OWN_KEYS, None])
def test_nor_where_the_job_has_a_server_or_credentials_of_its_own(s3: S3Spec | None) -> None:
    assert not is_readable(MINE[0], s3, STORE, "team")


@pytest.mark.parametrize("uri", OF_OTHERS)
@pytest.mark.parametrize("s3", [STORE.s3, OWN_KEYS])
def test_a_place_of_another_namespace_is_refused(uri: str, s3: S3Spec) -> None:
    with pytest.raises(PlaceNotAllowed, match="name a place below s3://platform/sft/team/") as caught:
        check_place("spec.export.uri", uri, s3, STORE, "team")

    assert str(caught.value).startswith(f"spec.export.uri {uri} lies in the platform's store")


@pytest.mark.parametrize("uri", [*NOBODYS, *ODD])
def test_what_is_not_in_the_platforms_store_is_the_users_own_affair(uri: str) -> None:
    check_place("spec.checkpoint.uri", uri, STORE.s3, STORE, "team")


def test_nor_is_the_same_name_on_another_server() -> None:
    check_place("spec.checkpoint.uri", OF_OTHERS[0], OWN_SERVER, STORE, "team")


def test_a_whole_bucket_is_divided_like_a_folder() -> None:
    assert is_readable("s3://platform/team/run", S3Spec(), BUCKET, "team")
    assert not is_readable("s3://platform/other/run", S3Spec(), BUCKET, "team")
    with pytest.raises(PlaceNotAllowed):
        check_place("spec.checkpoint.uri", "s3://platform", BUCKET.s3, BUCKET, "team")
