"""Hosts for a test: network namespaces with an address each, on one bridge, that can be cut off and healed."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
import uuid

import pytest

from tests.forked import NSENTER

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
"""As linux/if_tun.h has them."""
NO_MACHINE = "02:00:00:00:00:01"


class Network:
    """A context manager; this process reaches all hosts that are not cut off. Skips the test where none can be made."""

    def __init__(self, num_hosts: int = 3) -> None:
        self._name = f"ob{uuid.uuid4().hex[:6]}"
        subnet = f"10.{200 + os.getpid() % 50}.{int(self._name[2:4], 16)}"
        self.hosts = tuple(f"{subnet}.{number + 1}" for number in range(num_hosts))
        self.own = f"{subnet}.254"
        """The address of this process there."""

    def __enter__(self) -> Network:
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", NSENTER))):
            pytest.skip("namespaces")
        try:
            self._ip("netns", "add", self._switch)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"namespaces: {error.stderr}")
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self._switch, *map(self._namespace, self.hosts)):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def entering(self, host: str) -> tuple[str, ...]:
        """The words before a command that run it on a host."""
        return (NSENTER, f"--net=/run/netns/{self._namespace(host)}")

    def processes(self, host: str) -> list[int]:
        """The numbers of those that run on a host."""
        return [int(pid) for pid in self._ip("netns", "pids", self._namespace(host)).split()]

    def cut_off(self, host: str) -> None:
        """As a pulled cable: the host reaches itself alone, and no connection is told."""
        self._ip("-n", self._switch, "link", "set", self._port(host), "down")

    def heal(self, host: str) -> None:
        self._ip("-n", self._switch, "link", "set", self._port(host), "up")

    def part(self, host: str, other: str) -> None:
        """Frames between two hosts go to an address that is no machine's: none arrives, and no connection is told."""
        for one, peer in ((host, other), (other, host)):
            self._neighbour("replace", one, peer, "lladdr", NO_MACHINE, "nud", "permanent")

    def join(self, host: str, other: str) -> None:
        for one, peer in ((host, other), (other, host)):
            self._neighbour("del", one, peer)

    def slow_down(self, host: str, *, delay_s: float, loss: float) -> SlowCable:
        """Takes the host's cable away and leads another one there, each way with this delay and this share of frames
        lost. A context manager, for as long as it is used."""
        self._ip("-n", self._switch, "link", "del", self._port(host))
        near, far = f"{self._name}t{host.rpartition('.')[2]}", f"{self._name}u{host.rpartition('.')[2]}"
        cable = SlowCable((self._namespace(host), near), (self._switch, far), delay_s=delay_s, loss=loss)
        self._ip("-n", self._namespace(host), "addr", "add", f"{host}/24", "dev", near)
        self._ip("-n", self._namespace(host), "link", "set", near, "up")
        self._ip("-n", self._switch, "link", "set", far, "master", "bridge")
        self._ip("-n", self._switch, "link", "set", far, "up")
        return cable

    def _build(self) -> None:
        self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            namespace = self._namespace(host)
            self._ip("netns", "add", namespace)
            self._ip("-n", namespace, "link", "set", "lo", "up")
            self._join(host, namespace=("-n", namespace), into=namespace)
        self._join(self.own, namespace=(), into="")

    def _join(self, address: str, *, namespace: tuple[str, ...], into: str) -> None:
        """Leads a cable from the bridge to where the address is to be."""
        near, far = self._port(address, "n"), self._port(address)
        self._ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self._switch)
        if into:
            self._ip("link", "set", near, "netns", into)
        self._ip(*namespace, "addr", "add", f"{address}/24", "dev", near)
        self._ip(*namespace, "link", "set", near, "up")
        self._ip("-n", self._switch, "link", "set", far, "master", "bridge")
        self._ip("-n", self._switch, "link", "set", far, "up")

    def _neighbour(self, what: str, host: str, peer: str, *words: str) -> None:
        self._ip("-n", self._namespace(host), "neigh", what, peer, "dev", self._port(host, "n"), *words)

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _namespace(self, host: str) -> str:
        return f"{self._name}-{host.rpartition('.')[2]}"

    def _port(self, address: str, end: str = "p") -> str:
        return f"{self._name}{end}{address.rpartition('.')[2]}"

    @staticmethod
    def _ip(*words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class SlowCable:
    """Frames between two namespaces, carried by a thread, since this kernel may have no netem."""

    def __init__(self, *ends: tuple[str, str], delay_s: float, loss: float) -> None:
        """ends: (namespace, name of the device that is made there) of both."""
        self._delay_s, self._loss = delay_s, loss
        self._luck = random.Random(7)
        self._ends: list[int] = []
        making = threading.Thread(target=lambda: self._ends.extend(_tap(*end) for end in ends))
        making.start()  # a thread of its own: it leaves for other namespaces
        making.join()
        self._is_over = threading.Event()
        self._carrying = threading.Thread(target=self._carry, daemon=True)
        self.num_lost = 0

    def __enter__(self) -> SlowCable:
        self._carrying.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._carrying.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        near, far = self._ends
        other_end = {near: far, far: near}
        under_way: list[tuple[float, int, int, bytes]] = []
        for number in itertools.count():
            if self._is_over.is_set():
                return
            wait_s = under_way[0][0] - time.monotonic() if under_way else 0.1
            for end in select.select([near, far], [], [], min(0.1, max(0.0, wait_s)))[0]:
                frame = os.read(end, 65536)
                if self._luck.random() >= self._loss:
                    heapq.heappush(under_way, (time.monotonic() + self._delay_s, number, other_end[end], frame))
                else:
                    self.num_lost += 1
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, end, frame = heapq.heappop(under_way)
                with contextlib.suppress(OSError):  # a device that is not up yet
                    os.write(end, frame)


def _tap(namespace: str, name: str) -> int:
    """Opens a new network device, of Ethernet frames, in another namespace than the one of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    finally:
        os.close(there)
    return device
