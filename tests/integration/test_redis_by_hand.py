"""What docs/redis.md has an operator type into redis-cli, typed as it stands there at a server with a running job."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from broker.connection.client import connect
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.test_fence import answer_to, opened

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "redis.md").read_text()
(SECTION,) = re.findall(r"^## By redis-cli\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^127\.0\.0\.1:6379> (.*)$", SECTION, re.MULTILINE)
KEY_ROWS = re.findall(r"^`(\w+)` \| (hash|sorted set|stream)\b", SECTION, re.MULTILINE)
TYPES = {"hash": "hash", "sorted set": "zset", "stream": "stream"}


def test_an_operator_sees_a_running_job_by_the_commands_of_the_docs(redis_server: EmbeddedRedis) -> None:
    operator = connect(StackSettings(redis_url=redis_server.url))
    job = opened(operator)
    generator = job.generator("g1")
    claim, held = generator.claim(60.0), generator.claim(60.0)
    assert claim is not None
    assert held is not None
    generator.publish(claim, answer_to(claim.prompt_batch, "g1"))
    answers = {}
    for command in COMMANDS:
        typed = command.replace("SEAL", operator.seal).replace("JOB", job.job_id)
        with operator.call():
            answers[command.split()[0]] = operator.connections.ask(*typed.split())
    _, names = answers["SCAN"]
    assert f"onbeat:{operator.seal}:{{{job.job_id}}}:rollouts".encode() in names
    assert len(answers["XINFO"]) == 1
    assert held.prompt_batch.batch_id.encode() in answers["HKEYS"]
    assert claim.prompt_batch.batch_id.encode() not in answers["HKEYS"]
    assert answers["ZRANGE"]
    assert answers["XREVRANGE"]
    assert {name for name, _ in KEY_ROWS} >= {"prompts", "work", "rollouts", "ledger"}
    for name, kind in KEY_ROWS:
        key = f"onbeat:{operator.seal}:{{{job.job_id}}}:{name}"
        assert operator.redis.type(key).decode() in (TYPES[kind], "none"), name
    operator.close()


def test_the_password_comes_from_where_the_health_check_of_redis_takes_it() -> None:
    health = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]["healthcheck"]["test"][1]
    own = re.findall(r"REDISCLI_AUTH=\S+.*?REDIS_PASSWORD\)}", SECTION)
    assert own == [health.replace("$$", "$").replace("'", '"').partition(" redis-cli")[0]]
