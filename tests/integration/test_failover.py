"""A primary that dies or hangs: the sentinels promote a replica, and calls that wait end there, with every function."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.connection.client import Broker, connect
from broker.connection.roles import GATEWAY, GENERATOR, TRAINER
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from contracts.errors import BrokerUnavailable, InvalidInput
from contracts.settings import StackSettings
from tests.builders import job_spec, manifest
from tests.redundant_redis import SHIPPED_MS, Member, RedundantRedis
from tests.until import until

PATIENCE_S = 120.0
CONNECTS_EVERY_MS = 1000
"""How often a sentinel tries to connect to a server, one that was just promoted too; it answers some moments later."""
SHIPPED = Path(__file__).parents[2] / "deploy/sentinel/sentinel.conf"


@pytest.fixture
def redundant(tmp_path: Path) -> Iterator[RedundantRedis]:
    servers = RedundantRedis(tmp_path / "redis")
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


def broker_of(servers: RedundantRedis, role: str = "", *, patience_s: float = PATIENCE_S, replicas: int = 1) -> Broker:
    url = servers.url_of(role) if role else servers.url
    return connect(StackSettings(redis_url=url, redis_replicas=replicas), patience_s=patience_s)


def bring_down(server: Member, sign: signal.Signals) -> None:
    assert server.child.pid is not None
    os.kill(server.child.pid, sign)


def test_sentinels_are_shipped_to_begin_one_after_the_other_and_to_wait_for_the_one_that_they_promoted() -> None:
    """Three that begin at once each vote for themselves; one that waits a second may give up whom it hasn't asked."""
    told = " ".join(SHIPPED.read_text().split())
    first, second, third = SHIPPED_MS
    assert f"{first} at the first sentinel, # {second} at the second, {third} at the third" in told
    assert f"down-after-milliseconds onbeat {first} " in told
    assert first >= 1.5 * CONNECTS_EVERY_MS
    assert min(second - first, third - second) >= 250


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_goes_on_at_the_promoted_server_and_what_was_confirmed_is_there(
    redundant: RedundantRedis, sign: signal.Signals
) -> None:
    operator, trainer = broker_of(redundant), broker_of(redundant, TRAINER)
    job_id, _ = JobStore(operator).create(job_spec())
    side = TrainerSide(trainer, job_id, num_open=1, owner="here", lease_s=600.0)
    epoch = side.acquire()
    first = redundant.primary()
    bring_down(first, sign)
    side.renew()
    assert redundant.until_another(first) is not first
    assert side.fence().trainer_epoch == epoch
    assert JobStore(operator).spec(job_id) == job_spec()
    # The server that comes back is a replica; a connection to it would never be answered.
    if sign is signal.SIGSTOP:
        bring_down(first, signal.SIGCONT)
    else:
        first.child.start()
    side.renew()
    # On a loaded machine the sentinels may take the next primary for dead as well: then it is asked again.
    until(trainer.durability.persisted, "writes on disk", away=(BrokerUnavailable,))
    for broker in (operator, trainer):
        broker.close()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A certificate authority, and the certificate of every server and client."""
    folder = tmp_path / "tls"
    folder.mkdir()
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    ca = "openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca"
    request = "openssl req -newkey rsa:2048 -nodes -keyout host.key -out host.csr -subj /CN=127.0.0.1"
    sign = (
        "openssl x509 -req -in host.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out host.pem -extfile names -days 2"
    )
    for command in (ca, request, sign):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def test_all_of_it_by_tls(tmp_path: Path, certificates: Path) -> None:
    """The wheel's server has no TLS: Debian's has."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs a redis-server with TLS")
    servers = RedundantRedis(tmp_path / "redis", program=Path(program), tls=certificates)
    try:
        servers.start()
        trainer = broker_of(servers, TRAINER)
        assert not trainer.durability.persisted(), "a server of that age can't say what is on its disk"
        first = servers.primary()
        bring_down(first, signal.SIGSTOP)
        trainer.write("SET", "persisted", 1)
        assert not trainer.durability.persisted()
        assert servers.until_another(first) is not first
        bring_down(first, signal.SIGCONT)
        trainer.close()
    finally:
        servers.stop()


def test_a_call_that_waits_for_data_of_a_server_that_hangs_ends_with_the_new_primary(redundant: RedundantRedis) -> None:
    broker = broker_of(redundant, GENERATOR)
    first = redundant.primary()
    bring_down(first, signal.SIGSTOP)
    with broker.call(blocks_s=120.0):
        assert broker.redis.exists("onbeat:jobs") == 0
    bring_down(first, signal.SIGCONT)
    broker.close()


def test_a_consumer_that_waits_hears_of_a_job_from_the_promoted_server(redundant: RedundantRedis) -> None:
    gateway, consumer = JobStore(broker_of(redundant, GATEWAY)), JobStore(broker_of(redundant, TRAINER))
    gateway.create(job_spec())
    newest = consumer.wait_for_changes("0", PATIENCE_S)
    first = redundant.primary()
    bring_down(first, signal.SIGKILL)
    redundant.until_another(first)
    gateway.create(job_spec())
    after = consumer.wait_for_changes(newest, PATIENCE_S)
    assert after > newest


def test_without_enough_replicas_nothing_is_confirmed_announced_or_removed_and_no_lease_is_given(
    redundant: RedundantRedis,
) -> None:
    operator = broker_of(redundant)
    job_id, _ = JobStore(operator).create(job_spec())
    JobStore(operator).request_cancel(ended := JobStore(operator).create(job_spec())[0])
    impatient, gateway = (broker_of(redundant, role, replicas=2) for role in (TRAINER, GATEWAY))
    side = TrainerSide(impatient, job_id, num_open=1, owner="here", lease_s=600.0)
    side.acquire()
    impatient.patience.patience_s = gateway.patience.patience_s = 0.7
    for server in redundant.servers:
        if server is not redundant.primary():
            bring_down(server, signal.SIGSTOP)
            break
    # Each removal of a trainer's files stands behind a renewal.
    for held in (side.renew, lambda: side.publish_weights(manifest(0), oldest_kept=0)):
        with pytest.raises(BrokerUnavailable, match="2 replicas that hold its writes"):
            held()
    for confirmed in (lambda: side.confirm(-1), lambda: JobStore(gateway).remove(ended)):
        with pytest.raises(BrokerUnavailable, match="on disk here and on 2 replicas"):
            confirmed()
    for broker in (operator, impatient, gateway):
        broker.close()


def test_a_stack_whose_confirmations_would_be_worth_nothing_is_refused(
    redundant: RedundantRedis, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidInput, match=r"ONBEAT_REDIS_REPLICAS: asks for 3, and the server has 2"):
        broker_of(redundant, TRAINER, replicas=3, patience_s=1.0).check()
    for server in redundant.servers:
        redundant.ask(server, "CONFIG", "SET", "min-replicas-to-write", 0)
    with pytest.raises(InvalidInput, match=r"ONBEAT_REDIS_URL.*without its replicas.*min-replicas-to-write 1"):
        broker_of(redundant, TRAINER).check()
    broker_of(redundant, TRAINER, replicas=0).check()
    assert "ONBEAT_REDIS_REPLICAS is 0" in caplog.text
