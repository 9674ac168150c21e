"""Whatever makes work wakes as many of those who wait as there is work for; a wake that is lost holds nothing up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from broker.connection.client import Broker, connect
from broker.connection.own_connections import MOST_CHANNELS
from broker.generator_side import GeneratorSide
from broker.job_store import JobStore
from broker.keys import wake_channel
from broker.leases import FailOutcome
from broker.stage_side import StageSide, wait_for_items
from contracts.jobs import JobState
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from producer.generator import PROMPTS_WAIT_S
from tests.integration.fence_parts import lose_prompts
from tests.integration.stage_parts import GROUP_SIZE, NUM_GROUPS, NUM_ROWS, StagedJob, external, open_job
from tests.integration.test_window import delayed
from tests.integration.window_parts import LEASE_S, NUM_TRAIN, LaggingJob
from tests.until import until

LONG_S, DEADLINE_S, QUIET_S = 600.0, 120.0, 0.2
NUM_WAITING = 12
NAMES = [f"waits-{number}" for number in range(NUM_WAITING)]


class Waiting:
    """Workers whose claims found nothing: each waits in a thread, and claims when it is woken."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._threads = ThreadPoolExecutor(2 * NUM_WAITING)
        self._claims: dict[str, Future[Any]] = {}

    def generators(self, job_id: str, *names: str, **told: Any) -> None:
        for name in names:
            side = GeneratorSide(self._broker, job_id, name)
            self._add(name, partial(side.claim, LEASE_S, **told), side.wait_for_prompts)

    def stage_workers(self, job: StagedJob, stage: str) -> None:
        for name in NAMES:
            side = StageSide(self._broker, job.job_id, f"{stage}-{name}")
            self._add(f"{stage}-{name}", partial(side.claim, stage), partial(wait_for_items, [(side, None)]))

    def _add(self, name: str, claim: Callable[[], Any], wait: Callable[[float], Any]) -> None:
        wait(0.001)  # the first one begins to listen, and ends at once
        assert not claim(), "there is work already"
        self._claims[name] = self._threads.submit(lambda: (wait(LONG_S), claim())[1])

    def woken(self, count: int) -> dict[str, Any]:
        """Name → claim of those that went on: so many, of whom each has found work."""
        ends_s = time.monotonic() + DEADLINE_S
        while sum(claim.done() for claim in self._claims.values()) < count and time.monotonic() < ends_s:
            time.sleep(0.01)
        time.sleep(QUIET_S)
        claims = {name: self._claims.pop(name).result() for name, claim in [*self._claims.items()] if claim.done()}
        assert len(claims) == count
        assert all(claims.values()), "one has claimed in vain"
        return claims

    def close(self) -> None:
        self._broker.break_off()
        self._threads.shutdown()


@pytest.fixture
def broker(redis_server: EmbeddedRedis) -> Broker:
    redis_server.load_scripts()
    return connect(StackSettings(redis_url=redis_server.url))


@pytest.fixture
def waiting(broker: Broker, redis_server: EmbeddedRedis) -> Iterator[Waiting]:
    waiting = Waiting(connect(StackSettings(redis_url=redis_server.url)))
    yield waiting
    waiting.close()


def num_calls(broker: Broker) -> int:
    stats: Any = broker.redis.info("commandstats")
    return stats["cmdstat_fcall"]["calls"]


def at_its_end(job: LaggingJob) -> LaggingJob:
    """All batches of the window are published."""
    job.sample(count=job.spec.num_open * NUM_TRAIN)
    return job


@pytest.mark.parametrize("lag", [0, 2])
def test_an_opening_wakes_a_generator_for_each_batch_and_none_claims_in_vain(
    lag: int, broker: Broker, waiting: Waiting
) -> None:
    job = at_its_end(delayed(broker, lag))
    waiting.generators(job.job_id, *NAMES)
    for iteration in range(2):
        trained, before = job.trained(iteration), num_calls(broker)
        job.commit(iteration, trained)
        claims = waiting.woken(NUM_TRAIN)
        # The version is published, with a word to those that receive it ahead, and the iteration committed.
        assert num_calls(broker) - before == (3 if lag else 2) + NUM_TRAIN
        for name, claim in claims.items():
            job.publish(claim, name)
        waiting.generators(job.job_id, *claims)


@pytest.mark.parametrize("is_released", [False, True])
def test_a_batch_that_comes_back_wakes_one(is_released: bool, broker: Broker, waiting: Waiting) -> None:
    job = delayed(broker, 0)
    held = [job.claim() for _ in range(NUM_TRAIN)]
    waiting.generators(job.job_id, *NAMES)
    expected = FailOutcome.RELEASED if is_released else FailOutcome.RETRIED
    assert job.generator().fail(held[0], "no reward", is_released=is_released) is expected
    waiting.woken(1)


def test_what_a_restart_has_lost_wakes_as_many_as_are_sent_again(broker: Broker, waiting: Waiting) -> None:
    job = delayed(broker, 0)
    for batch in job.batches(0):
        lose_prompts(broker, job.keys, batch.batch_id)
    waiting.generators(job.job_id, *NAMES)
    assert job.trainer.reconcile(0, job.batches(0)) == NUM_TRAIN
    waiting.woken(NUM_TRAIN)
    assert job.trainer.dispatch(0, job.batches(0)) == 0
    waiting.woken(0)


def test_rows_wake_as_many_stage_workers_as_there_are_items_of_their_stage(
    redis_server: EmbeddedRedis, waiting: Waiting
) -> None:
    job = open_job(redis_server, [external("judge", unit="group"), external("after", ["judge"], unit="batch")], count=2)
    for stage in ("judge", "after"):
        waiting.stage_workers(job, stage)
    job.publish()
    claims = waiting.woken(NUM_GROUPS)
    assert all(name.startswith("judge") for name in claims)
    items = [item for claimed in claims.values() for item in claimed]
    side = job.stage()
    side.put([(items[0], job.made(items[0]))])
    waiting.woken(0)
    side.put([(items[1], job.made(items[1]))])
    ((name, (item,)),) = waiting.woken(1).items()
    assert name.startswith("after")
    assert StageSide(job.operator, job.job_id, name).fail(item, "no answer") is FailOutcome.RETRIED
    assert all(name.startswith("after") for name in waiting.woken(1))


def test_an_item_of_each_row_wakes_no_more_than_wait(redis_server: EmbeddedRedis, waiting: Waiting) -> None:
    job = open_job(redis_server, [external("judge")], count=2)
    waiting.stage_workers(job, "judge")
    job.publish()
    assert NUM_ROWS == NUM_GROUPS * GROUP_SIZE < NUM_WAITING
    waiting.woken(NUM_ROWS)
    job.publish()
    waiting.woken(NUM_WAITING - NUM_ROWS)


def called_of(broker: Broker, *names: str) -> list[str]:
    """Those of the names that were called since they were asked for; the first time it begins to listen to them."""
    channels = {wake_channel(name): name for name in names}
    heard = [broker.connections.heard(name, {channel}, 0.01) for channel, name in channels.items()]
    return [channels[channel] for one in heard for channel in one]


def listens(broker: Broker, *names: str) -> None:
    """From here on each hears what it is called for, as a worker does from its first wait on."""
    assert called_of(broker, *names) == list(names), "the first wait ends at once"


def in_vain(job: LaggingJob, prefix: str, **told: Any) -> list[str]:
    """Names of generators that have claimed in vain, one for each batch of an iteration."""
    names = [f"{prefix}-{job.job_id}-{number}" for number in range(NUM_TRAIN)]
    for name in names:
        assert not job.generator(name).claim(LEASE_S, **told)
        time.sleep(0.002)  # The name decides between claims of the same millisecond.
    return names


def test_the_wakes_of_killed_generators_cost_another_no_more_than_its_next_look(broker: Broker) -> None:
    job = at_its_end(delayed(broker, 0))
    (lives, _), killed = in_vain(job, "lives"), in_vain(job, "killed")
    listens(broker, lives, *killed)
    job.commit(0)
    assert called_of(broker, lives, *killed) == killed
    assert not broker.redis.keys(wake_channel("*")), "of a call to the dead nothing is left"
    job.generator(lives).wait_for_prompts(PROMPTS_WAIT_S)
    assert job.claim(lives).prompt_batch.iteration == 1


def test_who_looks_again_is_woken_before_the_dead_and_who_is_idle_before_the_busy(broker: Broker) -> None:
    job = at_its_end(delayed(broker, 0))
    idle, dead = in_vain(job, "idle"), in_vain(job, "dead")
    assert in_vain(job, "idle") == idle
    others = [*in_vain(job, "busy", is_idle=False), *in_vain(job, "without room", oldest_only=True), *dead]
    listens(broker, *idle, *others)
    job.commit(0)
    assert called_of(broker, *idle, *others) == idle


def test_who_has_found_work_meanwhile_is_not_woken(broker: Broker) -> None:
    job = delayed(broker, 0)
    held = [job.claim(), job.claim()]
    (first, second) = in_vain(job, "waits")
    listens(broker, first, second)
    assert job.generator().fail(held[0], "no reward") is FailOutcome.RETRIED
    assert called_of(broker, first, second) == [second]
    job.claim(first)
    assert job.generator().fail(held[1], "no reward") is FailOutcome.RETRIED
    assert called_of(broker, first) == []
    job.claim(second)


def test_a_stage_worker_that_has_found_items_of_one_stage_is_not_woken_for_another(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, [external("judge", unit="batch"), external("after", ["judge"], unit="batch")])
    idle, busy = [f"{name}-{job.job_id}" for name in ("idle", "busy")]
    for name in (idle, busy):
        assert job.stage(name).claim("after") == []
    listens(job.operator, idle, busy)
    job.publish()
    items = job.stage(busy).claim("judge")
    job.stage(busy).put([(item, job.made(item)) for item in items])
    assert called_of(job.operator, idle, busy) == [idle]


@pytest.mark.parametrize("before", ["", "listens", "listens, and loses the connection"])
def test_a_wake_between_a_claim_and_its_wait_is_not_missed(before: str, broker: Broker) -> None:
    job = at_its_end(delayed(broker, 0))
    name, _ = in_vain(job, "waits")
    if before:
        job.generator(name).wait_for_prompts(0.001)
    if "loses" in before:
        broker.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    job.commit(0)
    job.generator(name).wait_for_prompts(LONG_S)
    job.claim(name)


def test_a_wait_goes_on_where_its_connection_breaks(broker: Broker) -> None:
    job = at_its_end(delayed(broker, 0))
    name, _ = in_vain(job, "waits")
    side = job.generator(name)
    side.wait_for_prompts(0.001)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(side.wait_for_prompts, LONG_S)
        while not broker.redis.pubsub_numsub(wake_channel(name))[0][1]:
            time.sleep(0.01)
        time.sleep(QUIET_S)
        assert not waits.done()
        broker.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert waits.result(DEADLINE_S) == [], "what it may have missed meanwhile it looks for"


@pytest.mark.parametrize("calls_while_away", [False, True])
def test_who_reads_too_slowly_and_is_cut_off_by_the_server_misses_nothing(
    calls_while_away: bool, broker: Broker
) -> None:
    job = at_its_end(delayed(broker, 0))
    name, _ = in_vain(job, "waits")
    side = job.generator(name)
    side.wait_for_prompts(0.001)
    limits: Any = broker.redis.config_get("client-output-buffer-limit")
    broker.redis.config_set("client-output-buffer-limit", "pubsub 16kb 16kb 1")
    try:
        # What the sockets hold comes before what the server does.
        until(lambda: not called(broker, name, 10_000), "it to be cut off")
    finally:
        broker.redis.config_set("client-output-buffer-limit", limits["client-output-buffer-limit"])
    if calls_while_away:
        job.commit(0)
        side.wait_for_prompts(LONG_S)
    else:
        with ThreadPoolExecutor(1) as thread:
            assert side.wait_for_prompts(LONG_S) == [], "what it may have missed meanwhile it looks for"
            assert side.claim(LEASE_S) is None
            waits = thread.submit(side.wait_for_prompts, LONG_S)
            time.sleep(QUIET_S)
            assert not waits.done()
            job.commit(0)
            waits.result(DEADLINE_S)
    job.claim(name)


def called(broker: Broker, name: str, num_calls: int) -> int:
    """Calls one who waits so often; answers how many connections listen to that afterwards."""
    with broker.redis.pipeline(transaction=False) as pipe:
        for _ in range(num_calls):
            pipe.publish(wake_channel(name), "")
        pipe.execute()
    return broker.redis.pubsub_numsub(wake_channel(name))[0][1]


@pytest.mark.parametrize("num_calls", [1, 1000])
def test_a_wait_that_is_over_is_not_ended_by_the_same_wake_again(num_calls: int, broker: Broker) -> None:
    """However often it was called: one who calls without need costs a claim."""
    job = at_its_end(delayed(broker, 0))
    name, other = in_vain(job, "waits")
    side = job.generator(name)
    side.wait_for_prompts(0.001)
    job.commit(0)
    for _ in range(num_calls - 1):
        broker.redis.publish(wake_channel(name), "")
    for _ in range(NUM_TRAIN):
        job.claim(other)
    side.wait_for_prompts(LONG_S)
    assert side.claim(LEASE_S) is None
    before_s = time.monotonic()
    side.wait_for_prompts(0.3)
    assert time.monotonic() - before_s >= 0.29


def test_one_who_is_called_without_end_waits_no_longer_than_it_asked_to(broker: Broker) -> None:
    is_over = threading.Event()
    listens(broker, "called")

    def call() -> None:
        while not is_over.is_set():
            with broker.redis.pipeline(transaction=False) as pipe:
                for _ in range(1000):
                    pipe.publish(wake_channel("called"), "")
                pipe.execute()

    with ThreadPoolExecutor(1) as thread:
        calling = thread.submit(call)
        before_s = time.monotonic()
        for _ in range(3):
            assert broker.connections.heard("called", {wake_channel("called")}, 1.0) == {wake_channel("called")}
        assert time.monotonic() - before_s < 10.0
        is_over.set()
        calling.result(DEADLINE_S)


def test_a_wake_that_no_claim_follows_ends_one_wait(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a generator that doesn't reach the reward service: it looks again in its time, and not at once."""
    job = at_its_end(delayed(broker, 0))
    name, _ = in_vain(job, "waits")
    side = job.generator(name)
    side.wait_for_prompts(0.001)
    assert side.claim(LEASE_S) is None
    wait, news = side.wait_for_wake, list[set[str]]()
    monkeypatch.setattr(side, "wait_for_wake", lambda *told: news.append(wait(*told)) or news[-1])
    job.commit(0)
    side.wait_for_prompts(LONG_S)
    side.wait_for_prompts(0.01)
    broker.redis.publish(wake_channel(name), "")
    side.wait_for_prompts(LONG_S)
    assert news == [{wake_channel(name)}, set(), {wake_channel(name)}]


def test_the_channels_of_one_who_waits_on_many_jobs_are_bounded(broker: Broker) -> None:
    for number in range(200):
        assert broker.connections.heard("w", {f"channel-{number}"}, 0.0) == {f"channel-{number}"}
    channels: Any = broker.redis.pubsub_channels("channel-*")
    assert len(channels) <= MOST_CHANNELS + 1


def test_a_worker_is_woken_by_each_of_its_jobs(broker: Broker, waiting: Waiting) -> None:
    awaited, other = at_its_end(delayed(broker, 0)), at_its_end(delayed(broker, 0))
    name = f"waits-{awaited.job_id}"
    assert other.generator(name).claim(LEASE_S) is None
    awaited.generator(name).wait_for_prompts(0.001)
    assert awaited.generator(name).claim(LEASE_S) is None
    other.commit(0)
    awaited.generator(name).wait_for_prompts(LONG_S)
    other.claim(name)


def test_a_server_that_waits_writes_nothing_to_its_file(server: EmbeddedRedis) -> None:
    broker = connect(StackSettings(redis_url=server.url))
    job = at_its_end(delayed(broker, 0))
    in_vain(job, "waits")
    sizes = []
    for _ in range(2):
        info: Any = broker.redis.info("persistence")
        sizes.append(info["aof_current_size"])
        in_vain(job, "waits")
    assert sizes[0] == sizes[1] > 0


def test_who_waits_is_bounded_and_nothing_is_left_of_a_job_that_was_removed(broker: Broker) -> None:
    job = delayed(broker, 0)
    for _ in range(NUM_TRAIN):
        job.claim()
    broker.redis.zadd(job.keys.waiting, {f"0/{number}": 1 for number in range(4096)})
    late = job.generator("late")
    assert late.claim(LEASE_S) is None
    assert job.generator("x" * 301).claim(LEASE_S) is None
    assert broker.redis.zcard(job.keys.waiting) == 4096
    assert broker.redis.zscore(job.keys.waiting, "0/late") is not None
    assert broker.redis.zscore(job.keys.waiting, f"0/{'x' * 301}") is None
    jobs = JobStore(broker)
    jobs.move(job.job_id, JobState.FAILED)
    assert late.claim(LEASE_S) is None
    assert not broker.redis.exists(job.keys.waiting), "a job that has ended has none who wait, and may stand for long"
    broker.redis.hset(job.keys.fence, "lease_until", 0)
    broker.run("remove_job", b"", job=job.job_id, idempotency_key="", seen_ended_s=None)
    assert late.claim(LEASE_S) is None
    assert not broker.redis.exists(job.keys.waiting)
