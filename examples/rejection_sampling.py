"""Keeps the best completions of a recorded job as rows for `loss = "sft"`: rejection sampling.

    python examples/rejection_sampling.py RUN_ROOT JOB ROWS.jsonl [LEAST_REWARD]

The job has a `[recording]` table. Of each prompt's samples the one of the highest reward is kept, if that is
LEAST_REWARD (1.0) or more; of equal ones the shortest. A row has the prompt as it was written: the job that learns
them has no `dataset.chat`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from contracts.run_folder import RunFolder
from onbeat.recording.files import RecordedFiles, read_record
from onbeat.recording.records import RecordedBatch


def best_of(record: RecordedBatch, least: float) -> Iterator[dict[str, str]]:
    """Yields a row for each prompt of a batch that was answered well."""
    for place, group in enumerate(record.batch.groups):
        asked = record.prompt_batch.prompt_at(place, num_resamples=group.num_resamples)
        best = min(group.rollouts, key=lambda one: (-one.reward, one.completion.num_tokens))
        if asked is not None and best.reward >= least and best.completion.finish_reason == "stop" and best.text:
            yield {"prompt": asked.text, "reference": asked.reference, "completion": best.text}


def main(run_root: str, job_id: str, rows: str, least: float) -> None:
    files = RecordedFiles(RunFolder(Path(run_root), job_id))
    paths = [path for number in files.iterations() for path in files.batch_paths(number)]
    records = [read_record(path, RecordedBatch) for path in paths if path.name.startswith("train")]
    found = [row for record in records for row in best_of(record, least)]
    Path(rows).write_text("".join(json.dumps(row) + "\n" for row in found))
    print(f"{len(found)} of {sum(len(record.batch.groups) for record in records)} prompts")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]) if len(sys.argv) > 4 else 1.0)
