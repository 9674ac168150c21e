"""Where the ranks of several hosts meet: an address of this host, and a socket that is bound before it is told."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from contracts.errors import InvalidInput

FIELD = "ONBEAT_NETWORK"
ADDRESS = "TRAINER_ADDRESS"
"""Environment variable: the address of this host at which its ranks listen."""
BACKLOG = 512


@dataclass(frozen=True, kw_only=True)
class OwnAddress:
    """An address of this host, and the interface that has it."""

    address: str
    interface: str

    @property
    def is_v6(self) -> bool:
        return ipaddress.ip_address(self.address).version == 6


def own_address(network: str, *, by_interface: bool = False) -> OwnAddress:
    """The address that a network means here: of this interface, or in this range of addresses; IPv4 before IPv6.

    by_interface: for NCCL, which takes the first address of the interface, of IPv4 or of IPv6.

    Raises InvalidInput where there is none, and for a public one: what ranks send is neither secret nor signed.
    """
    if not network:
        raise InvalidInput(
            "is not set, and the job's ranks are those of several hosts",
            field=FIELD,
            cure="name the interface, or the range of addresses, over which these hosts reach each other",
        )
    known = list(_own_addresses())
    if "/" in network:
        inside = _range(network)
        matching = [own for own in known if ipaddress.ip_address(own.address) in inside]
    else:
        matching = [own for own in known if own.interface == network]
    if not matching:
        there = ", ".join(sorted({f"{own.interface} ({own.address})" for own in known}))
        raise InvalidInput(
            f"`{network}` is no interface or range with an address here", field=FIELD, cure=f"name one of {there}"
        )
    # The first address of IPv4, or else the first of IPv6.
    chosen = min(matching, key=lambda own: own.is_v6)
    alike = [own for own in known if (own.interface, own.is_v6) == (chosen.interface, chosen.is_v6)]
    if by_interface and alike[0] != chosen:
        raise InvalidInput(
            f"{chosen.address} isn't the first address of {chosen.interface}, and NCCL would take {alike[0].address}",
            field=FIELD,
            cure="name an interface of these hosts' network alone",
        )
    if ipaddress.ip_address(chosen.address).is_global:
        raise InvalidInput(
            f"{chosen.address} is a public address", field=FIELD, cure="name a network that only these hosts reach"
        )
    return chosen


def listening_on(own: OwnAddress) -> socket.socket:
    """Opens a socket that listens there, at a port of the kernel's choice. Raises InvalidInput where it can't."""
    family = socket.AF_INET6 if own.is_v6 else socket.AF_INET
    try:
        return socket.create_server((own.address, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidInput(f"cannot listen on {own.address}: {error.strerror}", field=FIELD) from error


def answers(address: str, timeout_s: float) -> bool:
    """Returns True where a host listens at this "HOST PORT"."""
    host, _, port = address.rpartition(" ")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _own_addresses() -> Iterator[OwnAddress]:
    for interface, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            # A link-local address means another host on each interface.
            if entry.address.lower().startswith("fe80:"):
                continue
            yield OwnAddress(address=entry.address.partition("%")[0], interface=interface)


def _range(network: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(network, strict=False)
    except ValueError as error:
        raise InvalidInput(f"`{network}` is no range of addresses: {error}", field=FIELD) from error
