"""The task `verify`: a job's audit chain is followed again, and the weights in its run folder are hashed."""

from __future__ import annotations

from broker.connection.client import Broker
from broker.task_store import Attempt
from contracts.answers import AuditVerdict
from contracts.errors import Conflict, NotFound
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.tasks.records import TaskResult
from onbeat.audit.chain import verify_run
from onbeat.audit.weights import FileProgress, digests_on_disk
from onbeat.tasks.attempt import Progress
from onbeat.tasks.work.stored_run import StoredRun, read_run


def verify(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """Checks a run; it writes nothing. Raises what `read_run` and `verdict_of` do."""
    run = read_run(broker, settings, attempt.arguments.job_id)
    return TaskResult(verdict=verdict_of(run, progress=progress))


def verdict_of(run: StoredRun, *, progress: FileProgress | None = None) -> AuditVerdict:
    """Checks the chain, and the weights that the folder still holds.

    Raises:
        Conflict: The job has no record yet.
        NotFound: Its folder isn't here.
        ContractViolation: A file is damaged.
    """
    folder = run.folder
    if not run.entries:
        raise Conflict("nothing was committed yet, so there is nothing to verify", field="state")
    if not folder.path.is_dir():
        raise NotFound(
            f"its run folder isn't below {folder.run_root} here, so its weights can't be hashed again",
            field="job_id",
            cure="start a worker of tasks where the folder is, or verify there: `onbeat verify JOB --run-dir DIR`",
        )
    return verify_run(
        run.entries,
        run.spec,
        complete=run.is_complete,
        digests_on_disk=digests_on_disk(folder, progress=progress),
        job_id=folder.job_id,
        notes=_notes(folder),
    )


def _notes(folder: RunFolder) -> tuple[str, ...]:
    if folder.weight_root == folder.run_root or folder.weights.is_dir():
        return ()
    # A weight root in memory, or of another host; and a job that has ended keeps nothing there.
    return (f"no published versions are below the weight root {folder.weight_root} here, only checkpoints",)
