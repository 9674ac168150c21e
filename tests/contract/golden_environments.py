"""The values of make_golden.py that belong to environments: an opening, a step, a trajectory."""

from __future__ import annotations

from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.encoding.wire import Record
from contracts.environments.messages import Message, Sampled, Tool, ToolCall
from contracts.environments.service import (
    CanaryRequest,
    CanaryResponse,
    CloseRequest,
    CloseResponse,
    EnvironmentFacts,
    EnvironmentNames,
    EnvironmentTable,
    Failure,
    NewSession,
    Opening,
    OpeningRequest,
    OpeningResponse,
    OpenRequest,
    Played,
    RenewRequest,
    RenewResponse,
    Reply,
    SessionResponse,
    Step,
    StepRequest,
    Task,
    Turned,
)
from contracts.events import TrajectoryMetrics
from contracts.rollouts import Completion, PromptBatch, PromptTask, RolloutBatch, SamplingParams, Trajectory, Turn
from contracts.spec import JobSpec
from contracts.spec_tables.datasets import EnvironmentDataset
from contracts.spec_tables.environment import EnvironmentSpec

DIGEST = "0f" * 32
TASK = Task(task='{"question": "6*7", "reference": "42", "entry": ""}', seed=2**61)
TABLE = EnvironmentTable(name="calculator", params={"digits": 2, "rounding": 0.5, "strict": True, "unit": "m"})
TOOL = Tool(
    name="calculate",
    description="Evaluates an expression.",
    parameters={"type": "object", "properties": {"expression": {"type": "string"}}},
)
OPENING = Opening(messages=(Message(role="user", content="6*7?"),), tools=(TOOL,))
CALL = Message(
    role="assistant", tool_calls=(ToolCall(name="calculate", arguments='{"expression": "6*7"}', call_id="1"),)
)
REPLY = Reply(
    messages=(Message(role="tool", content="42", call_id="1", name="calculate"),),
    reward=0.25,
    metrics={"calls": 1.0},
)
AGENT_TASK = replace(TASK, sampling=SamplingParams(max_new_tokens=8))
AGENT_OPENING = Opening(messages=(Message(role="user", token_ids=pack_int32([1, 2])),), asks_for_tokens=True)
SAMPLED = Sampled(
    token_ids=pack_int32([3, 4]),
    logprobs=pack_float32([-0.5, -0.25]),
    finish_reason="stop",
    num_prompt_tokens=2,
    policy_version=1,
)
FAILURE = Failure(reason="timeout", detail="a step took longer than 30 s")


PLAYED = TrajectoryMetrics(
    turns_mean=2.0,
    turns_max=2,
    done_share=1.0,
    max_turns_share=0.0,
    max_tokens_share=0.0,
    observation_tokens_mean=2.0,
    environment_reward_mean=1.25,
    num_begun_again=4,
    environment={"calls": 1.0},
)


def played_batch(batch: RolloutBatch) -> RolloutBatch:
    """The batch with each completion as a trajectory of two turns: 2 tokens, an observation of 2, 1 token."""
    turns = (
        Turn(start=0, end=2, finish_reason="stop", reward=0.25, reply_digest=DIGEST),
        Turn(start=4, end=5, finish_reason="stop", reward=1.0, reply_digest=DIGEST),
    )
    completion = Completion(
        token_ids=pack_int32([4, 5, 6, 7, 8]),
        generator_logprobs=pack_float32([-0.5, -0.25, -1.5]),
        finish_reason="stop",
        trajectory=Trajectory(turns=turns, stop="done", attempt=2, metrics={"calls": 1.0}),
    )
    groups = tuple(
        replace(group, rollouts=tuple(replace(rollout, completion=completion) for rollout in group.rollouts))
        for group in batch.groups
    )
    return replace(batch, groups=groups)


def opened_batch(batch: PromptBatch) -> PromptBatch:
    """The batch with prompts that an environment opened."""
    task = PromptTask(task=TASK.task, seed=TASK.seed, opening_digest=DIGEST)
    return replace(batch, prompts=tuple(replace(one, environment=task, sampler_seed=7) for one in batch.prompts))


def environment_spec(spec: JobSpec) -> JobSpec:
    """The spec with an environment, and its own tasks."""
    environment = EnvironmentSpec(name="calculator", params=TABLE.params, max_turns=3, max_tokens=64, renderer="text")
    return replace(spec, environment=environment, dataset=EnvironmentDataset(num_train_prompts=64))


def environment_records(batch: RolloutBatch, prompts: PromptBatch, spec: JobSpec) -> dict[str, Record]:
    """File name → value."""
    played = Played(message=CALL, reply_digest=DIGEST)
    session = NewSession(session_id="generator-a/1", task=TASK, history=(played,))
    return {
        "environment_table": TABLE,
        "environment_facts": EnvironmentFacts(deterministic=True, version="0.1.0"),
        "environment_names": EnvironmentNames(environments=("calculator", "python")),
        "environment_opening_request": OpeningRequest(environment=TABLE, tasks=(TASK,), step_timeout_s=30.0),
        "environment_opening_response": OpeningResponse(openings=(OPENING, FAILURE)),
        "environment_open_request": OpenRequest(
            environment=TABLE, sessions=(session,), step_timeout_s=30.0, idle_s=600.0, job_id="job-1"
        ),
        "environment_step_request": StepRequest(steps=(Step(session_id="generator-a/1", turn=1, message=CALL),)),
        "environment_session_response": SessionResponse(
            results=(Turned(opening=OPENING), Turned(reply=REPLY), FAILURE)
        ),
        "environment_renew_request": RenewRequest(session_ids=("generator-a/1",)),
        "environment_renew_response": RenewResponse(num_open=1),
        "environment_close_request": CloseRequest(session_ids=("generator-a/1",)),
        "environment_close_response": CloseResponse(num_closed=1),
        "environment_canary_request": CanaryRequest(environment=TABLE, tasks=(TASK,), step_timeout_s=30.0),
        "environment_canary_response": CanaryResponse(problem="the opening differs"),
        "environment_agent_opening_request": OpeningRequest(
            environment=TABLE, tasks=(AGENT_TASK,), step_timeout_s=30.0
        ),
        "environment_agent_session_response": SessionResponse(results=(Turned(opening=AGENT_OPENING),)),
        "environment_agent_step_request": StepRequest(
            steps=(Step(session_id="generator-a/1", turn=0, message=replace(CALL, sampled=SAMPLED)),)
        ),
        "job_spec_environment": environment_spec(spec),
        "prompt_batch_opened": opened_batch(prompts),
        "rollout_batch_played": played_batch(batch),
    }
