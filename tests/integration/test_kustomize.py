"""What Kustomize is told of an SFTJob: where it names other objects and its image."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_api.crd import resource_schema
from sft_api.generate import ROOT
from tests.cluster.binaries import binary

CONFIGURATION = ROOT / "examples" / "kustomize.yaml"
JOB = """\
apiVersion: sftjob.dev/v1alpha1
kind: SFTJob
metadata: {name: tune}
spec:
  model: {uri: hf://org/model, tokenSecretRef: {name: hub, key: token}}
  data: {train: [{uri: hf://org/rows}]}
  compute:
    image: trainer:1
    imagePullSecrets: [registry]
    serviceAccountName: runner
    env:
      - {name: A, valueFrom: {secretKeyRef: {name: hub, key: token}}}
      - {name: B, valueFrom: {configMapKeyRef: {name: tracker, key: url}}}
  checkpoint: {s3: {credentialsSecretRef: store}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: runner}
"""
KUSTOMIZATION: dict[str, Any] = {
    "resources": ["job.yaml"],
    "configurations": ["kustomize.yaml"],
    "namePrefix": "mine-",
    "images": [{"name": "trainer", "newName": "registry.example/you/trainer", "newTag": "2"}],
    "secretGenerator": [{"name": name, "literals": ["token=a"]} for name in ("hub", "registry", "store")],
    "configMapGenerator": [{"name": "tracker", "literals": ["url=b"]}],
    "generatorOptions": {"disableNameSuffixHash": True},
}


def test_names_of_other_objects_and_the_image_are_followed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "kustomize.yaml").write_text(CONFIGURATION.read_text())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(KUSTOMIZATION))

    done = subprocess.run(
        [str(binary("kubectl")), "kustomize", str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    (job,) = [item for item in yaml.safe_load_all(done.stdout) if item["kind"] == "SFTJob"]
    spec = job["spec"]
    assert spec["model"]["tokenSecretRef"] == {"name": "mine-hub", "key": "token"}
    assert spec["checkpoint"]["s3"]["credentialsSecretRef"] == "mine-store"
    assert spec["compute"]["imagePullSecrets"] == ["mine-registry"]
    assert spec["compute"]["serviceAccountName"] == "mine-runner"
    assert [variable["valueFrom"] for variable in spec["compute"]["env"]] == [
        {"secretKeyRef": {"name": "mine-hub", "key": "token"}},
        {"configMapKeyRef": {"name": "mine-tracker", "key": "url"}},
    ]
    assert spec["compute"]["image"] == "registry.example/you/trainer:2"


def told() -> list[str]:
    configuration = yaml.safe_load(CONFIGURATION.read_text())
    fields = [
        *configuration["images"],
        *(field for kind in configuration["nameReference"] for field in kind["fieldSpecs"]),
    ]
    assert {field["kind"] for field in fields} == {"SFTJob"}
    return [field["path"] for field in fields]


@pytest.mark.parametrize("path", told())
def test_every_field_that_it_is_told_of_is_one(path: str) -> None:
    schema = resource_schema()
    for name in path.split("/"):
        schema = schema.get("items", schema)["properties"][name]

    assert schema.get("items", schema)["type"] == "string"


def test_it_is_told_of_every_reference_to_a_secret_or_config_map() -> None:
    def references(schema: dict[str, Any], path: str) -> set[str]:
        found = set()
        for name, field in schema.get("properties", {}).items():
            where = f"{path}/{name}"
            if name.lower().endswith(("secretref", "keyref", "secrets")):
                found.add(where if field["type"] != "object" else f"{where}/name")
            else:
                found |= references(field.get("items", field), where)
        return found

    assert references(resource_schema()["properties"]["spec"], "spec") <= set(told())
