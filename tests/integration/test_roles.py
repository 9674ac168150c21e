"""Each role's credentials over a raw connection: what belongs to another role is refused by the server itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, ResponseError
from redis.retry import Retry

from broker import keys
from broker.connection.client import Broker, connect
from broker.connection.roles import (
    CELERY,
    FLOWER,
    GATEWAY,
    GENERATOR,
    LOADER,
    ROLES,
    SCRIPT_ROLES,
    STAGE,
    TASKS,
    TRAINER,
    rules,
)
from broker.connection.script_texts import PRELUDE, function_name, library_text, scripts
from broker.generator_side import GeneratorSide
from broker.job_store import JobStore
from broker.keys import (
    ACTIVE,
    CHANGES,
    JOBS,
    OWNERS,
    REMOVED,
    SPEC_BYTES,
    STAGE_WORKERS,
    JobKeys,
    OpenKeys,
    SlotKeys,
    idempotency,
    sealed_name,
    wake_channel,
)
from broker.stage_side import StageSide
from contracts.encoding.wire import encode
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec
from tests.every_key import every_key
from tests.integration.test_fence import DIGEST, Job, job_of

SEAL = "5ea1" * 8
KEYS = JobKeys("J", num_open=2, seal=SEAL)
FIRST = "\x00the key"
"""Where the key stands in a sample call."""
SAMPLES: dict[str, tuple[str, ...]] = {
    "UNLINK": (FIRST,),
    "DEL": (FIRST,),
    "EXISTS": (FIRST,),
    "GET": (FIRST,),
    "ZCARD": (FIRST,),
    "INCRBY": (FIRST, "1"),
    "DECRBY": (FIRST, "1"),
    "HDEL": (FIRST, "f"),
    "HGET": (FIRST, "f"),
    "HEXISTS": (FIRST, "f"),
    "HGETALL": (FIRST,),
    "HINCRBY": (FIRST, "f", "1"),
    "HKEYS": (FIRST,),
    "HLEN": (FIRST,),
    "HMGET": (FIRST, "f"),
    "HSET": (FIRST, "f", "v"),
    "HSETNX": (FIRST, "f", "v"),
    "HSTRLEN": (FIRST, "f"),
    "INFO": ("memory",),
    "PEXPIRE": (FIRST, "1"),
    "PUBLISH": (FIRST, ""),
    "SADD": (FIRST, "m"),
    "SET": (FIRST, "v"),
    "SREM": (FIRST, "m"),
    "TIME": (),
    "XADD": (FIRST, "*", "f", "v"),
    "XAUTOCLAIM": (FIRST, "g", "c", "0", "0"),
    "XCLAIM": (FIRST, "g", "c", "0", "1-0"),
    "XGROUP CREATE": (FIRST, "g", "0"),
    "XGROUP DESTROY": (FIRST, "g"),
    "XINFO": ("STREAM", FIRST),
    "XLEN": (FIRST,),
    "XPENDING": (FIRST, "g"),
    "XREADGROUP": ("GROUP", "g", "c", "STREAMS", FIRST, ">"),
    "XREVRANGE": (FIRST, "+", "-"),
    "XTRIM": (FIRST, "MAXLEN", "0"),
    "LLEN": (FIRST,),
    "LPUSH": (FIRST, "v"),
    "ZADD": (FIRST, "1", "m"),
    "ZCOUNT": (FIRST, "0", "1"),
    "ZMSCORE": (FIRST, "m"),
    "ZRANGE": (FIRST, "0", "1"),
    "ZRANGEBYSCORE": (FIRST, "-inf", "1", "LIMIT", "0", "1"),
    "ZREM": (FIRST, "m"),
    "ZREMRANGEBYRANK": (FIRST, "0", "0"),
    "ZREMRANGEBYSCORE": (FIRST, "0", "0"),
    "ZSCORE": (FIRST, "m"),
}
"""Each command of the scripts with arguments that it accepts."""
CALL = re.compile(r"(?:redis\.p?call|call_with|each_of)\('(\w+)'([^\n]*)")
NAMED = {
    name.upper(): getattr(KEYS, name)
    for name in (
        "fence",
        "weights",
        "probes",
        "proofs",
        "counters",
        "dead",
        "audit",
        "job",
        "events",
        "progress",
        "claimers",
        "waiting",
        "missing",
        "hosts",
    )
}
NAMED |= {
    "JOBS": JOBS,
    "ACTIVE": ACTIVE,
    "REMOVED": REMOVED,
    "SPEC_BYTES": SPEC_BYTES,
    "OWNERS": OWNERS,
    "CHANGES": CHANGES,
    "reservation": idempotency("k"),
    "woken": wake_channel("w"),
    "TASKS": keys.TASKS,
    "OPEN_TASKS": keys.OPEN_TASKS,
    "TASK_NAMES": "onbeat:task_names",
    "TASK_COUNTS": keys.TASK_COUNTS,
    "CLOCK": keys.CLOCK,
    "task_key": keys.task("task-000000000000"),
    "key": keys.task("task-000000000000"),
}
NAMED |= {"SPEC": KEYS.spec, "SHARDS": KEYS.shards, "CHUNKS": KEYS.chunks}
"""Variable → its key; the others are made where they are used, or are of a slot."""
MADE = re.compile(r"(?:job|sealed)_key\('(\w+)'\)")
OF_SLOT = {f"slot.{name}": name for name in SlotKeys._fields}
KEY = re.compile(rf"\b({'|'.join([*NAMED, *OF_SLOT])}|stream)\b")
GROUP_CALL = re.compile(r"'(CREATE|DESTROY)'")


@pytest.fixture
def operator(redis_server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(redis_server.url)


def raw(server: EmbeddedRedis, role: str) -> redis.Redis:
    """The role's connection, as any holder of its password opens it."""
    return redis.Redis.from_url(server.url_of(role), retry=Retry(NoBackoff(), 0))


def brokers(server: EmbeddedRedis) -> dict[str, Broker]:
    roles = (GATEWAY, TRAINER, GENERATOR, STAGE, TASKS)
    return {role: connect(StackSettings(redis_url=server.url_of(role))) for role in roles}


@pytest.fixture(name="job")
def opened_job_of_roles(redis_server: EmbeddedRedis) -> Job:
    """A job with an open iteration of two batches."""
    redis_server.load_scripts()
    by_role = brokers(redis_server)
    job = job_of(by_role[GATEWAY], by_role[TRAINER], by_role[GENERATOR])
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    return job


TASKS_MAY = {
    "look at the server",
    "forge an event",
    "unlink a job",
    "drop the columns",
    "read who submitted what",
    "wake the consumers",
    "read a job",
}
"""What the workers of tasks may do by hand: they forget ended jobs, as gateways do."""


def attacks(job_id: str, seal: str = SEAL) -> dict[str, tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Those of the roles of a job, and those of tasks and of Celery's messages."""
    not_of_tasks = (TRAINER, GENERATOR, STAGE, CELERY, FLOWER, LOADER)
    not_celery = (GATEWAY, TRAINER, GENERATOR, STAGE, TASKS, FLOWER, LOADER)
    not_flower = (GATEWAY, TRAINER, GENERATOR, STAGE, TASKS, CELERY, LOADER)
    task, messages = keys.task("task-000000000000"), "onbeat:celery:check"
    return {
        what: (tuple({*roles, CELERY, FLOWER, *(() if what in TASKS_MAY else (TASKS,))}), command)
        for what, (roles, command) in attacks_on_a_job(job_id, seal).items()
    } | {
        "note that a job's files are to go": (not_of_tasks, ("HSET", keys.REMOVED, job_id, b"forged")),
        "take a removal back": ((GATEWAY, *not_of_tasks), ("HDEL", keys.REMOVED, job_id)),
        "read which jobs were removed": (not_of_tasks, ("HGETALL", keys.REMOVED)),
        "forge a task": (not_of_tasks, ("HSET", task, "state", "done")),
        "end a task": (not_of_tasks, ("ZREM", keys.OPEN_TASKS, "task-000000000000")),
        "take the clock": (not_of_tasks, ("HSET", keys.CLOCK, "owner", "x")),
        "read a task": (not_of_tasks, ("HGETALL", task)),
        "send a message of Celery's": (not_celery, ("LPUSH", messages, "x")),
        "take a message of Celery's": (not_celery, ("RPOP", messages)),
        "tell all workers to end": (ROLES, ("PUBLISH", "onbeat:celery:/0.celery.pidbox", "x")),
        "forge an event of Celery's": (not_celery, ("PUBLISH", "onbeat:celery:/0.celeryev/worker.heartbeat", "x")),
        "listen to Celery's events": (not_flower, ("PSUBSCRIBE", "onbeat:celery:/0.celeryev/*")),
    }


def attacks_on_a_job(job_id: str, seal: str = SEAL) -> dict[str, tuple[tuple[str, ...], tuple[Any, ...]]]:
    """What is tried → (the roles that must not, the command)."""
    of_job = JobKeys(job_id, seal=seal)
    not_gateway = (TRAINER, GENERATOR, STAGE, LOADER)
    not_trainer = (GATEWAY, GENERATOR, STAGE, LOADER)
    nobody = ROLES
    return {
        "look at the server": ((GENERATOR, STAGE, LOADER), ("INFO", "server")),
        "forge a job": (not_gateway, ("SET", OpenKeys("job-forged").spec, "{}")),
        "list a job of one's own": (not_gateway, ("ZADD", "onbeat:jobs", 0, "../escape")),
        "make a job active": ((GENERATOR, STAGE, LOADER), ("SADD", "onbeat:active", "../escape")),
        "set a job's state": ((GENERATOR, STAGE, LOADER), ("HSET", of_job.job, "state", "succeeded")),
        "open the fence": ((GENERATOR, STAGE, LOADER), ("HSET", of_job.fence, "state", "open", "version", 9)),
        "take the epoch": ((GENERATOR, STAGE, LOADER), ("HINCRBY", of_job.fence, "epoch", 1)),
        "announce weights": (not_trainer, ("HSET", of_job.weights, 0, b"forged")),
        "put a chunk": (not_trainer, ("HSET", of_job.chunks, "0/m/0", b"forged")),
        "announce a shard": (not_trainer, ("XADD", of_job.shards, "*", "shard", b"forged")),
        "write the audit chain": (not_trainer, ("XADD", of_job.audit, "*", "record", b"forged", "digest", "d")),
        "cut the audit chain": (nobody, ("XTRIM", of_job.audit, "MAXLEN", 0)),
        "forge an event": ((GENERATOR, STAGE, LOADER), ("XADD", of_job.events, "*", "event", b"forged")),
        "publish past the fence": (
            (GATEWAY, TRAINER, LOADER),
            ("XADD", of_job.slots[0].rollouts, "*", "batch", b"forged"),
        ),
        "remove another's rollouts": ((GENERATOR, STAGE, LOADER), ("XTRIM", of_job.slots[0].rollouts, "MAXLEN", 0)),
        "put a column past the scripts": (
            (GATEWAY, TRAINER, LOADER),
            ("HSET", of_job.slots[0].items, "c/0/0/train/0/0", b"forged"),
        ),
        "take a generator's prompt": (
            (GATEWAY, TRAINER, LOADER),
            ("HSET", of_job.slots[0].items, "l/0/0/train/0/0", b"forged"),
        ),
        "hide a stage's work": ((GATEWAY, LOADER), ("ZREM", of_job.slots[0].work, "0/0/train/0/0")),
        "drop the columns": ((GENERATOR, STAGE, LOADER), ("UNLINK", of_job.slots[0].items)),
        "take a stage worker's name off": ((GENERATOR, LOADER), ("HDEL", sealed_name(STAGE_WORKERS, seal), "s")),
        "sign for a stage worker": (
            (GATEWAY, TRAINER, GENERATOR, LOADER),
            ("HSET", sealed_name(STAGE_WORKERS, seal), "s", b"forged"),
        ),
        "delete a rollout": (nobody, ("XDEL", of_job.slots[0].rollouts, "1-0")),
        "delete a job's ledger": ((GENERATOR, STAGE, LOADER), ("DEL", of_job.slots[0].ledger)),
        "unlink a job": (
            (TRAINER, GENERATOR, STAGE, LOADER),
            ("UNLINK", of_job.slots[0].ledger, of_job.fence, of_job.audit),
        ),
        "rename a key": (nobody, ("RENAME", of_job.slots[0].ledger, of_job.audit)),
        "expire a key": (nobody, ("EXPIRE", of_job.audit, 1)),
        "read who submitted what": ((TRAINER, GENERATOR, STAGE, LOADER), ("GET", "onbeat:idempotency:k")),
        "wake the consumers": ((GENERATOR, STAGE, LOADER), ("XADD", "onbeat:changes", "*", "what", "asked")),
        "read a job": ((LOADER,), ("HGETALL", of_job.job)),
        "read the settings": (nobody, ("CONFIG", "GET", "*")),
        "change the settings": (nobody, ("CONFIG", "SET", "dir", "/tmp")),
        "read the users": (nobody, ("ACL", "LIST")),
        "become another": (nobody, ("ACL", "SETUSER", GENERATOR, "+@all")),
        "run own Lua": (nobody, ("EVAL", "return redis.call('TIME')", 0)),
        "run own Lua that only reads": (nobody, ("EVAL_RO", "return 1", 0)),
        "load own Lua": (nobody, ("SCRIPT", "LOAD", "return 1")),
        "forget the scripts": (nobody, ("SCRIPT", "FLUSH")),
        "forget the library": (nobody, ("FUNCTION", "FLUSH")),
        "read the library": ((GATEWAY, TRAINER, GENERATOR, STAGE), ("FUNCTION", "LIST", "WITHCODE")),
        "copy the library": (nobody, ("FUNCTION", "DUMP")),
        "load a library": (
            (GATEWAY, TRAINER, GENERATOR, STAGE),
            ("FUNCTION", "LOAD", "#!lua name=l\nredis.register_function('f', function() end)"),
        ),
        "name a key to a function": (nobody, ("FCALL", "f", 1, of_job.spec)),
        "look into another database": (nobody, ("SELECT", 1)),
        "empty the server": (nobody, ("FLUSHALL",)),
        "empty the database": (nobody, ("FLUSHDB",)),
        "list the keys": (nobody, ("KEYS", "*")),
        "walk the keys": (nobody, ("SCAN", 0)),
        "stop the server": (nobody, ("SHUTDOWN", "NOSAVE")),
        "stop its answers": (nobody, ("DEBUG", "SLEEP", 0)),
        "watch all commands": (nobody, ("MONITOR",)),
        "make it a replica": (nobody, ("REPLICAOF", "127.0.0.1", 1)),
        "copy its data": (nobody, ("PSYNC", "?", -1)),
        "load a module": (nobody, ("MODULE", "LOAD", "/tmp/evil.so")),
        "see the connections": (nobody, ("CLIENT", "LIST")),
        "end another's connection": (nobody, ("CLIENT", "KILL", "TYPE", "normal")),
        "pause everybody": (nobody, ("CLIENT", "PAUSE", 60_000)),
        "listen to channels": (nobody, ("SUBSCRIBE", "any")),
        "listen to all channels": (nobody, ("PSUBSCRIBE", "*")),
        "call those who wait for weights": (not_trainer, ("PUBLISH", of_job.shards, "")),
        "wake another's workers": ((GATEWAY, LOADER), ("PUBLISH", wake_channel("w"), "")),
        "move a key to another server": (nobody, ("MIGRATE", "127.0.0.1", 1, of_job.spec, 0, 1000)),
        "restore a key": (nobody, ("RESTORE", of_job.slots[0].ledger, 0, b"")),
        "write into another namespace": (nobody, ("SET", "somebody:else", "1")),
        "take a right that is no key": (nobody, ("SET", f"onbeat:role:{TRAINER}", "1")),
    }


@pytest.mark.parametrize("what", attacks("J"))
def test_the_server_refuses_what_is_not_the_roles(what: str, redis_server: EmbeddedRedis, job: Job) -> None:
    who, command = attacks(job.job_id, redis_server.seal)[what]
    for role in who:
        with raw(redis_server, role) as client, pytest.raises(ResponseError) as caught:
            client.execute_command(*command)
        # DEBUG and MODULE are switched off for all users, before the server looks at the user's rights.
        assert isinstance(caught.value, NoPermissionError) or "command not allowed" in str(caught.value)


@pytest.mark.parametrize("script", SCRIPT_ROLES)
def test_a_script_of_another_role_is_refused_at_its_head(
    script: str, redis_server: EmbeddedRedis, operator: redis.Redis, job: Job
) -> None:
    keys = job.broker.job_keys(job.job_id)
    before = {key: operator.dump(key) for key in every_key(keys)}
    told = encode({"epoch": job.trainer.trainer_epoch})
    for role in {GATEWAY, TRAINER, GENERATOR, STAGE, TASKS, CELERY} - set(SCRIPT_ROLES[script]):
        with raw(redis_server, role) as client, pytest.raises(ResponseError, match=f"may run {script}"):
            client.fcall(function_name(script), 0, job.job_id, "1", told, "", "", "")
    for role in (FLOWER, LOADER):
        with raw(redis_server, role) as client, pytest.raises(NoPermissionError):
            client.fcall(function_name(script), 0)
    assert before == {key: operator.dump(key) for key in every_key(keys)}


def test_the_write_script_gives_nobody_more_than_his_own_rights(redis_server: EmbeddedRedis, job: Job) -> None:
    gateway = brokers(redis_server)[GATEWAY]
    for command, name in (("HSET", "weights"), ("XADD", "audit")):
        with pytest.raises(InvalidInput, match="may not do that"):
            gateway.write(command, name, *(["0", "x"] if command == "HSET" else ["*", "record", "x"]), job=job.job_id)


def test_who_claims_may_listen_to_its_own_channel_and_to_files_of_the_next_version(
    redis_server: EmbeddedRedis, job: Job
) -> None:
    by_role = brokers(redis_server)
    generator = GeneratorSide(by_role[GENERATOR], job.job_id, "g")
    assert [generator.wait_for_prompts(0.01) for _ in range(2)] == [[], []]
    assert StageSide(by_role[STAGE], job.job_id, "s").wait_for_wake(0.01) == {wake_channel("s")}


def called(script: str) -> Iterator[tuple[str, str]]:
    """(command, variable of its key or "") of every call that the script can reach, through the prelude too."""
    functions = dict(re.findall(r"^local function (\w+)\([^)]*\)\n(.*?)^end$", PRELUDE, re.MULTILINE | re.DOTALL))
    texts, seen = [scripts()[script]], set()
    while texts:
        text = texts.pop()
        yield from (("XADD", name) for name in re.findall(r"wake\('(\w+)'\)", text))
        for command, rest in CALL.findall(text):
            if "job_key(name)" in rest:
                continue
            found, made, of_group = KEY.search(rest), MADE.search(rest), GROUP_CALL.search(rest)
            name = f"{command} {of_group[1]}" if command == "XGROUP" and of_group else command
            yield name, made[1] if made else found[0] if found else ""
        reached = {name for name in functions if re.search(rf"\b{name}\(", text)} - seen
        seen |= reached
        texts += [functions[name] for name in reached]


@pytest.mark.parametrize("script", sorted(SCRIPT_ROLES.keys() - {"write", "seal"}))
def test_a_role_may_do_all_that_its_scripts_do(script: str, operator: redis.Redis) -> None:
    """A function whose role lacks a right would stop halfway: functions don't roll back."""
    calls = set(called(script))
    assert calls
    for command, variable in calls:
        for key in _keys_of(script, variable):
            arguments = [key if word == FIRST else word for word in SAMPLES[command]]
            for role in SCRIPT_ROLES[script]:
                answer = operator.execute_command("ACL", "DRYRUN", f"dry-{role}", *command.split(), *arguments)
                assert answer == b"OK", f"{script} as {role}: {command} {' '.join(arguments)}: {answer}"


DRY = (GATEWAY, TRAINER, GENERATOR, STAGE, TASKS, CELERY)


@pytest.fixture(scope="module", autouse=True)
def dry_users(redis_server: EmbeddedRedis) -> Iterator[None]:
    """Users with the roles' rights under the seal of the samples; no password opens one."""
    operator = redis.Redis.from_url(redis_server.url)
    for role in DRY:
        operator.execute_command("ACL", "SETUSER", f"dry-{role}", "reset", *_words(rules(role, SEAL)))
    yield
    operator.acl_deluser(*(f"dry-{role}" for role in DRY))


def _words(text: str) -> list[str]:
    """The rules of a user as ACL SETUSER takes them: a selector is one of them."""
    return re.findall(r"\([^)]*\)|\S+", text)


def _keys_of(script: str, variable: str) -> list[str]:
    if variable == "stream":
        return [slot.rollouts for slot in KEYS.slots]
    if variable in OF_SLOT:
        return [getattr(slot, OF_SLOT[variable]) for slot in KEYS.slots]
    if script == "remove_job" and not variable:
        return every_key(KEYS)
    if script in ("beat", "present"):
        return [sealed_name("generators", SEAL)] if variable == "GENERATOR" else []
    if script == "send_message":
        return ["onbeat:celery:check"]
    if variable in NAMED:
        return [NAMED[variable]]
    return [getattr(KEYS, variable)] if variable else [""]


def test_every_script_says_who_may_run_it() -> None:
    assert scripts().keys() == SCRIPT_ROLES.keys()
    assert library_text().count("if not (redis.acl_check_cmd(") == len(SCRIPT_ROLES)


def test_a_role_waits_for_a_server_that_is_about_to_be_given_its_scripts(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedRedis(tmp_path_factory.mktemp("fresh")) as server:
        gateway = connect(StackSettings(redis_url=server.url_of(GATEWAY)))
        operator = redis.Redis.from_url(server.url)
        operator.function_flush()
        asked: list[str] = []

        def loads_late() -> bool:
            asked.append("library")
            if len(asked) == 2:
                server.restart()
            return Broker._load(gateway)

        monkeypatch.setattr(gateway, "_load", loads_late)
        JobStore(gateway).create(job_spec())
        assert asked == ["library", "library"]
