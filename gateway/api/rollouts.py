"""The endpoints of recorded batches: their list, one of them token by token, a search for text."""

from __future__ import annotations

import threading
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from contracts.errors import ContractViolation, NotFound, Unavailable
from contracts.rollouts import Purpose
from gateway import openapi
from gateway.run_files import readable
from gateway.services import HasServices, KnownJob, Services
from gateway.views.batch_view import Search, batch_view
from onbeat.base.http.bodies import json_answer
from onbeat.recording.files import RecordedFiles, why_not_again
from onbeat.recording.records import FoundTexts, IterationView, RecordedBatchView, RecordedIteration, RecordedList

MAX_LISTED = 1000
MAX_INDEX = 10**9
NEWEST = MAX_INDEX
MAX_SHOWN_BYTES = 32 * 1024**2
"""Largest record that is shown, or searched: as JSON it is many times as large, here and in a browser."""
MAX_LISTED_BYTES = 4 * 1024**2
"""Indexes that one answer reads, together; the iterations before them are asked for by `before`."""
MAX_SEARCHES = 2
MAX_VIEWS = 2
VIEW_WAIT_S = 10.0
"""Longest that a question for a batch waits for its turn."""
VIEWS = threading.BoundedSemaphore(MAX_VIEWS)
"""An answer of a large record takes many times its memory, and is made while no more than one other is."""
SEARCHES = threading.BoundedSemaphore(MAX_SEARCHES)
"""Each takes a core, and the memory of a record."""

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
    iterations: list[IterationView] = []
    damaged: list[str] = []
    left_bytes = MAX_LISTED_BYTES
    for number in reversed([recorded for recorded in numbers if recorded < before]):
        left_bytes -= files.index_bytes(number)
        if len(iterations) == limit or len(damaged) == MAX_LISTED or (left_bytes < 0 and (iterations or damaged)):
            break
        try:
            index = files.index(number)
        except NotFound:
            continue  # its commit is to come
        except ContractViolation as error:
            damaged.append(str(error))
            continue
        iterations.append(
            IterationView(iteration=index.iteration, batches=index.batches, num_left_out=index.num_left_out)
        )
    policy = services.jobs.spec(job_id).recording_policy
    recording = policy if policy.takes_any else None
    return json_answer(
        RecordedList(recording=recording, bytes=num_bytes, iterations=tuple(iterations), damaged=tuple(damaged))
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
            matches = Search(files=_files(services, job_id), text=text, limit=limit).run()
        return json_answer(matches)
    finally:
        SEARCHES.release()


@router.get("/rollouts/{iteration}/{purpose}/{index}", **openapi.answers(openapi.record(RecordedBatchView)))
def recorded_batch(
    job_id: KnownJob, services: HasServices, iteration: Number, purpose: Purpose, index: Number
) -> Response:
    """Show a recorded batch: its groups, completions token by token, rewards; 503 while others are shown."""
    files = _files(services, job_id)
    spec = services.jobs.spec(job_id)
    if not VIEWS.acquire(timeout=VIEW_WAIT_S):
        raise Unavailable(f"{MAX_VIEWS} batches are being shown", field="rollouts", cure="ask again in a few seconds")
    try:
        record = files.read(f"{iteration}/{purpose}/{index}")
        of_iteration = _index(files, iteration)
        why_not = of_iteration.why_not_listed(record) or why_not_again(record, spec, services.settings.weight_root_path)
        return json_answer(batch_view(record, of_iteration, spec, why_not=why_not))
    finally:
        VIEWS.release()


def _files(services: Services, job_id: str) -> RecordedFiles:
    return RecordedFiles(services.run_folder(job_id, below="rollouts/"), max_bytes=MAX_SHOWN_BYTES)


def _index(files: RecordedFiles, iteration: int) -> RecordedIteration:
    """The index; of an iteration that isn't committed yet, one that knows nothing of the whole iteration."""
    try:
        return files.index(iteration)
    except (NotFound, ContractViolation):
        return RecordedIteration(iteration=iteration, batches=(), versions={})
