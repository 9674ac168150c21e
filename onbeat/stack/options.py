"""The operator's options of a stack on one machine, and the settings of each of its processes.

flags, ONBEAT_ variables ─▶ StackOptions ─▶ shared settings ─▶ settings of a service: its own secrets, no other's
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from broker.connection.roles import GATEWAY, GENERATOR, STAGE, TASKS, TRAINER
from contracts.engines import VARIABLE, Engine, TransformersOptions
from contracts.errors import InvalidInput
from contracts.settings import PREFIX, StackSettings, is_service_link, settings_from, usable_cores
from contracts.spec.job import JobSpec
from contracts.spec.stages import ExternalStage, LlmJudgeStage
from onbeat.base.process.launcher import NUMERIC_THREADS, THREADS_BY_LOAD
from onbeat.hub.fetching import TOKENS, is_offline
from onbeat.stack.devices.device import chosen_device
from onbeat.stack.devices.gpus import GpuPlan
from onbeat.stack.profile import StackProfile

REDIS_ROLES = {
    "gateway": GATEWAY,
    "consumer": TRAINER,
    "generator": GENERATOR,
    "stage": STAGE,
    "tasks": TASKS,
    "beat": TASKS,
}
"""Service → its user in Redis (broker/connection/roles.py)."""
SECRETS: Mapping[str, frozenset[str]] = {
    "reward_service": frozenset({"metrics_key", "reward_key", "mcp_servers"}),
    "gateway": frozenset({"metrics_key", "redis_url", "celery_url", "api_key", "reward_key", "hub_token"}),
    "consumer": frozenset({"metrics_key", "redis_url", "reward_key", "cache_key"}),
    "generator": frozenset({"metrics_key", "redis_url", "reward_key", "cache_key"}),
    "stage": frozenset({"metrics_key", "redis_url", "judge_key"}),
    "tasks": frozenset({"metrics_key", "redis_url", "celery_url"}),
    "beat": frozenset({"metrics_key", "redis_url", "celery_url"}),
}
"""Service → the secrets among its settings; it gets no other's."""
DECIDED = {
    "reward_url": "the stack starts its own reward service",
    "gateway_url": "the stack starts its own gateway; --port sets its port",
    "host": "only this machine can reach the services of the stack; for others use docker compose",
    "port": "each service of the stack has its own port; --port sets the gateway's",
    "name": "each process of the stack has its own name, such as generator-1",
    "metrics_port": "with --metrics each process of the stack has its own port",
    "celery_url": "the stack uses ONBEAT_REDIS_URL for Celery's messages, too",
    "trainer_metrics_port": "with --metrics the trainer of the stack has its own port",
}
"""Setting that the stack decides itself → why."""
MAX_GENERATORS = 1024
"""Most generators of a stack, and most stage workers."""
MAX_CONSUMERS = 64
"""Most jobs that a stack of one machine trains at a time."""
MAX_THREADS = 4096
"""The bound of `StackSettings.threads`."""


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """The choices of an operator for a stack."""

    run_root: Path
    model_root: Path
    generators: int = 1
    stage_workers: int = 0
    """Processes that serve Onbeat's own stages."""
    consumers: int = 1
    """Processes that have a trainer each: as many jobs are trained at a time."""
    tasks: bool = False
    """True: there are a worker of tasks and the clock, as `onbeat up` has them. A stack of one job ends with the job:
    nothing of it is due, and `onbeat verify` and `onbeat export` read its folder."""
    profile: StackProfile | None = None
    """Where generators aren't all alike; it has as many as `generators` says."""
    gpus: GpuPlan | None = None
    """The GPUs that each process sees; None: what the launcher's own variables say."""
    threads: int | None = None
    """Compute threads of each generator, stage worker and trainer; None shares the cores among them, and
    gives them to those that have their turn in a colocated job."""
    gateway_port: int = 0
    """0: any free port."""
    settings: StackSettings = field(default_factory=StackSettings)
    """The settings of every process, where the stack doesn't decide: a redis_url is a server that runs already, ""
    starts a private one; "" as a key makes a random one."""
    engine: Engine = field(default_factory=TransformersOptions)
    """The engine of every generator, where there is no profile; no other process is told."""
    metrics: bool = False
    """True: each process that is no HTTP service serves metrics, at a port of its own."""
    fresh: bool = False
    """Forgets the private server's data of an earlier stack, and removes it at the end."""

    def __post_init__(self) -> None:
        if self.generators < 1:
            raise InvalidInput("must be 1 or more: without a generator no job makes progress", field="--generators")
        if self.generators > MAX_GENERATORS:
            raise InvalidInput(
                f"{self.generators} generators are too many for one machine",
                field="--generators",
                cure=f"start at most {MAX_GENERATORS}",
            )
        if not 0 <= self.stage_workers <= MAX_GENERATORS:
            raise InvalidInput(f"must be from 0 to {MAX_GENERATORS}", field="--stage-workers")
        if not 1 <= self.consumers <= MAX_CONSUMERS:
            raise InvalidInput(f"must be from 1 to {MAX_CONSUMERS}", field="--consumers")
        if self.profile is not None and len(self.profile.each) != self.generators:
            raise InvalidInput(
                f"differs from the profile, which has {len(self.profile.each)} generators", field="--generators"
            )
        if self.threads is not None and self.threads < 1:
            raise InvalidInput("must be 1 or more", field="--threads")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise InvalidInput(f"must be at most {MAX_THREADS}", field="--threads")
        if self.profile is not None and self.engine != TransformersOptions():
            raise InvalidInput(
                "has no effect with a profile, which names the engine of each generator",
                field=VARIABLE,
                cure="unset it",
            )

    @property
    def threads_each(self) -> int:
        """Two busy processes with as many threads each as there are cores run many times slower than with one each."""
        return self.threads or max(1, (os.cpu_count() or 1) // (self.generators + self.stage_workers + self.consumers))

    def colocated_threads_of(self, service: str) -> int:
        """The service's setting of that name: generators share the cores in their turn, a trainer has all of them.

        A stage worker has those of the trainer, whose bits it computes.
        """
        chosen = self.settings.colocated_threads or self.threads or 0
        if chosen or service != "generator":
            return chosen
        return max(1, usable_cores() // self.generators)


def stage_workers_for(spec: JobSpec, chosen: int | None, settings: StackSettings, *, default: int = 1) -> int:
    """How many stage workers a stack for this one job has: as chosen, else the default where Onbeat serves a stage.

    Raises InvalidInput for a stage that would wait for ever.
    """
    ours = [stage for stage in spec.stages if not isinstance(stage, ExternalStage)]
    if ours and chosen == 0:
        raise InvalidInput(
            f"stage {ours[0].name} needs a stage worker", field="--stage-workers", cure="set it to 1 or more"
        )
    for stage in ours:
        if isinstance(stage, LlmJudgeStage) and not settings.judge_url:
            raise InvalidInput(
                f"is not set, but stage {stage.name} needs a judge",
                field=_variable("judge_url"),
                cure="set it to the base URL of an OpenAI-compatible server, without /v1",
            )
    if chosen is None:
        return default if ours else 0
    return chosen


def stack_settings(environment: Mapping[str, str]) -> StackSettings:
    """Reads the ONBEAT_ variables of a stack, chooses the device where they name none, and says for whom it fetches.

    Variables of huggingface_hub say how the gateway fetches from the hub.

    Raises InvalidInput for a variable that the stack decides itself.
    """
    for name, reason in DECIDED.items():
        variable = _variable(name)
        if environment.get(variable) and not is_service_link(variable, environment[variable]):
            raise InvalidInput(f"cannot be set for a stack: {reason}", field=variable, cure="unset it")
    settings = settings_from(environment)
    # The libraries of all processes of a stack are offline: whether and how the gateway fetches stands in its settings.
    fetches = settings.hub_fetch or ("none" if is_offline(environment) else "operator")
    token = settings.hub_token or next((environment[name] for name in TOKENS if environment.get(name)), "")
    device = settings.device
    if not environment.get(_variable("device")):
        device = chosen_device()
    return replace(settings, hub_fetch=fetches, hub_token=token, device=device)


def threads_from(environment: Mapping[str, str], flag: int | None) -> int | None:
    """Takes --threads, then ONBEAT_THREADS; None where neither is set."""
    if flag is None and environment.get(_variable("threads")):
        return settings_from(environment).threads
    return flag


def settings_of(service: str, shared: StackSettings) -> StackSettings:
    """The shared settings without the secrets of other services."""
    others = frozenset().union(*SECRETS.values()) - SECRETS[service]
    return replace(shared, **dict.fromkeys(others, ""))


def child_environment(inherited: Mapping[str, str], settings: StackSettings, *, port: int) -> dict[str, str]:
    """The launcher's environment with the stack's settings in place of all ONBEAT_ variables that it had.

    Each child computes with as many threads as it is told, whatever else runs (I7).
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(PREFIX) and name not in (THREADS_BY_LOAD, *TOKENS)
    }
    environment |= dict.fromkeys(NUMERIC_THREADS, str(settings.threads))
    environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return environment | settings.environment() | {f"{PREFIX}PORT": str(port)}


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"
