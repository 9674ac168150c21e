"""A private stack for one job, in a run folder of its own, which ends with the job."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from contracts.engines import TransformersOptions
from contracts.errors import InvalidInput
from contracts.hub_names import is_hub_name, read_hub_name
from contracts.settings import engine_from, usable_cores
from contracts.spec.job import JobSpec
from onbeat.base.process.host_memory import memory_bytes
from onbeat.client.gateway import GatewayClient
from onbeat.commands.options import model_root_or_default
from onbeat.hub.store import HubStore
from onbeat.stack.access import page_address, run_root_from, with_extra_roots
from onbeat.stack.devices.device import device_in_words
from onbeat.stack.options import StackOptions, stack_settings, stage_workers_for, threads_from
from onbeat.stack.profile import StackProfile
from onbeat.terminal.follow import TICK_S
from onbeat.terminal.output import tell_fetch
from onbeat.training.driver import Driver
from onbeat.training.progress_line import HIDDEN, Shown
from onbeat.training.run import Run

WORTH_A_SECOND = 3e10
"""Bytes of the weights times most sampled tokens of an iteration: below it a second generator's start takes what it
saves."""
MODEL_PART = 16
"""A model is sampled by two processes only where its weights take at most this part of the memory."""


def new_run_root(name: str) -> Path:
    """A folder below ONBEAT_RUN_ROOT or runs/ that isn't there, with the time: two of one second have two."""
    root = run_root_from(os.environ, None)
    number = 1
    name = time.strftime(f"{name}-%Y%m%d-%H%M%S")
    while (path := root / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def options_of_job(
    spec: JobSpec,
    *,
    run_root: Path,
    model_root: Path | None = None,
    extra_roots: Sequence[Path] = (),
    generators: int | None = None,
    stage_workers: int | None = None,
    profile: StackProfile | None = None,
    threads: int | None = None,
) -> StackOptions:
    """Returns the options of a job's stack; what isn't given is taken from the variables of this process.

    extra_roots: further folders in which the job's files lie. generators: None takes as many as suit the job and this
    machine; with a profile they are its. stage_workers: None takes one where Onbeat serves a stage of the job.
    """
    if profile is not None:
        profile.check(spec)
    settings = with_extra_roots(stack_settings(os.environ), extra_roots)
    options = StackOptions(
        run_root=run_root,
        model_root=model_root_or_default(model_root),
        generators=1 if generators is None else generators,
        stage_workers=stage_workers_for(spec, stage_workers, settings),
        profile=profile,
        threads=threads_from(os.environ, threads),
        settings=settings,
        engine=engine_from(os.environ),
        fresh=True,
    )
    if generators is None and two_suit(spec, options):
        return replace(options, generators=2)
    return options


def two_suit(spec: JobSpec, options: StackOptions) -> bool:
    """Returns True where two generators sample the job sooner than one.

    The trainer's core is idle until the first batches come.

    On two or three cores, where a generator has one thread anyway: with another number it would have other bits.
    """
    if options.settings.device != "cpu" or options.engine != TransformersOptions() or spec.schedule_rule.takes_turns:
        return False
    num_tokens = spec.rollout.prompts_per_iteration * spec.rollout.group_size * spec.max_sampled_tokens
    num_bytes = _model_bytes(spec.model.path, options)
    saves_time = spec.rollout.batches_per_iteration > 1 and num_bytes * num_tokens >= WORTH_A_SECOND
    return saves_time and (options.threads or 1) == 1 < usable_cores() < 4 and MODEL_PART * num_bytes <= memory_bytes()


def _model_bytes(path: str, options: StackOptions) -> int:
    """Returns the bytes of a model's weights; 0 for one that isn't fetched from the hub yet."""
    folder = options.model_root / path
    if is_hub_name(path):
        store = HubStore(options.settings.hub_root_path)
        name = read_hub_name(path, kind="model", field="model.path")
        commit = store.commit_of(name)
        if commit is None:
            return 0
        folder = store.folder(name) / commit
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())


def on_own_stack(job: JobSpec, options: StackOptions, *, shown: Shown = HIDDEN) -> Run:
    """Starts the stack and submits the job; Ctrl-C meanwhile stops what was started."""
    key = uuid.uuid4().hex

    def submit(client: GatewayClient) -> str:
        return client.submit(job, idempotency_key=key, fetching=fetching).job_id

    def fetching(text: str) -> None:
        if shown is not HIDDEN:
            tell_fetch(text)
        driver.leave_if_over()

    driver = Driver(submit, options)
    with nothing_left_of_what_is_refused(options.run_root):
        job_id = _submitted(driver, shown)
    device = device_in_words(options.settings, is_chosen=bool(os.environ.get("ONBEAT_DEVICE")))
    page = "" if driver.gateway is None else f"; page {page_address(driver.gateway.url, '', job_id=job_id)}"
    shown.began(f"{job_id} runs in {options.run_root / job_id}; device {device}{page}")
    return Run(job_id, run_root=options.run_root, driver=driver, shown=shown)


def _submitted(driver: Driver, shown: Shown) -> str:
    """Returns the job's id when it is queued."""
    driver.start()
    try:
        while not driver.wait_for(lambda: driver.progress is not None, TICK_S):
            shown.update(None)
    except BaseException:
        driver.end()
        raise
    finally:
        shown.pause()
    if driver.progress is None:
        assert driver.error is not None
        raise driver.error
    return driver.progress.status.job_id


@contextmanager
def nothing_left_of_what_is_refused(run_root: Path) -> Iterator[None]:
    """Removes a run folder that is new; the logs of a service that broke are kept."""
    is_new = not run_root.exists()
    try:
        yield
    except InvalidInput:
        if is_new:
            shutil.rmtree(run_root, ignore_errors=True)
        raise
