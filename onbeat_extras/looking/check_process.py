"""`python -m onbeat_extras.looking.check_process RUN_ROOT WEIGHT_ROOT JOB_ID`: AuditTask in MessagePack on stdin,
AuditVerdict in JSON out.

The gateway checks a run in this process, which may take the memory of a whole version, and time: it ends with its
parent, and where memory is short the kernel ends it first. Exit 2: the run can't be checked, stdout holds the problem.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from contracts.answers import AuditVerdict, problem_body
from contracts.encoding.wire import Record, decode, encode_json
from contracts.errors import Conflict, NotFound, OnbeatError
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.audit.weights import digests_on_disk
from onbeat.process.launcher import end_with_parent

REFUSED = 2
OOM_SCORE = Path("/proc/self/oom_score_adj")


class AuditTask(Record, frozen=True, kw_only=True):
    """What a stack knows of a run, for a process that checks its folder."""

    spec: JobSpec
    is_complete: bool
    """The job succeeded, so that nothing may be missing at the end."""
    entries: tuple[AuditEntry, ...]


def main(arguments: list[str]) -> int:
    end_with_parent(signal.SIGKILL)
    with contextlib.suppress(OSError):  # no Linux: its kernel ends what it likes
        OOM_SCORE.write_text("1000")
    run_root, weight_root, job_id = arguments
    try:
        task = decode(sys.stdin.buffer.read(), AuditTask)
        folder = RunFolder(Path(run_root), job_id, weight_root=Path(weight_root))
        answer, code = encode_json(verdict_of(folder, task)), 0
    except OnbeatError as error:
        answer, code = problem_body(error.status, error.problem, field=error.field, cure=error.cure), REFUSED
    sys.stdout.buffer.write(answer)
    return code


def verdict_of(folder: RunFolder, task: AuditTask) -> AuditVerdict:
    """Raises Conflict for a job without a record, NotFound where its folder isn't here, ContractViolation for a damaged
    file."""
    if not task.entries:
        raise Conflict("nothing was committed yet, so there is nothing to verify", field="state")
    if not folder.path.is_dir():
        raise NotFound(
            f"its run folder isn't below {folder.run_root} here, so its weights can't be hashed again",
            field="job_id",
            cure="verify it where the folder is: `onbeat verify JOB --run-dir DIR`",
        )
    return verify_run(
        task.entries,
        task.spec,
        complete=task.is_complete,
        digests_on_disk=digests_on_disk(folder),
        job_id=folder.job_id,
        notes=_notes(folder),
    )


def _notes(folder: RunFolder) -> tuple[str, ...]:
    if folder.weight_root == folder.run_root or folder.weights.is_dir():
        return ()
    # A weight root in memory, or of another host; and a job that has ended keeps nothing there.
    return (f"no published versions are below the weight root {folder.weight_root} here, only checkpoints",)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
