"""The rights in Redis: a user for each role, with the commands and keys that its part of the protocol needs.

    gateway     creates, cancels, resumes and removes jobs; reads everything of a job
    trainer     consumers' workers and trainers: fence, weights, audit chain
    generator   claims prompts, publishes rollouts; of the fence, the weights and the job it is a reader
    stage       stage workers: claim rows of published batches and put their columns; of the rest they are readers
    celery      the messages from gateways to consumers
    loader      puts scripts/*.lua on the server, when the server starts; nothing else

Redis applies these rules to every command, those inside of a script too. So that no user brings scripts of its own, no
role may EVAL or SCRIPT LOAD, and each script asks at its head for the role that it is written for (`gate`): it refuses
before it writes anything. `users_acl` is the file for Redis' `aclfile`.

Imports the standard library only: the image of the Redis service is built with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

GATEWAY, TRAINER, GENERATOR, STAGE = "gateway", "trainer", "generator", "stage"
CELERY, LOADER = "celery", "loader"
ROLES = (GATEWAY, TRAINER, GENERATOR, STAGE, CELERY, LOADER)
OPERATOR = "default"
"""The user that runs the server, with every right."""

SCRIPT_ROLES: Mapping[str, tuple[str, ...]] = {
    "acquire_trainer": (TRAINER,),
    "announce_shard": (TRAINER,),
    "claim_prompt": (GENERATOR,),
    "claim_replay": (GENERATOR,),
    "claim_rollouts": (TRAINER,),
    "claim_rows": (STAGE,),
    "commit_iteration": (TRAINER,),
    "create_job": (GATEWAY,),
    "dispatch": (TRAINER,),
    "drop_chunks": (TRAINER,),
    "fail_batch": (GENERATOR,),
    "fail_rows": (STAGE,),
    "open_iteration": (TRAINER,),
    "publish_batch": (GENERATOR,),
    "publish_weights": (TRAINER,),
    "put_chunk": (TRAINER,),
    "put_rows": (STAGE,),
    "reconcile": (TRAINER,),
    "renew_prompts": (GENERATOR,),
    "renew_replay": (GENERATOR,),
    "renew_rows": (STAGE,),
    "renew_trainer": (TRAINER,),
    "remove_job": (GATEWAY,),
    "request_replay": (GATEWAY,),
    "resume_job": (GATEWAY,),
    "restore_chain": (TRAINER,),
    "rewind": (TRAINER,),
    "set_state": (GATEWAY, TRAINER),
    "settle_replay": (GENERATOR,),
    "write": (GATEWAY, TRAINER, GENERATOR, STAGE),
}
"""Script → the roles that may run it."""

EVERY_ROLE = "-@all +@connection -client +client|id +client|setname"
"""PING, HELLO, WAITAOF and the like; of CLIENT nothing that looks at, or ends, another's connection."""
LOOK = (
    "+get +exists +hget +hexists +hmget +hgetall +hkeys +hvals +hlen +hstrlen +smembers"
    " +zrevrange +zrange +zcard +zcount +zscore +zmscore"
)
WATCH = f"{LOOK} +xrange +xrevrange +xlen +xread +xpending +xinfo|stream +memory|usage"

RIGHTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    GATEWAY: (
        ("+time +info +multi +exec +discard", ""),
        (WATCH, "%R~onbeat:{*}:* %R~onbeat:jobs %R~onbeat:active %R~onbeat:generators %R~onbeat:stage_workers"),
        ("+set +get +del", "~onbeat:idempotency:*"),
        # remove_job looks first whether the job has ended.
        ("+unlink", "~onbeat:{*}:*"),
        ("+set", "~onbeat:{*}:spec ~onbeat:persisted"),
        ("+hset +hsetnx +hdel", "~onbeat:{*}:job"),
        ("+xadd", "~onbeat:{*}:events"),
        ("+zadd +zrem", "~onbeat:jobs"),
        ("+sadd +srem", "~onbeat:active"),
        ("+get +incrby +decrby", "~onbeat:spec_bytes"),
        ("+hexists +hset", "~onbeat:removed"),
        ("+hdel", "~onbeat:generators ~onbeat:stage_workers"),
        ("+hget +hgetall +hset +hdel +pexpire", "~onbeat:replays"),
        # A resume, and a cancel, ends the epoch before it and empties the open iteration.
        ("+hset", "~onbeat:{*}:fence"),
        ("+xgroup|create +xgroup|destroy +xtrim", "~onbeat:{*}:prompts* ~onbeat:{*}:rollouts*"),
        ("+del", "~onbeat:{*}:ledger* ~onbeat:{*}:claims* ~onbeat:{*}:work*"),
        ("+hdel", "~onbeat:{*}:progress"),
    ),
    TRAINER: (
        ("+time +info +multi +exec +discard", ""),
        (WATCH, "%R~onbeat:{*}:* %R~onbeat:jobs %R~onbeat:active %R~onbeat:generators %R~onbeat:stage_workers"),
        ("+set", "~onbeat:persisted"),
        ("+hset +hincrby", "~onbeat:{*}:fence ~onbeat:{*}:progress ~onbeat:{*}:counters"),
        ("+hset +hsetnx +hincrby", "~onbeat:{*}:job"),
        ("+hset +hdel +pexpire", "~onbeat:{*}:weights ~onbeat:{*}:chunks"),
        ("+hset +del", "~onbeat:{*}:ledger*"),
        ("+zrem +del", "~onbeat:{*}:claims*"),
        ("+del", "~onbeat:{*}:work*"),
        ("+unlink", "~onbeat:{*}:columns*"),
        ("+hdel", "~onbeat:{*}:progress"),
        ("+xadd +xgroup|create +xgroup|destroy +xtrim", "~onbeat:{*}:prompts*"),
        (
            "+xgroup|create +xgroup|destroy +xreadgroup +xclaim +xautoclaim +xtrim",
            "~onbeat:{*}:rollouts*",
        ),
        ("+xadd", "~onbeat:{*}:audit ~onbeat:{*}:events ~onbeat:{*}:shards"),
        ("+set +get +pexpire +del", "~onbeat:{*}:starting"),
        ("+sadd +srem", "~onbeat:active"),
        ("+hgetall +hset +hdel", "~onbeat:removed"),
        ("+hdel", "~onbeat:generators ~onbeat:stage_workers"),
        ("+xtrim", "~onbeat:{*}:spans"),
    ),
    GENERATOR: (
        # publish_batch looks how much memory is left; of INFO they may ask nothing else.
        ("+time +info|memory +multi +exec +discard", ""),
        (WATCH, "%R~onbeat:{*}:* %R~onbeat:jobs %R~onbeat:active"),
        ("+xreadgroup +xclaim +xpending +xack +xdel +xadd", "~onbeat:{*}:prompts*"),
        ("+xadd", "~onbeat:{*}:rollouts* ~onbeat:{*}:dead ~onbeat:{*}:buried"),
        ("+hset", "~onbeat:{*}:ledger*"),
        ("+zadd +zrem", "~onbeat:{*}:claims*"),
        ("+hincrby", "~onbeat:{*}:counters"),
        ("+hset +hincrby", "~onbeat:{*}:progress"),
        ("+hset +hdel +hgetall", "~onbeat:generators"),
        ("+hget +hgetall +hset +hlen", "~onbeat:replays"),
        ("+xadd", "~onbeat:{*}:spans"),
        # A batch of a job with stages.
        ("+zadd", "~onbeat:{*}:work*"),
        ("+hset", "~onbeat:{*}:columns*"),
        ("+xadd", "~onbeat:{*}:ready"),
    ),
    STAGE: (
        ("+time +multi +exec +discard", ""),
        (WATCH, "%R~onbeat:{*}:* %R~onbeat:jobs %R~onbeat:active"),
        ("+zadd +zrem", "~onbeat:{*}:work*"),
        ("+hset +hdel +hincrby", "~onbeat:{*}:columns*"),
        ("+xadd", "~onbeat:{*}:rollouts* ~onbeat:{*}:ready ~onbeat:{*}:dead ~onbeat:{*}:buried"),
        ("+hset", "~onbeat:{*}:ledger*"),
        ("+hincrby", "~onbeat:{*}:progress ~onbeat:{*}:counters"),
        ("+hset +hdel +hvals", "~onbeat:stage_workers"),
        ("+xadd", "~onbeat:{*}:spans"),
    ),
    CELERY: (
        ("+multi +exec +discard", ""),
        ("+lpush +rpop +brpop +llen +exists +del", "~onbeat:celery:*"),
    ),
    LOADER: (("+script|load", ""),),
}
"""Role → (commands, keys). A command passes that one of these lines allows with all of its keys."""


def gate(script: str) -> str:
    """The head of the script: only the roles that it is written for get past it (Redis asks its own rules)."""
    mays = " or ".join(f"redis.acl_check_cmd('GET', '{marker(role)}')" for role in SCRIPT_ROLES[script])
    refusal = f"NOPERM {' or '.join(SCRIPT_ROLES[script])} may run {script}, this user is neither"
    return f"if not ({mays}) then return redis.error_reply('{refusal}') end\n"


def marker(role: str) -> str:
    """Nothing is ever stored there: a user that may read it has the role."""
    return f"onbeat:role:{role}"


def users_acl(password_hashes: Mapping[str, str]) -> str:
    """The ACL file: a line a user. password_hashes: of OPERATOR and each of ROLES, as `password_hash` makes them."""
    lines = [f"user {OPERATOR} on #{password_hashes[OPERATOR]} ~* &* +@all"]
    lines += [f"user {role} on #{password_hashes[role]} {rules(role)}" for role in ROLES]
    return "\n".join(lines) + "\n"


def rules(role: str) -> str:
    """What stands behind the password of a role's line."""
    selectors = [f"(+get %R~{marker(role)})", "(+evalsha ~onbeat:*)"] if role not in (CELERY, LOADER) else []
    root = EVERY_ROLE
    for commands, names in RIGHTS[role]:
        if names:
            selectors.append(f"({commands} {names})")
        else:
            root = f"{root} {commands}"
    return " ".join(["resetkeys resetchannels", root, *selectors])


def password_hash(password: str) -> str:
    """As an ACL file holds it: SHA-256, so passwords must be random ones."""
    return hashlib.sha256(password.encode()).hexdigest()
