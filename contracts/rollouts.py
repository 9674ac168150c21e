"""Prompts out, rollouts back.

A *rollout group* is the G completions of one prompt; a *rollout batch* is the k groups of one prompt batch. The
batch is the unit of dispatch, lease, publication, ledger and micro-batch.

Worked example, k = 2 prompts and G = 2 samples: `PromptBatch.prompts` has 2 entries, the engine answers
`completions[2][2]`, and `RolloutBatch.groups[1].rollouts[0]` is sample 0 of prompt 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.arrays import ITEM_BYTES
from contracts.encoding.digests import Digest, content_digest
from contracts.encoding.wire import Record, encode
from contracts.environments.messages import EnvironmentNumbers, check_environment_numbers
from contracts.errors import ContractViolation
from contracts.rewards import FinishReason, StatedReason, TokenIds
from contracts.sampling import SamplingParams
from contracts.versions import PolicyVersion

Purpose = Literal["train", "evaluation"]
LogProbs = bytes
"""float32[S] of the sampled ones among T tokens, little-endian, natural logarithm."""
KeptSets = bytes
"""The kept set of each of the S sampled tokens, one after another: onbeat/data/kept_sets.py writes and reads it."""
Routes = bytes
"""The experts of each of some tokens, one after another: onbeat/data/routes.py writes and reads it."""
StopReason = Literal["done", "truncated", "max_turns", "max_tokens", "failed"]
"""done         the environment said so
truncated    the environment said so, and that it cut the trajectory before its end
max_turns    environment.max_turns were played
max_tokens   the last turn ended at rollout.sampling.max_new_tokens, or another one has no room in
             environment.max_tokens
failed       the environment failed at the last turn, and environment.on_failure states a score for that"""


class PromptTask(Record, frozen=True, kw_only=True):
    """A prompt that an environment opened."""

    task: str
    """`Task.task`."""
    seed: Annotated[int, Meta(ge=0, lt=2**62)]
    observation_digest: Digest
    """`messages_digest` of the initial observation that the prompt was rendered of: every session must begin with
    it."""


class Prompt(Record, frozen=True, kw_only=True):
    """A prompt, already tokenised: no process downstream tokenises it again."""

    prompt_id: str
    """Stable name in the data set, e.g. "train/4711"."""
    index: Annotated[int, Meta(ge=0)]
    """Position in the iteration; with the seed, the iteration and the sample number it seeds the sampler (I7). The
    reserves of an iteration are counted on after its prompts, so each has a number, and samples, of its own."""
    token_ids: TokenIds
    text: str
    reference: str
    """The reference answer, for the reward."""
    task_entry: str = ""
    """JSON of the task's own entry (a reasoning-gym item), "" where the reference is enough."""
    metadata: str | UnsetType = UNSET
    """JSON of the columns that dataset.metadata_columns names, where it names any."""
    source: str | UnsetType = UNSET
    """Its data set's name in a mixture of several."""
    environment: PromptTask | UnsetType = UNSET
    """The task with which an environment begins the prompt's sessions; unset without an environment."""
    sampler_seed: Annotated[int, Meta(ge=0, lt=2**62)] | UnsetType = UNSET
    """Seed of the first sample where it isn't the prompt's own: that of a later turn of one trajectory."""
    dataset_completion: TokenIds | UnsetType = UNSET
    """The completion that the data set gives, the end-of-sequence token included, where the job learns it."""

    def __post_init__(self) -> None:
        _check_array(self.token_ids, "token_ids", min_items=1)
        if self.dataset_completion is not UNSET:
            _check_array(self.dataset_completion, "dataset_completion", min_items=1)


class Batch(Record, frozen=True, kw_only=True):
    """The name of a batch, and the version that samples it."""

    job_id: str
    batch_id: str
    """`{iteration}/{purpose}/{index}`, unique in the job."""
    iteration: Annotated[int, Meta(ge=0)]
    purpose: Purpose
    policy_version: PolicyVersion
    weights_digest: Digest
    """Asked for; of a batch that was sampled, that of the tensors which the generator had loaded."""
    group_size: Annotated[int, Meta(ge=1)]
    """G, completions per prompt."""


class PromptBatch(Batch, frozen=True, kw_only=True):
    """k prompts to be sampled G times each under one policy version.

    The trainer creates it and puts it in work; the generator that claims it samples it, and nothing changes it.
    """

    sampling: SamplingParams
    seed: int
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1)]
    reserves: tuple[tuple[Prompt, ...], ...] = ()
    """[max_resamples][k]: `reserves[0][place]` is for where the group of `prompts[place]` is of equal reward,
    `reserves[1][place]` for where that of `reserves[0][place]` is too, and so on."""
    routing_replay: Literal[True] | UnsetType = UNSET
    """Set where its completions say which experts their tokens went through (`algorithm.routing_replay`)."""

    def __post_init__(self) -> None:
        if any(len(prompts) != len(self.prompts) for prompts in self.reserves):
            raise ContractViolation("each prompt needs a reserve of its own", field="reserves")

    @property
    def num_completions(self) -> int:
        return len(self.prompts) * self.group_size

    @property
    def is_given(self) -> bool:
        """True where its completions are the data set's, and no engine samples them."""
        return self.prompts[0].dataset_completion is not UNSET

    @property
    def has_kept_sets(self) -> bool:
        """True where its completions say what truncated sampling kept: those that are trained do."""
        return self.purpose == "train" and self.sampling.truncation != ""

    @property
    def has_routes(self) -> bool:
        """True where its completions say which experts their tokens went through: those that are trained do."""
        return self.purpose == "train" and self.routing_replay is not UNSET

    def prompt_at(self, place: int, *, num_resamples: int) -> Prompt | None:
        """Returns the prompt at a place of the batch after so many others there; None beyond the reserves."""
        if num_resamples > len(self.reserves):
            return None
        # Round r of the batch samples rounds[r] at the places that are still open.
        rounds = [self.prompts, *self.reserves]
        return rounds[num_resamples][place]


class Turn(Record, frozen=True, kw_only=True):
    """A turn of the model between two observations: tokens `start` to `end` (exclusive) of a trajectory."""

    start: Annotated[int, Meta(ge=0)]
    end: Annotated[int, Meta(ge=1)]
    finish_reason: FinishReason
    reward: float
    """The reward that the environment gave for the turn."""
    reply_digest: Digest
    """`Played.reply_digest` of what the environment replied; of the turn at which it failed, of the reason."""
    sees_from: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    """The token of the trajectory with which what the model saw began, where the environment had begun anew; left out:
    the prompt."""

    def __post_init__(self) -> None:
        # Half-open: [start, end).
        if self.end <= self.start:
            raise ContractViolation("a turn has one sampled token or more", field="turns")
        if self.sees_from is not UNSET and self.sees_from >= self.start:
            raise ContractViolation("a turn sees one token or more", field="turns")
        check_environment_numbers(self.reward, field="turns")


class Trajectory(Record, frozen=True, kw_only=True):
    """The turns of a completion that an environment answered; between them stand the tokens of its observations."""

    turns: Annotated[tuple[Turn, ...], Meta(min_length=1)]
    stop: StopReason
    attempt: Annotated[int, Meta(ge=1)] = 1
    """How many times it was begun."""
    metrics: EnvironmentNumbers = field(default_factory=dict)
    """Named numbers of the environment's last reply; none of one that failed."""
    failure: StatedReason | UnsetType = UNSET
    """Why the environment failed, where that ended it."""

    def __post_init__(self) -> None:
        if (self.stop == "failed") != (self.failure is not UNSET):
            raise ContractViolation("a trajectory has a reason exactly where it has failed", field="failure")
        check_environment_numbers(*self.metrics.values(), field="metrics")

    @property
    def reward(self) -> float:
        """The sum of what the environment gave, or the score that is stated for its failure."""
        # fsum: the sum of the same rewards in whole has the same bits everywhere.
        return math.fsum(turn.reward for turn in self.turns)


class Completion(Record, frozen=True, kw_only=True):
    """The completion of a prompt: T tokens, of which S were sampled, an end-of-sequence token among them.

    Without an environment it is one turn: all of its tokens were sampled.
    """

    token_ids: TokenIds
    """[T]."""
    generator_logprobs: LogProbs
    """[S] log-probs of the sampled tokens under the distribution that they were sampled from; 0.0 of given ones."""
    finish_reason: FinishReason
    """Why the last turn ended."""
    trajectory: Trajectory | UnsetType = UNSET
    kept_sets: KeptSets | UnsetType = UNSET
    """[S] the tokens that each sampled one was drawn from, of truncated sampling (`PromptBatch.has_kept_sets`)."""
    routes: Routes | UnsetType = UNSET
    """[T - 1, layers, k] the experts of each token but the last one, which was drawn and never went through the model
    (`PromptBatch.has_routes`)."""
    prompt_routes: Routes | UnsetType = UNSET
    """[P, layers, k] the experts of the prompt's tokens; of a group's first completion alone, where it has routes."""

    def __post_init__(self) -> None:
        _check_array(self.token_ids, "token_ids", min_items=1)
        if self.trajectory is not UNSET:
            _check_turns(self.trajectory.turns, num_tokens=self.num_tokens)
        # 4 bytes each, and none for an observation: a log-prob too many would shift all behind it by one token.
        if len(self.generator_logprobs) != ITEM_BYTES * self.num_sampled:
            raise ContractViolation("one log-prob per token that was sampled is needed", field="generator_logprobs")
        # A byte of 0 ends a set, and stands nowhere else.
        if self.kept_sets is not UNSET and (self.kept_sets.count(0), self.kept_sets[-1:]) != (self.num_sampled, b"\0"):
            raise ContractViolation("one kept set per token that was sampled is needed", field="kept_sets")
        if self.routes is not UNSET:
            # The first one divides by 1 where there is no token: then there are no bytes either.
            if len(self.routes) % max(1, self.num_tokens - 1) or bool(self.routes) != (self.num_tokens > 1):
                raise ContractViolation("routes are needed for each token but the last", field="routes")
            if self.trajectory is not UNSET:
                raise ContractViolation("a trajectory has no routes", field="routes")
        elif self.prompt_routes is not UNSET:
            raise ContractViolation("a completion without routes has none of its prompt", field="prompt_routes")

    @property
    def is_truncated(self) -> bool:
        """True where it was cut before it had ended: at the longest of its (last) turn, or by its environment."""
        # The environment's word comes first: its last turn may have ended by itself.
        if self.trajectory is not UNSET and self.trajectory.stop == "truncated":
            return True
        return self.finish_reason == "length"

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the sampled tokens in token_ids, in order."""
        if self.trajectory is UNSET:
            return ((0, self.num_tokens),)
        return tuple((turn.start, turn.end) for turn in self.trajectory.turns)

    @property
    def lines(self) -> tuple[tuple[int, int, int], ...]:
        """(begin, start of the first turn, end) of each part of token_ids that the model saw by itself: the first one
        follows the prompt, each other one begins anew."""
        if self.trajectory is UNSET:
            return ((0, 0, self.num_tokens),)
        # Backwards, so that of the turns that begin with the same token the first one's start stays.
        starts = {turn.sees_from or 0: turn.start for turn in self.trajectory.turns[::-1]}
        ends = [*sorted(starts)[1:], self.num_tokens]
        return tuple((begin, starts[begin], end) for begin, end in zip(sorted(starts), ends, strict=True))

    @property
    def num_tokens(self) -> int:
        """T: sampled tokens and observations."""
        return len(self.token_ids) // ITEM_BYTES

    @property
    def num_sampled(self) -> int:
        """S: the tokens that the model sampled."""
        return sum(end - start for start, end in self.spans)


class Rollout(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A completion with its reward."""

    completion: Completion
    text: str
    """The decoded completion without special tokens, of a trajectory its last turn; for rewards and people, never for
    training."""
    reward: float
    reward_breakdown: dict[str, float]
    """Unweighted score of each reward component, by its name."""
    unscorable: dict[str, StatedReason] = field(default_factory=dict)
    """Names of contracts/stated_scores.py → why that scorer, environment or stage could not judge the completion: their
    scores are the ones that the spec states for that. Stages join where they are taken for training."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ContractViolation("a reward is finite or it is an error", field="reward")


class RolloutGroup(Record, frozen=True, kw_only=True):
    """The G rollouts of one prompt."""

    prompt_id: str
    prompt_index: Annotated[int, Meta(ge=0)]
    prompt_token_ids: TokenIds
    rollouts: Annotated[tuple[Rollout, ...], Meta(min_length=1)]
    num_resamples: Annotated[int, Meta(ge=0)] = 0
    """How many prompts gave this one their place in the batch, since the rewards of their groups were equal."""
    prompt_text: str | UnsetType = UNSET
    """The prompt as text; published only where a stage of the job reads it, and so is the reference."""
    reference: str | UnsetType = UNSET
    """The reference answer."""
    source: str | UnsetType = UNSET
    """`Prompt.source`."""

    def __post_init__(self) -> None:
        _check_array(self.prompt_token_ids, "prompt_token_ids", min_items=1)
        check_routes([rollout.completion for rollout in self.rollouts], self.prompt_token_ids)

    @property
    def has_equal_rewards(self) -> bool:
        """True where the group teaches nothing, so that its place is worth another prompt."""
        # Exactly equal: a difference in the last bit is a difference that a group's deviation blows up.
        return len({rollout.reward for rollout in self.rollouts}) == 1


class BatchTimings(Record, frozen=True, kw_only=True):
    """Unix times in seconds of one batch at its generator; where prompts are resampled, of one round."""

    generation_started_s: float
    generation_ended_s: float
    scoring_started_s: float
    scoring_ended_s: float


class RolloutBatch(Batch, frozen=True, kw_only=True):
    """A complete batch (I1): every prompt has exactly G scored rollouts, all sampled under one version.

    A generator creates it once all of its rollouts are scored, and publishes it. Stage workers read it, and the trainer
    trains it, with their columns.
    """

    generator_id: str
    attempt: Annotated[int, Meta(ge=1)]
    timings: BatchTimings
    """In the last round."""
    earlier_rounds: tuple[BatchTimings, ...] = ()
    """The rounds after which prompts were resampled, in order."""
    groups: Annotated[tuple[RolloutGroup, ...], Meta(min_length=1)]
    columns: dict[str, tuple[bytes, ...]] | UnsetType = UNSET
    """Column → a value for each row, of the job's stages; the trainer puts them beside what a generator published."""

    def __post_init__(self) -> None:
        for group in self.groups:
            if len(group.rollouts) != self.group_size:
                raise ContractViolation(
                    f"prompt {group.prompt_id} has {len(group.rollouts)} rollouts, the batch needs {self.group_size}",
                    field="groups",
                )

    @property
    def rounds(self) -> tuple[BatchTimings, ...]:
        """Each time that the batch was sampled and scored, whole or in part."""
        return (*self.earlier_rounds, self.timings)

    @property
    def num_completions(self) -> int:
        return len(self.groups) * self.group_size

    @property
    def num_sampled(self) -> int:
        """Sampled tokens of the batch; prompts and observations are not counted."""
        return sum(rollout.completion.num_sampled for group in self.groups for rollout in group.rollouts)


def prompt_seed(batch: PromptBatch, prompt: Prompt) -> int:
    """Returns the seed of a prompt's first sample; sample g has this seed + g, as vLLM counts them."""
    if prompt.sampler_seed is not UNSET:
        return prompt.sampler_seed
    # Two bits less than a digest of 64: seed + g stays a signed 64-bit number for every g.
    name = f"{batch.seed}/{batch.iteration}/{batch.purpose}/{prompt.index}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 2


def turn_seed(batch: PromptBatch, prompt: Prompt, *, sample: int, turn: int) -> int:
    """Returns the seed of a turn of one trajectory: turn 0 has that of the sample, the others have their own."""
    first = prompt_seed(batch, prompt) + sample
    if turn == 0:
        return first
    # The same 62 bits as the seed of a sample.
    return int.from_bytes(hashlib.blake2b(f"{first}/{turn}".encode(), digest_size=8).digest(), "little") >> 2


def completion_problem(completion: Completion, prompt: Prompt, batch: PromptBatch) -> str:
    """Says what in a completion isn't what its prompt, and the batch of the prompt, asks for; "" where all is.

    That turns, tokens, log-probs and kept sets fit each other is checked where a completion is made or decoded.
    """
    if batch.has_kept_sets != (completion.kept_sets is not UNSET):
        if not batch.has_kept_sets:
            return "says which tokens were kept, though each could be drawn, or it is not trained"
        return f"doesn't report which tokens {batch.sampling.truncation} kept, so that its log-probs can't be compared"
    if batch.has_routes != (completion.routes is not UNSET):
        if not batch.has_routes:
            return "says which experts its tokens went through, though nothing replays them"
        return "doesn't say which experts its tokens went through, which algorithm.routing_replay replays"
    if prompt.dataset_completion not in (UNSET, completion.token_ids):
        return "is not the one that the data set gives"
    if completion.trajectory is UNSET:
        if prompt.environment is UNSET:
            return ""
        return "is no trajectory, though an environment opened the prompt"
    if prompt.environment is UNSET:
        return "is a trajectory, though no environment opened the prompt"
    # Sampled tokens of a turn; observations between turns don't count.
    longest = max(end - start for start, end in completion.spans)
    if longest > batch.sampling.max_new_tokens:
        return f"has a turn of {longest} tokens, sampling ends at {batch.sampling.max_new_tokens}"
    return ""


def batch_digest(batch: RolloutBatch) -> str:
    """Returns the digest of the samples and their scores: equal for two generators that sampled the same batch (I7).

    Generator id, attempt and timings are left out: they don't change what was sampled.
    """
    # In this order: `encoded_batch` makes the same bytes of a published batch's own encoding.
    identity = (batch.job_id, batch.batch_id, batch.policy_version, batch.weights_digest, batch.groups)
    return content_digest(encode(identity))


def encoded_batch(batch: RolloutBatch) -> tuple[bytes, str]:
    """Returns the batch as it is published, and its `batch_digest`, of one encoding: the samples are megabytes."""
    payload = encode(batch)
    if batch.columns is not UNSET:
        return payload, batch_digest(batch)
    groups_at = len(encode(msgspec.structs.replace(batch, groups=()))) - 1  # the last field; without any it is one byte
    identity = encode((batch.job_id, batch.batch_id, batch.policy_version, batch.weights_digest, ()))
    return payload, content_digest(identity[:-1], memoryview(payload)[groups_at:])


def _check_array(data: bytes, field: str, *, min_items: int) -> None:
    if len(data) % ITEM_BYTES or len(data) < min_items * ITEM_BYTES:
        raise ContractViolation(f"{len(data)} bytes are not {min_items} or more 4-byte items", field=field)


def check_routes(completions: Sequence[Completion], prompt_token_ids: TokenIds) -> None:
    """Raises ContractViolation unless the routes of a group's completions are all there, or none is."""
    first = completions[0].prompt_routes
    if first is UNSET:
        # A completion without routes has none of its prompt.
        if any(completion.routes is not UNSET for completion in completions):
            raise ContractViolation("the first completion of a group has its prompt's routes", field="prompt_routes")
        return
    if any(completion.prompt_routes is not UNSET for completion in completions[1:]):
        raise ContractViolation("only the first completion of a group has its prompt's routes", field="prompt_routes")
    # Bytes of one token: layers * k * (1 or 2).
    token_bytes, rest = divmod(len(first), len(prompt_token_ids) // ITEM_BYTES)
    if rest or not token_bytes:
        raise ContractViolation("routes are needed for each token of the prompt", field="prompt_routes")
    for completion in completions:
        if completion.routes is UNSET or len(completion.routes) != token_bytes * (completion.num_tokens - 1):
            raise ContractViolation(
                f"{token_bytes} bytes of routes are needed for each token but the last", field="routes"
            )


def _check_turns(turns: tuple[Turn, ...], *, num_tokens: int) -> None:
    """Raises ContractViolation unless the turns are those of a trajectory.

    The first turn follows the prompt, none overlaps the one before, and the last ends the trajectory.
    """
    starts = [turn.start for turn in turns]
    ends = [turn.end for turn in turns]
    in_order = all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True))
    seen = [turn.sees_from or 0 for turn in turns]
    # What begins anew does so behind the turn before.
    in_order &= seen[0] == 0 and all(
        now in (before, end) for before, now, end in zip(seen[:-1], seen[1:], ends[:-1], strict=True)
    )
    if starts[0] != 0 or not in_order or ends[-1] != num_tokens:
        raise ContractViolation(
            f"turns {list(zip(starts, ends, strict=True))} are not those of a trajectory of {num_tokens} tokens",
            field="turns",
        )
