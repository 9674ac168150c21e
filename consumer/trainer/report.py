"""The reports of a run: lines of its log and of its folder, held-out scores, an alarm about log-probs."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

from consumer.gradient.statistics import BatchStats, joined
from consumer.gradient.terms.policy import num_clipped
from consumer.model.policy import Policy
from consumer.trackers.background import Trackers, tracker_makers
from contracts.encoding.json_lines import json_lines
from contracts.encoding.wire import Record
from contracts.events import IterationMetrics, MismatchAlarm, TimelineSpan
from contracts.jobs import EvaluationScore, passes_in_words
from contracts.run_folder import RunFolder
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.job import JobSpec
from onbeat.base.process.folders import usable
from onbeat.base.telemetry.observing import observed
from onbeat.loop.trained_job import append_lines, begin_folder
from onbeat.recording.records import RecordedSample

LIKELY_CAUSES = (
    "likely causes: another dtype or other kernels in the generator, a logits processor of the engine, "
    "weights that were changed after they were hashed"
)
NOISE_SHARE = 0.01
"""Share of tokens from which `clipped_noise` is worth a warning."""

T = TypeVar("T", bound=Record)

log = logging.getLogger(__name__)


def log_run(job_id: str, spec: JobSpec, policy: Policy, *, first: int | None, num_ranks: int = 1) -> None:
    """Logs the job, its model, the device and the versions of libraries; the JSON form has them as fields.

    Args:
        job_id: The job's.
        spec: The job's.
        policy: The policy with all that is trained in it.
        first: The iteration that this trainer begins with; None where all are committed.
        num_ranks: The ranks of the trainer.
    """
    rollout = spec.rollout
    loss = spec.algorithm.loss
    if not isinstance(loss, str):
        loss = loss.entry_point
    start = "every iteration is committed"
    if first is not None:
        start = f"starts at iteration {first} of {spec.iterations}"
    shape = (rollout.batches_per_iteration, rollout.prompts_per_batch, rollout.group_size)
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    trained = sum(parameter.numel() for parameter in policy.trained_parameters().values())
    versions = {name: version(name) for name in ("onbeat", "torch", "transformers")} | {
        "python": platform.python_version()
    }
    device = str(policy.model.device)
    threads = torch.get_num_threads()
    facts = {"job": job_id, "seed": spec.seed, "parameters": parameters, "device": device, "versions": versions}
    lines = (
        f"job {job_id}, {spec.name}: {spec.iterations} iterations of {' x '.join(map(str, shape))} batches, prompts, "
        f"completions; schedule {spec.schedule}, loss {loss}, "
        f"learning rate {spec.optimizer.learning_rate:g}, seed {spec.seed}",
        f"model {spec.model.path}: {parameters:,} parameters, {trained:,} of them trained, {spec.model.dtype}, "
        f"on {device}, ranks: {num_ranks}, threads each: {threads}",
        ", ".join(f"{name} {number}" for name, number in versions.items()),
        start,
    )
    for line in lines:
        log.info("%s", line, extra={"facts": facts})


def log_iteration(metrics: IterationMetrics, num_iterations: int) -> None:
    """Logs an iteration in one line."""
    log.info(
        "iteration %d of %d: reward %.4g, %d tokens, %.3f s, version %d",
        metrics.iteration,
        num_iterations,
        metrics.reward_mean,
        metrics.num_tokens,
        metrics.wall_s,
        metrics.policy_version + 1,
        extra={"facts": {name: getattr(metrics, name) for name in ("reward_mean", "num_tokens", "wall_s")}},
    )


class RunLog:
    """The lines of a run folder, and the job's trackers.

    `run_iterations` creates it, and the commit of each iteration writes to it. A replayed iteration has its lines
    again: readers take the last. Trackers get the numbers of an iteration once.
    """

    def __init__(self, folder: RunFolder, spec: JobSpec) -> None:
        """Creates the folder, and opens the trackers.

        Raises:
            OnbeatError: When the folder, which it names, cannot be made or written.
            InvalidInput: For a tracker that can't be opened.
        """
        self._folder = folder
        begin_folder(folder, spec)
        self._trackers: Trackers | None = None
        if spec.trackers:
            self._trackers = Trackers(
                tracker_makers(spec, folder),
                last_iteration=_last_iteration(folder.metrics, IterationMetrics),
                last_evaluation=_last_iteration(folder.evaluations, EvaluationScore),
            )

    def close(self) -> None:
        """Waits for the trackers, each up to its deadline."""
        if self._trackers is not None:
            observed("the trackers", self._trackers.close)

    def metrics(self, metrics: IterationMetrics) -> None:
        append_lines(self._folder.metrics, [metrics])
        if self._trackers is not None:
            observed("the trackers", partial(self._trackers.iteration, metrics))

    def samples(self, iteration: int, samples: Sequence[RecordedSample]) -> None:
        """Hands completions of a committed iteration to the trackers that show texts."""
        if self._trackers is not None:
            observed("the trackers", partial(self._trackers.samples, iteration, samples))

    def timeline(self, spans: Iterable[TimelineSpan]) -> None:
        append_lines(self._folder.timeline, spans)

    def evaluation(self, score: EvaluationScore) -> None:
        append_lines(self._folder.evaluations, [score])
        greedy = "" if score.greedy is None else f", greedy {score.greedy:.4g}"
        where = f"version {score.policy_version}, {score.num_prompts} held-out prompts"
        greedy += passes_in_words(score)
        log.info("%s: sampled %.4g%s", where, score.sampled, greedy, extra={"facts": {"sampled": score.sampled}})
        if self._trackers is not None:
            observed("the trackers", partial(self._trackers.evaluation, score))


def sampled_scores(folder: RunFolder) -> dict[int, float]:
    """Returns policy version → its held-out score under the job's sampling; the last evaluation of a version counts.

    Raises:
        OnbeatError: When the file, which it names, cannot be read.
    """
    return {score.policy_version: score.sampled for score in _read(folder.evaluations, EvaluationScore)}


def mismatch_alarm(stats: Sequence[BatchStats], *, iteration: int, threshold: float) -> MismatchAlarm | None:
    """Returns an alarm where the mean K3 a token is above the threshold; None up to it.

    The alarm is about the engines, so it counts the batches alone that the trained version sampled: of an older version
    log-probs differ because the policy has moved. It is None, too, where there is no such batch.

    Args:
        stats: The numbers of every training batch before the iteration's step.
        iteration: The iteration's number.
        threshold: Nats a token; 0.0 stands for no difference at all.
    """
    own = [of_batch.mismatch for of_batch in stats if of_batch.lag == 0]
    if not own:
        return None
    gap = joined(own)
    # Written so that a K3 that overflowed to NaN is above every threshold: NaN <= x is False. The K3 of a gap below
    # 1e-8 is lost in rounding, so a threshold of 0 looks at the gap itself.
    distance = gap.k3
    if threshold == 0.0:
        distance = gap.largest
    if distance <= threshold:
        return None
    return MismatchAlarm(
        at_s=time.time(),
        iteration=iteration,
        threshold=threshold,
        mismatch_k3=gap.k3,
        mismatch_max=gap.largest,
        effective_sample_share=gap.effective_sample_share,
    )


def clipped_noise(stats: Sequence[BatchStats], algorithm: AlgorithmSpec) -> str:
    """Says which share of the tokens clips have acted on for the gap between two engines; "" up to NOISE_SHARE.

    Against the generator's log-probs the ratio of a token that the trained version sampled is that gap, and nothing
    else.

    Args:
        stats: The numbers of every training batch before the iteration's step.
        algorithm: The job's.
    """
    if algorithm.old_policy != "generator":
        return ""
    own = [of_batch for of_batch in stats if of_batch.lag == 0]
    num_tokens = sum(of_batch.num_tokens for of_batch in own)
    share = sum(num_clipped(of_batch.term_sums) for of_batch in own) / max(1, num_tokens)
    if share <= NOISE_SHARE:
        return ""
    low, high = algorithm.clip_range
    return (
        f"clips of {low:g} and {high:g} act on {share:.0%} of the tokens that this version has sampled itself, for the "
        'gap between generator and trainer alone; set old_policy = "trainer", or raise clip_low and clip_high'
    )


def in_words(alarm: MismatchAlarm) -> str:
    """Returns an alarm in words: `in iteration 3 trainer and generator log-probs differ by a mean K3 of 0.31 …`"""
    return (
        f"in iteration {alarm.iteration} trainer and generator log-probs differ by a mean K3 of "
        f"{alarm.mismatch_k3:.3g} a token (alarm above {alarm.threshold:g}), at most by {alarm.mismatch_max:.3g}; "
        f"effective sample share {alarm.effective_sample_share:.2f}"
    )


def _last_iteration(path: Path, kind: type[IterationMetrics] | type[EvaluationScore]) -> int:
    return max((record.iteration for record in _read(path, kind)), default=-1)


def _read(path: Path, kind: type[T]) -> Iterator[T]:
    with usable(path, to_be="read"):
        yield from (record for _, record in json_lines(path, kind))
