"""The dry pass: a micro-batch of the largest shape that a job can yield goes through its models once, before any other.

    longest prompt, longest completion ─▶ a batch of made-up tokens ─▶ cut as a rollout batch is ─▶ its largest pass
                                                                                                         │
    the highest memory meanwhile ◀─ the gradient, all zeros, into the sums ◀─ backward ◀─ forward ◀──────┘

It takes the memory that the job's largest micro-batch will take, so that a job without room for it ends in its first
seconds and not in the iteration that happens to have the longest completions. It moves nothing that is computed later:
the loss is multiplied by 0, so that the sums stay as they were, no batch is counted in them, and random numbers are put
back where they stood.

A teacher's distributions are made up as well. Left out: what a plug-in's loss and the sampling's kept sets take. They
are numbers of tokens, or of one chunk of logits, where a pass holds the activations of each layer; and a loss of a
person's own is called for real batches alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from consumer.gradient.learner import Learner
from consumer.gradient.micro_batch import (
    MicroBatch,
    check_fits,
    made_up_batch,
    micro_batch_maker,
    packing_of,
    split_rows,
)
from consumer.gradient.micro_step import pass_without_gradient
from consumer.model.language_head import Teacher
from consumer.model.memory import Peak, is_out_of_memory
from consumer.model.policy import Policy
from contracts.encoding.arrays import ITEM_BYTES, pack_int32
from contracts.encoding.wire import Record, changed
from contracts.errors import ContractViolation, TrainingDiverged, kind_and_text
from contracts.rollouts import Completion, Rollout, RolloutBatch, RolloutGroup
from contracts.spec.job import JobSpec
from onbeat.base.process.crash_points import reach
from onbeat.base.process.host_memory import resident_bytes, room_bytes
from onbeat.base.telemetry.observing import observed
from onbeat.data.probe_rows import plain_tokens

log = logging.getLogger(__name__)

DRY_PASS = "dry pass"
"""The id of the made-up batch, by which errors name it."""
GIB = 1024**3
LEAST_FORETOLD = 4096
"""Tokens from which a pass on a CPU begins with a small one, which says whether it has room."""
FORETOLD_PART = 8
"""The small one is an eighth of it."""
WELL_FILLED = 0.95
"""Share of the bound of a pass from which shorter completions, that fill it better, aren't tried."""


class LongestRow(Record, frozen=True, kw_only=True):
    """The longest row that a job can yield, and the bound of the pass that is filled with such rows.

    Rank 0 creates it, and each rank makes its dry pass up from it.
    """

    prompt_tokens: int
    response_tokens: int
    """Tokens of the completion, those of observations included."""
    pass_tokens: int
    """`trainer.max_tokens_per_micro_batch`, or fewer where it is asked how many have room."""


@dataclass(frozen=True, kw_only=True)
class DryPass:
    """The memory of the job's largest micro-batch. `pass_dry` creates it, and the trainer reports it."""

    num_tokens: int = 0
    """Input tokens of the pass, padding included; 0 where it could not be made up."""
    peak_bytes: int = 0
    """The highest memory of the device during the pass; 0 where it is unknown."""
    problem: str = ""
    """The words by which memory was refused; "" where the pass had room."""


UNKNOWN = DryPass()


def longest_row(spec: JobSpec, *, longest_prompt: int, context_tokens: int) -> LongestRow:
    """Returns the longest row of a job's training.

    Args:
        spec: The job's.
        longest_prompt: Tokens of the longest of its training prompts.
        context_tokens: Tokens that the model takes, the prompt and its completion together.
    """
    # An environment may bound its trajectories far above what the model takes.
    response = min(spec.longest_completion()[1], context_tokens - longest_prompt)
    return LongestRow(
        prompt_tokens=longest_prompt,
        response_tokens=max(1, response),
        pass_tokens=spec.trainer.max_tokens_per_micro_batch,
    )


def largest_pass(spec: JobSpec, policy: Policy, row: LongestRow) -> MicroBatch:
    """Makes up the largest pass of a job: rows of the longest kind, as many as the bound of a pass has room for.

    Where the longest rows leave a pass partly empty, shorter ones may fill it with more tokens: the fuller one of both
    passes is returned.

    Args:
        spec: The job's.
        policy: Its policy, which chooses the layout.
        row: The longest row.

    Raises:
        ContractViolation: For tokens that the model cannot take.
    """
    tokens = plain_tokens(policy.tokenizer, vocabulary_tokens=policy.vocabulary_size)
    longest = _filled(spec, policy, row, tokens)
    num_rows = longest.response_ids.shape[0]
    if num_rows == _num_rows(spec) or num_tokens(longest) >= WELL_FILLED * row.pass_tokens:
        return longest
    shorter = _response_of_one_more(spec, policy, row, num_rows)
    if shorter < 1:
        return longest
    fuller = _filled(spec, policy, changed(row, response_tokens=shorter), tokens)
    return max(longest, fuller, key=num_tokens)


def pass_dry(learner: Learner, row: LongestRow) -> DryPass:
    """Passes a job's largest micro-batch through a rank's models, and leaves everything as it was.

    Ranks that share the policy's parameters call it at the same time, with the same row.

    Args:
        learner: The rank's.
        row: The longest row of the job.

    Returns:
        The memory that the pass took, or that it could not get: then nothing of it is left, and a smaller one may be
        tried. After any other error the memory is unknown, which is logged: the job may train all the same.
    """
    passed: DryPass | None = None
    try:
        passed = observed("the memory of the largest micro-batch", partial(_passed, learner, row))
    except (ContractViolation, TrainingDiverged) as error:
        # What is wrong with the model's numbers is for the passes of real batches to say.
        log.warning("the memory of the largest micro-batch is unknown: %s", error)
    learner.accumulator.drop_gradients()
    learner.rest()
    return passed or UNKNOWN


def _passed(learner: Learner, row: LongestRow) -> DryPass:
    """Makes the pass. Raises ContractViolation and TrainingDiverged as a pass of a rollout batch does."""
    device = learner.policy.model.device
    micro_batch = largest_pass(learner.spec, learner.policy, row)
    tokens = num_tokens(micro_batch)
    # The moments come with the first step, and stay: every pass but the first ones has less room by as much.
    to_come = learner.optimizer.first_step_bytes
    if device.type == "cpu" and tokens >= LEAST_FORETOLD:
        problem = _foretold(learner, row, tokens=tokens, to_come=to_come)
        if problem:
            return DryPass(num_tokens=tokens, problem=problem)
    peak = Peak(device)
    try:
        # No pass draws a random number today; one that would must not move those of the training.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            moments = torch.empty(to_come, dtype=torch.uint8, device=device)
            _go_through(learner, micro_batch)
            reach("consumer.in_dry_pass")
            del moments
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Words alone: the traceback of the error holds what the pass had taken.
        return DryPass(num_tokens=tokens, problem=kind_and_text(error))
    num_bytes = peak.num_bytes
    if device.type == "cpu":
        # No page of them was touched, so that the system has not counted them.
        num_bytes += to_come
    return DryPass(num_tokens=tokens, peak_bytes=num_bytes)


def _foretold(learner: Learner, row: LongestRow, *, tokens: int, to_come: int) -> str:
    """Says from a small pass that the whole one has no room; "" where it has, or where the small one has none.

    Linux refuses a process little: it gives addresses away, and kills a process once the pages behind them are used. A
    process that was killed names no key, so on a CPU the memory of the pass is counted before it is taken.

    Args:
        learner: The rank's.
        row: The longest row of the job.
        tokens: Input tokens of the whole pass.
        to_come: Bytes of the optimizer's moments, which no step has made yet.
    """
    small = largest_pass(learner.spec, learner.policy, changed(row, pass_tokens=row.pass_tokens // FORETOLD_PART))
    if 2 * num_tokens(small) > tokens:
        # One row is most of the pass.
        return ""
    before = resident_bytes()
    peak = Peak(learner.policy.model.device)
    try:
        _go_through(learner, small)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Refused and not killed: the whole pass will be, too, and says so in the system's words.
        return ""
    parameters = learner.policy.trained_parameters().values()
    growth = max(0, peak.num_bytes - before)
    # The gradients, and their sums of up to 8 bytes a number, are of one size in each pass: only the activations grow
    # with the tokens.
    same = min(growth, sum(parameter.nbytes + 8 * parameter.numel() for parameter in parameters))
    expected = same + (growth - same) * tokens / num_tokens(small) + to_come
    # The small pass may have left free pieces behind, which the next one takes first.
    room = room_bytes() + max(0, resident_bytes() - before)
    if expected <= room:
        return ""
    return (
        f"not enough memory: by a pass of {num_tokens(small)} tokens it takes some {expected / GIB:.3g} GiB on top of "
        f"the model's, and {room / GIB:.3g} GiB are free"
    )


def _go_through(learner: Learner, micro_batch: MicroBatch) -> None:
    pass_without_gradient(
        learner.policy,
        micro_batch,
        reference=learner.reference,
        spec=learner.spec,
        accumulator=learner.accumulator,
    )


def num_tokens(micro_batch: MicroBatch) -> int:
    """Returns the input tokens of a pass, padding included."""
    return micro_batch.inputs.input_ids.numel()


def _num_rows(spec: JobSpec) -> int:
    return spec.rollout.prompts_per_batch * spec.rollout.group_size


def _response_of_one_more(spec: JobSpec, policy: Policy, row: LongestRow, num_rows: int) -> int:
    """Returns the tokens of a completion of which one more row fits into a pass; below 1 where none does."""
    num_rows += 1
    num_prompts = num_rows
    if packing_of(spec, policy) != "padded":
        # A group's prompt goes through once for all of its rows.
        num_prompts = -(-num_rows // spec.rollout.group_size)
    # The last token of a completion is never an input: + 1.
    return (row.pass_tokens - num_prompts * row.prompt_tokens) // num_rows + 1


def _filled(spec: JobSpec, policy: Policy, row: LongestRow, tokens: Sequence[int]) -> MicroBatch:
    """Cuts a batch of rows of one length into passes as a rollout batch is cut, and returns the largest pass."""
    batch = _made_up_batch(spec, row, tokens, teacher=policy.teacher)
    packing = packing_of(spec, policy)
    cuts = split_rows(batch, np.arange(batch.num_completions), packing=packing, max_tokens=row.pass_tokens)
    # Rows of one length: the pass with the most rows has the most tokens.
    largest: NDArray[np.int64] = max(cuts, key=len)
    # A made-up batch has no routes: its tokens go through the experts that the routers choose.
    make = micro_batch_maker(batch, spec=spec, policy=replace(policy, route_shape=None))
    micro_batch = make(rows=largest, advantages=np.zeros((len(batch.groups), batch.group_size)))
    check_fits(micro_batch, policy, batch_id=DRY_PASS)
    return micro_batch


def _made_up_batch(spec: JobSpec, row: LongestRow, tokens: Sequence[int], *, teacher: Teacher | None) -> RolloutBatch:
    """Returns a batch of as many groups as two passes have room for, or as the job's batches have.

    Args:
        spec: The job's.
        row: The length of all rows.
        tokens: Those that the texts are made of.
        teacher: The reader of a teacher's distributions, which has columns made up; None where the job has none.
    """
    group_size = spec.rollout.group_size
    group_tokens = row.prompt_tokens + group_size * row.response_tokens
    num_groups = min(spec.rollout.prompts_per_batch, 2 + 2 * row.pass_tokens // group_tokens)
    completion = Completion(
        token_ids=_repeated(tokens, row.response_tokens),
        generator_logprobs=bytes(ITEM_BYTES * row.response_tokens),
        finish_reason="length",
    )
    rollout = Rollout(completion=completion, text="", reward=0.0, reward_breakdown={})
    prompt = _repeated(tokens, row.prompt_tokens)
    groups = tuple(
        RolloutGroup(prompt_id=DRY_PASS, prompt_index=number, prompt_token_ids=prompt, rollouts=(rollout,) * group_size)
        for number in range(num_groups)
    )
    batch = made_up_batch(DRY_PASS, groups, purpose="train")
    if teacher is None:
        return batch
    columns = {name: (value,) * batch.num_completions for name, value in teacher.made_up(row.response_tokens).items()}
    return changed(batch, columns=columns)


def _repeated(tokens: Sequence[int], length: int) -> bytes:
    """Returns token ids that go through the vocabulary in large steps: the experts of a mixture all have work."""
    # A prime, so that few vocabularies are divided by it: most tokens come before one comes again.
    return pack_int32([tokens[place * 7919 % len(tokens)] for place in range(length)])
