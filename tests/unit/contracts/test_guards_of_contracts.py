"""What a record refuses when it is built: decoding refuses it too, so that no other code has to check it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.encoding.wire import convert, decode, encode
from contracts.environments.service import Reply
from contracts.errors import ContractViolation, InvalidInput
from contracts.jobs import NEXT_STATES, JobState, ResumeRequest, resumed_spec
from contracts.rewards import ExactReward, RewardItem, RewardRequest
from contracts.rollouts import (
    Completion,
    Prompt,
    PromptBatch,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    check_routes,
    completion_problem,
    prompt_seed,
    turn_seed,
)
from contracts.sampling import SamplingParams
from contracts.versions import AdapterVersion, WeightFile, WeightStep
from tests.builders import DIGEST, batch_of, job_spec, manifest, prompt_batch, rollout
from tests.refusals import refusal_of
from tests.trajectories import played

FILE = WeightFile(name="a.safetensors", num_bytes=1)
STEP = WeightStep(policy_version=1, weights_digest=DIGEST, directory="job/weights/v000001", files=(FILE,))
MANIFEST = manifest(2)


def refused(make: Any, field: str, **changes: Any) -> None:
    with pytest.raises(ContractViolation) as refusal:
        make(**changes)
    assert refusal.value.field == field


def changed(record: Any) -> Any:
    """Builds a record again, with other fields; as `replace` does, but by its constructor."""
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return lambda **changes: type(record)(**(fields | changes))


@pytest.mark.parametrize("tokens", [b"", b"\0\0\0", b"\0" * 6])
def test_tokens_are_whole_numbers_of_four_bytes_and_at_least_one(tokens: bytes) -> None:
    sampled = rollout([7], 0.0)
    refused(changed(sampled.completion), "token_ids", token_ids=tokens)
    refused(changed(prompt_batch([[5]]).prompts[0]), "token_ids", token_ids=tokens)
    refused(changed(batch_of([([5], [sampled])]).groups[0]), "prompt_token_ids", prompt_token_ids=tokens)


def test_each_token_has_a_log_prob() -> None:
    sampled = rollout([7, 8], 0.0).completion
    refused(changed(sampled), "generator_logprobs", generator_logprobs=pack_float32([-1.0]))
    wire = encode(sampled).replace(encode(sampled.generator_logprobs), encode(pack_float32([-1.0] * 3)))
    with pytest.raises(Exception, match="one log-prob per token"):
        decode(wire, Completion)


@pytest.mark.parametrize("kept", [b"", b"\x08\x00", b"\x08\x00\x09", b"\x08\x00\x09\x00\x09\x00"])
def test_each_token_has_a_kept_set_where_there_are_any(kept: bytes) -> None:
    sampled = replace(rollout([7, 8], 0.0).completion, kept_sets=b"\x08\x00\x00")
    assert decode(encode(sampled), Completion) == sampled
    refused(changed(sampled), "kept_sets", kept_sets=kept)


def test_what_begins_anew_does_so_behind_the_turn_before() -> None:
    assert rollout([7, 8], 0.0).completion.lines == ((0, 0, 2),)
    whole = played([[7, 8], [9], [6]], [[4, 4], [5]], anew=[0]).completion
    assert whole.trajectory is not UNSET
    first, second, third = whole.trajectory.turns
    assert decode(encode(whole), Completion).lines == ((0, 0, 2), (2, 4, 7))
    for later in ((UNSET, 3), (3, 3), (2, 1), (2, UNSET), (1, 1)):
        turns = (first, *(replace(one, sees_from=seen) for one, seen in zip((second, third), later, strict=True)))
        refused(changed(whole), "turns", trajectory=changed(whole.trajectory)(turns=turns))
    with pytest.raises(ContractViolation, match="a turn sees one token or more"):
        replace(second, sees_from=4)


@pytest.mark.parametrize(
    ("spans", "num_logprobs", "field"),
    [
        ([(0, 2), (4, 5)], 4, "generator_logprobs"),
        ([(0, 2), (4, 5)], 5, "generator_logprobs"),
        ([(1, 2), (4, 5)], 2, "turns"),
        ([(0, 2), (1, 5)], 6, "turns"),
        ([(4, 5), (0, 2)], 3, "turns"),
        ([(0, 2), (3, 4)], 3, "turns"),
        ([(0, 2), (4, 6)], 4, "turns"),
    ],
    ids=["a log-prob more", "of every token", "a late start", "overlap", "order", "an open end", "beyond the tokens"],
)
def test_turns_log_probs_and_tokens_of_a_trajectory_fit_each_other(
    spans: list[tuple[int, int]], num_logprobs: int, field: str
) -> None:
    whole = played([[7, 8], [9]], [[4, 4]]).completion
    assert whole.trajectory is not UNSET
    turns = tuple(replace(whole.trajectory.turns[0], start=start, end=end) for start, end in spans)
    fields = {
        "generator_logprobs": pack_float32([-1.0] * num_logprobs),
        "trajectory": changed(whole.trajectory)(turns=turns),
    }
    refused(changed(whole), field, **fields)
    # What is forged on the wire is refused where it is decoded, before the trainer has it.
    wire = msgspec.msgpack.encode(msgspec.to_builtins(whole, builtin_types=(bytes,)) | fields)
    with pytest.raises(ContractViolation):
        decode(wire, Completion)


def test_a_turn_ends_after_it_starts() -> None:
    trajectory = played([[7]]).completion.trajectory
    assert trajectory is not UNSET
    refused(changed(trajectory.turns[0]), "turns", start=1, end=1)
    refused(changed(trajectory.turns[0]), "turns", start=2, end=1)


def test_a_trajectory_has_a_reason_exactly_where_it_failed() -> None:
    trajectory = played([[7]]).completion.trajectory
    assert trajectory is not UNSET
    refused(changed(trajectory), "failure", stop="failed")
    refused(changed(trajectory), "failure", failure="the simulator is gone")
    failed = changed(trajectory)(stop="failed", failure="the simulator is gone")
    assert failed.failure == "the simulator is gone"


def test_a_prompt_that_states_its_seed_is_sampled_by_it_and_the_first_turn_by_that_of_the_sample() -> None:
    asked = prompt_batch([[5]])
    (prompt,) = asked.prompts
    assert prompt_seed(asked, replace(prompt, sampler_seed=7)) == 7
    assert prompt_seed(asked, prompt) != 7
    seeds = [turn_seed(asked, prompt, sample=2, turn=turn) for turn in range(3)]
    assert seeds[0] == prompt_seed(asked, prompt) + 2
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("settings", "truncation", "processing"),
    [
        ({"repetition_penalty": 1.0, "stop": ["."]}, "", ""),
        ({"top_p": 0.9, "top_k": 5, "repetition_penalty": 0.9}, "top_p = 0.9", "repetition_penalty"),
        ({"top_k": 5, "min_p": 0.1, "min_new_tokens": 2, "logit_bias": {"3": 1.0}}, "top_k = 5", "min_new_tokens"),
        ({"min_p": 1.0, "logit_bias": {"3": 1.0}, "repetition_penalty": 1.1}, "min_p = 1", "logit_bias"),
    ],
)
def test_sampling_names_the_setting_that_keeps_tokens_out_of_the_draw_or_changes_logits(
    settings: dict[str, Any], truncation: str, processing: str
) -> None:
    sampling = convert({"max_new_tokens": 2} | settings, SamplingParams)
    assert (sampling.truncation, sampling.processing) == (truncation, processing)
    assert sampling.unbounded_truncation == ("" if "top_k" in settings else truncation)


def test_kept_sets_stand_in_a_completion_exactly_where_its_sampling_is_truncated() -> None:
    whole = prompt_batch([[5]])
    truncated = replace(whole, sampling=replace(whole.sampling, top_k=2))
    completion = rollout([7, 8], 0.0).completion
    with_sets = replace(completion, kept_sets=b"\x08\x00\x08\x00")

    def problem(made: Completion, asked: PromptBatch) -> str:
        return completion_problem(made, asked.prompts[0], asked)

    assert problem(completion, whole) == problem(with_sets, truncated) == ""
    assert "though each could be drawn" in problem(with_sets, whole)
    assert "which tokens top_k = 2 kept" in problem(completion, truncated)


def test_routes_are_there_for_each_token_but_the_last_and_for_no_trajectory() -> None:
    sampled = rollout([7, 8, 9], 0.0).completion
    assert changed(sampled)(routes=b"\0\1\2\3").routes == b"\0\1\2\3"
    for routes in (b"", b"\0\1\2"):
        refused(changed(sampled), "routes", routes=routes)
    alone = rollout([7], 0.0).completion
    assert changed(alone)(routes=b"").routes == b""
    refused(changed(alone), "routes", routes=b"\0")
    refused(changed(played([[7], [8]], [[4]]).completion), "routes", routes=b"\0\1")
    refused(changed(sampled), "prompt_routes", prompt_routes=b"\0\1")
    assert changed(sampled)(routes=b"\0\1", prompt_routes=b"\0\1").prompt_routes == b"\0\1"


def test_a_group_has_its_prompts_routes_once_and_those_of_each_completion() -> None:
    prompt = pack_int32([5, 6])
    plain, other = (rollout([7, token], 0.0).completion for token in (8, 9))
    first = changed(plain)(routes=b"\0\1", prompt_routes=b"\0\1\2\3")
    second = changed(other)(routes=b"\2\3")
    check_routes([first, second], prompt)
    check_routes([plain, other], prompt)
    repeated = changed(other)(routes=b"\2\3", prompt_routes=b"\0\1\2\3")
    odd = changed(plain)(routes=b"\0\1", prompt_routes=b"\0\1\2")
    refused(lambda: check_routes([second, other], prompt), "prompt_routes")
    refused(lambda: check_routes([first, repeated], prompt), "prompt_routes")
    refused(lambda: check_routes([odd, second], prompt), "prompt_routes")
    refused(lambda: check_routes([first, other], prompt), "routes")
    refused(lambda: check_routes([first, changed(other)(routes=b"\2")], prompt), "routes")


def test_routes_stand_in_a_completion_exactly_where_they_are_replayed() -> None:
    plain = prompt_batch([[5]])
    replayed = replace(plain, routing_replay=True)
    completion = rollout([7, 8], 0.0).completion
    with_routes = replace(completion, routes=b"\0\1")

    def problem(made: Completion, asked: PromptBatch) -> str:
        return completion_problem(made, asked.prompts[0], asked)

    assert problem(completion, plain) == problem(with_routes, replayed) == ""
    assert "though nothing replays them" in problem(with_routes, plain)
    assert "which algorithm.routing_replay replays" in problem(completion, replayed)
    evaluation = replace(replayed, purpose="evaluation")
    assert problem(completion, evaluation) == "", "an evaluation is not trained"


def test_a_trajectory_that_its_environment_cuts_is_truncated_though_its_last_turn_has_ended() -> None:
    whole = played([[7], [8]], [[4]]).completion
    assert whole.trajectory is not UNSET
    cut = replace(whole, trajectory=replace(whole.trajectory, stop="truncated"))
    assert (whole.finish_reason, whole.is_truncated, cut.is_truncated) == ("stop", False, True)


@pytest.mark.parametrize("number", [math.nan, -math.inf, 1.7e308])
def test_what_an_environment_counts_and_gives_is_a_number_that_can_be_summed(number: float) -> None:
    trajectory = played([[7]]).completion.trajectory
    assert trajectory is not UNSET
    refused(changed(trajectory), "metrics", metrics={"calls": number})
    refused(changed(trajectory.turns[0]), "turns", reward=number)
    refused(changed(Reply()), "reward", reward=number)
    refused(changed(Reply()), "reward", metrics={"calls": number})


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_is_finite(reward: float) -> None:
    refused(changed(rollout([7], 0.0)), "reward", reward=reward)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"group_size": 2}, "3 items are no whole groups of 2"),
        ({"to_score": (0, 0)}, "names a place twice"),
        ({"to_score": (3,)}, "one that no item has"),
    ],
)
def test_a_request_for_scores_has_whole_groups_and_asks_for_items_that_it_has(
    fields: dict[str, Any], problem: str
) -> None:
    items = (RewardItem(prompt="", completion="", reference=""),) * 3
    with pytest.raises(ValueError, match=problem):
        RewardRequest(components=(ExactReward(),), items=items, **fields)


def test_a_batch_has_all_rollouts_of_each_prompt() -> None:
    batch = batch_of([([5], [rollout([7], 0.0), rollout([8], 1.0)]), ([6], [rollout([7], 0.0), rollout([8], 1.0)])])
    short = replace(batch.groups[1], rollouts=batch.groups[1].rollouts[:1])
    refused(changed(batch), "groups", groups=(batch.groups[0], short))
    refused(changed(batch), "groups", group_size=3)
    assert isinstance(batch, RolloutBatch)
    assert isinstance(short, RolloutGroup)


def test_reserves_are_as_many_as_prompts_each_time() -> None:
    asked = prompt_batch([[5], [6]])
    reserve = Prompt(prompt_id="train/9", index=2, token_ids=pack_int32([9]), text="", reference="")
    complete = changed(asked)(reserves=((reserve, reserve), (reserve, reserve)))
    assert isinstance(complete, PromptBatch)
    assert complete.prompt_at(1, num_resamples=2) == reserve
    assert complete.prompt_at(1, num_resamples=3) is None
    refused(changed(asked), "reserves", reserves=((reserve, reserve), (reserve,)))
    refused(changed(asked), "reserves", reserves=((reserve,) * 3,))


def test_a_manifest_has_files_in_each_of_its_steps() -> None:
    delta = changed(MANIFEST)(transport="delta", base=(STEP,))
    refused(changed(MANIFEST), "files", files=())
    refused(changed(delta), "files", base=(changed(STEP)(files=()),))
    adapter = AdapterVersion(scaling=1.0, adapter_digest=DIGEST, base=changed(STEP)(files=()))
    refused(changed(MANIFEST), "files", adapter=adapter)


@pytest.mark.parametrize("directory", ["/etc", "../other", "job/../../etc", ".."])
def test_a_manifest_stays_below_the_weight_root(directory: str) -> None:
    elsewhere = {"directory": directory}
    refused(changed(MANIFEST), "directory", **elsewhere)
    with pytest.raises(ContractViolation, match="weight root"):
        changed(MANIFEST)(transport="delta", base=(changed(STEP)(**elsewhere),))


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "below/a.safetensors", ".."])
def test_a_file_of_a_manifest_is_a_name_in_its_folder(name: str) -> None:
    step = replace(STEP, files=(WeightFile(name=name, num_bytes=1),))
    refused(changed(MANIFEST), "files", files=step.files)
    refused(changed(MANIFEST), "files", transport="delta", base=(step,))


def test_only_a_delta_stands_on_other_versions_and_adapters_on_one_base() -> None:
    refused(changed(MANIFEST), "base", transport="file", base=(STEP,))
    adapter = AdapterVersion(scaling=1.0, adapter_digest=DIGEST, base=STEP)
    assert changed(MANIFEST)(adapter=adapter).adapter == adapter
    refused(changed(MANIFEST), "adapter", transport="delta", base=(STEP,), adapter=adapter)


def test_a_state_follows_the_arrows_of_the_lifecycle() -> None:
    assert set(NEXT_STATES) == set(JobState)
    assert JobState.RUNNING in NEXT_STATES[JobState.QUEUED]
    assert [state for state in JobState if state.is_final] == [
        s for s in JobState if NEXT_STATES[s] == {JobState.QUEUED}
    ]


def test_wider_sums_of_a_resume_begin_after_what_is_trained_and_leave_what_was_widened_before() -> None:
    first = resumed_spec(job_spec(), ResumeRequest(wider_sums=4), num_trained=2)
    second = resumed_spec(first, ResumeRequest(wider_sums=7), num_trained=5)
    again = resumed_spec(second, ResumeRequest(wider_sums=9), num_trained=5)
    assert [one.first_iteration for one in again.trainer.wider_sums or ()] == [2, 5]
    assert [again.trainer.wider_bits(iteration) for iteration in range(1, 7)] == [0, 4, 4, 4, 9, 9]
    floats = job_spec(trainer__accumulation="float", deterministic=False)
    with pytest.raises(InvalidInput, match='wider_sums: has no effect with accumulation = "float"'):
        resumed_spec(floats, ResumeRequest(wider_sums=4))


def test_a_rollout_is_built_from_its_own_bytes() -> None:
    sampled = rollout([7, 8], 0.5)
    assert decode(encode(sampled), Rollout) == sampled


def test_a_key_that_is_refused_is_named_by_its_table() -> None:
    with refusal_of("on_unscorable"):
        convert({"on_unscorable": {"\x1b[2J": 0}}, ResumeRequest)


def test_what_is_not_there_is_refused_by_the_name_of_what_it_would_be() -> None:
    with pytest.raises(ContractViolation, match="Rollout: is not there"):
        decode(None, Rollout)


def test_only_a_reply_that_is_done_has_cut_its_trajectory() -> None:
    assert Reply(done=True, truncated=True).truncated
    assert encode(Reply(truncated=False)) == encode(Reply())
    with pytest.raises(ContractViolation, match="only a reply that is done"):
        Reply(truncated=True)


def test_a_given_completion_is_answered_as_it_is_given() -> None:
    asked = prompt_batch([[5, 6]])
    (prompt,) = asked.prompts
    given = replace(prompt, dataset_completion=pack_int32([3, 1]))

    def answer(*token_ids: int) -> Completion:
        return rollout(token_ids, 0.0).completion

    assert completion_problem(answer(3, 1), given, asked) == ""
    assert completion_problem(answer(3, 2), given, asked) == "is not the one that the data set gives"
    assert completion_problem(answer(3, 2), prompt, asked) == ""
