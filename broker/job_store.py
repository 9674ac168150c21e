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
from contracts.errors import (
    Conflict,
    ContractViolation,
    Fault,
    FencedOff,
    InvalidInput,
    NotFound,
    without_numbers,
)
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
"""Things of which there may be too many → the setting of their bound, and its limit's name."""
NO_LIMITS: dict[str, int | None] = {limit: None for _, limit in FULL.values()}
NOTHING_NEW = ResumeRequest()
RESUMABLE = {state.value: True for state, nexts in NEXT_STATES.items() if JobState.QUEUED in nexts}


class JobStore:
    """Every job of the stack.

    Each process creates its own: the gateway creates, cancels and removes jobs through it, consumers and trainers move
    them, and workers read their specs.
    """

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
        reservation = idempotency_key
        if owner and idempotency_key:
            reservation = f"{owner} {idempotency_key}"
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
        """Returns the outcome: created, already, or removed where the id is that of a job that was removed meanwhile.

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
            what = rest[0].decode()
            there = rest[1]  # how many there are without this one
            setting, limit_name = FULL[what]
            limit = limits[limit_name]
            problem = f"{there} {what} are kept, and {setting} allows {limit}, with those of the new one"
            raise Conflict(problem, field="jobs", cure="delete ended ones with `onbeat delete JOB`")
        return outcome

    def _num_slots(self, job_id: str) -> int:
        """Returns how many slots the window of a job has that is to be cleared; a job without a spec has no window."""
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
            raise Conflict(
                f"was used for job {earlier_id} with another spec", field="Idempotency-Key", cure="use another key"
            )
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
            raise Conflict("the job was resumed after its end was read", field="state", cure="read it again")
        if outcome == b"held":
            left_s = rest[0] / 1000
            raise Conflict(
                f"the job's trainer still holds it for {left_s:.1f} s more", field="state", cure="try again then"
            )
        if outcome == b"refused":
            raise Conflict(f"a {rest[0].decode()} job cannot be removed", field="state", cure="cancel it first")
        self._broker.durability.persisted()
        if outcome == b"unknown":
            raise unknown_job(job_id)

    def job_ids(self) -> list[str]:
        """Returns the ids of all jobs, newest first."""
        with self._broker.call():
            return ids_among(self._redis.zrevrange(keys.JOBS, 0, -1))

    def active_jobs(self) -> list[str]:
        """Returns the jobs that are not final, oldest first."""
        with self._broker.call():
            active = list(self._redis.smembers(keys.ACTIVE))
            if not active:  # ZMSCORE takes one member or more
                return []
            created_s = self._redis.zmscore(keys.JOBS, active)
        in_order = sorted(zip((at_s or 0.0 for at_s in created_s), active, strict=True))
        return ids_among(job_id for _, job_id in in_order)

    def forks_of(self, job_id: str) -> dict[str, int]:
        """Returns the jobs that have not ended and go on from a version of this one → that version.

        A job whose spec can't be read is none of them.
        """
        forks: dict[str, int] = {}
        for active in self.active_jobs():
            with contextlib.suppress(NotFound, ContractViolation):
                fork = fork_of(self._spec_bytes(active))
                if fork is not UNSET and fork.job == job_id:
                    forks[active] = fork.version
        return forks

    def spec(self, job_id: str) -> JobSpec:
        """Reads the job's spec. Raises NotFound."""
        return decode(self._spec_bytes(job_id), JobSpec)

    def files(self, job_id: str) -> bytes | None:
        """Returns the list of the objects that the run folder is, as `TrainerSide.record_files` wrote it last."""
        with self._broker.call():
            return self._redis.get(OpenKeys(job_id).files)

    def _spec_bytes(self, job_id: str) -> bytes:
        with self._broker.call():
            data = self._redis.get(OpenKeys(job_id).spec)
        if data is None:
            raise unknown_job(job_id)
        return data

    def state(self, job_id: str) -> JobState:
        """Returns the job's state. Raises NotFound, and ContractViolation for a state that there isn't."""
        with read_of(job_id):
            return JobState(self.fields(job_id)["state"].decode())

    def owner(self, job_id: str) -> str:
        """Returns the name of the key that submitted the job; "" where no gateway has taken it. Raises NotFound."""
        return self.fields(job_id).get("owner", b"").decode()

    def fields(self, job_id: str) -> dict[str, bytes]:
        """Returns the job hash. Raises NotFound."""
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
        """Moves the job and tells its watchers. A final state clears what is in work.

        Back to `queued` goes only `resume`, which does more than to move.

        Args:
            job_id: The job.
            state: The state to move to.
            reason: Why, for people.
            fault: Of a job that fails, the side on which the cause lies.
            trainer_epoch: Of the trainer that moves it. Without one, a final state fences off a trainer that lives.
            after: The only state to move from; None stands for all that the lifecycle has.
            by: The name of the key that asked for it, for the job's events.

        Returns:
            False if the job is in that state already.

        Raises:
            Conflict: The lifecycle has no such move.
            FencedOff: The trainer's epoch is over (I4).
            NotFound: There is no such job.
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

    def resume(self, job_id: str, request: ResumeRequest = NOTHING_NEW, *, by: str = "") -> tuple[str, ...]:
        """Queues an ended job again: a trainer goes on from its newest checkpoint; the open iteration is sampled anew.

        Safe to repeat. Answers only after the write is on disk.

        Args:
            job_id: A job that has ended.
            request: What is to change of its spec.
            by: The name of the key that asked for it, for the job's events.

        Returns:
            A line for each value of the spec that changes, as `changes_in_words` has it.

        Raises:
            NotFound: There is no such job.
            Conflict: The job has not ended, or has nothing left to do.
            InvalidInput: Fewer iterations than were trained, or what `resumed_spec` refuses.
        """
        while True:
            changes, outcome, *rest = self._resume_as_seen(job_id, request, by)
            if outcome != b"changed":
                break
        if outcome == b"refused":
            raise Conflict(f"a {rest[0].decode()} job cannot be resumed", field="state", cure="wait for its end")
        self._broker.durability.persisted()
        return changes

    def _resume_as_seen(self, job_id: str, request: ResumeRequest, by: str) -> tuple[Any, ...]:
        """Resumes the job as it is read now, unless it changes meanwhile.

        Returns:
            (the changes in words, the answer of `resume_job`: its outcome, and what follows it).
        """
        state = self.state(job_id)
        chain, _ = self.audit_outline(job_id)
        body = self._spec_bytes(job_id)
        before = decode(body, JobSpec)
        num_trained = 1 + max((record.iteration for record in chain if record.next_weights_digest), default=-1)
        after = resumed_spec(before, request, num_trained=num_trained)
        if after.iterations < num_trained:
            raise InvalidInput(f"{num_trained} are trained already", field="iterations", cure="give as many or more")
        if state is JobState.SUCCEEDED and chain and chain[-1].stopped is not UNSET:
            raise Conflict(
                f"the job has ended early, as its spec says: {chain[-1].stopped}",
                field="state",
                cure="fork it with another evaluation.stop_when (onbeat resume JOB --set KEY=VALUE)",
            )
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
        """Returns first iteration → the `iterations` that its learning rate and the later ones' are scheduled by.

        It is empty unless a resume changed them: what was trained before keeps its rate, also when it is replayed.
        """
        value = self.fields(job_id).get("horizons")
        return decode(value, dict[int, int]) if value else {}

    def request_cancel(self, job_id: str, *, by: str = "") -> JobState:
        """Cancels a queued job at once, a running one when its trainer has saved; final states stay.

        Returns the state in which the job then is.
        """
        state = self.state(job_id)
        while not state.is_final and state is not JobState.CANCELLING:
            # From what it is now: of two requests at the same time, the second must not end what the first lets save.
            end = JobState.CANCELLED if state is JobState.QUEUED else JobState.CANCELLING
            with contextlib.suppress(Conflict):
                self.move(job_id, end, after=state, by=by)
            state = self.state(job_id)
        self._broker.durability.persisted()
        return state

    def count_trainer_start(self, job_id: str) -> int:
        """Counts a start of the job's trainer. Raises NotFound.

        Returns the number of starts since the last one that made progress, this one included.
        """
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
        """Begins to count anew: a trainer has made progress, and what ended one before it has lost its meaning."""
        self._broker.write("HSET", "job", "trainer_starts", 0, "trainer_fault", "", job=job_id)

    def note_trainer_fault(self, job_id: str, fault: str) -> bool:
        """Keeps the line of foreign code by which a trainer of the job ended.

        Returns True where the one before it, since the last progress, ended by the same words: numbers and addresses
        don't count. Raises NotFound.
        """
        before = self.fields(job_id).get("trainer_fault", b"").decode(errors="replace")
        self._write_field(job_id, "HSET", "trainer_fault", fault[:MAX_REASON_CHARS])
        return bool(before) and without_numbers(before) == without_numbers(fault[:MAX_REASON_CHARS])

    def _write_field(self, job_id: str, command: str, name: str, value: str | int | bytes) -> Any:
        """Runs a command on a field of the job hash, and returns its answer; None where the job was removed."""
        return self._broker.write(command, "job", name, value, job=job_id)

    def reserve_start(self, job_id: str, consumer_id: str, *, life_s: float) -> bool:
        """Reserves the start of the job's trainer, or renews the reservation that this consumer holds.

        A trainer that loads has no lease to show yet: without the reservation another consumer would start a second.

        Args:
            job_id: The job.
            consumer_id: The consumer.
            life_s: Seconds after which the reservation ends.

        Returns:
            True where the consumer may start the trainer; False where another one may, or the job was removed.
        """
        key = OpenKeys(job_id).starting
        if self._broker.write("SET", "starting", consumer_id, "NX", "PX", int(life_s * 1000), job=job_id):
            return True
        with self._broker.call():
            holds = self._redis.get(key) == consumer_id.encode()
            return holds and bool(self._redis.pexpire(key, int(life_s * 1000)))

    def release_start(self, job_id: str, consumer_id: str) -> None:
        """Gives this consumer's reservation back; another one's stays."""
        key = OpenKeys(job_id).starting
        with self._broker.call():
            if self._redis.get(key) == consumer_id.encode():
                self._redis.delete(key)

    def record_evaluation(self, job_id: str, score: EvaluationScore) -> None:
        """Keeps the newest score; the first one stays as `evaluation_before`."""
        self._write_field(job_id, "HSETNX", "evaluation_before", encode(score))
        self._write_field(job_id, "HSET", "evaluation_latest", encode(score))

    def record_health(
        self, job_id: str, problems: tuple[HealthProblem, ...], past: tuple[HealthProblem, ...] = ()
    ) -> None:
        """Keeps what is wrong with a job's numbers. past: what was, of each rule the newest."""
        self._write_field(job_id, "HSET", "health", encode(problems))
        self._write_field(job_id, "HSET", "health_past", encode(past))

    def tell(self, job_id: str, event: JobEvent) -> None:
        """Appends an event; a job that was removed gets none."""
        self._broker.write("XADD", "events", "MAXLEN", "~", 10_000, "*", "event", encode(event), job=job_id)

    def events_after(self, job_id: str, after: str, *, count: int = 100, kind: Any = JobEvent) -> list[tuple[str, Any]]:
        """Returns (entry id, event as `kind` reads it) behind an entry, oldest first; "0-0" starts at the beginning."""
        with self._broker.call():
            rows = self._redis.xrange(OpenKeys(job_id).events, min=f"({after}", count=count)
        return [(entry.decode(), decode(fields[b"event"], kind)) for entry, fields in rows]

    def audit(self, job_id: str, *, last: int | None = None) -> list[AuditRecord]:
        """Returns the whole audit chain, or its newest `last` records; oldest first."""
        with self._broker.call():
            rows = self._redis.xrevrange(OpenKeys(job_id).audit, count=last)
        return [decode(fields[b"record"], AuditRecord) for _, fields in reversed(rows)]

    def first_weights_digest(self, job_id: str) -> str:
        """Returns the digest of version 0, the model that the job begins with; "" before the audit chain begins."""
        with self._broker.call():
            rows = self._redis.xrange(OpenKeys(job_id).audit, count=1)
        if not rows:
            return ""
        _, fields = rows[0]
        first = decode(fields[b"record"], AuditRecord)
        return first.weights_digest if first.policy_version == 0 else ""

    def audit_outline(
        self, job_id: str, *, seen: Callable[[AuditRecord, str], None] = lambda record, digest: None
    ) -> tuple[list[AuditRecord], str]:
        """Reads the audit chain without its batches; a trainer starts by it.

        RECORDS_AT_ONCE are read at a time: a large record is nearly a megabyte.

        Args:
            job_id: The job.
            seen: Gets each record, whole, with its digest.

        Returns:
            (the records, oldest first; the digest of the newest one, or "").
        """
        outline: list[AuditRecord] = []
        first_entry = "-"  # the beginning of the stream
        link = ""
        while True:
            with self._broker.call():
                rows = self._redis.xrange(OpenKeys(job_id).audit, min=first_entry, count=RECORDS_AT_ONCE)
            for entry, fields in rows:
                record = decode(fields[b"record"], AuditRecord)
                first_entry = f"({entry.decode()}"  # "(": behind this entry
                link = fields[b"digest"].decode()
                seen(record, link)
                outline.append(msgspec.structs.replace(record, batches={}))
            if len(rows) < RECORDS_AT_ONCE:
                return outline, link


def health_of(fields: Mapping[str, bytes], name: str = "health") -> tuple[HealthProblem, ...]:
    """Returns the problems that the job hash names.

    Args:
        fields: The job hash.
        name: Its field: `health`; `health_past`, what is gone; or `health_at_resume`, as it stood at the last resume.
    """
    if not fields.get(name):
        return ()
    return decode(fields[name], tuple[HealthProblem, ...])


def unknown_job(job_id: str) -> NotFound:
    return NotFound(f"there is no job {job_id}", field="job_id", cure="`onbeat jobs` lists them")
