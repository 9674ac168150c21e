"""Every metric of every process stands in the reference, and so does each name that alerts and dashboards ask for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from contracts.events import IterationMetrics
from docs.make_site import metrics, metrics_page
from tests.contract.golden_files import iteration_metrics

ROOT = Path(__file__).parents[3]
UNBOUNDED = {"prompt", "completion", "text", "batch_id", "batch", "client", "path", "url", "name", "owner", "tags"}
"""What no label may be: each of them has as many values as a client or a model likes."""
OF_EACH_PROCESS = re.compile(r"\bprocess_\w+|\bup{")
NAMED = {"onbeat_job_info", "onbeat_job_failed_timestamp_seconds"}
"""Metrics with a job's name, owner and tags, one a job: who is woken wants to know whose job it is."""


def known() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name → (type, labels)."""
    return {one.name: (one.kind, one.labels) for one in metrics()}


def test_every_metric_has_a_name_of_its_own_a_meaning_and_a_row_in_the_reference() -> None:
    page = metrics_page()
    names = [one.name for one in metrics()]
    assert len(set(names)) == len(names) > 70
    assert all(one.meaning.endswith(".") for one in metrics())
    assert [name for name in names if f"| `{name}" not in page] == []


def test_no_label_holds_what_a_client_or_a_model_wrote() -> None:
    for one in metrics():
        assert not set(one.labels) & (UNBOUNDED - ({"name", "owner", "tags"} if one.name in NAMED else set())), one.name


def test_a_duration_has_its_unit_in_its_name() -> None:
    for one in metrics():
        if one.kind == "histogram":
            assert one.name.endswith("_seconds"), one.name


def asked_names(text: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bonbeat_\w+", text)}


def known_names() -> set[str]:
    numbers = {f"onbeat_job_{name}" for name in iteration_metrics(lag_counts=(1,)).numbers()}
    assert all(name in IterationMetrics.__struct_fields__ for name in ("reward_mean", "mismatch_k3"))
    return numbers | set(known()) | {"onbeat_job_iteration"}


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
def test_every_panel_has_data_where_each_metric_of_the_reference_has_samples(tmp_path: Path, missing: str) -> None:
    """Evaluated by Prometheus: labels that don't match, or that no metric has, leave a panel empty."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    numbers = iteration_metrics(lag_counts=(1,)).numbers()
    rows = known() | {f"onbeat_job_{name}": ("gauge", ("job",)) for name in numbers}
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
