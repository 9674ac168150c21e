"""What is sampled again, as a run folder says it, and what comes of it."""

from __future__ import annotations

from contracts.encoding.wire import Record
from contracts.errors import Conflict, ContractViolation, NotFound
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.spec.rollout import HELD_OUT
from onbeat.audit.folder import read_spec
from onbeat.recording.files import RecordedFiles, why_not_again
from onbeat.recording.records import RecordedBatch


class Replay(Record, frozen=True, kw_only=True):
    """How a batch was sampled again; `onbeat replay --json` prints it."""

    job_id: str
    batch_id: str
    recorded_digest: str
    digest: str = ""
    """That of what was sampled now; "" where it wasn't."""
    reason: str = ""
    """Where the digests differ: the first difference in words. Where it wasn't sampled: why."""
    equal: bool | None = None
    """Whether the two digests are the same; null where it wasn't sampled."""


def read_from(folder: RunFolder, batch_id: str) -> tuple[JobSpec, RecordedBatch]:
    """Raises NotFound for a job or batch that isn't there, InvalidInput for a damaged spec, ContractViolation for a
    file that isn't its own, Conflict for a batch that can't be sampled again."""
    files, spec = RecordedFiles(folder), read_spec(folder)
    record = files.read(batch_id)
    try:
        why_not = files.index(record.batch.iteration).why_not_listed(record)
    except (NotFound, ContractViolation) as error:
        why_not = str(error)
    if why_not := why_not or why_not_again(record, spec, folder.weight_root):
        raise Conflict(f"it can't be sampled again: {why_not}", field="batch_id")
    if not _is_of(record, spec):
        raise ContractViolation("its record is of another spec than the job's", field=f"batch {batch_id}")
    return spec, record


def _is_of(record: RecordedBatch, spec: JobSpec) -> bool:
    """Whether a record asks for what the job's spec lets a batch ask for: nothing larger is put into the engine."""
    asked, rollout, is_training = record.asked, spec.rollout, record.batch.purpose == "train"
    most_prompts, group_size = rollout.prompts_per_batch, rollout.group_size
    if not is_training:
        held_out = spec.evaluation.each.get(asked.prompts[0].source or HELD_OUT, spec.evaluation)
        most_prompts = held_out.prompts_per_batch
        group_size = 1 if asked.sampling.temperature == 0.0 else held_out.num_samples
    return (
        (asked.job_id, asked.seed) == (record.batch.job_id, spec.seed)
        and asked.group_size == group_size
        and len(asked.prompts) <= most_prompts
        and len(asked.reserves) <= rollout.max_resamples
        and asked.sampling.max_new_tokens <= rollout.sampling.max_new_tokens
    )
