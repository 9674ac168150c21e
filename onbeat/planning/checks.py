"""Refuses rates that make no sense: names the one that does not, and why. Their plan would look like any other."""

from __future__ import annotations

import math

from contracts.errors import InvalidInput
from contracts.spec.job import JobSpec
from onbeat.planning.given import Rates, rows_of
from onbeat.planning.pipeline.costs import Machines

FLOPS_A_PARAMETER = 6.0
"""Forward and backward, of a token (Kaplan et al., arXiv 2001.08361), as in consumer/gradient/cost.py."""
DISTRIBUTIONS = ("equal", "lognormal", "histogram")
MOST_GENERATORS = 4096


def check_rates(spec: JobSpec, rates: Rates) -> None:
    """Raises InvalidInput that names the rate, the reason and the cure."""
    _check_lengths(spec, rates)
    _check_hardware(spec, rates)
    _check_deadlines(spec, rates)


def check_machines(spec: JobSpec, machines: Machines, *, most_open: int) -> None:
    """most_open: iterations that are open at once under the schedule that opens most."""
    number = machines.num_generators
    batches = spec.rollout.batches_per_iteration * most_open
    if not 1 <= number <= MOST_GENERATORS:
        raise InvalidInput(f"{number} generators", field="--generators", cure=f"1 to {MOST_GENERATORS}")
    if machines.completions_at_once == 1 and number > batches:
        raise InvalidInput(
            f"{number} generators for {batches} batches that are open at once: {number - batches} would never have one",
            field="--generators",
            cure="use more and smaller batches (rollout.batches_per_iteration), or fewer generators",
        )
    if machines.num_cores and machines.threads > machines.num_cores:
        raise InvalidInput(
            f"{machines.threads} threads a process on {machines.num_cores} cores slow each other down",
            field="--threads",
            cure="at most the cores",
        )


def _check_lengths(spec: JobSpec, rates: Rates) -> None:
    lengths, longest = rates.lengths, spec.max_sampled_tokens
    if lengths.distribution not in DISTRIBUTIONS:
        raise InvalidInput(
            f"`{lengths.distribution}` is no distribution", field="lengths.distribution", cure=", ".join(DISTRIBUTIONS)
        )
    if not (math.isfinite(lengths.prompt_tokens) and 0.0 <= lengths.prompt_tokens <= spec.rollout.max_prompt_tokens):
        raise InvalidInput(
            f"is {lengths.prompt_tokens:g}, a prompt has up to rollout.max_prompt_tokens = "
            f"{spec.rollout.max_prompt_tokens}",
            field="lengths.prompt_tokens",
        )
    if not (math.isfinite(lengths.observation_tokens) and 0.0 <= lengths.observation_tokens <= _most_observed(spec)):
        raise InvalidInput(
            f"is {lengths.observation_tokens:g}, an environment adds up to {_most_observed(spec)}",
            field="lengths.observation_tokens",
        )
    if lengths.distribution == "histogram":
        _check_histogram(rates, longest, bound=_bound(spec))
        return
    if not (math.isfinite(lengths.mean) and 1.0 <= lengths.mean <= longest):
        raise InvalidInput(
            f"is {lengths.mean:g} tokens, {_bound(spec)} = {longest}",
            field="lengths.mean",
            cure="a mean is from 1 to that; raise max_new_tokens, or lower the mean",
        )
    if lengths.distribution == "lognormal" and not 0.0 < lengths.sigma <= 3.0:
        raise InvalidInput(f"is {lengths.sigma:g}", field="lengths.sigma", cure="above 0, up to 3; 0.5 is mild")
    if lengths.distribution == "equal" and lengths.sigma:
        raise InvalidInput("has no effect where all lengths are equal", field="lengths.sigma", cure="leave it out")


def _most_observed(spec: JobSpec) -> int:
    """Most tokens of a completion that are not sampled: each turn samples one or more."""
    return spec.longest_completion()[1] - 1 if spec.environments else 0


def _bound(spec: JobSpec) -> str:
    """What bounds the sampled tokens of a completion, in words."""
    if not spec.environments:
        return "sampling ends at rollout.sampling.max_new_tokens"
    return "sampling ends by environment.max_turns and environment.max_tokens"


def _check_histogram(rates: Rates, longest: int, *, bound: str) -> None:
    tokens, shares = rates.lengths.tokens, rates.lengths.shares
    if not tokens or len(tokens) != len(shares):
        raise InvalidInput(f"{len(tokens)} lengths with {len(shares)} shares", field="lengths", cure="one share each")
    if min(tokens) < 1 or max(tokens) > longest:
        raise InvalidInput(f"has {max(tokens)} tokens, {bound} = {longest}", field="lengths.tokens")
    if not all(math.isfinite(share) and share >= 0.0 for share in shares) or sum(shares) <= 0.0:
        raise InvalidInput("are 0 or more, and not all 0", field="lengths.shares")


def _check_hardware(spec: JobSpec, rates: Rates) -> None:
    hardware = rates.hardware
    if hardware.parameters and hardware.rank_peak_flops:
        mfu = rates.trainer.tokens_per_s * FLOPS_A_PARAMETER * hardware.parameters / hardware.rank_peak_flops
        if mfu > 1.0:
            raise InvalidInput(
                f"means an MFU of {mfu:.2f}: {rates.trainer.tokens_per_s:g} tokens/s of {hardware.parameters:g} "
                f"parameters are more than {hardware.rank_peak_flops:g} operations a second",
                field="trainer.tokens_per_s",
                cure="give the rate of one rank, and the peak of all its devices",
            )
    if hardware.parameters and hardware.generator_bytes_per_s:
        read = hardware.parameters * hardware.bytes_per_parameter
        most = rows_of(spec, rates) * hardware.generator_bytes_per_s / max(read, 1.0)
        if rates.generator.tokens_per_s > most:
            raise InvalidInput(
                f"is {rates.generator.tokens_per_s:g}: {rows_of(spec, rates)} rows have at most {most:.0f} tokens/s, "
                f"since each step reads {read:g} bytes of weights",
                field="generator.tokens_per_s",
                cure="give the rate of one generator, and the bandwidth of all its devices",
            )


def _check_deadlines(spec: JobSpec, rates: Rates) -> None:
    timeouts = spec.timeouts
    if rates.sync.load_s > timeouts.generation_s:
        raise InvalidInput(
            f"is {rates.sync.load_s:g} s, a generator gives a load up after timeouts.generation_s = "
            f"{timeouts.generation_s:g} s",
            field="sync.load_s",
            cure="raise timeouts.generation_s",
        )
    if rates.sync.publish_s > timeouts.iteration_s:
        raise InvalidInput(
            f"is {rates.sync.publish_s:g} s, a whole iteration has timeouts.iteration_s = {timeouts.iteration_s:g} s",
            field="sync.publish_s",
            cure="check its unit, or raise timeouts.iteration_s",
        )
    longest = spec.max_sampled_tokens if rates.lengths.distribution != "equal" else rates.lengths.mean
    longest_s = longest * rows_of(spec, rates) / rates.generator.tokens_per_s
    if longest_s > timeouts.generation_s:
        raise InvalidInput(
            f"makes {longest:g} tokens take {longest_s:.0f} s, a generator gives a batch up after "
            f"timeouts.generation_s = {timeouts.generation_s:g} s",
            field="generator.tokens_per_s",
            cure="raise timeouts.generation_s, or use smaller batches",
        )
