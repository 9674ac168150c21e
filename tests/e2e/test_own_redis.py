"""A job over a Redis of one's own as docs/redis.md sets it up: by TLS, with a user for each role."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from broker.connection.probe import RedisServer, probe
from broker.connection.roles import GENERATOR, OPERATOR
from contracts.errors import BrokerUnavailable
from contracts.jobs import JobState
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.ports import free_port
from tests.builders import job_spec
from tests.pipeline import Pipeline
from tests.until import until

REPOSITORY = Path(__file__).parents[2]
SERVER = shutil.which("redis-server")
SUBJECT = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=onbeat -addext subjectAltName=IP:127.0.0.1"


class OwnRedis:
    """A server of Debian's that listens by TLS alone."""

    min_replicas = 0

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.port = free_port()
        self._certificate = folder / "host.pem"
        command = f"{SUBJECT} -keyout {folder / 'host.key'} -out {self._certificate}"
        subprocess.run(command.split(), check=True, capture_output=True)
        script = ["sh", REPOSITORY / "deploy" / "own-redis.sh", folder / "made", f"127.0.0.1:{self.port}", "rediss"]
        environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
        subprocess.run(script, env=environment, check=True, capture_output=True)
        self._made = folder / "made"
        lines = (self._made / "redis.env").read_text().splitlines()
        self._urls = {line.partition("=")[0].lower(): line.partition("=")[2] for line in lines}
        tls = f"--port 0 --tls-port {self.port} --tls-cert-file {self._certificate} --tls-auth-clients no"
        tls += f" --tls-key-file {folder / 'host.key'} --tls-ca-cert-file {self._certificate}"
        flags = f"{tls} --dir {folder} --appendonly yes --aclfile {self._made / 'users.acl'} --save"
        self.child = ChildProcess(
            "redis", command=(SERVER or "", *flags.split(), ""), environment={}, log_path=folder / "redis.log"
        )
        self.server: RedisServer | None = None

    @property
    def url(self) -> str:
        return self.url_of(OPERATOR)

    def url_of(self, role: str) -> str:
        return f"{self._urls[role]}?ssl_ca_certs={self._certificate}"

    def start(self) -> None:
        self.child.start()
        self.server = until(lambda: probe(self.url), "the server to answer", away=(BrokerUnavailable,))
        # As the page says: redis-cli -x FUNCTION LOAD REPLACE
        client = redis.Redis.from_url(self.url)
        client.function_load((self._made / "library.lua").read_text(), replace=True)
        client.close()

    def stop(self) -> None:
        self.child.stop(grace_s=10.0)


def test_a_job_by_tls_with_a_user_for_each_role(tmp_path: Path) -> None:
    if SERVER is None or shutil.which("openssl") is None:
        pytest.skip("needs a redis-server with TLS, and openssl")
    own = OwnRedis(tmp_path / "redis")
    with Pipeline(tmp_path, own) as pipeline:  # type: ignore[arg-type]
        pipeline.start_generators(1)
        spec = job_spec(iterations=2, model__path="configs/models/two-digit-addition", evaluation__num_prompts=0)
        job_id = pipeline.train(spec)
        assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
        assert pipeline.verdict(job_id).gaps == ()
        client = redis.Redis.from_url(own.url_of(GENERATOR))
        for command in (["FLUSHALL"], ["CONFIG", "GET", "*"], ["DEL", f"onbeat:{{{job_id}}}:fence"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
        client.close()
        pipeline.broker.redis.acl_log_reset()  # it has what this test was refused
        plain = redis.Redis(port=own.port, socket_timeout=2.0)
        with pytest.raises(redis.exceptions.RedisError):
            plain.ping()
        plain.close()
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "redis" / "made").iterdir()} == {0}
