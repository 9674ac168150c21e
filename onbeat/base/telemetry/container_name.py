"""The name of a process in a container, where nothing gives it one: that of its container, `onbeat-producer-2`.

    a mark of the engine ─▶ /etc/hosts ─┬─ a second name at this host's address (podman) ───────────▶ onbeat_producer_2
                                        └─ the address ─ PTR at the engine's own resolver (Docker) ─▶ onbeat-producer-2

A container's hostname is a hash, and its program knows nothing of the name that `docker compose ps` lists. Docker's
resolver, on loopback in the container, answers the reverse question for an address of one of its networks with
`onbeat-producer-2.onbeat_stack`. The system's own resolver (`gethostbyaddr`) would stop at /etc/hosts, with the hash.

No other machine is asked: a nameserver beyond loopback isn't the engine's. On Kubernetes the manifests give the name.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from contracts.settings import MAX_NAME, StackSettings

MARKS = (".dockerenv", "run/.containerenv")
"""Files that Docker and podman put into each container, below its root."""
MARK_VARIABLE = "container"
"""Environment variable that podman sets in each container: one whose root is read-only has no file of it."""
KUBERNETES = "KUBERNETES_SERVICE_HOST"
"""A variable of each container there."""
WITHIN_S = 1.0
"""All questions together; a resolver that is there answers within milliseconds."""
DNS_PORT = 53
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""The first label of a container's name in DNS."""
MAX_HOSTS_BYTES = 2**16
MAX_MESSAGE_BYTES = 4096
MAX_LABELS = 128
"""Most labels and pointers of one name: a name of 255 bytes has fewer, and more may be a circle of pointers."""
PTR = 12
INTERNET = 1
"""A record's type and class (RFC 1035, 3.2)."""


def named(settings: StackSettings, *, part: str = "") -> StackSettings:
    """Returns the settings with the container's name, where they have none and there is a container with one.

    Args:
        settings: The settings.
        part: The name of this process among several of that container, as a worker's trainer and its ranks; "" for the
            container's main process.
    """
    if settings.name:
        return settings
    container = container_name()
    if not container:
        return settings
    end = f".{part.replace(' ', '-')}" if part else ""
    return replace(settings, name=container[: MAX_NAME - len(end)] + end)


def container_name(
    root: Path = Path("/"),
    *,
    hostname: str = "",
    environment: Mapping[str, str] = os.environ,
    port: int = DNS_PORT,
    within_s: float = WITHIN_S,
) -> str:
    """Finds this container's name in its files or by its engine's resolver.

    Args:
        root: The folder of the container's files.
        hostname: The host's name; "" takes this host's.
        environment: The process's environment.
        port: The resolver's port.
        within_s: The longest that it may take, in seconds.

    Returns:
        The name; "" outside of a container, on Kubernetes, and where nothing gives it by the deadline.
    """
    is_container = MARK_VARIABLE in environment or any((root / mark).exists() for mark in MARKS)
    if KUBERNETES in environment or not is_container:
        return ""
    hostname = hostname or socket.gethostname()
    lines = [line for line in _lines(root / "etc/hosts") if hostname in line[1:]]
    in_hosts = [name for line in lines for name in line[1:]]
    container = _chosen(in_hosts, hostname)
    ends_s = time.monotonic() + within_s
    for address in _reachable(line[0] for line in lines):
        for server in _own_resolvers(root):
            if not container:
                container = _chosen(_names_of(address, server, port=port, ends_s=ends_s), hostname)
    return container


def _chosen(names: list[str], hostname: str) -> str:
    """Returns the first label of the longest name: `onbeat_producer_2` beside the service's alias `producer`; "" where
    none says more than the hostname."""
    labels = [name.partition(".")[0] for name in names if name != hostname]
    fitting = [label for label in labels if LABEL.fullmatch(label) and label not in (hostname, "localhost")]
    return max(fitting, key=len, default="")


def _lines(path: Path) -> list[list[str]]:
    """Splits a file of the container into the words of its lines, without comments; [] where it can't be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_HOSTS_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [words for words in lines if words]


def _reachable(addresses: Iterator[str]) -> Iterator[str]:
    """Yields the addresses by which another container could reach this one."""
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if not address.is_loopback:
            yield str(address)


def _own_resolvers(root: Path) -> Iterator[str]:
    """Yields the nameservers in the container itself, which its engine runs."""
    for words in _lines(root / "etc/resolv.conf"):
        try:
            if words[0] == "nameserver" and ipaddress.ip_address(words[1]).is_loopback:
                yield words[1]
        except (ValueError, IndexError):
            continue


def _names_of(address: str, server: str, *, port: int, ends_s: float) -> list[str]:
    """Asks a server for the names of an address.

    Args:
        address: The address.
        server: The resolver's address.
        port: The resolver's port.
        ends_s: The deadline, on the clock of `time.monotonic`.

    Returns:
        The names; [] without an answer in time, or with one of another form.
    """
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        return []
    number = secrets.randbits(16)
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.settimeout(left_s)
            asking.connect((server, port))  # from then on the kernel drops what another address sends
            asking.send(_question(number, ipaddress.ip_address(address).reverse_pointer))
            answer = asking.recv(MAX_MESSAGE_BYTES)
        return _pointers(answer, number)
    except (OSError, ValueError, struct.error, IndexError):
        return []


def _question(number: int, name: str) -> bytes:
    """Encodes a query for the PTR records of a name (RFC 1035, 4.1); flags 0x0100: recursion is desired."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", PTR, INTERNET)


def _pointers(message: bytes, number: int) -> list[str]:
    """Returns the names of an answer's PTR records; [] where it answers another question, or with an error.

    Raises ValueError, IndexError or struct.error for a message that isn't whole.
    """
    answered, flags, num_questions, num_answers, _, _ = struct.unpack_from("!6H", message)
    # Of the flags, 0x8000 marks an answer and the last four bits are its error.
    if answered != number or not flags & 0x8000 or flags & 0x000F:
        return []
    at = 12
    for _ in range(num_questions):
        _, at = _name_at(message, at)
        at += 4  # type and class
    names = []
    for _ in range(num_answers):
        _, at = _name_at(message, at)
        record_type, record_class, _, num_bytes = struct.unpack_from("!2HIH", message, at)
        at += 10  # type, class, seconds that it stays true, and the size of its data
        if (record_type, record_class) == (PTR, INTERNET):
            names.append(_name_at(message, at)[0])
        at += num_bytes
    return names


def _name_at(message: bytes, at: int) -> tuple[str, int]:
    """Returns a name, and where it ends in the message.

    The rest of a name may be a pointer to an earlier place: two bytes that begin with two set bits (RFC 1035, 4.1.4).
    """
    labels: list[str] = []
    after = 0
    for _ in range(MAX_LABELS):
        size = message[at]
        if size >= 0xC0:
            after = after or at + 2
            at = (size & 0x3F) << 8 | message[at + 1]
            continue
        if size == 0:
            return ".".join(labels), after or at + 1
        labels.append(message[at + 1 : at + 1 + size].decode("ascii"))
        at += 1 + size
    raise ValueError("the name has no end")
