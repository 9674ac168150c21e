"""What samples a batch, as a process's settings say: the served model, the players, the kind of engine.

A generator is made of it, and so is whatever samples a batch outside of a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from contracts.engines import Engine
from contracts.settings import StackSettings
from contracts.spec import JobSpec
from onbeat.environments.client import EnvironmentClient
from onbeat.process.dependency import Dependency
from onbeat.prompts.opening_service import client_for
from onbeat.weights.redis.chunks import ChunkReader
from producer.detokenizer import FolderDetokenizer, folder_renderer
from producer.engine.factory import fingerprint_of_job, make_engine
from producer.rollout.players import Players
from producer.served_model import ServedModel

if TYPE_CHECKING:
    import httpx


def served_model(
    settings: StackSettings, engine: Engine, *, chunks: Callable[[str], ChunkReader] | None = None
) -> ServedModel:
    """chunks: job id → its versions in Redis; None where there is no Redis."""
    return ServedModel(
        partial(make_engine, options=engine, settings=settings, chunks=chunks),
        partial(FolderDetokenizer, settings=settings),
        threads_for=partial(threads_for, settings=settings),
        has_to_prove=engine.has_to_prove_it,
    )


def players(settings: StackSettings, environments: httpx.AsyncClient, service: Dependency) -> Players:
    """environments: connections to the reward service, which `service` tells of."""

    def make_client(spec: JobSpec) -> EnvironmentClient:
        slowest = max(spec.environments.values(), key=lambda one: one.request_timeout_s)
        return client_for(environments, slowest, settings, deadline_s=spec.timeouts.dependency_s, service=service)

    return Players(make_client=make_client, make_renderer=partial(folder_renderer, settings=settings))


def fingerprint_for(spec: JobSpec, *, engine: Engine, settings: StackSettings) -> str:
    """What the bits of this process's completions of a job depend on (I7). Blocks for seconds: it imports torch."""
    threads = threads_for(spec, settings=settings)
    found = fingerprint_of_job(engine, spec.model, device=settings.device, num_threads=threads)
    return found + engine.of_turns if spec.environments else found


def threads_for(spec: JobSpec, *, settings: StackSettings) -> int | None:
    """A colocated job's engine has the whole of this process's share while its trainer is idle."""
    return settings.colocated_threads_each() if spec.schedule_rule.takes_turns else None
