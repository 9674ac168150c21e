"""`onbeat doctor` where a container's process stands: each service of docker-compose.yml and deploy/kubernetes.

Settings and mounts come from these files, healthy and spoilt. The Redis is a real server with a user for each role.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.connection.roles import CELERY, GENERATOR, TRAINER
from contracts.settings import PREFIX, StackSettings, settings_from
from onbeat.base.process import host_memory
from onbeat.cli import run
from onbeat.doctor import machine, server
from onbeat.doctor.finding import GIB, Level
from onbeat.doctor.service import REWARD_SERVICE, SERVICES, STACK, service_named, service_of
from onbeat.stack.redis import EmbeddedRedis
from tests.chaos.short_job import long_variant
from tests.forked import ForkedChild
from tests.kubernetes import container_of, secrets
from tests.kubernetes import environment as pod_environment
from tests.pipeline import wait_for_exit
from tests.refusals import refusal_of
from tests.rooms.doctor.in_container import bound_by_modes
from tests.unit.test_compose import ON_GPUS, OURS, ROLES, WITH_MESSAGES, interpolated
from tests.unit.test_kubernetes import FOLDER as KUBERNETES
from tests.unit.test_kubernetes import FOUND as MANIFESTS
from tests.unit.test_kubernetes import ROLES as POD_ROLES

ON_A_CPU = [name for name in OURS if name not in ON_GPUS]
"""A healthy container of the others needs a GPU."""
APPS = [*POD_ROLES, "reward"]
PROGRAM = Path(__file__).parent / "in_container.py"
LIMIT_S = 300


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder for the root of a container, which the users of cages may enter as they may enter a container's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "root"


def settings_of(name: str, redis: EmbeddedRedis) -> dict[str, str]:
    """The service's variables in docker-compose.yml, at this server."""
    environment = {key: interpolated(value) for key, value in OURS[name]["environment"].items()}
    environment.pop(f"{PREFIX}REDIS_PASSWORD_FILE", None)
    environment.pop(f"{PREFIX}CELERY_PASSWORD_FILE", None)
    if name in ROLES:
        environment[f"{PREFIX}REDIS_URL"] = redis.url_of(ROLES[name])
    if name in WITH_MESSAGES:
        environment[f"{PREFIX}CELERY_URL"] = redis.url_of(CELERY)
    return environment


def mounts_of(name: str) -> dict[str, bool]:
    """Folder of the service's container in docker-compose.yml → True where it is mounted read-only."""
    volumes = (volume.split(":") for volume in OURS[name].get("volumes", ()))
    return {target: mode == ["ro"] for _, target, *mode in volumes}


def pod_settings(app: str, redis: EmbeddedRedis) -> dict[str, str]:
    """The variables of an app's container in deploy/kubernetes, at this server."""
    environment = pod_environment(MANIFESTS, secrets(KUBERNETES), app)
    if app in POD_ROLES:
        environment[f"{PREFIX}REDIS_URL"] = redis.url_of(POD_ROLES[app])
    return environment


def pod_mounts(app: str) -> dict[str, bool]:
    """Folder of an app's container in deploy/kubernetes → True where it is mounted read-only."""
    mounts = container_of(MANIFESTS, app)["volumeMounts"]
    return {mount["mountPath"]: mount.get("readOnly", False) for mount in mounts}


def make_root(root: Path, mounts: dict[str, bool]) -> None:
    """A container's file system below `root`: its mounts, which it may write or not, and a root that it may not."""
    for folder in ("tmp", "app", "keys"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "keys" / "keys").touch()
    for target, is_read_only in mounts.items():
        folder = root / target.removeprefix("/")
        folder.mkdir(parents=True, exist_ok=True)
        if folder != root / "tmp":
            folder.chmod(0o555 if is_read_only else 0o755)
    (root / "app").chmod(0o555)
    root.chmod(0o555)


def doctor(environment: dict[str, str], root: Path, *, executes: bool = False) -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, finding by subject) of doctor in the container below `root`, which is executed or forked."""
    there = {
        key: str(root / value.removeprefix("/")) if value.startswith(("/runs", "/app", "/keys", "/cache")) else value
        for key, value in environment.items()
    }
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "TMPDIR": str(root / "tmp")} | there
    words = ("doctor", "--json")
    if executes:
        done = subprocess.run(
            [sys.executable, "-m", "onbeat", *words],
            env=environment,
            cwd=root / "app",
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            preexec_fn=bound_by_modes,
        )
        exit_code, answer = done.returncode, done.stdout
        assert answer, done.stderr
    else:
        log = root.with_name("doctor.log")
        command = (sys.executable, str(PROGRAM), str(root / "app"), *words)
        child = ForkedChild("doctor", command=command, environment=environment, log_path=log)
        child.start()
        exit_code = wait_for_exit(child, LIMIT_S)
        answer = next((line for line in log.read_text().splitlines() if line.startswith("{")), "")
        assert answer, child.tail()
    return exit_code, {finding["subject"]: finding for finding in json.loads(answer)["findings"]}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("gateway", "consumer", "producer") else long_variant)
        for name in ON_A_CPU
    ],
)
def test_doctor_finds_nothing_bad_in_a_container_of_a_healthy_stack(
    name: str, redis: EmbeddedRedis, root: Path
) -> None:
    make_root(root, mounts_of(name))
    code, findings = doctor(settings_of(name, redis), root, executes=name == "consumer")
    bad = [finding for finding in findings.values() if finding["level"] == "bad"]
    assert (code, bad) == (0, [])
    assert findings["service"]["says"].startswith(name)
    if name in ROLES:
        assert findings["redis"]["says"].endswith(f"for the role {ROLES[name]}")
    assert ("run root" in findings) is (name in ("gateway", "consumer", "producer", "tasks"))


@long_variant
@pytest.mark.parametrize("app", APPS)
def test_doctor_finds_nothing_bad_in_a_pod_of_a_healthy_stack(app: str, redis: EmbeddedRedis, root: Path) -> None:
    make_root(root, pod_mounts(app))
    code, findings = doctor(pod_settings(app, redis), root)
    bad = [finding for finding in findings.values() if finding["level"] == "bad"]
    assert (code, bad) == (0, [])
    assert findings["service"]["level"] == "ok"


@pytest.mark.parametrize(
    ("service", "other", "problem"),
    [("consumer", "gateway", "can't be written"), ("producer", "stages", "can't be read")],
)
def test_a_run_root_that_a_trainer_may_not_write_or_a_generator_lacks_is_bad(
    service: str, other: str, problem: str, redis: EmbeddedRedis, root: Path
) -> None:
    make_root(root, mounts_of(other))
    code, findings = doctor(settings_of(service, redis), root)
    assert (code, findings["run root"]["level"]) == (1, "bad")
    assert problem in findings["run root"]["says"]


@pytest.mark.parametrize(("objects", "level"), [("", Level.OK), ("s3://bucket/prefix", Level.BAD)])
def test_a_gateway_whose_files_come_from_an_object_store_needs_a_run_root_that_it_may_write(
    objects: str, level: Level, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK or Path(path) != tmp_path)
    settings = StackSettings(objects=objects)
    findings = {finding.subject: finding for finding in machine.look(settings, tmp_path, 0, service_named("gateway"))}
    assert findings["run root"].level is level


@pytest.mark.parametrize("name", OURS)
def test_each_service_of_compose_is_known_by_its_settings(name: str, redis: EmbeddedRedis) -> None:
    settings = settings_from(settings_of(name, redis))
    service = service_of(settings)
    assert service.name == ON_GPUS.get(name, name)
    assert service.role == ROLES.get(name, "")


def test_a_service_is_known_by_its_user_where_redis_is_away_and_one_with_every_right_is_a_stack(
    redis: EmbeddedRedis, tmp_path: Path
) -> None:
    away = StackSettings(redis_url=f"unix://{GENERATOR}:word@{tmp_path}/none.sock?db=0")
    assert service_of(away).name == "producer"
    (finding,) = server.look(away, service_of(away))
    assert (finding.level, "ONBEAT_REDIS_URL" in finding.cure) == (Level.BAD, True)
    assert service_of(StackSettings(redis_url=redis.url)) is STACK
    assert service_of(StackSettings()) is STACK
    assert service_of(StackSettings(reward_key="k")) is REWARD_SERVICE
    assert service_of(StackSettings(reward_key="k", api_key="a")) is STACK


def test_a_chosen_service_counts_and_an_unknown_one_is_refused_with_the_names(
    redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(f"{PREFIX}REDIS_URL", raising=False)
    (finding,) = server.look(StackSettings(), service_named("producer"))
    assert (finding.level, finding.says.startswith("ONBEAT_REDIS_URL is not set")) == (Level.BAD, True)
    assert run(["doctor", "--service", "worker"]) == 2
    told = capsys.readouterr()
    assert all(service.name in told.err + told.out for service in SERVICES)
    with refusal_of("--service"):
        service_named("")


def test_a_role_is_told_what_of_the_server_it_may_not_see(redis: EmbeddedRedis) -> None:
    subjects = {
        role: {finding.subject: finding for finding in server.look(settings, service_of(settings))}
        for role in ROLES.values()
        for settings in [StackSettings(redis_url=redis.url_of(role))]
    }
    assert {"redis", "redis memory", "redis file", "redis replicas", "clock"} <= subjects[TRAINER].keys()
    assert "onbeat doctor in the gateway" in subjects[GENERATOR]["redis file"].says
    assert all(finding.level is not Level.BAD for findings in subjects.values() for finding in findings.values())


def test_memory_that_holds_files_which_were_read_counts_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{4 * GIB - 4096}\n")
    assert host_memory.left_bytes(tmp_path) == 4096
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB - 4096}\n")
    assert host_memory.left_bytes(tmp_path) == 3 * GIB


def test_a_process_without_a_model_needs_little_memory() -> None:
    assert machine.of_memory(GIB / 4, swap_share=0.0, holds_model=False).level is Level.OK
    assert machine.of_memory(GIB / 32, swap_share=0.0, holds_model=False).level is Level.BAD
