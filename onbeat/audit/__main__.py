"""`python -m onbeat.audit RUN_ROOT WEIGHT_ROOT JOB_ID`: AuditTask in MessagePack on stdin, AuditVerdict in JSON out.

The gateway checks a run in this process, which may take the memory of a whole version, and time: it ends with its
parent, and where memory is short the kernel ends it first. Exit 2: the run can't be checked, stdout holds the problem.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from contracts.answers import problem_body
from contracts.encoding.wire import decode, encode_json
from contracts.errors import OnbeatError
from contracts.run_folder import RunFolder
from onbeat.audit.folder import AuditTask, verdict_of
from onbeat.process.launcher import end_with_parent

REFUSED = 2
OOM_SCORE = Path("/proc/self/oom_score_adj")


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
