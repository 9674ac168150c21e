"""One value of every type that crosses a process line, and the committed bytes of each.

`python -m tests.contract.make_golden` writes golden/*.msgpack again. A file that changes is a change of the wire:
older jobs, streams and clients no longer understand it.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from contracts.answers import AuditVerdict, LogPart, SpecCheck, StackState
from contracts.dead_letters import DeadLetter, DeadLetters, DeadPrompt
from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.encoding.wire import Record, encode
from contracts.events import (
    AuditRecord,
    BatchDead,
    CheckpointWritten,
    EvaluationFinished,
    IterationCommitted,
    IterationMetrics,
    MismatchAlarm,
    Rewound,
    SampledBy,
    StateChanged,
    TimelineSpan,
    TrainerStarted,
    UpdateMetrics,
)
from contracts.experience.columns import Column
from contracts.jobs import EvaluationScore, JobState, JobStatus, ResumeRequest, WindowIteration
from contracts.monitor import (
    GeneratorSeen,
    PromptLease,
    StageLease,
    StageState,
    StageWorkerSeen,
    StreamReport,
    StreamState,
)
from contracts.problems import ProblemDetails
from contracts.rewards import (
    ExactReward,
    FormatReward,
    LengthReward,
    MathVerifyReward,
    NumericReward,
    OverlongReward,
    PluginNames,
    PluginReward,
    ReasoningGymReward,
    RegexReward,
    RewardItem,
    RewardRequest,
    RewardResponse,
    Scored,
    Unscorable,
)
from contracts.rollouts import (
    BatchTimings,
    Completion,
    FinishReason,
    Prompt,
    PromptBatch,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    SamplingParams,
)
from contracts.spec import (
    EvaluationSpec,
    JobSpec,
    LimitSpec,
    ModelSpec,
    OptimizerSpec,
    RewardSpec,
    RolloutSpec,
    TimeoutSpec,
    TrainerSpec,
)
from contracts.spec_tables.algorithm import AlgorithmSpec, PluginLoss
from contracts.spec_tables.datasets import (
    AdditionDataset,
    ChatSpec,
    DatasetSpec,
    JsonlDataset,
    PluginDataset,
    ReasoningGymDataset,
)
from contracts.spec_tables.reasoning_tasks import TaskEntry
from contracts.spec_tables.retention import RetentionSpec
from contracts.spec_tables.stages import (
    ExternalStage,
    LlmJudgeStage,
    ReferenceStage,
    RewardModelStage,
    TeacherStage,
)
from contracts.spec_tables.trainer import LoraSpec
from contracts.timeline import IterationTimes, Lane, TimelineReport
from contracts.versions import AdapterVersion, TensorDelta, WeightDelta, WeightFile, WeightManifest, WeightShard
from contracts.weights import DeltaWeights, FileWeights, RedisWeights, WeightsSpec
from tests.contract.golden_environments import PLAYED, environment_records
from tests.contract.golden_recorded import recorded_records

FOLDER = Path(__file__).parent / "golden"
DIGEST = "0123456789abcdef" * 4
NEXT_DIGEST = "fedcba9876543210" * 4
WHOLE_FILES = FileWeights()
DEFAULT_ALGORITHM = AlgorithmSpec()
PROMPT_TOKENS = [5, 70_000, 2_147_483_647]
RESERVE_TOKENS = [5, 6]
RESPONSE_TOKENS = [17, 1]
RESPONSE_LOGPROBS = [-0.25, -1.5]
"""Exact in float32."""
SCORE = EvaluationScore(iteration=2, policy_version=2, sampled=0.4375, greedy=0.75, num_prompts=64)


def prompt_batch() -> PromptBatch:
    """k = 1, G = 2."""
    return PromptBatch(
        job_id="job-0123456789ab",
        batch_id="3/train/0",
        iteration=3,
        purpose="train",
        policy_version=3,
        weights_digest=DIGEST,
        group_size=2,
        sampling=SamplingParams(max_new_tokens=32, temperature=0.5, top_p=0.875, top_k=50),
        seed=2**53,
        prompts=(
            Prompt(
                prompt_id="train/4711",
                index=0,
                token_ids=pack_int32(PROMPT_TOKENS),
                text="12+34=é",
                reference="64",
                task_entry='{"answer": "46"}',
            ),
        ),
        reserves=(
            (
                Prompt(
                    prompt_id="train/17",
                    index=1,
                    token_ids=pack_int32(RESERVE_TOKENS),
                    text="1+1=",
                    reference="2",
                ),
            ),
        ),
    )


def rollout_batch() -> RolloutBatch:
    """The answer to `prompt_batch`, whose prompt was resampled."""
    rewards: tuple[tuple[float, FinishReason], ...] = ((1.0, "stop"), (-0.5, "length"))
    rollouts = tuple(
        Rollout(
            completion=Completion(
                token_ids=pack_int32(RESPONSE_TOKENS),
                generator_logprobs=pack_float32(RESPONSE_LOGPROBS),
                finish_reason=reason,
            ),
            text="64",
            reward=reward,
            reward_breakdown={"exact": reward, "length": 0.0},
        )
        for reward, reason in rewards
    )
    return RolloutBatch(
        job_id="job-0123456789ab",
        batch_id="3/train/0",
        iteration=3,
        purpose="train",
        policy_version=3,
        weights_digest=DIGEST,
        group_size=2,
        generator_id="generator-a",
        attempt=2,
        timings=BatchTimings(
            generation_started_s=1700000000.5,
            generation_ended_s=1700000001.25,
            scoring_started_s=1700000001.25,
            scoring_ended_s=1700000001.5,
        ),
        earlier_rounds=(
            BatchTimings(
                generation_started_s=1699999999.5,
                generation_ended_s=1700000000.25,
                scoring_started_s=1700000000.25,
                scoring_ended_s=1700000000.5,
            ),
        ),
        groups=(
            RolloutGroup(
                prompt_id="train/17",
                prompt_index=1,
                prompt_token_ids=pack_int32(RESERVE_TOKENS),
                rollouts=rollouts,
                num_resamples=1,
            ),
        ),
    )


def weight_manifest() -> WeightManifest:
    return WeightManifest(
        policy_version=3,
        weights_digest=DIGEST,
        dtype="float32",
        directory="job-0123456789ab/weights/v000003",
        files=(WeightFile(name="model.safetensors", num_bytes=5_000_000_000),),
    )


def delta_manifest() -> WeightManifest:
    """Version 4, on version 3."""
    whole = weight_manifest()
    return WeightManifest(
        policy_version=4,
        weights_digest=NEXT_DIGEST,
        dtype="bfloat16",
        transport="delta",
        directory="job-0123456789ab/weights/v000004",
        files=(WeightFile(name="delta.msgpack", num_bytes=70_000_000),),
        base=whole.steps,
    )


def adapter_manifest() -> WeightManifest:
    whole = weight_manifest()
    return WeightManifest(
        policy_version=4,
        weights_digest=NEXT_DIGEST,
        dtype="bfloat16",
        transport="redis",
        directory="job-0123456789ab/weights/v000004",
        files=(WeightFile(name="weights.safetensors", num_bytes=20_000_000),),
        adapter=AdapterVersion(scaling=2.0, adapter_digest=DIGEST, base=whole.steps[0]),
    )


def weight_delta() -> WeightDelta:
    return WeightDelta(
        base_version=3,
        base_digest=DIGEST,
        tensors=(TensorDelta(name="layer.weight", num_changed=2, gaps=b"\x01\x02", differences=b"\x03\x04"),),
    )


def reward_request() -> RewardRequest:
    """A rubric of every component."""
    return RewardRequest(
        components=(
            ExactReward(weight=1.0, ignore_case=True),
            NumericReward(weight=0.5, tolerance=0.001),
            RegexReward(weight=0.25, pattern=r"answer: (?P<answer>\d+)"),
            FormatReward(weight=0.25, pattern=r"<think>.*</think>.*"),
            LengthReward(weight=-0.5, target_chars=100, max_chars=200),
            OverlongReward(weight=0.5, max_tokens=4096, buffer_tokens=512),
            ReasoningGymReward(weight=1.0, strict=False, answer_pattern=""),
            MathVerifyReward(weight=2.0, on_unscorable=0.0),
            PluginReward(weight=1.0, entry_point="shortest"),
        ),
        items=(RewardItem(prompt="12+34=", completion="64", reference="64", task_entry="{}", num_tokens=3),),
        item_timeout_s=2.5,
        job_id="job-0123456789ab",
        settles=True,
    )


def reward_response() -> RewardResponse:
    return RewardResponse(
        results=(
            Scored(reward=1.5, breakdown={"exact": 1.0, "numeric": 1.0}),
            Scored(reward=1.0, breakdown={"exact": 1.0, "math_verify": 0.0}, unscorable={"math_verify": "raised"}),
            Unscorable(reason="timeout", detail="no answer within 2.5 s", component="math_verify"),
        )
    )


def job_spec(
    dataset: DatasetSpec, weights: WeightsSpec = WHOLE_FILES, algorithm: AlgorithmSpec = DEFAULT_ALGORITHM
) -> JobSpec:
    """Each section differs from its defaults where that is legal."""
    return JobSpec(
        name="golden",
        iterations=40,
        model=ModelSpec(path="two-digit-addition", dtype="bfloat16"),
        dataset=dataset,
        reward=RewardSpec(components=(ExactReward(),), item_timeout_s=5.0, request_timeout_s=60.0, max_attempts=2),
        seed=7,
        schedule="synchronous",
        rollout=RolloutSpec(
            batches_per_iteration=4,
            prompts_per_batch=2,
            group_size=8,
            sampling=SamplingParams(max_new_tokens=6),
            on_failed_batch="abandon",
        ),
        algorithm=algorithm,
        optimizer=OptimizerSpec(learning_rate=0.0002, schedule="cosine", warmup_iterations=3),
        trainer=TrainerSpec(
            checkpoint_every_iterations=5, lora=LoraSpec(rank=8, alpha=16.0, target_modules=("q_proj", "v_proj"))
        ),
        weights=weights,
        evaluation=EvaluationSpec(every_iterations=10, num_prompts=128),
        timeouts=TimeoutSpec(generator_lease_s=5.0),
        limits=LimitSpec(max_batch_bytes=1_048_576),
    )


def lagging_spec() -> JobSpec:
    corrected = AlgorithmSpec(correction="decoupled_ppo", correction_high=3.0)
    return replace(job_spec(AdditionDataset()), schedule="delayed", max_policy_lag=2, algorithm=corrected)


def staged_spec() -> JobSpec:
    length = ExternalStage(
        name="length",
        inputs=("completion_ids", "teacher_logprobs"),
        outputs=(Column(name="length_score", type="float32"),),
        unit="group",
        reward_column="length_score",
        weight=-0.5,
    )
    judge = LlmJudgeStage(model="judge", prompt="{prompt} {completion}", answer="{number}/10", on_failure=0.0)
    stages = (ReferenceStage(), TeacherStage(model="teacher"), RewardModelStage(model="classifier"), judge, length)
    algorithm = AlgorithmSpec(kl_coefficient=0.1, distillation_coefficient=0.5)
    return replace(job_spec(AdditionDataset()), deterministic=False, algorithm=algorithm, stages=stages)


def window() -> tuple[WindowIteration, ...]:
    """Iteration 4 is sampled ahead while iteration 3 is trained."""
    return tuple(
        WindowIteration(
            iteration=iteration,
            oldest_version=iteration - 1,
            newest_version=iteration - 1,
            batches_expected=4,
            batches_published=published,
            batches_dead=0,
        )
        for iteration, published in ((3, 1), (4, 0))
    )


def stream_report() -> StreamReport:
    return StreamReport(
        job_id="job-0123456789ab",
        fence_state="open",
        iteration=4,
        max_policy_lag=1,
        window=window(),
        policy_version=3,
        weights_digest=DIGEST,
        trainer_epoch=1700000000000,
        trainer_lease_s=7.5,
        batches_expected=8,
        batches_published=5,
        batches_accepted=29,
        accepted_bytes=1_310_720,
        batches_rejected={"duplicate": 1},
        batches_reclaimed=2,
        batches_hedged=3,
        hedges_won=2,
        batches_failed=1,
        streams=(
            StreamState(
                name="prompts", num_entries=3, num_pending=1, num_waiting=2, oldest_age_s=1.25, memory_bytes=16_384
            ),
        ),
        leases=(PromptLease(batch_id="3/train/0", generator_id="generator-a", idle_s=0.5, deliveries=1),),
        generators=(GeneratorSeen(generator_id="generator-a", seen_s=0.75, info={"job": "job-0123456789ab"}),),
    )


def timeline_report() -> TimelineReport:
    span = TimelineSpan(who="generator-a", what="wait", iteration=3, started_s=1.0, ended_s=1.5)
    return TimelineReport(
        job_id="job-0123456789ab",
        spans=(span,),
        lanes=(Lane(who="generator-a", kind="generator", busy_s=0.5, idle_share=0.5),),
        critical=(0,),
        iterations=(IterationTimes(iteration=3, started_s=1.0, ended_s=2.0),),
        words="generator-a was idle 50 % of the last iteration",
    )


def staged_report() -> StreamReport:
    lease = StageLease(
        stage="teacher", batch_id="4/train/0", item=0, worker_id="stage-1", attempt=2, age_s=1.5, lease_s=28.5
    )
    state = StageState(
        stage="teacher",
        num_free=3,
        num_leased=1,
        oldest_age_s=2.25,
        num_workers=1,
        rows_made=128,
        items_failed=1,
        items_reclaimed=2,
    )
    worker = StageWorkerSeen(worker_id="stage-1", seen_s=0.25, serves=("teacher",), info={"model": "m"})
    return replace(
        stream_report(),
        rows_waiting=32,
        columns_bytes=65_536,
        stages=(state,),
        stage_leases=(lease,),
        stage_workers=(worker,),
    )


def job_status() -> JobStatus:
    return JobStatus(
        job_id="job-0123456789ab",
        name="golden",
        state=JobState.RUNNING,
        reason="waits for batch 3/train/0",
        schedule="delayed",
        max_policy_lag=1,
        window=window(),
        iterations=40,
        iterations_committed=3,
        policy_version=3,
        weights_digest=DIGEST,
        created_s=1700000000.0,
        started_s=1700000001.0,
        run_directory="job-0123456789ab",
        trainer_epoch=1_700_000_000_123,
        batches_expected=4,
        batches_published=1,
        batches_accepted=13,
        batches_rejected={"stale": 1, "duplicate": 2},
        batches_reclaimed=1,
        batches_hedged=2,
        hedges_won=1,
        live_generators=2,
        evaluation_before=SCORE,
    )


def iteration_metrics(lag_counts: tuple[int, ...] = (), lag_mean: float = 0.0) -> IterationMetrics:
    return IterationMetrics(
        iteration=3,
        policy_version=3,
        trainer_epoch=1_700_000_000_123,
        num_batches=4,
        num_completions=64,
        num_tokens=256,
        reward_mean=0.5,
        reward_std=0.25,
        reward_components={"exact": 0.5},
        zero_advantage_share=0.125,
        num_resamples=3,
        response_tokens_mean=4.0,
        response_tokens_max=6,
        truncated_share=0.0625,
        loss=-0.015625,
        clip_share=0.0,
        kl_to_reference=0.0,
        grad_norm=1.5,
        learning_rate=0.0002,
        mismatch_k3=0.0,
        mismatch_max=0.000001,
        effective_sample_share=1.0,
        lag_counts=lag_counts,
        lag_mean=lag_mean,
        started_s=1700000000.0,
        wall_s=2.0,
        generation_s=1.5,
        training_s=1.0,
        waiting_s=0.5,
        step_s=0.0625,
        publish_s=0.125,
        bubble_s=0.25,
        tokens_per_s=128.0,
        updates=(
            UpdateMetrics(loss=0.0, clip_share=0.0, kl_to_reference=0.0, grad_norm=1.0),
            UpdateMetrics(loss=-0.03125, clip_share=0.0, kl_to_reference=0.0, grad_norm=2.0),
        ),
    )


def audit_record(kind: str) -> AuditRecord:
    committed = kind == "commit"
    return AuditRecord(
        kind=kind,
        iteration=3,
        policy_version=3,
        weights_digest=DIGEST,
        next_weights_digest=NEXT_DIGEST if committed else "",
        trainer_epoch=1_700_000_000_123,
        batches={"3/train/0": NEXT_DIGEST} if committed else {},
        abandoned={"3/train/1": "no reward"} if committed else {},
        loss=-0.015625,
        grad_norm=1.5,
        reward_mean=0.5,
        previous=DIGEST,
    )


def audit_record_of_a_lag() -> AuditRecord:
    """Two of its three batches were sampled by the two versions before."""
    return AuditRecord(
        kind="commit",
        iteration=3,
        policy_version=3,
        weights_digest=DIGEST,
        next_weights_digest=NEXT_DIGEST,
        trainer_epoch=1_700_000_000_123,
        batches={f"3/train/{index}": NEXT_DIGEST for index in range(3)},
        abandoned={},
        sampled=(
            SampledBy(policy_version=1, weights_digest=NEXT_DIGEST, batches=("3/train/2",)),
            SampledBy(policy_version=2, weights_digest=DIGEST, batches=("3/train/0",)),
        ),
        previous=DIGEST,
    )


def audit_record_of_stages() -> AuditRecord:
    """It has every optional field but those of a lag."""
    return replace(
        audit_record("commit"),
        on_unscorable={"math_verify": 0.0},
        unscorable={"3/train/0": {"math_verify: timeout": 1}},
        columns={"3/train/0": DIGEST},
    )


GOLDEN: dict[str, Record] = {
    "prompt_batch": prompt_batch(),
    "rollout_batch": rollout_batch(),
    "weight_manifest": weight_manifest(),
    "weight_manifest_delta": delta_manifest(),
    "weight_manifest_adapter": adapter_manifest(),
    "weight_delta": weight_delta(),
    "problem_details": ProblemDetails(
        title="Unprocessable Entity", status=422, detail="must be 1 or more", field="iterations", cure="give more"
    ),
    "spec_check": SpecCheck(valid=True),
    "log_part": LogPart(text="12:03:44 trainer    info   ready\n", after=10, next=42, size=99),
    "stack_state": StackState(
        redis_used_bytes=3_000_000,
        redis_max_bytes=1_073_741_824,
        live_generators=2,
        live_stage_workers=1,
        num_jobs=7,
        max_jobs=1000,
    ),
    "audit_verdict": AuditVerdict(
        job_id="job-0123456789ab",
        verified=False,
        records=3,
        iterations=2,
        batches_trained=16,
        batches_evaluated=4,
        rewinds=1,
        digests_recomputed=2,
        gaps=("iteration 1: 1/train/0 is missing",),
        notes=("no published versions are below the weight root",),
    ),
    "plugin_names": PluginNames(entry_points=("brevity", "politeness")),
    "task_entry": TaskEntry(task="chain_sum", entry={"question": "1 + 2", "answer": "3", "metadata": {"seed": 7}}),
    "weight_shard": WeightShard(
        policy_version=4,
        path="job-0123456789ab/weights/.v000004.0123456789ab/weights-00001-of-00002.safetensors",
        name="weights-00001-of-00002.safetensors",
        num_bytes=268_435_456,
    ),
    "reward_request": reward_request(),
    "reward_response": reward_response(),
    "job_spec_addition": job_spec(AdditionDataset()),
    "job_spec_reasoning_gym": job_spec(
        ReasoningGymDataset(
            task="chain_sum",
            params={"min_terms": 2, "scale": 0.5, "signed": True, "unit": "m"},
            question_suffix=" Answer:",
            chat=ChatSpec(system_prompt="Be brief."),
        ),
        DeltaWeights(snapshot_every_versions=20),
    ),
    "job_spec_jsonl": job_spec(JsonlDataset(train_path="train.jsonl", evaluation_path="test.jsonl"), RedisWeights()),
    "job_spec_plugins": job_spec(
        PluginDataset(entry_point="riddles", params={"level": 2}, chat=ChatSpec(system_prompt="Be brief.")),
        algorithm=AlgorithmSpec(loss=PluginLoss(entry_point="mine")),
    ),
    "job_spec_lagging": lagging_spec(),
    "job_spec_retained": replace(job_spec(AdditionDataset()), retention=RetentionSpec(keys_days=7.0, files_days=90.5)),
    "job_spec_staged": staged_spec(),
    "stage_plan": staged_spec().stage_plan,
    "job_status": job_status(),
    "dead_letters": DeadLetters(
        letters=(
            DeadLetter(
                entry_id="1700000000500-0",
                at_s=1700000000.5,
                batch_id="3/train/1",
                iteration=3,
                reason="no reward",
                attempts=3,
                prompts=(DeadPrompt(prompt_id="train/7", text="1+1="),),
                can_retry=False,
                why_not="iteration 3 is committed without it",
            ),
        )
    ),
    "resume_request": ResumeRequest(
        iterations=20, on_unscorable={"math_verify": 0.0, "plugin": "fail"}, on_failure={"environment": -1.0}
    ),
    "stream_report": stream_report(),
    "stream_report_of_stages": staged_report(),
    "evaluation_score": SCORE,
    "event_state_changed": StateChanged(at_s=1700000000.5, state=JobState.FAILED, reason="the loss is not finite"),
    "event_trainer_started": TrainerStarted(
        at_s=1700000000.5, trainer_epoch=1_700_000_000_123, next_iteration=3, resumed=True
    ),
    "event_iteration_committed": IterationCommitted(
        at_s=1700000000.5, metrics=iteration_metrics(), weights_digest=NEXT_DIGEST
    ),
    "event_iteration_committed_of_a_lag": IterationCommitted(
        at_s=1700000000.5, metrics=iteration_metrics((1, 2, 1), 1.0), weights_digest=NEXT_DIGEST
    ),
    "event_iteration_committed_of_a_teacher": IterationCommitted(
        at_s=1700000000.5, metrics=replace(iteration_metrics(), kl_to_teacher=0.75), weights_digest=NEXT_DIGEST
    ),
    "event_iteration_committed_of_an_environment": IterationCommitted(
        at_s=1700000000.5, metrics=replace(iteration_metrics(), trajectories=PLAYED), weights_digest=NEXT_DIGEST
    ),
    "event_evaluation_finished": EvaluationFinished(at_s=1700000000.5, score=SCORE),
    "event_checkpoint_written": CheckpointWritten(
        at_s=1700000000.5, iteration=3, directory="job-0123456789ab/checkpoints/000003", weights_digest=NEXT_DIGEST
    ),
    "event_batch_dead": BatchDead(at_s=1700000000.5, batch_id="3/train/1", reason="no reward"),
    "event_mismatch_alarm": MismatchAlarm(
        at_s=1700000000.5,
        iteration=3,
        mismatch_k3=0.25,
        mismatch_max=4.5,
        effective_sample_share=0.5,
        threshold=0.01,
    ),
    "event_rewound": Rewound(at_s=1700000000.5, iteration=2, committed=4, trainer_epoch=1_700_000_000_123),
    "timeline_span": TimelineSpan(
        who="generator-a", what="generate", iteration=3, batch_id="3/train/0", started_s=1.5, ended_s=2.5
    ),
    "timeline_report": timeline_report(),
    "audit_record_commit": audit_record("commit"),
    "audit_record_of_a_lag": audit_record_of_a_lag(),
    "audit_record_of_stages": audit_record_of_stages(),
    "audit_record_rewind": audit_record("rewind"),
    **environment_records(rollout_batch(), prompt_batch(), job_spec(AdditionDataset())),
    **recorded_records(rollout_batch(), prompt_batch(), weight_manifest(), job_spec(AdditionDataset())),
}
"""File name without its ending → the value that it holds."""


def main() -> None:
    """Writes every file."""
    FOLDER.mkdir(exist_ok=True)
    for name, value in GOLDEN.items():
        (FOLDER / f"{name}.msgpack").write_bytes(encode(value))


if __name__ == "__main__":
    main()
