"""Jobs with dead batches."""

from __future__ import annotations

from typing import Any

from broker.connection.client import connect
from broker.leases import FailOutcome
from contracts.settings import StackSettings
from tests.integration.test_fence import Job, claimed, opened

LEASE_S = 600.0


def running(settings: StackSettings, **changes: Any) -> Job:
    """Its batches may fail once."""
    return opened(connect(settings), rollout__max_attempts=1, **changes)


def bury(job: Job, reason: str = "no reward") -> str:
    """One batch dies; its id."""
    generator = job.generator("g1")
    claim = claimed(generator)
    assert generator.fail(claim, reason) is FailOutcome.DEAD
    return claim.prompt_batch.batch_id
