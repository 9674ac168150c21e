"""`python -m tests.integration.saving_trainer JOB_ID`: a trainer with a lease and an end, and without a model.

What it trains is a wait for its end, and what it saves a wait for the file `saved` in the run root: the file `saving`
there says that it has begun.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import consumer.trainer.job_run as job_run
from broker.connection.client import connect
from broker.job_store import JobStore
from contracts.settings import settings_from
from onbeat.base.telemetry.logs import configure
from onbeat.loop.lease_keeper import LeaseKeeper

settings = settings_from(os.environ)
configure(settings, service="trainer")
SAVING, SAVED = settings.run_root_path / "saving", settings.run_root_path / "saved"


class StandIn:
    """A held job."""

    def __init__(self, *_: object, keeper: LeaseKeeper, **__: object) -> None:
        self.keeper = keeper
        self.ranks = self

    def close(self) -> None:
        """Has no ranks."""


def train(held: StandIn) -> None:
    held.keeper.loaded()
    while True:
        held.keeper.check()
        time.sleep(0.01)


def save(_: StandIn) -> None:
    SAVING.touch()
    while not SAVED.exists():
        time.sleep(0.01)


parts: dict[str, Any] = {"HeldJob": StandIn, "run_iterations": train, "save": save}
for name, part in parts.items():
    setattr(job_run, name, part)
broker = connect(settings, patience_s=settings.broker_timeout_s)
sys.exit(job_run.train(settings, broker, JobStore(broker).spec(sys.argv[1]), sys.argv[1]))
