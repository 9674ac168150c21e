"""A job as a program has it: its iterations as they are committed, its end, its verdict, its model.

a stack of its own    Driver's thread: JobProgress and events ─▶ the program; afterwards the run folder
a gateway             its answers; a Driver's thread where the program goes through iterations
a run folder          audit.json, metrics.jsonl, weights: of a stack that is gone
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

from contracts.answers import AuditVerdict
from contracts.encoding.json_lines import read_json_lines
from contracts.errors import DeadlineExceeded, JobFailed
from contracts.events import IterationCommitted, IterationMetrics, versions_of
from contracts.jobs import EvaluationScore, JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.settings import settings_from
from onbeat.audit.chain import AuditEntry
from onbeat.audit.folder import read_spec
from onbeat.base.process.signals import uninterrupted
from onbeat.client.gateway import GatewayClient
from onbeat.client.progress import JobProgress
from onbeat.commands.exports.audit_file import read_audit, verify_at, verify_folder
from onbeat.commands.options import with_run_roots
from onbeat.recording.records import RecordedSample
from onbeat.recording.samples import FolderSamples, GatewaySamples, SampleSource, read_samples
from onbeat.run_folder.run_files import bring_missing
from onbeat.stack.access import GatewayAccess, page_address
from onbeat.terminal.follow import TICK_S
from onbeat.terminal.job_view import JobView
from onbeat.training.driver import Driver
from onbeat.training.progress_line import HIDDEN, Shown, as_html


class Run:
    """A context manager: its end, and that of the program, cancels the job and stops the stack that `train` started.

    A job at a gateway goes on.
    """

    def __init__(
        self,
        job_id: str,
        *,
        run_root: Path,
        driver: Driver | None = None,
        access: GatewayAccess | None = None,
        model_root: Path | None = None,
        shown: Shown = HIDDEN,
    ) -> None:
        """driver: of a stack of its own, whose job is there. access: of a gateway; with neither the stack is gone."""
        self.id = job_id
        weight_root = settings_from(os.environ).weight_root
        self.folder = RunFolder(run_root.resolve(), job_id, weight_root=Path(weight_root) if weight_root else None)
        self._driver = driver
        self._access = access
        self._client = GatewayClient(access.url, access.key) if access is not None else None
        self._model_root = model_root
        self._shown = shown
        self._was_cancelled = False
        """True once this program has cancelled the job: its end is no failure then."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<onbeat run {self.id} in {self.folder.path}>"

    def _repr_html_(self) -> str:
        progress = self._driver.progress if self._driver is not None else None
        return as_html(progress or JobProgress(self.status))

    @property
    def status(self) -> JobStatus:
        """The job's state, and why it is in it."""
        if self._driver is not None and self._driver.progress is not None:
            if self._driver.error is not None:
                raise self._driver.error
            return self._driver.progress.status
        if self._client is not None:
            return self._client.job(self.id)
        return read_audit(self.folder)[0]

    @property
    def metrics(self) -> list[IterationMetrics]:
        """The committed iterations so far, oldest first."""
        if self._client is not None:
            return self._client.metrics(self.id)
        if self._driver is not None and self._driver.progress is not None:
            return self._driver.progress.in_order
        rows = {entry.iteration: entry for entry in read_json_lines(self.folder.metrics, IterationMetrics)}
        return [rows[number] for number in sorted(rows)]

    @property
    def evaluations(self) -> list[EvaluationScore]:
        """The scores of held-out prompts so far, oldest first."""
        if self._client is not None:
            return self._client.evaluations(self.id)
        if self._driver is not None and self._driver.progress is not None:
            return list(self._driver.progress.evaluations.values())
        return read_json_lines(self.folder.evaluations, EvaluationScore)

    def samples(
        self,
        *,
        iteration: int | None = None,
        batch: int | None = None,
        held_out: bool = False,
        worst: bool = False,
        limit: int = 8,
    ) -> list[RecordedSample]:
        """Returns recorded completions with their prompts and rewards, as they are now.

        Args:
            iteration: Its number; None takes the newest that is recorded.
            batch: The number of one batch in it; None takes all that are recorded.
            held_out: Completions of held-out prompts, in place of those that were trained.
            worst: Those of the lowest rewards first; else as they were sampled.
            limit: How many at most.

        Raises:
            NotFound: Nothing of that kind is recorded, or not yet.
        """
        source: SampleSource = FolderSamples(self.folder)
        if self._client is not None:
            source = GatewaySamples(partial(self._client.of_job, "GET", self.id))
        return read_samples(source, iteration=iteration, batch=batch, held_out=held_out, worst=worst, limit=limit)

    @property
    def gateway(self) -> GatewayAccess | None:
        """The address and the key of the gateway; None where the run folder is all that there is."""
        return self._driver.gateway if self._driver is not None else self._access

    @property
    def page(self) -> str:
        """The address of the job's page, with the key that opens it; "" where there is no gateway."""
        there = self.gateway
        if there is not None:
            return page_address(there.url, there.key, job_id=self.id)
        return ""

    def __iter__(self) -> Iterator[IterationMetrics]:
        """Yields each iteration once, in order, as soon as it is committed; those that are committed already at once.

        Raises JobFailed at the end of a job that has failed.
        """
        last = -1
        for metrics in self._committed():
            if metrics.iteration > last:  # what a trainer does again after a restart has been yielded
                last = metrics.iteration
                yield metrics
        if self.status.state is JobState.FAILED:
            raise self._failed()

    def _committed(self) -> Iterator[IterationMetrics]:
        if self._is_past:
            yield from self.metrics
            return
        driver = self._follower()
        at = 0
        while True:
            is_over = driver.is_over
            for event in driver.events[at:]:
                at += 1
                if isinstance(event, IterationCommitted):
                    yield event.metrics
            if is_over:
                return
            self._wait(lambda: len(driver.events) > at)  # noqa: B023  (it is called before the next turn)

    def follow(self, view: JobView) -> JobProgress:
        """Shows each event to the view, to the job's end. Raises what ended the stack, or kept the gateway away."""
        driver = self._follower()
        at = 0
        while True:
            is_over = driver.wait_for(lambda: False, TICK_S)
            if (progress := driver.progress) is not None:
                for event in driver.events[at:]:
                    at += 1
                    view.event(event, progress)
                view.refresh(progress)
            if is_over:
                if driver.error is not None:
                    raise driver.error
                assert driver.progress is not None
                return driver.progress

    def result(self, timeout_s: float | None = None) -> JobStatus:
        """Waits for the job's end, and returns its status, also of a job that this program has cancelled.

        Raises JobFailed where it failed, or another has cancelled it; DeadlineExceeded after timeout_s.
        """
        status = self._ended(timeout_s)
        is_wanted = status.state is JobState.CANCELLED and self._was_cancelled
        if status.state is not JobState.SUCCEEDED and not is_wanted:
            raise self._failed()
        return status

    def cancel(self) -> None:
        """Has the job end after the micro-batch in work and a checkpoint; `result` waits for that, and is no error.

        `save_model` writes the version that it came to.
        """
        self._was_cancelled = True
        if self._client is not None:
            self._client.cancel(self.id)
        elif self._driver is not None:
            self._driver.cancel()

    def verify(self) -> AuditVerdict:
        """Waits for the job's end, and checks its audit chain and the weights on disk again.

        Raises JobFailed where it ended before its trainer had begun.
        """
        self._ended(None)
        if self.folder.path.is_dir() and not self.folder.spec.exists():
            raise self._failed()
        if self._client is not None:
            return verify_at(self._client, self.folder)
        return verify_folder(self.folder, self.status, self._entries())

    def save_model(
        self, directory: str | Path, *, version: int | None = None, best: bool = False, adapters: bool = False
    ) -> Any:
        """Waits for the job's end, and writes the trained model as a Hugging Face folder, a new or an empty one.

        version: one that is kept; None takes the newest, or with `best` that of the best held-out score. adapters: LoRA
        adapters as peft has them, not merged. Returns what `onbeat export --json` prints. Raises ContractViolation
        where its digest isn't that of the audit chain.
        """
        from onbeat.export.export import export  # torch is slow to import

        self._ended(None)
        settings = with_run_roots(settings_from(os.environ), self.folder.run_root, self._model_root)
        bring_missing(settings, self.folder)
        spec = read_spec(self.folder)
        return export(
            self.folder,
            spec,
            Path(directory).absolute(),
            model_folder=settings.spec_root.find(spec.model.path, field="model.path"),
            versions=versions_of(entry.record for entry in self._entries()),
            version=version,
            best=best,
            adapters=adapters,
        )

    def export(self, directory: str | Path, *, version: int | None = None, best: bool = False) -> tuple[Any, Any]:
        """Does `save_model`, and loads the folder: (model, tokenizer), of transformers.

        A multi-modal folder is loaded whole, with its towers.
        """
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

        from onbeat.weights.base_model.text_model import text_model
        from onbeat.weights.model_folder import model_config

        saved = self.save_model(directory, version=version, best=best).directory
        auto: Any = AutoModelForCausalLM
        if text_model(model_config(Path(saved))).is_multi_modal:
            auto = AutoModelForImageTextToText
        return auto.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)

    def close(self) -> None:
        """Cancels a job on a stack of its own that has not ended, and returns when nothing of the stack is left."""
        self._shown.pause()
        with uninterrupted():
            if self._driver is not None:
                self._driver.end()
        if self._client is not None:
            self._client.__exit__()

    def _entries(self) -> list[AuditEntry]:
        if self._client is not None:
            return self._client.audit(self.id)
        return read_audit(self.folder)[1]

    def _failed(self) -> JobFailed:
        status = self.status
        cure = None
        if self.folder.trainer_log.exists():
            cure = f"see {self.folder.trainer_log}"
        reason = status.reason or "no reason given"
        if status.state is JobState.CANCELLED:
            reason = f"not by this program: {reason}"
        return JobFailed(f"{status.state.value}: {reason}", field=self.id, cure=cure)

    @property
    def _is_past(self) -> bool:
        """True where neither a stack nor a gateway says anything of the job."""
        return self._client is None and self._driver is None

    def _ended(self, timeout_s: float | None) -> JobStatus:
        if not self._is_past and (self._driver is not None or not self.status.state.is_final):
            self._wait(lambda: False, timeout_s)
        return self.status

    def _follower(self) -> Driver:
        if self._driver is None:
            assert self._access is not None
            self._driver = Driver(lambda _: self.id, self._access)
            self._driver.start()
        return self._driver

    def _wait(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Returns when it is so, or the job has ended; Ctrl-C ends a stack of its own."""
        driver = self._follower()
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not driver.wait_for(is_so, TICK_S):
                # A gateway that has not answered yet is no stack that starts.
                if driver.progress is not None:
                    self._shown.update(driver.progress)
                if until_s is not None and time.monotonic() > until_s:
                    raise DeadlineExceeded(f"waited {timeout_s:g} s for the job's end", field=self.id)
        except KeyboardInterrupt:
            if self._client is None:
                self.close()
            raise
        finally:
            self._shown.pause()
        if driver.error is not None:
            raise driver.error
