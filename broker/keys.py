"""Every key of the project. Those of one job share a hash tag; the functions that begin or end a job touch others too.

S is the seal (connection/roles.py): what generators and stage workers write has names that they don't know.

`job` is a lifetime that ends when an ended job is removed (`remove_job`). Of the six keys of an iteration there is one
set for each slot: those of slot 0 are named as below, and those of slot i have `:i` behind it.

| key | type | writer | reader | lifetime |
| --- | --- | --- | --- | --- |
| onbeat:{J}:spec | string, JobSpec | job store | all | job |
| onbeat:{J}:job | hash | job store | gateway, trainer | job |
| onbeat:{J}:fence | hash | trainer scripts, resume | all scripts | job |
| onbeat:S:{J}:prompts | hash, batch id → PromptBatch | trainer scripts | claim | until published or dead |
| onbeat:S:{J}:rollouts | stream, group `trainers` | publish, put_rows | claim_rollouts | entry: until its commit |
| onbeat:S:{J}:ledger | hash, batch id → BatchRecord | open, claim, publish, fail | all scripts | iteration |
| onbeat:S:{J}:claims | sorted set, batch id → its claim in ms | claim, publish, fail | claim, to hedge | iteration |
| onbeat:S:{J}:work | sorted set, batch or item of a stage → its lease's end | all scripts | both claims | iteration |
| onbeat:S:{J}:items | hash, by item its claim and columns; batches | all scripts | both claims, trainer | iteration |
| onbeat:{J}:weights | hash, version → WeightManifest | trainer | generators | newest versions |
| onbeat:{J}:probes | hash, version → FenceProbe | trainer | claim, prove, publish | newest versions |
| onbeat:S:{J}:proofs | hash, VERSION/GENERATOR → weights digest | prove | claim, publish | newest versions |
| onbeat:{J}:chunks | hash, VERSION/FILE/N → bytes | trainer | generators | newest versions, hours |
| onbeat:{J}:shards | stream, WeightShard | trainer | generators | newest 100 |
| onbeat:S:{J}:counters | hash | scripts | status | job |
| onbeat:S:{J}:dead | stream | fail, claim | status | newest 1,000 |
| onbeat:S:{J}:buried | stream, what dead batches were, by their entries of `dead` | fail, claim | status | newest 64 |
| onbeat:{J}:audit | stream, AuditRecord | commit, rewind, restore | verify | job |
| onbeat:{J}:events | stream, JobEvent | trainer, job store | gateway | newest 10,000 |
| onbeat:S:{J}:progress | hash | open, claim, publish, fail | all scripts | job |
| onbeat:S:{J}:claimers | hash, who claims → its newest claim | both claims | both claims | window, at most 4,096 |
| onbeat:S:{J}:waiting | sorted set, STAGE/WHO → its claim in vain | all scripts | all scripts | 4,096 until its end |
| onbeat:S:{J}:missing | sorted set, claim → its lease's end | publish, rewind, resume, end; renew | status | job |
| onbeat:S:{J}:hosts | string, HostGroup | consumers | consumers, acquire_trainer | job |
| onbeat:S:{J}:spans | stream, TimelineSpans | generators, stage workers | trainer | newest 256, until the next commit |
| onbeat:{J}:files | string, which objects the run folder is | trainer | gateway, trainer | job |
| onbeat:{J}:starting | string, consumer id | consumers | consumers | seconds: until the trainer holds its lease |
| onbeat:jobs | sorted set, job id → creation time | job store | gateway | until a job is removed |
| onbeat:spec_bytes | string, encoded bytes of all specs | job store | job store | for ever |
| onbeat:removed | hash, job id → Removal | job store | tasks | until the job's files are gone |
| onbeat:active | set of job ids | job store | generators | while not final |
| onbeat:changes | stream, an entry when a job came, is to end, or has gone | job store | consumers | newest 100 |
| onbeat:owners | hash, jobs of each key, bytes of their specs | job store | job store | for ever |
| onbeat:idempotency:K | string, job id and digest of the spec; K: owner and client's key | gateway | gateway | 24 h |
| onbeat:persisted | string | job store, trainer | WAITAOF | for ever |
| onbeat:role:R | never there | none | `acl_check_cmd` of the scripts: a user that may read it has role R | never |
| onbeat:S:generators | hash, generator id → ms, GeneratorSeen | generators | status | heartbeat |
| onbeat:S:stage_workers | hash, worker id → ms, StageWorkerSeen | stage workers | trainer, status | heartbeat |
| onbeat:S:consumers | hash, consumer id → ms, ConsumerSeen | consumers | status | heartbeat |
| onbeat:S:task_workers | hash, worker id → ms, TaskWorkerSeen | workers of tasks | status | heartbeat |
| onbeat:task:ID | hash, one task | gateway, workers of tasks | the same | newest 1,000 |
| onbeat:tasks | sorted set, task id → creation in ms | create_task | gateway | as the tasks |
| onbeat:open_tasks | sorted set, task id → when it is looked at next | task scripts | task scripts | until its end |
| onbeat:task_names | hash, what is asked and by whom → task id | task scripts | create_task | until the task's end |
| onbeat:task_counts | hash, how many tasks have ended, and how | task scripts | metrics | for ever |
| onbeat:clock | hash, its holder, its entries, when each ran | hold_clock, task scripts | status | for ever |
| onbeat:celery:Q | list, Celery's messages of queue Q | send_message | Celery's workers | 1,000 messages, seconds |

What stands in the ledger for a batch is `BatchRecord` of ledger.py. Two channels, which keep nothing, call who waits to
look: onbeat:wake:W worker W, and onbeat:{J}:shards those who wait for that stream.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from contracts.encoding.names import check_job_id
from contracts.encoding.wire import UNREADABLE
from contracts.schedule import MAX_POLICY_LAG

JOBS = "onbeat:jobs"
ACTIVE = "onbeat:active"
REMOVED = "onbeat:removed"
SPEC_BYTES = "onbeat:spec_bytes"
OWNERS = "onbeat:owners"
CHANGES = "onbeat:changes"
GENERATORS = "generators"
STAGE_WORKERS = "stage_workers"
CONSUMERS = "consumers"
TASK_WORKERS = "task_workers"
"""The names of the boards of presence, which `sealed_name` makes keys of."""
TASKS = "onbeat:tasks"
OPEN_TASKS = "onbeat:open_tasks"
TASK_COUNTS = "onbeat:task_counts"
CLOCK = "onbeat:clock"
TRAINER_GROUP = "trainers"
STAGE_BAND = 2**42
"""As in scripts/prelude.lua: the scores of stage i in `work` start at i times it. Stage 0 makes a batch's rollouts."""
MAX_SLOTS = MAX_POLICY_LAG + 1
"""Most iterations that any job can have open at once."""


def idempotency(key: str) -> str:
    return f"onbeat:idempotency:{key}"


def task(task_id: str) -> str:
    """Returns the key of a task's record."""
    return f"onbeat:task:{task_id}"


def celery_queue(queue: str) -> str:
    """Returns the key of a list of Celery's messages; of "" the prefix of them all."""
    return f"onbeat:celery:{queue}"


def wake_channel(worker_id: str) -> str:
    """Returns the channel that a worker listens to whose claim found nothing."""
    return f"onbeat:wake:{worker_id}"


def chunk_field(policy_version: int, name: str, number: int) -> str:
    """Returns the field of a chunk in the hash `JobKeys.chunks`."""
    return f"{policy_version}/{name}/{number}"


class ItemFields(NamedTuple):
    """The fields of an item in the hash `items`, and its member in the sorted set `work`."""

    member: str
    """Its name in `work`: STAGE/BATCH_ID/ITEM."""
    claim: str
    """Its LastClaim."""
    columns: str
    """Its packed values, from their put on."""


def item_fields(stage: int, batch_id: str, item: int) -> ItemFields:
    """Returns the fields of an item. stage: 0 for the batch itself, as its generator claims it; a job's own are counted
    from 1."""
    member = f"{stage}/{batch_id}/{item}"
    return ItemFields(member=member, claim=f"l/{member}", columns=f"c/{member}")


def batch_field(batch_id: str) -> str:
    """Returns the field of a batch itself in the hash `items`."""
    return f"b/{batch_id}"


def batch_shape(num_prompts: int, group_size: int) -> str:
    """Returns the shape that the ledger holds of an expected batch, and that a published one must have (I1)."""
    return f"{num_prompts}x{group_size}"


class _Lag(msgspec.Struct):
    max_policy_lag: int = 0


_lag = msgspec.msgpack.Decoder(_Lag)


def num_open_of(spec: bytes) -> int:
    """Returns how many iterations of a job may be open at once, from its stored spec.

    It reads one field of it, whatever else stands there: a job whose spec this Onbeat can't read has to end, too.
    """
    try:
        lag = _lag.decode(spec).max_policy_lag
    except UNREADABLE:
        lag = 0
    return 1 + min(max(0, lag), MAX_SLOTS - 1)


class SlotKeys(NamedTuple):
    """The six keys of a slot, in which one open iteration lives."""

    prompts: str
    rollouts: str
    ledger: str
    claims: str
    work: str
    items: str


class OpenKeys:
    """The keys of one job that every role may read.

    Raises NotFound for what is no job's id: the keys would be another job's.
    """

    def __init__(self, job_id: str) -> None:
        tag = f"onbeat:{{{check_job_id(job_id)}}}"
        self.fence = f"{tag}:fence"
        self.weights = f"{tag}:weights"
        self.probes = f"{tag}:probes"
        self.audit = f"{tag}:audit"
        self.job = f"{tag}:job"
        self.events = f"{tag}:events"
        self.spec = f"{tag}:spec"
        self.chunks = f"{tag}:chunks"
        self.shards = f"{tag}:shards"
        self.starting = f"{tag}:starting"
        self.files = f"{tag}:files"


class JobKeys(OpenKeys):
    """All keys of one job, those with sealed names too, as `Broker.job_keys` gives them.

    num_open: iterations that may be open at once; the spec says it, and who names other slots looks elsewhere.
    """

    def __init__(self, job_id: str, num_open: int = 1, *, seal: str) -> None:
        super().__init__(job_id)
        tag = f"{sealed_name('', seal)}{{{job_id}}}"
        self.counters = f"{tag}:counters"
        self.dead = f"{tag}:dead"
        self.progress = f"{tag}:progress"
        self.buried = f"{tag}:buried"
        self.spans = f"{tag}:spans"
        self.claimers = f"{tag}:claimers"
        self.waiting = f"{tag}:waiting"
        self.missing = f"{tag}:missing"
        self.hosts = f"{tag}:hosts"
        self.proofs = f"{tag}:proofs"
        # The keys of slot 0 have no number behind them.
        ends = ["", *(f":{index}" for index in range(1, num_open))]
        self.slots = tuple(SlotKeys(*(f"{tag}:{name}{end}" for name in SlotKeys._fields)) for end in ends)

    def slot_of(self, iteration: int) -> SlotKeys:
        """Returns the keys of the slot in which the iteration lives while it is open."""
        return self.slots[iteration % len(self.slots)]


def sealed_name(name: str, seal: str) -> str:
    """Returns the key that generators and stage workers write, through functions alone (connection/roles.py)."""
    return f"onbeat:{seal}:{name}"
