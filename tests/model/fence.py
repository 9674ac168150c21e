"""The scripts of broker/scripts that trainers call, or that move a job, as pure functions.

Each takes what the server knows and a call, and answers (outcome, what the server knows then).

`off` names the checks that a mutation leaves out; each is named once, as `script.check`, where it is made.
"""

from __future__ import annotations

from tests.model.server import (
    ACTIVE,
    ANY,
    COMMIT,
    ENDED,
    NONE,
    REMOVED,
    REWIND,
    VARIANTS,
    Batch,
    Off,
    Open,
    Opening,
    Record,
    Rollout,
    Server,
    Slot,
    nothing,
)


def _is_fenced(server: Server, epoch: int, check: str, off: Off) -> bool:
    return server.epoch != epoch and check not in off


# Trainers


def acquire(server: Server, *, clock: int, off: Off) -> Server:
    """acquire_trainer where the lease is over or free. clock: beyond every epoch handed out, as the server's is."""
    if server.job == REMOVED and "acquire.unknown" not in off:
        return server
    epoch = server.epoch + 1
    if "acquire.clock" not in off:
        epoch = max(epoch, clock)
    return server._replace(epoch=epoch)


def publish_weights(server: Server, epoch: int, digest: int, *, oldest_kept: int, off: Off) -> tuple[str, Server]:
    if _is_fenced(server, epoch, "publish_weights.epoch", off):
        return "fenced", server
    # A restart may have lost the rewind of a trainer that lives, and which has made this version anew.
    if server.versions[digest // VARIANTS] not in (digest, NONE) and "publish_weights.same" not in off:
        return "divergent", server
    announced = list(server.weights)
    announced[digest // VARIANTS] = digest
    # What may sample the window stays, also where the trainer counts on commits that a restart has lost.
    if server.window and "publish_weights.window" not in off:
        oldest_kept = min(oldest_kept, server.window[0].oldest)
    kept = tuple(one if version >= oldest_kept else NONE for version, one in enumerate(announced))
    proofs = server.proofs
    if "publish_weights.proofs" not in off:
        proofs = tuple(
            tuple(digest if version >= oldest_kept else NONE for version, digest in enumerate(shown))
            for shown in server.proofs
        )
    return "published", server._replace(weights=kept, proofs=proofs)


def _sent(server: Server, iteration: int, sent: tuple[tuple[int, int], ...]) -> Server:
    for index, pin in sent:
        server = server.with_batch(iteration, index, Batch(pin))
    return server


def _opened(server: Server, epoch: int, opening: Opening) -> Server:
    """The batches that don't go out with it follow: `dispatch` and `reconcile` send them."""
    opened = Open(opening.iteration, opening.oldest, opening.newest, epoch)
    server = server._replace(window=(*server.window, opened))
    return _sent(server, opening.iteration, opening.sent)


def _closed(server: Server) -> Server:
    """Nothing is open any more, and no version may sample."""
    none = (NONE,) * len(server.versions)
    return server._replace(window=(), versions=none, slots=(server.blank,) * len(server.slots))


def open_iteration(
    server: Server, epoch: int, opening: Opening, digests: tuple[int, ...], off: Off
) -> tuple[str, Server]:
    """digests: of the versions that the window may be sampled with, as the trainer has them."""
    if _is_fenced(server, epoch, "open.epoch", off):
        return "fenced", server
    stands = server.open_at(opening.iteration)
    is_same = all(server.versions[one // VARIANTS] in (one, NONE) for one in digests)
    if "open.repeat" not in off and stands and stands.oldest == opening.oldest and is_same:
        return "already_open", server
    if not _is_next(server, opening, off):
        return "out_of_order", server
    fault, after = _with_versions(server, digests, "open.manifest", off)
    if not fault and not _is_samplable(after, opening, off):
        fault = "no_manifest"
    return (fault, server) if fault else ("opened", _opened(after, epoch, opening))


def _is_next(server: Server, opening: Opening, off: Off) -> bool:
    """Whether it follows the newest open one, finds a slot free, and is not sampled by too old a version."""
    if len(server.window) == len(server.slots) and "open.window" not in off:
        return False
    if opening.oldest < opening.iteration - len(server.slots) + 1 and "open.range" not in off:
        return False
    return opening.iteration == server.newest + 1 or "open.follows" in off


def _with_versions(server: Server, digests: tuple[int, ...], check: str, off: Off) -> tuple[str, Server]:
    """(what speaks against it, the server to which these versions are known)."""
    versions = list(server.versions)
    for digest in digests:
        version = digest // VARIANTS
        is_other = versions[version] not in (digest, NONE) and "versions.same" not in off
        if version > server.committed + 1 or is_other:
            return "out_of_order", server
        if server.weights[version] != digest and check not in off:
            return "no_manifest", server
        versions[version] = digest
    return "", server._replace(versions=tuple(versions))


def _is_samplable(server: Server, opening: Opening, off: Off) -> bool:
    """Whether it finds the version that its first claim may be answered with, and each pinned one."""
    asked = (opening.oldest, *(pin for _, pin in opening.sent if pin != NONE))
    return all(server.versions[version] != NONE for version in asked) or "open.samplable" in off


def claim_rollouts(
    server: Server, epoch: int, iteration: int, last: int, off: Off, *, max_batches: int = 99
) -> tuple[str, Server, tuple[Rollout, ...]]:
    """last: id of the iteration's newest rollout that this trainer holds; 0: none, it takes over what others had."""
    if _is_fenced(server, epoch, "claim_rollouts.epoch", off):
        return "fenced", server, ()
    if not server.open_at(iteration) and "claim_rollouts.iteration" not in off:
        return "wrong_iteration", server, ()
    takes_over = last == 0 and "claim_rollouts.takeover" not in off
    answered, after = [], []
    slot = server.slot_of(iteration)
    for one in slot.rollouts:
        given = epoch if one[6] and takes_over else one[6]
        one = (*one[:6], given)
        if len(answered) < max_batches and (given == 0 or (given == epoch and one[0] > last)):
            one = (*one[:6], epoch)
            answered.append(one)
            if "trainer.acknowledges_at_commit" in off:
                continue
        after.append(one)
    return "claimed", server.with_slot(iteration, slot._replace(rollouts=tuple(after))), tuple(answered)


def reconcile(
    server: Server, epoch: int, iteration: int, sent: tuple[tuple[int, int], ...], off: Off
) -> tuple[str, Server]:
    """Those of the batches that are nowhere go out: `reconcile` names them, `dispatch` sends them."""
    if _is_fenced(server, epoch, "reconcile.epoch", off):
        return "fenced", server
    if not server.open_at(iteration) and "reconcile.iteration" not in off:
        return "wrong_iteration", server
    if any(pin != NONE and server.versions[pin] == NONE for _, pin in sent) and "dispatch.version" not in off:
        return "no_manifest", server
    there = server.slot_of(iteration).batches
    lost = tuple(one for one in sent if not (batch := there[one[0]]) or not batch.prompts)
    return "dispatched", _sent(server, iteration, lost)


def commit(
    server: Server,
    epoch: int,
    iteration: int,
    trained: tuple[int, ...],
    opening: Opening | None,
    *,
    made: int,
    follows: Record,
    engine: int = ANY,
    off: Off,
) -> tuple[str, Server]:
    """trained: [batches] the content of each, NONE for none. follows: the record that the trainer holds for the newest.

    engine: the kind that sampled what the trainer was given first, ANY where none is named.

    made: the digest of the version that the iteration makes, NONE for none.
    """
    if _is_fenced(server, epoch, "commit.epoch", off):
        return "fenced", server
    if server.committed >= iteration and "commit.repeat" not in off:
        return "already_committed", server
    is_oldest = bool(server.window) and server.window[0].iteration == iteration
    if not is_oldest and "commit.iteration" not in off:
        return "wrong_iteration", server
    if server.last != follows and "commit.link" not in off:
        return "broken_link", server
    if ANY not in (engine, server.engine) and engine != server.engine and "commit.engine" not in off:
        return "wrong_engine", server
    refusal = contradiction(server.slot_of(iteration), trained, off)
    if refusal:
        return refusal, server
    after = _committed(server, iteration, made, off)._replace(last=(COMMIT, iteration, epoch))
    if "commit.keeps_engine" not in off:
        after = after._replace(engine=server.engine or engine)
    if opening is not None and not _is_next(after, opening, off):
        return "out_of_order", server
    fault, after = _with_versions(after, () if made == NONE else (made,), "commit.manifest", off)
    if not fault and opening is not None and not _is_samplable(after, opening, off):
        fault = "no_manifest"
    if fault:
        return fault, server
    return "committed", _pruned(_opened(after, epoch, opening) if opening else after, off)


def contradiction(slot: Slot, trained: tuple[int, ...], off: Off) -> str:
    """What the ledger says against a commit of these contents, or ""."""
    if "commit.whole" not in off and not all(slot.batches):
        return "missing"
    for batch, content in zip(slot.batches, trained, strict=True):
        if not batch or batch.is_dead:
            if content != NONE and "commit.dead" not in off:
                return "divergent"
        elif content == NONE and "commit.complete" not in off:
            return "missing"
        elif batch.made and content not in (NONE, batch.made[0]) and "commit.digest" not in off:
            return "divergent"
    return ""


def _committed(server: Server, iteration: int, made: int, off: Off) -> Server:
    """The iteration's slot is empty, and the chain names the version that it has made."""
    chain = (*server.chain[: iteration + 1], made, *(NONE,) * (len(server.chain) - iteration - 2))
    if "commit.clears" not in off:
        server = server.with_slot(iteration, server.blank)
    return server._replace(committed=iteration, window=server.window[1:], chain=chain)


def _pruned(server: Server, off: Off) -> Server:
    """Versions that are older than the window's oldest go."""
    oldest = server.window[0].oldest if server.window and "commit.keeps" not in off else server.committed + 1
    kept = tuple(one if version >= oldest else NONE for version, one in enumerate(server.versions))
    return server._replace(versions=kept)


def rewind(server: Server, epoch: int, iteration: int, *, follows: Record, off: Off) -> tuple[str, Server]:
    if _is_fenced(server, epoch, "rewind.epoch", off):
        return "fenced", server
    record = (REWIND, iteration, epoch)
    is_repeated = server.last == record and not server.window and server.committed == iteration - 1
    if is_repeated and "rewind.repeat" not in off:
        return "already_rewound", server
    if iteration - 1 > server.committed and "rewind.gap" not in off:
        return "out_of_order", server
    if server.last != follows and "rewind.link" not in off:
        return "broken_link", server
    chain = (*server.chain[: iteration + 1], *(NONE,) * (len(server.chain) - iteration - 1))
    weights = server.weights
    if "rewind.manifests" not in off:
        weights = tuple(one if version <= iteration else NONE for version, one in enumerate(weights))
    return "rewound", _closed(server)._replace(committed=iteration - 1, last=record, chain=chain, weights=weights)


# The job


def set_state(server: Server, epoch: int, job: int, off: Off) -> tuple[str, Server]:
    """By a trainer: it ends the job."""
    if server.job == REMOVED:
        return "refused", server
    if _is_fenced(server, epoch, "set_state.epoch", off):
        return "fenced", server
    if server.job != ACTIVE:
        return "refused", server
    return "set", _ended(server, job, off)


def give_up(server: Server, *, clock: int, off: Off) -> Server:
    """set_state of an active job by a process that is no trainer. A trainer that lives is fenced off."""
    epoch = server.epoch
    if epoch and "set_state.fences" not in off:
        epoch = max(epoch + 1, clock)
    return _ended(server, ENDED, off)._replace(epoch=epoch)


def _ended(server: Server, job: int, off: Off) -> Server:
    if "set_state.clears" not in off:
        server = _closed(server)
    return server._replace(job=job)


def resume_job(server: Server, *, clock: int, off: Off) -> Server:
    """resume_job of a job that has ended; the open iterations are sampled anew."""
    epoch = server.epoch
    if epoch and "resume_job.epoch" not in off:
        epoch = max(epoch + 1, clock)
    if "resume_job.clears" not in off:
        server = _closed(server)
    engine = ANY if server.committed < 0 else server.engine
    return server._replace(epoch=epoch, job=ACTIVE, engine=engine)


def removed(server: Server) -> Server:
    """What remove_job leaves of a job that has ended: nothing, and nothing of it may come back."""
    num_batches, num_versions = len(server.blank.batches), len(server.versions)
    empty = nothing(num_batches, num_versions, num_open=len(server.slots), num_provers=len(server.proofs))
    return empty._replace(job=REMOVED)
