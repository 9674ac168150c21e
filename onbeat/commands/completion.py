"""Job ids for the shell: what stands behind `onbeat watch <TAB>`, where a gateway answers at once."""

from __future__ import annotations

import os
from typing import Annotated

import httpx
import typer

from contracts.errors import OnbeatError
from onbeat.stack.access import gateway_access
from telemetry.logs import shown

WITHIN_S = 1.0
NUM_JOBS = 100


def job_ids(incomplete: str) -> list[tuple[str, str]]:
    """(job id, its state and name) of the newest jobs; [] where no gateway answers in time: a shell waits for this."""
    try:
        access = gateway_access(os.environ, gateway=None, api_key=None, run_dir=None)
        answer = httpx.get(
            f"{access.url}/v1/jobs",
            params={"limit": NUM_JOBS},
            headers={"Authorization": f"Bearer {access.key}"},
            timeout=WITHIN_S,
            trust_env=False,
        )
        jobs = answer.json()["jobs"]
        found = [(str(job["job_id"]), shown(f"{job['state']} {job['name']}")) for job in jobs]
    except (OnbeatError, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return []
    return [one for one in found if one[0].startswith(incomplete)]


Job = Annotated[str, typer.Argument(metavar="JOB", help="Job id; `onbeat jobs` lists them.", autocompletion=job_ids)]
