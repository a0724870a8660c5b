"""The manifests that users copy: in examples/, the README and the documentation."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from sft_api.generate import ROOT
from sft_cli.manifest import load_manifest
from tests.e2e.documented import blocks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def manifests() -> dict[str, str]:
    """Every whole SFTJob, by where it stands."""
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.yaml"))}
    texts = {name: text for name, text in files.items() if "\nkind: SFTJob\n" in text}
    for page in PAGES:
        for number, block in enumerate(FENCED.findall(page.read_text(encoding="utf-8")), start=1):
            if "\nkind: SFTJob\n" in block:
                texts[f"{Path(page).relative_to(ROOT)}, block {number}"] = block
    return texts


@pytest.mark.parametrize("text", manifests().values(), ids=manifests())
def test_every_example_is_valid_and_asks_for_cpu_and_memory(text: str) -> None:
    job = load_manifest(text)

    places = [job.spec.model.uri, *(source.uri for source in job.spec.data.train)]
    if all(place.startswith("file:///home/me/") for place in places):
        return  # for `sft run` on this machine, where nothing is asked for
    assert {"cpu", "memory"} <= job.spec.compute.resources.requests.keys()
    assert "memory" in job.spec.compute.resources.limits


def test_there_are_examples() -> None:
    assert {"quickstart.yaml", "demo.yaml", "README.md, block 1"} <= manifests().keys()


def test_the_quickstart_goes_to_the_endpoint_and_region_that_were_exported() -> None:
    """The page's own sed; the endpoint has a region in its name, which is another word than that of the manifest."""
    (sed,) = [
        command for block in blocks(ROOT / "docs/getting-started.md") for command in block if command.startswith("sed ")
    ]
    mine = {"BUCKET": "mine", "S3_ENDPOINT": "https://s3.us-east-1.amazonaws.com", "AWS_REGION": "eu-central-1"}
    done = subprocess.run(
        ["bash", "-c", sed.replace("kubectl apply -f -", "cat")],
        cwd=ROOT,
        env=os.environ | mine,
        capture_output=True,
        text=True,
        check=True,
    )

    job = load_manifest(done.stdout)
    assert job.spec.checkpoint.s3.endpoint == mine["S3_ENDPOINT"]
    assert job.spec.checkpoint.s3.region == mine["AWS_REGION"]
    places = [job.spec.model.uri, job.spec.checkpoint.uri, *(source.uri for source in job.spec.data.train)]
    assert all(place.startswith("s3://mine/quickstart/") for place in places)
