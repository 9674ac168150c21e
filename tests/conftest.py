"""Shared fixtures: one private Redis per test session, fresh names per test. Nothing is ever flushed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import shutil
import signal
import uuid
from collections.abc import Generator, Iterator
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from contracts.settings import StackSettings
from onbeat.base.process.signals import ENDING
from onbeat.stack.redis import EmbeddedRedis
from tests.forked import FORKED_RANKS, shared_nursery
from tests.forked_workers import pytest_addoption, pytest_runtestloop
from tests.memory_disk import folder_in_memory

if TYPE_CHECKING:
    from gateway.services import Services
    from tests.e2e.stand_in_gateway import FakeGateway
    from tests.pipeline import Pipeline

__all__ = ["pytest_addoption", "pytest_runtestloop"]
TESTS = Path(__file__).parent
LONG = (
    "hosts",
    "model",
    "rooms/tasks",
    "rooms/runs",
    "rooms/projects",
    "rooms/backup",
    "rooms/replay",
    "e2e",
    "chaos",
    "page",
)
"""Folders whose modules wait for processes most of the time. Below, the share of a run in which they begin."""
LONG_SHARE = 0.8
COLLECTOR = (20_000, 20, 50)
"""When the garbage collector looks, as gc.set_threshold takes it: a tenth of what tests compute would be its walks."""
MEMORY_DISK = Path("/dev/shm")
ROOM_BYTES = 2 * 1024**3

# Stacks that tests start multiply by torch's library: digests are of one kind on each machine. What is chosen by a
# measurement has tests of its own (tests/unit/onbeat/test_kernels_of_machine.py).
os.environ.setdefault("ONBEAT_MATMUL", "torch")
# Threads of a process that has several wait asleep: spinning, they would take the cores that they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has them ignore Ctrl-C, and so would what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    import hypothesis
except ModuleNotFoundError:  # in vLLM's environment, whose tests (`make test-vllm`) draw no examples
    pass
else:
    # The same examples in each run: what fails in one fails in the next. The long campaigns look for new ones.
    hypothesis.settings.register_profile("repeatable", derandomize=not os.environ.get("CHAOS_LONG"), deadline=None)
    hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the long variants to `make chaos`, and orders the modules.

    Those that wait are mixed with those that compute, so that workers next to each other do both, and no worker is left
    with a long module at the end.
    """
    if not os.environ.get("CHAOS_LONG"):
        for item in items:
            if item.get_closest_marker("long_variant"):
                item.add_marker(pytest.mark.skip(reason="another case of a promise: `make chaos` runs it"))
    modules = list(dict.fromkeys(item.path for item in items))
    long = [one for folder in LONG for one in modules if one.is_relative_to(TESTS / folder)]
    others = [one for one in modules if one not in long]
    place = {one: LONG_SHARE * number / len(long) for number, one in enumerate(long)}
    place |= {one: number / len(others) for number, one in enumerate(others)}
    items.sort(key=lambda item: place[item.path])


def pytest_configure(config: pytest.Config) -> None:
    """Has what the processes of a run start fork from one that has imported what they need."""
    has_workers = config.option.forks or getattr(config.option, "numprocesses", None)
    if has_workers and not hasattr(config, "workerinput"):
        shared = contextlib.ExitStack()
        shared.enter_context(shared_nursery())
        config.add_cleanup(shared.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Rests the garbage collector while test modules import: what they make stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Takes ten thousand collected tests and the imported libraries from the garbage collector's walks."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own, to its end."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A real server with AOF and a password; tests that kill a server start their own.

    Its files are in memory where there is room: a walk through the fence's model asks for each write to be on the disk,
    and would wait for the machine's disk most of the time.
    """
    folder = tmp_path_factory.mktemp("redis")
    if MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free >= ROOM_BYTES:
        folder = folder_in_memory(MEMORY_DISK)
    server = EmbeddedRedis(folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def scripts_come_back(redis_server: EmbeddedRedis) -> Iterator[None]:
    """For tests that have the shared server forget its scripts: other tests' users of one role may load none."""
    yield
    redis_server.load_scripts()


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    """A stack without a trainer, with as many generators as NUM_GENERATORS of the module says, else with none."""
    from tests.pipeline import Pipeline

    with Pipeline(tmp_path_factory.mktemp("pipeline")) as made:
        made.start_generators(getattr(request.module, "NUM_GENERATORS", 0))
        yield made


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGateway]:
    """A stand-in that a command finds by its environment, in a folder of its own."""
    from tests.e2e.stand_in_gateway import KEY, fake_gateway

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONBEAT_RUN_ROOT", str(tmp_path / "runs"))
    with fake_gateway() as server:
        monkeypatch.setenv("ONBEAT_GATEWAY_URL", server.url)
        monkeypatch.setenv("ONBEAT_API_KEY", KEY)
        yield server


@pytest.fixture
def restored_process() -> Iterator[None]:
    """For what owns its process, as `run` and a trainer do: they set signal handlers and the root logger."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    logger = logging.getLogger()
    lines, level = logger.handlers[:], logger.level
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logger.handlers[:], logger.level = lines, level


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of several ranks that are of none of what executes a rank: trainers fork the ranks."""
    monkeypatch.setenv(FORKED_RANKS, "1")


@pytest.fixture
def forked_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in whose own process a command or `onbeat.train` makes a stack: it forks its services."""
    from onbeat.stack.stack import EmbeddedStack
    from tests.forked import ForkedChild

    monkeypatch.setattr(EmbeddedStack, "__init__", partialmethod(EmbeddedStack.__init__, child=ForkedChild))


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
def job_id() -> str:
    """Fresh per test: its keys are its own on the shared server."""
    return f"job-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> StackSettings:
    """Settings of a process over the shared server, with a run root of its own."""
    return StackSettings(
        redis_url=redis_url, run_root=str(tmp_path), api_key="test-key", reward_key="reward-key", matmul="torch"
    )


@pytest.fixture
def broker(settings: StackSettings) -> Iterator[Broker]:
    made = connect(settings)
    yield made
    made.close()


@pytest.fixture
def jobs(broker: Broker) -> JobStore:
    return JobStore(broker)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """One without the jobs of other tests, which may be stopped and killed."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def services(settings: StackSettings) -> Iterator[Services]:
    """What a gateway over these settings has."""
    from tests.served import services_over

    with services_over(settings) as made:
        yield made
