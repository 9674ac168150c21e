"""I1 to I5 of docs/invariants.md: what a state, or a step, may not be. Each answers the name of what broke, or ""."""

from __future__ import annotations

from tests.model import fence
from tests.model.fence import ACTIVE, DEAD, NOBODY, REMOVED, VARIANTS, Server
from tests.model.state import Bounds, State, Trainer


def broken_by_call(state: State, trainer: Trainer, after: Server, outcome: str) -> str:
    """The invariant that a trainer's call broke, if any."""
    before = state.server
    if after[:6] != before[:6] and trainer.epoch != before.epoch:
        return "I4: a trainer of an old epoch moves the fence"
    if outcome in ("opened", "committed") and after.is_open:
        expected = (after.committed + 1, after.iteration, after.weights[after.iteration])
        if expected != (after.iteration, after.digest // VARIANTS, after.digest):
            return "I4: the open iteration is not the next one, of its announced version"
    if outcome == "rewound" and after.committed > before.committed:
        return "I4: a rewind leaves a gap"
    if outcome in ("rewound", "committed") and trainer.link != before.last:
        return "I4: the audit chain has a gap"
    if outcome == "committed":
        return _broken_by_commit(before, trainer, after)
    return ""


def _broken_by_commit(before: Server, trainer: Trainer, after: Server) -> str:
    if after.committed != before.committed + 1:
        return "I4: a commit does not follow the last one"
    for mine, (ledger, _) in zip(trainer.trained, before.batches, strict=True):
        is_dead = ledger[:1] == (DEAD,)
        if (mine[0] if mine else 0) != (0 if is_dead else 1):
            return "I3: an expected batch was not trained exactly once"
        if mine and mine[2] != trainer.digest:
            return "I2: a gradient used a batch of other weights"
        if mine and ledger[:1] == (fence.PUBLISHED,) and ledger[1] != mine[1]:
            return "I3: the ledger holds another copy than was trained"
    if trainer.digest != before.digest:
        return "I2: the weights that were trained are not the fence's"
    return ""


def broken_by_success(state: State, bounds: Bounds) -> str:
    if state.server.committed != bounds.iterations - 1:
        return "I4: a job succeeds whose last iteration is not committed"
    return ""


def holds_lease(state: State, batch: int) -> bool:
    """Whether the owner of this batch's entry is at work on it."""
    entry = state.server.batches[batch][1]
    claim = state.generators[entry[3]] if entry and entry[3] >= 0 else ()
    return bool(claim) and (claim[0], claim[1], claim[3]) == (state.server.iteration, batch, entry[0])


def robbery(state: State, after: Server, who: int, batch: int) -> str:
    """I5: a lease belongs to its holder while that one is at work."""
    entry = state.server.batches[batch][1]
    is_anothers = bool(entry) and entry[3] not in (NOBODY, who) and holds_lease(state, batch)
    return "I5: a live lease is taken from its holder" if is_anothers and after != state.server else ""


def broken_in(state: State) -> str:
    """The invariant that a state breaks, if any."""
    server = state.server
    if server.job == REMOVED and server != fence.removed(server):
        return "removed: something of the job comes back"
    if server.is_open and server.job != ACTIVE:
        return "I4: a job that has ended has an open iteration"
    if server.is_open:
        seen = set()
        for _, batch, iteration, digest, _, is_complete, _ in server.rollouts:
            if not is_complete:
                return "I1: an incomplete batch is published"
            if (iteration, digest) != (server.iteration, server.digest):
                return "I2: a batch of other weights is published"
            if batch in seen:
                return "I3: a batch is published twice"
            seen.add(batch)
        for batch, (ledger, entry) in enumerate(server.batches):
            if not ledger:
                continue  # of an opening that goes on
            if ledger[0] == fence.EXPECTED and (not entry or entry[0] != ledger[1]):
                return "I5: an expected batch is nowhere"
            if ledger[0] == fence.PUBLISHED and batch not in seen:
                return "I5: a published batch is gone"
    elif server.rollouts:
        return "I3: a batch is published into a closed iteration"
    epochs = [one.epoch for one in state.trainers if one]
    if len(epochs) != len(set(epochs)):
        return "I4: two trainers hold the same epoch"
    return ""
