"""`python -m tests.fuzz SCHEMATHESIS [--max-time S] [--decoder-examples N]`: both searches, and what they tried.

1. schemathesis, the program at the path SCHEMATHESIS (it has an environment of its own), against a real gateway over a
   real Redis: every operation with valid and broken input, and sequences that follow the links of the document. No
   consumer runs, so a job stays queued until it is cancelled. An event stream of such a job never ends: the operation
   is left to tests/integration/test_gateway.py.
2. tests/contract/test_decoders.py, with more examples.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from contracts.settings import StackSettings
from onbeat.process.child_process import ChildProcess
from onbeat.stack.ports import free_port
from onbeat.stack.redis import EmbeddedRedis
from onbeat.stack.stack import child_environment
from tests.pipeline import REPOSITORY, until_ready

KEY = "fuzz-key"
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
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gateway_ok = _fuzz_gateway(Path(folder), chosen.schemathesis, max_time_s=chosen.max_time)
    return 0 if _fuzz_decoders(chosen.decoder_examples) and gateway_ok else 1


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


def _fuzz_decoders(examples: int) -> bool:
    environment = os.environ | {"FUZZ_EXAMPLES": str(examples), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "0", "tests/contract/test_decoders.py"]
    return subprocess.run(command, cwd=REPOSITORY, env=environment).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
