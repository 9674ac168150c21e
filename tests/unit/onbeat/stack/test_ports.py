"""Ports that a process asks for one after the other, before it binds any."""

from __future__ import annotations

import pytest

import onbeat.stack.ports as ports


def test_a_process_is_given_no_port_twice_before_it_has_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "LAST", ports.FIRST + 300)
    given = [ports.free_port() for _ in range(40)]
    assert len(set(given)) == 40
