"""The process whose place doctor stands in, and what that process needs of its machine.

settings ─▶ the Redis user's role, or that there is a reward key and no Redis ─▶ a row of SERVICES
        └▶ neither, or a user with every right ─▶ STACK: a machine on which `onbeat up` is to start all of them
"""

from __future__ import annotations

from contextlib import closing
from enum import StrEnum

from broker.connection.address import user_of
from broker.connection.client import connect
from broker.connection.probe import roles_of
from broker.connection.roles import GATEWAY, GENERATOR, ROLES, STAGE, TASKS, TRAINER
from contracts.encoding.wire import Record
from contracts.errors import InvalidInput, OnbeatError
from contracts.settings import StackSettings
from onbeat.doctor.finding import Finding, ok

PATIENCE_S = 3.0


class Access(StrEnum):
    """Use of a folder by a process."""

    WRITES = "writes"
    READS = "reads"
    NONE = "none"


class Service(Record, frozen=True, kw_only=True):
    """A kind of process, and its needs."""

    name: str
    """The name of its service in docker-compose.yml."""
    role: str = ""
    """The role of its user in Redis; "" for a process that has no connection to Redis, or every right."""
    run_root: Access
    holds_model: bool
    """True where the process keeps weights in memory."""
    fills_run_root: bool = False
    """True where the process brings files of runs from an object store, if there is one, into a run root of its own."""
    scores: bool = False
    """True where the process starts scorers and environments in cages."""


STACK = Service(name="stack", run_root=Access.WRITES, holds_model=True, scores=True)
"""All processes of `onbeat up` on one machine."""
REWARD_SERVICE = Service(name="reward_service", run_root=Access.NONE, holds_model=False, scores=True)
SERVICES = (
    STACK,
    REWARD_SERVICE,
    Service(name="gateway", role=GATEWAY, run_root=Access.READS, fills_run_root=True, holds_model=False),
    Service(name="consumer", role=TRAINER, run_root=Access.WRITES, holds_model=True),
    Service(name="producer", role=GENERATOR, run_root=Access.READS, holds_model=True),
    Service(name="stages", role=STAGE, run_root=Access.NONE, holds_model=True),
    Service(name="tasks", role=TASKS, run_root=Access.WRITES, holds_model=False),
    Service(name="beat", role=TASKS, run_root=Access.NONE, holds_model=False),
)
"""A service with a user of its own in Redis has a row here, or doctor judges its container as a whole stack."""


def service_named(name: str) -> Service:
    """Raises InvalidInput that lists the names."""
    for service in SERVICES:
        if service.name == name:
            return service
    names = ", ".join(service.name for service in SERVICES)
    raise InvalidInput(f"`{name}` is no service", field="--service", cure=f"one of {names}")


def service_of(settings: StackSettings) -> Service:
    """Returns the service that these settings belong to. Redis is asked for the role of its user, or, where it does not
    answer, the address names that user."""
    if not settings.redis_url:
        if settings.reward_key and not settings.api_key:
            return REWARD_SERVICE
        return STACK
    try:
        with closing(connect(settings, patience_s=PATIENCE_S)) as broker:
            roles = roles_of(broker)
    except OnbeatError:
        user = user_of(settings.redis_url)
        roles = (user,) if user in ROLES else ()
    # A user with the rights of several roles is the operator's, or that of a server without users.
    services = [service for service in SERVICES if service.role and service.role in roles]
    if len({service.role for service in services}) == 1 < len(services):
        # Workers of tasks and the clock have one user. The clock has no files, so its settings name no run root.
        has_files = bool(settings.run_root)
        services = [service for service in services if (service.run_root is not Access.NONE) is has_files]
    return services[0] if len(services) == 1 else STACK


def look(service: Service, *, is_chosen: bool) -> Finding:
    """Reports whose needs the other findings are judged by.

    Args:
        service: The service.
        is_chosen: True where --service named it.
    """
    if is_chosen:
        return ok("service", f"{service.name}, by --service")
    if service is STACK:
        return ok("service", "all of a stack: neither a role in Redis nor a reward key alone says more")
    if service is REWARD_SERVICE:
        return ok("service", f"{service.name}: there is a reward key, and no Redis")
    return ok("service", f"{service.name}: the Redis user has the role {service.role}")
