"""Carries a batch from the engine to the fence, or to a failure with its reason.

its rounds (rounds.py) ─┬─ every place has its group ─▶ fence ─▶ accepted / refused
                        ├─ an error of the batch, or an unforeseen one ─▶ failed, with its reason: an attempt less
                        ├─ of a service, or of this process ─▶ given back: none less (I6)
                        ├─ the engine is gone ─▶ failed, with its reason, and this process ends
                        └─ Redis is gone ─▶ this process ends
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from broker.generator_side import REFUSED_FOR_GOOD, WAITS, Claim, PublishOutcome
from contracts.errors import (
    BatchFailed,
    BrokerFull,
    BrokerUnavailable,
    DeadlineExceeded,
    EngineUnavailable,
    EnvironmentUnavailable,
    FenceViolation,
    OnbeatError,
    RewardUnavailable,
    Unavailable,
)
from contracts.rollouts import RolloutBatch
from onbeat.base.process.crash_points import reach
from onbeat.base.process.waiting import Waiting
from onbeat.work.calls import FIRST_PAUSE_S, LONGEST_PAUSE_S, BrokerCalls
from onbeat.work.failures import ends_caller, named_failure
from producer.rollout.carried_batch import ActiveJob, CarriedBatch, name_of
from producer.rollout.rounds import Rounds

log = logging.getLogger(__name__)

NO_ROOM = {
    PublishOutcome.FULL: "among limits.max_waiting_rows: start more stage workers, or raise it",
    PublishOutcome.NO_ROOM: "in Redis, which keeps what is left for the oldest iteration: raise maxmemory, or end jobs",
}
"""Reason why a batch is not published yet → the thing that it waits for, and the cure."""


@dataclass(frozen=True, kw_only=True)
class Carrier(Rounds):
    """Carries claimed batches to their publication: `carry` runs once for each batch, several at a time.

    The generator creates it.
    """

    calls: BrokerCalls
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def carry(self, batch: CarriedBatch) -> None:
        """Takes a batch from the engine, which has its first round already, to its end."""
        try:
            record = await self.complete(batch)
        except (RewardUnavailable, EnvironmentUnavailable) as error:
            # In doubt the batch itself may be the cause: that costs it an attempt.
            if error.is_doubtful:
                await self.fail(batch.job, batch.claim, error)
            else:
                await self.release(batch.job, batch.claim, error)
        except EngineUnavailable as error:
            await self._fail_with_engine(batch, error)
            raise
        except (Unavailable, FenceViolation):
            raise
        except BaseException as error:
            if ends_caller(error, asyncio.current_task()):
                raise
            failure = named_failure(error, what=f"batch {batch.prompt_batch.batch_id}")
            if isinstance(failure, EngineUnavailable):
                await self._fail_with_engine(batch, failure)
                raise failure from error
            await self.fail(batch.job, batch.claim, failure)
        else:
            if record is not None:
                await self._publish(batch, record)

    async def fail(self, job: ActiveJob, claim: Claim, error: OnbeatError) -> None:
        """Gives the batch back, with the reason: it may be its own."""
        self.activity.ended("failed")
        outcome = await self.calls(job.side.fail, claim, str(error), fault=error.foreign)
        log.warning("%s failed (%s): %s", name_of(claim), outcome.value, error)

    async def _fail_with_engine(self, batch: CarriedBatch, error: EngineUnavailable) -> None:
        """Gives back a batch whose engine has ended, as the last word of this process: no lease has to run out, and who
        waits is told why.

        The batch, or one beside it, may have ended the engine: the attempt counts. Which of them isn't known, so that
        none is said to have failed by the same words before.
        """
        with contextlib.suppress(BrokerUnavailable, BrokerFull):
            outcome = await self.calls(batch.job.side.fail, batch.claim, str(error))
            log.warning("%s ends with its engine (%s): %s", name_of(batch.claim), outcome.value, error)

    async def release(self, job: ActiveJob, claim: Claim, error: Exception) -> None:
        """Gives the batch back as if it had not been claimed: it can't be the cause."""
        self.activity.ended("released")
        outcome = await self.calls(job.side.fail, claim, str(error), is_released=True)
        log.warning("%s is given back (%s): %s", name_of(claim), outcome.value, error)

    async def _publish(self, batch: CarriedBatch, record: RolloutBatch) -> None:
        job = batch.job
        claim = batch.claim
        prompts = batch.claim.prompt_batch
        try:
            with self.activity.span(job.job_id, "publish", iteration=prompts.iteration, batch_id=prompts.batch_id):
                outcome = await self._publish_when_room(batch, record)
        except DeadlineExceeded as error:
            await self.release(job, claim, error)
            return
        self.activity.ended(outcome.value)
        reach("producer.after_publication")
        log.log(
            logging.DEBUG if outcome.value == "accepted" else logging.INFO,
            "%s: %s, %d tokens",
            name_of(claim),
            outcome.value,
            record.num_sampled,
        )
        if outcome is PublishOutcome.UNPROVED:
            # The engine has failed a proof since it sampled the batch, which is not the batch's fault (I6).
            await self.release(job, claim, FenceViolation("the engine has not shown the version that sampled it"))
        elif outcome in REFUSED_FOR_GOOD:
            await self.fail(job, claim, BatchFailed(f"the fence refused it as {outcome.value}"))

    async def _publish_when_room(self, batch: CarriedBatch, record: RolloutBatch) -> PublishOutcome:
        """Answers what the fence said; it holds the batch while stages or older iterations leave it no room.

        The heartbeat keeps its lease meanwhile, and a settled batch is let go. Raises DeadlineExceeded after as long
        as the iterations of a window may take.
        """
        spec = batch.job.spec
        room = f"room for {name_of(batch.claim)}"
        with Waiting(room, deadline_s=spec.num_open * spec.timeouts.iteration_s) as waiting:
            pause_s = FIRST_PAUSE_S
            while True:
                outcome = await self.calls(batch.job.side.publish, batch.claim, record)
                if batch.lacks_room is not (outcome is PublishOutcome.NO_ROOM):
                    batch.lacks_room = not batch.lacks_room
                    self.freed()
                if outcome not in WAITS or batch.is_settled:
                    return outcome
                waiting.poke(f"{room} {NO_ROOM[outcome]}")
                await self.sleep(min(pause_s, waiting.left_s))
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
