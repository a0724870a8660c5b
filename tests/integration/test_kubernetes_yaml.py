"""The API server reads YAML as the CLI does: the same cases, through an object that takes anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sft_cli.kubernetes_yaml import read_documents
from tests.cluster.access import Cluster
from tests.integration.kubernetes_api import KubernetesApi, kubernetes_api
from tests.unit.cli.test_kubernetes_yaml import SCALARS

ANYTHING = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "anythings.test.sftjob.dev"},
    "spec": {
        "group": "test.sftjob.dev",
        "names": {"kind": "Anything", "plural": "anythings"},
        "scope": "Cluster",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
HEADER = "apiVersion: test.sftjob.dev/v1\nkind: Anything\nmetadata: {name: a}\n"


@pytest.fixture(scope="module")
def api(api_server: Cluster) -> Iterator[KubernetesApi]:
    api_server.apply(ANYTHING)
    api_server.wait_until_served("anythings.test.sftjob.dev")
    with kubernetes_api(api_server) as opened:
        yield opened
    api_server.kubectl("delete", "crd", "anythings.test.sftjob.dev", "--wait=false")


def read_by_server(api: KubernetesApi, text: str) -> Any:
    answer = api.request("POST", "/apis/test.sftjob.dev/v1/anythings?dryRun=All", HEADER + text, "application/yaml")
    assert answer.accepted, answer.body
    return answer.body["content"]


def test_scalars(api: KubernetesApi) -> None:
    items = [text for text, value in SCALARS.items() if value is not None]
    text = "content:\n" + "".join(f"- {item}\n" for item in items)

    by_server = read_by_server(api, text)

    assert by_server == read_documents(HEADER + text)[0]["content"]
    assert [type(item) for item in by_server] == [type(SCALARS[item]) for item in items]


@pytest.mark.parametrize(
    "content",
    [
        "{1: a, true: b, 1.5: c, no: d, '2': e}",
        "{base: &base {a: 1, b: 2}, other: {<<: *base, b: 3}, before: {b: 4, <<: [*base, {a: 5, c: 6}]}}",
        '"a\\u00fc\\tb"',
        "|\n  a\n  b\n",
        ">-\n  a\n  b\n",
    ],
)
def test_structures(api: KubernetesApi, content: str) -> None:
    text = f"content: {content}"

    assert json.dumps(read_by_server(api, text), sort_keys=True) == json.dumps(
        read_documents(HEADER + text)[0]["content"], sort_keys=True
    )
