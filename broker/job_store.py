"""Jobs: created once per idempotency key, moved along their lifecycle, listed, told about."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from broker import keys
from broker.connection.client import Broker
from broker.keys import OpenKeys, num_open_of
from broker.ledger import ids_among, read_of
from contracts.encoding.wire import decode, encode
from contracts.errors import Conflict, ContractViolation, Fault, FencedOff, InvalidInput, NotFound
from contracts.events import AuditRecord, JobEvent, StateChanged
from contracts.jobs import (
    NEXT_STATES,
    EvaluationScore,
    HealthProblem,
    JobState,
    ResumeRequest,
    changes_in_words,
    resumed_spec,
)
from contracts.run_folder import Removal
from contracts.spec.fork import fork_of
from contracts.spec.job import JobSpec

IDEMPOTENCY_S = 24 * 3600
MAX_REASON_CHARS = 2**16
"""The longest reason for which a job ends; a longer one is cut."""
RECORDS_AT_ONCE = 16
CREATIONS = 3
"""How often a submission is tried whose job is removed in the middle of it."""
FULL = {
    "jobs": ("ONBEAT_MAX_JOBS", "max_jobs"),
    "bytes of specs": ("ONBEAT_MAX_SPECS_MB", "max_spec_bytes"),
    "jobs of this key": ("ONBEAT_MAX_KEY_JOBS", "max_own_jobs"),
    "bytes of specs of this key": ("ONBEAT_MAX_KEY_SPECS_MB", "max_own_spec_bytes"),
}
"""What there may be too many of → its setting, and its limit's name."""
NO_LIMITS: dict[str, int | None] = {limit: None for _, limit in FULL.values()}
NOTHING_NEW = ResumeRequest()
RESUMABLE = {state.value: True for state, nexts in NEXT_STATES.items() if JobState.QUEUED in nexts}


class JobStore:
    """Every job of the stack."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._redis: Any = broker.redis

    def create(
        self,
        spec: JobSpec,
        *,
        owner: str = "",
        idempotency_key: str = "",
        submitted: JobSpec | None = None,
        **limits: int | None,
    ) -> tuple[str, bool]:
        """Creates a job. Answers only after the write is on disk, where the server can tell.

        Args:
            spec: What the job is.
            owner: The name of the key that submits it; "" for a job that no gateway submits.
            idempotency_key: A repeat of the same owner with the same key and submitted spec is answered with the job of
                before, and needs no room.
            submitted: The spec as its client sent it, by which a repeat is recognised; None: `spec`. What a gateway
                adds, as digests of files, may be another when the client sends the same again.
            limits: Of NO_LIMITS, those that hold: `max_jobs`; `max_spec_bytes`, of all specs together; and
                `max_own_jobs` and `max_own_spec_bytes`, the same of the owner.

        Returns:
            The job's id, and True if it is new.

        Raises:
            Conflict: The idempotency key was used for another spec, or the job would be beyond a limit.
        """
        body = encode(spec)
        body_digest = hashlib.blake2b(encode(submitted or spec), digest_size=16).hexdigest()
        # An Idempotency-Key has no space: no owner can make up another one's reservation.
        reservation = f"{owner} {idempotency_key}" if owner and idempotency_key else idempotency_key
        for _ in range(CREATIONS):
            job_id = f"job-{uuid.uuid4().hex[:12]}"
            if reservation:
                job_id = self._reserve(reservation, job_id, body_digest)
            outcome = self._create(job_id, body, owner, reservation, **limits)
            if outcome != b"removed":
                self._broker.durability.persisted()
                return job_id, outcome == b"created"
        raise Conflict("its job is being removed", field="Idempotency-Key", cure="try again, or use another key")

    def _create(self, job_id: str, body: bytes, owner: str, idempotency_key: str, **limits: int | None) -> bytes:
        """The outcome: created, already, or removed where the id is that of a job that was removed meanwhile.

        Raises Conflict where the job is one too many.
        """
        now_s = time.time()
        outcome, *rest = self._broker.run(
            "create_job",
            body,
            encode(StateChanged(at_s=now_s, state=JobState.QUEUED, by=owner or UNSET)),
            job=job_id,
            state=JobState.QUEUED.value,
            created_s=now_s,
            owner=owner,
            idempotency_key=idempotency_key,
            **NO_LIMITS | limits,
        )
        if outcome == b"full":
            what, there = rest[0].decode(), rest[1]
            setting, limit = FULL[what][0], limits[FULL[what][1]]
            problem = f"{there} {what} are kept, and {setting} allows {limit}, with those of the new one"
            raise Conflict(problem, field="jobs", cure="delete ended ones with `onbeat delete JOB`")
        return outcome

    def _num_slots(self, job_id: str) -> int:
        """How many slots the window of a job has that is to be cleared; one without a spec has no window."""
        with self._broker.call():
            spec = self._redis.get(OpenKeys(job_id).spec)
        return num_open_of(spec) if spec else 1

    def _reserve(self, key: str, job_id: str, body_digest: str) -> str:
        with self._broker.call():
            before = self._redis.set(
                keys.idempotency(key), f"{job_id} {body_digest}", nx=True, get=True, ex=IDEMPOTENCY_S
            )
        if before is None:
            return job_id
        earlier_id, earlier_digest = before.decode().split()
        if earlier_digest != body_digest:
            raise Conflict(f"was used for job {earlier_id} with another spec", field="Idempotency-Key")
        return earlier_id

    def remove(self, job_id: str, *, seen_ended_s: str | None = None) -> None:
        """Removes all keys of an ended job, and notes that its files are to be removed.

        The call returns only after the write is on disk, where the server can tell.

        Args:
            job_id: The job.
            seen_ended_s: `ended_s` as its caller has read it in the job hash, for a removal by age: a job that was
                resumed since stays. None removes the job whenever it ended.

        Raises:
            NotFound: Redis doesn't know the job.
            Conflict: The job has not ended, its trainer still holds it, or it ended at another time than was seen.
        """
        with self._broker.call():
            key = (self._redis.hget(OpenKeys(job_id).job, "idempotency_key") or b"").decode()
        outcome, *rest = self._broker.run(
            "remove_job",
            encode(Removal(at_s=time.time())),
            job=job_id,
            # Every slot that a job can have: what is left of a job without its spec goes too.
            num_slots=keys.MAX_SLOTS,
            idempotency_key=key,
            seen_ended_s=seen_ended_s,
        )
        if outcome == b"changed":
            raise Conflict("it was resumed since its end was read", field="state", cure="read it again")
        if outcome == b"held":
            left_s = rest[0] / 1000
            raise Conflict(f"its trainer holds it for {left_s:.1f} s more", field="state", cure="try again then")
        if outcome == b"refused":
            raise Conflict(f"a {rest[0].decode()} job cannot be removed", field="state", cure="cancel it first")
        self._broker.durability.persisted()
        if outcome == b"unknown":
            raise unknown_job(job_id)

    def job_ids(self) -> list[str]:
        """Newest first."""
        with self._broker.call():
            return ids_among(self._redis.zrevrange(keys.JOBS, 0, -1))

    def active_jobs(self) -> list[str]:
        """Jobs that are not final, oldest first."""
        with self._broker.call():
            active = list(self._redis.smembers(keys.ACTIVE))
            created_s = self._redis.zmscore(keys.JOBS, active) if active else []
        in_order = sorted(zip((at_s or 0.0 for at_s in created_s), active, strict=True))
        return ids_among(job_id for _, job_id in in_order)

    def forks_of(self, job_id: str) -> dict[str, int]:
        """Jobs that have not ended and go on from a version of this one → that version; an unreadable spec has none."""
        forks: dict[str, int] = {}
        for active in self.active_jobs():
            with contextlib.suppress(NotFound, ContractViolation):
                fork = fork_of(self._spec_bytes(active))
                forks |= {active: fork.version} if fork is not UNSET and fork.job == job_id else {}
        return forks

    def spec(self, job_id: str) -> JobSpec:
        """Raises NotFound."""
        return decode(self._spec_bytes(job_id), JobSpec)

    def files(self, job_id: str) -> bytes | None:
        """Which objects the files of the run are, as its trainer has said last (`TrainerSide.record_files`)."""
        with self._broker.call():
            return self._redis.get(OpenKeys(job_id).files)

    def _spec_bytes(self, job_id: str) -> bytes:
        with self._broker.call():
            data = self._redis.get(OpenKeys(job_id).spec)
        if data is None:
            raise unknown_job(job_id)
        return data

    def state(self, job_id: str) -> JobState:
        """Raises NotFound, and ContractViolation for a state that there isn't."""
        with read_of(job_id):
            return JobState(self.fields(job_id)["state"].decode())

    def owner(self, job_id: str) -> str:
        """Returns the name of the key that submitted the job; "" where no gateway has taken it. Raises NotFound."""
        return self.fields(job_id).get("owner", b"").decode()

    def fields(self, job_id: str) -> dict[str, bytes]:
        """The job hash. Raises NotFound."""
        with self._broker.call():
            values: dict[bytes, bytes] = self._redis.hgetall(OpenKeys(job_id).job)
        # A count that came late brings a removed job's hash back, without a state.
        if b"state" not in values:
            raise unknown_job(job_id)
        return {name.decode(errors="replace"): value for name, value in values.items()}

    def move(
        self,
        job_id: str,
        state: JobState,
        *,
        reason: str = "",
        fault: Fault | None = None,
        trainer_epoch: int | None = None,
        after: JobState | None = None,
        by: str = "",
    ) -> bool:
        """Moves the job, tells its watchers; False if it is there already. Raises Conflict for an illegal move.

        A final state clears what is in work. trainer_epoch: of the trainer that moves it; raises FencedOff if that one
        is over (I4). Without one, a final state fences off a trainer that lives.

        fault: of a job that fails, the side on which the cause lies.

        after: the only state to move from; None stands for all that the lifecycle has. Back to `queued` goes only
        `resume`, which does more than to move. by: the name of the key that asked for it, for the job's events.
        """
        now_s = time.time()
        reason = reason[:MAX_REASON_CHARS]
        allowed = {
            old.value: True
            for old, nexts in NEXT_STATES.items()
            if state in nexts and state is not JobState.QUEUED and after in (None, old)
        }
        outcome, *current = self._broker.run(
            "set_state",
            encode(StateChanged(at_s=now_s, state=state, reason=reason, by=by or UNSET)),
            job=job_id,
            num_slots=self._num_slots(job_id),
            state=state.value,
            reason=reason,
            fault=fault.value if fault else "",
            at_s=now_s,
            epoch=trainer_epoch,
            allowed=allowed,
        )
        if outcome == b"fenced":
            raise FencedOff(f"epoch {trainer_epoch} is over: another trainer holds the job", field="trainer_epoch")
        if outcome == b"refused":
            if current == [b"unknown"]:
                raise unknown_job(job_id)
            raise Conflict(f"a {current[0].decode()} job cannot become {state.value}", field="state")
        return outcome == b"set"

    def fail(self, job_id: str, reason: str, *, fault: Fault = Fault.STACK, trainer_epoch: int | None = None) -> None:
        """Ends the job with its reason: as failed, or as cancelled where it was asked to end; an end that it has stays.

        Args:
            job_id: The job.
            reason: For people.
            fault: The side on which the cause lies, which decides who is told of it. A cause that isn't known is the
                stack's.
            trainer_epoch: Of `move`.
        """
        with contextlib.suppress(Conflict):
            self.move(job_id, JobState.FAILED, reason=reason, fault=fault, trainer_epoch=trainer_epoch)
            return
        with contextlib.suppress(Conflict):
            self.move(job_id, JobState.CANCELLED, reason=reason, trainer_epoch=trainer_epoch)

    def leave_active(self, job_id: str) -> None:
        """Takes a job that has ended off the active ones; one that was resumed meanwhile stays."""
        with self._broker.call():
            self._redis.srem(keys.ACTIVE, job_id)
            if not self.state(job_id).is_final:
                self._redis.sadd(keys.ACTIVE, job_id)

    def wait_for_changes(self, after: str, timeout_s: float) -> str:
        """Waits for jobs that came, are to end or have gone after an entry of the changes; "0" is before all of them.

        Returns the newest entry; the same one where nothing has changed.
        """
        with self._broker.call(blocks_s=timeout_s):
            rows: Any = self._redis.xread({keys.CHANGES: after}, block=max(1, int(timeout_s * 1000)))
        entries = rows[0][1] if rows else []
        return entries[-1][0].decode() if entries else after

    def resume(self, job_id: str, asked: ResumeRequest = NOTHING_NEW, *, by: str = "") -> tuple[str, ...]:
        """Queues an ended job again: a trainer goes on from its newest checkpoint; the open iteration is sampled anew.

        Safe to repeat. Answers only after the write is on disk.

        Args:
            job_id: A job that has ended.
            asked: What is to change of its spec.
            by: The name of the key that asked for it, for the job's events.

        Returns:
            A line for each value of the spec that changes, as `changes_in_words` has it.

        Raises:
            NotFound: There is no such job.
            Conflict: The job has not ended, or has nothing left to do.
            InvalidInput: Fewer iterations than were trained, or what `resumed_spec` refuses.
        """
        while True:
            changes, outcome, *rest = self._resume_as_seen(job_id, asked, by)
            if outcome != b"changed":
                break
        if outcome == b"refused":
            raise Conflict(f"a {rest[0].decode()} job cannot be resumed", field="state", cure="wait for its end")
        self._broker.durability.persisted()
        return changes

    def _resume_as_seen(self, job_id: str, asked: ResumeRequest, by: str) -> tuple[Any, ...]:
        """Returns the changes, and what `resume_job` answers."""
        state, (chain, _) = self.state(job_id), self.audit_outline(job_id)
        body = self._spec_bytes(job_id)
        before = decode(body, JobSpec)
        num_trained = 1 + max((record.iteration for record in chain if record.next_weights_digest), default=-1)
        after = resumed_spec(before, asked, num_trained=num_trained)
        if after.iterations < num_trained:
            raise InvalidInput(f"{num_trained} are trained already", field="iterations", cure="give as many or more")
        if state is JobState.SUCCEEDED and after.iterations <= before.iterations:
            raise Conflict(
                f"a succeeded job of {before.iterations} iterations has nothing left to do",
                field="state",
                cure="give more with --iterations",
            )
        horizons = b""
        if after.iterations != before.iterations:
            horizons = encode({0: before.iterations, **self.horizons(job_id), num_trained: after.iterations})
        changes = changes_in_words(before, after)
        event = encode(StateChanged(at_s=time.time(), state=JobState.QUEUED, by=by or UNSET, changes=changes or UNSET))
        answer = self._broker.run(
            "resume_job",
            body,
            encode(after) if after != before else body,
            horizons,
            event,
            job=job_id,
            num_slots=num_open_of(body),
            allowed=RESUMABLE,
            num_records=len(chain),
        )
        return changes, *answer

    def horizons(self, job_id: str) -> dict[int, int]:
        """First iteration → the `iterations` that its learning rate and the later ones' are scheduled by.

        Empty unless a resume changed them: what was trained before keeps its rate, also when it is replayed.
        """
        value = self.fields(job_id).get("horizons")
        return decode(value, dict[int, int]) if value else {}

    def request_cancel(self, job_id: str, *, by: str = "") -> JobState:
        """A queued job is cancelled at once, a running one when its trainer has saved; final states stay."""
        while not (state := self.state(job_id)).is_final and state is not JobState.CANCELLING:
            # From what it is now: of two requests at the same time, the second must not end what the first lets save.
            with contextlib.suppress(Conflict):
                end = JobState.CANCELLED if state is JobState.QUEUED else JobState.CANCELLING
                self.move(job_id, end, after=state, by=by)
        self._broker.durability.persisted()
        return state

    def count_trainer_start(self, job_id: str) -> int:
        """Starts since the last one that made progress, this one included. Raises NotFound."""
        num_starts = self._write_field(job_id, "HINCRBY", "trainer_starts", 1)
        if num_starts is None:
            raise unknown_job(job_id)
        return num_starts

    def uncount_trainer_start(self, job_id: str) -> None:
        """Takes back the start of a trainer that was asked to end: it says nothing about the job."""
        num_starts = self._write_field(job_id, "HINCRBY", "trainer_starts", -1)
        if num_starts is not None and num_starts < 0:
            self.reset_trainer_starts(job_id)

    def reset_trainer_starts(self, job_id: str) -> None:
        self._write_field(job_id, "HSET", "trainer_starts", 0)

    def _write_field(self, job_id: str, command: str, name: str, value: int | bytes) -> Any:
        """The answer of a command on a field of the job hash; None where the job was removed."""
        return self._broker.write(command, "job", name, value, job=job_id)

    def reserve_start(self, job_id: str, consumer_id: str, *, life_s: float) -> bool:
        """Whether this consumer may start the job's trainer: another one's may be loading, with no lease to show yet.

        Renews the reservation that it holds already. False for a job that was removed.
        """
        key = OpenKeys(job_id).starting
        if self._broker.write("SET", "starting", consumer_id, "NX", "PX", int(life_s * 1000), job=job_id):
            return True
        with self._broker.call():
            holds = self._redis.get(key) == consumer_id.encode()
            return holds and bool(self._redis.pexpire(key, int(life_s * 1000)))

    def release_start(self, job_id: str, consumer_id: str) -> None:
        """Another consumer's reservation stays."""
        key = OpenKeys(job_id).starting
        with self._broker.call():
            if self._redis.get(key) == consumer_id.encode():
                self._redis.delete(key)

    def record_evaluation(self, job_id: str, score: EvaluationScore) -> None:
        """Keeps the newest score; the first one stays as `evaluation_before`."""
        self._write_field(job_id, "HSETNX", "evaluation_before", encode(score))
        self._write_field(job_id, "HSET", "evaluation_latest", encode(score))

    def record_health(self, job_id: str, problems: tuple[HealthProblem, ...]) -> None:
        self._write_field(job_id, "HSET", "health", encode(problems))

    def tell(self, job_id: str, event: JobEvent) -> None:
        """Appends an event; a job that was removed gets none."""
        self._broker.write("XADD", "events", "MAXLEN", "~", 10_000, "*", "event", encode(event), job=job_id)

    def events_after(self, job_id: str, after: str, *, count: int = 100, kind: Any = JobEvent) -> list[tuple[str, Any]]:
        """(entry id, event as `kind` reads it) behind an entry, oldest first; "0-0" starts at the beginning."""
        with self._broker.call():
            rows = self._redis.xrange(OpenKeys(job_id).events, min=f"({after}", count=count)
        return [(entry.decode(), decode(fields[b"event"], kind)) for entry, fields in rows]

    def audit(self, job_id: str, *, last: int | None = None) -> list[AuditRecord]:
        """The whole chain, or its newest `last` records; oldest first."""
        with self._broker.call():
            rows = self._redis.xrevrange(OpenKeys(job_id).audit, count=last)
        return [decode(fields[b"record"], AuditRecord) for _, fields in reversed(rows)]

    def first_weights_digest(self, job_id: str) -> str:
        """Digest of version 0, the model as the job found it; "" before the audit chain begins."""
        with self._broker.call():
            rows = self._redis.xrange(OpenKeys(job_id).audit, count=1)
        records = [decode(fields[b"record"], AuditRecord) for _, fields in rows]
        return records[0].weights_digest if records and records[0].policy_version == 0 else ""

    def audit_outline(
        self, job_id: str, *, seen: Callable[[AuditRecord, str], None] = lambda record, digest: None
    ) -> tuple[list[AuditRecord], str]:
        """(the whole chain without its batches, digest of its newest record or ""): what a trainer starts by.

        seen: is given each, whole, with its digest. Some are read at a time: a large one is nearly a megabyte.
        """
        outline: list[AuditRecord] = []
        last_entry, link = "-", ""
        while True:
            with self._broker.call():
                rows = self._redis.xrange(OpenKeys(job_id).audit, min=last_entry, count=RECORDS_AT_ONCE)
            for entry, fields in rows:
                record = decode(fields[b"record"], AuditRecord)
                last_entry, link = f"({entry.decode()}", fields[b"digest"].decode()
                seen(record, link)
                outline.append(msgspec.structs.replace(record, batches={}))
            if len(rows) < RECORDS_AT_ONCE:
                return outline, link


def health_of(fields: Mapping[str, bytes], name: str = "health") -> tuple[HealthProblem, ...]:
    """What the job hash says of it; under `health_at_resume`, as it stood at the last resume."""
    return decode(fields[name], tuple[HealthProblem, ...]) if fields.get(name) else ()


def unknown_job(job_id: str) -> NotFound:
    return NotFound(f"there is no job {job_id}", field="job_id", cure="`onbeat jobs` lists them")
