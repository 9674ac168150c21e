"""Seconds from a typical mistake to the words that name the field and the cure, as one sees them who types commands.

    onbeat bench mistakes

The mistakes are those of tests/integration/test_typical_mistakes.py. Each command is a process, and its start counts.
What a trainer or a reward finds counts from `onbeat submit --wait` to its words, on an idle stack of one generator.
That there is no generator is found on one that has stood for half a minute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from benchmarks._results import write_result
from broker.connection.client import connect
from broker.job_store import JobStore
from broker.monitor import STARTED_WITHIN_S
from contracts.jobs import JobState
from contracts.settings import StackSettings
from onbeat.client.spec_file import parse_spec
from onbeat.stack.plan import StackPlan
from onbeat.stack.stack import MODULES, EmbeddedStack
from tests.integration.test_typical_mistakes import CLI, JOB, REWARD, STACK, TRAINER, write_root

LIMIT_S = 5.0
"""What each is to keep to, on a machine that does nothing else; the exit code says whether all did."""
EXPECTED = f"A command alone ≤ 1 s; what a trainer finds, whose start takes 3 to 4 s, ≤ {LIMIT_S:g} s."
DEADLINE_S = 120.0
NO_GENERATOR = "no generator"


def seconds(root: Path, words: list[str], pattern: str) -> tuple[float, str]:
    """(seconds until the command has said it, the line), of `NAME=VALUE … command …`."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    while words[0].startswith("ONBEAT_"):
        name, _, value = words[0].partition("=")
        environment[name], words = value, words[1:]
    began_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "onbeat", *words],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if re.search(pattern, line):
                took_s = time.monotonic() - began_s
                process.terminate()
                return took_s, line.strip()
            if time.monotonic() - began_s > DEADLINE_S:
                process.kill()
    raise SystemExit(f"{words} never said {pattern}:\n{''.join(said)}")


def typed(
    root: Path, stands_for: dict[str, str], cases: Mapping[str, tuple[list[str], str]]
) -> Iterator[tuple[str, float, str]]:
    for mistake, (words, pattern) in cases.items():
        yield mistake, *seconds(root, [stands_for.get(word, word) for word in words], pattern)


def waited_for(*settings: str) -> list[str]:
    """The command that submits the job with these settings and waits for its end."""
    return ["submit", "job.toml", "--wait", *(word for setting in settings for word in ("--set", setting))]


def refused_by_a_stack(root: Path) -> Iterator[tuple[str, float, str]]:
    """As the test has it: gateway and reward service, and a job that looks as if it ran."""
    modules = {name: MODULES[name] for name in ("gateway", "reward_service")}
    with EmbeddedStack(StackPlan(run_root=root / "runs", model_root=root, threads=1), modules=modules) as stack:
        assert stack.redis is not None
        with closing(connect(StackSettings(redis_url=stack.redis.url))) as broker:
            jobs = JobStore(broker)
            job_id, _ = jobs.create(parse_spec(tomllib.loads(JOB)))
            jobs.move(job_id, JobState.RUNNING)
        port = stack.gateway_url.rpartition(":")[2]
        yield from typed(root, {"JOB": job_id, "PORT": port, "URL": stack.gateway_url}, STACK)


def found_by_a_job(root: Path) -> Iterator[tuple[str, float, str]]:
    """What a trainer finds in model and data, and what a reward of one's own answers."""
    patient = "timeouts.no_generator_s=120.0"
    with EmbeddedStack(StackPlan(run_root=root / "trained", model_root=root)) as stack:
        os.environ["ONBEAT_GATEWAY_URL"], os.environ["ONBEAT_API_KEY"] = stack.gateway_url, stack.api_key
        for mistake, (settings, pattern) in TRAINER.items():
            if mistake != NO_GENERATOR:
                yield mistake, *seconds(root, waited_for(patient, *settings), pattern)
        for mistake, (name, pattern) in REWARD.items():
            component = f"reward.components=[{{type = 'plugin', entry_point = '{name}'}}]"
            yield mistake, *seconds(root, waited_for(patient, component), pattern)
    modules = {name: module for name, module in MODULES.items() if name != "generator"}
    with EmbeddedStack(StackPlan(run_root=root / "without", model_root=root), modules=modules) as stack:
        os.environ["ONBEAT_GATEWAY_URL"], os.environ["ONBEAT_API_KEY"] = stack.gateway_url, stack.api_key
        time.sleep(STARTED_WITHIN_S)
        yield NO_GENERATOR, *seconds(root, waited_for(patient), "none lives: start one")


def main() -> None:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["PYTHONPATH"] = str(write_root(root))
        for measured in (typed(root, {}, CLI), refused_by_a_stack(root), found_by_a_job(root)):
            for mistake, took_s, line in measured:
                rows[mistake] = round(took_s, 2)
                print(f"{took_s:6.2f}  {mistake:<44}  {line[:100]}", flush=True)
    late = {mistake: took_s for mistake, took_s in rows.items() if took_s > LIMIT_S}
    found = {"expected": EXPECTED, "slowest_s": max(rows.values()), "later_than_limit": late, "seconds": rows}
    print(write_result("mistakes", found))
    if late:
        raise SystemExit(f"later than {LIMIT_S:g} s: {', '.join(late)}")


if __name__ == "__main__":
    main()
