"""The shipped configuration of Prometheus, checked by its own tool: what it finds, and when each alert fires."""

from __future__ import annotations

import json
import os
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
import yaml

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


def configured(**variables: str) -> str:
    """Returns Alertmanager's configuration as configure.sh prints it. Raises CalledProcessError."""
    command = ["sh", str(DEPLOY.parent / "alertmanager" / "configure.sh")]
    environment = {"PATH": os.environ["PATH"]} | variables
    return subprocess.run(command, env=environment, capture_output=True, check=True, text=True, timeout=60).stdout


def amtool(*arguments: str | Path) -> str:
    program = shutil.which("amtool")
    if program is None:
        pytest.skip("amtool is not installed (Debian's package prometheus-alertmanager has it)")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ROUTED = {
    "ALERT_WEBHOOK": "https://hooks.example/on-call",
    "ALERT_WEBHOOK_WARNING": "https://hooks.example/chat?a=1&b=|2",
    "ALERT_ROUTES": "tag:team.a=https://hooks.example/a?x=* owner:ann=https://hooks.example/ann",
    "ALERT_QUIET": "22:00-07:00",
    "ALERT_QUIET_ZONE": "Europe/Berlin",
}
GOES_TO = [
    ("critical", {"alertname": "OnbeatGatewayDown", "severity": "critical"}),
    ("critical", {"alertname": "OnbeatNoConsumer", "severity": "critical", "job": "job-1", "owner": "ann"}),
    ("critical", {"alertname": "OnbeatJobFailed", "severity": "critical", "job": "job-1", "tags": ",team.a,"}),
    ("critical", {"alertname": "Another"}),
    ("warning", {"alertname": "OnbeatDisk", "severity": "warning"}),
    ("warning", {"alertname": "OnbeatJobFailed", "severity": "warning", "owner": "bob", "tags": ",team-a,"}),
    ("warning", {"alertname": "OnbeatJobFailed", "severity": "warning", "owner": "annabel"}),
    ("route-1", {"alertname": "OnbeatJobFailed", "severity": "warning", "owner": "ann", "tags": ",night,team.a,"}),
    ("route-2", {"alertname": "OnbeatUnhealthy", "severity": "warning", "owner": "ann", "tags": ",night,"}),
]
"""(receiver, labels of an alert)."""


@pytest.mark.parametrize("variables", [{}, ROUTED], ids=["nothing set", "everything set"])
def test_alertmanager_takes_the_shipped_configuration(tmp_path: Path, variables: dict[str, str]) -> None:
    path = tmp_path / "alertmanager.yml"
    path.write_text(configured(**variables))
    amtool("check-config", path)


@pytest.mark.parametrize(("receiver", "labels"), GOES_TO)
def test_an_alert_goes_to_who_can_fix_it(tmp_path: Path, receiver: str, labels: dict[str, str]) -> None:
    path = tmp_path / "alertmanager.yml"
    path.write_text(configured(**ROUTED))
    pairs = [f"{name}={value}" for name, value in labels.items()]
    assert amtool("config", "routes", "test", f"--config.file={path}", *pairs).split() == [receiver]


def addresses(configuration: dict[str, Any]) -> dict[str, str]:
    """Receiver → the address of its webhook."""
    return {receiver["name"]: receiver["webhook_configs"][0]["url"] for receiver in configuration["receivers"]}


def test_each_receiver_has_the_address_that_the_variables_name() -> None:
    assert addresses(yaml.safe_load(configured(**ROUTED))) == {
        "critical": "https://hooks.example/on-call",
        "warning": "https://hooks.example/chat?a=1&b=|2",
        "route-1": "https://hooks.example/a?x=*",
        "route-2": "https://hooks.example/ann",
    }
    alone = configured(ALERT_WEBHOOK="https://hooks.example/on-call")
    assert set(addresses(yaml.safe_load(alone)).values()) == {"https://hooks.example/on-call"}
    assert set(addresses(yaml.safe_load(configured())).values()) == {"http://127.0.0.1:9/"}, "nothing listens there"


@pytest.mark.parametrize(
    ("hours", "times"),
    [
        ("", []),
        ("12:00-13:30", [("12:00", "13:30")]),
        ("22:00-07:00", [("22:00", "24:00"), ("00:00", "07:00")]),
        ("22:00-00:00", [("22:00", "24:00")]),
        ("00:00-24:00", [("00:00", "24:00")]),
    ],
)
def test_warnings_alone_are_quiet_in_the_hours_that_the_operator_names(
    hours: str, times: list[tuple[str, str]]
) -> None:
    configuration = yaml.safe_load(configured(**ROUTED | {"ALERT_QUIET": hours}))
    (quiet,) = configuration["time_intervals"]
    ranges = [one for interval in quiet["time_intervals"] for one in interval["times"]]
    assert [(one["start_time"], one["end_time"]) for one in ranges] == times
    assert {interval["location"] for interval in quiet["time_intervals"]} == ({"Europe/Berlin"} if hours else set())
    of_warnings, of_gone = configuration["route"]["routes"]
    assert of_warnings["matchers"] == ['severity="warning"']
    assert {tuple(one["mute_time_intervals"]) for one in (of_warnings, *of_warnings["routes"])} == {("quiet",)}
    assert "mute_time_intervals" not in configuration["route"] | of_gone


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALERT_WEBHOOK", "hooks.example/on-call"),
        ("ALERT_WEBHOOK", 'https://hooks.example/"}]'),
        ("ALERT_WEBHOOK_WARNING", "https://hooks.example/a b"),
        ("ALERT_ROUTES", "team-a=https://hooks.example/a"),
        ("ALERT_ROUTES", "tag:a|b=https://hooks.example/a"),
        ("ALERT_ROUTES", "tag:=https://hooks.example/a"),
        ("ALERT_ROUTES", "tag:a=hooks.example"),
        ("ALERT_QUIET", "22-7"),
        ("ALERT_QUIET", "25:00-07:00"),
        ("ALERT_QUIET", "07:00-07:00"),
        ("ALERT_QUIET_ZONE", "Berlin time"),
    ],
)
def test_a_variable_that_would_send_an_alert_nowhere_is_refused_by_its_name(variable: str, value: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        configured(**ROUTED | {variable: value})
    assert refused.value.returncode == 2
    assert f"configure.sh: {variable}" in refused.value.stderr
    assert refused.value.stdout == ""


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


@contextmanager
def alertmanager(folder: Path, **variables: str) -> Iterator[str]:
    """Runs Alertmanager with the shipped configuration, which waits for 2 s in place of 10; its URL."""
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if program is None:
        pytest.skip("alertmanager is not installed (Debian's package prometheus-alertmanager has it)")
    url = f"http://127.0.0.1:{free_port()}"
    path = folder / "alertmanager.yml"
    path.write_text(configured(**variables).replace("group_wait: 10s", "group_wait: 2s"))
    command = [program, f"--config.file={path}", f"--web.listen-address={url.removeprefix('http://')}"]
    command += [f"--storage.path={folder}", "--cluster.listen-address="]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        away = (httpx.TransportError,)
        until(lambda: httpx.get(f"{url}/-/ready").is_success, "alertmanager to answer", away=away)
        yield url
    finally:
        process.terminate()
        process.wait(30.0)


def send(url: str, severity: str, *alerts: tuple[str, str]) -> None:
    """Sends alerts, as Prometheus would. alerts: name and job of each."""
    body = [
        {"labels": {"alertname": name, "job": job, "severity": severity}, "annotations": {"summary": job}}
        for name, job in alerts
    ]
    assert httpx.post(f"{url}/api/v2/alerts", json=body).is_success


def test_alertmanager_sends_one_message_of_what_is_gone_and_one_of_each_job(tmp_path: Path) -> None:
    with webhook() as (address, came), alertmanager(tmp_path, ALERT_WEBHOOK=address) as url:
        send(url, "critical", ("OnbeatNoConsumer", "a"), ("OnbeatNoConsumer", "b"))
        send(url, "warning", ("OnbeatUnhealthy", "a"), ("OnbeatUnhealthy", "b"))
        send(url, "warning", ("OnbeatJobWaits", "a"), ("OnbeatJobWaits", "c"))
        until(lambda: len(came) >= 4, "four messages")
        time.sleep(1.0)
    messages = [sorted((one["labels"]["alertname"], one["labels"]["job"]) for one in each["alerts"]) for each in came]
    # Job a waits for the consumer that is gone.
    assert sorted(messages) == [
        [("OnbeatJobWaits", "c")],
        [("OnbeatNoConsumer", "a"), ("OnbeatNoConsumer", "b")],
        [("OnbeatUnhealthy", "a")],
        [("OnbeatUnhealthy", "b")],
    ]


def test_alertmanager_wakes_for_what_is_critical_and_sends_no_warning_in_quiet_hours(tmp_path: Path) -> None:
    with webhook() as (address, came), webhook() as (other, warnings):
        quiet = {"ALERT_WEBHOOK": address, "ALERT_WEBHOOK_WARNING": other, "ALERT_QUIET": "00:00-24:00"}
        with alertmanager(tmp_path, **quiet) as url:
            send(url, "warning", ("OnbeatUnhealthy", "a"))
            send(url, "critical", ("OnbeatTrainersDie", "b"))
            until(lambda: came, "the critical alert")
            time.sleep(3.0)
    assert [one["labels"]["alertname"] for each in came for one in each["alerts"]] == ["OnbeatTrainersDie"]
    assert warnings == []


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
