"""The end of a job for good. The gateway may not write to the run root: a consumer removes what is noted here."""

from __future__ import annotations

import logging
import time

from broker.removals import MADE_HERE, Removal, Removals
from contracts.errors import NotFound
from contracts.run_folder import RunFolder
from gateway.services import Services

log = logging.getLogger(__name__)


def remove_for_good(services: Services, job_id: str) -> None:
    """Removes the job's keys, and notes that its files are to go; also of one whose files alone are left.

    Repeating it changes nothing while the note stands. Raises NotFound, and Conflict for a job that has not ended.
    """
    folder = RunFolder(services.settings.run_root_path, job_id)
    try:
        services.jobs.remove(job_id)
    except NotFound:
        removals = Removals(services.broker)
        # An ended job that Redis has forgotten left its audit chain among its files.
        is_left = MADE_HERE.fullmatch(job_id) is not None and folder.audit.is_file()
        if not is_left and not removals.is_pending(job_id):
            raise
        removals.note(job_id, Removal(files="removed", at_s=time.time()))
    log.info("job %s is removed, and its files are to be", job_id)
