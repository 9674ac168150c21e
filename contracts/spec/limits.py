"""Tables `[timeouts]` and `[limits]`, how long a job may wait and how much of it may stand in Redis; and products of a
spec's numbers: each factor within its bounds, a job could still ask for more than a stack has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

from msgspec import Meta

from contracts.encoding.wire import MAX_BATCHES, Attempts, Lease, Record, Seconds
from contracts.spec.rollout import EvaluationSpec, RolloutSpec

MAX_BATCH_COMPLETIONS = 2**14
"""A batch is one call of an engine and one message: 1,024 prompts with 16 completions each."""
MAX_BATCH_TOKENS = 2**29
"""As many completions with 32,768 tokens each, of 8 bytes, in a generator's and in the trainer's memory."""
MAX_BATCH_PROMPT_TOKENS = 2**25
"""1,024 prompts of 32,768 tokens. A batch goes out as one field of a hash, which Redis limits to 512 MiB."""
MAX_ITERATION_PROMPT_TOKENS = 2**27
"""All prompts of the open iterations are in Redis at once, as token ids and as text: a gigabyte at most. The bounds of
an iteration are those of all that are open, which are max_policy_lag + 1."""
MAX_ITERATION_COMPLETIONS = 2**20
MAX_ITERATION_TOKENS = 2**32

Longest = tuple[str, int]
"""(field, tokens) that bound a completion."""


class Product(NamedTuple):
    """A product of several keys of a spec, with its bound."""

    factors: str
    """The keys, as `a * b`; the first one is the key at fault."""
    what: str
    """The things that are counted, e.g. "tokens of an iteration"."""
    value: int
    limit: int
    """The most that `value` may be."""
    cure: str


class TimeoutSpec(Record, frozen=True, kw_only=True):
    """Deadlines: nothing waits without one (I8)."""

    generator_lease_s: Lease = 10.0
    """If a generator that has claimed a batch gives no sign of life for this long, another generator gets the batch."""
    trainer_lease_s: Lease = 10.0
    """If a trainer gives no sign of life for this long, another one may replace it."""
    generation_s: Seconds = 1800.0
    """The longest time in which a generator samples a batch (with an environment, a turn of it) or loads a version, or
    in which a stage worker computes an item. After that the process ends, and another one takes its work."""
    iteration_s: Seconds = 3600.0
    """An iteration that takes longer fails the job, which names the missing batches. So does one batch that trains for
    so long. A trainer that hangs in something else is ended `dependency_s` later, and another goes on; while it loads,
    it has an hour at least."""
    no_generator_s: Seconds = 120.0
    """If no live generator can serve the job for this long, the job fails."""
    no_stage_worker_s: Seconds = 120.0
    """If work waits at a stage and no live worker can serve the stage for this long, the job fails."""
    dependency_s: Seconds = 600.0
    """The longest wait for a service that no process of the job reaches, such as the reward service or a judge. The
    wait costs a batch no attempt. After it the job fails and names the service."""
    ranks_s: Seconds = 600.0
    """The longest time that a rank of the trainer waits for the others at what all ranks do together. After it another
    trainer starts."""
    max_trainer_starts: Attempts = 5
    """How many trainers may start without progress between them. Progress is the commit of an iteration that wasn't
    committed before. If an exception of code that isn't Onbeat's repeats word for word, numbers aside, the second start
    is the last."""


class LimitSpec(Record, frozen=True, kw_only=True):
    """Sizes that bound the memory of a job in Redis."""

    max_batch_bytes: Annotated[int, Meta(ge=1024, le=536870912)] = 16 * 1024 * 1024
    """The most bytes of an encoded rollout batch; a larger one is refused as oversize. Redis has at most the batches of
    max_policy_lag + 1 iterations."""
    max_waiting_rows: Annotated[int, Meta(ge=1, le=2**20)] = 65536
    """The most published completions that may wait for columns of `stages`. A batch beyond it stays with its generator
    until the stages catch up. One batch is always taken."""


def products(
    rollout: RolloutSpec, evaluation: EvaluationSpec, *, num_open: int, longest: Longest, given_tokens: int = 0
) -> Iterator[Product]:
    """Yields each product of a job's numbers that has a bound.

    Args:
        num_open: Iterations in Redis at once.
        longest: The key that bounds a completion, and its tokens.
        given_tokens: Tokens of the longest completion that goes out with its prompt.
    """
    yield from _of_a_batch(rollout, evaluation, longest, given_tokens)
    for product in _of_an_iteration(rollout, evaluation, longest, given_tokens):
        if num_open == 1:
            yield product
            continue
        yield product._replace(
            factors=f"{product.factors} * (max_policy_lag + 1), which is {num_open},",
            value=product.value * num_open,
            cure=f"{product.cure}, or lower max_policy_lag",
        )


def _of_a_batch(
    rollout: RolloutSpec, evaluation: EvaluationSpec, longest: Longest, given_tokens: int
) -> Iterator[Product]:
    completions, (field, tokens) = rollout.prompts_per_batch * rollout.group_size, longest
    sampled = "rollout.prompts_per_batch * rollout.group_size"
    cure = "use more and smaller batches"
    yield Product(sampled, "completions of a batch", completions, MAX_BATCH_COMPLETIONS, cure)
    sampled += f" * {field}"
    yield Product(sampled, "tokens of a batch", completions * tokens, MAX_BATCH_TOKENS, cure)
    for name, held_out in evaluation.each.items():
        evaluated, key = held_out.prompts_per_batch * held_out.num_samples, evaluation.field_of(name)
        sampled, lower = f"{key}.prompts_per_batch * {key}.group_size", f"lower {key}.prompts_per_batch"
        yield Product(sampled, "completions of an evaluation batch", evaluated, MAX_BATCH_COMPLETIONS, lower)
        yield Product(
            f"{sampled} * {field}", "tokens of an evaluation batch", evaluated * tokens, MAX_BATCH_TOKENS, lower
        )
        yield Product(
            f"{key}.prompts_per_batch * rollout.max_prompt_tokens",
            "prompt tokens of an evaluation batch",
            held_out.prompts_per_batch * rollout.max_prompt_tokens,
            MAX_BATCH_PROMPT_TOKENS,
            f"lower max_prompt_tokens to what the data need, or {key}.prompts_per_batch",
        )
    yield Product(
        "rollout.prompts_per_batch * (1 + rollout.max_resamples) * rollout.max_prompt_tokens",
        "prompt tokens of a batch",
        rollout.prompts_per_batch * ((1 + rollout.max_resamples) * rollout.max_prompt_tokens + given_tokens),
        MAX_BATCH_PROMPT_TOKENS,
        "lower max_prompt_tokens to what the data need, or use smaller batches",
    )


def _of_an_iteration(
    rollout: RolloutSpec, evaluation: EvaluationSpec, longest: Longest, given_tokens: int
) -> Iterator[Product]:
    field, tokens = longest
    completions = rollout.prompts_per_iteration * rollout.group_size
    sampled = "rollout.batches_per_iteration * rollout.prompts_per_batch * rollout.group_size"
    cure = "sample less in an iteration"
    yield Product(sampled, "completions of an iteration", completions, MAX_ITERATION_COMPLETIONS, cure)
    sampled += f" * {field}"
    yield Product(sampled, "tokens of an iteration", completions * tokens, MAX_ITERATION_TOKENS, cure)
    keys = [evaluation.field_of(name) for name in evaluation.each]
    yield Product(
        " and ".join(
            ["rollout.batches_per_iteration", *(f"{key}.num_prompts / {key}.prompts_per_batch" for key in keys)]
        ),
        "batches of an iteration that evaluates",
        rollout.batches_per_iteration + evaluation.num_batches,
        MAX_BATCHES,
        f"raise a prompts_per_batch, or lower {' or '.join(f'{key}.num_prompts' for key in keys)}",
    )
    prompts = rollout.prompts_per_iteration * (1 + rollout.max_resamples)
    prompts += sum(held_out.num_prompts * held_out.num_passes for held_out in evaluation.each.values())
    yield Product(
        f"rollout.max_prompt_tokens and {prompts:,} prompts of an iteration, its reserves and its evaluation",
        "prompt tokens",
        prompts * rollout.max_prompt_tokens + rollout.prompts_per_iteration * given_tokens,
        MAX_ITERATION_PROMPT_TOKENS,
        "lower max_prompt_tokens to what the data need, or use fewer prompts",
    )
