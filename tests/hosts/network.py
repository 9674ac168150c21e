"""Hosts for a test: network namespaces with an address each, on one bridge, that can be cut off and healed."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid

import pytest

NUM_HOSTS = 3


class Network:
    """A context manager; this process reaches all hosts that are not cut off. Skips the test where none can be made."""

    def __init__(self) -> None:
        self._name = f"ob{uuid.uuid4().hex[:6]}"
        subnet = f"10.{200 + os.getpid() % 50}.{int(self._name[2:4], 16)}"
        self.hosts = tuple(f"{subnet}.{number + 1}" for number in range(NUM_HOSTS))
        self._own = f"{subnet}.254"

    def __enter__(self) -> Network:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("needs root and `ip netns`")
        try:
            self._ip("netns", "add", self._switch)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces are allowed here: {error.stderr}")
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
        return ("ip", "netns", "exec", self._namespace(host))

    def cut_off(self, host: str) -> None:
        """As a pulled cable: the host reaches itself alone, and no connection is told."""
        self._ip("-n", self._switch, "link", "set", self._port(host), "down")

    def heal(self, host: str) -> None:
        self._ip("-n", self._switch, "link", "set", self._port(host), "up")

    def _build(self) -> None:
        self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            namespace = self._namespace(host)
            self._ip("netns", "add", namespace)
            self._ip("-n", namespace, "link", "set", "lo", "up")
            self._join(host, namespace=("-n", namespace), into=namespace)
        self._join(self._own, namespace=(), into="")

    def _join(self, address: str, *, namespace: tuple[str, ...], into: str) -> None:
        """Leads a cable from the bridge to where the address is to be."""
        near, far = f"{self._name}n{address.rpartition('.')[2]}", self._port(address)
        self._ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self._switch)
        if into:
            self._ip("link", "set", near, "netns", into)
        self._ip(*namespace, "addr", "add", f"{address}/24", "dev", near)
        self._ip(*namespace, "link", "set", near, "up")
        self._ip("-n", self._switch, "link", "set", far, "master", "bridge")
        self._ip("-n", self._switch, "link", "set", far, "up")

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _namespace(self, host: str) -> str:
        return f"{self._name}-{host.rpartition('.')[2]}"

    def _port(self, address: str) -> str:
        return f"{self._name}p{address.rpartition('.')[2]}"

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
