"""The list of jobs: the newest, and the end of one for good.

The gateway may not write to the run root: a consumer removes what is noted here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from broker.connection.client import Broker
from broker.job_search import find_jobs
from broker.monitor import job_status
from broker.presence import Presence
from broker.removals import MADE_HERE, Removal, Removals
from contracts.errors import ContractViolation, NotFound
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from gateway.services import Services

MAX_LISTED = 1000

log = logging.getLogger(__name__)


def newest_jobs(broker: Broker, *, limit: int, states: Collection[JobState] = (), name: str = "") -> list[JobStatus]:
    """Returns at most so many, newest first; one whose record or spec can't be read hides no other.

    states, name: of `find_jobs`.
    """
    generators = Presence(broker).live()
    found = []
    for job_id in find_jobs(broker, states=states, name=name)[:limit]:
        try:
            found.append(job_status(broker, job_id, generators=generators))
        except NotFound:
            log.warning("%s is listed and has no record: the server lost it", job_id)
        except ContractViolation as error:
            log.warning("%s is left out of the list, its spec can't be read: %s", job_id, error)
    return found


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
