"""Rates that a person states, as TOML; and the batches that follow from them.

[generator]
tokens_per_s = 4000.0                      # of one generator, with all its rows busy
[trainer]
tokens_per_s = 9000.0                      # of one rank, prompts included
step_s = 0.4
[sync]
publish_s = 1.5
load_s = 2.0
[lengths]
distribution = "lognormal"                 # or equal, or histogram
mean = 600.0
sigma = 0.7

A generator decodes all rows of its batches step by step, and a step takes about as long with few rows as with all of
them: a batch takes the steps of its longest completion. That holds while weights are read more than anything is
computed, as in decoding it mostly is.
"""

from __future__ import annotations

import math
from random import Random
from typing import Annotated

from msgspec import Meta, field

from contracts.encoding.wire import Record
from contracts.spec.job import JobSpec
from onbeat.planning.pipeline.costs import BatchCost, Costs, Round, StepCost, Waits

NUM_DRAWN_COMPLETIONS = 2**17
"""Completions that are drawn to stand for all, as whole batches."""
FEWEST_BATCHES, MOST_BATCHES = 16, 512
FORWARD_SHARE = 1.0 / 3.0
"""The forward part of a trained pass: 2 of 6 operations for each parameter."""
LAN_ROUND_TRIP_S = 0.002
"""A claim, or a published batch on its way to the trainer: measured on loopback, and about the same inside a site."""


NO_STEPS = "given rates have no steps of an environment: a measured job (--from JOB) has them"


Rate = Annotated[float, Meta(gt=0.0, le=1e12)]
"""A second; beyond 10^12 tokens it is a wrong unit."""
Seconds = Annotated[float, Meta(ge=0.0, le=604800.0)]
"""Up to a week, as the longest deadline of a spec."""
Amount = Annotated[float, Meta(ge=0.0, le=1e30)]


class GeneratorRates(Record, frozen=True, kw_only=True):
    """One generator: a process with its devices."""

    tokens_per_s: Rate
    """Sampled tokens a second with all rows busy."""
    completions_at_once: Annotated[int, Meta(ge=0)] = 0
    """Rows: completions that it decodes at the same time; 0: those of one batch, after which it claims the next."""
    score_s: Seconds = 0.01
    """Scoring of one batch, beside the next one's sampling."""


class TrainerRates(Record, frozen=True, kw_only=True):
    """One rank of the trainer: a process with its devices."""

    tokens_per_s: Rate
    """Tokens through the model, forward and backward, prompts included."""
    step_s: Seconds
    """The optimizer's step."""
    checkpoint_s: Seconds = 0.0
    """A checkpoint, where one is due; generators work on meanwhile."""


class SyncRates(Record, frozen=True, kw_only=True):
    """A version's way from the step into the engines."""

    publish_s: Seconds
    """From the step to the announced version."""
    load_s: Seconds
    """From the announcement into a generator's engine, where nothing is sampled meanwhile."""
    swap_s: Seconds | None = None
    """The same where a lag lets a generator receive it beside its sampling; none: as long as `load_s`."""
    switch_s: Seconds = 0.0
    """Under `colocated`, to hand the devices over, once in each direction."""


class LengthRates(Record, frozen=True, kw_only=True):
    """How long completions are."""

    distribution: str
    """equal: each of `mean` tokens; lognormal: with this mean and `sigma`; histogram: `tokens` with `shares`."""
    mean: float = 0.0
    sigma: float = 0.0
    """Standard deviation of the logarithm: 0.5 is mild, 1.0 has a long tail."""
    tokens: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    prompt_tokens: float = 0.0
    """Mean of the prompts, which the trainer reads too: once a group with shared prompts, else once a completion."""
    observation_tokens: float = 0.0
    """Mean of what an environment's observations add to a completion; the trainer reads them too. All other lengths are
    of what is sampled."""


class HardwareRates(Record, frozen=True, kw_only=True):
    """What the devices of one process can do, where it is known: no rate may lie above it."""

    parameters: Amount = 0.0
    """Active ones, of a token."""
    rank_peak_flops: Amount = 0.0
    generator_bytes_per_s: Amount = 0.0
    """Bandwidth of a generator's memory: each decoding step reads all active parameters."""
    bytes_per_parameter: Amount = 2.0


class Rates(Record, frozen=True, kw_only=True):
    """A file of rates."""

    generator: GeneratorRates
    trainer: TrainerRates
    sync: SyncRates
    lengths: LengthRates
    hardware: HardwareRates = field(default_factory=HardwareRates)


def given_costs(spec: JobSpec, rates: Rates, *, seed: int = 0) -> Costs:
    """Draws whole batches of the spec's shape; the rates have been checked (`check_rates`)."""
    draw = Random(seed)
    size = spec.rollout.prompts_per_batch * spec.rollout.group_size
    number = min(MOST_BATCHES, max(FEWEST_BATCHES, NUM_DRAWN_COMPLETIONS // size))
    sync = rates.sync
    return Costs(
        source="given rates",
        warnings=(NO_STEPS,) if spec.environments else (),
        training=tuple(_training_batch(spec, rates, draw) for _ in range(number)),
        evaluation=tuple(_evaluation_batch(spec, rates, draw) for _ in range(FEWEST_BATCHES)),
        steps=(StepCost(step_s=rates.trainer.step_s, publish_s=sync.publish_s),),
        waits=Waits(
            claim_s=LAN_ROUND_TRIP_S,
            load_s=sync.load_s,
            swap_s=sync.load_s if sync.swap_s is None else sync.swap_s,
            arrival_s=LAN_ROUND_TRIP_S,
            take_s=0.0,
            open_s=LAN_ROUND_TRIP_S,
            after_s=LAN_ROUND_TRIP_S,
            checkpoint_s=rates.trainer.checkpoint_s,
        ),
    )


def rows_of(spec: JobSpec, rates: Rates) -> int:
    """Completions that a generator decodes at the same time."""
    return rates.generator.completions_at_once or spec.rollout.prompts_per_batch * spec.rollout.group_size


def draw_length(lengths: LengthRates, draw: Random, *, longest: int) -> int:
    """One completion's tokens, cut off where sampling is."""
    match lengths.distribution:
        case "lognormal":
            location = math.log(lengths.mean) - lengths.sigma**2 / 2
            tokens = draw.lognormvariate(location, lengths.sigma)
        case "histogram":
            tokens = draw.choices(lengths.tokens, weights=lengths.shares)[0]
        case _:
            tokens = lengths.mean
    return max(1, min(longest, round(tokens)))


def _training_batch(spec: JobSpec, rates: Rates, draw: Random) -> BatchCost:
    rollout, trainer = spec.rollout, spec.trainer
    size = rollout.prompts_per_batch * rollout.group_size
    sampled = [draw_length(rates.lengths, draw, longest=spec.max_sampled_tokens) for _ in range(size)]
    num_prompts = rollout.prompts_per_batch if trainer.packing != "padded" else size
    trained = sum(sampled) + num_prompts * rates.lengths.prompt_tokens + size * rates.lengths.observation_tokens
    # A batch of a later mini-batch goes forward once more, for the log-probs of before the first step.
    passes = spec.algorithm.updates_per_iteration + FORWARD_SHARE * (1.0 - 1.0 / spec.algorithm.num_mini_batches)
    return BatchCost(
        rounds=(_round(sampled, spec, rates),),
        train_s=trained / rates.trainer.tokens_per_s * passes,
        num_tokens=sum(sampled),
    )


def _evaluation_batch(spec: JobSpec, rates: Rates, draw: Random) -> BatchCost:
    longest = spec.max_sampled_tokens
    sampled = [draw_length(rates.lengths, draw, longest=longest) for _ in range(spec.evaluation.prompts_per_batch)]
    return BatchCost(rounds=(_round(sampled, spec, rates),), num_tokens=sum(sampled))


def _round(sampled: list[int], spec: JobSpec, rates: Rates) -> Round:
    """Each step of a batch takes one token of every row."""
    step_s = rows_of(spec, rates) / rates.generator.tokens_per_s
    return Round(generate_s=max(sampled) * step_s, score_s=rates.generator.score_s)
