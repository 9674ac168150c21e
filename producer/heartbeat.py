"""What a generator holds, and how the stack learns that it lives: its presence, and the leases of its batches (I5).

    serve loop ─ lease, carry ─▶ HeldBatches ◀─ end ─ carry
                                   │      ▲
                          leases   ▼      │ lost, settled
                                 Heartbeat ─▶ presence

Heartbeat   waits for its next beat or a change; unblocked by either; produces renewed leases and presence. Between two
            beats it looks after copies: one that came second is dropped within COPY_LOOK_S.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from broker.generator_side import Claim, GeneratorSide
from broker.presence import AWAKE_FOR, DOING, TOKENS_PER_S, Presence, compare, services_info
from onbeat.process.dependency import Dependency
from producer.activity import Activity
from producer.broker_calls import BrokerCalls
from producer.rollout.carried_batch import ActiveJob, CarriedBatch, ClaimKey, key_of, name_of
from producer.served_model import ServedModel

log = logging.getLogger(__name__)

PRESENCE_INTERVAL_S = 2.0
"""Longest time between two signs of life."""
COPY_LOOK_S = 0.02
"""Time between two looks at whether a copy is still needed: most come second, and until it is dropped the engine is not
free for the next iteration, nor asleep for a colocated job's trainer."""


class HeldBatches:
    """Every batch between its claim and its end."""

    def __init__(self) -> None:
        self.leases: dict[ClaimKey, tuple[ActiveJob, Claim]] = {}
        """Each claim with its job; a lost or settled one is no longer here, though it may go on."""
        self._carried: dict[ClaimKey, CarriedBatch] = {}
        """Every batch that may be in the engine: what is not here may have another version loaded under it."""
        self._settled: set[ClaimKey] = set()
        """The claims whose batches are needed no more; each is on its way to its end."""
        self.changed = asyncio.Event()
        """Set at a claim, so that its lease is renewed soon enough, and at both ends of a colocated job's turn; cleared
        at each beat."""
        self.freed = asyncio.Event()
        """Set when a batch leaves the engine, needs its weights no more, or ends."""

    def __str__(self) -> str:
        return ", ".join(sorted(name_of(claim) for _, claim in self.leases.values()))

    def lease(self, job: ActiveJob, claim: Claim) -> None:
        self.leases[key_of(claim)] = (job, claim)
        self.changed.set()

    def has_lease(self, claim: Claim) -> bool:
        return key_of(claim) in self.leases

    def is_settled(self, claim: Claim) -> bool:
        """Whether the batch was settled before it was in the engine: then there is nothing to put into it."""
        return key_of(claim) in self._settled

    def carry(self, batch: CarriedBatch) -> None:
        self._carried[key_of(batch.claim)] = batch

    def end(self, claim: Claim) -> None:
        self._carried.pop(key_of(claim), None)
        self.leases.pop(key_of(claim), None)
        self._settled.discard(key_of(claim))
        self.freed.set()

    def let_go(self, claim: Claim, *, is_settled: bool) -> None:
        """Drops the lease of a batch that the broker gave to another, and the generation of one that is settled."""
        # A batch that ended while the renewal ran has no lease either, and is no loss.
        if not self.leases.pop(key_of(claim), None):
            return
        log.info("no longer holds %s", name_of(claim))
        if is_settled:
            self._settled.add(key_of(claim))
        batch = self._carried.get(key_of(claim))
        if is_settled and batch is not None:
            batch.settle()
            self.freed.set()

    @property
    def copies(self) -> dict[ClaimKey, tuple[ActiveJob, Claim]]:
        """Those of `leases` that are of other generators' batches."""
        return {key: (job, claim) for key, (job, claim) in self.leases.items() if claim.hedged}

    @property
    def in_words(self) -> str:
        """What is in the engine and what is out of it; "" where there is nothing."""
        of_each: dict[str, list[str]] = {"generating": [], "scoring": []}
        for batch in self._carried.values():
            of_each["generating" if batch.num_sampling else "scoring"].append(batch.claim.prompt_batch.batch_id)
        return "; ".join(f"{what} {', '.join(sorted(ids))}" for what, ids in of_each.items() if ids)

    @property
    def num_sampling(self) -> int:
        """Completions that are in the engine."""
        return sum(batch.num_sampling for batch in self._carried.values())

    @property
    def num_in_engine(self) -> int:
        """Batches that are in the engine."""
        return sum(batch.num_sampling > 0 for batch in self._carried.values())

    @property
    def num_finishing(self) -> int:
        """Batches that are out of the engine, on their way through the reward service and the fence.

        Those that wait for a commit to make room are not: this generator may have to sample what it waits for.
        """
        return sum(not batch.num_sampling and not batch.lacks_room for batch in self._carried.values())

    @property
    def lacks_room(self) -> bool:
        """Whether a batch waits for a commit to make room in Redis."""
        return any(batch.lacks_room for batch in self._carried.values())

    @property
    def need_weights(self) -> bool:
        """Whether a batch is in the engine, or may come back to it."""
        return any(batch.needs_weights for batch in self._carried.values())


@dataclass(kw_only=True)
class Heartbeat:
    """`run` beats until it is cancelled; it dies of a broker that stays away."""

    generator_id: str
    presence: Presence
    calls: BrokerCalls
    model: ServedModel
    held: HeldBatches
    activity: Activity
    of_jobs: Callable[[], Mapping[str, str]]
    """What its presence says of the jobs that it can't serve."""
    services: Sequence[Dependency] = ()
    """What batches need beside the engine."""
    num_generators: int = 1
    """Generators that lived at the last beat, this one among them."""

    async def run(self) -> None:
        while True:
            self.held.changed.clear()
            await self.calls(self.presence.beat, self.generator_id, self._info())
            live = await self.calls(self.presence.live)
            self.num_generators = max(1, len(live))
            compare(self.services, self.generator_id, live)
            leases_s = [job.spec.timeouts.generator_lease_s for job, _ in self.held.leases.values()]
            await self._renew(self.held.leases)
            # Three beats fit into the shortest lease: one or two may fail before it runs out.
            await self._until_beat(min([PRESENCE_INTERVAL_S, *(lease_s / 3 for lease_s in leases_s)]))

    async def _until_beat(self, pause_s: float) -> None:
        """Returns when the next beat is due, or something has changed; looks after copies until then."""
        due_s = time.monotonic() + pause_s
        while (left_s := due_s - time.monotonic()) > 0:
            await wait_for(self.held.changed, min(left_s, COPY_LOOK_S) if self.held.copies else left_s)
            if self.held.changed.is_set():
                return
            await self._renew(self.held.copies)

    def _info(self) -> dict[str, str]:
        """What an operator sees of this generator; the version is the one whose digest was verified."""
        loaded = self.model.loaded
        weights = loaded.engine.policy_version if loaded else None
        return {
            "model": loaded.model.path if loaded else "",
            "policy_version": str(weights.policy_version) if weights else "",
            "weights_digest": weights.weights_digest if weights else "",
            "loading_weights": f"{self.model.loading_weights} {self.model.receiving_weights}".strip(),
            "rejected_weights": self.model.rejected_weights,
            "batches": str(self.held),
            DOING: self._doing(),
            TOKENS_PER_S: f"{self.activity.tokens_per_s:.1f}",
            AWAKE_FOR: self.model.awake_for,
            **self.of_jobs(),
            **services_info(self.services),
        }

    def _doing(self) -> str:
        """`loading v000003`, `generating 7/train/2; scoring 7/train/0`, or `waiting`."""
        if self.model.loading_weights:
            return f"loading {self.model.loading_weights.rpartition('/')[2]}"
        away = [f"waiting for the {service.name}" for service in self.services if service.is_away]
        return "; ".join(filter(None, [self.held.in_words, *away])) or "waiting"

    async def _renew(self, leases: Mapping[ClaimKey, tuple[ActiveJob, Claim]]) -> None:
        """Renews these leases; a lost one is let go. Its batch may still win, if it is published first (I3).

        A settled batch needs no more tokens: an engine that was late, or hedged in vain, is free for the next batch.
        """
        held: dict[str, tuple[GeneratorSide, list[Claim]]] = {}
        for job, claim in leases.values():
            held.setdefault(job.job_id, (job.side, []))[1].append(claim)
        for side, claims in held.values():
            renewal = await self.calls(side.renew, claims)
            for claim in renewal.lost:
                self.held.let_go(claim, is_settled=False)
            for claim in renewal.settled:
                self.held.let_go(claim, is_settled=True)


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when the event is set, or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
