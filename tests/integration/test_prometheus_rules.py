"""The shipped configuration of Prometheus, checked by its own tool: what it finds, and when each alert fires."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")


def promtool(*arguments: str | Path, folder: Path = DEPLOY) -> str:
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    done = subprocess.run(
        [PROMTOOL, *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_alert_fires_when_it_should_and_is_quiet_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


def test_every_alert_has_a_test_of_its_firing_and_of_its_silence() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", (DEPLOY / "alerts.yml").read_text()))
    tests = (DEPLOY / "alerts_test.yml").read_text()
    assert alerts
    assert set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", tests)) == alerts
    assert set(re.findall(r"alertname: (\w+), exp_alerts: \[\]", tests)) == alerts


def test_alertmanager_takes_the_shipped_configuration(tmp_path: Path) -> None:
    amtool = shutil.which("amtool")
    if amtool is None:
        pytest.skip("amtool is not installed (Debian's package prometheus-alertmanager has it)")
    text = (DEPLOY.parent / "alertmanager" / "alertmanager.yml").read_text()
    path = tmp_path / "alertmanager.yml"
    path.write_text(text.replace("@WEBHOOK@", "http://127.0.0.1:9/"))
    done = subprocess.run([amtool, "check-config", path], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["embedded.yml", "prometheus.yml"])
def test_prometheus_takes_the_shipped_configuration(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "deploy" / "prometheus"
    shutil.copytree(DEPLOY, folder)
    (tmp_path / "runs").mkdir()
    for path in (tmp_path / "runs" / "prometheus.key", tmp_path / "key"):
        path.write_text("k")
    (tmp_path / "runs" / "prometheus_targets.json").write_text("[]")
    text = (folder / name).read_text().replace("/tmp/metrics_key", str(tmp_path / "key"))
    (folder / name).write_text(text)
    promtool("check", "config", name, folder=folder)


def test_the_dashboards_expressions_are_prometheus_own_language(tmp_path: Path) -> None:
    import json

    board = json.loads((DEPLOY.parent / "grafana" / "dashboards" / "onbeat.json").read_bytes())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$job", ".*")}
        for number, expression in enumerate(expressions)
    ]
    path = tmp_path / "board.yml"
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)
