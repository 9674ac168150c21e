"""`onbeat verify --probe`: a process of its own computes a job's probes again, by a trainer's code."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from msgspec.structs import replace

from contracts.answers import AuditVerdict, ComputedProbe, ProbeCheck
from contracts.encoding.wire import decode_json
from contracts.errors import InvalidInput, Unavailable
from contracts.jobs import JobStatus
from contracts.run_folder import RunFolder
from onbeat.audit.chain import AuditEntry
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.waiting import Waiting
from onbeat.commands.exports.audit_file import write_audit_at
from onbeat.commands.options import with_run_roots
from onbeat.stack.options import child_environment, settings_of, stack_settings
from onbeat.stack.supervision import describe_exit

POLL_S = 0.1


def with_probes(
    verdict: AuditVerdict,
    folder: RunFolder,
    chain: tuple[JobStatus, list[AuditEntry]],
    *,
    model_root: Path | None,
    threads: int | None,
    timeout_s: float,
) -> AuditVerdict:
    """Returns the verdict with what the probes say, which are computed again from the weights in the run folder.

    Args:
        verdict: What the chain and the files have said.
        folder: The run folder.
        chain: The job's status and its audit chain.
        model_root: Where the spec's relative paths begin; None takes the run folder's own.
        threads: Compute threads; bits are the trainer's with as many as it had. None for what the environment says.
        timeout_s: The longest wait for it.

    Raises:
        Unavailable, DeadlineExceeded: The process doesn't start, or dies, or takes too long.
    """
    checked = _computed(folder, chain, model_root=model_root, threads=threads, timeout_s=timeout_s)
    gaps = (*verdict.gaps, *checked.gaps)
    lines = (*map(_line, checked.versions), *checked.notes)
    return replace(verdict, verified=not gaps, gaps=gaps, notes=(*verdict.notes, *lines))


def weights_elsewhere(job_id: str) -> InvalidInput:
    """Returns the error of a job whose run folder isn't on this machine."""
    return InvalidInput(
        f"the weights of {job_id} are not on this machine",
        field="--probe",
        cure="run it where the run folder is, or name the folder with --run-dir",
    )


def _computed(
    folder: RunFolder,
    chain: tuple[JobStatus, list[AuditEntry]],
    *,
    model_root: Path | None,
    threads: int | None,
    timeout_s: float,
) -> ProbeCheck:
    settings = with_run_roots(settings_of("consumer", stack_settings(os.environ)), folder.run_root, model_root)
    settings = replace(
        settings,
        name="verify",
        run_root=str(folder.run_root),
        model_root=str(Path(settings.model_root).resolve()),
        redis_url="",
    )
    if threads is not None:
        settings = replace(settings, threads=threads)
    with tempfile.TemporaryDirectory(prefix="onbeat-verify-", ignore_cleanup_errors=True) as scratch:
        audit = Path(scratch) / "audit.json"
        answer = Path(scratch) / "answer.json"
        write_audit_at(audit, *chain)
        process = ChildProcess(
            "the process that computes the probes",
            command=(sys.executable, "-P", "-m", "onbeat.replay.probe_again", folder.job_id, str(audit), str(answer)),
            environment=child_environment(os.environ, settings, port=0),
            log_path=Path(scratch) / "log.txt",
        )
        waiting = Waiting(f"the probes of {folder.job_id} to be computed", deadline_s=timeout_s, cure="raise --timeout")
        process.start()
        try:
            while (exit_code := process.exit_code) is None:
                waiting.poke()
                process.wait(POLL_S)
            if not answer.exists():
                raise Unavailable(
                    f"{describe_exit(exit_code)} without an answer; the end of its log:\n{process.tail()}",
                    field=process.name,
                )
            return decode_json(answer.read_bytes(), ProbeCheck)
        finally:
            process.stop(grace_s=0.0)


def _line(computed: ComputedProbe) -> str:
    same = "the same bits" if computed.is_equal else f"within rounding: row {computed.row} is {computed.gap:.2g} off"
    return f"version {computed.version}, from {computed.source}: {same}"
