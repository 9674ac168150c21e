"""Settings are closed and bounded, and an orchestrator's variables for a service of our name are ignored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect as types

from contracts.engines import ENGINES, OpenaiOptions, VllmOptions
from contracts.errors import InvalidInput
from contracts.settings import PREFIX, StackSettings, is_service_link, settings_from
from onbeat.stack.options import stack_settings
from onbeat.stack.profile import StackProfile
from tests.refusals import refusal_of
from tests.unit.contracts.test_spec_bounds import unbounded

SERVICE_LINKS = {
    "ONBEAT_SERVICE_HOST": "10.0.0.1",
    "ONBEAT_SERVICE_PORT": "8000",
    "ONBEAT_SERVICE_PORT_HTTP": "8000",
    "ONBEAT_PORT": "tcp://10.0.0.1:8000",
    "ONBEAT_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "ONBEAT_PORT_8000_TCP_PROTO": "tcp",
    "ONBEAT_PORT_8000_TCP_PORT": "8000",
    "ONBEAT_PORT_8000_TCP_ADDR": "10.0.0.1",
    "ONBEAT_PORT_53_UDP_ADDR": "fd00::1",
    "ONBEAT_GATEWAY_SERVICE_HOST": "10.0.0.1",
    "ONBEAT_GATEWAY_PORT": "tcp://10.0.0.1:8000",
    "ONBEAT_REWARD_SERVICE_PORT_8100_TCP_ADDR": "10.0.0.2",
}


def test_the_variables_of_a_service_called_onbeat_stop_no_process() -> None:
    assert settings_from({**SERVICE_LINKS, "ONBEAT_THREADS": "3"}) == StackSettings(threads=3)


def test_a_stack_of_ones_own_is_started_beside_them() -> None:
    assert stack_settings(SERVICE_LINKS) == StackSettings(hub_fetch="operator")


def test_a_port_that_is_a_number_is_ours() -> None:
    assert settings_from({"ONBEAT_PORT": "8100"}).port == 8100


def test_no_setting_is_taken_for_a_service_link() -> None:
    of_engines = (OpenaiOptions(url="http://host"), VllmOptions())
    variables = StackSettings().environment().keys() | {name for one in of_engines for name in one.environment()}
    for variable in variables:
        for value in ("8000", "http://10.0.0.1:8000", "10.0.0.1", "tcp"):
            assert not is_service_link(variable, value), variable


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ONBEAT_SERVICE_PORT", "a secret"),
        ("ONBEAT_PORT_8000_TCP", "8000"),
        ("ONBEAT_PORT_8000", "tcp://10.0.0.1:8000"),
        ("ONBEAT_GATEWAY_PORT", "8000"),
        ("ONBEAT_NAMES", "/web/onbeat"),
        ("ONBEAT_THREAD", "3"),
    ],
)
def test_what_only_looks_like_one_is_refused(variable: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"{variable}: unknown setting"):
        settings_from({variable: value})


@pytest.mark.parametrize("kind", [StackSettings, StackProfile, *ENGINES.values()])
def test_every_number_of_a_stack_has_two_bounds(kind: Any) -> None:
    assert list(unbounded(types.type_info(kind), "", texts=False)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("THREADS", "0"),
        ("PORT", "65536"),
        ("BROKER_TIMEOUT_S", "1e300"),
        ("BROKER_TIMEOUT_S", "nan"),
        ("MAX_RANKS", "-1"),
    ],
)
def test_a_number_beyond_its_bounds_is_refused_by_its_variable(name: str, value: str) -> None:
    with refusal_of(f"{PREFIX}{name}"):
        settings_from({f"{PREFIX}{name}": value})


def test_a_trainer_has_no_more_ranks_than_there_are_cores_unless_the_operator_says_so() -> None:
    assert 1 <= StackSettings().most_ranks <= (os.cpu_count() or 1)
    assert StackSettings(max_ranks=7).most_ranks == 7


@pytest.mark.parametrize("address", ["redis://gateway@redis:6379/0", "redis://gateway:@redis:6379/0"])
def test_the_password_of_redis_may_come_by_itself_and_stands_in_the_address_then(address: str, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("p@ss/w:rd\n")
    given = {"ONBEAT_REDIS_URL": address, "ONBEAT_REDIS_PASSWORD_FILE": str(path)}
    whole = "redis://gateway:p%40ss%2Fw%3Ard@redis:6379/0"
    assert settings_from(given).redis_url == whole
    assert settings_from(given | {"ONBEAT_REDIS_URL": whole}).redis_url == whole, "what a child is given"
    sentinels = given | {"ONBEAT_REDIS_URL": "rediss+sentinel://trainer@a:1,b:2/name/0"}
    assert settings_from(sentinels).redis_url == "rediss+sentinel://trainer:p%40ss%2Fw%3Ard@a:1,b:2/name/0"
    with pytest.raises(
        InvalidInput, match=r"ONBEAT_REDIS_PASSWORD: differs from the password in ONBEAT_REDIS_URL"
    ) as caught:
        settings_from(given | {"ONBEAT_REDIS_URL": "redis://gateway:other@redis:6379/0"})
    assert "other" not in str(caught.value).replace("another", "")
    for bare in ("", "redis://redis:6379/0"):
        with pytest.raises(InvalidInput, match=r"ONBEAT_REDIS_PASSWORD: has no place.*redis://USER@HOST"):
            settings_from(given | {"ONBEAT_REDIS_URL": bare})
    path.write_text("")
    assert settings_from(given).redis_url == address, "an empty file is none"


def test_a_secret_may_be_a_file_and_is_given_once(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("a-long-key\n")
    assert settings_from({"ONBEAT_API_KEY_FILE": str(path)}).api_key == "a-long-key"
    assert settings_from({"ONBEAT_REDIS_URL_FILE": str(path)}).redis_url == "a-long-key"
    with pytest.raises(InvalidInput, match=r"ONBEAT_API_KEY.*: is set both as a variable and as a file"):
        settings_from({"ONBEAT_API_KEY_FILE": str(path), "ONBEAT_API_KEY": "another"})
    with pytest.raises(InvalidInput, match=r"ONBEAT_API_KEY_FILE: .*missing cannot be read"):
        settings_from({"ONBEAT_API_KEY_FILE": str(tmp_path / "missing")})
    with pytest.raises(InvalidInput, match="ONBEAT_RUN_ROOT_FILE: unknown setting"):
        settings_from({"ONBEAT_RUN_ROOT_FILE": str(path)})
