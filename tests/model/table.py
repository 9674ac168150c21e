"""The table of leased work, as pure functions of what the server holds; see fence.py.

Generators lease batches, which are the items of stage 0, and stage workers those of later stages. An item is leased,
computed and put whole. What it is computed from is its source; its holder brings the source back with the value, so
that columns of one copy of a batch are never taken for those of another.
"""

from __future__ import annotations

from tests.model.server import (
    ACTIVE,
    ANY,
    DEAD,
    DONE,
    FREE,
    LEASED,
    NONE,
    REMOVED,
    VARIANTS,
    Batch,
    Claim,
    Items,
    Off,
    Open,
    Place,
    Server,
    known,
)

Stages = tuple[tuple[int, tuple[int, ...]], ...]
"""(items of a batch, the stages whose outputs it reads) of each of a job's own stages, which are counted from 1."""
Source = tuple[int, ...] | tuple[object, ...]
GIVEN_BACK = 16
"""More than an item is given back."""


# Every stage


def claim(
    server: Server,
    stages: Stages,
    place: Place,
    holder: int,
    *,
    opening: int,
    max_attempts: int,
    held: int = NONE,
    engine: int = ANY,
    off: Off,
) -> tuple[str, Server, Claim]:
    """A claim of an item that is free, or whose lease is over: which of them is left open.

    opening: names the opening of its iteration, of a server that came back as well; it makes numbers of claims differ.
    held: digest of the weights that a generator holds, NONE for none. They sample the batch where they may.
    engine: the kind of its engine, ANY where it names none; another than the job's gets nothing (worker_moves.py).
    """
    stands = server.item_at(place)
    attempt, number = stands[1] + 1, GIVEN_BACK * opening + stands[-1] % GIVEN_BACK
    if attempt > max_attempts:
        return "buried", bury(server, place, off), ()
    source = source_of(server, stages, place, held, off)
    if is_proof_due(server, place, source, holder, off):
        return "unproved", server, ()
    leased = keep_engine(server.with_item(place, (LEASED, attempt, holder, number)), engine)
    return "claimed", leased, (*place, attempt, source, number)


def is_leased(item: tuple[object, ...], claim: Claim, holder: int) -> bool:
    """Whether the item is leased under this very claim."""
    return item == (LEASED, claim[4], holder, claim[6])


def claim_again(server: Server, stages: Stages, unheard: Claim, holder: int, *, held: int = NONE, off: Off) -> Claim:
    """A claim by one who has not heard of its newest: that one, where it stands; or ().

    It gets the lease anew, and no attempt is counted.
    """
    item = server.item_at(unheard[:4])
    stands = is_leased(item, unheard, holder) or ("claim.stands" in off and item[:1] == (LEASED,))
    if not stands or "claim.again" in off:
        return ()
    return (*unheard[:5], source_of(server, stages, unheard[:4], held, off), unheard[6])


def is_proof_due(server: Server, place: Place, source: Source, generator: int, off: Off) -> bool:
    """Whether a claim of this batch is answered `unproved`: its generator has to show the version first (I11)."""
    if place[2] or not source or "claim.proof" in off:
        return False
    (digest,) = source
    assert isinstance(digest, int)
    return not is_proved(server, generator, digest, off)


def renew(server: Server, claim: Claim, holder: int, off: Off) -> tuple[str, Server]:
    """Changes nothing that is asked about here, unless it gives the lease to one who has lost it.

    A generator that works on a copy holds a mark of its own, which is left out here: `lost` may be `held` for it.
    """
    item = server.item_at(claim[:4])
    if server.job != ACTIVE or item[:1] not in ((FREE,), (LEASED,)):
        return "settled", server
    if is_leased(item, claim, holder):
        return "held", server
    if "renew.claim" in off and item[:1] == (LEASED,):
        return "held", server.with_item(claim[:4], (LEASED, claim[4], holder, claim[6]))
    return "lost", server


def fail(
    server: Server, claim: Claim, holder: int, max_attempts: int, off: Off, *, is_released: bool = False
) -> tuple[str, Server]:
    """Only the lease's holder may fail its item; past the attempts its batch is dead (I6).

    max_attempts: of a failure by the words of an attempt before it, the attempt that it is.
    is_released: the item comes back as if it had not been claimed.
    """
    place, attempt = claim[:4], claim[4]
    item = server.item_at(place)
    if item[:1] != (LEASED,) or (not is_leased(item, claim, holder) and "fail.claim" not in off):
        return "settled", server
    is_free = is_released and "release.free" not in off
    if attempt >= max_attempts and not is_free:
        return "dead", bury(server, place, off)
    given_back = server.with_item(place, (FREE, attempt - is_free, item[3] % GIVEN_BACK + is_free))
    if "fail.pin" in off:
        batch = given_back.slot_of(place[0]).batches[place[1]]
        given_back = given_back.with_batch(*place[:2], batch and batch._replace(pin=NONE))
    return "released" if is_released else "retried", given_back


def bury(server: Server, place: Place, off: Off) -> Server:
    """The batch is dead, and all that was made of it goes."""
    batch = server.slot_of(place[0]).batches[place[1]]
    assert batch
    later = batch.items[1:] if "bury.rows" in off else ()
    return server.with_batch(*place[:2], Batch(batch.pin, 0, (((DEAD,),), *later)))


def source_of(
    server: Server, stages: Stages, place: Place, held: int = NONE, off: Off = frozenset()
) -> tuple[object, ...]:
    """What this item would be computed from now; () while an input is not there."""
    iteration, index, stage, item = place
    if not stage:
        digest = sampler(server, iteration, index, held, off)
        return () if digest == NONE else (digest,)
    batch = server.slot_of(iteration).batches[index]
    if not batch or not batch.made:
        return ()
    made = [
        batch.items[before][one] for before in stages[stage - 1][1] for one in covering(stages, before, stage, item)
    ]
    if not all(one[:1] == (DONE,) for one in made):
        return ()
    return (batch.made[0], *(value for _, value in made))


def covering(stages: Stages, of: int, stage: int, item: int) -> range:
    """The items of the stage `of` that have a row of this item."""
    num_rows = max(number for number, _ in stages)
    size, other = num_rows // stages[stage - 1][0], num_rows // stages[of - 1][0]
    return range(item * size // other, ((item + 1) * size - 1) // other + 1)


def _put(
    server: Server, stages: Stages, place: Place, value: tuple[object, ...], *, rollout_id: int, off: Off
) -> Server:
    """One item less is left, and items whose last input came are free; the last one names the batch to the trainer."""
    iteration, index, *_ = place
    server = server.with_item(place, (DONE, value))
    batch = server.slot_of(iteration).batches[index]
    assert batch
    for stage, of_stage in enumerate(batch.items):
        for item, one in enumerate(of_stage):
            there = (iteration, index, stage, item)
            if not one and source_of(server, stages, there):
                server = server.with_item(there, (FREE, 0, 0))
    batch = server.slot_of(iteration).batches[index]
    assert batch
    batch = batch._replace(left=batch.left - 1)
    server = server.with_batch(iteration, index, batch)
    if batch.left and "put.last" not in off:
        return server
    slot = server.slot_of(iteration)
    server = server.with_slot(iteration, slot._replace(rollouts=(*slot.rollouts, (rollout_id, *batch.made[3]))))
    if "put.keeps" in off:
        return server.with_item((*place[:2], 0, 0), (DONE, (*batch.made[:3], ())))
    return server


# Stage 0


def is_proved(server: Server, generator: int, digest: int, off: Off) -> bool:
    """Whether the generator's engine has shown what it computes with these very weights, or nothing is asked."""
    if not server.proofs:
        return True
    shown = server.proofs[generator][digest // VARIANTS]
    return shown == digest or (shown != NONE and "proof.digest" in off)


def prove(server: Server, generator: int, digest: int, *, is_right: bool, off: Off) -> tuple[str, Server]:
    """prove_version. is_right: whether the engine's log-probs of the version's probe are the trainer's."""
    version = digest // VARIANTS
    if server.job != ACTIVE or server.weights[version] != digest:
        return "unknown", server
    is_passed = is_right or "prove.numbers" in off
    if not is_passed and "prove.drops" in off:
        return "refused", server
    shown = list(server.proofs[generator])
    shown[version] = digest if is_passed else NONE
    proofs = (*server.proofs[:generator], tuple(shown), *server.proofs[generator + 1 :])
    return "proved" if is_passed else "refused", server._replace(proofs=proofs)


def versions_for(opened: Open, pin: int) -> tuple[int, int]:
    """(oldest, newest) version that may sample a batch of this open iteration."""
    return (opened.oldest, opened.newest) if pin == NONE else (pin, pin)


def is_other_engine(server: Server, engine: int) -> bool:
    return ANY not in (engine, server.engine) and engine != server.engine


def keep_engine(server: Server, engine: int) -> Server:
    """The first kind that a generator names stays the job's."""
    return server if server.engine != ANY else server._replace(engine=engine)


def sampler(server: Server, iteration: int, index: int, held: int, off: Off) -> int:
    """The digest of the announced version that a claim of this batch is answered with."""
    opened, batch = server.open_at(iteration), server.slot_of(iteration).batches[index]
    if opened is None or not batch:
        return NONE
    oldest, newest = versions_for(opened, batch.pin)
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
    iteration, index, _, _, attempt, (digest, *_), _ = claim
    refusal = _refusal(server, claim, generator, engine, off)
    if refusal:
        return refusal, server
    batch = server.slot_of(iteration).batches[index]
    if batch and batch.made:
        if batch.made[:3] == (content, generator, attempt) and "publish.repeat" not in off:
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
    items = (((FREE, 0, 0),), *(((),) * number for number, _ in stages))
    left = 1 + sum(number for number, _ in stages)
    server = server.with_batch(iteration, index, Batch(batch.pin if batch else NONE, left, items))
    value = (content, generator, attempt, (index, iteration, digest, content, int(is_complete), 0))
    return "accepted", _put(server, stages, (iteration, index, 0, 0), value, rollout_id=rollout_id, off=off)


def num_published(server: Server) -> int:
    """Batches of the window that take memory."""
    return sum(bool(batch and batch.made) for slot in server.slots for batch in slot.batches)


def num_waiting(server: Server) -> int:
    """Batches whose columns are not complete."""
    return sum(bool(batch and batch.left) for slot in server.slots for batch in slot.batches)


def _kept_for_oldest(server: Server, iteration: int, off: Off) -> int:
    """Memory that a younger iteration leaves free: what the oldest one lacks for its commit."""
    oldest = server.window[0].iteration
    if iteration == oldest or "publish.age" in off:
        return 0
    batches = server.slot_of(oldest).batches
    return sum(not batch or not (batch.made or batch.is_dead) for batch in batches)


def _refusal(server: Server, claim: Claim, generator: int, engine: int, off: Off) -> str:
    iteration, index, _, _, _, (digest, *_), _ = claim
    if server.job not in (ACTIVE, REMOVED) and "publish.ended" not in off:
        return "ended"
    is_between = server.open_at(iteration) or (not server.window and iteration == server.committed)
    if not is_between and "publish.iteration" not in off:
        return "stale" if iteration <= server.committed else "future"
    if not server.window and "publish.open" not in off:
        return "closed"
    opened, batches = server.in_slot_of(iteration), server.slot_of(iteration).batches
    batch = batches[index] if index < len(batches) else ()
    oldest, newest = versions_for(opened, batch.pin if batch else NONE) if opened else (0, len(server.versions))
    version = digest // VARIANTS
    if not oldest <= version <= newest and "publish.version" not in off:
        return "stale" if version < oldest else "future"
    if server.versions[version] != digest and "publish.digest" not in off:
        return "wrong_weights"
    if not is_proved(server, generator, digest, off) and "publish.proof" not in off:
        return "unproved"
    if is_other_engine(server, engine) and "publish.engine" not in off:
        return "wrong_engine"
    is_expected = batch and not batch.is_dead and server.open_at(iteration)  # the id says its iteration
    return "" if is_expected or "publish.expected" in off else "unexpected"


# Later stages


def put(
    server: Server, stages: Stages, claim: Claim, value: tuple[object, ...], *, rollout_id: int, off: Off
) -> tuple[str, Server]:
    """It asks for no lease: what the item is made of decides, and the first put wins."""
    place, source = claim[:4], claim[5]
    if server.job != ACTIVE and "put.ended" not in off:
        return "settled", server
    batch = server.slot_of(place[0]).batches[place[1]] if server.open_at(place[0]) else ()
    if not batch or len(batch.items) == 1 or (not batch.made and "put.published" not in off):
        return "settled", server
    if batch.made[:1] != source[:1] and "put.copy" not in off:
        return "settled", server
    before = server.item_at(place)
    if before[:1] == (DONE,) and "put.first" not in off:
        return ("again" if before[1] == value else "divergent"), server
    if not before and "put.ready" not in off:
        return "not_ready", server
    now = source_of(server, stages, place)
    if (not now or now[1:] != source[1:]) and "put.inputs" not in off:
        return "not_ready", server
    return "accepted", _put(server, stages, place, value, rollout_id=rollout_id, off=off)


def read_columns(server: Server, iteration: int, index: int, content: int, off: Off) -> tuple[str, Items]:
    """What the trainer reads for a batch of this content: every value of every item, or why it can't."""
    batch = server.slot_of(iteration).batches[index]
    if (not batch or batch.made[:1] != (content,)) and "columns.digest" not in off:
        return "other", ()
    values = tuple(
        tuple(one[1] if one[:1] == (DONE,) else () for one in stage) for stage in (batch.items[1:] if batch else ())
    )
    is_whole = bool(values) and all(value for stage in values for value in stage)
    if not is_whole and "columns.whole" not in off:
        return "missing", ()
    return "read", values
