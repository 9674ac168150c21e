"""Records of batches in a run folder, for tests of what reads them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.rollouts import RolloutBatch, batch_digest
from contracts.run_folder import RunFolder
from contracts.versions import WeightFile
from gateway.services import Services
from onbeat.recording.files import INDEX, RecordedFiles, write_record
from onbeat.recording.records import RecordedBatch, RecordedIteration, RecordedSummary
from tests.builders import batch_of, manifest, prompt_batch, rollout

FILE = WeightFile(name="weights.safetensors", num_bytes=4)
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e\x00"


def record_of(job_id: str, batch_id: str, *, text: str = "46", **changes: Any) -> RecordedBatch:
    """The record of a batch of one prompt and two completions, the second of which was not trained."""
    iteration, purpose, _ = batch_id.split("/")
    common: dict[str, Any] = {"job_id": job_id, "batch_id": batch_id, "iteration": int(iteration), "purpose": purpose}
    rollouts = [replace(rollout([4, 5], 1.0), text=text), replace(rollout([6], 0.0), text="x")]
    batch: RolloutBatch = batch_of([([3], rollouts)], **common)
    asked = prompt_batch([[3]], **common)
    asked = replace(asked, prompts=(replace(asked.prompts[0], text=f"12+34={HOSTILE}", reference="46"),))
    values: dict[str, Any] = {
        "prompt_batch": asked,
        "batch": batch,
        "batch_digest": batch_digest(batch),
        "manifest": manifest(0, directory=f"{job_id}/weights/v000000", files=(FILE,)),
        "advantages": (0.5, -0.5),
        "trainer_logprobs": (pack_float32([-0.5, -0.25]), None),
        "piece_ids": pack_int32([4, 5]),
        "pieces": ("4", HOSTILE),
    }
    return RecordedBatch(**(values | changes))


def summary_of(record: RecordedBatch) -> RecordedSummary:
    batch = record.batch
    return RecordedSummary(
        batch_id=batch.batch_id,
        purpose=batch.purpose,
        index=int(batch.batch_id.rpartition("/")[2]),
        policy_version=batch.policy_version,
        weights_digest=batch.weights_digest,
        generator_id=batch.generator_id,
        num_groups=len(batch.groups),
        num_completions=batch.num_completions,
        reward_mean=0.5,
        batch_digest=record.batch_digest,
    )


def recorded(services: Services, job_id: str, *records: RecordedBatch, **index: Any) -> RecordedFiles:
    """Writes the records and the indices of their iterations, and the version that sampled them."""
    folder = RunFolder(services.settings.run_root_path, job_id)
    files = RecordedFiles(folder)
    for record in records:
        path = files.path_of(record.batch.batch_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, record)
        number = record.batch.iteration
        listed = (summary_of(record),)
        write_record(path.with_name(INDEX), RecordedIteration(iteration=number, batches=listed, versions={}, **index))
    version = folder.weights_of(0)
    version.mkdir(parents=True, exist_ok=True)
    (version / FILE.name).write_bytes(bytes(FILE.num_bytes))
    return files
