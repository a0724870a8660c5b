"""Whatever tenants write, the status that is made of it is one that a real API server takes."""

from __future__ import annotations

import json

from sft_api.fitting import fit_status
from tests.cluster.access import Cluster
from tests.integration.kubernetes_api import kubernetes_api
from tests.integration.operator.scene import MERGE_PATCH, install_crd
from tests.unit.operator.hostile import VALUES
from tests.unit.operator.make import Object
from tests.unit.operator.test_hostile import full_status, hostile_look

PATH = "/apis/sftjob.dev/v1alpha1/namespaces/default/sftjobs"
SEEDS = 600


def test_every_status_is_accepted(api_server: Cluster) -> None:
    install_crd(api_server)
    with kubernetes_api(api_server) as api:
        spec = {
            "model": {"uri": "hf://org/model"},
            "data": {"train": [{"uri": "hf://org/rows"}]},
            "compute": {"nodes": 2, "gpusPerNode": 0},
            "checkpoint": {"uri": "s3://bucket/runs"},
        }
        job = {"apiVersion": "sftjob.dev/v1alpha1", "kind": "SFTJob", "metadata": {"name": "tulu"}, "spec": spec}
        answer = api.request("POST", PATH, json.dumps(job), "application/json")
        assert answer.accepted, answer.body["message"]

        before = full_status()
        statuses = [
            (f"seed {seed}", status) for seed in range(SEEDS) for status in hostile_look(seed, before)[1].statuses
        ]
        statuses += [(f"{place} = {value!r:.40}", fit_status(status)) for place, value, status in _each_place(before)]

        assert len(statuses) > SEEDS / 2
        # Most of them come out as others do: each is sent once.
        patches = {json.dumps({"status": status}, allow_nan=False): where for where, status in statuses}
        for patch, where in patches.items():
            answer = api.request("PATCH", f"{PATH}/tulu/status?dryRun=All", patch, MERGE_PATCH)
            assert answer.accepted, f"{where}: {answer.body['message']}"


def _each_place(status: Object) -> list[tuple[str, object, Object]]:
    """``status`` with every fourth hostile value in each of its fields, one at a time."""
    found = []
    for turn, name in enumerate(status):
        for value in VALUES[turn % 4 :: 4]:
            found.append((name, value, {**status, name: value}))
        if isinstance(status[name], dict):
            for inner in status[name]:
                for value in VALUES[turn % 4 :: 4]:
                    found.append((f"{name}.{inner}", value, {**status, name: {**status[name], inner: value}}))
    return found
