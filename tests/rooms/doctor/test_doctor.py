"""`onbeat doctor`: each check on what hurts and on what doesn't, its exit code, and real servers and a real cage."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker.connection.client import connect
from contracts.settings import StackSettings
from onbeat.base.machine_kernels import ProductSpeed
from onbeat.base.process import host_memory
from onbeat.base.process.own_packages import DISTRIBUTION
from onbeat.cli import run
from onbeat.doctor import cages, machine, server, versions
from onbeat.doctor.finding import GIB, Finding, Level
from onbeat.doctor.service import STACK
from onbeat.stack.ports import free_port
from onbeat.stack.redis import EmbeddedRedis
from tests.unit.onbeat.terminal.test_output import HOSTILE, assert_is_text

REDIS = {"aof_enabled": 1, "aof_last_write_status": "ok"}
MEMORY = {"maxmemory": GIB, "used_memory": 1, "maxmemory_policy": "noeviction"}
BAD, WARN, OK = Level.BAD, Level.WARN, Level.OK


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (machine.cores(4, 0.5, None), OK, "4, load 0.5"),
        (machine.cores(4, 7.0, None), WARN, "7.0 processes want one already"),
        (machine.cores(8, 0.0, 2.0), WARN, "ONBEAT_THREADS=1"),
        (machine.cores(8, 0.0, 8.0), OK, "8, load"),
        (machine.of_memory(8 * GIB, swap_share=0.0), OK, "8.0 GiB"),
        (machine.of_memory(8 * GIB, swap_share=0.5), WARN, "50% of the swap"),
        (machine.of_memory(GIB, swap_share=0.0), WARN, "1.0 GiB are free"),
        (machine.of_memory(GIB / 4, swap_share=0.0), BAD, "0.2 GiB are free"),
        (machine.shared_memory(2.0**26), WARN, "shm_size"),
        (machine.shared_memory(float(GIB)), OK, "1.0 GiB"),
        (machine.open_files(256), WARN, "ulimit -n 4096"),
        (machine.open_files(-1), OK, "no limit"),
        (server.of_memory(MEMORY), OK, "1.0 GiB"),
        (server.of_memory(MEMORY | {"maxmemory": 0}), WARN, "maxmemory is not set"),
        (server.of_memory(MEMORY | {"used_memory": GIB}), WARN, "are in use"),
        (server.of_memory(MEMORY | {"maxmemory_policy": "allkeys-lru"}), BAD, "CONFIG SET maxmemory-policy noeviction"),
        (server.of_file(REDIS, "everysec"), OK, "appendfsync everysec"),
        (server.of_file(REDIS, ""), OK, "appendfsync unknown"),
        (server.of_file(REDIS, "no"), WARN, "CONFIG SET appendfsync everysec"),
        (server.of_file(REDIS | {"aof_enabled": 0}, "everysec"), BAD, "CONFIG SET appendonly yes"),
        (server.of_file(REDIS | {"aof_last_write_status": "err"}, "everysec"), BAD, "its disk"),
        (server.of_clock(0.1), OK, "0.10 s ahead"),
        (server.of_clock(-2.0), WARN, "2.00 s behind"),
        (server.of_clock(60.0), BAD, "NTP"),
        (server.of_trip(0.0002), OK, "0.2 ms"),
        (server.of_trip(0.05), WARN, "keep generators and trainers near it"),
        (cages.of_locks(()), OK, "all locks"),
        (cages.of_locks(("the network",)), WARN, "missing: the network"),
        (cages.of_locks(("no namespaces of their own (processes)",)), WARN, "max_user_namespaces"),
        (versions.of_packages(["here>=1,<2"], lambda _: "1.5"), OK, "all"),
        (versions.of_packages(["here>=1,<2"], lambda _: "2.0"), BAD, "here<2,>=1 is needed, 2.0 is there"),
        (versions.of_packages(["here>=1"], lambda _: None), BAD, "none is there"),
        (versions.of_packages(['peft>=1; extra == "lora"'], lambda _: None), OK, "all"),
        (
            versions.of_products(ProductSpeed(torch_flop_s=1.0e11, onednn_flop_s=2.0e11)),
            OK,
            "100 GFLOP/s a core in float32, and 200 by oneDNN, which new jobs multiply by",
        ),
        (versions.of_products(ProductSpeed(torch_flop_s=1.0e11, onednn_flop_s=1.2e11)), OK, "100 GFLOP/s"),
        (versions.of_products(ProductSpeed(torch_flop_s=1.0e11, onednn_flop_s=0.0)), OK, "100 GFLOP/s"),
        (versions.of_pins({"torch": "2.1"}, lambda _: "2.1+cpu"), OK, "as tested"),
        (versions.of_pins({"torch": "2.1"}, lambda _: "2.2"), WARN, "torch 2.2 for 2.1"),
    ],
)
def test_a_finding_says_how_bad_it_is_and_what_to_do(finding: Finding, level: Level, words: str) -> None:
    assert finding.level is level
    assert words in f"{finding.says} {finding.cure}"
    assert (finding.cure == "") == (level is Level.OK)


def test_a_limit_of_the_control_group_is_read_in_cores_and_bytes(tmp_path: Path) -> None:
    assert machine.quota_cores(tmp_path) is None
    assert host_memory.left_bytes(tmp_path) == float("inf")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine.quota_cores(tmp_path) == 1.5
    assert host_memory.left_bytes(tmp_path) == 2000
    for name in ("cpu.max", "memory.max"):
        (tmp_path / name).write_text("max 100000\n" if name == "cpu.max" else "max\n")
    assert machine.quota_cores(tmp_path) is None
    assert host_memory.left_bytes(tmp_path) == float("inf")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = machine.of_port(taken.getsockname()[1])
    assert (finding.level, "in use" in finding.says) == (BAD, True)
    assert machine.of_port(free_port()).level is OK


def test_a_run_root_that_is_a_file_is_refused_and_one_that_is_missing_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert machine.folder("run root", tmp_path / "file").level is BAD
    assert machine.folder("run root", tmp_path / "a" / "b").says.endswith(str(tmp_path))


def test_the_pins_of_a_clone_are_read() -> None:
    assert versions.pins(versions.PINS)["torch"][0].isdigit()
    assert versions.installed(DISTRIBUTION)
    assert versions.installed("no-such-distribution") is None


def test_a_real_server_is_looked_at_and_its_faults_are_found(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as redis:
        settings = StackSettings(redis_url=redis.url)
        levels = {finding.subject: finding.level for finding in server.look(settings, STACK)}
        assert levels.pop("redis memory") is WARN
        levels.pop("redis distance")  # of a machine that is busy
        assert set(levels.values()) == {OK}
        assert set(levels) == {"redis", "redis file", "redis replicas", "clock"}
        with closing(connect(settings)) as broker:
            broker.redis.config_set("appendonly", "no")
            broker.redis.config_set("maxmemory-policy", "allkeys-lru")
        found = {finding.subject: finding.level for finding in server.look(settings, STACK)}
        assert (found["redis file"], found["redis memory"]) == (BAD, BAD)
        asked = StackSettings(redis_url=redis.url, redis_replicas=1)
        assert {one.subject: one for one in server.look(asked, STACK)}["redis replicas"].says.startswith(
            "ONBEAT_REDIS_REPLICAS"
        )
    (away,) = server.look(settings, STACK)
    assert (away.level, "ONBEAT_REDIS_URL" in away.cure) == (BAD, True)


def test_a_scorer_is_started_in_a_cage_and_nothing_is_left_of_it() -> None:
    finding = cages.look(StackSettings())
    assert finding.level in (OK, WARN)
    assert finding.subject == "cages"


def test_a_wrong_setting_is_a_finding_and_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONBEAT_THREADS", "all")
    assert run(["doctor", "--json"]) == 1
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["healthy"] is False
    found = {finding["subject"]: finding for finding in answer["findings"]}
    assert (found["settings"]["level"], found["settings"]["says"]) == ("bad", "ONBEAT_THREADS: `all` is not a number")
    assert {"onbeat", "packages", "gpu", "cores", "memory", "run root", "redis", "cages"} <= found.keys()


def test_a_machine_that_is_well_ends_with_0_in_a_line_a_finding_and_hostile_text_stays_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONBEAT_MODEL_ROOT", str(tmp_path))
    assert run(["doctor", "--port", str(free_port())]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("ok", "warn") for line in lines)
    assert len(lines) >= 14
    monkeypatch.setenv("ONBEAT_MODEL_ROOT", f"{tmp_path}/{HOSTILE.replace(chr(0), '')}")
    run(["doctor"])
    assert_is_text(capsys.readouterr().out)
