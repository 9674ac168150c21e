"""Tables `[timeouts]` and `[limits]`: how long a job may wait, and how much of it may stand in Redis."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from contracts.encoding.wire import Attempts, Lease, Record, Seconds


class TimeoutSpec(Record, frozen=True, kw_only=True):
    """Deadlines: nothing waits without one (I8)."""

    generator_lease_s: Lease = 10.0
    """A claimed batch without a heartbeat for this long goes to another generator."""
    trainer_lease_s: Lease = 10.0
    """A trainer without a heartbeat for this long may be replaced."""
    generation_s: Seconds = 1800.0
    """Longest that a generator samples a batch (with an environment, a turn of it) or loads a version, or a stage
    worker computes an item; past it the process ends, and another takes its work."""
    iteration_s: Seconds = 3600.0
    """An iteration that takes longer fails the job and names the missing batches; so does one batch that trains for so
    long."""
    no_generator_s: Seconds = 120.0
    """The job fails after so long without a live generator that can serve it."""
    no_stage_worker_s: Seconds = 120.0
    """The job fails after this long without any live worker that can serve a stage that has work waiting."""
    dependency_s: Seconds = 600.0
    """Longest wait for a service that no process of the job reaches (the reward service, a judge), which costs a batch
    no attempt. Past it the job fails and names the service."""
    ranks_s: Seconds = 600.0
    """Longest that a rank of the trainer waits for the others in what all do together; then another trainer starts."""
    max_trainer_starts: Attempts = 5
    """Trainer processes that may start without progress in between: the commit of an iteration that wasn't committed
    before."""


class LimitSpec(Record, frozen=True, kw_only=True):
    """Sizes that bound the memory of a job in Redis."""

    max_batch_bytes: Annotated[int, Meta(ge=1024, le=536870912)] = 16 * 1024 * 1024
    """Encoded rollout batch; a larger one is refused as oversize. Redis holds at most the batches of
    max_policy_lag + 1 iterations."""
    max_waiting_rows: Annotated[int, Meta(ge=1, le=2**20)] = 65536
    """Published completions that wait for columns of `stages`: a batch beyond it stays with its generator until stages
    catch up. One batch always goes."""
