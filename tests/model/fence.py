"""The scripts of broker/scripts as pure functions: what the server knows and a call → (outcome, what it knows then).

Everything is a tuple, so that states can be hashed and compared. `off` names the checks that a mutation leaves out;
each is named once, as `script.check`, where it is made.

    digest of weights     16 · version + variant; another variant is another content of the same version
    entry                 (id, first attempt, deliveries, owner) of a batch on the prompts stream; () if it isn't
    ledger                () | (EXPECTED, entry id) | (PUBLISHED, content, generator, attempt) | (DEAD,)
    rollout               (id, batch, iteration, digest, content, is complete, whom it was delivered to: an epoch or 0)
    claim                 (iteration, batch, digest, entry id, attempt)
    record                (COMMIT or REWIND, iteration, epoch), as the audit stream holds it
"""

from __future__ import annotations

from typing import NamedTuple

EXPECTED, PUBLISHED, DEAD = 1, 2, 3
COMMIT, REWIND = 1, 2
ACTIVE, ENDED, SUCCEEDED, REMOVED = 0, 1, 2, 3
VARIANTS = 16
NOBODY = -1

Off = frozenset[str]
Entry = tuple[int, ...]
Ledger = tuple[int, ...]
Rollout = tuple[int, ...]
Claim = tuple[int, ...]
Record = tuple[int, ...]
Batch = tuple[Ledger, Entry]
ABSENT: Batch = ((), ())


class Server(NamedTuple):
    """All that the server holds of a job and that a script asks about."""

    epoch: int
    is_open: bool
    iteration: int
    digest: int
    committed: int
    weights: tuple[int, ...]
    """[versions] The digest that was announced, -1 for none."""
    batches: tuple[Batch, ...]
    rollouts: tuple[Rollout, ...]
    last: Record
    """The newest audit record."""
    job: int = ACTIVE
    """ENDED: failed or cancelled, and may be resumed or removed."""

    def with_batch(self, index: int, batch: Batch) -> Server:
        return self._replace(batches=(*self.batches[:index], batch, *self.batches[index + 1 :]))


def nothing(num_batches: int, num_versions: int) -> Server:
    return Server(0, False, -1, 0, -1, (-1,) * num_versions, (ABSENT,) * num_batches, (), ())


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
    announced = list(server.weights)
    announced[digest // VARIANTS] = digest
    oldest = min(oldest_kept, server.iteration) if server.is_open else oldest_kept
    kept = tuple(one if version >= oldest else -1 for version, one in enumerate(announced))
    return "published", server._replace(weights=kept)


def _opened(server: Server, epoch: int, iteration: int, digest: int, first: int) -> Server:
    """first: so many batches go out with the opening; reconcile sends the others after it."""
    entry_id = 8 * epoch + 1
    fresh: Batch = ((EXPECTED, entry_id), (entry_id, 1, 0, NOBODY))
    batches = tuple(fresh if index < first else ABSENT for index in range(len(server.batches)))
    return server._replace(is_open=True, iteration=iteration, digest=digest, batches=batches, rollouts=())


def _cleared(server: Server) -> Server:
    return server._replace(is_open=False, batches=(ABSENT,) * len(server.batches), rollouts=())


def open_iteration(
    server: Server, epoch: int, iteration: int, digest: int, off: Off, *, first: int
) -> tuple[str, Server]:
    if _is_fenced(server, epoch, "open.epoch", off):
        return "fenced", server
    if "open.repeat" not in off and server.is_open and (server.iteration, server.digest) == (iteration, digest):
        return "already_open", server
    if server.is_open and "open.closed" not in off:
        return "out_of_order", server
    if iteration != server.committed + 1 and "open.follows" not in off:
        return "out_of_order", server
    if server.weights[iteration] != digest and "open.manifest" not in off:
        return "no_manifest", server
    return "opened", _opened(server, epoch, iteration, digest, first)


def claim_rollouts(
    server: Server, epoch: int, last: int, off: Off, *, max_batches: int = 99
) -> tuple[str, Server, tuple[Rollout, ...]]:
    """last: id of the newest rollout that this trainer holds; 0: none, it takes over what others were given."""
    if _is_fenced(server, epoch, "claim_rollouts.epoch", off):
        return "fenced", server, ()
    takes_over = last == 0 and "claim_rollouts.takeover" not in off
    answered, after = [], []
    for one in server.rollouts:
        given = epoch if one[6] and takes_over else one[6]
        one = (*one[:6], given)
        if len(answered) < max_batches and (given == 0 or (given == epoch and one[0] > last)):
            one = (*one[:6], epoch)
            answered.append(one)
            if "trainer.acknowledges_at_commit" in off:
                continue
        after.append(one)
    return "claimed", server._replace(rollouts=tuple(after)), tuple(answered)


def reconcile(server: Server, epoch: int, iteration: int, off: Off) -> tuple[str, Server]:
    """Every expected batch that is nowhere goes out: reconcile.lua names them, dispatch.lua sends them."""
    if _is_fenced(server, epoch, "reconcile.epoch", off):
        return "fenced", server
    if (not server.is_open or server.iteration != iteration) and "reconcile.iteration" not in off:
        return "wrong_iteration", server
    for index, (ledger, entry) in enumerate(server.batches):
        if not ledger or (ledger[0] == EXPECTED and not entry):
            entry_id = 8 * epoch + 1
            server = server.with_batch(index, ((EXPECTED, entry_id), (entry_id, 1, 0, NOBODY)))
    return "dispatched", server


def commit(
    server: Server,
    epoch: int,
    iteration: int,
    trained: tuple[int, ...],
    opening: int,
    *,
    follows: Record,
    first: int,
    off: Off,
) -> tuple[str, Server]:
    """trained: [batches] the content of each, -1 for none. opening: digest of the next version, -1 for no next.

    follows: the record that this trainer holds for the newest.
    """
    if _is_fenced(server, epoch, "commit.epoch", off):
        return "fenced", server
    record = (COMMIT, iteration, epoch)
    if server.committed >= iteration and "commit.repeat" not in off:
        return "already_committed", server
    if (not server.is_open or server.iteration != iteration) and "commit.iteration" not in off:
        return "wrong_iteration", server
    if server.last != follows and "commit.link" not in off:
        return "broken_link", server
    for (ledger, _), content in zip(server.batches, trained, strict=True):
        if not ledger and "commit.whole" not in off:
            return "missing", server
        if not ledger or ledger[0] == DEAD:
            if content != -1:
                return "divergent", server
        elif content == -1 and "commit.complete" not in off:
            return "missing", server
        elif ledger[0] == PUBLISHED and content not in (-1, ledger[1]) and "commit.digest" not in off:
            return "divergent", server
    if opening != -1 and server.weights[opening // VARIANTS] != opening and "commit.manifest" not in off:
        return "no_manifest", server
    server = _cleared(server)._replace(committed=iteration, last=record)
    return "committed", server if opening == -1 else _opened(server, epoch, iteration + 1, opening, first)


def rewind(server: Server, epoch: int, iteration: int, *, follows: Record, off: Off) -> tuple[str, Server]:
    if _is_fenced(server, epoch, "rewind.epoch", off):
        return "fenced", server
    record = (REWIND, iteration, epoch)
    if (
        server.last == record
        and not server.is_open
        and server.committed == iteration - 1
        and "rewind.repeat" not in off
    ):
        return "already_rewound", server
    if iteration - 1 > server.committed and "rewind.gap" not in off:
        return "out_of_order", server
    if server.last != follows and "rewind.link" not in off:
        return "broken_link", server
    return "rewound", _cleared(server)._replace(committed=iteration - 1, iteration=iteration - 1, last=record)


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
    if server.is_open and "set_state.clears" not in off:
        server = _cleared(server)._replace(iteration=server.committed)
    return server._replace(job=job)


def resume_job(server: Server, *, clock: int, off: Off) -> Server:
    """resume_job of a job that has ended; the open iteration is sampled anew."""
    epoch = server.epoch
    if epoch and "resume_job.epoch" not in off:
        epoch = max(epoch + 1, clock)
    if server.is_open and "resume_job.clears" not in off:
        server = _cleared(server)._replace(iteration=server.committed)
    return server._replace(epoch=epoch, job=ACTIVE)


def removed(server: Server) -> Server:
    """What remove_job leaves of a job that has ended: nothing, and nothing of it may come back."""
    return nothing(len(server.batches), len(server.weights))._replace(job=REMOVED)


# Generators


def claim_prompt(server: Server, batch: int, generator: int, max_attempts: int) -> tuple[str, Server, Claim]:
    """claim_prompt of a batch that is new, or whose lease is over: which of them is left open."""
    ledger, (entry_id, first, deliveries, _) = server.batches[batch]
    attempt = first + deliveries
    if attempt > max_attempts:
        return "buried", server.with_batch(batch, ((DEAD,), ())), ()
    leased = server.with_batch(batch, (ledger, (entry_id, first, deliveries + 1, generator)))
    return "claimed", leased, (server.iteration, batch, server.weights[server.iteration], entry_id, attempt)


def publish(
    server: Server,
    claim: Claim,
    generator: int,
    content: int,
    *,
    is_complete: bool,
    fits: bool = True,
    rollout_id: int,
    off: Off,
) -> tuple[str, Server]:
    """fits: whether it is below the largest size that the spec allows."""
    iteration, batch, digest, _, attempt = claim
    refusal = _refusal(server, claim, off)
    if refusal:
        return refusal, server
    ledger = server.batches[batch][0]
    if ledger and ledger[0] == PUBLISHED:
        if ledger[1:] == (content, generator, attempt) and "publish.repeat" not in off:
            return "accepted", server
        if "publish.duplicate" not in off:
            return "duplicate", server
    if not is_complete and "publish.complete" not in off:
        return "incomplete", server
    if not fits:
        return "oversize", server
    rollout = (rollout_id, batch, iteration, digest, content, int(is_complete), 0)
    server = server.with_batch(batch, ((PUBLISHED, content, generator, attempt), ()))
    return "accepted", server._replace(rollouts=(*server.rollouts, rollout))


def _refusal(server: Server, claim: Claim, off: Off) -> str:
    iteration, batch, digest, _, _ = claim
    if server.job not in (ACTIVE, REMOVED) and "publish.ended" not in off:
        return "ended"
    if iteration != server.iteration and "publish.iteration" not in off:
        return "stale" if iteration < server.iteration else "future"
    if not server.is_open and "publish.open" not in off:
        return "closed"
    if digest // VARIANTS != server.digest // VARIANTS and "publish.version" not in off:
        return "stale" if digest < server.digest else "future"
    if digest != server.digest and "publish.digest" not in off:
        return "wrong_weights"
    ledger = server.batches[batch][0] if batch < len(server.batches) else ()
    is_expected = ledger and ledger[0] != DEAD and iteration == server.iteration  # the id says its iteration
    return "" if is_expected or "publish.expected" in off else "unexpected"


def fail(server: Server, claim: Claim, generator: int, max_attempts: int, off: Off) -> tuple[str, Server]:
    iteration, batch, _, entry_id, attempt = claim
    ledger, entry = server.batches[batch]
    if not entry or iteration != server.iteration:
        return "settled", server
    if entry[0] != entry_id and "fail.entry" not in off:
        return "settled", server
    if entry[3] != generator and "fail.owner" not in off:
        return "settled", server
    if entry[1] + entry[2] - 1 != attempt and "fail.attempt" not in off:
        return "settled", server
    if attempt >= max_attempts:
        return "dead", server.with_batch(batch, ((DEAD,), ()))
    again = entry[0] // 8 * 8 + attempt + 1
    return "retried", server.with_batch(batch, ((ledger[0], again), (again, attempt + 1, 0, NOBODY)))


def renew_prompt(server: Server, claim: Claim, generator: int, off: Off) -> tuple[str, Server]:
    """Changes nothing that is asked about here, unless it gives the lease to a generator that has lost it.

    A generator that works on a copy holds a mark of its own, which is left out here: `lost` may be `held` for it.
    """
    iteration, batch, _, entry_id, _ = claim
    ledger, entry = server.batches[batch]
    if server.job != ACTIVE or iteration != server.iteration:
        return "settled", server
    if entry and entry[0] == entry_id and (entry[3] == generator or "renew.owner" in off):
        return "held", server.with_batch(batch, (ledger, (*entry[:3], generator)))
    return "lost" if ledger[:1] == (EXPECTED,) else "settled", server
