"""The newest jobs, as the list of jobs and its live stream tell them."""

from __future__ import annotations

import logging
from collections.abc import Collection

from broker.connection.client import Broker
from broker.job_search import find_jobs
from broker.monitor import job_status
from broker.presence import Presence
from contracts.errors import ContractViolation, NotFound
from contracts.jobs import JobState, JobStatus

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
