"""Every metric of every process stands in docs/operate.md, and so does each name that alerts and dashboards ask for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from contracts.events import IterationMetrics
from gateway.exposition.requests import GatewayMetrics
from gateway.exposition.stack_state import FAMILIES
from onbeat.telemetry.metrics import GeneratorMetrics, StageMetrics, TrainerMetrics, WorkerMetrics
from reward_service.metrics import EnvironmentMetrics, RewardMetrics
from tests.contract.golden_files import iteration_metrics

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operate.md"
SECTION = re.compile(r"^### Metrics\n(.*?)^## ", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^(`onbeat_.*?) \| (.+)$", re.MULTILINE)
NAME = re.compile(r"`(onbeat_\w+)(?:{([\w,]+)})?`")
UNBOUNDED = {"prompt", "completion", "text", "batch_id", "batch", "client", "path", "url", "name"}
"""What no label may be: each of them has as many values as a client or a model likes."""
OF_EACH_PROCESS = re.compile(r"\bprocess_\w+|\bup{")
NAMED = {"onbeat_job_info", "onbeat_job_failed_timestamp_seconds"}
"""Metrics with a job's name, one a job: who is woken wants to know whose job it is."""


class Documented(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name → (type, labels): a table has the gauges and, by their ending, the counters, another one the histograms."""
    section = SECTION.search(PAGE.read_text())
    assert section is not None
    others, _, histograms = section[1].partition("\nhistogram | of\n")
    assert histograms
    rows: dict[str, tuple[str, tuple[str, ...]]] = {}
    for text, is_histogram in ((others, False), (histograms, True)):
        for names, meaning in ROW.findall(text):
            assert meaning.strip(), names
            for name, labels in NAME.findall(names):
                kind = "histogram" if is_histogram else "counter" if name.endswith("_total") else "gauge"
                assert name not in rows, name
                rows[name] = (kind, tuple(labels.split(",")) if labels else ())
    return rows


def registries() -> list[CollectorRegistry]:
    of_rewards = CollectorRegistry()
    RewardMetrics(of_rewards)
    EnvironmentMetrics(of_rewards)
    made = (GatewayMetrics(), GeneratorMetrics(), TrainerMetrics(), StageMetrics(), WorkerMetrics(lambda: True))
    return [of_rewards, *(one.registry for one in made)]


def families() -> Iterator[Documented]:
    """Those of all processes, but for the numbers of an iteration, which have a name for each field."""
    for one in FAMILIES:
        yield Documented(one.name + "_total" * (one.kind == "counter"), one.kind, one.labels, one.meaning)
    for registry in registries():
        for collector in list(registry._collector_to_names):
            kind, name = getattr(collector, "_type", ""), getattr(collector, "_name", "")
            if name.startswith("onbeat_"):
                full = name + "_total" * (kind == "counter")
                yield Documented(full, kind, tuple(collector._labelnames), collector._documentation)  # type: ignore[attr-defined]


def test_every_metric_is_documented_with_its_type_and_labels() -> None:
    rows = documented()
    known = {one.name: (one.kind, one.labels) for one in families()}
    assert {name: rows.get(name) for name in known} == known
    assert set(rows) == set(known)


def test_no_label_holds_what_a_client_or_a_model_wrote() -> None:
    for one in families():
        assert not set(one.labels) & (UNBOUNDED - ({"name"} if one.name in NAMED else set())), one.name


def test_a_duration_has_its_unit_in_its_name() -> None:
    for one in families():
        if one.kind == "histogram":
            assert one.name.endswith("_seconds"), one.name


def asked_names(text: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bonbeat_\w+", text)}


def known_names() -> set[str]:
    numbers = {f"onbeat_job_{name}" for name in iteration_metrics(lag_counts=(1,)).numbers()}
    assert all(name in IterationMetrics.__struct_fields__ for name in ("reward_mean", "mismatch_k3"))
    return numbers | set(documented()) | {"onbeat_job_iteration"}


def test_alerts_ask_for_metrics_that_exist() -> None:
    asked = asked_names((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    assert asked
    assert asked <= known_names()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    assert len(expressions()) > 20
    for expression in expressions():
        assert asked_names(expression) or OF_EACH_PROCESS.search(expression), expression
        assert asked_names(expression) <= known_names() | {"onbeat"}, expression


def expressions() -> list[str]:
    board = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "onbeat.json").read_bytes())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def series_of(name: str, kind: str, labels: Sequence[str]) -> list[str]:
    """A metric of one target as Prometheus holds it, its samples growing."""
    known = dict.fromkeys(labels, "one") | {"instance": "127.0.0.1:9100", "service": "generator"}
    parts = {"": {}}
    if kind == "histogram":
        parts = {f"_bucket-{le}": {"le": le} for le in ("0.1", "1", "+Inf")} | {"_sum": {}, "_count": {}}
    return [
        f"{name}{part.partition('-')[0]}{{{', '.join(f'{key}={value!r}' for key, value in (known | more).items())}}}"
        for part, more in parts.items()
    ]


@pytest.mark.parametrize("missing", ["", "onbeat_job_held_out_score"])
def test_every_panel_has_data_where_each_metric_of_the_page_has_samples(tmp_path: Path, missing: str) -> None:
    """Evaluated by Prometheus: labels that don't match, or that no metric has, leave a panel empty."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    numbers = iteration_metrics(lag_counts=(1,)).numbers()
    rows = documented() | {f"onbeat_job_{name}": ("gauge", ("job",)) for name in numbers}
    rows |= {"process_cpu_seconds_total": ("counter", ()), "process_resident_memory_bytes": ("gauge", ())}
    rows.pop(missing, None)
    series = [one for name, (kind, labels) in rows.items() for one in series_of(name, kind, labels)]
    asked = [re.sub(r"\$job", ".*", one) for one in expressions()]
    tests = [
        {"expr": f"count({one}) > bool 0", "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for one in asked
    ]
    inputs = [{"series": one, "values": "1+1x60"} for one in series]
    inputs.append({"series": 'up{job="onbeat", service="gateway", instance="127.0.0.1:8000"}', "values": "0x60"})
    path = tmp_path / "board.json"
    path.write_text(json.dumps({"tests": [{"interval": "15s", "input_series": inputs, "promql_expr_test": tests}]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False, timeout=120)
    empty = re.findall(r"count\((.*)\) > bool 0", done.stdout + done.stderr)
    assert [missing in one for one in empty] == [True] * sum(missing in one for one in asked if missing), empty
    assert (done.returncode == 0) == (not missing), done.stdout + done.stderr


def test_no_panel_lies_over_another() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "onbeat.json").read_bytes())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["targets"], panel["title"]
