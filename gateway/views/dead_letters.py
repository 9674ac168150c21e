"""The dead batches of a job: why each was given up, what it was, and whether a retry makes sense.

A retry is a resume of the job: the open iteration is sampled anew from its first batch, the dead one among them. A
batch whose iteration was committed without it is trained by no version any more, so it can't come back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from broker.connection.client import Broker
from broker.fence import FenceState, read_fence
from broker.job_store import JobStore
from broker.keys import JobKeys
from broker.ledger import Dead, batch_record
from contracts.dead_letters import DeadLetter, DeadPrompt
from contracts.encoding.wire import decode
from contracts.errors import Conflict, ContractViolation, NotFound
from contracts.jobs import JobState
from contracts.rollouts import PromptBatch, RolloutBatch
from contracts.spec.job import JobSpec

ENTRY_ID = re.compile(r"\d{1,19}-\d{1,19}", re.ASCII)
"""Every time and count that a server of our days can give, and nothing that it refuses to look for."""


BATCH = re.compile(rb"\d{1,9}/(train|evaluation)/\d{1,9}")
ATTEMPTS = re.compile(rb"\d{1,9}")


class DeadLetterBox:
    """The letters of one job."""

    def __init__(self, broker: Broker, job_id: str) -> None:
        self._broker = broker
        self._redis: Any = broker.redis
        self._jobs = JobStore(broker)
        self._job_id = job_id
        self._keys = broker.job_keys(job_id)

    def newest(self, limit: int) -> tuple[DeadLetter, ...]:
        """Returns the newest letters, newest first. Raises NotFound."""
        with self._broker.call():
            rows = self._redis.xrevrange(self._keys.dead, count=limit)
        return self._letters([row for row in rows if is_letter(row[1])])

    def letter(self, entry_id: str) -> DeadLetter:
        """Raises NotFound."""
        rows = []
        if ENTRY_ID.fullmatch(entry_id):
            with self._broker.call():
                rows = self._redis.xrange(self._keys.dead, min=entry_id, max=entry_id)
        if not rows or not is_letter(rows[0][1]):
            raise NotFound(
                f"{self._job_id} has no dead batch {entry_id[:80]!a}",
                field="entry_id",
                cure=f"`onbeat watch {self._job_id}` lists them",
            )
        return self._letters(rows)[0]

    def retry(self, entry_id: str) -> None:
        """Queues the job again, which samples the batch anew. Safe to repeat while the job is queued.

        Raises NotFound, and Conflict with the reason where that would not bring the batch back.
        """
        letter = self.letter(entry_id)
        if not letter.can_retry and not self._is_queued_again(letter):
            raise Conflict(f"batch {letter.batch_id} can't be tried again: {letter.why_not}", field="entry_id")
        self._jobs.resume(self._job_id)

    def _is_queued_again(self, letter: DeadLetter) -> bool:
        is_queued = self._jobs.state(self._job_id) is JobState.QUEUED
        return is_queued and letter.iteration > read_fence(self._broker, self._keys).committed

    def _letters(self, rows: list[tuple[bytes, dict[bytes, bytes]]]) -> tuple[DeadLetter, ...]:
        spec = self._jobs.spec(self._job_id)
        state = self._jobs.state(self._job_id)
        keys = self._broker.job_keys(self._job_id, spec.num_open)
        fence = read_fence(self._broker, keys)
        buried = self._contents_of(rows)
        is_dead = self._are_dead_now(keys, fence, [fields[b"batch_id"] for _, fields in rows])
        letters = []
        for entry, fields in rows:
            batch_id = fields[b"batch_id"].decode()
            iteration = int(batch_id.partition("/")[0])
            why_not = _why_not(spec, state, fence, iteration=iteration, is_dead=batch_id in is_dead)
            letters.append(
                DeadLetter(
                    entry_id=entry.decode(),
                    at_s=int(entry.partition(b"-")[0]) / 1000,
                    batch_id=batch_id,
                    iteration=iteration,
                    reason=fields.get(b"reason", b"").decode(errors="replace"),
                    attempts=int(fields.get(b"attempts", 0)),
                    prompts=_prompts(buried.get(entry, {})),
                    can_retry=not why_not,
                    why_not=why_not,
                )
            )
        return tuple(letters)

    def _contents_of(self, rows: list[tuple[bytes, dict[bytes, bytes]]]) -> dict[bytes, dict[bytes, bytes]]:
        """Returns the fields of each entry's batch, where Redis still has them."""
        if not rows:
            return {}
        first = min((rows[0][0], rows[-1][0]), key=_order)
        last = max((rows[0][0], rows[-1][0]), key=_order)
        with self._broker.call():
            return dict(self._redis.xrange(self._keys.buried, min=first, max=last))

    def _are_dead_now(self, keys: JobKeys, fence: FenceState, batch_ids: list[bytes]) -> set[str]:
        """Returns the ids of the batches that are dead in an iteration that is open."""
        dead: set[str] = set()
        for opened in fence.window:
            number = str(opened.iteration).encode()
            ids_of_iteration = [batch_id for batch_id in batch_ids if batch_id.partition(b"/")[0] == number]
            if not ids_of_iteration:
                continue
            with self._broker.call():
                values = self._redis.hmget(keys.slot_of(opened.iteration).ledger, ids_of_iteration)
            for batch_id, value in zip(ids_of_iteration, values, strict=True):
                if value is not None and isinstance(batch_record(value), Dead):
                    dead.add(batch_id.decode())
        return dead


def is_letter(fields: Mapping[bytes, bytes]) -> bool:
    """Returns True for an entry that a script wrote: any generator, and any stage worker, may write into the stream."""
    has_batch = BATCH.fullmatch(fields.get(b"batch_id", b"")) is not None
    return has_batch and ATTEMPTS.fullmatch(fields.get(b"attempts", b"0")) is not None


def _why_not(spec: JobSpec, state: JobState, fence: FenceState, *, iteration: int, is_dead: bool) -> str:
    """Returns why a retry would not bring the batch back; "" where it would."""
    if iteration <= fence.committed:
        return f"iteration {iteration} is committed without it"
    if state.is_final and state is not JobState.SUCCEEDED:
        return ""
    if not is_dead:
        return f"the job is {state.value}, and samples it anew"
    if spec.rollout.on_failed_batch == "abandon":
        return f"iteration {iteration} is open, and goes on without it"
    return "the job is about to fail with it: try again then"


def _prompts(fields: dict[bytes, bytes]) -> tuple[DeadPrompt, ...]:
    """Returns the prompts of the batch as a person reads them; () where they are gone, or another Onbeat wrote them."""
    try:
        if b"prompts" in fields:
            batch = decode(fields[b"prompts"], PromptBatch)
            return tuple(DeadPrompt(prompt_id=prompt.prompt_id, text=prompt.text) for prompt in batch.prompts)
        if b"rollouts" in fields:
            groups = decode(fields[b"rollouts"], RolloutBatch).groups
            return tuple(DeadPrompt(prompt_id=group.prompt_id, text=group.prompt_text or "") for group in groups)
    except ContractViolation:
        return ()
    return ()


def _order(entry: bytes) -> tuple[int, int]:
    first, _, second = entry.partition(b"-")
    return int(first), int(second)
