"""The embedded stack: every service as its own process on loopback, on free ports, under one supervisor.

    onbeat submit ──HTTP──▶ gateway ──job──▶ Redis ──job──▶ consumer ──starts──▶ trainer
                                              │ ▲                                      │   ▲
                                      prompts │ │ weights t+1, fence, audit            │   │ rollouts
                                              ▼ └──────────────────────────────────────┘   │
                                           generators ──completions──▶ reward service      │
                                              └─────────── fenced publication ─────────────┘

Stage workers, if the options have any, run next to the generators: they take published rows and put columns.
A worker of tasks and the clock, if the options have them, do what a request or the time asks for; no job waits for it.

One stack at a time has a folder: it locks it before anything starts (folder_lock.py).

Started in the order redis → reward_service, gateway → worker, generators, stage workers, tasks, beat; stopped
in the reverse order, so that no process loses a server that it still needs. A service that dies is started again; what
it held is in Redis, or can be played again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
from msgspec.structs import replace

from broker.connection.probe import probe
from broker.connection.roles import CELERY, GATEWAY
from contracts.engines import VARIABLE
from contracts.errors import InvalidInput, OnbeatError, Unavailable
from contracts.jobs import is_of_work
from contracts.settings import StackSettings
from onbeat.base.http.outgoing import make_client
from onbeat.base.process import child_process
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.folders import make_private
from onbeat.base.process.host_memory import with_large_pages
from onbeat.base.process.signals import uninterrupted
from onbeat.base.process.waiting import Waiting
from onbeat.stack.access import StackFile, inputs_below, write_roots, write_stack_file
from onbeat.stack.folder_lock import FolderLock
from onbeat.stack.options import REDIS_ROLES, StackOptions, child_environment, settings_of
from onbeat.stack.ports import HOST, free_port, is_free
from onbeat.stack.profile import python_for
from onbeat.stack.redis import EmbeddedRedis
from onbeat.stack.supervision import PATIENT, RestartPolicy, Supervised, describe_exit
from onbeat.stack.targets import MetricsTargets

log = logging.getLogger(__name__)

READY_DEADLINE_S = 120.0
POLL_S = 0.1
MAX_READY_BYTES = 65536
GENERATOR_GRACE_S = 8.0
"""Stage workers have the same."""
CONSUMER_GRACE_S = 20.0
"""A trainer writes a checkpoint before it ends."""
SERVICE_GRACE_S = 8.0
TASKS_GRACE_S = 12.0
"""A worker of tasks gives its tasks back, and ends by itself within ten seconds."""
LOG = Path("logs", "stack.log")
"""The log of a stack that runs in the background, below its folder."""
STACK_MARK = "EMBEDDED_STACK_MARK"
"""Environment variable by which every process of a stack is found again, however deep it was started."""
MODULES = {
    "reward_service": "reward_service",
    "gateway": "gateway",
    "consumer": "consumer.supervisor",
    "generator": "producer",
    "stage": "onbeat.stages",
    "tasks": "onbeat.tasks",
    "beat": "onbeat.tasks.clock",
}
"""Service → module that `python -m` runs."""
BACKGROUND = ("tasks", "beat")
"""Services that no job waits for; the stack goes on without one that dies at each of its starts."""
PROCESSES = ("consumer", "generator", "stage", *BACKGROUND)
"""Services without HTTP."""
SCALED = ("generator-", "stage-")
"""How the names of services begin of which there may be several; what they hold goes to others when they die."""


class EmbeddedStack:
    """A context manager; `tick` must be called a few times a second while it runs."""

    def __init__(
        self,
        options: StackOptions,
        *,
        modules: Mapping[str, str] = MODULES,
        restarts: RestartPolicy = PATIENT,
        folder: Path | None = None,
        child: type[ChildProcess] = ChildProcess,
    ) -> None:
        """Starts nothing yet.

        Args:
            options: The operator's choices.
            modules: The modules of the services that it has.
            restarts: How often a service that dies is started again, and after which pauses.
            folder: Where its logs, its stack.json and its server's data are; None: the run root of the options.
            child: The class that starts, watches and ends the process of each service but Redis.
        """
        self.options = options
        self.folder = folder or options.run_root
        self._restarts = restarts
        self._modules = modules
        self._child = child
        self.gateway_url = f"http://{HOST}:{options.gateway_port or free_port()}"
        self.reward_url = f"http://{HOST}:{free_port()}"
        self.api_key = options.settings.api_key or secrets.token_urlsafe(32)
        self.reward_key = options.settings.reward_key or secrets.token_urlsafe(32)
        self._targets = MetricsTargets(options.settings) if options.metrics else None
        self.logs = self.folder / "logs"
        self.redis: EmbeddedRedis | None = None
        self.children: dict[str, ChildProcess] = {}
        self._lock = FolderLock(self.folder)
        self._mark = secrets.token_hex(16)
        self._supervised: list[Supervised] = []
        self._stack_file: Path | None = None
        self._given_up = threading.Event()

    def __enter__(self) -> EmbeddedStack:
        self.start_or_stop()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> dict[str, int]:
        """Process number of every service by its name, for status and tests."""
        children = dict(self.children)
        if self.redis is not None:
            children["redis"] = self.redis.child
        return {name: child.pid for name, child in children.items() if child.pid is not None}

    def start(self, *, deadline_s: float = READY_DEADLINE_S) -> None:
        """Returns when every service is ready; raises an OnbeatError that names the one that is not."""
        self._prepare_folders()
        if (port := self.options.gateway_port) and not is_free(port):
            raise InvalidInput(f"port {port} is in use", field="--port", cure="choose another, or 0 for any free port")
        if not self._modules.keys().isdisjoint(REDIS_ROLES):
            self.start_redis()
        settings = self._settings()
        for child in self._plan_children(settings):
            self.children[child.name] = child
            child.start()
            self._supervised.append(Supervised(child, policy=self._restarts, is_excused=_excuse_of(child.name)))
        self._wait_until_ready(self._urls, deadline_s)
        stack = StackFile(
            gateway_url=self.gateway_url, api_key=self.api_key, pid=os.getpid(), roles=self._roles(settings)
        )
        write_roots(self.folder, settings)
        self._stack_file = write_stack_file(self.folder, stack)
        if self._targets is not None:
            self._targets.write(self.folder, self._urls)

    def start_or_stop(self, *, deadline_s: float = READY_DEADLINE_S) -> None:
        """Does `start`; what was started is stopped again when it fails or is interrupted."""
        try:
            self.start(deadline_s=deadline_s)
        except BaseException:
            self.stop()
            raise

    def give_up_start(self) -> None:
        """Has a `start` that still waits raise Unavailable; another thread calls it."""
        self._given_up.set()

    def tick(self) -> None:
        """Starts what died again, and bounds logs. Raises Unavailable when something dies too often."""
        for supervised in self._supervised:
            supervised.tick()
        for child in (*self.children.values(), *([self.redis.child] if self.redis is not None else ())):
            child_process.bound_log(child.log_path)
        child_process.bound_log(self.folder / LOG)  # its own, where it runs in the background

    @uninterrupted()
    def stop(self) -> None:
        """Ends every process in order, whatever their state, and what they left behind. May be called twice."""
        self._supervised.clear()
        if self._stack_file is not None:
            self._stack_file.unlink(missing_ok=True)
        if self._targets is not None:
            self._targets.remove()
        scaled = [child for name, child in self.children.items() if name.startswith(SCALED)]
        background = [child for name, child in self.children.items() if name in BACKGROUND]
        for child in (*scaled, *background):  # all are asked first, so that the graces run side by side
            child.terminate()
        asked_s = time.monotonic()
        for child in scaled:
            child.stop(grace_s=max(0.0, asked_s + GENERATOR_GRACE_S - time.monotonic()))
        consumers = [child for name, child in self.children.items() if name.partition("-")[0] == "consumer"]
        for child in consumers:
            child.terminate()
        consumers_asked_s = time.monotonic()
        for child in consumers:
            child.stop(grace_s=max(0.0, consumers_asked_s + CONSUMER_GRACE_S - time.monotonic()))
        for child in background:
            child.stop(grace_s=max(0.0, asked_s + TASKS_GRACE_S - time.monotonic()))
        for name in ("gateway", "reward_service"):
            if name in self.children:
                self.children[name].stop(grace_s=SERVICE_GRACE_S)
        # A trainer whose consumer was killed has another parent by now; the mark that it inherited is still there.
        child_process.kill_all(child_process.marked(STACK_MARK, self._mark))
        if self.redis is not None:
            self.redis.stop()
            if self.options.fresh:
                shutil.rmtree(self.redis.folder, ignore_errors=True)
        self._lock.release()

    def _prepare_folders(self) -> None:
        try:
            make_private(self.logs)
            self._lock.take()
            if self.options.fresh:
                shutil.rmtree(self.folder / "redis", ignore_errors=True)
        except OSError as error:
            raise InvalidInput(
                f"{error.filename or self.folder} cannot be written: {error.strerror}",
                field="--run-dir",
                cure="choose a folder that you can write to",
            ) from error

    def start_redis(self) -> None:
        if redis_url := self.options.settings.redis_url:
            server = probe(redis_url, patience_s=3.0)
            log.warning(
                "using the configured %s as one user: generators may do all that a gateway may (docs/redis.md)",
                server.label,
            )
            return
        self.redis = EmbeddedRedis(
            self.folder / "redis", log_path=self.logs / "redis.log", kept_open=self._lock.shared_with
        )
        self.redis.start()
        self._supervised.append(Supervised(self.redis.child, start_again=self.redis.restart, policy=self._restarts))

    def _settings(self) -> StackSettings:
        """Returns the operator's settings, with those that the stack decides."""
        return replace(
            self.options.settings,
            reward_url=self.reward_url,
            reward_key=self.reward_key,
            celery_url=self.redis.url_of(CELERY) if self.redis else self.options.settings.celery_url,
            gateway_url=self.gateway_url,
            api_key=self.api_key,
            run_root=str(self.options.run_root.resolve()),
            model_root=str(self.options.model_root.resolve()),
            extra_roots=os.pathsep.join(
                filter(None, (self.options.settings.extra_roots, str(inputs_below(self.options.run_root))))
            ),
            host=HOST,
            threads=self.options.threads_each,
            metrics_key=self._targets.key if self._targets else self.options.settings.metrics_key,
        )

    @property
    def _urls(self) -> dict[str, str]:
        """The HTTP services and where they are."""
        urls = {"reward_service": self.reward_url, "gateway": self.gateway_url}
        return {service: url for service, url in urls.items() if service in self._modules}

    def _roles(self, settings: StackSettings) -> dict[str, dict[str, str]]:
        """Returns the environment in which a process of the owner's own takes a part of this stack (onbeat.client)."""
        roles = {role: settings_of(service, settings) for service, role in REDIS_ROLES.items() if role != GATEWAY}
        if self.redis is not None:
            roles = {role: replace(values, redis_url=self.redis.url_of(role)) for role, values in roles.items()}
        return {role: replace(values, metrics_key="").environment() for role, values in roles.items()}

    def _plan_children(self, settings: StackSettings) -> list[ChildProcess]:
        ports = {service: int(url.rpartition(":")[2]) for service, url in self._urls.items()} | {"consumer": 0}
        generators = [f"generator-{number}" for number in range(1, self.options.generators + 1)]
        # The first one is called as in a stack that has no other.
        consumers = [f"consumer-{number}" for number in range(2, self.options.consumers + 1)]
        stages = [f"stage-{number}" for number in range(1, self.options.stage_workers + 1)]
        background = BACKGROUND if self.options.tasks else ()
        names = (*ports, *consumers, *generators, *stages, *background)
        names = [name for name in names if name.partition("-")[0] in self._modules]
        return [
            self._plan_child(name, settings, ("-m", self._modules[name.partition("-")[0]]), port=ports.get(name, 0))
            for name in names
        ]

    def program_as(self, name: str, *arguments: str) -> ChildProcess:
        """A Python program that is told what the service of this name is, not started. It is its starter's to look
        after; what is left of it ends with the stack."""
        return self._plan_child(name, self._settings(), arguments)

    def _plan_child(
        self, name: str, settings: StackSettings, arguments: tuple[str, ...], *, port: int = 0
    ) -> ChildProcess:
        service, _, number = name.partition("-")
        python = sys.executable
        engine = self.options.engine
        if service == "generator" and self.options.profile is None:
            python = python_for(engine.name, self.options.model_root, field=VARIABLE)
        elif service == "generator" and self.options.profile is not None:
            kind = self.options.profile.each[int(number) - 1]
            python = kind.interpreter(self.options.model_root)
            engine = kind.options(os.environ)
        if self.redis is not None and service in REDIS_ROLES:
            settings = replace(settings, redis_url=self.redis.url_of(REDIS_ROLES[service]))
        settings = replace(settings, name=name, colocated_threads=self.options.colocated_threads_of(service))
        if self._targets is not None and service in PROCESSES:
            settings = self._targets.with_ports(name, settings)
        environment = child_environment(self._inherited(), settings_of(service, settings), port=port)
        if service in ("generator", "stage"):
            # They compute by themselves; a consumer's trainer gets its environment from that.
            environment = with_large_pages(environment)
        if self.options.gpus is not None:
            environment = environment | self.options.gpus.environment(service, int(number or 0))
        return self._child(
            name,
            command=(python, *arguments),
            environment=environment | (engine.environment() if service == "generator" else {}),
            log_path=self.logs / f"{name}.log",
        )

    def _inherited(self) -> dict[str, str]:
        """The launcher's environment, without the variables in which a profile finds the keys of engines' servers."""
        kinds = self.options.profile.generators if self.options.profile else ()
        keys = {kind.key_variable for kind in kinds}
        environment = {name: value for name, value in os.environ.items() if name not in keys}
        return environment | {STACK_MARK: self._mark}

    def _wait_until_ready(self, urls: Mapping[str, str], deadline_s: float) -> None:
        pending = dict(urls)
        waiting = Waiting(f"{', '.join(pending)} to be ready", deadline_s=deadline_s, cure=f"see {self.logs}")
        with readiness_client() as http:
            while pending:
                if self._given_up.is_set():
                    raise Unavailable("the start of the stack was given up")
                self._see_to_starts()
                pending = {name: url for name, url in pending.items() if not is_ready(http, url)}
                if pending:
                    try:
                        waiting.poke(f"{', '.join(pending)} to be ready")
                    except OnbeatError as error:
                        late = self.children[next(iter(pending))]
                        raise Unavailable(f"{error}; the end of its log:\n{late.tail()}", field=late.name) from error
                    time.sleep(POLL_S)

    def _see_to_starts(self) -> None:
        """Starts again what a signal has ended, as often as `tick` would: the kernel, or a person, ended that. What
        ends by itself says why in its log, and would say it again. Raises Unavailable with the end of it."""
        for supervised in self._supervised:
            child = supervised.child
            if child.exit_code is not None and child.exit_code >= 0:
                raise Unavailable(
                    f"{describe_exit(child.exit_code)} at its start; the end of its log:\n{child.tail()}",
                    field=child.name,
                )
            supervised.tick()


def _excuse_of(name: str) -> Callable[[int], bool] | None:
    """Returns which exit codes of a service don't count where it is started again; None: each counts."""
    if name in BACKGROUND:
        return lambda _: True
    return is_of_work if name.startswith(SCALED) else None


def readiness_client() -> httpx.Client:
    return make_client(timeout=2.0, max_answer_bytes=MAX_READY_BYTES)


def is_ready(http: httpx.Client, url: str) -> bool:
    """Asks the service at this address whether it is ready; a service that gives no answer isn't."""
    with contextlib.suppress(httpx.TransportError):
        return http.get(f"{url}/readyz").is_success
    return False
