"""A stack whose gateway is already there, in the place of the one that a run starts; no process is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from contracts.encoding.wire import encode_json
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.stack.options import StackOptions
from onbeat.training import driver
from tests.e2e.stand_in_gateway import JOB, KEY, FakeGateway, fake_gateway


class RunningStack:
    """What a Driver needs of a stack."""

    gateway_url = ""
    api_key = KEY
    problem: Exception | None = None
    spec: JobSpec

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.num_stops = 0
        stacks.append(self)

    def start(self) -> None:
        (self.options.run_root / "logs").mkdir(parents=True)
        if self.problem is not None:
            raise self.problem
        folder = RunFolder(self.options.run_root, JOB)
        folder.path.mkdir()
        folder.spec.write_bytes(encode_json(self.spec))

    def give_up_start(self) -> None:
        """It starts at once."""

    def tick(self) -> None:
        """Nothing dies here."""

    def stop(self) -> None:
        self.num_stops += 1


stacks: list[RunningStack] = []


@contextmanager
def running_gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """The gateway of every stack that a run starts."""
    stacks.clear()
    with fake_gateway() as server:
        monkeypatch.setattr(RunningStack, "gateway_url", server.url)
        monkeypatch.setattr(RunningStack, "spec", server.spec, raising=False)
        monkeypatch.setattr(driver, "EmbeddedStack", RunningStack)
        yield server
