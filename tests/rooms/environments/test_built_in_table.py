"""The environments that come with Onbeat: their cages, and the versions that the audit chain has of them."""

from __future__ import annotations

from importlib import metadata

import pytest
from msgspec.structs import replace

from contracts.environments.service import EnvironmentTable
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.environments.built_in import BUILT_IN
from reward_service.player import registry

DISTRIBUTIONS = {
    "agent": "onbeat",
    "mcp": "mcp",
    "reasoning_gym": "reasoning-gym",
    "secret_table": "onbeat",
    "tools": "onbeat",
    "trl": "onbeat",
    "verifiers": "verifiers",
}


def test_every_environment_of_ours_may_be_named() -> None:
    assert set(BUILT_IN) == set(DISTRIBUTIONS)
    assert set(DISTRIBUTIONS) <= set(registry.environment_names())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_its_version_is_that_of_the_package_whose_code_it_plays(name: str) -> None:
    distribution = DISTRIBUTIONS[name]
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        with pytest.raises(InvalidInput, match=f"`{name}` needs a package that isn't installed"):
            registry.factory_of(EnvironmentTable(name=name))
    else:
        assert registry.factory_of(EnvironmentTable(name=name))[1] == f"{distribution} {version}"


def test_agents_alone_have_a_loopback_and_the_tools_of_ours_no_more_processes_than_any_environment() -> None:
    wide = {name: dict(environment.limits) for name, environment in BUILT_IN.items()}
    assert {name for name, limits in wide.items() if "loopback" in limits} == {"agent", "verifiers"}
    assert {name for name, limits in wide.items() if limits} == {"agent", "mcp", "verifiers"}


def test_what_runs_code_of_others_is_made_in_no_nursery() -> None:
    imported = {name for name, environment in BUILT_IN.items() if environment.is_only_imported}
    assert imported == {"agent", "mcp", "trl", "verifiers"}


def test_a_list_of_modules_that_names_none_is_refused_when_the_service_starts() -> None:
    with pytest.raises(InvalidInput, match="ONBEAT_TRL_MODULES"):
        registry.operators_parts(replace(StackSettings(), trl_modules="a module"))
