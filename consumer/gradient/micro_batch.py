"""Lays a rollout batch out in passes: rewards → advantages → rows that teach → tensors of each pass.

Worked example, two rows with responses [1, 2, 3] and [4] (S_max = 3); consumer/model/inputs.py says how they go into a
model:

    response_ids         [[1, 2, 3], [4, 0, 0]]
    loss_mask            [[1, 1, 1], [1, 0, 0]]

A trajectory's observations go through the model, and are in nothing else: what a row has here are its sampled tokens,
side by side. [1, 2, o, o, 3] with two tokens o of an observation is the same first row, whose `predicting` leaves the
two out (I9). So no loss, no log-prob, no length and no column can see an observation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from consumer.gradient.advantages.estimators import batch_advantages, batch_rewards, compared_rewards
from consumer.gradient.advantages.gae import Estimates
from consumer.gradient.advantages.group_relative import shuffled_rewards
from consumer.model.inputs import (
    KeptSets,
    ModelInputs,
    Packing,
    cached_inputs,
    of_sampled,
    packed_inputs,
    padded_inputs,
)
from consumer.model.policy import Policy
from consumer.model.shared_prompt.layout import Prefill
from contracts.encoding.arrays import ITEM_BYTES
from contracts.errors import ContractViolation
from contracts.rollouts import BatchTimings, Completion, Purpose, RolloutBatch, RolloutGroup
from contracts.sampling import SamplingParams
from contracts.spec.job import JobSpec
from contracts.spec.stages import REFERENCE_LOGPROBS, read_columns
from onbeat.base import kernels
from onbeat.base.routers import RouteShape
from onbeat.data.routes import OWN, unpack_routes
from onbeat.data.sampled_values import FEWEST_ROWS, Contexts


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """R rows of one rollout batch, in the order of the batch; 0 where loss_mask is False.

    S_max: sampled tokens of the row that has most.
    """

    inputs: ModelInputs
    """All tokens, observations too."""
    response_ids: Tensor
    """int64 [R, S_max] sampled tokens."""
    loss_mask: Tensor
    """bool [R, S_max]; True on sampled tokens, False in padding."""
    generator_logprobs: Tensor
    """float32 [R, S_max]."""
    advantages: Tensor
    """float64 [R], or [R, S_max] with credit by turn or token, 0.0 in padding; the loss rounds them to the dtype of the
    log-probs."""
    estimates: Estimates | None = None
    """The estimates of a critic, whose advantages are those above; None without one."""
    columns: Mapping[str, Sequence[bytes]]
    """Column → [R] values that stages made of the rows."""
    kept_sets: KeptSets | None = None
    """The kept sets of the sampled tokens, row by row; None without truncated sampling."""
    contexts: Contexts | None = None
    """The tokens before each sampled token, row by row; None where no logit depends on them."""
    routes: Tensor | None = None
    """int16 [M, L, k] the experts of each of the M tokens of `inputs.input_ids`, flattened, in the L layers with a
    router; OWN in padding. None without `algorithm.routing_replay`."""

    def column(self, name: str) -> Tensor | None:
        """Returns float32 [R, S_max] of a column with a number a token; None where no stage makes it."""
        values = [np.frombuffer(value, dtype="<f4") for value in self.columns.get(name, ())]
        # A column that no stage makes has no rows at all.
        if not values:
            return None
        return _right_padded(values, np.float32)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The rows of a rollout batch that go through the models together. `lay_out` creates it."""

    rows: NDArray[np.int64]
    """[R] of the batch, ascending."""
    micro_batch: MicroBatch


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """A rollout batch in passes, as `lay_out` creates it; the passes of one update read it.

    `credited` returns another with the advantages that need a forward pass.
    """

    rewards: NDArray[np.float64]
    """[k, G] as they are trained: shuffled, where the job is a negative control."""
    advantages: NDArray[np.float64]
    """[k, G], or [k, G, K] of turns."""
    passes: tuple[Pass, ...]
    """None where nothing teaches."""


def lay_out(batch: RolloutBatch, *, spec: JobSpec, policy: Policy, every_row: bool) -> BatchLayout:
    """Computes all that a batch's passes need and no model is needed for: advantages, rows, tensors.

    A batch with more tokens than a pass may have is cut into several, always the same ones (I7).

    Args:
        batch: As the fence has accepted it.
        spec: The job's.
        policy: Bounds the tokens.
        every_row: True where a completion with an advantage of 0 has a loss all the same (`LossTerm.needs_every_row`).

    Raises:
        ContractViolation: For a column that the loss reads and that isn't there, and for tokens that the model cannot
            take.
    """
    algorithm = spec.algorithm
    _check_columns(batch, spec)
    if algorithm.distillation_beta is not UNSET:
        assert policy.teacher is not None, "make_learner gives it to each policy"
        policy.teacher.check(batch)
    rewards = compared_rewards(batch, batch_rewards(batch), spec)
    if algorithm.shuffle_rewards:
        rewards = shuffled_rewards(rewards, seed=spec.seed, batch_id=batch.batch_id)
    advantages = batch_advantages(batch, rewards, algorithm)
    # From here on only these rows go through a model; the others add exactly 0 to the loss.
    rows = rows_that_teach(advantages, every_row=every_row)
    if algorithm.on_truncated == "mask":
        # A boolean index keeps the order of the rows, which is ascending.
        rows = rows[[not is_truncated(batch, row) for row in rows.tolist()]]
    if not rows.size:
        return BatchLayout(rewards=rewards, advantages=advantages, passes=())
    make = micro_batch_maker(batch, spec=spec, policy=policy)
    # Cut by the batch and the spec alone, never by free memory: another cut is another rounding (I7).
    cuts = split_rows(batch, rows, packing=packing_of(spec, policy), max_tokens=spec.trainer.max_tokens_per_micro_batch)
    passes = tuple(Pass(rows=cut, micro_batch=make(rows=cut, advantages=advantages)) for cut in cuts)
    for one_pass in passes:
        check_fits(one_pass.micro_batch, policy, batch_id=batch.batch_id)
    return BatchLayout(rewards=rewards, advantages=advantages, passes=passes)


def packing_of(spec: JobSpec, policy: Policy) -> Packing:
    """Returns the layout of a model's passes: what was chosen for it when it was loaded, else the spec's."""
    if policy.passes is not None:
        return policy.passes.packing
    return spec.trainer.packing


def micro_batch_maker(batch: RolloutBatch, *, spec: JobSpec, policy: Policy) -> Callable[..., MicroBatch]:
    """Returns `make_micro_batch` of the batch, laid out and sampled as the job says."""
    packing = packing_of(spec, policy)
    return functools.partial(
        make_micro_batch,
        batch,
        packing=packing,
        multiple_of=rows_multiple_of(spec, packing),
        sampling=spec.rollout.sampling,
        end_ids=policy.end_ids,
        route_shape=policy.route_shape,
    )


def rows_multiple_of(spec: JobSpec, packing: Packing) -> int:
    """Returns the number that the length of a packed sequence is a multiple of (`packed_inputs`)."""
    if spec.model.is_by_onednn:
        # No product by oneDNN has to copy its rows.
        return kernels.ROWS
    if packing == "as_sampled":
        # No part of a vector is left over.
        return FEWEST_ROWS
    return 1


def check_fits(micro_batch: MicroBatch, policy: Policy, *, batch_id: str) -> None:
    """Raises ContractViolation for tokens that the model cannot take."""
    inputs = micro_batch.inputs
    # Positions start at 0, and a response's last token is never an input: + 1 for each makes + 2.
    longest = int(inputs.position_ids.max()) + 2
    if longest > policy.context_tokens:
        raise ContractViolation(
            f"batch {batch_id} has a row of {longest} tokens, the model's context is {policy.context_tokens}",
            field="token_ids",
        )
    token_ids = [inputs.input_ids, micro_batch.response_ids]
    if micro_batch.kept_sets is not None:
        token_ids.append(micro_batch.kept_sets.ids)
    used = np.concatenate([ids.numpy().reshape(-1) for ids in token_ids])
    # On a GPU an index outside the embedding is an assertion of the device, after which the process is lost.
    if used.min() < 0 or used.max() >= policy.vocabulary_size:
        raise ContractViolation(
            f"batch {batch_id} has a token outside the vocabulary of {policy.vocabulary_size}", field="token_ids"
        )


def _check_columns(batch: RolloutBatch, spec: JobSpec) -> None:
    """Raises ContractViolation where a column is missing that the loss reads: without it a term would be left out."""
    columns = batch.columns or {}
    for name, (is_read, _) in read_columns(spec.algorithm, spec.stages).items():
        is_from_model = name == REFERENCE_LOGPROBS and spec.loads_reference
        if is_read and name not in columns and not is_from_model:
            raise ContractViolation(f"batch {batch.batch_id} came without the column {name}", field="columns")


def rows_that_teach(advantages: NDArray[np.float64], *, every_row: bool) -> NDArray[np.int64]:
    """Picks the rows that don't add exactly 0 to the summed loss: those of nonzero advantage, or all of them.

    Args:
        advantages: [k, G], or [k, G, K] of turns.
        every_row: As in `lay_out`.

    Returns:
        Flat row numbers g * G + i, ascending.
    """
    size = advantages.shape[0] * advantages.shape[1]
    if every_row:
        # Row g * G + i is completion i of group g, in the order of the batch.
        return np.arange(size)
    # With credit by turn a row teaches where any of its turns does.
    return np.flatnonzero(advantages.reshape(size, -1).any(axis=1))


def is_truncated(batch: RolloutBatch, row: int) -> bool:
    """Returns True where the row's completion was cut before it had ended."""
    return batch.groups[row // batch.group_size].rollouts[row % batch.group_size].completion.is_truncated


def split_rows(
    batch: RolloutBatch, rows: NDArray[np.int64], *, packing: Packing, max_tokens: int
) -> list[NDArray[np.int64]]:
    """Cuts the rows into passes of at most max_tokens input tokens each, padding included, but for what fills a packed
    sequence up; a row is never cut.

    The cut is a function of the batch alone, and keeps the order of the rows (I7). Where prompts are shared, a group
    that fits into a pass is not split, so that its prompt goes through once.
    """
    if packing == "padded":
        ends = _padded_parts([line_tokens(batch, row) for row in rows.tolist()], max_tokens)
    elif packing == "prompt_cache":
        lines = [line_tokens(batch, row) for row in rows.tolist()]
        ends = _cached_parts(lines, [row // batch.group_size for row in rows.tolist()], max_tokens)
    else:
        lengths = [row_tokens(batch, row) for row in rows.tolist()]
        ends = _packed_parts(lengths, [row // batch.group_size for row in rows.tolist()], max_tokens)
    return np.split(rows, list(ends))


def made_up_batch(name: str, groups: tuple[RolloutGroup, ...], *, purpose: Purpose) -> RolloutBatch:
    """Returns groups that no generator sampled as a batch, so that they go through passes as rollouts do.

    Args:
        name: The batch's id, by which errors name it.
        groups: At least one; each has as many rollouts.
        purpose: As a rollout batch has it.
    """
    never = BatchTimings(generation_started_s=0.0, generation_ended_s=0.0, scoring_started_s=0.0, scoring_ended_s=0.0)
    return RolloutBatch(
        job_id=name,
        batch_id=name,
        iteration=0,
        purpose=purpose,
        policy_version=0,
        weights_digest="0" * 64,
        group_size=len(groups[0].rollouts),
        generator_id=name,
        attempt=1,
        timings=never,
        groups=groups,
    )


def make_micro_batch(
    batch: RolloutBatch,
    *,
    advantages: NDArray[np.float64],
    rows: NDArray[np.int64] | None = None,
    packing: Packing = "padded",
    multiple_of: int = 1,
    sampling: SamplingParams | None = None,
    end_ids: frozenset[int] = frozenset(),
    route_shape: RouteShape | None = None,
) -> MicroBatch:
    """Decodes some rows of a batch into the tensors of one pass.

    Args:
        batch: The rollout batch.
        advantages: float64 [k, G], or [k, G, K] of turns, of the whole batch.
        rows: [R] of the batch, ascending, at least one; None for all.
        packing: The layout of the inputs (consumer/model/inputs.py).
        multiple_of: The number that the length of a packed sequence is a multiple of (`packed_inputs`).
        sampling: The generator's, where it changed logits by the tokens before them.
        end_ids: The tokens that end a completion, where the sampling kept them from its first tokens.
        route_shape: That of the routes which the model replays; None where it replays none.
    """
    # Row g * G + i is completion i of group g.
    size = batch.group_size
    chosen = range(batch.num_completions) if rows is None else rows.tolist()
    if not chosen:
        raise ValueError("a micro-batch needs at least one row")
    group_index = [row // size for row in chosen]
    completions = [batch.groups[row // size].rollouts[row % size].completion for row in chosen]
    prompts = [np.frombuffer(batch.groups[index].prompt_token_ids, dtype="<i4") for index in group_index]
    responses = [np.frombuffer(completion.token_ids, dtype="<i4") for completion in completions]
    logprobs = [np.frombuffer(completion.generator_logprobs, dtype="<f4") for completion in completions]
    # The wire's arrays are little-endian: token ids int32, log-probs float32.
    # Behind the rows stand the lines that began anew, each with a prompt of its own.
    lines = [(place, line) for place, completion in enumerate(completions) for line in completion.lines[1:]]
    # The response tokens of each sequence: (begin, first, end) of a line says that its prompt is [begin, first) and its
    # response [first, end) of the completion's tokens. The first line has the batch's own prompt.
    seen = [response[: completion.lines[0][2]] for response, completion in zip(responses, completions, strict=True)]
    seen += [responses[place][first:end] for place, (_, first, end) in lines]
    prompts += [responses[place][begin:first] for place, (begin, first, _) in lines]
    # A line that began anew shares its prompt with no other: it has a negative group of its own.
    groups = [*group_index, *range(-len(lines), 0)]
    laid_out = functools.partial(
        _inputs,
        groups=groups,
        packing=packing,
        prefill=_prefill(batch) if packing == "as_sampled" else None,
        multiple_of=multiple_of,
    )
    inputs = laid_out(prompts, seen)
    routes = None
    if route_shape is not None:
        # Without an environment, which no job that replays routes has, each row is one line.
        routes = _routes(batch, chosen, route_shape, laid_out)
    sampled = responses
    if any(completion.trajectory is not UNSET for completion in completions):
        # [S], ascending: which of a completion's T tokens were sampled.
        places = [np.concatenate([np.arange(*span) for span in completion.spans]) for completion in completions]
        inputs = of_sampled(inputs, places, [(place, first) for place, (_, first, _) in lines])
        sampled = [response[of_row] for response, of_row in zip(responses, places, strict=True)]
    # [R] sampled tokens of each row: observations don't count.
    lengths = np.array([tokens.size for tokens in sampled])
    if advantages.ndim == 2:
        # [k, G] → [R] in the order of the chosen rows.
        row_advantages = torch.from_numpy(advantages.reshape(-1)[chosen])
    else:
        row_advantages = _token_advantages(advantages.reshape(batch.num_completions, -1)[chosen], completions)
    contexts = None
    if sampling and sampling.processing:
        contexts = _contexts(sampling, end_ids, prompts, completions)
    return MicroBatch(
        inputs=inputs,
        response_ids=_right_padded(sampled, np.int64),
        # bool [R, S_max]: True at the first `length` columns of each row.
        loss_mask=torch.from_numpy(np.arange(lengths.max()) < lengths[:, None]),
        generator_logprobs=_right_padded(logprobs, np.float32),
        advantages=row_advantages,
        columns={name: [values[row] for row in chosen] for name, values in (batch.columns or {}).items()},
        kept_sets=_kept_sets(completions, sampled),
        contexts=contexts,
        routes=routes,
    )


def _inputs(
    prompts: Sequence[NDArray],
    responses: Sequence[NDArray],
    *,
    groups: Sequence[int],
    packing: Packing,
    prefill: Prefill | None,
    multiple_of: int,
) -> ModelInputs:
    """Lays rows out as the job says."""
    if packing == "padded":
        return padded_inputs(prompts, responses)
    if packing == "prompt_cache":
        return cached_inputs(prompts, responses, groups)
    return packed_inputs(prompts, responses, groups, prefill=prefill, multiple_of=multiple_of)


def _routes(
    batch: RolloutBatch, rows: Sequence[int], shape: RouteShape, laid_out: Callable[..., ModelInputs]
) -> Tensor:
    """Returns the routes of a pass, int16 [M, L, k], in the order of its input ids.

    Args:
        batch: The rollout batch.
        rows: [R] of the batch.
        shape: The model's.
        laid_out: Lays out the prompts and the responses of these rows.

    Raises:
        ContractViolation: A completion has no routes, or those of another model.
    """
    # Entry 0 is that of padding, which input ids fill with 0: there the router's own choice stays.
    table = [np.full((1, shape.num_layers, shape.top_k), OWN, dtype=np.int16)]
    num_entries = 1
    prompt_places: dict[int, NDArray[np.int64]] = {}
    prompts: list[NDArray[np.int64]] = []
    responses: list[NDArray[np.int64]] = []
    for row in rows:
        group = batch.groups[row // batch.group_size]
        completion = group.rollouts[row % batch.group_size].completion
        if row // batch.group_size not in prompt_places:
            num_tokens = len(group.prompt_token_ids) // ITEM_BYTES
            # The prompt's routes stand in the group's first completion, also where that row isn't trained.
            packed = group.rollouts[0].completion.prompt_routes
            table.append(unpack_routes(packed or b"", shape, num_tokens=num_tokens, field="prompt_routes"))
            prompt_places[row // batch.group_size] = num_entries + np.arange(num_tokens)
            num_entries += num_tokens
        num_fed = completion.num_tokens - 1
        table.append(unpack_routes(completion.routes or b"", shape, num_tokens=num_fed, field="routes"))
        prompts.append(prompt_places[row // batch.group_size])
        # The last token is never an input: whatever number it has, no layout shows it.
        responses.append(num_entries + np.arange(num_fed + 1))
        num_entries += num_fed
    # The layout of the tokens, asked of their places in the table: whatever it does with them, each input's is known.
    places = laid_out(prompts, responses).input_ids.flatten()
    return torch.from_numpy(np.concatenate(table))[places]


def _prefill(batch: RolloutBatch) -> Prefill:
    lengths = {len(group.prompt_token_ids) // ITEM_BYTES for group in batch.groups}
    # The generator's prefill is as wide as the longest prompt of the batch, and pads only where prompts differ in
    # length. Lengths in tokens: ids are int32 on the wire.
    return Prefill(width=max(lengths), is_padded=len(lengths) > 1)


def _kept_sets(completions: Sequence[Completion], sampled: Sequence[NDArray[np.int32]]) -> KeptSets | None:
    """Reads the kept sets of truncated sampling, which all completions of a job have, or none has."""
    packed = [completion.kept_sets for completion in completions if completion.kept_sets is not UNSET]
    if not packed:
        return None
    return KeptSets.of(packed, sampled)


def _contexts(
    sampling: SamplingParams, end_ids: frozenset[int], prompts: Sequence[NDArray], completions: Sequence[Completion]
) -> Contexts:
    """Returns the tokens that each sampled token sees: those before it in its own line, however rows are packed."""
    first_places: list[Any] = []
    places: list[tuple[int, int]] = []
    for row, completion in enumerate(completions):
        tokens = np.frombuffer(completion.token_ids, dtype="<i4")
        for begin, _, end in completion.lines:
            # A line that began anew has its prompt among the completion's tokens: the batch's prompt isn't before it.
            before = tokens[:0]
            if begin == 0:
                before = prompts[row]
            line_spans = [span for span in completion.spans if begin <= span[0] < end]
            # A place counts among the completion's tokens; less `begin` and behind `before` it is the place in this
            # line.
            offset = before.size - begin
            places += [(len(first_places), offset + place) for span in line_spans for place in range(*span)]
            # (distinct ids, the first place of each): an id is seen by the tokens behind that place.
            first_places.append(np.unique(np.concatenate((before, tokens[begin:end])), return_index=True))
    # [N] how many tokens of its own turn stand before each sampled token: 0 for the first of a turn.
    num_new = np.concatenate([np.arange(end - start) for completion in completions for start, end in completion.spans])

    def seen(number: int) -> NDArray[np.int32]:
        line, place = places[number]
        ids, first = first_places[line]
        # Strictly before: the token that is drawn hasn't been seen.
        return ids[first < place]

    return Contexts(sampling=sampling, end_ids=np.array(sorted(end_ids)), num_new=num_new, seen=seen)


def row_tokens(batch: RolloutBatch, row: int) -> tuple[int, int]:
    """Returns (prompt tokens, response tokens) of a row that go through the model, observations included."""
    group = batch.groups[row // batch.group_size]
    return len(group.prompt_token_ids) // ITEM_BYTES, group.rollouts[row % batch.group_size].completion.num_tokens


def line_tokens(batch: RolloutBatch, row: int) -> list[tuple[int, int]]:
    """Returns (prompt tokens, response tokens) of each line of a row (`Completion.lines`): a sequence of its own."""
    prompt, _ = row_tokens(batch, row)
    lines = batch.groups[row // batch.group_size].rollouts[row % batch.group_size].completion.lines
    # The batch's prompt stands before the first line alone; of the others the prompt is inside the completion.
    return [(prompt, lines[0][2]), *((first - begin, end - first) for begin, first, end in lines[1:])]


def _padded_parts(rows: Sequence[Sequence[tuple[int, int]]], max_tokens: int) -> Iterator[int]:
    """Yields the row counts at which a new pass starts."""
    num_lines = longest_prompt = longest_response = 0
    for number, lines in enumerate(rows):
        prompt, response = map(max, zip(*lines, strict=True))
        # A row may be several lines: each is a sequence, as wide as all the others.
        num_lines += len(lines)
        longest_prompt = max(longest_prompt, prompt)
        longest_response = max(longest_response, response)
        # Every line is as wide as the longest prompt and the longest response; its last token is never an input.
        if num_lines > len(lines) and num_lines * (longest_prompt + longest_response - 1) > max_tokens:
            yield number
            num_lines = len(lines)
            longest_prompt = prompt
            longest_response = response


Lines = Sequence[tuple[int, int]]
"""(prompt tokens, response tokens) of each line of a row."""


def _cached_parts(rows: Sequence[Lines], groups: Sequence[int], max_tokens: int) -> Iterator[int]:
    """Yields the row counts at which a new pass starts.

    It starts before a group that doesn't fit into the pass, and inside of one that fits into none.
    """
    open_pass = _CachedPass()
    for _, members in groupby(range(len(rows)), key=lambda row: groups[row]):
        numbers = list(members)
        of_group = [rows[number] for number in numbers]
        whole = open_pass.with_rows(of_group)
        alone = _CachedPass().with_rows(of_group)
        if whole.num_tokens <= max_tokens:
            open_pass = whole
        elif alone.num_tokens <= max_tokens:
            yield numbers[0]
            open_pass = alone
        else:
            for place, number in enumerate(numbers):
                # The rows of the group that are in the open pass already share their prompt with this one.
                longer = open_pass.with_rows([rows[number]], has_prompt=place > 0 and not open_pass.is_empty)
                if longer.num_tokens > max_tokens and not open_pass.is_empty:
                    yield number
                    longer = _CachedPass().with_rows([rows[number]])
                open_pass = longer


@dataclass(frozen=True, kw_only=True)
class _CachedPass:
    """The sizes of a pass by the cache, for each length of its prompts."""

    num_prompts: Mapping[int, int] = field(default_factory=dict)
    num_responses: Mapping[int, int] = field(default_factory=dict)
    longest_response: Mapping[int, int] = field(default_factory=dict)
    """Input tokens."""

    @property
    def is_empty(self) -> bool:
        return not self.num_responses

    @property
    def num_tokens(self) -> int:
        """Input tokens, padding included: each prompt once, and each response as long as the longest next to it."""
        of_prompts = sum(length * number for length, number in self.num_prompts.items())
        return of_prompts + sum(number * self.longest_response[length] for length, number in self.num_responses.items())

    def with_rows(self, rows: Sequence[Lines], *, has_prompt: bool = False) -> _CachedPass:
        """Returns the sizes with further rows of one group.

        Args:
            rows: The rows' lines; the first of each follows the group's prompt, each other one a prompt of its own.
            has_prompt: True where the group's prompt is in the pass.
        """
        num_prompts = dict(self.num_prompts)
        num_responses = dict(self.num_responses)
        longest = dict(self.longest_response)
        for number, lines in enumerate(rows):
            for place, (prompt, response) in enumerate(lines):
                is_shared = place == 0 and (number > 0 or has_prompt)
                num_prompts[prompt] = num_prompts.get(prompt, 0) + (not is_shared)
                num_responses[prompt] = num_responses.get(prompt, 0) + 1
                # The last token of a response is never an input.
                longest[prompt] = max(longest.get(prompt, 0), response - 1)
        return _CachedPass(num_prompts=num_prompts, num_responses=num_responses, longest_response=longest)


def _packed_parts(lengths: Sequence[tuple[int, int]], groups: Sequence[int], max_tokens: int) -> Iterator[int]:
    """Yields the row counts at which a new pass starts."""
    whole: dict[int, int] = {}
    for group, (prompt, response) in zip(groups, lengths, strict=True):
        # What the group costs in one pass: its prompt once, and each response without its last token.
        whole[group] = whole.get(group, prompt) + response - 1
    used = 0
    previous = -1
    for number, (group, (prompt, response)) in enumerate(zip(groups, lengths, strict=True)):
        # The last token of a response is never an input, and a group's prompt goes through with its first row only.
        more = response - 1
        if group != previous:
            more += prompt
        # At the first row of a group: it would be split here, and fits into a pass of its own.
        fits_elsewhere = group != previous and used + whole[group] > max_tokens >= whole[group]
        if number and (used + more > max_tokens or fits_elsewhere):
            yield number
            used = 0
            # A new pass has the prompt again.
            more = prompt + response - 1
        used += more
        previous = group


def _token_advantages(advantages: NDArray[np.float64], completions: Sequence[Completion]) -> Tensor:
    """Gives each sampled token the advantage of its turn: [R, K] → float64 [R, S_max]."""
    # [R][turns] sampled tokens of each turn.
    lengths = [[end - start for start, end in completion.spans] for completion in completions]
    rows = zip(advantages, lengths, strict=True)
    return _right_padded([np.repeat(of_row[: len(turns)], turns) for of_row, turns in rows], np.float64)


def _right_padded(rows: Sequence[NDArray], dtype: type[np.int64] | type[np.float32] | type[np.float64]) -> Tensor:
    # 0 in padding: a token id that every vocabulary has, and a number that a masked sum doesn't see.
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=dtype)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return torch.from_numpy(padded)
