"""The recorded batch that is sampled again, read from a run folder, and the answer to it."""

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
    """The answer to a batch that was sampled again. `python -m onbeat.replay` creates it, and `onbeat replay --json`
    prints it.
    """

    job_id: str
    batch_id: str
    recorded_digest: str
    digest: str = ""
    """The digest of what was sampled now; "" where nothing was."""
    reason: str = ""
    """Where the digests differ: the first difference in words. Where it wasn't sampled: why."""
    equal: bool | None = None
    """True where the two digests are the same; null where nothing was sampled."""


def read_from(folder: RunFolder, batch_id: str) -> tuple[JobSpec, RecordedBatch]:
    """Reads the job's spec and a recorded batch.

    Raises:
        NotFound: The job or the batch isn't there.
        InvalidInput: The spec is damaged.
        ContractViolation: A file isn't the batch's own.
        Conflict: The batch can't be sampled again.
    """
    files = RecordedFiles(folder)
    spec = read_spec(folder)
    record = files.read(batch_id)
    try:
        why_not = files.index(record.batch.iteration).why_not_listed(record)
    except (NotFound, ContractViolation) as error:
        why_not = str(error)
    why_not = why_not or why_not_again(record, spec, folder.weight_root)
    if why_not:
        raise Conflict(f"it can't be sampled again: {why_not}", field="batch_id")
    if not _is_of(record, spec):
        raise ContractViolation("its record is of another spec than the job's", field=f"batch {batch_id}")
    return spec, record


def _is_of(record: RecordedBatch, spec: JobSpec) -> bool:
    """Returns True where a record requests no more than the job's spec allows a batch: nothing larger is put into the
    engine."""
    prompts = record.prompt_batch
    rollout = spec.rollout
    is_training = record.batch.purpose == "train"
    most_prompts = rollout.prompts_per_batch
    group_size = rollout.group_size
    if not is_training:
        held_out = spec.evaluation.each.get(prompts.prompts[0].source or HELD_OUT, spec.evaluation)
        most_prompts = held_out.prompts_per_batch
        group_size = 1 if prompts.sampling.temperature == 0.0 else held_out.num_samples
    return (
        (prompts.job_id, prompts.seed) == (record.batch.job_id, spec.seed)
        and prompts.group_size == group_size
        and len(prompts.prompts) <= most_prompts
        and len(prompts.reserves) <= rollout.max_resamples
        and prompts.sampling.max_new_tokens <= rollout.sampling.max_new_tokens
    )
