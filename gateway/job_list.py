"""The newest jobs, as the list of jobs and its live stream tell them."""

from __future__ import annotations

import logging

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.monitor import job_status
from broker.presence import Presence
from contracts.errors import ContractViolation, NotFound
from contracts.jobs import JobStatus

MAX_LISTED = 1000

log = logging.getLogger(__name__)


def newest_jobs(broker: Broker, *, limit: int) -> list[JobStatus]:
    """Returns at most so many, newest first; one whose record or spec can't be read hides no other."""
    live_generators = len(Presence(broker).live())
    found = []
    for job_id in JobStore(broker).job_ids()[:limit]:
        try:
            found.append(job_status(broker, job_id, live_generators=live_generators))
        except NotFound:
            log.warning("%s is listed and has no record: the server lost it", job_id)
        except ContractViolation as error:
            log.warning("%s is left out of the list, its spec can't be read: %s", job_id, error)
    return found
