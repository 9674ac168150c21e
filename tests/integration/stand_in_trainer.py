"""`python -m tests.integration.stand_in_trainer JOB_ID`: holds the job's lease as a trainer does, and trains nothing.

Before it holds anything, a job named "crash" makes it die, one named "stuck" makes it wait for a signal,
and one named "held" makes it find another trainer.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from broker.connection.client import connect
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from contracts.errors import Conflict
from contracts.jobs import JobState, TrainerExit
from contracts.settings import settings_from
from onbeat.loop.lease_keeper import Cancelled, LeaseKeeper, Stopped

broker = connect(settings_from(os.environ), patience_s=30.0)
job_id = sys.argv[1]
jobs = JobStore(broker)
if jobs.spec(job_id).name == "crash":
    sys.exit("cannot load the model")
if jobs.spec(job_id).name == "stuck":
    signal.pause()
if jobs.spec(job_id).name == "held":
    sys.exit(TrainerExit.HELD)
side = TrainerSide(broker, job_id, owner=str(os.getpid()), lease_s=1.0)
keeper = LeaseKeeper(side, lease_s=1.0)
signal.signal(signal.SIGTERM, lambda _number, _frame: keeper.request_stop())
try:
    side.acquire()
except Conflict:
    sys.exit(TrainerExit.HELD)
if jobs.state(job_id) is not JobState.CANCELLING:
    jobs.move(job_id, JobState.RUNNING)
print("stand-in trainer holds the job", file=sys.stderr, flush=True)  # noqa: T201
keeper.start()
try:
    keeper.loaded()
    while True:
        keeper.check()
        time.sleep(0.05)
except Cancelled:
    jobs.move(job_id, JobState.CANCELLED, trainer_epoch=side.trainer_epoch)
except Stopped:
    pass
side.release()
