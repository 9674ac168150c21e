"""Each client of the stack, with a proxy in the environment that listens: nothing of it ever goes there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace

from contracts.errors import OnbeatError
from contracts.rewards import RewardItem
from contracts.settings import StackSettings
from contracts.spec.environment import EnvironmentSpec
from gateway.submission import check_plugins
from onbeat.client.gateway import GatewayClient
from onbeat.commands.options import job_ids
from onbeat.data.prompts.environment_service import EnvironmentService
from onbeat.scoring.reward_client import RewardClient, reward_http
from onbeat.stack import stack
from tests.builders import job_spec

KEY = "a-key-that-no-proxy-may-see"
PLUGIN = {"type": "plugin", "entry_point": "p"}


@contextmanager
def listener() -> Iterator[tuple[str, list[str]]]:
    """(its address, the paths that it was asked for); it refuses everything."""
    asked: list[str] = []

    class Refusal(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            line = self.rfile.readline(65536)
            asked.append(line.decode(errors="replace").strip())
            while (header := self.rfile.readline(65536)) not in (b"\r\n", b""):
                if header.lower().startswith(b"content-length:"):
                    self.body_bytes = int(header.partition(b":")[2])
            self.rfile.read(getattr(self, "body_bytes", 0))
            self.wfile.write(b"HTTP/1.1 400 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        # A name and no address: what stands on loopback is asked past a proxy by some libraries.
        yield f"http://localhost:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def at_once(_seconds: float) -> None:
    """Waits for nothing."""


def reward(settings: StackSettings) -> None:
    async def score() -> None:
        async with reward_http(settings) as http:
            client = RewardClient(http, key=KEY, sleep=at_once)
            await client.score(
                job_spec().reward,
                [RewardItem(prompt="p", completion="c", reference="r")],
                job_id="j",
                tries=1,
                dependency_s=0.1,
            )

    asyncio.run(score())


def environment(settings: StackSettings) -> None:
    spec = EnvironmentSpec(name="number")
    EnvironmentService(settings, deadline_s=1.0).facts(spec)


def command_line(settings: StackSettings) -> None:
    with GatewayClient(settings.reward_url, KEY) as client:
        client.jobs()


def shell(settings: StackSettings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONBEAT_GATEWAY_URL", settings.reward_url)
        patch.setenv("ONBEAT_API_KEY", KEY)
        assert job_ids("") == []


def plugins(settings: StackSettings) -> None:
    check_plugins(job_spec(reward={"components": [PLUGIN]}), settings)


def readiness(settings: StackSettings) -> None:
    with stack.readiness_client() as http:
        assert not stack.is_ready(http, settings.reward_url)


@pytest.mark.parametrize("client", [reward, environment, command_line, shell, plugins, readiness])
def test_no_client_speaks_to_a_proxy_of_its_environment(
    client: Callable[[StackSettings], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_speaks_to_no_proxy(client, monkeypatch, tmp_path)


def assert_speaks_to_no_proxy(
    client: Callable[[StackSettings], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Asserts that a client goes to the address of its setting, with proxies and a netrc in its environment."""
    with listener() as (proxy, caught), listener() as (url, asked):
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
            monkeypatch.setenv(name.lower(), proxy)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        netrc = tmp_path / "netrc"
        netrc.write_text("machine localhost login a password of-another\n")
        netrc.chmod(0o600)
        monkeypatch.setenv("NETRC", str(netrc))
        settings = replace(StackSettings(), reward_url=url, judge_url=url, judge_key=KEY, reward_key=KEY)
        with contextlib.suppress(OnbeatError):  # it refuses everything
            client(settings)
        assert caught == []
        assert asked
