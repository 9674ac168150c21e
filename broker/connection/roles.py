"""The rights in Redis: a user for each role, with the commands and keys that its part of the protocol needs.

    gateway     creates, cancels, resumes and removes jobs; reads everything of a job
    trainer     consumers' workers and trainers: fence, weights, audit chain
    generator   claims prompts, publishes rollouts; of the fence, the weights and the job it is a reader
    stage       stage workers: claim rows of published batches and put their columns; of the rest they are readers
    tasks       workers of tasks and the clock: they run what a request or the clock starts, and forget ended jobs
    celery      Celery's messages, which say that there is a task; beside them it may call one bounded function
    flower      Celery's page: hears what workers of tasks say of their messages, and how many messages wait
    loader      puts the library of functions on the server, when the server starts; nothing else

Redis applies these rules to every command, those inside of a function too. So no role may bring functions of its own,
and each function asks at its head for the role that it is written for (`gate`): it refuses before it writes anything.

What a function checks its role could write past by hand, where it can name the key. So the keys that generators and
stage workers write have *sealed* names: with a secret in them, the seal, that the library of functions holds and these
roles can't read (decision 18). Gateways and trainers ask for it (`seal`), since they read such keys beside the
functions. What is left to a generator or a stage worker is to call the functions of its role, and to read.
`users_acl` is the file for Redis' `aclfile`; the seal belongs to the data, and is kept beside it.

Imports the standard library only: the image of the Redis service is built with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

GATEWAY, TRAINER, GENERATOR, STAGE = "gateway", "trainer", "generator", "stage"
TASKS, CELERY, FLOWER, LOADER = "tasks", "celery", "flower", "loader"
ROLES = (GATEWAY, TRAINER, GENERATOR, STAGE, TASKS, CELERY, FLOWER, LOADER)
WITHOUT_FUNCTIONS = (FLOWER, LOADER)
"""Roles that may call no function."""
OPERATOR = "default"
"""The user that runs the server, with every right."""
SEAL_MARK = "@SEAL@"
"""Stands for the seal in texts that are made without it."""
UNSEALED = "unsealed"
"""The seal of a server with one password for all: its users can hide nothing from each other."""

SCRIPT_ROLES: Mapping[str, tuple[str, ...]] = {
    "acquire_trainer": (TRAINER,),
    "announce_shard": (TRAINER,),
    "beat": (GATEWAY, TRAINER, GENERATOR, STAGE, TASKS),
    "begin_task": (TASKS,),
    "cancel_task": (GATEWAY,),
    "claim_prompt": (GENERATOR,),
    "claim_rollouts": (TRAINER,),
    "claim_rows": (STAGE,),
    "commit_iteration": (TRAINER,),
    "create_job": (GATEWAY,),
    "create_task": (GATEWAY, TASKS),
    "dispatch": (TRAINER,),
    "drop_chunks": (TRAINER,),
    "due_tasks": (TASKS,),
    "end_task": (TASKS,),
    "fail_batch": (GENERATOR,),
    "fail_rows": (STAGE,),
    "hold_clock": (TASKS,),
    "hosts": (TRAINER,),
    "open_iteration": (TRAINER,),
    "present": (GATEWAY, TRAINER, GENERATOR, STAGE, TASKS),
    "prove_version": (GENERATOR,),
    "publish_batch": (GENERATOR,),
    "publish_weights": (TRAINER,),
    "put_chunk": (TRAINER,),
    "put_rows": (STAGE,),
    "read_batch": (STAGE,),
    "reconcile": (TRAINER,),
    "record_files": (TRAINER,),
    "renew": (GENERATOR, STAGE),
    "renew_task": (TASKS,),
    "renew_trainer": (TRAINER,),
    "remove_job": (GATEWAY, TASKS),
    "report_spans": (GENERATOR, STAGE),
    "resume_job": (GATEWAY,),
    "restore_chain": (TRAINER,),
    "rewind": (TRAINER,),
    "seal": (GATEWAY, TRAINER, TASKS),
    "send_message": (CELERY,),
    "set_state": (GATEWAY, TRAINER),
    "write": (GATEWAY, TRAINER, TASKS),
}
"""Script → the roles that may run it."""

EVERY_ROLE = "-@all +@connection -select -client +client|id +client|setname"
"""PING, HELLO, WAITAOF and the like; of CLIENT nothing that looks at, or ends, another's connection. Everything of ours
is in database 0: what a role wrote into another one would stay there for ever."""
LOOK = (
    "+get +exists +hget +hexists +hmget +hgetall +hkeys +hvals +hlen +hstrlen +smembers"
    " +zrevrange +zrange +zcard +zcount +zscore +zmscore"
)
WATCH = f"{LOOK} +xrange +xrevrange +xlen +xread +xpending +xinfo|stream +memory|usage"

S = f"onbeat:{SEAL_MARK}"
"""The beginning of sealed names."""

WORKERS = (
    ("+time", ""),
    (WATCH, f"%R~onbeat:{{*}}:* %R~onbeat:jobs %R~onbeat:active %R~{S}:*"),
    ("+zadd +zrem", f"~{S}:{{*}}:work*"),
    ("+hset +hdel", f"~{S}:{{*}}:items*"),
    ("+xadd", f"~{S}:{{*}}:rollouts* ~{S}:{{*}}:dead ~{S}:{{*}}:buried ~{S}:{{*}}:spans"),
    ("+hset", f"~{S}:{{*}}:ledger*"),
    ("+hset +hincrby", f"~{S}:{{*}}:progress"),
    ("+hincrby", f"~{S}:{{*}}:counters"),
    ("+hset +del", f"~{S}:{{*}}:claimers"),
    ("+zadd +zrem +zremrangebyrank", f"~{S}:{{*}}:waiting"),
    ("+zrem", f"~{S}:{{*}}:missing"),
    ("+publish", "&onbeat:wake:*"),
    ("+subscribe", "&onbeat:wake:* &onbeat:{*}:shards"),
)
"""Rights that generators and stage workers have in common."""

TASK_KEYS = "onbeat:task:* ~onbeat:tasks ~onbeat:open_tasks ~onbeat:task_names ~onbeat:task_counts ~onbeat:clock"
REMOVAL = (
    # remove_job looks first whether the job has ended.
    ("+unlink", f"~onbeat:{{*}}:* ~{S}:{{*}}:*"),
    ("+get +del", "~onbeat:idempotency:*"),
    ("+zrem", "~onbeat:jobs"),
    ("+srem", "~onbeat:active"),
    ("+decrby", "~onbeat:spec_bytes"),
    ("+hget +hincrby +hdel", "~onbeat:owners"),
    ("+hexists +hset", "~onbeat:removed"),
    ("+xadd", "~onbeat:{*}:events ~onbeat:changes"),
    ("+set", "~onbeat:persisted"),
)
"""Rights that the removal of a job's keys needs: of gateways, and of the tasks that forget ended jobs."""

EVENT_CHANNELS = "onbeat:celery:/0.celeryev/*"
"""Channels of Celery's events of workers and tasks (docs/operate.md, Flower), in database 0."""

RIGHTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    GATEWAY: (
        ("+time +info", ""),
        *REMOVAL,
        ("+hgetall", "%R~onbeat:removed"),
        (WATCH, f"%R~onbeat:{{*}}:* %R~onbeat:jobs %R~onbeat:active %R~{S}:*"),
        (WATCH, f"%R~{TASK_KEYS.replace(' ~', ' %R~')}"),
        ("+set", "~onbeat:idempotency:*"),
        ("+set", "~onbeat:{*}:spec"),
        ("+hset +hsetnx +hdel", "~onbeat:{*}:job"),
        ("+zadd", "~onbeat:jobs"),
        ("+sadd", "~onbeat:active"),
        ("+get +incrby", "~onbeat:spec_bytes"),
        # A task is created and cancelled by functions alone: they go by the record.
        ("+hset +unlink", "~onbeat:task:*"),
        ("+zadd +zrem", "~onbeat:tasks ~onbeat:open_tasks"),
        ("+hset +hdel +hincrby", "~onbeat:task_names ~onbeat:task_counts ~onbeat:clock"),
        ("+hdel", f"~{S}:generators ~{S}:stage_workers ~{S}:consumers ~{S}:task_workers"),
        # A resume, and a cancel, ends the epoch before it and empties the open iteration.
        ("+hset", "~onbeat:{*}:fence"),
        ("+xgroup|create +xgroup|destroy +xtrim", f"~{S}:{{*}}:rollouts*"),
        ("+del", f"~{S}:{{*}}:ledger* ~{S}:{{*}}:claims* ~{S}:{{*}}:work* ~{S}:{{*}}:claimers ~{S}:{{*}}:waiting"),
        ("+zadd", f"~{S}:{{*}}:missing"),
        ("+hdel", f"~{S}:{{*}}:progress"),
    ),
    TRAINER: (
        ("+time +info", ""),
        (WATCH, f"%R~onbeat:{{*}}:* %R~onbeat:jobs %R~onbeat:active %R~onbeat:changes %R~{S}:*"),
        ("+set", f"~onbeat:persisted ~onbeat:{{*}}:files ~{S}:{{*}}:hosts"),
        ("+hset +hincrby", f"~onbeat:{{*}}:fence ~{S}:{{*}}:progress ~{S}:{{*}}:counters"),
        ("+hset +hsetnx +hincrby", "~onbeat:{*}:job"),
        ("+hset +hdel +pexpire", "~onbeat:{*}:weights ~onbeat:{*}:probes ~onbeat:{*}:chunks"),
        ("+hdel", f"~{S}:{{*}}:proofs"),
        ("+hset +del", f"~{S}:{{*}}:ledger*"),
        ("+zrem +del", f"~{S}:{{*}}:claims* ~{S}:{{*}}:waiting"),
        ("+zadd", f"~{S}:{{*}}:missing"),
        ("+zadd +zrem +del", f"~{S}:{{*}}:work*"),
        ("+del", f"~{S}:{{*}}:claimers"),
        ("+hset +hdel +unlink", f"~{S}:{{*}}:prompts*"),
        ("+hdel +unlink", f"~{S}:{{*}}:items*"),
        ("+hdel", f"~{S}:{{*}}:progress"),
        ("+xgroup|create +xgroup|destroy +xreadgroup +xclaim +xautoclaim +xtrim", f"~{S}:{{*}}:rollouts*"),
        ("+xadd", "~onbeat:{*}:audit ~onbeat:{*}:events ~onbeat:{*}:shards ~onbeat:changes"),
        ("+publish", "&onbeat:wake:* &onbeat:{*}:shards"),
        ("+set +get +pexpire +del", "~onbeat:{*}:starting"),
        ("+sadd +srem", "~onbeat:active"),
        ("+hdel", f"~{S}:generators ~{S}:stage_workers"),
        ("+hset +hdel", f"~{S}:consumers"),
        ("+xtrim", f"~{S}:{{*}}:spans"),
    ),
    GENERATOR: (
        # publish_batch looks how much memory is left; of INFO they may ask nothing else.
        ("+info|memory", ""),
        *WORKERS,
        ("+hdel", f"~{S}:{{*}}:prompts*"),
        ("+hset +hdel +del", f"~{S}:{{*}}:proofs"),
        ("+zadd +zrem", f"~{S}:{{*}}:claims*"),
        ("+zadd +zremrangebyscore", f"~{S}:{{*}}:missing"),
        ("+hset +hdel", f"~{S}:generators"),
    ),
    STAGE: (*WORKERS, ("+hincrby", f"~{S}:{{*}}:items*"), ("+hset +hdel", f"~{S}:stage_workers")),
    TASKS: (
        ("+time +info", ""),
        *REMOVAL,
        (WATCH, f"%R~onbeat:{{*}}:* %R~onbeat:jobs %R~onbeat:active %R~{S}:*"),
        (f"{WATCH} +zrangebyscore +hset +hdel +hincrby +zadd +zrem +unlink", f"~{TASK_KEYS}"),
        ("+hgetall +hdel", "~onbeat:removed"),
        ("+hset +hdel", f"~{S}:task_workers"),
    ),
    # What Celery's worker and its senders need, and no script: a list for each queue.
    CELERY: (
        ("+multi +exec +discard", ""),
        ("+lpush +rpop +brpop +llen +exists +del", "~onbeat:celery:*"),
        # What a worker does, for Flower; of another channel each worker would hear, and be ended by it.
        ("+publish", f"&{EVENT_CHANNELS}"),
    ),
    FLOWER: (
        ("+multi +exec +discard", ""),
        ("+llen", "%R~onbeat:celery:*"),
        ("+psubscribe +punsubscribe", f"&{EVENT_CHANNELS}"),
    ),
    LOADER: (("+function|load +function|list", ""),),
}
"""Role → (commands, keys and channels). A command passes that one of these lines allows with all of its keys."""


def gate(script: str) -> str:
    """Writes the head of a function: only the roles that it is written for get past it (Redis asks its own rules)."""
    mays = " or ".join(f"redis.acl_check_cmd('GET', '{marker(role)}')" for role in SCRIPT_ROLES[script])
    refusal = f"NOPERM {' or '.join(SCRIPT_ROLES[script])} may run {script}, this user is neither"
    return f"if not ({mays}) then return redis.error_reply('{refusal}') end\n"


def marker(role: str) -> str:
    """Returns the key of a role. Nothing is ever stored there: a user that may read it has the role."""
    return f"onbeat:role:{role}"


def users_acl(password_hashes: Mapping[str, str], seal: str) -> str:
    """Writes the ACL file: a line a user.

    Args:
        password_hashes: Those of OPERATOR and each of ROLES, as `password_hash` makes them.
        seal: The secret part of sealed names.
    """
    lines = [f"user {OPERATOR} on #{password_hashes[OPERATOR]} ~* &* +@all"]
    lines += [f"user {role} on #{password_hashes[role]} {rules(role, seal)}" for role in ROLES]
    return "\n".join(lines) + "\n"


def rules(role: str, seal: str) -> str:
    """Returns the rights of a role, as they stand behind the password of its line."""
    has_functions = role not in WITHOUT_FUNCTIONS
    selectors = [f"(+get %R~{marker(role)})"] if has_functions else []
    root = f"{EVERY_ROLE} +fcall" if has_functions else EVERY_ROLE
    for commands, names in RIGHTS[role]:
        if names:
            selectors.append(f"({commands} {names})".replace(SEAL_MARK, seal))
        else:
            root = f"{root} {commands}"
    return " ".join(["resetkeys resetchannels", root, *selectors])


def password_hash(password: str) -> str:
    """Returns the hash that an ACL file holds: SHA-256, so passwords must be random ones."""
    return hashlib.sha256(password.encode()).hexdigest()
