"""The private server of the embedded stack, against the real program."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import socket
import stat
import sys
import threading
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker.connection.probe import RedisServer, check_version, probe
from contracts.errors import BrokerUnavailable, InvalidInput, Unavailable
from onbeat.base.process import child_process
from onbeat.stack.redis import START_ATTEMPTS, EmbeddedRedis, place_socket


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def test_a_started_server_answers_and_names_its_version(server: EmbeddedRedis) -> None:
    assert server.server is not None
    assert server.server.name in ("redis", "valkey")
    assert server.server.version >= (7, 0)
    assert redis.Redis.from_url(server.url).ping()


def test_the_server_appends_to_disk_every_second_and_never_evicts(server: EmbeddedRedis) -> None:
    client = redis.Redis.from_url(server.url, decode_responses=True)
    assert client.config_get("append*")["appendonly"] == "yes"
    assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_the_server_keeps_the_memory_of_a_large_payload_for_the_next_one(server: EmbeddedRedis) -> None:
    """Memory that goes back to the system comes again page by page, each with a fault: two thousand for 8 MB."""
    client = redis.Redis.from_url(server.url)
    if client.info("memory")["mem_allocator"] != "libc" or sys.platform != "linux":  # type: ignore[index]
        pytest.skip("the allocator is not glibc's")
    script = client.register_script("redis.call('HSET', KEYS[1], 'b', ARGV[1])")
    stat_file, faults = Path(f"/proc/{server.child.pid}/stat"), []
    for _ in range(12):
        script(keys=["k"], args=[bytes(2**23)])
        faults.append(int(stat_file.read_text().rpartition(")")[2].split()[7]))
    # A rewrite of the server's file adds the faults of a fork to those that it lasts for.
    assert min(after - before for before, after in itertools.pairwise(faults)) < 1000


def test_a_client_without_the_password_is_refused(server: EmbeddedRedis) -> None:
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(unix_socket_path=str(server.socket), retry=Retry(NoBackoff(), 0)).ping()
    with pytest.raises(InvalidInput, match="password"):
        probe(f"unix://:wrong@{server.socket}")


@pytest.mark.parametrize("place", ["short", "l" * 120], ids=["in its folder", "where that is too long"])
def test_other_users_of_the_machine_can_connect_to_nothing(tmp_path: Path, place: str) -> None:
    with EmbeddedRedis(tmp_path / place) as server:
        assert psutil.Process(server.child.pid).net_connections("inet") == []
        (listener, *_) = psutil.Process(server.child.pid).net_connections("unix")
        assert listener.laddr == str(server.socket)
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
        assert (server.socket.parent == server.folder) == (place == "short")


def test_a_folder_that_others_may_enter_or_that_is_a_strangers_holds_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def owner() -> None: ...

    assert place_socket(tmp_path, owner=owner) == tmp_path / "redis.sock"
    tmp_path.chmod(0o710)
    elsewhere = place_socket(tmp_path, owner=owner).parent
    assert elsewhere != tmp_path
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(InvalidInput, match="--run-dir: neither"):
        place_socket(tmp_path, owner=owner)


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "é '\" \\n %s {}") as server:
        client = redis.Redis.from_url(server.url)
        client.set("key", "value")
        server.restart()
        assert client.get("key") == b"value"
    assert (server.folder / "appendonlydir").is_dir()


def test_a_temporary_folder_goes_with_its_server_and_comes_back_private_after_a_cleaning(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / ("l" * 120))
    with server:
        server.kill()
        shutil.rmtree(server.socket.parent)
        server.restart()
        server.stop()
        shutil.rmtree(server.socket.parent)
        server.socket.parent.symlink_to(tmp_path)
        with pytest.raises(InvalidInput, match="is open to others"):
            server.start()
        server.socket.parent.unlink()
        folder = server.socket.parent
        folder.mkdir()
    del server
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("begun", [b"*11\r\n", b"*1\r\n$16385\r\n", 2**20 * b"x"], ids=["many", "long", "no end"])
def test_a_query_before_the_password_has_a_bound_in_words_and_bytes(server: EmbeddedRedis, begun: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(ConnectionError):
        client.settimeout(20.0)
        client.connect(str(server.socket))
        client.sendall(begun)
        while client.recv(65536):
            """Its refusal comes first."""
    probe(server.url)


def test_the_password_is_on_no_command_line_and_in_no_file_that_others_can_read(server: EmbeddedRedis) -> None:
    password = server.url.split(":")[2].split("@")[0]
    assert server.child.pid is not None
    assert password not in command_line(server.child.pid)
    for path in server.folder.iterdir():
        if path.is_file() and password in path.read_text(errors="replace"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_restart_after_a_stop_keeps_data_pending_entries_and_address(server: EmbeddedRedis) -> None:
    client = redis.Redis.from_url(server.url, decode_responses=True)
    client.xgroup_create("stream", "group", id="0", mkstream=True)
    entry = client.xadd("stream", {"field": "value"})
    client.xreadgroup("group", "reader", {"stream": ">"})
    url = server.url

    server.restart()

    assert server.url == url
    assert client.xrange("stream") == [(entry, {"field": "value"})]
    assert client.xpending("stream", "group")["pending"] == 1


def test_a_killed_server_comes_back_with_what_was_on_disk(server: EmbeddedRedis) -> None:
    client = redis.Redis.from_url(server.url, decode_responses=True)
    client.set("name", "kept")
    client.execute_command("WAITAOF", 1, 0, 0)
    first = server.child.pid

    server.kill()
    assert not server.child.is_running
    with pytest.raises(BrokerUnavailable):
        probe(server.url)
    server.restart()

    assert server.child.pid != first
    assert client.get("name") == "kept"


def test_stop_leaves_no_process(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    assert server.child.pid is not None
    before = {identity for identity in child_process.descendants(1) if identity.pid == server.child.pid}
    server.stop()
    assert not child_process.living(before)
    server.stop()


def test_a_server_that_cannot_listen_is_an_error_with_the_reason(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    (server.socket / "in its place").mkdir(parents=True)
    with pytest.raises(Unavailable, match=r"(?s)redis: the server ended with exit code 1 at its start.*in use"):
        server.start()
    assert not server.child.is_running


class KilledAtItsStart(EmbeddedRedis):
    """A signal ends the server at each of its first `kills` starts."""

    kills = 0
    num_starts = 0

    def _answers(self, deadline_s: float) -> bool:
        self.num_starts += 1
        if self.num_starts <= self.kills:
            self.child.kill()
        return super()._answers(deadline_s)


def test_a_server_that_a_signal_ends_at_its_start_is_started_again_and_not_for_ever(tmp_path: Path) -> None:
    server = KilledAtItsStart(tmp_path / "redis")
    server.kills = 2
    with server:
        assert probe(server.url).version
    assert server.num_starts == 3
    server.kills = 1000
    with pytest.raises(Unavailable, match="redis: the server was killed by signal 9 at its start"):
        server.start()
    assert server.num_starts == 3 + START_ATTEMPTS


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = EmbeddedRedis(tmp_path / "file" / "redis")
    with pytest.raises(InvalidInput, match="--run-dir: "):
        server.start()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.0 400 Bad Request\r\n\r\n", "doesn't answer as Redis does"),
        (b"-LOADING Redis is loading the dataset in memory\r\n" * 9, "loading the dataset"),
        (b"", "Redis does not answer"),
    ],
    ids=["HTTP", "it loads its data", "silence"],
)
def test_what_answers_is_named_where_it_is_no_redis_or_none_yet(answer: bytes, problem: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=answer_all, args=(listener, answer), daemon=True).start()
        with pytest.raises(Unavailable, match=problem):
            probe(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")


def answer_all(listener: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(1024)
            connection.sendall(answer)


@pytest.mark.parametrize(
    ("name", "version", "is_old"),
    [("redis", (6, 2, 14), True), ("redis", (7, 0, 0), False), ("valkey", (7, 1), True), ("valkey", (9, 1, 2), False)],
)
def test_a_server_that_is_too_old_is_named_with_what_is_needed(
    name: str, version: tuple[int, ...], is_old: bool
) -> None:
    server = RedisServer(name=name, version=version)
    if not is_old:
        return check_version(server)
    with pytest.raises(Unavailable, match=rf"{name} {version[0]}\.{version[1]}.* is too old \({name} 7\.\d or newer"):
        check_version(server)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pass/word@127.0.0.1:6379/0",
        "redis://:p@127.0.0.1:word/0",
        "http://:word@x",
        "redis://[word",
        "redis://127.0.0.1:6379/0?word=1",
        "redis://127.0.0.1:6379/0?protocol=word",
        "redis://127.0.0.1:6379/0?protocol=4",
        "unix://:word@",
        "unix://:word@run/redis.sock",
        "unix://:word@/",
        "unix://:pass/word@/run/redis.sock",
        "unix://:pass@/word@/run/redis.sock",
        "unix://:word@/run/redis.sock?db=word",
        "unix://:word@/run/" + 120 * "l",
    ],
)
def test_an_address_that_is_none_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InvalidInput, match="ONBEAT_REDIS_URL: is not a Redis address") as caught:
        probe(url)
    assert "word" not in str(caught.value).replace("password", "").replace("PASSWORD", "")
    assert caught.value.__cause__ is None
