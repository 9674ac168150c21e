"""Tables `[rollout]` and `[evaluation]`: what an iteration samples to train on, and to measure a version by."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.wire import MAX_ITERATIONS, Attempts, Batches, IterationsOrNone, Prompts, Record, Tokens
from contracts.probes import MAX_ROWS, MAX_SCORED, MAX_TOKENS
from contracts.sampling import SamplingParams
from contracts.spec.datasets import SourceDataset, SourceName

HELD_OUT = "held_out"
"""The name of the prompts that the job's own data set holds out, where sets have names."""
FEWEST_DEFAULT_ROWS = 4
MOST_DEFAULT_ROWS = 16
FEWEST_SCORED = 2
"""The second is a decoding step's, which may compute with other weights than the prompts went through."""
TOKENS_PER_PROBE_ROW = 3200
"""Tokens that an iteration samples for each row of 32 tokens: a probe is a hundredth of them."""


class ProbeSpec(Record, frozen=True, kw_only=True):
    """The probe of each version: log-probs that a generator's engine shows before it samples with the version (I11)."""

    rows: Annotated[int, Meta(ge=0, le=MAX_ROWS)] | UnsetType = UNSET
    """The number of rows of tokens. Left out: 16, or for a dense model in float32 one row for each 3,200 tokens that an
    iteration samples at most, from 4 to 16. With 0 versions have no probe, and a generator's digest of what it loaded
    is believed."""
    tokens: Annotated[int, Meta(ge=2, le=MAX_TOKENS)] = 32
    """The number of tokens of a row, at most one less than the job's longest row: the beginning of a prompt, then
    random tokens. The last 4 of them are compared, but never more than half of the row. For a dense model in float32
    they are at most half of max_new_tokens, and at least 2."""
    max_gap: Annotated[float, Meta(ge=0.0, le=100.0)] | UnsetType = UNSET
    """The largest gap that a log-prob may have, divided by one plus its size. Left out: 0.001 in float32, 0.02 in
    float16, 0.1 in bfloat16, and 0.5 for a mixture of experts in either of the last two. An engine that quantizes needs
    a larger one."""


class ProbeShape(NamedTuple):
    """The shape of a job's probes. `RolloutSpec.probe_shape` makes it."""

    num_rows: int
    """0: versions have none."""
    most_scored: int
    """Most tokens of a row that are compared; half of a short row are fewer."""


class RolloutSpec(Record, frozen=True, kw_only=True):
    """The batches that an iteration samples."""

    batches_per_iteration: Batches = 8
    """The number of rollout batches of an iteration. A batch is what a generator claims, samples and publishes as a
    whole."""
    prompts_per_batch: Prompts = 4
    """k, the number of prompts of a batch. 1 suits an engine with continuous batching; for a small model on a CPU take
    4-16."""
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 8
    """G, the number of completions of each prompt."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=128))
    """How completions are drawn."""
    max_prompt_tokens: Tokens = 1024
    """The longest prompt. A longer one fails the job at its start, unless it is filtered."""
    filter_overlong_prompts: bool | UnsetType = UNSET
    """Leaves out longer training prompts, and with loss = "sft" completions longer than sampling.max_new_tokens. The
    trainer's log counts them. Left out: false."""
    max_resamples: Annotated[int, Meta(ge=0, le=16)] = 0
    """DAPO's dynamic sampling: how often a prompt whose completions all have the same reward is replaced by a fresh
    one, under the same version. A group that is still equal after the last time stays."""
    max_attempts: Attempts = 3
    """How often a batch is tried before it is given up as dead. If an exception of code that isn't Onbeat's repeats
    word for word, numbers aside, the second attempt is the last."""
    on_failed_batch: Literal["fail", "abandon"] = "fail"
    """Decides what a dead batch does to the job. fail: the job fails. abandon: the job goes on without the batch, which
    is counted and named in the audit record."""
    hedge: bool = True
    """Lets an idle generator of a deterministic job sample a copy of a late batch. The copy that is published first
    counts."""
    probe: ProbeSpec | UnsetType = UNSET
    """The log-probs that an engine has to show of each version. Left out: 4 to 16 rows of at most 32 tokens."""

    @property
    def version_probe(self) -> ProbeSpec:
        """The probe of each version, as the spec says it or by default."""
        return self.probe or ProbeSpec()

    @property
    def has_probes(self) -> bool:
        """True where each version has a probe."""
        return self.version_probe.rows != 0

    def probe_shape(self, *, is_rough: bool) -> ProbeShape:
        """Returns the shape of the job's probes, as the spec says it or by the size of the job.

        Args:
            is_rough: `contracts.probes.is_rough` of the model. Such a probe has many log-probs in any job: by few of
                them a version isn't told from the one before, and experts aren't reached.
        """
        num_completions = self.prompts_per_iteration * self.group_size
        num_rows = num_completions * self.sampling.max_new_tokens // TOKENS_PER_PROBE_ROW
        num_rows = min(MOST_DEFAULT_ROWS, max(FEWEST_DEFAULT_ROWS, num_rows))
        # Each scored token but the first is a decoding step of an engine: no more than half of what the job decodes.
        most_scored = min(MAX_SCORED, max(FEWEST_SCORED, self.sampling.max_new_tokens // 2))
        if is_rough:
            num_rows = MOST_DEFAULT_ROWS
            most_scored = MAX_SCORED
        rows = self.version_probe.rows
        if rows is not UNSET:
            num_rows = rows
        return ProbeShape(num_rows=num_rows, most_scored=most_scored)

    @property
    def prompts_per_iteration(self) -> int:
        return self.batches_per_iteration * self.prompts_per_batch


class HeldOutSpec(Record, frozen=True, kw_only=True):
    """How some held-out prompts are sampled."""

    num_prompts: Annotated[int, Meta(ge=0, le=2**18)] = 64
    """The number of held-out prompts of an evaluation. With 0 there are none, whatever the other keys are."""
    prompts_per_batch: Prompts = 32
    """Prompts of one evaluation batch."""
    greedy: bool = True
    """Also evaluates greedy decoding, in addition to sampling."""
    group_size: Annotated[int, Meta(ge=1, le=4096)] | UnsetType = UNSET
    """The number of samples of each held-out prompt, from which mean, pass@k and their standard errors are computed.
    Left out: 1."""
    sampling: SamplingParams | UnsetType = UNSET
    """How held-out prompts are sampled. Left out: as training samples are (rollout.sampling)."""
    pass_reward: Annotated[float, Meta(ge=-1e6, le=1e6)] | UnsetType = UNSET
    """The reward from which a completion counts as passed, for pass@k. Left out: 1.0."""

    def sampled_as(self, rollout: RolloutSpec) -> SamplingParams:
        """Returns how held-out prompts are sampled, greedy decoding apart."""
        return self.sampling or rollout.sampling

    @property
    def num_samples(self) -> int:
        """Samples a prompt, greedy decoding apart."""
        return 1 if self.group_size is UNSET else self.group_size

    @property
    def num_passes(self) -> int:
        """How often each prompt is asked: sampled, then greedily."""
        return 2 if self.greedy else 1


class EvaluationSet(HeldOutSpec, frozen=True, kw_only=True):
    """Held-out prompts in addition to those of `dataset`; the job's `environment` plays them, too."""

    name: SourceName
    """The name of the set in scores, and in `sources` of a reward component."""
    dataset: SourceDataset
    """The data set of the set: any type but a mixture. Only the rows that it holds out are used: they are evaluated and
    never trained. If num_prompts is as large as a file, the whole file is held out."""


class StopSpec(Record, frozen=True, kw_only=True):
    """Ends a job early, as succeeded, with the version that was evaluated last; contracts/stopping.py decides."""

    held_out: Annotated[float, Meta(ge=-1e9, le=1e9)] | UnsetType = UNSET
    """The job ends once the mean held-out reward is this high. Left out: no reward ends it."""
    patience: Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)] | UnsetType = UNSET
    """The job ends after this number of evaluations in a row that are no better than the best one before them. Left
    out: it never ends so."""


class EvaluationSpec(HeldOutSpec, frozen=True, kw_only=True):
    """Held-out prompts, generated by the same generators under the same version; always before and after training."""

    every_iterations: IterationsOrNone = 0
    """Evaluates every N iterations, too. With 0 the job evaluates only before and after training."""
    stop_when: StopSpec | UnsetType = UNSET
    """Ends the job before its last iteration, depending on its evaluations. Left out: it trains all iterations."""
    sets: Annotated[tuple[EvaluationSet, ...], Meta(min_length=1, max_length=16)] | UnsetType = UNSET
    """Further held-out prompts, with scores of their own."""
    best: SourceName | UnsetType = UNSET
    """The set that decides which checkpoint is best, whether a score collapses, and when stop_when ends the job. Left
    out: the prompts that `dataset` holds out."""

    @property
    def each(self) -> dict[str, HeldOutSpec]:
        """Name → set, in the order in which they are sampled; what `dataset` holds out is HELD_OUT."""
        return {HELD_OUT: self, **{held_out.name: held_out for held_out in self.sets or ()}}

    @property
    def tables(self) -> dict[str, SourceDataset]:
        """Name of a set → its data set, of those that have one of their own."""
        return {held_out.name: held_out.dataset for held_out in self.sets or ()}

    def field_of(self, name: str) -> str:
        """Where the spec says how a set of `each` is evaluated."""
        if name in self.tables:
            return f"evaluation.sets[{[*self.tables].index(name)}]"
        return "evaluation"

    @property
    def num_batches(self) -> int:
        """Batches of one evaluation, of all sets."""
        return sum(
            held_out.num_passes * math.ceil(held_out.num_prompts / held_out.prompts_per_batch)
            for held_out in self.each.values()
        )
