"""I1 to I5 and I7 of docs/promises.md: what a state, or a step, may not be. Each answers what broke, or ""."""

from __future__ import annotations

from tests.model import fence
from tests.model.prompts import is_claim, num_published, versions_for
from tests.model.server import ACTIVE, DEAD, EXPECTED, NOBODY, NONE, PUBLISHED, REMOVED, VARIANTS, Open, Server, known
from tests.model.stage_invariants import broken_columns, broken_rows
from tests.model.stages import num_waiting
from tests.model.state import Bounds, State, Trainer

OF_CLAIM = 6
"""The length of what a generator holds."""
OF_VERSION = ("stale", "future", "wrong_weights")


def broken_by_call(state: State, bounds: Bounds, trainer: Trainer, after: Server, outcome: str) -> str:
    """The invariant that a trainer's call broke, if any."""
    before = state.server
    if after[:5] != before[:5] and trainer.epoch != before.epoch:
        return "I4: a trainer of an old epoch moves the fence"
    if outcome == "rewound" and after.committed > before.committed:
        return "I4: a rewind leaves a gap"
    if outcome == "rewound" and known(after.weights, after.committed + 2, len(after.weights)):
        return "memory: a version of the abandoned future stays announced"
    if outcome in ("rewound", "committed") and trainer.link != before.last:
        return "I4: the audit chain has a gap"
    if outcome == "committed":
        return _broken_by_commit(bounds, before, trainer, after)
    return ""


def _broken_by_commit(bounds: Bounds, before: Server, trainer: Trainer, after: Server) -> str:
    if after.committed != before.committed + 1:
        return "I4: a commit does not follow the last one"
    for batch, (mine, (ledger, _)) in enumerate(
        zip(trainer.trained, before.slot_of(after.committed).batches, strict=True)
    ):
        is_dead = ledger[:1] == (DEAD,)
        if (mine[0] if mine else 0) != (0 if is_dead else 1):
            return "I3: an expected batch was not trained exactly once"
        if mine and not _may_sample(bounds, before, after.committed, batch, mine[2]):
            return "I2: a gradient used a batch of other weights"
        if mine and ledger[:1] == (PUBLISHED,) and ledger[1] != mine[1]:
            return "I3: the ledger holds another copy than was trained"
        if mine and (broken := broken_columns(bounds, batch, mine[1], mine[3] if bounds.stages else ())):
            return broken
    if trainer.digest != before.chain[after.committed]:
        return "I2: the weights that were trained are not those of the audit chain"
    if bounds.is_deterministic and after.chain[after.committed + 1] % VARIANTS >= bounds.kinds:
        return "I7: the weights are not those of the synchronous execution"
    return ""


def _may_sample(bounds: Bounds, server: Server, iteration: int, batch: int, digest: int) -> bool:
    """Whether a version may sample this batch, and the digest is the one that the audit chain gives it."""
    oldest, newest = bounds.versions_of(iteration, batch)
    version = digest // VARIANTS
    return oldest <= version <= newest and server.chain[version] == digest


def broken_by_success(state: State, bounds: Bounds) -> str:
    if state.server.committed != bounds.last_iteration:
        return "I4: a job succeeds whose last iteration is not committed"
    return ""


def holds_lease(state: State, iteration: int, batch: int) -> bool:
    """Whether the owner of this batch's entry is at work on it."""
    entry = state.server.slot_of(iteration).batches[batch][1]
    claim = state.generators[entry[3]] if entry and entry[3] >= 0 else ()
    return holds(claim) and (*claim[:2], *claim[3:4]) == (iteration, batch, entry[0])


def holds(claim: tuple[int, ...]) -> bool:
    """Whether a generator works on it."""
    return len(claim) == OF_CLAIM


def left_unheard(state: State, who: int) -> str:
    """I5: who has a claim that it never heard of is given that one, and no other, while it stands."""
    claim = state.generators[who]
    if not claim or holds(claim) or not state.server.open_at(claim[0]):
        return ""
    entry = state.server.slot_of(claim[0]).batches[claim[1]][1]
    return "I5: a lease is left that its holder never heard of" if is_claim(entry, claim[:5], who) else ""


def robbery(state: State, after: Server, who: int, iteration: int, batch: int) -> str:
    """I5: a lease belongs to its holder while that one is at work."""
    entry = state.server.slot_of(iteration).batches[batch][1]
    is_anothers = bool(entry) and entry[3] not in (NOBODY, who) and holds_lease(state, iteration, batch)
    return "I5: a live lease is taken from its holder" if is_anothers and after != state.server else ""


def attempts_of(server: Server, iteration: int, batch: int) -> int:
    """How many attempts of a batch count by now; -1 of one that is settled."""
    entry = server.slot_of(iteration).batches[batch][1]
    return entry[1] + entry[2] - 1 if entry else -1


def counted_for_another(is_released: bool, claimed: int, counted: int) -> str:
    """I6: an attempt counts where the batch can be its cause, and only there.

    claimed: the attempt that the claim was. counted: those that count after it was given back; -1 where it is dead.
    """
    return "I6: an attempt counts for another's fault" if is_released and counted != claimed - 1 else ""


def opening_of(state: State, opened: Open) -> int:
    """Names the opening of an iteration: another one, after a rewind or a restart, has another name."""
    return 100 * state.era + opened.opened


def refused_after_all(state: State, who: int, outcome: str) -> str:
    """Admission: what was sampled by a claim of an iteration that still stands open is not refused for its version."""
    claim = state.generators[who]
    opened = state.server.open_at(claim[0])
    if outcome in OF_VERSION and opened and claim[5] == opening_of(state, opened):
        return "admission: what was sampled for an open iteration is refused for its version"
    return ""


def broken_in(state: State, bounds: Bounds) -> str:
    """The invariant that a state breaks, if any."""
    server = state.server
    if server.job == REMOVED and server != fence.removed(server):
        return "removed: something of the job comes back"
    if server.window and server.job != ACTIVE:
        return "I4: a job that has ended has an open iteration"
    epochs = [one.epoch for one in state.trainers if one]
    if len(epochs) != len(set(epochs)):
        return "I4: two trainers hold the same epoch"
    breaks = _broken_in_window(server, bounds)
    if bounds.stages and num_waiting(server) > bounds.max_waiting:
        breaks = breaks or "memory: more batches wait for columns than may"
    if num_published(server) > bounds.room:
        breaks = breaks or "memory: more batches are published than fit"
    for index in range(len(server.slots)):
        opened = server.in_slot_of(index)
        if opened:
            breaks = breaks or _broken_in_slot(server, bounds, opened)
        elif server.slots[index] != server.blank:
            breaks = breaks or "I3: something is left of an iteration that is over"
    return breaks


def _broken_in_window(server: Server, bounds: Bounds) -> str:
    following = range(server.committed + 1, server.committed + 1 + len(server.window))
    if [one.iteration for one in server.window] != list(following) or len(following) > bounds.lag + 1:
        return "I4: the window is not the K + 1 iterations after the committed one, or the first of them"
    for version, digest in enumerate(server.versions):
        if digest == NONE:
            continue
        if digest != server.chain[version]:
            return "I2: batches may be sampled with other weights than the audit chain's"
        if digest != server.weights[version]:
            return "I5: batches may be sampled with a version that is not announced"
        if version < (server.window[0].oldest if server.window else server.committed + 1):
            return "memory: a version is kept that no batch may be sampled with"
    return ""


def _broken_in_slot(server: Server, bounds: Bounds, opened: Open) -> str:
    slot, seen = server.slot_of(opened.iteration), set()
    for _, batch, iteration, digest, _, is_complete, _ in slot.rollouts:
        if not is_complete:
            return "I1: an incomplete batch is published"
        if iteration != opened.iteration or not _may_sample(bounds, server, iteration, batch, digest):
            return "I2: a batch of other weights is published"
        if batch in seen:
            return "I3: a batch is published twice"
        seen.add(batch)
    for batch, (ledger, entry) in enumerate(slot.batches):
        if not ledger:
            continue  # it follows its opening
        if ledger[0] == EXPECTED and (not entry or entry[0] != ledger[1]):
            return "I5: an expected batch is nowhere"
        if ledger[0] == PUBLISHED and batch not in seen and not (slot.rows and slot.rows[batch]):
            return "I5: a published batch is gone"
        if entry and not known(server.versions, *versions_for(opened, ledger)):
            return "I5: no version may sample a batch that is on the stream"
    return broken_rows(server, bounds, opened) if bounds.stages else ""
