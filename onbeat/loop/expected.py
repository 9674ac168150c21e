"""An open iteration as its trainer sees it: the batches that it expects, those that have come, and their checks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import asdict

from broker.trainer_side import Arrived
from contracts.encoding.names import purpose_of
from contracts.errors import BatchFailed, FenceViolation
from contracts.events import SampledBy
from contracts.jobs import DrawnPrompts, EvaluationScore, PassAt, SetScore
from contracts.rollouts import PromptBatch, RolloutBatch, RolloutGroup, completion_problem
from contracts.spec.rollout import HELD_OUT, EvaluationSpec, HeldOutSpec
from onbeat.loop.sampled import PlayedTrajectories, by_name, mean
from onbeat.loop.window import AskedIteration


class ExpectedIteration:
    """Takes each expected batch once, in any order."""

    def __init__(self, dispatched: AskedIteration) -> None:
        self.number = self.policy_version = dispatched.number
        self.weights_digest = dispatched.weights_digest
        self._dispatched = dispatched
        self._sampler: dict[str, int] = {}
        """Training batch that was taken → the version that sampled it."""
        self.expected: dict[str, PromptBatch] = {batch.batch_id: batch for batch in dispatched.batches}
        self._missing = dict(self.expected)
        self.digests: dict[str, str] = {}
        """Batch id → digest of every batch that was taken."""
        self.columns: dict[str, str] = {}
        """Training batch id → digest of the columns that it is trained with; empty in a job without stages."""
        self.abandoned: dict[str, str] = {}
        """Batch id → reason."""
        self.evaluation: dict[str, RolloutBatch] = {}
        self.unscorable: dict[str, dict[str, int]] = {}
        """Batch id → "name: reason" → completions that got a score which the spec states for what can't be judged."""
        self._num_unscorable: dict[str, int] = {}
        self._rewards: dict[int, list[float]] = {}
        """Index of a trained prompt → the rewards of its group."""
        self.played = PlayedTrajectories()
        """The trained trajectories of a job with an environment."""
        self.in_sums: tuple[int, ...] | None = None
        """As of AuditRecord."""

    @property
    def missing(self) -> list[PromptBatch]:
        """Neither taken nor abandoned, in the order of dispatch."""
        return list(self._missing.values())

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def missing_in_words(self) -> str:
        """`3 of 9 batches of iteration 4 (4/train/1, 4/train/2, …)`"""
        examples = ", ".join(itertools.islice(self._missing, 3))
        if len(self._missing) > 3:
            examples += ", …"
        return f"{len(self._missing)} of {len(self.expected)} batches of iteration {self.number} ({examples})"

    def take(self, arrived: Arrived) -> bool:
        """Returns True where it is the first copy of this batch. Raises FenceViolation for one of another iteration.

        The fence checked the same at publication; before a gradient it is checked again (I2, I3).
        """
        batch = arrived.batch
        self._check(batch)
        known = self.digests.get(batch.batch_id)
        if known is not None and known != arrived.digest:
            raise FenceViolation(f"batch {batch.batch_id} came twice, with different content", field="digest")
        if known is not None or batch.batch_id in self.abandoned:
            return False
        self.digests[batch.batch_id] = arrived.digest
        del self._missing[batch.batch_id]
        self._mark(batch)
        if batch.purpose == "evaluation":
            self.evaluation[batch.batch_id] = batch
        else:
            self._sampler[batch.batch_id] = batch.policy_version
            self.played.add(batch)
        return True

    def put_columns(self, as_trained: RolloutBatch, digest: str) -> None:
        """Records what stages have made of a batch that was taken. digest: of its columns."""
        self.columns[as_trained.batch_id] = digest
        self._mark(as_trained)

    @property
    def num_unscorable(self) -> int:
        """Trained completions that got a stated score, of whatever."""
        return sum(self._num_unscorable.values())

    @property
    def drawn(self) -> tuple[DrawnPrompts, ...]:
        """As of AuditRecord."""
        return self._dispatched.drawn(self._rewards)

    @property
    def pool_shares(self) -> dict[str, float]:
        """Difficulty pool → its share of its source, when the iteration was drawn; {} without any."""
        return {pool: share for pools in self.drawn for pool, share in pools.shares.items()}

    @property
    def sampled(self) -> tuple[SampledBy, ...]:
        """The training batches that older versions sampled, oldest version first."""
        older = sorted(set(self._sampler.values()) - {self.number})
        return tuple(
            SampledBy(
                policy_version=version,
                weights_digest=self._dispatched.samplers[version],
                batches=tuple(sorted(batch_id for batch_id, by in self._sampler.items() if by == version)),
            )
            for version in older
        )

    def all_dead(self) -> BatchFailed:
        """Returns the error for an iteration whose training batches all were given up."""
        causes = [reason for batch_id, reason in self.abandoned.items() if purpose_of(batch_id) == "train"]
        # The cause comes first: a list of jobs shows no more than the first words.
        cause = f"{causes[0]}; so " if causes else ""
        return BatchFailed(f"{cause}every training batch of iteration {self.number} is dead")

    def abandon(self, dead: Mapping[str, str]) -> dict[str, str]:
        """Gives up dead batches, and returns those that it did not know to be dead."""
        new = {batch_id: reason for batch_id, reason in dead.items() if batch_id not in self.abandoned}
        self.abandoned |= new
        for batch_id in new:
            self._missing.pop(batch_id, None)
        return new

    def _check(self, batch: RolloutBatch) -> None:
        expected = self.expected.get(batch.batch_id)
        if expected is None:
            raise FenceViolation(f"batch {batch.batch_id} is not of iteration {self.number}", field="batch_id")
        allowed = self._dispatched.samplers if expected.purpose == "train" else {self.number: self.weights_digest}
        if allowed.get(batch.policy_version) != batch.weights_digest:
            may = ", ".join(f"{version} ({digest[:12]})" for version, digest in sorted(allowed.items()))
            raise FenceViolation(
                f"batch {batch.batch_id} was sampled with version {batch.policy_version} "
                f"({batch.weights_digest[:12]}), what samples it is version {may}",
                field="policy_version",
            )
        asked_for = (expected.purpose, expected.group_size, len(expected.prompts))
        if (batch.purpose, batch.group_size, len(batch.groups)) != asked_for:
            raise FenceViolation(f"batch {batch.batch_id} has another shape than it was asked for", field="groups")
        for place, group in enumerate(batch.groups):
            _check_group(group, place, expected)

    def _mark(self, batch: RolloutBatch) -> None:
        """Notes rewards, and counts the completions that have stated scores; again once stages have added theirs."""
        if batch.purpose == "train":
            self._rewards |= {
                group.prompt_index: [sample.reward for sample in group.rollouts] for group in batch.groups
            }
        replaced = [rollout.unscorable for group in batch.groups for rollout in group.rollouts if rollout.unscorable]
        if not replaced:
            return
        counts = Counter(f"{name}: {reason}" for reasons in replaced for name, reason in reasons.items())
        self.unscorable[batch.batch_id] = dict(sorted(counts.items()))
        if batch.purpose == "train":
            self._num_unscorable[batch.batch_id] = len(replaced)


def _check_group(group: RolloutGroup, place: int, expected: PromptBatch) -> None:
    """Raises FenceViolation unless the place holds its prompt after so many resamples, and was due no further one."""
    prompt = expected.prompt_at(place, num_resamples=group.num_resamples)
    answered = (group.prompt_id, group.prompt_index, group.prompt_token_ids)
    if prompt is None or answered != (prompt.prompt_id, prompt.index, prompt.token_ids):
        raise FenceViolation(
            f"batch {expected.batch_id} answers {group.prompt_id} at place {place} after {group.num_resamples} "
            f"resamples, it was asked {prompt.prompt_id if prompt else 'nothing'} there",
            field="groups",
        )
    if group.has_equal_rewards and group.num_resamples < len(expected.reserves):
        raise FenceViolation(
            f"batch {expected.batch_id} kept the equal rewards of {group.prompt_id}, though place {place} was due "
            "another prompt",
            field="groups",
        )
    for rollout in group.rollouts:
        if problem := completion_problem(rollout.completion, prompt, expected):
            raise FenceViolation(
                f"batch {expected.batch_id} answers {group.prompt_id} with a completion that {problem}", field="groups"
            )


def evaluation_score(
    expected: Collection[PromptBatch], arrived: Mapping[str, RolloutBatch], evaluation: EvaluationSpec
) -> EvaluationScore | None:
    """Mean rewards of sampled and greedy batches, by set; None where the iteration has none of the set that counts.

    expected: the iteration's batches; arrived: its evaluation batches, where an abandoned one is not in the mean.
    """
    batches: dict[str, list[PromptBatch]] = {}
    for batch in expected:
        if batch.batch_id in arrived:
            source = batch.prompts[0].source or ""
            batches.setdefault(source if source in evaluation.tables else HELD_OUT, []).append(batch)
    sets = {name: _set_score(batches.get(name, []), arrived, held_out) for name, held_out in evaluation.each.items()}
    sets = {name: score for name, score in sets.items() if score is not None}
    if (score := sets.pop(best := evaluation.best or HELD_OUT, None)) is None:
        return None
    of_best = [arrived[batch.batch_id] for batch in batches[best] if batch.sampling.temperature > 0.0]
    return EvaluationScore(
        iteration=of_best[0].iteration,
        policy_version=of_best[0].policy_version,
        by_source=(best == HELD_OUT and _by_source(of_best)) or UNSET,
        sets=sets or UNSET,
        **asdict(score),
    )


def _set_score(
    prompts: Sequence[PromptBatch], arrived: Mapping[str, RolloutBatch], held_out: HeldOutSpec
) -> SetScore | None:
    """Returns the score of a set; None where no sampled batch of it has arrived. prompts: of the batches that have."""
    sampled = [arrived[batch.batch_id] for batch in prompts if batch.sampling.temperature > 0.0]
    greedy = [arrived[batch.batch_id] for batch in prompts if batch.sampling.temperature == 0.0]
    if not sampled:
        return None
    pass_reward = 1.0 if held_out.pass_reward is UNSET else held_out.pass_reward
    of_prompts = _rewards_of_prompts(sampled)
    means = [mean(of_prompt) for of_prompt in of_prompts]
    return SetScore(
        sampled=_mean_reward(sampled),
        greedy=_mean_reward(greedy) if greedy else None,
        num_prompts=sum(len(batch.groups) for batch in sampled),
        # Of one prompt no error is known.
        sampled_error=_standard_error(means) if len(means) > 1 else UNSET,
        pass_at=_pass_at(of_prompts, pass_reward) if sampled[0].group_size > 1 else UNSET,
    )


def _by_source(batches: Sequence[RolloutBatch]) -> dict[str, float]:
    """Returns the mean reward of each source; {} without a mixture."""
    groups = [group for batch in batches for group in batch.groups]
    rewards = by_name((group.source, rollout.reward) for group in groups if group.source for rollout in group.rollouts)
    return {name: mean(list(of_source)) for name, of_source in sorted(rewards.items())}


def _rewards_of_prompts(batches: Sequence[RolloutBatch]) -> list[list[float]]:
    """Returns the rewards of each prompt's samples."""
    return [[rollout.reward for rollout in group.rollouts] for batch in batches for group in batch.groups]


def _pass_at(rewards: Sequence[Sequence[float]], pass_reward: float) -> tuple[PassAt, ...]:
    """Returns the pass@k of all prompts. rewards: of each prompt's samples, equally many."""
    size = len(rewards[0])
    passed = [sum(reward >= pass_reward for reward in of_prompt) for of_prompt in rewards]
    pass_at = []
    for k in sorted({size, *(2**power for power in range(size.bit_length()))}):
        # 1 less the chance that k of the n samples, drawn without putting back, are all of the n - c that fail.
        shares = [1.0 - math.comb(size - count, k) / math.comb(size, k) for count in passed]
        pass_at.append(PassAt(k=k, share=math.fsum(shares) / len(shares), error=_standard_error(shares)))
    return tuple(pass_at)


def _standard_error(values: Sequence[float]) -> float:
    """Returns that of their mean, by the unbiased deviation; 0.0 of one value."""
    if len(values) == 1:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _mean_reward(batches: Sequence[RolloutBatch]) -> float:
    return mean([rollout.reward for batch in batches for group in batch.groups for rollout in group.rollouts])
