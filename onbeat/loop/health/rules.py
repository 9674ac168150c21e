"""The rules of a job's health: a table, each rule a function of its history.

A rule answers what is seen, in numbers, or "" while all is well. It looks at WINDOW iterations, so that it is silent
over what is noise; a job that has solved its task is well, though its groups are equal and its gradient is 0.

Most rules compare with how the job began. What was wrong from its first iteration on would never show by that: the
absolute rules say it, after the first few iterations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore, HealthProblem
from contracts.spec.job import JobSpec
from contracts.spec.kinds import ADVANTAGE_KINDS
from contracts.spec.trainer import HEALTH_RULES
from onbeat.loop.health.history import NUM_FIRST, WINDOW, History

EQUAL_SHARE = 0.9
GONE_SHARE, GONE_NATS = 0.1, 0.05
"""Entropy is gone below both: of what it was at first, and a token."""
RISEN, MOST_TRUNCATED = 0.2, 0.25
LEFT_SHARE = 0.1
"""Effective share of a response's samples below which its weight is noise."""
LEFT_TOKEN_SHARE = 0.5
"""The same of a token's."""
MOST = 0.5
"""Share of the completions that are cut, or that can't be judged, from which a job has that from the beginning."""
EXACT_K3 = 1e-7
"""A K3 a token that no rounding of float32 explains: engines that compute the same thing have some 1e-13, a gap of
about 5e-7 a log-prob. This is one of 5e-4."""
ROUNDED_K3 = 1e-2
"""A K3 a token that no rounding of 16 bits explains, nor other kernels: engines that compute the same thing in bfloat16
have 1e-5 to 1e-3. This is a gap of 0.14 a log-prob."""


class HealthCheck(NamedTuple):
    """A rule of health as a trainer checks it after each iteration: what it sees, and what a person does about it."""

    name: str
    """Its name among HEALTH_RULES, which has it in words for people."""
    sees: Callable[[History], str]
    cure: str | Callable[[History], str]
    """A function where it depends on the cause."""
    num_iterations: int = WINDOW
    """As many as it needs to see."""

    def cure_for(self, history: History) -> str:
        return self.cure if isinstance(self.cure, str) else self.cure(history)


def _reward(history: History) -> str:
    if not history.has_collapsed or history.before is None:
        return ""
    reward, iteration = history.before
    now = history.mean("reward_mean")
    return f"{now:.3g} on average over {WINDOW} iterations, after {reward:.3g} up to iteration {iteration}"


def _score(history: History) -> str:
    best, now = history.best_score, history.score
    if best is None or now is None or now.sampled >= history.bound_of(best.sampled, best.num_prompts):
        return ""
    return f"{now.sampled:.3g} under version {now.policy_version}, after {best.sampled:.3g} under {best.policy_version}"


def _groups(history: History) -> str:
    share = history.mean("zero_advantage_share")
    compares = ADVANTAGE_KINDS[history.spec.algorithm.advantage].compares_groups
    if not compares or share < EQUAL_SHARE or history.is_solved:
        return ""
    reward = history.mean("reward_mean")
    return f"{share:.0%} of the groups of {WINDOW} iterations have equal rewards, {reward:.3g} on average"


def _entropy(history: History) -> str:
    now, began, alarm = history.mean("entropy"), history.began("entropy"), history.spec.trainer.entropy_alarm
    if now >= (alarm or min(GONE_NATS, GONE_SHARE * began)) or (history.is_solved and not alarm):
        return ""
    return f"{now:.2g} nats a token over {WINDOW} iterations, {began:.2g} at first: samples are nearly the same"


def _kl(history: History) -> str:
    now, alarm = history.loss_mean("kl_to_reference"), history.spec.trainer.kl_alarm or math.inf
    if now > alarm:
        return f"{now:.3g} a token over {WINDOW} iterations, above trainer.kl_alarm of {alarm:g}"
    return ""


def _gradient(history: History) -> str:
    # An external trainer may say nothing of its gradient; equal groups have their own rule.
    is_explained = history.spec.trainer.external or history.is_solved or bool(_groups(history))
    if is_explained or any(metrics.grad_norm for metrics in history.recent):
        return ""
    return f"0 in {WINDOW} iterations, though rewards differ"


def _mismatch(history: History) -> str:
    k3, limit = history.mean("mismatch_k3"), history.spec.trainer.mismatch_limit
    if history.spec.schedule_rule.lags:
        return ""
    left, tokens = _left_share(history), history.mean("response_tokens_mean")
    if k3 > limit:
        return f"K3 of {k3:.3g} a token over {WINDOW} iterations, above trainer.mismatch_alarm of {limit:g}"
    if left < LEFT_SHARE:
        return f"K3 of {k3:.3g} a token leaves {left:.1%} of the samples' worth at {tokens:.0f} tokens a response"
    return ""


def _truncations(history: History) -> str:
    now, began = history.mean("truncated_share"), history.began("truncated_share")
    if now < max(MOST_TRUNCATED, began + RISEN) or history.is_solved or _cut(history):
        return ""
    return f"{now:.0%} of the completions of {WINDOW} iterations reach max_new_tokens, {began:.0%} at first"


def _cut(history: History) -> str:
    now, began = history.mean("truncated_share"), history.began("truncated_share")
    sampling = history.spec.rollout.sampling
    are_meant_to_be = (sampling.min_new_tokens or 0) >= sampling.max_new_tokens
    if min(now, began) < MOST or are_meant_to_be or history.is_solved:
        return ""
    limit = f"rollout.sampling.max_new_tokens = {sampling.max_new_tokens}"
    return f"{now:.0%} of the completions reach {limit}, {began:.0%} in the first iterations"


def _unscorable(history: History) -> str:
    share = history.share("num_unscorable")
    if share < MOST:
        return ""
    return (
        f"{share:.0%} of the completions of {len(history.recent)} iterations have a stated score in place of their own"
    )


def _unusual(history: History) -> str:
    """Without a lag the version that is trained has sampled: what is left of a gap is what the job's dtype rounds."""
    spec = history.spec
    k3 = history.median("mismatch_k3")
    if not spec.samples_what_it_trains or (history.is_full and _mismatch(history)):
        return ""
    if spec.samples_as_trained:
        limit, usual = EXACT_K3, "compute the same in float32 have about 1e-13"
    else:
        # A job whose engine samples with fewer bits than the trainer has says so by the alarm.
        limit, usual = max(ROUNDED_K3, spec.trainer.mismatch_limit), "round to 16 bits have at most 1e-3"
    if k3 <= limit:
        return ""
    return f"K3 of {k3:.2g} a token, where engines that {usual}"


def _cure_of_groups(history: History) -> str:
    if _cut(history):
        return (
            f"raise rollout.sampling.max_new_tokens above {history.spec.rollout.sampling.max_new_tokens} first: a "
            "completion that is cut before its answer has no reward to differ by"
        )
    if _unscorable(history):
        return f"let them be judged first: {UNJUDGED}"
    return (
        "take prompts of which some samples are right and some wrong, a reward with steps in between, a larger "
        "rollout.group_size, or rollout.max_resamples"
    )


def _lag(history: History) -> str:
    """Weights of whole responses lose worth with their length; weights of tokens lose theirs token by token."""
    if not history.spec.schedule_rule.lags:
        return ""
    k3, lag = history.mean("mismatch_k3"), history.mean("lag_mean")
    algorithm = history.spec.algorithm
    by_token = algorithm.correction not in (None, "none") and algorithm.correction_level == "token"
    left = history.mean("effective_sample_share") if by_token else _left_share(history)
    if left >= (LEFT_TOKEN_SHARE if by_token else LEFT_SHARE):
        return ""
    tokens = "a token" if by_token else f"at {history.mean('response_tokens_mean'):.0f} tokens a response"
    return f"a mean lag of {lag:.2g} with K3 of {k3:.3g} a token leaves {left:.1%} of the samples' worth {tokens}"


def _left_share(history: History) -> float:
    """e^(-2 K3 T), of a response of the mean length (docs/numbers.md)."""
    return math.exp(-2.0 * history.mean("mismatch_k3") * history.mean("response_tokens_mean"))


UNJUDGED = (
    "each audit record counts the reasons (unscorable), the reward service's log has the first of each; correct the "
    "reward, stage or environment that they name"
)
SLOWER = "a lower optimizer.learning_rate, more optimizer.warmup_iterations, or algorithm.kl_coefficient above 0"
BACK = "cancel it, keep the best version (onbeat export JOB DIR --version N), and submit it again with "
HEALTH_CHECKS = (
    HealthCheck("reward_collapsed", _reward, BACK + SLOWER),
    HealthCheck(
        "score_collapsed", _score, f"compare it with the reward: where that still rises it is gamed; else {SLOWER}"
    ),
    HealthCheck("groups_equal", _groups, _cure_of_groups),
    HealthCheck(
        "entropy_gone", _entropy, "raise algorithm.entropy_coefficient or the sampling temperature, or clip_high"
    ),
    HealthCheck("kl_high", _kl, "raise algorithm.kl_coefficient, or lower optimizer.learning_rate"),
    HealthCheck(
        "gradient_dead", _gradient, "look at corrected_share, clip_share, on_truncated: what they drop has no loss"
    ),
    HealthCheck(
        "mismatch_high",
        _mismatch,
        "give generators and trainer one dtype and the same kernels, or set algorithm.correction (docs/numbers.md)",
    ),
    HealthCheck(
        "truncations_rising",
        _truncations,
        "raise rollout.sampling.max_new_tokens, add the reward overlong, or set algorithm.on_truncated",
    ),
    HealthCheck("lag_too_large", _lag, "lower max_policy_lag or optimizer.learning_rate, or set algorithm.correction"),
    HealthCheck(
        "completions_cut",
        _cut,
        "raise rollout.sampling.max_new_tokens; where the model doesn't end its answers by itself, look at the end "
        "tokens of its generation_config.json, or set rollout.sampling.stop",
        NUM_FIRST,
    ),
    HealthCheck("completions_unscorable", _unscorable, f"look why: {UNJUDGED}", NUM_FIRST),
    HealthCheck(
        "mismatch_unusual",
        _unusual,
        "look for what generators compute otherwise than the trainer: another folder or release of the model, other "
        "kernels (TF32), changed weights (docs/numbers.md)",
        num_iterations=1,
    ),
)
assert [check.name for check in HEALTH_CHECKS] == list(HEALTH_RULES)


class Health:
    """A job's health after each iteration. Pure: a replay comes to the same."""

    def __init__(self, spec: JobSpec) -> None:
        self._history = History(spec)
        self._problems: dict[str, HealthProblem] = {}
        self._past: dict[str, HealthProblem] = {}
        """Rule that is kept → the problem that was the last one by it."""

    @property
    def past(self) -> tuple[HealthProblem, ...]:
        """The problems that are gone: of each rule that is kept the newest, in the order in which they went."""
        return tuple(self._past.values())

    def score(self, score: EvaluationScore) -> None:
        """Takes a held-out score, before the metrics of its iteration."""
        self._history.add_score(score)

    def iteration(self, metrics: IterationMetrics) -> tuple[HealthProblem, ...]:
        """Takes the next iteration; what is wrong after it, as it was when that began."""
        self._history.add(metrics)
        history = self._history
        problems = {check: self._sees(check) for check in HEALTH_CHECKS}
        before = self._problems
        self._problems = {
            check.name: before.get(check.name)
            or HealthProblem(rule=check.name, since=metrics.iteration, problem=problem, cure=check.cure_for(history))
            for check, problem in problems.items()
            if problem
        }
        for name in self._problems:
            self._past.pop(name, None)
        for name, problem in before.items():
            if name not in self._problems:
                self._past[name] = replace(problem, until=metrics.iteration)
        return tuple(self._problems.values())

    def _sees(self, check: HealthCheck) -> str:
        """Returns the number that a check sees, in words; "" before there are enough iterations for it."""
        is_due = self._history.is_full if check.num_iterations == WINDOW else self._history.has(check.num_iterations)
        return check.sees(self._history) if is_due else ""
