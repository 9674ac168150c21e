"""docker-compose.yml names settings and modules that exist; tests of the processes themselves are elsewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from contracts.settings import PREFIX, settings_from

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if name != "redis"}
SAMPLE_SECRETS = {"REDIS_PASSWORD": "secret", "ONBEAT_API_KEY": "key", "ONBEAT_REWARD_KEY": "reward-key"}


def interpolated(text: str) -> str:
    """`${NAME:-default}` → default, `${NAME:?message}` → a sample secret."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", text)
    return re.sub(r"\$\{(\w+):\?[^}]*\}", lambda match: SAMPLE_SECRETS[match[1]], text)


def test_the_services_are_the_processes_of_the_embedded_stack() -> None:
    assert set(COMPOSE["services"]) == {"redis", "gateway", "consumer", "producer", "reward_service"}


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_module_that_exists_with_settings_that_are_known(name: str) -> None:
    service = OURS[name]
    python, flag, module = service["command"]
    assert (python, flag) == ("python", "-m")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    environment = {key: interpolated(value) for key, value in service["environment"].items()}
    settings = settings_from(environment)
    assert bool(settings.api_key) is (name == "gateway")
    assert bool(settings.reward_key) is (name != "consumer")
    assert settings.allowed_hosts == (name if name in ("gateway", "reward_service") else "")
    if name in ("gateway", "consumer", "producer"):
        assert settings.redis_url == "redis://:secret@redis:6379/0"
        assert environment["OMP_NUM_THREADS"] == environment[f"{PREFIX}THREADS"]


def test_no_secret_has_a_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for secret in SAMPLE_SECRETS:
        assert set(re.findall(rf"\$\{{{secret}(:.)", text)) == {":?"}
        assert re.search(rf"^{secret}=$", (ROOT / ".env.example").read_text(), re.MULTILINE)


def test_the_image_gets_every_package_and_no_environment() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages <= kept
    assert ".env" not in kept
