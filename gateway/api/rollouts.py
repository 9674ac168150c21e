"""What a job's recorded batches are, and requests to sample one again."""

from __future__ import annotations

import threading
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from contracts.errors import Conflict, ContractViolation, NotFound, Unavailable
from contracts.recorded.batches import RecordedIteration
from contracts.recorded.files import RecordedFiles
from contracts.recorded.versions import why_not_again
from contracts.recorded.views import FoundTexts, IterationView, RecordedBatchView, RecordedList
from contracts.replays import Replay, ReplayRequest
from contracts.rollouts import Purpose
from contracts.run_folder import RunFolder
from gateway import openapi
from gateway.recorded.search import Search
from gateway.recorded.views import batch_view
from gateway.run_files import readable
from gateway.services import HasServices, KnownJob, Services
from gateway.submission import requests
from http_service.bodies import json_answer

MAX_LISTED = 1000
MAX_INDEX = 10**9
NEWEST = MAX_INDEX
MAX_SHOWN_BYTES = 32 * 1024**2
"""Largest record that is shown, or searched: as JSON it is many times as large, here and in a browser."""
MAX_CHECKED_BYTES = 256 * 1024**2
"""Largest record that is sampled again: it is read here, and not shown."""
MAX_SEARCHES = 2
SEARCHES = threading.BoundedSemaphore(MAX_SEARCHES)
"""Each takes a core, and the memory of a record."""

REPLAY = openapi.record(Replay)
REQUEST: dict[str, Any] = {
    "responses": {202: openapi.answer(REPLAY, "A generator takes it when it has nothing else to do")},
    "openapi_extra": openapi.takes(ReplayRequest, required=True),
}
router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["rollouts"])

Number = Annotated[int, Path(ge=0, lt=MAX_INDEX)]


@router.get("/rollouts", **openapi.answers(openapi.record(RecordedList)))
def rollouts(
    job_id: KnownJob,
    services: HasServices,
    before: Annotated[int, Query(ge=0, le=NEWEST)] = NEWEST,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
) -> Response:
    """List the recorded iterations, newest first, with their batches; those before the iteration `before`."""
    files = _files(services, job_id)
    with readable("rollouts"):
        numbers = files.iterations()
        num_bytes = sum(map(files.num_bytes, numbers))
    found: list[IterationView] = []
    damaged: list[str] = []
    for number in reversed([one for one in numbers if one < before]):
        if len(found) == limit:
            break
        try:
            index = files.index(number)
        except NotFound:
            continue  # its commit is to come
        except ContractViolation as error:
            damaged.append(str(error))
            continue
        found.append(IterationView(iteration=index.iteration, batches=index.batches, num_left_out=index.num_left_out))
    spec = services.jobs.spec(job_id)
    return json_answer(
        RecordedList(
            recording=spec.recording or None,
            bytes=num_bytes,
            iterations=tuple(found),
            damaged=tuple(damaged[:MAX_LISTED]),
        )
    )


@router.get("/rollouts/search", **openapi.answers(openapi.record(FoundTexts)))
def search(
    job_id: KnownJob,
    services: HasServices,
    text: Annotated[str, Query(min_length=1, max_length=1000)],
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50,
) -> Response:
    """Find text in recorded prompts and completions, newest iteration first, in any case; 503 while others search."""
    if not SEARCHES.acquire(blocking=False):
        raise Unavailable(f"{MAX_SEARCHES} searches run already", field="search", cure="ask again in a few seconds")
    try:
        with readable("rollouts"):
            found = Search(files=_files(services, job_id), text=text, limit=limit).run()
        return json_answer(found)
    finally:
        SEARCHES.release()


@router.get("/rollouts/{iteration}/{purpose}/{index}", **openapi.answers(openapi.record(RecordedBatchView)))
def recorded_batch(
    job_id: KnownJob, services: HasServices, iteration: Number, purpose: Purpose, index: Number
) -> Response:
    """Show a recorded batch: its groups, their completions token by token, rewards and advantages."""
    files, spec = _files(services, job_id), services.jobs.spec(job_id)
    record = files.read(f"{iteration}/{purpose}/{index}")
    of_iteration = _index(files, iteration)
    why_not = of_iteration.why_not_listed(record) or why_not_again(record, spec, services.settings.weight_root_path)
    return json_answer(batch_view(record, of_iteration, spec, why_not=why_not))


@router.post("/replays", status_code=HTTPStatus.ACCEPTED, **REQUEST)
async def sample_again(request: Request, job_id: KnownJob, services: HasServices) -> Response:
    """Have a generator sample a recorded batch once more and compare the digests; it publishes nothing.

    While the same batch is waiting, or being sampled, its request is answered. 409 where it can't be sampled again.
    """
    asked = await requests.read_replay(request, max_bytes=services.max_body_bytes)
    return json_answer(await run_in_threadpool(_request, services, job_id, asked), HTTPStatus.ACCEPTED)


@router.get("/replays/{replay_id}", **openapi.answers(REPLAY))
def replay(job_id: KnownJob, replay_id: str, services: HasServices) -> Response:
    """Show what became of a request to sample a batch again, for an hour."""
    found = services.replays.get(replay_id)
    if found is None or found.job_id != job_id:
        raise NotFound("there is no such replay, or it is over an hour old", field="replay_id", cure="ask again")
    return json_answer(found)


def _request(services: Services, job_id: str, asked: ReplayRequest) -> Replay:
    """Raises NotFound for a batch that isn't recorded, Conflict for one that can't be sampled again."""
    files, spec = _files(services, job_id, max_bytes=MAX_CHECKED_BYTES), services.jobs.spec(job_id)
    record = files.read(asked.batch_id)
    why_not = _index(files, record.batch.iteration).why_not_listed(record)
    if why_not := why_not or why_not_again(record, spec, services.settings.weight_root_path):
        raise Conflict(f"it can't be sampled again: {why_not}", field="batch_id")
    return services.replays.request(job_id, asked.batch_id, recorded_digest=record.batch_digest)


def _files(services: Services, job_id: str, *, max_bytes: int = MAX_SHOWN_BYTES) -> RecordedFiles:
    return RecordedFiles(RunFolder(services.settings.run_root_path, job_id), max_bytes=max_bytes)


def _index(files: RecordedFiles, iteration: int) -> RecordedIteration:
    """The index; of an iteration that isn't committed yet, one that knows nothing of the whole iteration."""
    try:
        return files.index(iteration)
    except (NotFound, ContractViolation):
        return RecordedIteration(iteration=iteration, batches=(), versions={})
