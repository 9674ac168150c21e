"""An address of this host is found by interface or range, and no public one is taken."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from consumer.ranks.hosts import network
from consumer.ranks.hosts.network import OwnAddress, answers, listening_on, own_address
from contracts.errors import InvalidInput

HERE = {
    "lo": [("127.0.0.1", socket.AF_INET)],
    "eth0": [("203.0.113.7", socket.AF_INET), ("8.8.8.8", socket.AF_INET)],
    "eth1": [("fe80::1%eth1", socket.AF_INET6), ("fd00::7", socket.AF_INET6), ("10.1.2.3", socket.AF_INET)],
    "eth2": [("fd01::9", socket.AF_INET6)],
    "eth3": [("9.9.9.9", socket.AF_INET), ("192.168.4.4", socket.AF_INET)],
}


@pytest.fixture
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[Any]] = {
        name: [SimpleNamespace(address=address, family=family) for address, family in addresses]
        for name, addresses in HERE.items()
    }
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: told)


@pytest.mark.usefixtures("_interfaces")
@pytest.mark.parametrize(
    ("named", "address", "interface"),
    [
        ("eth1", "10.1.2.3", "eth1"),
        ("10.0.0.0/8", "10.1.2.3", "eth1"),
        ("10.1.2.9/24", "10.1.2.3", "eth1"),
        ("fd00::/16", "fd00::7", "eth1"),
        ("eth2", "fd01::9", "eth2"),
        ("lo", "127.0.0.1", "lo"),
    ],
)
def test_an_interface_or_a_range_leads_to_its_address(named: str, address: str, interface: str) -> None:
    assert own_address(named) == OwnAddress(address=address, interface=interface)


@pytest.mark.usefixtures("_interfaces")
@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("", "is not set"),
        ("eth9", "`eth9` is no interface or range with an address here"),
        ("172.16.0.0/12", "`172.16.0.0/12` is no interface or range with an address here"),
        ("10.0.0.0/99", "`10.0.0.0/99` is no range of addresses"),
        ("8.8.8.0/24", "8.8.8.8 is a public address"),
        ("fe80::/10", "is no interface or range with an address here"),
    ],
)
def test_what_leads_nowhere_or_to_a_public_address_is_one_clear_error(named: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        own_address(named)
    assert raised.value.field == "ONBEAT_NETWORK"
    assert problem in raised.value.problem


@pytest.mark.usefixtures("_interfaces")
def test_nccl_which_takes_an_interfaces_first_address_is_given_no_other() -> None:
    assert own_address("eth1", by_interface=True).address == "10.1.2.3"
    assert own_address("fd00::/16", by_interface=True).address == "fd00::7"
    assert own_address("192.168.0.0/16").address == "192.168.4.4"
    with pytest.raises(InvalidInput) as raised:
        own_address("192.168.0.0/16", by_interface=True)
    assert raised.value.problem == "192.168.4.4 isn't the first address of eth3, and NCCL would take 9.9.9.9"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_socket_is_bound_before_its_port_is_told_and_answers_until_it_is_closed(address: str) -> None:
    with listening_on(OwnAddress(address=address, interface="lo")) as listening:
        told = f"{address} {listening.getsockname()[1]}"
        assert answers(told, 5.0)
    assert not answers(told, 5.0)
