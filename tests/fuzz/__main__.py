"""`python -m tests.fuzz SCHEMATHESIS [--max-time S] [--decoder-examples N] [--costly-texts N]`: three searches.

1. schemathesis, the program at the path SCHEMATHESIS (it has an environment of its own), against a real gateway over a
   real Redis: every operation with valid and broken input, and sequences that follow the links of the document. No
   consumer runs, so a job stays queued until it is cancelled. An event stream of such a job never ends: the operation
   is left to tests/integration/test_gateway.py.
2. tests/contract/test_decoders.py and tests/contract/test_costly_texts.py, with more examples.
3. Texts whose cost isn't their length (tests/costly_texts.py), checked by a real gateway with a reward service, while
   others ask whether it is there: how long the slowest answer took, and how long the others waited.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread

import httpx

from contracts.encoding.wire import encode_json
from contracts.settings import StackSettings
from gateway.api.jobs import EXAMPLE_JOB
from onbeat.base.http.outgoing import make_client
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.ports import free_port
from onbeat.stack.redis import EmbeddedRedis
from onbeat.stack.stack import child_environment
from tests.costly_texts import PATTERNS, drawn
from tests.pipeline import REPOSITORY, until_ready

KEY = "fuzz-key"
ANSWERS_WITHIN_S = 60.0
"""Longest that a client waits for a check of one costly text."""
OTHERS_WITHIN_S = 2.0
"""Longest that others may wait for an answer beside it."""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,missing_required_header,unsupported_method,"
    "allow_header_conformance,use_after_free,ensure_resource_availability,ignored_auth"
)
"""All but positive_data_acceptance: a spec that has the schema's form may name a model that isn't there."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("schemathesis")
    parser.add_argument("--max-time", type=int, default=300)
    parser.add_argument("--decoder-examples", type=int, default=500)
    parser.add_argument("--costly-texts", type=int, default=120)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gateway_ok = _fuzz_gateway(Path(folder), chosen.schemathesis, max_time_s=chosen.max_time)
    with tempfile.TemporaryDirectory() as folder:
        costs_ok = _fuzz_costs(Path(folder), chosen.costly_texts)
    return 0 if _fuzz_decoders(chosen.decoder_examples) and gateway_ok and costs_ok else 1


def _fuzz_gateway(folder: Path, schemathesis: str, *, max_time_s: int) -> bool:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (folder / "runs").mkdir()  # as `up` does
    with EmbeddedRedis(folder / "redis") as server:
        settings = StackSettings(
            redis_url=server.url,
            run_root=str(folder / "runs"),
            model_root=str(REPOSITORY),
            api_key=KEY,
            max_jobs=100_000,
        )
        gateway = ChildProcess(
            "gateway",
            command=(sys.executable, "-m", "gateway"),
            environment=child_environment(os.environ, settings, port=port),
            log_path=folder / "gateway.log",
        )
        gateway.start()
        try:
            until_ready(f"{url}/readyz", gateway)
            ended = subprocess.run(
                [
                    *(
                        os.path.abspath(schemathesis),
                        "run",
                        f"{url}/openapi.json",
                        "-H",
                        f"Authorization: Bearer {KEY}",
                    ),
                    *("--checks", CHECKS, "--exclude-operation-id", "events", "--max-time", str(max_time_s)),
                    *("--request-timeout", "30", "--continue-on-failure", "--generation-database", "none"),
                    "--no-color",
                ],
                cwd=folder,
            )
            traces = gateway.log_path.read_text().count("Traceback (most recent call last)")
            sys.stdout.write(f"tracebacks in the gateway's log: {traces}\n")
            if traces or gateway.exit_code is not None:
                sys.stdout.write(gateway.tail() + "\n")
            return ended.returncode == 0 and traces == 0 and gateway.exit_code is None
        finally:
            gateway.stop(grace_s=10.0)


def _fuzz_costs(folder: Path, number: int) -> bool:
    """Returns True where no text held the gateway: each was answered, and others were answered meanwhile."""
    ports = {name: free_port() for name in ("gateway", "reward_service")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    (folder / "runs").mkdir()
    with EmbeddedRedis(folder / "redis") as server:
        settings = StackSettings(
            redis_url=server.url,
            run_root=str(folder / "runs"),
            model_root=str(REPOSITORY),
            api_key=KEY,
            reward_key=KEY,
            reward_url=urls["reward_service"],
        )
        services = [
            ChildProcess(
                name,
                command=(sys.executable, "-m", name),
                environment=child_environment(os.environ, settings, port=ports[name]),
                log_path=folder / f"{name}.log",
            )
            for name in ports
        ]
        for service in services:
            service.start()
        try:
            for service, url in zip(services, urls.values(), strict=True):
                until_ready(f"{url}/readyz", service)
            return _ask_costly(urls["gateway"], number)
        finally:
            for service in services:
                service.stop(grace_s=10.0)


def _ask_costly(url: str, number: int) -> bool:
    slowest_s, answers = 0.0, Counter[int]()
    client = make_client(url, headers={"Authorization": f"Bearer {KEY}"}, timeout=ANSWERS_WITHIN_S)
    with client, Lookout(f"{url}/healthz") as lookout:
        for kind, pattern in drawn(PATTERNS, number, seed=time.time_ns()):
            components = [{"type": "exact"}, {"type": "regex", "pattern": pattern}]
            body = encode_json({**EXAMPLE_JOB, "reward": {"components": components}})
            began_s = time.monotonic()
            try:
                answer = client.post("/v1/jobs/check", content=body, headers={"Content-Type": "application/json"})
                answers[answer.status_code] += 1
            except httpx.TimeoutException:
                sys.stdout.write(f"{kind}: no answer within {ANSWERS_WITHIN_S:g} s: {pattern!r}\n")
                return False
            slowest_s = max(slowest_s, time.monotonic() - began_s)
    sys.stdout.write(
        f"costly texts: {number}, answers {dict(answers)}, the slowest {slowest_s:.1f} s; others waited "
        f"{lookout.longest_s:.2f} s at most for /healthz\n"
    )
    return set(answers) <= {200, 422} and lookout.longest_s < OTHERS_WITHIN_S


class Lookout(Thread):
    """Asks again and again whether a service is there, and remembers the longest answer."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._ends = Event()
        self.longest_s = 0.0

    def run(self) -> None:
        with make_client(self._url, timeout=ANSWERS_WITHIN_S) as client:
            while not self._ends.wait(0.05):
                began_s = time.monotonic()
                client.get("")
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    def __enter__(self) -> Lookout:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join()


def _fuzz_decoders(examples: int) -> bool:
    environment = os.environ | {"FUZZ_EXAMPLES": str(examples), "OMP_NUM_THREADS": "1"}
    modules = ("tests/contract/test_decoders.py", "tests/contract/test_costly_texts.py")
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "0", *modules]
    return subprocess.run(command, cwd=REPOSITORY, env=environment).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
