"""The end of a worker, which waits for no server: a shutdown of Celery hangs as long as its Redis is away.

SIGTERM ─▶ Celery's warm shutdown ─▶ trainer stopped ─▶ Redis told ─▶ exit
   └─▶ its trainer is asked to end at once ─▶ this thread: that end did not come in time ─▶ trainer killed, exit
"""

from __future__ import annotations

import logging
import os
import threading
import time

from consumer.supervisor.trainer_process import STOP_GRACE_S, TrainerProcess

END_S = 5.0
"""Time since the signal for Celery to shut down."""
LAST_WORDS_S = 2.0
"""Time since the trainer's end to tell Redis of it."""
LOOK_S = 0.1

log = logging.getLogger(__name__)


class WorkerEnd:
    """A signal handler begins it, once."""

    def __init__(self, trainer: TrainerProcess) -> None:
        self._trainer = trainer
        self._thread = threading.Thread(target=self._run, name="worker end", daemon=True)

    def begin(self) -> None:
        if not self._thread.is_alive():
            self._trainer.ask_to_end()
            self._thread.start()

    def _run(self) -> None:
        started_s = trainer_seen_s = time.monotonic()
        while (now_s := time.monotonic()) < max(started_s + END_S, trainer_seen_s + LAST_WORDS_S):
            if self._trainer.is_running:
                trainer_seen_s = now_s
                if now_s - started_s > STOP_GRACE_S:
                    self._trainer.kill()
            time.sleep(LOOK_S)
        log.warning("ended without Redis, which does not answer")
        logging.shutdown()
        os._exit(0)
