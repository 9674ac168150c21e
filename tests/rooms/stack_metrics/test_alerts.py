"""Alerts ask for labels that are set in docker compose, in an embedded stack and on Kubernetes.

An alert that selects a label which a configuration doesn't set fires for ever there, or never. Each has a runbook, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from docs.make_monitoring import RUNBOOKS
from docs.make_site import LINK
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack
from onbeat.stack.targets import TARGETS
from tests.kubernetes import documents
from tests.rooms.stack_metrics.test_metrics_page import expressions, known, known_names

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = sorted({rule["alert"] for rule in RULES})
SERVICES = {"gateway", "reward_service", "consumer", "trainer", "generator", "stage", "tasks", "beat"}
BY_PROMETHEUS = {"job", "instance"}
"""Labels that each target has without a configuration."""
OF_TARGETS = ("up", "process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes")
"""Metrics that have the labels of their target alone."""
SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:on|ignoring|by|without|group_left|group_right)\s*\(([^)]*)\)")
SHOWN = re.compile(r"\$labels\.(\w+)")

Labels = Mapping[str, str]


def compose_targets() -> Sequence[Labels]:
    """The labels of each target of docker compose, after the relabelling that its Prometheus does."""
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    target_labels: list[dict[str, str]] = [
        {"__address__": address} | group["labels"] for group in scrape["static_configs"] for address in group["targets"]
    ]
    for group in scrape["dns_sd_configs"]:
        for name in group["names"]:
            assert name in COMPOSE, "the name of a service"
            target_labels.append({"__meta_dns_name": name, "__address__": f"10.0.0.7:{group['port']}"})
    for labels in target_labels:
        labels["job"] = scrape["job_name"]
        for step in scrape["relabel_configs"]:
            source = ";".join(labels.get(name, "") for name in step["source_labels"])
            if re.fullmatch(step["regex"], source):
                labels[step["target_label"]] = step["replacement"]
    assert scrape["honor_labels"] is True
    return target_labels


def embedded_targets(folder: Path) -> Sequence[Labels]:
    """The labels of each target of `onbeat up --metrics`, as it writes them for Prometheus."""
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus" / "embedded.yml").read_text())["scrape_configs"]
    assert scrape["file_sd_configs"][0]["files"] == [f"../../runs/{TARGETS}"]
    assert scrape["honor_labels"] is True
    options = StackOptions(run_root=folder, model_root=folder, generators=1, stage_workers=1, tasks=True, metrics=True)
    stack = EmbeddedStack(options)
    stack.start_redis()
    try:
        assert stack._plan_children(stack._settings())
        assert stack._targets is not None
        stack._targets.write(folder, stack._urls)
        groups = json.loads((folder / TARGETS).read_bytes())
    finally:
        stack.stop()
    return [group["labels"] | {"job": scrape["job_name"]} for group in groups]


def kubernetes_targets() -> Sequence[Labels]:
    """The labels of each target of the monitors, after their relabelling."""
    monitors = [
        document for document in documents(DEPLOY / "kubernetes" / "monitoring") if document["kind"] == "PodMonitor"
    ]
    target_labels: list[Labels] = []
    for monitor in monitors:
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            labels = {"__meta_kubernetes_pod_name": "a-pod", "job": f"onbeat/{monitor['metadata']['name']}"}
            for step in endpoint["relabelings"]:
                source = ";".join(labels.get(name, "") for name in step.get("sourceLabels", ()))
                labels[step["targetLabel"]] = step.get("replacement", source)
            assert endpoint["honorLabels"] is True
            target_labels.append(labels)
    return target_labels


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sequence[Labels]]:
    """Configuration → the labels of its targets."""
    return {
        "compose": compose_targets(),
        "embedded": embedded_targets(tmp_path_factory.mktemp("embedded")),
        "kubernetes": kubernetes_targets(),
    }


def test_each_configuration_names_the_service_of_each_target_by_the_same_words(
    targets: dict[str, Sequence[Labels]],
) -> None:
    for name, labels_of_targets in targets.items():
        assert {labels.get("service", "") for labels in labels_of_targets} == SERVICES, name
        assert {labels["job"] for labels in labels_of_targets} == {"onbeat"}, f"{name}: the dashboard asks for it"


def test_prometheus_of_compose_finds_each_process_that_serves_metrics() -> None:
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    scraped = {f"{name}:{group['port']}" for group in scrape["dns_sd_configs"] for name in group["names"]}
    ports = {
        f"{name}:{service['environment'][setting]}"
        for name, service in COMPOSE.items()
        for setting in ("ONBEAT_METRICS_PORT", "ONBEAT_TRAINER_METRICS_PORT")
        if setting in service["environment"]
    }
    assert scraped == ports
    services = {address.partition(":")[0] for group in scrape["static_configs"] for address in group["targets"]}
    with_key = {name for name, service in COMPOSE.items() if "ONBEAT_METRICS_KEY" in service["environment"]}
    assert services | {address.partition(":")[0] for address in scraped} == with_key - {"prometheus"}


class Question(NamedTuple):
    """An expression, and what it asks for."""

    name: str
    expression: str

    @property
    def metrics(self) -> set[str]:
        """Names of metrics, without the ends that histograms give them."""
        words = re.findall(r"\b(?:onbeat_\w+|process_\w+|up\b)", re.sub(r'"[^"]*"', "", self.expression))
        return {re.sub(r"_(bucket|sum|count)$", "", word) for word in words}

    def matchers(self) -> Iterator[tuple[str, str, str, str]]:
        """(metric, label, operator, value) of each selector."""
        for metric, inside in SELECTOR.findall(self.expression):
            for label, operator, value in MATCHER.findall(inside):
                yield re.sub(r"_(bucket|sum|count)$", "", metric), label, operator, value

    def grouped(self) -> set[str]:
        """Labels that it matches or adds up by."""
        return {label.strip() for inside in GROUPING.findall(self.expression) for label in inside.split(",")} - {""}


QUESTIONS = [
    *(Question(rule["alert"], rule["expr"]) for rule in RULES),
    *(Question("dashboard", expression) for expression in expressions()),
]


def own_labels(metric: str) -> set[str]:
    """Labels that the code gives a metric."""
    if metric in OF_TARGETS:
        return set()
    assert metric in known_names() | set(known()), f"no metric {metric}"
    return set(known()[metric][1]) if metric in known() else {"job"}


@pytest.mark.parametrize("question", QUESTIONS, ids=[question.name for question in QUESTIONS])
def test_each_label_that_is_asked_for_is_set_in_every_configuration(
    targets: dict[str, Sequence[Labels]], question: Question
) -> None:
    set_everywhere = BY_PROMETHEUS | set.intersection(
        *(set(labels) for labels_of_targets in targets.values() for labels in labels_of_targets)
    )
    assert question.metrics
    for metric, label, operator, value in question.matchers():
        assert label in own_labels(metric) | set_everywhere, (metric, label)
        if label == "service":
            assert operator == "="
            assert value in SERVICES
    of_metrics = set().union(*(own_labels(metric) for metric in question.metrics))
    assert question.grouped() <= of_metrics | set_everywhere | {"le"}


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_shows_labels_that_it_has(rule: dict[str, Any]) -> None:
    question = Question(rule["alert"], rule["expr"])
    of_metrics = set().union(*(own_labels(metric) for metric in question.metrics))
    assert set(SHOWN.findall(str(rule["annotations"]))) <= of_metrics


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_of_a_job_says_whose_it_is_and_each_one_how_bad(rule: dict[str, Any]) -> None:
    question = Question(rule["alert"], rule["expr"])
    is_of_a_job = any("job" in own_labels(metric) for metric in question.metrics)
    is_named = "onbeat_job_failed_timestamp_seconds" in question.metrics or rule["expr"].startswith("onbeat_job_info")
    assert not is_of_a_job or is_named or {"name", "owner", "tags"} <= question.grouped()
    assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_links_to_a_section_of_its_own_that_says_what_to_do(alert: str) -> None:
    links = {rule["annotations"]["runbook_url"] for rule in RULES if rule["alert"] == alert}
    assert links == {f"{RUNBOOKS}#{alert.lower()}"}, "mkdocs and hosts of repositories write anchors in small letters"
    page = (ROOT / RUNBOOKS).read_text()
    (section,) = re.findall(rf"^## {alert}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    for part in ("**Meaning.**", "**Look.**", "**Do.**"):
        assert part in section


def test_the_page_of_runbooks_has_a_section_for_each_alert_alone_and_the_table_links_to_each() -> None:
    page = (ROOT / RUNBOOKS).read_text()
    assert sorted(re.findall(r"^## (Onbeat\w+)$", page, re.MULTILINE)) == ALERTS
    assert LINK.findall(page)
    table = (ROOT / "docs" / "monitoring.md").read_text()
    linked = dict(re.findall(r"\[`(Onbeat\w+)`\]\(alerts\.md#(\w+)\)", table))
    assert linked == {alert: alert.lower() for alert in ALERTS}
