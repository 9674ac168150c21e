"""The embedded stack starts, restarts and ends real processes; small stand-ins take the services' places."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from broker.connection.client import connect
from broker.connection.probe import probe
from broker.connection.roles import GATEWAY, GENERATOR, STAGE, TASKS, TRAINER
from contracts.errors import Conflict, InvalidInput, Unavailable
from contracts.jobs import JobState
from onbeat.base.process import child_process
from onbeat.client.connection import client_settings
from onbeat.client.gateway import GatewayClient
from onbeat.stack.access import gateway_access, read_stack_file
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import STACK_MARK, EmbeddedStack
from onbeat.stack.supervision import RestartPolicy
from tests.building.specs import trained_job
from tests.forked import ForkedChild
from tests.pipeline import REPOSITORY
from tests.until import until

STAND_INS = Path(__file__).parent / "stand_ins"
MODULES = {
    "reward_service": "stand_in_http",
    "gateway": "stand_in_http",
    "consumer": "stand_in_worker",
    "generator": "stand_in_generator",
    "stage": "stand_in_generator",
    "tasks": "stand_in_generator",
    "beat": "stand_in_generator",
}
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and PR_SET_PDEATHSIG")


@pytest.fixture(autouse=True)
def find_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))


def stack_options(folder: Path, **changes: object) -> StackOptions:
    fields: dict[str, object] = {"run_root": folder / "runs", "model_root": folder, "threads": 1}
    return StackOptions(**(fields | changes))  # pyright: ignore[reportArgumentType]


def identities(pids: dict[str, int]) -> set[psutil.Process]:
    table = child_process.descendants(1) | child_process.descendants(os.getpid())
    return {identity for identity in table if identity.pid in pids.values()}


@linux_only
def test_every_service_is_its_own_process_and_none_outlives_the_stack(tmp_path: Path) -> None:
    stack = EmbeddedStack(stack_options(tmp_path, generators=2, stage_workers=2, tasks=True), modules=MODULES)
    scaled = {"generator-1", "generator-2", "stage-1", "stage-2"}
    with stack:
        assert set(stack.pids) == {"redis", "reward_service", "gateway", "consumer", "tasks", "beat", *scaled}
        assert len(set(stack.pids.values())) == 10
        consumer = stack.pids["consumer"]
        until(lambda: len(child_process.descendants(consumer)) == 1, "the consumer's trainer")
        everything = identities(stack.pids) | child_process.descendants(consumer)
        assert len(everything) == 11
        assert httpx.get(f"{stack.gateway_url}/readyz").is_success
        assert stack.redis is not None
        assert probe(stack.redis.url).version
    assert not child_process.living(everything)
    stack.stop()


def test_a_stack_of_two_consumers_trains_two_jobs_at_a_time(tmp_path: Path) -> None:
    options = StackOptions(run_root=tmp_path / "runs", model_root=REPOSITORY, threads=1, consumers=2)
    stack = EmbeddedStack(options, child=ForkedChild)
    with stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
        assert {"consumer", "consumer-2"} <= set(stack.pids)
        # Neither ends by itself within the test.
        spec = trained_job(iterations=1000)
        jobs = [client.submit(spec, idempotency_key=str(number)).job_id for number in range(2)]
        until(
            lambda: all(client.job(job_id).iterations_committed for job_id in jobs),
            "a commit of both jobs",
            tick=stack.tick,
        )
        assert {client.job(job_id).state for job_id in jobs} == {JobState.RUNNING}


@linux_only
def test_the_trainers_of_several_consumers_end_with_the_stack(tmp_path: Path) -> None:
    with EmbeddedStack(stack_options(tmp_path, consumers=3), modules=MODULES) as stack:
        consumers = [stack.pids[name] for name in ("consumer", "consumer-2", "consumer-3")]
        until(lambda: all(len(child_process.descendants(pid)) == 1 for pid in consumers), "the trainers")
        everything = identities(stack.pids) | {
            trainer for pid in consumers for trainer in child_process.descendants(pid)
        }
    assert not child_process.living(everything)


@pytest.mark.parametrize("consumers", [0, 65])
def test_a_number_of_consumers_out_of_bounds_is_refused(tmp_path: Path, consumers: int) -> None:
    with pytest.raises(InvalidInput, match="--consumers: must be from 1 to 64"):
        stack_options(tmp_path, consumers=consumers)


@linux_only
def test_a_trainer_whose_consumer_was_killed_still_ends_with_the_stack(tmp_path: Path) -> None:
    with EmbeddedStack(stack_options(tmp_path), modules=MODULES) as stack:
        consumer = stack.pids["consumer"]
        until(lambda: len(child_process.descendants(consumer)) == 1, "the consumer's trainer")
        trainer = child_process.descendants(consumer)
        os.kill(consumer, signal.SIGKILL)
        until(lambda: stack.pids["consumer"] != consumer, "another consumer", tick=stack.tick)
        assert child_process.living(trainer) == trainer
    assert not child_process.living(trainer)


def test_a_killed_service_and_a_killed_redis_come_back_at_their_addresses(tmp_path: Path) -> None:
    with EmbeddedStack(stack_options(tmp_path, stage_workers=1, tasks=True), modules=MODULES) as stack:
        assert stack.redis is not None
        url = stack.redis.url
        before = stack.pids
        killed = ("generator-1", "stage-1", "gateway", "redis", "tasks", "beat")
        for name in killed:
            os.kill(before[name], signal.SIGKILL)
        until(lambda: all(stack.pids[name] != before[name] for name in killed), "all", tick=stack.tick)
        until(lambda: gateway_answers(stack.gateway_url), "the gateway", tick=stack.tick)
        assert stack.redis.url == url
        assert probe(url).version
        assert stack.pids["consumer"] == before["consumer"]


def gateway_answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").is_success
    except httpx.TransportError:
        return False


def test_a_service_that_ends_at_its_start_is_named_with_its_last_words_and_nothing_is_left(tmp_path: Path) -> None:
    # A gateway that is never ready holds the start open until the broken one has ended, however slow the machine is.
    modules = MODULES | {"generator": "stand_in_broken", "gateway": "stand_in_generator"}
    stack = EmbeddedStack(stack_options(tmp_path), modules=modules)
    with pytest.raises(
        Unavailable, match=r"(?s)generator-1: ended with exit code 1 at its start.*cannot import the model"
    ):
        stack.start_or_stop()
    assert all(child.exit_code is not None for child in stack.children.values())
    assert stack.redis is not None
    assert not stack.redis.child.is_running
    assert read_stack_file(stack.options.run_root) is None


class KilledAsItStarts(EmbeddedStack):
    """Each of its processes is killed once, before the first look at whether it is ready."""

    killed: dict[str, int] | None = None

    def _see_to_starts(self) -> None:
        if self.killed is None:
            self.killed = self.pids
            for pid in self.killed.values():
                os.kill(pid, signal.SIGKILL)
            until(lambda: all(child.exit_code is not None for child in self.children.values()), "their ends")
        super()._see_to_starts()


def test_a_stack_whose_processes_are_all_killed_as_it_starts_is_up_in_the_end(tmp_path: Path) -> None:
    restarts = RestartPolicy(first_pause_s=0.1, longest_pause_s=0.1)
    stack = KilledAsItStarts(stack_options(tmp_path), modules=MODULES, restarts=restarts)
    with stack:
        killed = stack.killed
        assert killed
        assert killed.keys() == stack.pids.keys()
        until(lambda: all(stack.pids[name] != killed[name] for name in killed), "all", tick=stack.tick)
        until(lambda: gateway_answers(stack.gateway_url), "the gateway", tick=stack.tick)


def test_a_service_that_is_killed_at_each_start_ends_the_stack_by_its_name(tmp_path: Path) -> None:
    modules = MODULES | {"gateway": "stand_in_killed"}
    restarts = RestartPolicy(first_pause_s=0.01, longest_pause_s=0.01, max_in_a_row=2)
    with pytest.raises(Unavailable, match="gateway: was killed by signal 9 3 times in a row"):
        EmbeddedStack(stack_options(tmp_path), modules=modules, restarts=restarts).start_or_stop()


def test_a_worker_of_tasks_that_dies_at_each_start_ends_no_stack(tmp_path: Path) -> None:
    modules = MODULES | {"tasks": "stand_in_killed"}
    restarts = RestartPolicy(first_pause_s=0.01, longest_pause_s=0.01, max_in_a_row=2)
    starts: set[int] = set()
    with EmbeddedStack(stack_options(tmp_path, tasks=True), modules=modules, restarts=restarts) as stack:

        def is_started_often() -> bool:
            starts.add(stack.pids["tasks"])
            return len(starts) > restarts.max_in_a_row + 1

        until(is_started_often, "its starts", tick=stack.tick)
        assert gateway_answers(stack.gateway_url), "no job waits for a task"


def test_a_service_that_is_never_ready_is_named_after_the_deadline(tmp_path: Path) -> None:
    stack = EmbeddedStack(stack_options(tmp_path), modules={"gateway": "stand_in_generator"})
    with pytest.raises(Unavailable, match=r"gateway: waited .* s for gateway to be ready"):
        stack.start_or_stop(deadline_s=0.5)


def test_a_start_that_is_given_up_ends_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    stack = EmbeddedStack(stack_options(tmp_path), modules=MODULES | {"gateway": "stand_in_generator"})
    stack.give_up_start()
    with pytest.raises(Unavailable, match="the start of the stack was given up"):
        stack.start_or_stop()
    assert not child_process.marked("ONBEAT_RUN_ROOT", str((tmp_path / "runs").resolve()))


def test_the_stack_file_is_private_and_gone_with_the_stack(tmp_path: Path) -> None:
    with EmbeddedStack(stack_options(tmp_path), modules=MODULES) as stack:
        path = stack.options.run_root / "stack.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, stack.logs)] == [0o700, 0o700]
        access = gateway_access({}, gateway=None, api_key=None, run_dir=stack.options.run_root)
        assert (access.url, access.key) == (stack.gateway_url, stack.api_key)
        for role in (GENERATOR, STAGE, TASKS, TRAINER):
            told = client_settings(role, run_dir=stack.options.run_root)
            assert told.redis_url.startswith(f"unix://{role}:")
            assert bool(told.celery_url) is (role == TASKS)
            connect(told).close()
            has_reward_key = role in (GENERATOR, TRAINER)
            assert (told.api_key, bool(told.reward_key)) == ("", has_reward_key), "a role has its own secrets alone"
        with pytest.raises(InvalidInput, match="user `gateway`"):
            client_settings(GATEWAY, run_dir=stack.options.run_root)
        logs = "".join(log.read_text() for log in stack.logs.iterdir())
        assert stack.api_key not in logs
    assert not path.exists()
    with pytest.raises(InvalidInput, match="no stack is running"):
        gateway_access({}, gateway=None, api_key=None, run_dir=stack.options.run_root)


def test_a_second_stack_in_the_same_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with EmbeddedStack(stack_options(tmp_path), modules=MODULES) as stack:
        second = EmbeddedStack(stack_options(tmp_path), modules=MODULES)
        with pytest.raises(
            Conflict, match=rf"^--run-dir: {tmp_path / 'runs'}: process {os.getpid()} runs a stack there"
        ):
            second.start_or_stop()
        assert second.pids == {}
        assert gateway_answers(stack.gateway_url)
        access = gateway_access({}, gateway=None, api_key=None, run_dir=stack.options.run_root)
        assert access.url == stack.gateway_url, "the refused one took nothing of the first away"


def test_a_fresh_stack_forgets_and_removes_the_servers_data(tmp_path: Path) -> None:
    redis_folder = tmp_path / "runs" / "redis"
    redis_folder.mkdir(parents=True)
    (redis_folder / "old").write_text("of an earlier demo")
    with EmbeddedStack(stack_options(tmp_path, fresh=True), modules=MODULES):
        assert not (redis_folder / "old").exists()
        assert redis_folder.exists()
    assert not redis_folder.exists()


def test_folders_of_the_services_names_in_the_working_directory_are_not_taken_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in {*MODULES.values(), "contracts", "process"}:
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text('raise SystemExit("a stranger")')
    monkeypatch.chdir(tmp_path)
    with EmbeddedStack(stack_options(tmp_path), modules=MODULES) as stack:
        assert httpx.get(f"{stack.gateway_url}/readyz").is_success


@linux_only
def test_the_children_of_a_killed_launcher_end_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids.json"
    launcher = subprocess.Popen(
        [sys.executable, str(STAND_INS / "hold_stack.py"), str(pid_file), str(tmp_path / "runs")]
    )
    try:
        until(pid_file.exists, "the stack to be up")
        children = child_process.descendants(launcher.pid)
        assert {child.pid for child in children} == set(json.loads(pid_file.read_text()).values())
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not child_process.living(children), "the children to end")


@linux_only
def test_a_process_is_found_by_its_mark_whoever_its_parent_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STACK_MARK, "mine")
    process = subprocess.Popen([sys.executable, "-m", "stand_in_generator"], start_new_session=True)
    monkeypatch.delenv(STACK_MARK)
    try:
        until(lambda: psutil.Process(process.pid) in child_process.marked(STACK_MARK, "mine"), "the process")
        assert not child_process.marked(STACK_MARK, "other")
    finally:
        process.kill()
        process.wait()
