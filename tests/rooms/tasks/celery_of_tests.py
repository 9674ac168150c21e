"""`python -m tests.rooms.tasks.celery_of_tests`: a worker of Celery as it comes, for tests that show its traps."""

from __future__ import annotations

import os

from celery import Celery

from tests.rooms.tasks.works_of_tests import BEHAVIOURS, note, notes_of

VISIBILITY_S = 3

app = Celery("defaults", broker=os.environ["CELERY_OF_TESTS"])
app.conf.update(
    broker_transport_options={
        "visibility_timeout": VISIBILITY_S,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    task_acks_late=True,
    task_reject_on_worker_lost=True,
)


@app.task(name="onbeat.test")
def run(task_id: str, behaviour: str, seconds: float) -> None:
    """Does what a test's work does."""
    folder = notes_of(os.environ["ONBEAT_RUN_ROOT"])
    note(folder, task_id, "begun")
    try:
        BEHAVIOURS[behaviour](seconds, None)
        note(folder, task_id, "done")
    finally:
        note(folder, task_id, "left")


if __name__ == "__main__":
    app.worker_main(["worker", "--concurrency", "2", "--loglevel", "INFO"])
