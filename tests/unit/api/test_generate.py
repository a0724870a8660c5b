"""The generated files: what is in them, and that a forgotten `make generate` is noticed."""

import re
from pathlib import Path

import pytest
import yaml

from sft_api.crd import custom_resource_definition, resource_schema
from sft_api.generate import chart_template, differing_files, generated_files, main
from sft_api.reference import reference_page
from sft_cli.remedies import field_paths

ROOT = Path(__file__).parents[3]


def test_committed_files_are_what_the_models_say() -> None:
    assert main(["--check"]) == 0


def test_a_forgotten_generate_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], root=tmp_path) == 0
    assert main(["--check"], root=tmp_path) == 0
    page = tmp_path / "docs/reference/sftjob.md"
    page.write_text(page.read_text().replace("SFTJob", "Job"))
    (tmp_path / "charts/sft-operator/templates/crd.yaml").unlink()

    assert main(["--check"], root=tmp_path) == 1
    assert differing_files(tmp_path) == ["charts/sft-operator/templates/crd.yaml", "docs/reference/sftjob.md"]
    assert "docs/reference/sftjob.md is not what the models say: run `make generate`" in capsys.readouterr().err


def test_what_kubectl_explains_in_getting_started_is_what_the_crd_says() -> None:
    page = (ROOT / "docs/getting-started.md").read_text()
    told = page.partition("kubectl explain sftjob.spec.data\n")[2].partition("  …\n```")[0]
    fields = resource_schema()["properties"]["spec"]["properties"]["data"]["properties"]
    first = sorted(fields)[:4]

    assert [
        line.split()[0] for line in told.partition("FIELDS:")[2].splitlines() if "\t<" in line or " <" in line
    ] == first
    for name in first:
        assert fields[name]["description"] in " ".join(told.split())
        assert ", ".join(fields[name].get("enum", ())) in told


def test_every_field_that_a_page_names_is_there() -> None:
    """A page once told platform teams of a field that lets code of models run; there never was one."""
    spec = resource_schema()["properties"]["spec"]
    known = set(field_paths(spec, "spec"))
    known = {path.removeprefix("spec.").replace("[]", "") for path in known} | {"model.norm"}  # a layer
    free = ("compute.resources.", "compute.nodeSelector.")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/reference").glob("*.md")]

    named = {
        (page.name, re.sub(r"\[\d+\]", "", path))
        for page in pages
        for path in re.findall(r"`((?:[a-zA-Z]+(?:\[\d+\])?)(?:\.[a-zA-Z0-9]+(?:\[\d+\])?)+)[`:=]", page.read_text())
        if path.partition(".")[0] in spec["properties"]
    }

    assert len(named) > 100
    assert [(page, path) for page, path in sorted(named) if path not in known and not path.startswith(free)] == []


def test_generation_is_deterministic() -> None:
    assert generated_files() == generated_files()


def test_the_crd_file_is_the_crd() -> None:
    assert yaml.safe_load(generated_files()["crds/sftjob.dev_sftjobs.yaml"]) == custom_resource_definition()


def test_the_chart_installs_the_same_crd_and_keeps_it() -> None:
    definition = custom_resource_definition()
    text = generated_files()["charts/sft-operator/templates/crd.yaml"]
    lines = text.splitlines()

    assert lines[0] == "{{- if .Values.crds.install }}"
    assert lines[-1] == "{{- end }}"
    template = yaml.safe_load("\n".join(lines[1:-1]))
    assert template["metadata"].pop("annotations") == {
        "helm.sh/resource-policy": "keep",
        "argocd.argoproj.io/sync-options": "Prune=false",
    }
    assert template == definition


def test_double_braces_of_the_models_are_no_business_of_helm() -> None:
    template = chart_template({"metadata": {"name": "a"}, "description": "as {{ messages }} in Jinja"})

    assert """description: as {{ "{{" }} messages }} in Jinja""" in template


def test_the_reference_has_every_field_its_type_default_bounds_and_rules() -> None:
    page = reference_page(resource_schema())
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| `")}

    assert rows["`maxLength`"] == (
        "| `maxLength` | integer | `4096` | ≥ 8; ≤ 1,048,576 | Longest example, in tokens. |"
    )
    assert "| list: [object](#specdatatrain) |" in rows["`train` **required**"]
    assert rows["`betas`"].startswith("| `betas` | list: number | `[0.9, 0.999]` | 2 items |")
    assert "| number | `1e-08` | > 0; ≤ 1 |" in rows["`eps`"]
    assert "- give training.steps or training.epochs, not both" in page
    assert "`spec.runPolicy.terminationGracePeriodSeconds`" in page
    anchors = {
        line.removeprefix("## ").replace(".", "").replace("[]", "").lower()
        for line in page.splitlines()
        if line.startswith("## ")
    }
    links = {part.split(")")[0] for part in page.split("(#")[1:]}
    assert links <= anchors
