"""The edge where errors of Redis become ours: what passes by itself, what is full, what is wrong.

no answer, or a code of UNAVAILABLE   BrokerUnavailable   tried again while the call lasts; its process waits, or ends
OOM                                   BrokerFull          a refusal: what it asked for may come when there is room
a password, a cluster, a role, a
database beside the only one          InvalidInput        of ONBEAT_REDIS_URL
a key of another type                 ContractViolation   what stands there is damaged
anything else                         FenceViolation      our own command is wrong, or its data is
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from contracts.errors import BrokerFull, BrokerUnavailable, ContractViolation, FenceViolation, InvalidInput, OnbeatError

UNAVAILABLE = {
    "BUSY": "it runs a long script",
    "LOADING": "it loads its data",
    "MASTERDOWN": "it is a replica without its primary",
    "MISCONF": "it cannot write to its disk",
    "NOREPLICAS": "it has too few replicas to accept writes",
    "READONLY": "it is a replica",
    "UNBLOCKED": "it became a replica while the call waited",
    "UNKILLABLE": "it runs a long script that wrote already",
}
"""Error codes of a server that refuses a command now and may accept it soon: nothing was written."""
NO_PRIMARY = frozenset({"MASTERDOWN", "NOREPLICAS", "READONLY", "UNBLOCKED"})
"""Errors of a server that isn't the primary, or not for long: the next attempt asks where the primary is."""
REFUSED_IN_FUNCTION = ("ACL failure", "The user executing the script can't")
"""How Valkey, and how Redis 7.0, begin the refusal of a command inside of a function."""
OTHER_DATABASE = ("'select' command", "DB index is out of range")
"""How a server refuses a database beside its only one: by the user's rights, or since it has no other."""
UNKNOWN_FUNCTION = "Function not found"
"""The error of a server that lacks the library."""
LACKS_FUNCTIONS = "Redis lacks this release's functions"
"""Our words for it."""
CLUSTER = frozenset({"ASK", "CLUSTERDOWN", "CROSSSLOT", "MOVED", "TRYAGAIN"})
CLUSTER_IN_FUNCTION = ("key in a cluster node", "while the cluster is down")
"""Words that stand in the refusal of a command inside of a function."""
NO_FUNCTIONS = re.compile(r"unknown command .?F(CALL|UNCTION)", re.IGNORECASE)
CLIENT_ERRORS = (exceptions.RedisError, OSError)
"""Exceptions that the client raises over a server that is away or refuses; for kombu, whose commands are no calls of a
broker."""
CODE = re.compile(r"(?:^|caused error: )([A-Z]+) ")
"""The code of an error that the client leaves in its text; a pipeline writes its own words before it."""


def code(error: Exception) -> str:
    """Returns the error's first word, as the server sent it; "" where there is none."""
    status: str | None = getattr(error, "status_code", None)
    code = CODE.search(str(error))
    return status or (code[1] if code else "")


def is_of_another_type(error: Exception) -> bool:
    """Returns True where the key that a command names is of another type."""
    return code(error) == "WRONGTYPE"


def passes(error: Exception) -> bool:
    """Returns True where the same command may be accepted soon."""
    if isinstance(error, exceptions.AuthenticationError):
        return False
    return (
        isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError) or code(error) in UNAVAILABLE
    )


def is_a_cluster() -> InvalidInput:
    return InvalidInput(
        "is a Redis Cluster", field="ONBEAT_REDIS_URL", cure="use one primary, with replicas or without"
    )


@contextmanager
def translated() -> Iterator[None]:
    """Redis errors become ours, with what to do about them."""
    try:
        yield
    except exceptions.AuthenticationError as error:
        raise InvalidInput(
            "Redis refuses the password",
            field="ONBEAT_REDIS_URL",
            cure="check the user and the password in the address",
        ) from error
    except exceptions.ResponseError as error:
        raise _of_response(error) from error
    except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
        raise BrokerUnavailable(
            f"Redis does not answer: {error}",
            field="redis",
            cure="check that it is running and that ONBEAT_REDIS_URL is right",
        ) from error


def _of_response(error: exceptions.ResponseError) -> OnbeatError:
    of = code(error)
    if of in UNAVAILABLE:
        return BrokerUnavailable(f"Redis refuses for now, {UNAVAILABLE[of]}: {error}", cure="look at Redis's log")
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in str(error):
        return BrokerFull("Redis is at maxmemory and refuses writes", cure="raise maxmemory or end jobs")
    if any(words in str(error) for words in OTHER_DATABASE):
        return InvalidInput("names a database other than 0", field="ONBEAT_REDIS_URL", cure="end it with /0")
    if isinstance(error, exceptions.NoPermissionError) or str(error).startswith(REFUSED_IN_FUNCTION):
        return InvalidInput(
            f"this user may not do that: {error}",
            field="ONBEAT_REDIS_URL",
            cure="give each process the user of its own role (docs/redis.md)",
        )
    if UNKNOWN_FUNCTION in str(error):
        return BrokerUnavailable(LACKS_FUNCTIONS, cure="start `onbeat up`, or load `library.lua`: docs/redis.md")
    if of in CLUSTER or any(words in str(error) for words in CLUSTER_IN_FUNCTION):
        return is_a_cluster()
    if NO_FUNCTIONS.match(str(error)):
        return InvalidInput(
            "leads to a server without functions",
            field="ONBEAT_REDIS_URL",
            cure="use Redis 7.0, Valkey 7.2 or a newer one",
        )
    if of == "WRONGTYPE":
        return ContractViolation(
            "a key of Redis has another type than Onbeat's: another program has written it",
            cure="give Onbeat a Redis server of its own",
        )
    return FenceViolation(f"Redis refused a command: {error}")
