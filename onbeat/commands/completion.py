"""Job ids for the shell: what stands behind `onbeat watch <TAB>`, where a gateway answers at once."""

from __future__ import annotations

import os
from typing import Annotated

import httpx
import typer

from contracts.encoding.names import check_job_id
from contracts.errors import OnbeatError
from contracts.jobs import JobState
from onbeat.http_service.outgoing import make_client
from onbeat.stack.access import gateway_access

WITHIN_S = 1.0
NUM_JOBS = 100


def job_ids(incomplete: str) -> list[tuple[str, str]]:
    """(job id, its state) of the newest jobs; [] where no gateway answers in time: a shell waits for this.

    zsh evaluates what it is given here, so nothing is in it that a user or a gateway may choose freely, like a name.
    """
    try:
        access = gateway_access(os.environ, gateway=None, api_key=None, run_dir=None)
        with make_client(access.url, headers={"Authorization": f"Bearer {access.key}"}, timeout=WITHIN_S) as http:
            answer = http.get("/v1/jobs", params={"limit": NUM_JOBS})
        found = [(check_job_id(job["job_id"]), JobState(job["state"]).value) for job in answer.json()["jobs"]]
    except (OnbeatError, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return []
    return [one for one in found if one[0].startswith(incomplete)]


Job = Annotated[str, typer.Argument(metavar="JOB", help="Job id; `onbeat jobs` lists them.", autocompletion=job_ids)]
