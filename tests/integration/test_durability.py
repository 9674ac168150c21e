"""What a trainer takes for saved: the server's answer where it can tell, and a line in the log where it can't (I4)."""

from __future__ import annotations

import logging
import socketserver
import threading

import pytest

from broker.connection.client import connect
from contracts.errors import BrokerUnavailable
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis


@pytest.mark.parametrize("appendfsync", ["everysec", "always"])
def test_writes_are_confirmed_by_a_server_that_keeps_a_file(server: EmbeddedRedis, appendfsync: str) -> None:
    broker = connect(StackSettings(redis_url=server.url))
    broker.redis.config_set("appendfsync", appendfsync)
    broker.redis.set("a", 1)
    assert broker.durability.persisted()


@pytest.mark.parametrize(
    ("setting", "value", "said"), [("appendonly", "no", "no append-only file"), ("appendfsync", "no", "appendfsync no")]
)
def test_a_server_that_cannot_tell_is_said_once_and_not_waited_for_again(
    server: EmbeddedRedis, setting: str, value: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    broker = connect(StackSettings(redis_url=server.url))
    broker.redis.config_set(setting, value)
    assert [broker.durability.persisted(), broker.durability.persisted()] == [False, False]
    (line,) = [record.getMessage() for record in caplog.records]
    assert said in line


class SlowDisk(socketserver.ThreadingTCPServer):
    """A stand-in for a server whose disk stalls: a sync is on its way, and WAITAOF answers 0 until it is told."""

    allow_reuse_address = True
    daemon_threads = True
    waits = 0
    syncs_at: float = float("inf")
    num_pending = 1

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), SlowDiskAnswers)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, command: str) -> bytes:
        if command == "PING":
            return b"+PONG\r\n"
        if command == "WAITAOF":
            self.waits += 1
            return b"*2\r\n:1\r\n:0\r\n" if self.waits >= self.syncs_at else b"*2\r\n:0\r\n:0\r\n"
        if command == "INFO":
            text = b"aof_last_write_status:ok\r\naof_pending_bio_fsync:%d\r\n" % self.num_pending
            return b"$%d\r\n%s\r\n" % (len(text), text)
        return b"+OK\r\n"


class SlowDiskAnswers(socketserver.StreamRequestHandler):
    server: SlowDisk

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2])
            self.wfile.write(self.server.answer(words[0].decode()))


def test_a_stalled_disk_is_waited_for_and_then_an_error() -> None:
    with SlowDisk() as disk:
        settings = StackSettings(redis_url=f"redis://127.0.0.1:{disk.server_address[1]}/0?protocol=2")
        disk.syncs_at = 3
        assert connect(settings).durability.persisted()
        assert disk.waits == 3
        disk.syncs_at = float("inf")
        with pytest.raises(BrokerUnavailable, match="on disk"):
            connect(settings, patience_s=1.0).durability.persisted()
        disk.shutdown()


def test_a_server_that_looks_as_if_it_never_synced_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with SlowDisk() as disk:
        disk.num_pending = 0
        settings = StackSettings(redis_url=f"redis://127.0.0.1:{disk.server_address[1]}/0?protocol=2")
        broker = connect(settings)
        disk.syncs_at = 2  # at the second look
        assert broker.durability.persisted(), "it was paused during the first look"
        disk.syncs_at = float("inf")
        assert not broker.durability.persisted()
        num_waits = disk.waits
        assert not broker.durability.persisted()
        assert disk.waits == num_waits, "for a while it is not waited for"
        monkeypatch.setattr("broker.connection.durability.ASK_AGAIN_S", 0.0)
        broker = connect(settings)
        assert not broker.durability.persisted()
        disk.syncs_at = 0
        assert broker.durability.persisted()
        disk.shutdown()
