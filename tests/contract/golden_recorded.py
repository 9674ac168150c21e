"""Values of what lies in a run folder: what is recorded of a batch, how HTTP shows it, what a checkpoint says."""

from __future__ import annotations

from msgspec.structs import replace

from contracts.checkpoints import FORMAT_VERSION, AdapterState, CheckpointState, OlderVersion
from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.encoding.wire import Record
from contracts.recorded.batches import RecordedBatch, RecordedIteration, RecordedSummary
from contracts.recorded.views import (
    CompletionView,
    FoundText,
    FoundTexts,
    GroupView,
    IterationView,
    RecordedBatchView,
    RecordedList,
    TurnView,
)
from contracts.rollouts import PromptBatch, RolloutBatch, batch_digest
from contracts.spec import JobSpec
from contracts.spec_tables.recording import RecordingSpec
from contracts.versions import WeightManifest

POLICY = RecordingSpec(share=0.25, evaluations=True, keep_iterations=7, max_bytes=65536, max_version_bytes=0)

CHECKPOINT = CheckpointState(
    format_version=FORMAT_VERSION,
    job_id="job-0123456789ab",
    iteration=3,
    policy_version=4,
    weights_digest="ab" * 32,
    adapters=AdapterState(base_digest="cd" * 32, adapters_digest="ef" * 32),
    torch_random_state="00ff",
    files={"model.safetensors": "01" * 32, "older-v000003.safetensors": "23" * 32},
    older=(
        OlderVersion(
            policy_version=3, weights_digest="45" * 32, tensors_digest="67" * 32, file="older-v000003.safetensors"
        ),
    ),
)


def recorded_batch(batch: RolloutBatch, asked: PromptBatch, manifest: WeightManifest) -> RecordedBatch:
    """Returns the record of a batch, whose second completion didn't go through the model."""
    asked = replace(asked, batch_id=batch.batch_id, prompts=asked.prompts[:1], group_size=batch.group_size, reserves=())
    asked = replace(asked, prompts=asked.prompts * len(batch.groups))
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    first = pack_float32([-0.25] * rollouts[0].completion.num_sampled)
    return RecordedBatch(
        asked=asked,
        batch=batch,
        batch_digest=batch_digest(batch),
        manifest=manifest,
        engine="transformers cpu",
        rewards=(0.5,) * len(rollouts),
        advantages=(0.5,) * len(rollouts),
        trainer_logprobs=(first, *(None for _ in rollouts[1:])),
        piece_ids=pack_int32([3, 5]),
        pieces=(" the", "\u2028<b>"),
    )


def recorded_records(
    batch: RolloutBatch, asked: PromptBatch, manifest: WeightManifest, spec: JobSpec
) -> dict[str, Record]:
    """Returns one value of each type, by the name of its file."""
    record = recorded_batch(batch, asked, manifest)
    summary = RecordedSummary(
        batch_id="3/train/1",
        purpose="train",
        index=1,
        policy_version=3,
        weights_digest=batch.weights_digest,
        generator_id="generator-a",
        num_groups=1,
        num_completions=2,
        reward_mean=0.5,
        batch_digest=record.batch_digest,
    )
    return {
        "checkpoint_state": CHECKPOINT,
        "job_spec_recorded": replace(spec, recording=POLICY),
        "recorded_batch": record,
        "recorded_iteration": RecordedIteration(
            iteration=3,
            batches=(summary,),
            versions={"job-0123456789ab/weights/v000003": 1024},
            baseline=0.25,
            deviation=2.0,
            num_left_out=1,
        ),
        "recorded_list": RecordedList(
            recording=POLICY,
            bytes=4096,
            iterations=(IterationView(iteration=3, batches=(summary,), num_left_out=1),),
            damaged=("rollouts/i000002/iteration.msgpack: is damaged",),
        ),
        "recorded_batch_view": _view(record),
        "found_texts": FoundTexts(
            found=(FoundText(batch_id="3/train/1", group=0, sample=-1, excerpt="12+34="),),
            searched_iterations=4,
            is_complete=True,
        ),
    }


def _view(record: RecordedBatch) -> RecordedBatchView:
    completion = CompletionView(
        sample=0,
        text="46",
        reward=0.5,
        reward_breakdown={"exact": 1.0},
        unscorable={},
        advantage=None,
        finish_reason="stop",
        pieces=("4", "6", " so"),
        sampled=(True, True, False),
        generator_logprobs=(-0.5, -0.25, None),
        trainer_logprobs=(-0.5, None, None),
        turns=(TurnView(start=0, end=2, finish_reason="stop", reward=0.5, advantage=0.25),),
        stop="done",
        environment_metrics={"calls": 1.0},
        columns={"variety": 0.5, "teacher_logprobs": (-0.5, None)},
    )
    group = GroupView(
        prompt_id="train/7",
        prompt_index=7,
        prompt_text="12+34=",
        reference="46",
        num_resamples=0,
        completions=(completion,),
    )
    batch = record.batch
    return RecordedBatchView(
        job_id=batch.job_id,
        batch_id=batch.batch_id,
        iteration=batch.iteration,
        purpose=batch.purpose,
        policy_version=batch.policy_version,
        weights_digest=batch.weights_digest,
        generator_id=batch.generator_id,
        attempt=batch.attempt,
        batch_digest=record.batch_digest,
        timings=batch.timings,
        groups=(group,),
        can_sample_again=False,
        why_not="the job is not deterministic",
    )
