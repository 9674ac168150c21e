"""A trainer of one's own, for a job with `trainer.external = true`: plain PyTorch, an iteration at a time.

    begin(version t) ─▶ open t ─▶ micro-batches, prefetched ─▶ commit(version t + 1): published, audited, t + 1 opened

    with Consumer("job-1") as consumer:
        model = ...                                  # of consumer.model_folder, or restored from consumer.state
        consumer.begin(model)
        for iteration in consumer:
            for rows in iteration:                   # TrainingRows: whole groups, their rewards, their columns
                loss(rows).backward()
            optimizer.step()
            consumer.commit(loss=..., save=lambda folder: torch.save(optimizer.state_dict(), folder / "optimizer.pt"))

The process holds the job's lease like any trainer. Killed at any time and started again, it goes on at the newest state
of a committed version, also of one whose commit Redis has lost; what was committed after it is taken back by a recorded
rewind. `begin` imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from broker.connection.roles import TRAINER
from contracts.errors import BatchFailed, DeadlineExceeded, Fault, FencedOff, InvalidInput, JobEnded
from contracts.jobs import JobState
from contracts.probes import is_rough
from contracts.schedule import Schedule
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest
from onbeat.client.connection import client_settings
from onbeat.client.probed_tokens import LogProbsOf, packed_logprobs
from onbeat.client.training.arrivals import TrainingIteration, require_taken
from onbeat.client.training.files import TrainerFiles
from onbeat.client.training.tenure import Tenure
from onbeat.data.probe_rows import plain_tokens, probe_rows
from onbeat.data.prompts.prompt_batches import PromptBatches
from onbeat.data.rendering.token_texts import TokenTexts
from onbeat.loop.expected import ExpectedIteration
from onbeat.loop.trained_job import Succession, append_lines, job_prompts
from onbeat.loop.version_probes import VersionProbes
from onbeat.loop.window import Window
from onbeat.weights.model_path import opened_model

if TYPE_CHECKING:
    import torch

    from onbeat.client.training.dataset import RowsDataset
    from onbeat.client.training.published import Versions

log = logging.getLogger(__name__)


class Consumer:
    """The trainer of one job. A context manager, used by one thread."""

    def __init__(
        self,
        job_id: str,
        *,
        max_rows: int = 64,
        lease_timeout_s: float = 60.0,
        redis_url: str = "",
        run_dir: str | Path | None = None,
        settings: StackSettings | None = None,
    ) -> None:
        """max_rows: of a micro-batch, which has whole groups. lease_timeout_s: how long another trainer's lease is
        waited for. redis_url, run_dir, settings: as for `client_settings`; the role is `trainer`.

        Raises NotFound for a job that isn't there, InvalidInput for one that Onbeat's own trainer trains.
        """
        self._settings = client_settings(TRAINER, redis_url=redis_url, run_dir=run_dir, settings=settings)
        self._tenure = Tenure(self._settings, job_id)
        self._max_rows = max_rows
        self._lease_timeout_s = lease_timeout_s
        self._iteration: TrainingIteration | None = None
        self._versions: Versions | None = None
        self._logprobs: LogProbsOf | None = None
        self._probes: VersionProbes | None = None
        self.version = 0
        """The version that `begin` is to be given; 0 is the model in `model_folder`."""
        self.state: Path | None = None
        """The folder that `save` filled for this version; None at version 0."""

    def __enter__(self) -> Consumer:
        try:
            self._tenure.acquire(timeout_s=self._lease_timeout_s)
            self._files = TrainerFiles(self._tenure.folder, self.spec)
            self._find_state()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Gives the lease back. The end of the job from outside, a cancel, ends the `with` quietly."""
        self.close()
        return isinstance(error, JobEnded)

    def close(self) -> None:
        """Gives the lease back; the job goes on in the next trainer."""
        if self._iteration is not None:
            self._iteration.close()
        self._tenure.leave()

    @property
    def spec(self) -> JobSpec:
        return self._tenure.spec

    @property
    def model_folder(self) -> Path:
        """The job's model: config, tokenizer, safetensors, as the job was accepted with them.

        Raises InvalidInput that names model.path and the file where one has changed since.
        """
        with opened_model(self.spec.model, self._settings.spec_root, weights=True) as folder:
            return folder

    def probes(self, logprobs: LogProbsOf) -> None:
        """Gives each version a probe, which generators show before they sample with it (I11). It comes before `begin`.

        Without it versions have none, and a generator's digest of what it has loaded is believed.

        Args:
            logprobs: `logprobs(token_ids, num_scored)` takes int64 [R, T], and returns [R, num_scored]: natural
                logarithms of the last `num_scored` tokens of each row, at temperature 1 over the whole vocabulary,
                under the weights that are published. `begin` and `commit` call it.
        """
        if self._versions is not None:
            raise InvalidInput("comes before `begin`, which publishes the first version", field="probes")
        self._logprobs = logprobs

    def begin(self, weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Publishes version `version`, and opens its iteration, or goes on with it where it is open already.

        weights: a module, or its tensors by their published names; `commit` publishes them as they are then.
        Raises InvalidInput where they are not the version's, not the model's, or the spec's data set can't be read.
        """
        from onbeat.client.training.published import Versions
        from onbeat.recording.recorder import Recorder

        tenure = self._tenure
        self._weights = weights
        self._tenure.recorder = Recorder(self._tenure.folder, self.spec, token_texts=self._token_texts)
        self._tenure.window = Window(
            Schedule("periodic"), self._prompt_batches(), last_iteration=self.spec.last_iteration
        )
        self._versions = Versions(tenure, self.model_folder)
        if self._succession.committed >= self.spec.last_iteration:
            return
        tenure.renew()
        self._tenure.recorder.begin(self.version)
        self._versions.publisher.store.clear_scratch()
        self._probes = self._made_probes()
        manifest = self._probed(self._versions.publish(weights, self.version))
        known = self._succession.versions.get(self.version, manifest.weights_digest)
        if self.version and known != manifest.weights_digest:
            raise InvalidInput(
                f"they have digest {manifest.weights_digest[:12]}, version {self.version} of the job is {known[:12]}",
                field="weights",
                cure=f"restore them from {self.state}, as `commit` was given them",
            )
        self._succession.take_up(manifest)
        self._succession.begin(self.version, self._files.set_aside_after)

    def __iter__(self) -> Iterator[TrainingIteration]:
        """Yields each open iteration, which is to be committed before the next. Where it ends, the job has succeeded.

        Raises JobEnded where the job is cancelled; the lease's FencedOff and Unavailable come from the iterations, too.
        """
        if self._versions is None:
            raise InvalidInput("comes before the first iteration", field="begin", cure="give it the weights")
        while (number := self._succession.next) is not None:
            iteration = self._turn_to(number)
            if number < self.spec.iterations:
                yield iteration
            else:
                self._only_evaluate(iteration)
            if self._succession.next == number:
                raise InvalidInput(f"iteration {number} was not committed", field="commit", cure="call it first")
        self._tenure.check()
        self._tenure.side.confirm(self.spec.last_iteration)
        self._tenure.end(JobState.SUCCEEDED)
        self._versions.publisher.store.remove_all()

    def dataset(self) -> RowsDataset:
        """Returns a torch IterableDataset; each pass over it is the open iteration. It imports torch."""
        from onbeat.client.training.dataset import RowsDataset

        return RowsDataset(self._open_iteration)

    def commit(
        self,
        weights: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
        *,
        loss: float = 0.0,
        grad_norm: float = 0.0,
        learning_rate: float = 0.0,
        save: Callable[[Path], object] | None = None,
    ) -> WeightManifest:
        """Acknowledges the iteration: publishes the next version, writes the audit record, opens the next iteration.

        Once it has returned, nothing of the iteration is sampled again where `save` was given, whatever dies, and also
        where Redis comes back without the commit: the run folder has the state and the records that lead to it.

        weights: None takes those of `begin` as they are now. save: fills a folder with what a restart needs to go on
        with this version; an iteration without it is trained again after a restart. loss, grad_norm, learning_rate: for
        the metrics and the audit record. Raises InvalidInput for an iteration that was not taken to its end.
        """
        iteration = self._open_iteration()
        require_taken(iteration)
        with self._tenure.letting_go():
            return self._commit_taken(
                iteration,
                weights,
                loss=float(loss),
                grad_norm=float(grad_norm),
                learning_rate=float(learning_rate),
                save=save,
            )

    def _commit_taken(
        self,
        iteration: TrainingIteration,
        weights: torch.nn.Module | Mapping[str, torch.Tensor] | None,
        *,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        save: Callable[[Path], object] | None,
    ) -> WeightManifest:
        tenure = self._tenure
        tenure.renew()
        assert self._versions is not None, "no iteration is open before `begin`"
        published = self._versions.publish(self._weights if weights is None else weights, iteration.number + 1)
        manifest = self._probed(published)
        if save is not None:
            self._files.save(manifest, save)
        tenure.renew()
        tenure.side.publish_weights(manifest, oldest_kept=self._tenure.window.oldest_version(iteration.number))
        self._commit(iteration, manifest, loss=loss, grad_norm=grad_norm, learning_rate=learning_rate)
        if save is not None:
            # The state follows from the chain of a server that comes back without this commit.
            self._tenure.chain_file.sync()
        tenure.renew()
        tenure.remove_older(iteration.number)
        self._files.keep_newest()
        return manifest

    def _made_probes(self) -> VersionProbes | None:
        """Makes the probes of the job's versions; None where `probes` was not called, or the spec wants none."""
        logprobs = self._logprobs
        if logprobs is None or not self.spec.rollout.has_probes:
            return None
        import torch

        from onbeat.base.experts import has_experts
        from onbeat.weights.model_folder import context_tokens, empty_model, load_tokenizer, model_config

        config = model_config(self.model_folder)
        # Without values: how the model is made of modules says whether it has experts.
        model = empty_model(self.model_folder, dtype=getattr(torch, self.spec.model.dtype), device="meta")
        is_routed = has_experts(model)
        tokenizer = load_tokenizer(self.model_folder)
        rows = probe_rows(
            self.spec.rollout,
            self._tenure.window.prompt_batches.training_prompts,
            seed=self.spec.seed,
            tokens=plain_tokens(tokenizer, vocabulary_tokens=config.get_text_config().vocab_size),
            longest_tokens=min(context_tokens(config), self.spec.longest_row),
            is_rough=is_rough(self.spec.model.dtype, is_routed=is_routed),
        )
        return VersionProbes(self.spec, rows, partial(packed_logprobs, logprobs), is_routed=is_routed)

    def _probed(self, manifest: WeightManifest) -> WeightManifest:
        return manifest if self._probes is None else self._probes.with_probe(manifest)

    def _find_state(self) -> None:
        """Finds the newest state that follows from the audit chain, and gives Redis back what it lost up to that."""
        self._succession = Succession(self._tenure)
        versions = self._succession.versions
        self.version, self.state = self._files.newest_state(versions) or (0, None)
        if self.state is not None:
            self._succession.go_on_from(self.version, versions[self.version])

    def fail(self, reason: str) -> None:
        """Ends the job as failed, with the reason. `onbeat resume` queues it again."""
        self._tenure.end(JobState.FAILED, reason=reason, fault=Fault.JOB)

    def _token_texts(self) -> TokenTexts:
        from onbeat.weights.model_folder import load_tokenizer

        return TokenTexts(load_tokenizer(self.model_folder))

    def _prompt_batches(self) -> PromptBatches:
        job_id = self._tenure.job_id
        return PromptBatches(job_id, self.spec, job_prompts(self._settings, self.spec, job_id))

    def _turn_to(self, number: int) -> TrainingIteration:
        tenure = self._tenure
        if self._iteration is not None and self._iteration.number == number:
            return self._iteration
        if self._iteration is not None:
            self._iteration.close()
        self._iteration = TrainingIteration(
            tenure,
            ExpectedIteration(tenure.window.turn_to(number)),
            check=tenure.check,
            reread=self._reread,
            max_rows=self._max_rows,
            ended_by=self._arrivals_ended,
        )
        return self._iteration

    def _only_evaluate(self, iteration: TrainingIteration) -> None:
        """The last iteration of a job with an evaluation has nothing to train."""
        for _ in iteration:
            raise AssertionError("an iteration that only evaluates has no training batch")
        self._commit(iteration, None)

    def _commit(
        self,
        iteration: TrainingIteration,
        manifest: WeightManifest | None,
        *,
        loss: float = 0.0,
        grad_norm: float = 0.0,
        learning_rate: float = 0.0,
    ) -> None:
        """Commits an iteration with its numbers and scores.

        Args:
            iteration: The open iteration, of which every batch was taken.
            manifest: The version that the iteration made; None where it only evaluated.
            loss: As for `commit`, like `grad_norm` and `learning_rate`.
        """
        tenure = self._tenure
        expected = iteration.expected
        metrics = None
        if manifest is not None:
            metrics = iteration.numbers.metrics(
                expected,
                trainer_epoch=tenure.side.trainer_epoch,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
            )
            append_lines(tenure.folder.metrics, [metrics])
        evaluations = tenure.folder.evaluations
        self._succession.commit(
            expected, manifest=manifest, metrics=metrics, write_score=lambda score: append_lines(evaluations, [score])
        )
        tenure.recorder.commit(iteration.number)
        tenure.keep_files(iteration.number, has_checkpoint=True)

    def _reread(self, refused: frozenset[str]) -> None:
        for manifest in self._tenure.window.manifests:
            if manifest.directory in refused:
                log.warning("a generator refuses %s: it is read back", manifest.directory)
                self._tenure.check_published(manifest)

    def _arrivals_ended(self, error: BaseException) -> None:
        """Fails the job where our own trainer would, and lets go of the run folder where another trainer has the job.

        The fence says the latter to whichever of the keeper's look and the arrivals' claim comes first.
        """
        if isinstance(error, BatchFailed | DeadlineExceeded):
            self._tenure.end(JobState.FAILED, reason=str(error), fault=error.fault)
        elif isinstance(error, FencedOff):
            self._tenure.leave_files()

    def _open_iteration(self) -> TrainingIteration:
        if self._iteration is None or self._succession.next != self._iteration.number:
            raise InvalidInput(
                "no iteration is open", field="iteration", cure="iterate over the consumer, and commit each one once"
            )
        return self._iteration
