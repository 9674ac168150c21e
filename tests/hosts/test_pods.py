"""deploy/kubernetes without a cluster: its pods as hosts of a test, from none to a job over both consumers."""

from __future__ import annotations

from http.client import HTTPConnection
from pathlib import Path

from tests.chaos.short_job import long_variant, until
from tests.hosts.pods import Pods
from tests.kubernetes import ROOT
from tests.rooms.objects.s3_server import S3Server, environment

OVERLAY = ROOT / "deploy" / "kubernetes" / "redis"
STORE = "store-0"
NAMES = ("redis-0", "reward-0", "gateway-0", "consumer-0", "consumer-1", "producer-0")
SUBMIT = (
    *("onbeat", "submit", "/app/configs/demo.toml", "--set", "weights.transport=object", "--wait"),
    *("--set", "trainer.hosts.least=2", "--set", "trainer.hosts.most=2", "--set", "iterations=3"),
)
"""As the page has it, and as short as a test needs it."""


@long_variant
def test_the_pods_of_the_manifests_are_ready_and_train_a_job_over_two_of_them(tmp_path: Path) -> None:
    account: dict[str, str] = {}
    with Pods(tmp_path, OVERLAY, account, (*NAMES, STORE)) as pods:
        store = pods.addresses[STORE]
        with S3Server(tmp_path / "moto", host=store, entering=pods.network.entering(store)) as server:
            account |= environment(server.port, store)
            make_bucket(server, "onbeat")
            for name in NAMES:
                pods.start(name)
            for name in NAMES:
                until(lambda name=name: pods.is_ready(name), f"{name}:\n{pods.children[name].tail()}")
            done = pods.run("gateway-0", *SUBMIT)
            logs = "\n".join(child.tail(30) for child in pods.children.values())
            assert done.returncode == 0, done.stdout + done.stderr + logs
            assert "hosts of the ranks: 2" in logs


def make_bucket(server: S3Server, name: str) -> None:
    connection = HTTPConnection(server.host, server.port, timeout=30.0)
    connection.request("PUT", f"/{name}", headers={"Content-Length": "0"})
    assert connection.getresponse().status == 200
