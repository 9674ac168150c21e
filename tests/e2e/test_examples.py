"""The programs of examples/, each doing a real job to its end beside our own processes, and in threads."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, AutoTokenizer

from broker.connection.roles import GENERATOR, STAGE, TRAINER
from broker.monitor import job_status
from contracts.encoding.json_lines import read_json_lines
from contracts.encoding.wire import convert
from contracts.events import IterationMetrics
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.waiting import Waiting
from onbeat.client import Consumer, Producer, PromptClaim, Sample
from onbeat.recording.files import RecordedFiles, write_record
from tests.chaos.short_job import long_variant
from tests.pipeline import REPOSITORY, Pipeline, wait_for_exit
from tests.recorded import record_of

EXAMPLES = REPOSITORY / "examples"
LONGEST = {"trainer.py": 60, "generator.py": 41, "stage.py": 30}
VARIETY = {
    "type": "external",
    "name": "variety",
    "inputs": ["text"],
    "outputs": [{"name": "variety", "type": "float32"}],
    "reward_column": "variety",
    "weight": 0.1,
}


def spec_with(*, prompts: int, **tables: Any) -> JobSpec:
    """prompts: of an iteration."""
    values = {
        "name": "an example",
        "iterations": 4,
        "deterministic": False,
        "model": {"path": "configs/models/two-digit-addition"},
        "dataset": {"type": "addition"},
        "reward": {"components": [{"type": "exact"}]},
        "rollout": {
            "batches_per_iteration": 2,
            "prompts_per_batch": prompts // 2,
            "group_size": 8,
            "max_prompt_tokens": 8,
            "sampling": {"max_new_tokens": 5},
        },
        "evaluation": {"num_prompts": 3 * prompts, "prompts_per_batch": 3 * prompts},
    }
    return convert(values | tables, JobSpec)


def until_committed(pipeline: Pipeline, job_id: str, child: ChildProcess, *, number: int) -> None:
    waiting = Waiting(f"{number} commits", deadline_s=240.0)
    while len(pipeline.jobs.audit(job_id)) < number:
        assert child.exit_code is None, child.tail()
        waiting.poke()
        child.wait(0.1)


def done(child: ChildProcess) -> None:
    assert wait_for_exit(child) == 0, child.tail()


def test_the_examples_are_as_short_as_they_are_said_to_be() -> None:
    for name, longest in LONGEST.items():
        assert len((EXAMPLES / name).read_text().splitlines()) <= longest


def test_a_trainer_in_plain_pytorch_learns_is_killed_and_goes_on_and_its_job_is_verified(pipeline: Pipeline) -> None:
    job_id, _ = pipeline.jobs.create(spec_with(prompts=64, iterations=10, trainer={"external": True}))
    generator = pipeline.start("producer-ours")
    first = pipeline.start_program("trainer-1", EXAMPLES / "trainer.py", job_id, role=TRAINER)
    until_committed(pipeline, job_id, first, number=2)
    first.kill()
    done(pipeline.start_program("trainer-2", EXAMPLES / "trainer.py", job_id, role=TRAINER))
    generator.stop(grace_s=5.0)

    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    verdict = pipeline.verdict(job_id)
    assert not verdict.gaps
    assert (verdict.iterations, verdict.batches_trained) == (10, 20)
    lines = read_json_lines(RunFolder(pipeline.settings.run_root_path, job_id).metrics, IterationMetrics)
    assert {line.iteration for line in lines} == set(range(10))
    assert all(line.grad_norm > 0.0 for line in lines)
    status = job_status(pipeline.broker, job_id)
    assert status.evaluation_before is not None
    assert status.evaluation_latest is not None
    assert (status.evaluation_latest.greedy or 0.0) > (status.evaluation_before.greedy or 1.0), "it learns"


def test_a_generator_and_a_stage_of_ones_own_serve_our_trainer(pipeline: Pipeline) -> None:
    spec = spec_with(prompts=4, iterations=2, stages=[VARIETY], optimizer={"learning_rate": 1e-4})
    job_id, _ = pipeline.jobs.create(spec)
    generator = pipeline.start_program("generator", EXAMPLES / "generator.py", job_id, role=GENERATOR)
    stage = pipeline.start_program("stage", EXAMPLES / "stage.py", job_id, role=STAGE)
    pipeline.train_to_the_end(job_id)
    done(generator)
    done(stage)

    verdict = pipeline.verdict(job_id)
    assert not verdict.gaps
    assert verdict.batches_trained == 4


def test_rejection_sampling_keeps_the_best_completion_of_each_prompt_that_was_answered_well(tmp_path: Path) -> None:
    files = RecordedFiles(RunFolder(tmp_path, "job"))
    for number, rewards in enumerate([(0.0, 1.0), (0.0, 0.5)]):
        batch_id = f"{number}/train/0"
        record = record_of("job", batch_id)
        (group, *_) = record.batch.groups
        rollouts = tuple(replace(group.rollouts[0], reward=reward, text=f"{reward:g}") for reward in rewards)
        groups = (replace(group, rollouts=rollouts),) * len(record.batch.groups)
        batch = replace(record.batch, groups=groups, group_size=2)
        asked = replace(record.prompt_batch, group_size=2)
        files.path_of(batch_id).parent.mkdir(parents=True)
        changed = replace(record, batch=batch, prompt_batch=asked, advantages=None, trainer_logprobs=None)
        write_record(files.path_of(batch_id), changed)
    rows = tmp_path / "rows.jsonl"
    arguments = [str(tmp_path), "job", str(rows)]
    subprocess.run([sys.executable, str(EXAMPLES / "rejection_sampling.py"), *arguments], check=True, cwd=REPOSITORY)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["completion"] for row in found] == ["1"] * len(record.batch.groups)


def drawn(model: Any, words: Any, claim: PromptClaim, prompt: int) -> list[Sample]:
    """Samples of one prompt, each as long as it may be."""
    ids = torch.tensor([claim.prompt_ids(prompt)] * claim.group_size)
    start, logprobs = ids.shape[1], []
    for _ in range(claim.sampling.max_new_tokens):
        now = model(ids).logits[:, -1].log_softmax(dim=-1)
        chosen = torch.multinomial(now.exp(), 1)
        logprobs.append(now.gather(1, chosen))
        ids = torch.cat([ids, chosen], dim=1)
    rows = zip(ids[:, start:].tolist(), torch.cat(logprobs, dim=1).tolist(), strict=True)
    return [
        Sample(token_ids=tokens, logprobs=of_tokens, text=words.decode(tokens, True), finish_reason="length")
        for tokens, of_tokens in rows
    ]


@long_variant
def test_two_threads_of_one_event_loop_sample_score_and_train_a_job_to_its_end(pipeline: Pipeline) -> None:
    spec = spec_with(prompts=4, iterations=2, trainer={"external": True})
    job_id, _ = pipeline.jobs.create(spec)

    @torch.no_grad()
    def generate() -> list[tuple[str, int, str]]:
        accepted = []
        with Producer(job_id, settings=pipeline.settings) as producer:
            model = producer.make_model()
            tokenizer = AutoTokenizer.from_pretrained(producer.model_folder)
            first = producer.claim()
            assert first is not None
            producer.fail(first, "not now")
            for claim in producer:
                digest = producer.load(claim, model)
                samples = [drawn(model, tokenizer, claim, prompt) for prompt in range(len(claim.prompts))]
                scores = producer.score(claim, samples)
                assert producer.publish(claim, samples, scores, weights_digest=digest)
                accepted.append((claim.batch.batch_id, claim.manifest.policy_version, digest))
        return accepted

    @torch.no_grad()
    def train() -> list[str]:
        digests = [""]
        with Consumer(job_id, settings=pipeline.settings) as consumer:
            model = AutoModelForCausalLM.from_pretrained(consumer.model_folder, dtype=torch.float32)
            consumer.begin(model)
            for iteration in consumer:
                rewards = [float(rows.rewards.sum()) for rows in iteration]
                for parameter in model.parameters():
                    parameter.add_(1e-4 * (1.0 + sum(rewards)))
                digests.append(consumer.commit().weights_digest)
        return digests

    async def both() -> tuple[list[tuple[str, int, str]], list[str]]:
        accepted, digests = await asyncio.gather(asyncio.to_thread(generate), asyncio.to_thread(train))
        return accepted, digests

    accepted, digests = asyncio.run(both())
    assert len(accepted) == len({batch_id for batch_id, _, _ in accepted}) == 2 * 2 + 2 * 2, "evaluations too"
    assert {digest for _, version, digest in accepted if version} == set(digests[1:])
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    assert pipeline.verdict(job_id).gaps == ()
