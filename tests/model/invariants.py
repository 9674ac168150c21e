"""I1 to I5, I7 and I11 of docs/promises.md: what a state, or a step, may not be. Each answers what broke, or ""."""

from __future__ import annotations

from tests.model import fence
from tests.model.server import (
    ACTIVE,
    DONE,
    FREE,
    LEASED,
    NONE,
    REMOVED,
    VARIANTS,
    Batch,
    Claim,
    Items,
    Open,
    Place,
    Server,
    known,
)
from tests.model.state import Bounds, State, Trainer
from tests.model.table import GIVEN_BACK, is_leased, num_published, num_waiting, source_of, versions_for

OF_CLAIM = 7
"""The length of what a generator or a stage worker holds."""
OF_VERSION = ("stale", "future", "wrong_weights")


def broken_by_call(state: State, bounds: Bounds, trainer: Trainer, after: Server, outcome: str) -> str:
    """The invariant that a trainer's call broke, if any."""
    before = state.server
    if after[:5] != before[:5] and trainer.epoch != before.epoch:
        return "I4: a trainer of an old epoch moves the fence"
    if outcome == "rewound" and after.committed > before.committed:
        return "I4: a rewind leaves a gap"
    if outcome == "published" and _keeps_old_proofs(after):
        return "memory: a proof is kept of a version that nothing may be sampled with"
    if outcome == "rewound" and known(after.weights, after.committed + 2, len(after.weights)):
        return "memory: a version of the abandoned future stays announced"
    if outcome in ("rewound", "committed") and trainer.link != before.last:
        return "I4: the audit chain has a gap"
    if outcome == "committed":
        return _broken_by_commit(bounds, before, trainer, after)
    return ""


def _keeps_old_proofs(server: Server) -> bool:
    oldest = next(version for version, digest in enumerate(server.weights) if digest != NONE)
    return any(known(shown, 0, oldest - 1) for shown in server.proofs if oldest)


def _broken_by_commit(bounds: Bounds, before: Server, trainer: Trainer, after: Server) -> str:
    if after.committed != before.committed + 1:
        return "I4: a commit does not follow the last one"
    batches = before.slot_of(after.committed).batches
    for index, (mine, batch) in enumerate(zip(trainer.trained, batches, strict=True)):
        is_dead = bool(batch) and batch.is_dead
        if (mine[0] if mine else 0) != (0 if is_dead else 1):
            return "I3: an expected batch was not trained exactly once"
        if mine and not _may_sample(bounds, before, after.committed, index, mine[2]):
            return "I2: a gradient used a batch of other weights"
        if mine and batch and batch.made and batch.made[0] != mine[1]:
            return "I3: the ledger holds another copy than was trained"
        if mine and (broken := _broken_columns(bounds, index, mine[1], mine[3] if bounds.stages else ())):
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


def holds_lease(state: State, place: Place) -> bool:
    """Whether the holder of this item's lease is at work on it."""
    item = state.server.item_at(place)
    claim = state.workers[item[2]] if item[:1] == (LEASED,) else ()
    return holds(claim) and claim[:4] == place and is_leased(item, claim, item[2])


def holds(claim: Claim) -> bool:
    """Whether a worker works on it."""
    return len(claim) == OF_CLAIM


def left_unheard(state: State, who: int) -> str:
    """I5: who has a claim that it never heard of is given that one, and no other, while it stands."""
    claim = state.workers[who]
    is_left = bool(claim) and not holds(claim) and is_leased(state.server.item_at(claim[:4]), claim, who)
    return "I5: a lease is left that its holder never heard of" if is_left else ""


def robbery(state: State, who: int, claim: Claim) -> str:
    """I5: a lease belongs to its holder while that one is at work."""
    is_anothers = not is_leased(state.server.item_at(claim[:4]), claim, who)
    return "I5: a live lease is taken from its holder" if is_anothers and holds_lease(state, claim[:4]) else ""


def attempts_of(server: Server, claim: Claim) -> int:
    """How many attempts of an item count by now; -1 of one whose batch is dead."""
    item = server.item_at(claim[:4])
    return item[1] if item[:1] in ((FREE,), (LEASED,)) else -1


def broken_by_put(state: State, after: Server, claim: Claim) -> str:
    """I3: what an item was made of, once put, stays."""
    before, batch = (server.slot_of(claim[0]).batches[claim[1]] for server in (state.server, after))
    for of_stage, now in zip(before.items[1:] if before else (), batch.items[1:] if batch else (), strict=False):
        for one, new in zip(of_stage, now, strict=True):
            if one[:1] == (DONE,) and new != one:
                return "I3: a column that was put is another one now"
    return ""


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
    claim = state.workers[who]
    opened = state.server.open_at(claim[0])
    if outcome in OF_VERSION and opened and claim[6] // GIVEN_BACK == opening_of(state, opened):
        return "admission: what was sampled for an open iteration is refused for its version"
    return ""


def handed_out_unshown(state: State, who: int, claim: Claim) -> str:
    """I11: a batch is handed to those alone whose engine has shown the version that samples it."""
    is_of_generator = bool(claim) and not claim[2]
    if is_of_generator and not _has_shown(state, who, claim):
        return "I11: a batch is handed out for a version that the engine has not shown"
    return ""


def accepted_unshown(state: State, who: int, claim: Claim) -> str:
    """I11: no rollout of a version is accepted from a generator whose engine has not shown it."""
    return "" if _has_shown(state, who, claim) else "I11: a rollout is accepted of a version that was not shown"


def _has_shown(state: State, who: int, claim: Claim) -> bool:
    if not state.engines:
        return True
    (digest,) = claim[5]
    return state.engines[who].shown[digest // VARIANTS] == digest


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
    for index, batch in enumerate(slot.batches):
        if batch and not batch.prompts:
            return "I5: an expected batch is nowhere"
        is_expected = batch and batch.prompts[0] in (FREE, LEASED)
        if batch and is_expected and not known(server.versions, *versions_for(opened, batch.pin)):
            return "I5: no version may sample a batch that is in work"
        on_stream = [one for one in slot.rollouts if one[1] == index]
        if batch and (broken := _broken_batch(server, bounds, opened.iteration, index, batch, on_stream)):
            return broken
    return ""


def _broken_batch(
    server: Server, bounds: Bounds, iteration: int, index: int, batch: Batch, on_stream: list[tuple[int, ...]]
) -> str:
    if not batch.made:
        return "I6: something is left of a batch that is dead" if len(batch.items) > 1 else ""
    left = 0
    for stage, of_stage in enumerate(batch.items):
        for item, one in enumerate(of_stage):
            source = source_of(server, bounds.stages, (iteration, index, stage, item)) if stage else ()
            left += one[:1] != (DONE,)
            if stage and one[:1] == (DONE,) and one[1][0] != source:
                return "I3: a column stands that was made of other inputs"
            if source and not one:
                return "I5: an item whose inputs are there is nowhere"
            if stage and not source and one:
                return "I5: an item is handed out before its inputs are there"
    if left != batch.left:
        return "I1: another number of items is left than is counted"
    if on_stream and (left or len(batch.items) != 1 + len(bounds.stages_of(index))):
        return "I1: a batch without its columns is given to the trainer"
    if not left and (not on_stream or on_stream[0][1:6] != batch.made[3][:5]):
        return "I5: a batch with all of its columns is nowhere"
    return ""


def _broken_columns(bounds: Bounds, index: int, content: int, columns: Items) -> str:
    """I1, I3: a batch is trained with all of its columns, each made of this copy and of the inputs beside it."""
    stages = bounds.stages_of(index)
    if not stages:
        return ""
    if not columns or not all(value for of_stage in columns for value in of_stage):
        return "I1: a batch is trained without its columns"
    if any(value[0][0] != content for of_stage in columns for value in of_stage):
        return "I3: a batch is trained with columns of another copy"
    for (_, after), of_stage in zip(stages, columns, strict=True):
        made = {value for before in after for value in columns[before - 1]}
        if any(set(value[0][1:]) - made for value in of_stage):
            return "I3: a batch is trained with columns of other inputs"
    return ""
