"""What Prometheus' operator is given on Kubernetes: `python -m docs.make_monitoring`.

    deploy/prometheus/alerts.yml ─▶ PrometheusRule, the same rules ─┬─▶ deploy/kubernetes/monitoring/rules.yaml
    MONITORED, below ─▶ PodMonitor of each app ─────────────────────┴─▶ deploy/kubernetes/monitoring/monitors.yaml

`--runbooks URL` puts the address at which you read docs/alerts.md in the place of its path in the repository.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
FOLDER = ROOT / "deploy" / "kubernetes" / "monitoring"
RUNBOOKS = "docs/alerts.md"
COMMAND = "python -m docs.make_monitoring"


class Endpoint(NamedTuple):
    """A port at which the pods of an app serve metrics."""

    port: str
    """Its name in the pod."""
    service: str
    """The value of the label `service`, as deploy/prometheus/prometheus.yml sets it."""


MONITORED: Mapping[str, Sequence[Endpoint]] = {
    "gateway": [Endpoint("http", "gateway"), Endpoint("tasks", "tasks")],
    "reward": [Endpoint("http", "reward_service")],
    # The trainer is a process of its consumer's pod; while no job runs its target is down. A worker of tasks is next to
    # them, in a container of its own.
    "consumer": [Endpoint("metrics", "consumer"), Endpoint("trainer", "trainer"), Endpoint("tasks", "tasks")],
    "producer": [Endpoint("metrics", "generator")],
    "stages": [Endpoint("metrics", "stage")],
    "tasks": [Endpoint("metrics", "tasks")],
    "beat": [Endpoint("metrics", "beat")],
}
"""App (the label of its pods) → its endpoints. A new service is a row here, one in prometheus.yml, and a policy."""

MONITOR = """\
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {app}
spec:
  selector: {{matchLabels: {{app: {app}}}}}
  podMetricsEndpoints:
"""
ENDPOINT = """\
    - port: {port}
      path: /metrics
      interval: 10s
      honorLabels: true
      authorization: {{credentials: {{name: onbeat-secrets, key: metrics-key}}}}
      relabelings:
        - {{targetLabel: service, replacement: {service}}}
        - {{targetLabel: job, replacement: onbeat}}
        - {{sourceLabels: [__meta_kubernetes_pod_name], targetLabel: instance}}
"""
RULES = """\
# Made by `{command}` from deploy/prometheus/alerts.yml: change that.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: onbeat
spec:
"""


def monitors() -> str:
    """Returns a PodMonitor for each row of MONITORED.

    The label `job` of our metrics is a training job's id, and stays; a target's own is `onbeat`, as in compose.
    """
    documents = [
        MONITOR.format(app=app) + "".join(ENDPOINT.format(**endpoint._asdict()) for endpoint in endpoints)
        for app, endpoints in MONITORED.items()
    ]
    return f"# Made by `{COMMAND}`: change its table.\n" + "---\n".join(documents)


def rules(runbooks: str = RUNBOOKS) -> str:
    """Returns the rules of alerts.yml as a PrometheusRule. runbooks: address of a page made of docs/alerts.md."""
    groups = ALERTS.read_text().partition("groups:\n")[2]
    linked = groups.replace(f"runbook_url: {RUNBOOKS}#", f"runbook_url: {runbooks}#")
    lines = ("groups:\n" + linked).splitlines()
    return RULES.format(command=COMMAND) + "".join(f"  {line}\n" if line else "\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--runbooks", default=RUNBOOKS, metavar="URL", help="where docs/alerts.md is read")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "monitors.yaml").write_text(monitors())
    (FOLDER / "rules.yaml").write_text(rules(options.runbooks))


if __name__ == "__main__":
    main()
