"""The name of a container, by its files and by a resolver that answers well, badly or not at all."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

import consumer.__main__
import consumer.supervisor.__main__
from contracts.errors import InvalidInput
from contracts.settings import MAX_NAME, PREFIX, StackSettings, settings_from
from onbeat.base.http.server import serve
from onbeat.base.telemetry import container_name as module
from onbeat.base.telemetry.container_name import container_name, named
from onbeat.stack.ports import free_port
from onbeat.work.program import run_worker

HASH = "52f153826d04"
ADDRESS = "172.18.0.3"
Reply = Callable[[bytes], bytes]


def labels(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def answer_with(*names: str, flags: int = 0x8180, change_id: int = 0) -> Reply:
    """Docker's way: the question comes back, and each record's own name is a pointer to it (0xC00C)."""

    def reply(question: bytes) -> bytes:
        (number,) = struct.unpack_from("!H", question)
        records = b"".join(
            b"\xc0\x0c" + struct.pack("!2HIH", 12, 1, 600, len(labels(name))) + labels(name) for name in names
        )
        return struct.pack("!6H", number ^ change_id, flags, 1, len(names), 0, 0) + question[12:] + records

    return reply


@contextmanager
def resolver(reply: Reply | None) -> Iterator[tuple[int, list[bytes]]]:
    """(port, questions) of a nameserver on loopback; it is silent where reply is None."""
    questions: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                question, client = server.recvfrom(4096)
                if not question:
                    return
                questions.append(question)
                if reply is not None:
                    server.sendto(reply(question), client)

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        try:
            yield port, questions
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", ("127.0.0.1", port))
            thread.join()


def container(root: Path, *, hosts: str = f"{ADDRESS}\t{HASH}", nameserver: str = "127.0.0.1", mark: str = "") -> Path:
    """The files of a container that Docker, or podman, makes."""
    (root / "etc").mkdir()
    (root / "run").mkdir()
    (root / (mark or ".dockerenv")).touch()
    (root / "etc/hosts").write_text(f"127.0.0.1\tlocalhost\n{hosts}  # this one\n10.0.0.9 other\n")
    (root / "etc/resolv.conf").write_text(f"# of the engine\nsearch lan\nnameserver {nameserver}\noptions ndots:0\n")
    return root


def name_in(root: Path, port: int, **options: float) -> str:
    return container_name(root, hostname=HASH, environment={}, port=port, **options)  # type: ignore[arg-type]


def test_a_container_of_docker_is_called_as_its_resolver_says(tmp_path: Path) -> None:
    with resolver(answer_with("onbeat-producer-2.onbeat_stack")) as (port, questions):
        assert name_in(container(tmp_path), port) == "onbeat-producer-2"
    (question,) = questions
    assert question[12:] == labels("3.0.18.172.in-addr.arpa") + struct.pack("!2H", 12, 1)


def test_a_container_of_podman_is_called_as_its_file_of_hosts_says_and_asks_no_resolver(tmp_path: Path) -> None:
    root = container(tmp_path, hosts=f"{ADDRESS}\t{HASH} onbeat_producer_2", mark="run/.containerenv")
    with resolver(answer_with("other.network")) as (port, questions):
        assert name_in(root, port) == "onbeat_producer_2"
    assert questions == []


def test_a_container_of_podman_whose_root_is_read_only_is_known_by_its_environment(tmp_path: Path) -> None:
    root = container(tmp_path, hosts=f"{ADDRESS}\t{HASH} onbeat_producer_2", mark="elsewhere")
    named_here = {"container": "podman"}
    with resolver(answer_with("other.network")) as (port, _):
        assert container_name(root, hostname=HASH, environment=named_here, port=port) == "onbeat_producer_2"
        assert container_name(root, hostname=HASH, environment={}, port=port) == ""


def test_of_several_names_the_containers_own_is_taken_and_not_its_hash_or_its_service(tmp_path: Path) -> None:
    names = (f"{HASH}.onbeat_stack", "producer.onbeat_stack", "onbeat-producer-2.onbeat_stack")
    with resolver(answer_with(*names)) as (port, _):
        assert name_in(container(tmp_path), port) == "onbeat-producer-2"


BROKEN: dict[str, Reply] = {
    "no such name": answer_with(flags=0x8183),
    "an answer to another question": answer_with("evil", change_id=1),
    "a question": answer_with("evil", flags=0x0100),
    "only the hash": answer_with(f"{HASH}.onbeat_stack"),
    "a name that can't stand in an id": answer_with("a b.onbeat_stack", "../x.y", "\x1b[2J"),
    "nothing": lambda question: b"",
    "half an answer": lambda question: answer_with("onbeat-producer-2")(question)[:-4],
    "a circle of pointers": lambda question: answer_with("x")(question)[:12] + b"\xc0\x0c" * 20,
    "bytes that are no text": lambda question: answer_with("x")(question)[:-3] + b"\x01\xff\x00",
    "more answers than there are": lambda question: question[:6] + b"\xff\xff" + question[8:],
}


@pytest.mark.parametrize("reply", BROKEN.values(), ids=list(BROKEN))
def test_an_answer_of_no_use_gives_no_name_and_no_error(reply: Reply, tmp_path: Path) -> None:
    with resolver(reply) as (port, questions):
        assert name_in(container(tmp_path), port, within_s=0.5) == ""
    assert len(questions) == 1


def test_a_silent_resolver_costs_the_deadline_once_however_many_addresses_there_are(tmp_path: Path) -> None:
    root = container(tmp_path, hosts="".join(f"172.18.0.{n} {HASH}\n" for n in range(2, 60)))
    begun_s = time.monotonic()
    with resolver(None) as (port, questions):
        assert name_in(root, port, within_s=0.2) == ""
    assert len(questions) == 1
    assert time.monotonic() - begun_s < 10


@pytest.mark.parametrize(
    "case", ["a plain host", "kubernetes", "the hosts' nameserver", "only loopback", "no files", "a bad nameserver"]
)
def test_no_resolver_is_asked_outside_of_a_container_or_beyond_it(case: str, tmp_path: Path) -> None:
    hosts = f"127.0.0.1 {HASH}" if case == "only loopback" else f"{ADDRESS} {HASH}"
    nameserver = {"the hosts' nameserver": "192.0.2.1", "a bad nameserver": "none"}.get(case, "127.0.0.1")
    root = container(tmp_path, hosts=hosts, nameserver=nameserver)
    if case == "a plain host":
        (root / ".dockerenv").unlink()
    if case == "no files":
        (root / "etc/hosts").unlink()
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"} if case == "kubernetes" else {}
    with resolver(answer_with("other.network")) as (port, questions):
        assert container_name(root, hostname=HASH, environment=environment, port=port, within_s=0.5) == ""
    assert questions == []


def test_a_given_name_is_kept_and_a_containers_name_stands_in_logs_and_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "container_name", lambda: "onbeat-consumer-1")
    given = StackSettings(name="producers-7")
    assert named(given) is given
    assert named(StackSettings()).process_name() == "onbeat-consumer-1"
    assert named(StackSettings()).process_id().startswith("onbeat-consumer-1-")
    assert named(StackSettings(), part="trainer 3").process_name() == "onbeat-consumer-1.trainer-3"
    monkeypatch.setattr(module, "container_name", lambda: "c" * 200)
    long = named(StackSettings(), part="trainer")
    assert (len(long.name), long.name.endswith("c.trainer")) == (MAX_NAME, True)
    assert settings_from({"ONBEAT_NAME": long.name}).name == long.name
    monkeypatch.setattr(module, "container_name", lambda: "")
    assert named(StackSettings(), part="trainer").name == ""


def refuse(settings: StackSettings) -> NoReturn:
    """Stands for a part of a process that finds a bad setting, and for one that says something."""
    logging.getLogger("any").warning("here")
    raise InvalidInput("is not set", field="ONBEAT_ANY")


def worker() -> int:
    return run_worker("producer", refuse)


def service() -> int:
    return serve("gateway", refuse, default_port=free_port())


def trainer() -> int:
    return consumer.__main__.main(["job-none"])


def supervisor() -> int:
    return consumer.supervisor.__main__.main()


MAINS: dict[str, tuple[Callable[[], int], str]] = {
    "generators and stage workers": (worker, "onbeat-any-1"),
    "gateway and reward service": (service, "onbeat-any-1"),
    "a consumer": (supervisor, "onbeat-any-1"),
    "a trainer": (trainer, "onbeat-any-1.trainer"),
}


@pytest.mark.usefixtures("restored_process")
@pytest.mark.parametrize(("main", "name"), MAINS.values(), ids=list(MAINS))
def test_each_process_in_a_container_has_its_name_in_its_log(
    main: Callable[[], int], name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in [variable for variable in os.environ if variable.startswith(PREFIX)]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(f"{PREFIX}LOG_FORMAT", "json")
    monkeypatch.setattr(module, "container_name", lambda: "onbeat-any-1")
    monkeypatch.setattr(consumer.__main__, "run", lambda settings, _: refuse(settings))
    monkeypatch.setattr(consumer.supervisor.__main__, "run", refuse)
    assert main() != 0
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert {line["name"] for line in lines if line["message"] == "here" or "ONBEAT_ANY" in line["message"]} == {name}
