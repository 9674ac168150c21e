"""The scripts of broker/scripts that generators call, as pure functions; see fence.py."""

from __future__ import annotations

from tests.model.server import (
    ACTIVE,
    ANY,
    DEAD,
    EXPECTED,
    NOBODY,
    NONE,
    PUBLISHED,
    REMOVED,
    VARIANTS,
    Claim,
    Entry,
    Ledger,
    Off,
    Open,
    Server,
    known,
    pin_of,
    pinned,
)
from tests.model.stages import Stages, num_waiting, published_rows


def versions_for(opened: Open, ledger: Ledger) -> tuple[int, int]:
    """(oldest, newest) version that may sample a batch of this open iteration."""
    pin = pin_of(ledger)
    return (opened.oldest, opened.newest) if pin == NONE else (pin, pin)


def claim_prompt(
    server: Server,
    iteration: int,
    batch: int,
    generator: int,
    max_attempts: int,
    *,
    held: int,
    engine: int = ANY,
    off: Off,
) -> tuple[str, Server, Claim]:
    """claim_prompt of a batch that is new, or whose lease is over: which of them is left open.

    held: digest of the weights that the generator holds, NONE for none. They sample it where they may.
    engine: the kind of its engine, ANY where it names none; another than the job's gets nothing (generator_moves.py).
    """
    ledger, (entry_id, first, deliveries, _) = server.slot_of(iteration).batches[batch]
    attempt = first + deliveries
    if attempt > max_attempts:
        return "buried", server.with_batch(iteration, batch, (pinned((DEAD,), pin_of(ledger)), ())), ()
    leased = server.with_batch(iteration, batch, (ledger, (entry_id, first, deliveries + 1, generator)))
    return (
        "claimed",
        keep_engine(leased, engine),
        (iteration, batch, sampler(server, iteration, batch, held, off), entry_id, attempt),
    )


def is_claim(entry: Entry, claim: Claim, generator: int) -> bool:
    """Whether the entry is leased under this very claim, as its number says."""
    return bool(entry) and (entry[0], entry[1] + entry[2] - 1, entry[3]) == (*claim[3:5], generator)


def claim_again(server: Server, unheard: Claim, generator: int, *, held: int, off: Off) -> Claim:
    """claim_prompt of a generator that has not heard of its newest claim: that one, where it stands; or ().

    It gets the lease anew, and no attempt is counted.
    """
    iteration, batch, _, entry_id, attempt = unheard
    entry = server.slot_of(iteration).batches[batch][1] if server.open_at(iteration) else ()
    stands = is_claim(entry, unheard, generator) or ("claim.stands" in off and bool(entry))
    if not stands or "claim.again" in off:
        return ()
    return (iteration, batch, sampler(server, iteration, batch, held, off), entry_id, attempt)


def is_other_engine(server: Server, engine: int) -> bool:
    return ANY not in (engine, server.engine) and engine != server.engine


def keep_engine(server: Server, engine: int) -> Server:
    """The first kind that a generator names stays the job's."""
    return server if server.engine != ANY else server._replace(engine=engine)


def sampler(server: Server, iteration: int, batch: int, held: int, off: Off) -> int:
    """The digest of the announced version that a claim of this batch is answered with."""
    opened, ledger = server.open_at(iteration), server.slot_of(iteration).batches[batch][0]
    if opened is None:
        return NONE
    oldest, newest = versions_for(opened, ledger)
    version = held // VARIANTS
    is_in_range = oldest <= version <= newest or "claim.range" in off
    is_right = server.versions[version] == held or "claim.digest" in off
    if held == NONE or not is_in_range or not is_right:
        there = known(server.versions, oldest, newest)
        if not there:
            return NONE
        version = there[-1] // VARIANTS
    return server.weights[version]


def publish(
    server: Server,
    claim: Claim,
    generator: int,
    content: int,
    *,
    is_complete: bool,
    fits: bool = True,
    rollout_id: int,
    stages: Stages = (),
    max_waiting: int = 99,
    room: int = 99,
    engine: int = ANY,
    off: Off,
) -> tuple[str, Server]:
    """fits: whether it is below the largest size that the spec allows. stages: those that this batch passes.

    max_waiting: batches that may wait for columns at once. room: published batches that fit into the memory.
    """
    iteration, batch, digest, _, attempt = claim
    refusal = _refusal(server, claim, engine, off)
    if refusal:
        return refusal, server
    slot = server.slot_of(iteration)
    ledger = slot.batches[batch][0]
    if ledger and ledger[0] == PUBLISHED:
        if ledger[1:4] == (content, generator, attempt) and "publish.repeat" not in off:
            return "accepted", server
        if "publish.duplicate" not in off:
            return "duplicate", server
    if not is_complete and "publish.complete" not in off:
        return "incomplete", server
    if not fits:
        return "oversize", server
    if stages and num_waiting(server) >= max_waiting and "publish.full" not in off:
        return "full", server
    if num_published(server) + 1 + _kept_for_oldest(server, iteration, off) > room:
        return "no_room", server
    server = keep_engine(server, engine)
    rollout = (batch, iteration, digest, content, int(is_complete), 0)
    published = (pinned((PUBLISHED, content, generator, attempt), pin_of(ledger)), ())
    if stages and "publish.stages" not in off:
        server = server.with_rows(iteration, batch, published_rows(stages, rollout))
    else:
        server = server.with_slot(iteration, slot._replace(rollouts=(*slot.rollouts, (rollout_id, *rollout))))
    return "accepted", server.with_batch(iteration, batch, published)


def num_published(server: Server) -> int:
    """Batches of the window that take memory."""
    return sum(ledger[:1] == (PUBLISHED,) for slot in server.slots for ledger, _ in slot.batches)


def _kept_for_oldest(server: Server, iteration: int, off: Off) -> int:
    """Memory that a younger iteration leaves free: what the oldest one lacks for its commit."""
    oldest = server.window[0].iteration
    if iteration == oldest or "publish.age" in off:
        return 0
    return sum(ledger[:1] not in ((PUBLISHED,), (DEAD,)) for ledger, _ in server.slot_of(oldest).batches)


def _refusal(server: Server, claim: Claim, engine: int, off: Off) -> str:
    iteration, batch, digest, _, _ = claim
    if server.job not in (ACTIVE, REMOVED) and "publish.ended" not in off:
        return "ended"
    is_between = server.open_at(iteration) or (not server.window and iteration == server.committed)
    if not is_between and "publish.iteration" not in off:
        return "stale" if iteration <= server.committed else "future"
    if not server.window and "publish.open" not in off:
        return "closed"
    opened, batches = server.in_slot_of(iteration), server.slot_of(iteration).batches
    ledger = batches[batch][0] if batch < len(batches) else ()
    oldest, newest = versions_for(opened, ledger) if opened else (0, len(server.versions))
    version = digest // VARIANTS
    if not oldest <= version <= newest and "publish.version" not in off:
        return "stale" if version < oldest else "future"
    if server.versions[version] != digest and "publish.digest" not in off:
        return "wrong_weights"
    if is_other_engine(server, engine) and "publish.engine" not in off:
        return "wrong_engine"
    is_expected = ledger and ledger[0] != DEAD and server.open_at(iteration)  # the id says its iteration
    return "" if is_expected or "publish.expected" in off else "unexpected"


def fail(
    server: Server, claim: Claim, generator: int, max_attempts: int, off: Off, *, is_released: bool = False
) -> tuple[str, Server]:
    """is_released: the batch comes back as if it had not been claimed."""
    iteration, batch, _, _, attempt = claim
    ledger, entry = server.slot_of(iteration).batches[batch]
    if not entry or not server.open_at(iteration):
        return "settled", server
    if not is_claim(entry, claim, generator) and "fail.claim" not in off:
        return "settled", server
    is_free = is_released and "release.free" not in off
    if attempt >= max_attempts and not is_free:
        return "dead", server.with_batch(iteration, batch, (pinned((DEAD,), pin_of(ledger)), ()))
    attempt += not is_free
    again = entry[0] + 1
    pin = NONE if "fail.pin" in off else pin_of(ledger)
    given_back = (pinned((EXPECTED, again), pin), (again, attempt, 0, NOBODY))
    return "released" if is_released else "retried", server.with_batch(iteration, batch, given_back)


def renew_prompt(server: Server, claim: Claim, generator: int, off: Off) -> tuple[str, Server]:
    """Changes nothing that is asked about here, unless it gives the lease to a generator that has lost it.

    A generator that works on a copy holds a mark of its own, which is left out here: `lost` may be `held` for it.
    """
    iteration, batch = claim[:2]
    ledger, entry = server.slot_of(iteration).batches[batch]
    if server.job != ACTIVE or not server.open_at(iteration):
        return "settled", server
    if is_claim(entry, claim, generator) or ("renew.claim" in off and entry):
        return "held", server.with_batch(iteration, batch, (ledger, (*entry[:3], generator)))
    return "lost" if ledger[:1] == (EXPECTED,) else "settled", server
