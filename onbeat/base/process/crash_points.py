"""Named places where a process can be made to die, so that the windows that random kills miss are hit every time.

    ONBEAT_CRASH_AT=consumer.after_step:3 python -m consumer JOB_ID

kills the process with SIGKILL the third time that it gets there; `:3:group` kills its process group, as the ranks and
the launcher of a host that is lost. Unset, `reach` compares two strings and does nothing.
docs/evidence.md says what each death leaves behind and how it heals.
"""

from __future__ import annotations

import os
import signal

from contracts.errors import InvalidInput

CRASH_POINTS = {
    "consumer.after_opening": "an iteration is open, nothing is trained; of a window perhaps not all are open",
    "consumer.in_dry_pass": "the made-up batch went through, its memory is not given back, nothing is trained",
    "consumer.after_micro_batch": "a gradient is in memory, its batch is claimed and unacknowledged",
    "consumer.recording": "some batches of an iteration are in its records, which no reader is shown yet",
    "consumer.after_step": "the weights moved in memory, their version has no name yet",
    "consumer.writing_weights": "a part of the next version is on disk, under a hidden name",
    "consumer.after_weights": "the next version is written and announced, the iteration is not committed",
    "consumer.after_commit": "the iteration is committed and the next one open, a due checkpoint is not written",
    "consumer.writing_checkpoint": "a part of a checkpoint is on disk, under a hidden name",
    "consumer.after_checkpoint": "the checkpoint is complete, older ones are not yet removed",
    "consumer.keeping_files": "what an iteration left is copied, no list in Redis says so",
    "consumer.after_files_kept": "the list says so, its pointer is not written and older copies are not removed",
    "consumer.saving_older_versions": "older versions of the window are in a checkpoint that has no name yet",
    "consumer.publishing_older_versions": "an older version is published again, the window is not open",
    "tasks.removing_files": "a removed job's folder has its hidden name, and is whole",
    "hosts.forming": "a group of hosts that others may have joined, and whose leader is gone",
    "hosts.sealed": "a group that is sealed, no rank is started on this host",
    "hosts.loading": "ranks that have met, and load the model",
    "producer.after_claim": "a leased batch that nobody works on",
    "producer.loading_weights": "a leased batch, its weights half loaded",
    "producer.receiving_weights": "a batch that is sampled, and beside it a version half received",
    "producer.sharing_steps": "several leased batches, a part of their tokens",
    "producer.after_turn": "a turn of each trajectory in memory, sessions open that nothing was said to",
    "producer.after_step": "replies of an environment in memory, its sessions a turn further",
    "producer.after_generation": "completions in memory, unscored",
    "producer.after_scoring": "a complete batch in memory, unpublished",
    "producer.after_publication": "a published batch, the generator's own books not closed",
    "environment.before_play": "sessions of a call that isn't begun, all others",
    "environment.after_play": "steps that are played and not answered",
    "environment.lost_child": "the sessions of a child that is gone, not begun again",
    "stage.after_claim": "leased items that no stage worker works on",
    "stage.after_compute": "columns in memory, which no other process has",
    "tasks.begun": "a task runs under a lease, nothing of it is done",
    "tasks.worked": "a task's work is done, its record doesn't say so",
    "tasks.ended": "a task's record says how it ended, no message of the next one is sent",
    "stage.after_put": "columns that are put, the stage worker's own books not closed",
}
"""Name → the state that a death there leaves."""

_armed = ""
_hits_left = 0
_kills_group = False


def arm(crash_at: str) -> None:
    """Arms `NAME`, or `NAME:N` for the Nth time, or `NAME:N:group`; "" arms nothing. Raises InvalidInput for an unknown
    name."""
    global _armed, _hits_left, _kills_group
    _kills_group = crash_at.endswith(":group")
    crash_at = crash_at.removesuffix(":group")
    name, _, count = crash_at.partition(":")
    if not crash_at:
        _armed = ""
        return
    if name not in CRASH_POINTS or (count and not count.isdigit()):
        raise InvalidInput(
            f"`{crash_at}` is not a crash point", field="ONBEAT_CRASH_AT", cure=f"known: {', '.join(CRASH_POINTS)}"
        )
    _armed = name
    _hits_left = int(count or 1)


def reach(name: str) -> None:
    """Dies here if this point is armed and its time has come."""
    global _hits_left
    if name != _armed:
        return
    _hits_left -= 1
    if _hits_left <= 0:
        os.kill(-os.getpgrp() if _kills_group else os.getpid(), signal.SIGKILL)
