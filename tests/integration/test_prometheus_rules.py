"""The shipped configuration of Prometheus, checked by its own tool: what it finds, and when each alert fires."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from onbeat.stack.ports import free_port
from tests.until import until

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


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and what comes to it."""
    came: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", came
    finally:
        server.shutdown()
        server.server_close()


def test_alertmanager_sends_one_message_of_what_is_gone_and_one_of_each_job(tmp_path: Path) -> None:
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if program is None:
        pytest.skip("alertmanager is not installed (Debian's package prometheus-alertmanager has it)")
    text = (DEPLOY.parent / "alertmanager" / "alertmanager.yml").read_text()
    url = f"http://127.0.0.1:{free_port()}"
    with webhook() as (address, came), (tmp_path / "log").open("wb") as log:
        path = tmp_path / "alertmanager.yml"
        path.write_text(text.replace("@WEBHOOK@", address).replace("group_wait: 10s", "group_wait: 2s"))
        command = [program, f"--config.file={path}", f"--web.listen-address={url.removeprefix('http://')}"]
        command += [f"--storage.path={tmp_path}", "--cluster.listen-address="]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            away = (httpx.TransportError,)
            until(lambda: httpx.get(f"{url}/-/ready").is_success, "alertmanager to answer", away=away)
            sent = [("OnbeatNoConsumer", "a"), ("OnbeatNoConsumer", "b"), ("OnbeatUnhealthy", "a")]
            sent += [("OnbeatUnhealthy", "b"), ("OnbeatJobWaits", "a"), ("OnbeatJobWaits", "c")]
            labels = [
                {"labels": {"alertname": name, "job": job}, "annotations": {"summary": job}} for name, job in sent
            ]
            assert httpx.post(f"{url}/api/v2/alerts", json=labels).is_success
            until(lambda: len(came) >= 4, "four messages")
            time.sleep(1.0)
        finally:
            process.terminate()
            process.wait(30.0)
    messages = [sorted((one["labels"]["alertname"], one["labels"]["job"]) for one in each["alerts"]) for each in came]
    # Job a waits for the consumer that is gone.
    assert sorted(messages) == [
        [("OnbeatJobWaits", "c")],
        [("OnbeatNoConsumer", "a"), ("OnbeatNoConsumer", "b")],
        [("OnbeatUnhealthy", "a")],
        [("OnbeatUnhealthy", "b")],
    ]


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
    board = json.loads((DEPLOY.parent / "grafana" / "dashboards" / "onbeat.json").read_bytes())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$job", ".*")}
        for number, expression in enumerate(expressions)
    ]
    path = tmp_path / "board.yml"
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)
