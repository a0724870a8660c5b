"""What the chart brings for Prometheus: alerts and a dashboard of series that there are, and what scrapes them."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import promql_parser as promql
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sft_api.failures import FailureClass
from sft_api.generate import ROOT
from sft_api.progress import Phase, Progress, StorageOutage
from sft_api.v1alpha1 import SFTJobStatus
from sft_api.v1alpha1.status import State
from sft_operator.builders.job import build_job
from sft_operator.config import PodSettings, Settings
from sft_operator.decisions.status import write_status
from sft_operator.metrics import OperatorMetrics
from sft_trainer.supervisor.gpus import GpuFigures
from sft_trainer.supervisor.host import HostFigures
from sft_trainer.supervisor.metrics import render, render_machine
from sft_trainer.supervisor.monitor import Sample
from sft_trainer.supervisor.protocol import RankTimes
from tests.cluster.binaries import promtool
from tests.integration.operator.scene import CHART, OPERATOR_NAMESPACE, Object, helm, render_chart
from tests.unit.operator.make import NOW, at, job_manifest, make_job, report, running, training
from tests.unit.operator.statuses import status_of

RULES = "metrics.prometheusRule.enabled=true"
PODS = ("metrics.podMonitor.enabled=true", "networkPolicy.metricsNamespaces={monitoring}")
CASES = Path(__file__).with_name("alerts.yaml")
SCRAPED = {"namespace", "job", "pod"}
"""Labels that what is scraped has by the Prometheus Operator."""


GPU = GpuFigures(0, utilization=1.0, memory_used=1, memory_total=2, slowed_by=frozenset())
MACHINE = Sample(HostFigures(memory_used=1, memory_limit=2), (GPU,))
TIMES = RankTimes(look=1, gpu=0, uuid="GPU-1", model="H100", products=0.001, memory=0.001, rank=0)
ANY = {"$namespace", "$name", "2.."}
"""What matchers of the dashboard select by."""


def monitoring(*settings: str) -> dict[str, Object]:
    objects = render_chart(*settings)
    return {item["kind"]: item for item in objects if item["apiVersion"] == "monitoring.coreos.com/v1"}


def rules(*settings: str) -> list[Object]:
    groups = monitoring(RULES, *settings)["PrometheusRule"]["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def parts(expression: str) -> list[promql.Expr]:
    found: list[promql.Expr] = []
    promql.walk(promql.parse(expression), lambda part: found.append(part))
    return found


def selectors(expression: str) -> Iterator[promql.VectorSelector]:
    for part in parts(expression):
        if isinstance(part, promql.MatrixSelector):
            yield part.vector_selector
        elif isinstance(part, promql.VectorSelector):
            yield part


def series(text: bytes) -> dict[str, dict[str, set[str]]]:
    """Values of each label, by the names of the series."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            known = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                known.setdefault(label, set()).add(value)
    return found


def told() -> dict[str, dict[str, set[str]]]:
    """What the registries of operator and trainer tell of a run whose store refuses, of one in each state, of one that
    failed, and of one with a slow GPU."""
    outage = StorageOutage(since=at(-60), ends=at(3540), failure=FailureClass.ACCESS_DENIED, message="no")
    figures = {"loss": 1.0, "eval_loss": 1.0, "tokens_per_second": 1.0, "model_flops_utilization": 0.4}
    last = training(5, phase=Phase.TRAINING, storage_outage=outage, **figures)
    refuses = write_status(status_of(running(report=report(last))))
    saved = {"checkpoints": {"latest": {"time": "2026-01-01T12:00:00Z"}}}
    failed = {"conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": "2026-01-01T12:00:00Z"}]}
    slow = {"slowGpus": [{"gpu": 5}]}
    statuses = [refuses, saved, failed, slow, *(write_status(SFTJobStatus(state=state)) for state in get_args(State))]
    jobs = [{**job_manifest(), "status": status} for status in statuses]
    metrics = OperatorMetrics(lambda: jobs, lambda: 0)
    metrics.answered("get", "Pod", 200)
    of_operator = series(generate_latest(metrics.registry))
    of_pods = series(render(Progress(training=last), Counter(), NOW) + render_machine(MACHINE, [TIMES]))
    # By the relabelling of the PodMonitor.
    return of_operator | {name: {**labels, "name": {"tulu"}} for name, labels in of_pods.items()}


def test_nothing_of_it_is_there_unless_asked_for() -> None:
    assert monitoring() == {}
    assert not any("sft-jobs.json" in item.get("data", {}) for item in render_chart())
    assert list(monitoring("metrics.serviceMonitor.enabled=true")) == ["ServiceMonitor"]
    assert list(monitoring(RULES)) == ["PrometheusRule"]
    assert list(monitoring(*PODS)) == ["PodMonitor"]


def test_the_api_server_adds_nothing_to_lists_that_argo_cd_would_take_for_a_change() -> None:
    """The CRD of PodMonitors fills in the action of a relabelling: Argo CD, which compares lists as a whole, would call
    the chart OutOfSync for ever."""
    (endpoint,) = monitoring(*PODS)["PodMonitor"]["spec"]["podMetricsEndpoints"]

    assert [relabelling["action"] for relabelling in endpoint["relabelings"]] == ["replace", "keep"]


def test_pods_that_do_not_run_yet_are_no_targets() -> None:
    """They are told as down, with an alert that most platforms have on all targets, while their image is pulled."""
    (endpoint,) = monitoring(*PODS)["PodMonitor"]["spec"]["podMetricsEndpoints"]
    (kept,) = [each for each in endpoint["relabelings"] if each["action"] == "keep"]

    assert kept["sourceLabels"] == ["__meta_kubernetes_pod_phase"]
    assert kept["regex"] == "Running"


def test_helm_has_nothing_against_it() -> None:
    values = (
        RULES,
        *PODS,
        "metrics.serviceMonitor.enabled=true",
        "metrics.dashboard.enabled=true",
        "metrics.prometheusRule.labels.release=one",
    )
    done = helm("lint", "--strict", str(CHART), *(f"--set={value}" for value in values))

    assert done.returncode == 0, done.stdout + done.stderr


def test_values_of_a_chart_that_did_not_know_it_are_no_fault() -> None:
    """With ``helm upgrade --reuse-values`` they are all that there is."""
    nulls = ("metrics.podMonitor=null", "metrics.prometheusRule=null", "metrics.dashboard=null")
    assert monitoring(*nulls) == {}
    assert list(monitoring("metrics.podMonitor=null", RULES)) == ["PrometheusRule"]
    (endpoint,) = monitoring("metrics.podMonitor.interval=null", *PODS)["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["interval"] == "30s"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("metrics.prometheusRule.enabled=perhaps", "/metrics/prometheusRule/enabled"),
        ("metrics.prometheusRule.interval=30s", "'interval'"),
        ("metrics.prometheusRule.labels.a=1", "/metrics/prometheusRule/labels/a"),
        ("metrics.dashboard.enabled=perhaps", "/metrics/dashboard/enabled"),
        ("metrics.podMonitor.interval=soon", "/metrics/podMonitor/interval"),
        ("metrics.podMonitor.port=1", "'port'"),
        ("metrics.serviceMonitor.interval=soon", "/metrics/serviceMonitor/interval"),
        ("metrics.podMonitor.enabled=true", "name its namespace there"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, words: str) -> None:
    done = helm("template", "x", str(CHART), f"--set={setting}")

    assert done.returncode != 0
    assert words in done.stderr


def test_it_is_found_by_the_labels_by_which_a_prometheus_selects() -> None:
    kinds = ("serviceMonitor", "podMonitor", "prometheusRule")
    values = [f"metrics.{kind}.{setting}" for kind in kinds for setting in ("enabled=true", "labels.release=one")]

    found = monitoring(*values, *PODS)

    assert len(found) == len(kinds)
    for item in found.values():
        assert item["metadata"]["labels"]["release"] == "one"
        assert item["metadata"]["labels"]["app.kubernetes.io/name"] == "sft-operator"
        assert item["metadata"]["namespace"] == OPERATOR_NAMESPACE


@pytest.mark.parametrize("settings", [(), PODS, ("watchNamespace=team", "settings.resyncSeconds=1000", *PODS)])
def test_the_rules_have_the_shape_that_a_prometheus_rule_has(settings: tuple[str, ...]) -> None:
    rule = monitoring(RULES, *settings)["PrometheusRule"]

    assert set(rule) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(rule["spec"]) == {"groups"}
    groups = rule["spec"]["groups"]
    assert [set(group) for group in groups] == [{"name", "rules"}] * len(groups)
    assert len({group["name"] for group in groups}) == len(groups)
    found = [each for group in groups for each in group["rules"]]
    assert len({each["alert"] for each in found}) == len(found)
    for each in found:
        assert {"alert", "expr", "labels", "annotations"} <= set(each)
        assert set(each) <= {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
        assert re.fullmatch("SFT[A-Za-z]+", each["alert"])
        assert each["labels"]["severity"] in ("critical", "warning", "info")
        assert set(each["annotations"]) == {"summary", "description"}
        for time in (each.get("for", "1m"), each.get("keep_firing_for", "1m")):
            assert re.fullmatch("[0-9]+m", time)
        texts = [each["alert"], each["expr"], *each["labels"].values(), *each["annotations"].values()]
        assert all(isinstance(text, str) and text for text in texts)


def promtool_says(*arguments: str, folder: Path) -> str:
    done = subprocess.run([str(promtool()), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    """Their annotations, too, which are templates of its own."""
    found = rules(*PODS)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": found}]}))

    assert f"{len(found)} rules found" in promtool_says("check", "rules", "rules.yaml", folder=tmp_path)


def test_alerts_fire_when_they_should_and_at_no_other_time(tmp_path: Path) -> None:
    silent = [{name: each for name, each in rule.items() if name != "annotations"} for rule in rules(*PODS)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": silent}]}))
    (tmp_path / CASES.name).write_text(CASES.read_text())

    promtool_says("test", "rules", CASES.name, folder=tmp_path)


@pytest.mark.parametrize("fires", [True, False])
def test_there_is_a_case_for_every_alert(fires: bool) -> None:
    cases = [each for case in yaml.safe_load(CASES.read_text())["tests"] for each in case["alert_rule_test"]]

    tried = {case["alertname"] for case in cases if ("exp_alerts" in case) is fires}

    assert tried == {rule["alert"] for rule in rules(*PODS)}


@pytest.mark.parametrize("settings", [PODS, ("watchNamespace=team", *PODS)])
def test_every_series_of_a_rule_is_one_that_is_told(settings: tuple[str, ...]) -> None:
    known = told()

    for rule in rules(*settings):
        check_series(rule["expr"], known)


def check_series(expression: str, known: dict[str, dict[str, set[str]]]) -> None:
    """That all series of ``expression`` are ``known``, with the labels that it names and the values that it selects."""
    found = list(selectors(expression))
    assert found
    for selector in found:
        assert selector.name in known, expression
        labels = known[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in SCRAPED | set(labels), (expression, matcher.name)
            if matcher.name not in SCRAPED and matcher.value not in ANY:
                assert set(matcher.value.split("|")) <= labels[matcher.name], (expression, matcher.value)
    for part in parts(expression):
        named: list[str] = []
        if isinstance(part, promql.AggregateExpr):
            named = part.modifier.labels if part.modifier else []
        elif isinstance(part, promql.BinaryExpr) and part.modifier and part.modifier.matching:
            named = part.modifier.matching.labels
        assert all(set(named) <= SCRAPED | set(known[each.name]) for each in selectors(part.prettify())), expression


def dashboard_map(*settings: str) -> Object:
    objects = render_chart("metrics.dashboard.enabled=true", *settings)
    return next(item for item in objects if "sft-jobs.json" in item.get("data", {}))


def dashboard() -> Object:
    found: Object = json.loads(dashboard_map()["data"]["sft-jobs.json"])
    return found


def test_grafana_finds_the_dashboard_by_its_label() -> None:
    usual = {"grafana_dashboard": "1"}
    for settings, labels in (
        ((), usual),
        (("metrics.dashboard.labels=null",), usual),
        (("metrics.dashboard.labels.a=b",), {"a": "b"}),
    ):
        assert dashboard_map(*settings)["metadata"]["labels"].items() >= labels.items()


def test_every_series_of_the_dashboard_is_one_that_is_told() -> None:
    known = told()
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]

    for panel in panels:
        assert panel["targets"]
        for target in panel["targets"]:
            expression = re.sub(r"\$__(rate_interval|range)", "5m", target["expr"])
            check_series(expression, known)
            first = next((part for part in parts(expression) if isinstance(part, promql.AggregateExpr)), None)
            if first and not isinstance(promql.parse(expression), promql.BinaryExpr):
                shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert shown <= set(first.modifier.labels if first.modifier else ()), panel["title"]


def test_the_dashboard_has_the_variables_that_its_queries_name() -> None:
    found = dashboard()
    variables = {variable["name"] for variable in found["templating"]["list"]}

    named = set(re.findall(r"\$\{?(\w+)", json.dumps(found)))

    assert {name for name in named if not name.startswith("__")} == variables
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])


def test_the_words_of_an_alert_name_labels_that_it_has() -> None:
    for rule in rules(*PODS):
        first = next((part for part in parts(rule["expr"]) if isinstance(part, promql.AggregateExpr)), None)
        has = {*(first.modifier.labels if first else ()), *rule["labels"]}
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= has, rule["alert"]
            assert text.count("{{") == text.count("}}")


def test_without_the_pods_series_no_rule_asks_for_them() -> None:
    assert [rule["alert"] for rule in rules() if "sft_trainer" in rule["expr"]] == []
    with_pods = {rule["alert"] for rule in rules(*PODS)}
    assert with_pods > {rule["alert"] for rule in rules()}


def test_releases_of_one_namespace_each_tell_of_that_alone() -> None:
    for rule in rules("watchNamespace=team", *PODS):
        first = next(selectors(rule["expr"]))
        (namespace,) = [each.value for each in first.matchers.matchers if each.name == "namespace"]
        assert namespace == (OPERATOR_NAMESPACE if first.name.startswith("sft_operator") else "team")


def test_an_operator_that_looks_rarely_is_given_the_time() -> None:
    (usual,) = [rule for rule in rules() if rule["alert"] == "SFTOperatorNotReconciling"]
    (rarely,) = [rule for rule in rules("settings.resyncSeconds=1800") if rule["alert"] == "SFTOperatorNotReconciling"]

    assert (usual["for"], "[10m]" in usual["expr"]) == ("10m", True)
    assert (rarely["for"], "[90m]" in rarely["expr"]) == ("90m", True)


@pytest.mark.parametrize("settings", [PODS, ("metrics.podMonitor.enabled=true", "networkPolicy.enabled=false")])
def test_the_pod_monitor_finds_the_pods_of_jobs(settings: tuple[str, ...]) -> None:
    monitor = monitoring(*settings)["PodMonitor"]["spec"]
    template: Any = build_job(make_job(), Settings(pods=PodSettings(image="trainer:1")))["spec"]["template"]
    (expression,) = monitor["selector"]["matchExpressions"]
    (endpoint,) = monitor["podMetricsEndpoints"]

    assert expression["operator"] == "Exists"
    assert expression["key"] in template["metadata"]["labels"]
    ports = [port["name"] for container in template["spec"]["containers"] for port in container["ports"]]
    assert endpoint["port"] in ports
    assert monitor["namespaceSelector"] == {"any": True}
    of_one = monitoring("watchNamespace=team", *settings)["PodMonitor"]["spec"]
    assert of_one["namespaceSelector"] == {"matchNames": ["team"]}


def test_every_alert_is_told_of_in_the_docs() -> None:
    page = (ROOT / "docs" / "platform.md").read_text()

    assert [
        rule["alert"] for rule in rules(*PODS) if f"| `{rule['alert']}` | {rule['labels']['severity']}" not in page
    ] == []
