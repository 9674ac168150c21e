"""Processes of one's own as parts of a job: what they get, what they put, and which word each mistake meets."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from broker.connection import script_texts
from broker.connection.client import Broker
from broker.connection.roles import STAGE
from broker.job_store import JobStore
from broker.monitor import job_status
from broker.trainer_side import TrainerSide
from contracts.errors import (
    Conflict,
    ContractViolation,
    FencedOff,
    FenceViolation,
    InvalidInput,
    JobEnded,
    NotFound,
    ProofFailed,
)
from contracts.events import record_digest
from contracts.jobs import JobState
from contracts.rewards import Scored
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.audit.weights import digests_on_disk
from onbeat.client import (
    Consumer,
    Producer,
    PromptClaim,
    Sample,
    Stage,
    TrainingRows,
)
from onbeat.loop.lease_keeper import LeaseKeeper
from onbeat.recording.files import RecordedFiles
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec
from tests.integration.fence_parts import end_leases
from tests.own_trainer import generating

LENGTHS = {
    "type": "external",
    "name": "lengths",
    "inputs": ["completion_ids", "text"],
    "outputs": [{"name": "length", "type": "float32"}, {"name": "places", "type": "int32", "per": "token"}],
    "reward_column": "length",
    "weight": 2.0,
    "unit": "group",
}


def created(broker: Broker, **changes: Any) -> str:
    spec = job_spec(
        **{
            "iterations": 3,
            "deterministic": False,
            "trainer__external": True,
            "rollout__batches_per_iteration": 2,
            "timeouts__trainer_lease_s": 1.0,
            **changes,
        }
    )
    return JobStore(broker).create(spec)[0]


def model_of(consumer: Consumer) -> Any:
    return AutoModelForCausalLM.from_pretrained(consumer.state or consumer.model_folder, dtype=torch.float32)


def step(model: Any, rows: list[TrainingRows]) -> None:
    """Moves every weight by a function of the rewards, whatever their order."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4 * sum(float(some.rewards.sum()) for some in rows) + 1e-4)


def trained(consumer: Consumer, *, most: int = 100, saves: bool = True) -> None:
    """Trains iterations to the job's end, or `most` of them."""
    model = model_of(consumer)
    consumer.begin(model)
    for number, iteration in enumerate(consumer):
        if number == most:
            return
        step(model, list(iteration))
        consumer.commit(loss=1.0, grad_norm=2.0, save=model.save_pretrained if saves else None)


def verified(own: StackSettings, broker: Broker, job_id: str) -> int:
    """Asserts that `onbeat verify` passes; the number of rewinds."""
    jobs = JobStore(broker)
    spec: JobSpec = jobs.spec(job_id)
    entries = [AuditEntry(record=record, digest=record_digest(record)) for record in jobs.audit(job_id)]
    on_disk = digests_on_disk(RunFolder(own.run_root_path, job_id))
    verdict = verify_run(entries, spec, complete=True, digests_on_disk=on_disk)
    assert not verdict.gaps
    assert on_disk
    return verdict.rewinds


def test_the_client_imports_no_torch() -> None:
    parts = "Stage, Producer, Consumer"
    program = f"import sys; from onbeat.client import {parts}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_job_is_trained_and_verified_with_the_columns_of_a_stage(own: StackSettings, broker: Broker) -> None:
    job_id = created(broker, stages=[LENGTHS], recording={"evaluations": True})

    def serve() -> None:
        with Stage(job_id, "lengths", settings=own) as stage:
            for rows in stage:
                ids = rows["completion_ids"]
                lengths = np.array([len(one) for one in ids], dtype=np.float32)
                assert stage.put(rows, {"length": lengths, "places": [np.arange(len(one)) for one in ids]})

    worker = threading.Thread(target=serve)
    worker.start()
    with generating(broker, job_id), Consumer(job_id, max_rows=4, settings=own) as consumer:
        model = model_of(consumer)
        consumer.begin(model)
        for iteration in consumer:
            loader: DataLoader[TrainingRows] = DataLoader(consumer.dataset(), batch_size=None)
            batches = list(loader)
            assert [len(rows) for rows in batches] == [4] * 4
            for rows in batches:
                lengths = [len(ids) for ids in rows["completion_ids"]]
                assert rows["length"].tolist() == lengths
                assert [one.tolist() for one in rows["places"]] == [list(range(length)) for length in lengths]
                assert rows.rewards.tolist() == (rows["reward"] + 2.0 * np.array(lengths)).tolist()
                assert {key.iteration for key in rows.keys_of_rows} == {iteration.number}
            step(model, batches)
            consumer.commit(save=model.save_pretrained)
    worker.join()
    status = job_status(broker, job_id)
    assert status.state is JobState.SUCCEEDED
    assert status.evaluation_latest is not None
    assert verified(own, broker, job_id) == 0
    files = RecordedFiles(RunFolder(own.run_root_path, job_id))
    records = [files.read(one.batch_id) for number in files.iterations() for one in files.index(number).batches]
    audited = {name for record in JobStore(broker).audit(job_id) for name in record.batches}
    assert {record.batch.batch_id for record in records} == audited
    for record in records:
        assert (record.advantages, record.trainer_logprobs) == (None, None), "what this trainer can't say"
        assert record.pieces
        if record.batch.purpose == "train":
            assert record.rewards is not UNSET
            assert set(record.batch.columns or ()) == {"length", "places"}


@pytest.mark.parametrize(("saves", "goes_on_at"), [(True, 2), (False, 0)])
def test_a_trainer_that_died_goes_on_at_its_newest_state(
    own: StackSettings, broker: Broker, saves: bool, goes_on_at: int
) -> None:
    job_id = created(broker)
    with generating(broker, job_id):
        with Consumer(job_id, settings=own) as consumer:
            trained(consumer, most=2, saves=saves)
        with Consumer(job_id, settings=own) as consumer:
            assert consumer.version == goes_on_at
            assert (consumer.state is None) == (not saves)
            trained(consumer)
    assert JobStore(broker).state(job_id) is JobState.SUCCEEDED
    assert verified(own, broker, job_id) == (0 if saves else 1)


def test_other_weights_than_the_versions_are_refused_by_their_names(own: StackSettings, broker: Broker) -> None:
    job_id = created(broker)
    with generating(broker, job_id):
        with Consumer(job_id, settings=own) as consumer:
            trained(consumer, most=1)
        with Consumer(job_id, settings=own) as consumer:
            model = model_of(consumer)
            tensors = dict(model.named_parameters())
            with pytest.raises(InvalidInput, match=r"weights: tensor head is none of the model's"):
                consumer.begin(tensors | {"head": torch.zeros(1)})
            name = min(tensors)
            with pytest.raises(InvalidInput, match=rf"tensor {name} is torch.bfloat16 .* torch.float32"):
                consumer.begin(tensors | {name: tensors[name].bfloat16()})
            step(model, [])
            with pytest.raises(InvalidInput, match=r"weights: they have digest .*, version 1 of the job is"):
                consumer.begin(model)


def test_an_iteration_that_was_not_taken_is_not_committed(own: StackSettings, broker: Broker) -> None:
    job_id = created(broker)
    with generating(broker, job_id), Consumer(job_id, max_rows=1, settings=own) as consumer:
        with pytest.raises(InvalidInput, match="begin: comes before"):
            next(iter(consumer))
        consumer.begin(model_of(consumer))
        iteration = next(iter(consumer))
        first = next(iter(iteration))
        assert len(first) == first.group_size == 4
        with pytest.raises(InvalidInput, match="iteration 0 was not taken to its end"):
            consumer.commit()
        assert len(list(iteration)) == 3
        assert consumer.commit().policy_version == 1
        with pytest.raises(InvalidInput, match="no iteration is open"):
            consumer.commit()


def test_a_cancel_ends_the_trainer_quietly_and_the_job(own: StackSettings, broker: Broker) -> None:
    job_id, jobs = created(broker), JobStore(broker)
    reached = False
    with generating(broker, job_id), Consumer(job_id, settings=own) as consumer:
        consumer.begin(model_of(consumer))
        for iteration in consumer:
            list(iteration)
            jobs.request_cancel(job_id)
            consumer.commit()
            reached = True
    assert not reached
    assert jobs.state(job_id) is JobState.CANCELLED


def is_free(folder: Path) -> bool:
    """Whether a reader of this host may bring files into a run folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def taken_by_another(broker: Broker, job_id: str) -> None:
    """Lets a trainer's lease end, and takes the job for another trainer."""
    other = TrainerSide(broker, job_id, num_open=1, owner="elsewhere", lease_s=600.0)
    for _ in range(100):
        broker.redis.hset(broker.job_keys(job_id).fence, "lease_until", 0)
        try:
            other.acquire()
        except Conflict:
            # The trainer's keeper has renewed the lease between the two.
            continue
        return
    raise AssertionError("the trainer's keeper renews its lease each time")


def test_a_trainer_that_has_left_or_lost_the_job_lives_on_and_holds_its_run_folder_no_more(
    own: StackSettings, broker: Broker, tmp_path: Path
) -> None:
    own = replace(own, objects=(tmp_path / "bucket").as_uri())
    job_id = created(broker)
    folder = RunFolder(own.run_root_path, job_id).path
    with Consumer(job_id, settings=own) as left:
        assert not is_free(folder)
    assert is_free(folder), left
    with Consumer(job_id, settings=own) as lost:
        lost.begin(model_of(lost))
        iteration = next(iter(lost))
        taken_by_another(broker, job_id)
        assert not is_free(folder)
        with pytest.raises(FencedOff):
            list(iteration)
        assert is_free(folder)


def test_a_trainer_whose_claim_says_first_that_it_lost_the_job_lets_go_of_its_run_folder(
    own: StackSettings, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(own, objects=(tmp_path / "bucket").as_uri())
    job_id = created(broker)
    with Consumer(job_id, settings=own) as lost:
        lost.begin(model_of(lost))
        iteration = next(iter(lost))
        monkeypatch.setattr(LeaseKeeper, "check", lambda _keeper: None)
        taken_by_another(broker, job_id)
        with pytest.raises(FencedOff):
            list(iteration)
        assert is_free(RunFolder(own.run_root_path, job_id).path)


def test_a_job_that_our_own_trainer_trains_is_refused_and_so_is_an_unknown_one(
    own: StackSettings, broker: Broker
) -> None:
    with pytest.raises(InvalidInput, match=r"trainer\.external: .* is trained by Onbeat's own trainer"):
        Consumer(created(broker, trainer__external=False), settings=own)
    for part in (Consumer, Producer, lambda job, settings: Stage(job, "lengths", settings=settings)):
        with pytest.raises(NotFound, match="there is no job job-none"):
            part("job-none", settings=own)


def test_each_mistake_of_a_stage_meets_its_own_words(own: StackSettings, broker: Broker) -> None:
    job_id = created(broker, stages=[LENGTHS, {"type": "reference"}])
    with pytest.raises(NotFound, match=r"has no stage height .*lengths, reference"):
        Stage(job_id, "height", settings=own)
    with pytest.raises(InvalidInput, match="is of type reference, which Onbeat's own workers serve"):
        Stage(job_id, "reference", settings=own)
    with (
        generating(broker, job_id),
        Consumer(job_id, settings=own) as consumer,
        Stage(job_id, "lengths", settings=own) as stage,
    ):
        consumer.begin(model_of(consumer))
        rows = stage.get(max_rows=1)
        assert rows is not None
        assert len(rows) == 4, "an item is a whole group"
        places = [np.zeros(len(ids), dtype=np.int32) for ids in rows["completion_ids"]]
        good = {"length": [1.0] * 4, "places": places}
        for columns, words in (
            ({"length": [1.0] * 4}, "column places is missing"),
            (good | {"width": [1]}, "column width is no output of this stage"),
            (good | {"length": [1.0] * 3}, "column length has 3 values for 4 rows"),
            (good | {"length": ["long"] * 4}, "column length: row 0 is <U4"),
            (good | {"length": [float("nan")] * 4}, "column length: row 0 has a number that is not finite"),
            (good | {"places": [place.astype(float) for place in places]}, "column places: row 0 is float64"),
            (good | {"places": [1, 2, 3, 4]}, "column places: row 0 has shape"),
            (good | {"places": [*places[:3], np.zeros(99, dtype=np.int32)]}, "column places, row 3: 396 bytes are not"),
        ):
            with pytest.raises(ContractViolation, match=f"stage lengths, batch .*: {words}"):
                stage.put(rows, columns)
        assert stage.put(rows, good)
        assert stage.put(rows, good), "the same again is the same"
        with pytest.raises(Conflict, match=r"stage lengths, batch 0/train/\d: rows 0 to 3 have other values of length"):
            stage.put(rows, good | {"length": [2.0] * 4})
        again = stage.get()
        assert again is not None
        stage.fail(again, "it is dark")
        JobStore(broker).request_cancel(job_id)
        assert all(len(left) for left in stage), "what is left comes, and then the end"
        with pytest.raises(JobEnded, match=r"was cancelled|is being cancelled"):
            stage.get(timeout_s=10.0)


def test_a_producer_publishes_what_the_fence_lets_through(own: StackSettings, broker: Broker) -> None:
    job_id = created(broker, evaluation__num_prompts=0)
    with pytest.raises(InvalidInput, match=r"deterministic: is a deterministic job"):
        Producer(created(broker, deterministic=True), settings=own)
    with pytest.raises(InvalidInput, match=r"rollout\.max_resamples: the job resamples"):
        Producer(created(broker, rollout__max_resamples=1), settings=own)
    with Consumer(job_id, settings=own) as consumer, Producer(job_id, settings=own) as producer:
        consumer.begin(model_of(consumer))
        model = producer.make_model()
        claim = producer.claim()
        assert claim is not None
        digest = producer.load(claim, model)
        assert digest == claim.manifest.weights_digest == producer.load(claim, model)
        assert torch.equal(model.get_input_embeddings().weight, model_of(consumer).get_input_embeddings().weight)
        samples, scores = alike(claim)
        sample = samples[0][0]
        for wrong, words in (
            (samples[:1], "needs 4 samples of each of 2 prompts"),
            ([[replace_sample(sample, logprobs=[-1.0])] * 4] * 2, "needs a finite log-prob for each of its 2 tokens"),
            ([[replace_sample(sample, token_ids=[])] * 4] * 2, "is no list of 1 to 5 token ids"),
        ):
            with pytest.raises(ContractViolation, match=words):
                producer.publish(claim, wrong, scores, weights_digest=digest)
        with pytest.raises(FenceViolation, match="the fence refuses it as wrong_weights"):
            producer.publish(claim, samples, scores, weights_digest="ab" * 32)
        again = producer.claim()
        assert again is not None
        assert producer.publish(again, samples, scores, weights_digest=digest)
        assert producer.publish(again, samples, scores, weights_digest=digest), "the same again is the same"
        others = [[replace_sample(sample, text="2")] * again.group_size for _ in again.prompts]
        assert not producer.publish(again, others, scores, weights_digest=digest), "another came first"


def alike(claim: PromptClaim) -> tuple[list[list[Sample]], list[list[Scored]]]:
    """The same sample everywhere, with a score for each."""
    sample = Sample(token_ids=[5, 1], logprobs=[-1.0, -2.0], text="1", finish_reason="stop")
    samples = [[sample] * claim.group_size for _ in claim.prompts]
    return samples, [[Scored(reward=0.5, breakdown={"exact": 0.5})] * claim.group_size for _ in claim.prompts]


def replace_sample(sample: Sample, **changes: Any) -> Sample:
    fields = {name: getattr(sample, name) for name in ("token_ids", "logprobs", "text", "finish_reason")}
    return Sample(**(fields | changes))


HOLDS = """
import sys, time
from onbeat.client import Producer, Stage

kind, job_id = sys.argv[1:]
with Producer(job_id) if kind == "producer" else Stage(job_id, "lengths") as worker:
    for taken in worker:
        print("holds", flush=True)
        time.sleep(600.0)
"""


def kill_while_it_holds(kind: str, job_id: str, own: StackSettings) -> None:
    """A process takes work, and is killed."""
    command = [sys.executable, "-c", HOLDS, kind, job_id]
    environment = {**os.environ, "ONBEAT_REDIS_URL": own.redis_url, "ONBEAT_RUN_ROOT": own.run_root}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
        finally:
            process.kill()


def test_what_a_killed_producer_and_a_killed_stage_held_goes_to_others(own: StackSettings, broker: Broker) -> None:
    job_id = created(broker, stages=[LENGTHS], evaluation__num_prompts=0)
    keys = broker.job_keys(job_id)
    with Consumer(job_id, settings=own) as consumer, Producer(job_id, settings=own) as producer:
        consumer.begin(model_of(consumer))
        kill_while_it_holds("producer", job_id, own)
        end_leases(broker, keys)
        claims = [producer.claim(), producer.claim()]
        for claim in claims:
            assert claim is not None
            digest = producer.load(claim, producer.make_model())
            samples, scores = alike(claim)
            assert producer.publish(claim, samples, scores, weights_digest=digest)
        assert sorted(claim.claim.attempt for claim in claims if claim) == [1, 2]
        kill_while_it_holds("stage", job_id, own)
        end_leases(broker, keys)
        with Stage(job_id, "lengths", settings=own) as stage:
            items = []
            while len(items) < 4:
                rows = stage.get()
                assert rows is not None
                items += rows.items
    assert len({(item.batch_id, item.item) for item in items}) == 4, "each group of both batches, and none twice"
    assert {item.attempt for item in items} == {2}


def logprobs_of(model: torch.nn.Module) -> Callable[[np.ndarray, int], torch.Tensor]:
    """A trainer's or a generator's own function of log-probs, as docs/extend.md writes it."""

    def logprobs(token_ids: np.ndarray, num_scored: int) -> torch.Tensor:
        ids = torch.from_numpy(token_ids)
        logits = model(input_ids=ids).logits[:, -num_scored - 1 : -1]
        return logits.log_softmax(dim=-1).gather(-1, ids[:, -num_scored:, None])[..., 0].detach()

    return logprobs


def test_a_producer_shows_a_version_before_its_first_batch(own: StackSettings, broker: Broker) -> None:
    job_id = created(broker, evaluation__num_prompts=0)
    with Consumer(job_id, settings=own) as consumer, Producer(job_id, settings=own) as producer:
        trained = model_of(consumer)
        consumer.probes(logprobs_of(trained))
        consumer.begin(trained)
        with pytest.raises(InvalidInput, match=r"proves: version 0 has a probe.*rollout\.probe\.rows = 0"):
            producer.claim()
        model = producer.make_model()
        producer.proves(model)
        claim = producer.claim()
        assert claim is not None
        with pytest.raises(InvalidInput, match="model: is another one than `proves` was given"):
            producer.load(claim, producer.make_model())
        samples, scores = alike(claim)
        assert producer.publish(claim, samples, scores, weights_digest=producer.load(claim, model))
        counters = broker.redis.hgetall(broker.job_keys(job_id).counters)
        assert counters[b"proved"] == b"1", "the version is shown once, however often it is claimed"


def test_a_producer_that_computes_wrongly_gets_no_batch_and_is_told_the_row(own: StackSettings, broker: Broker) -> None:
    job_id = created(broker, evaluation__num_prompts=0)
    with Consumer(job_id, settings=own) as consumer:
        trained = model_of(consumer)
        consumer.probes(logprobs_of(trained))
        consumer.begin(trained)
        with pytest.raises(InvalidInput, match="probes: comes before `begin`"):
            consumer.probes(logprobs_of(trained))
        with Producer(job_id, settings=own) as producer:
            model = producer.make_model()
            right = logprobs_of(model)
            calls = []

            def wrong(token_ids: np.ndarray, num_scored: int) -> np.ndarray:
                calls.append(token_ids.shape)
                numbers = right(token_ids, num_scored).numpy()
                numbers[3, 1] -= 0.5
                return numbers

            producer.proves(model, wrong)
            with pytest.raises(ProofFailed, match=r"version 0 wrongly: its log-prob is .* at row 3 of the probe"):
                producer.claim()
            assert len(calls) == 2, "the version is read once more"
            producer.proves(model, lambda token_ids, num_scored: right(token_ids, num_scored)[:, :1])
            with pytest.raises(ContractViolation, match=r"logprobs: needs a finite log-prob for each of 4 x"):
                producer.claim()
            producer.proves(model, right)
            assert producer.claim() is not None
            with pytest.raises(InvalidInput, match="logprobs: tensors alone compute nothing"):
                producer.proves({})


class OwnEnd(BaseException):
    """No Exception, as what stops a program isn't."""


@pytest.mark.parametrize(
    ("error", "attempts"),
    [(KeyError("layers"), [1, 2]), (MemoryError(), [1, 2]), (KeyboardInterrupt(), [1, 1]), (OwnEnd("over"), [1, 1])],
)
def test_what_a_producer_held_whose_code_raises_goes_to_others_at_once_with_the_reason(
    own: StackSettings, broker: Broker, error: BaseException, attempts: list[int]
) -> None:
    """A person who stops the program is no fault of the batch: that costs no attempt."""
    job_id = created(broker, rollout__max_attempts=2, rollout__batches_per_iteration=1, evaluation__num_prompts=0)
    with Consumer(job_id, settings=own) as consumer:
        consumer.begin(model_of(consumer))
        seen: list[int] = []

        def serve() -> None:
            with Producer(job_id, settings=own) as producer:
                for claim in producer:
                    seen.append(claim.claim.attempt)
                    raise error

        for _ in range(2):
            with pytest.raises(type(error)):
                serve()
        assert seen == attempts
        dead = TrainerSide(broker, job_id, owner="looks", lease_s=1.0).dead_batches(0)
    if attempts == [1, 2]:
        assert [type(error).__name__ in reason for reason in dead.values()] == [True]
    else:
        assert dead == {}


def test_a_stage_and_a_trainer_work_in_two_threads_of_one_event_loop(own: StackSettings, broker: Broker) -> None:
    job_id = created(broker, stages=[LENGTHS])

    def serve() -> list[str]:
        row_names = []
        with Stage(job_id, "lengths", settings=own) as stage:
            for rows in stage:
                ids = rows["completion_ids"]
                lengths = [1.0] * len(ids)
                places = [np.zeros(len(row_ids), dtype=int) for row_ids in ids]
                assert stage.put(rows, {"length": lengths, "places": places})
                row_names += [f"{key.batch_id}/{key.row}" for key in rows.keys_of_rows]
        return row_names

    def train() -> None:
        with Consumer(job_id, settings=own) as consumer:
            trained(consumer)

    async def both() -> list[str]:
        row_names, _ = await asyncio.gather(asyncio.to_thread(serve), asyncio.to_thread(train))
        return row_names

    with generating(broker, job_id):
        row_names = asyncio.run(both())
    assert len(row_names) == len(set(row_names)) == 3 * 2 * 2 * 4, "iterations, batches, prompts, completions"
    assert verified(own, broker, job_id) == 0
    assert JobStore(broker).state(job_id) is JobState.SUCCEEDED


def test_what_a_producer_in_a_thread_of_an_event_loop_claimed_goes_to_others_when_it_fails(
    own: StackSettings, broker: Broker
) -> None:
    job_id = created(broker, rollout__batches_per_iteration=1, evaluation__num_prompts=0)

    def fail() -> None:
        with Producer(job_id, settings=own) as producer:
            assert producer.claim() is not None
            raise KeyError("layers")

    async def fail_in_a_thread() -> None:
        await asyncio.to_thread(fail)

    with Consumer(job_id, settings=own) as consumer:
        consumer.begin(model_of(consumer))
        with pytest.raises(KeyError):
            asyncio.run(fail_in_a_thread())
        with Producer(job_id, settings=own) as producer:
            claim = producer.claim(timeout_s=30.0)
            assert claim is not None
            assert claim.claim.attempt == 2, "its lease has not run out"


def test_a_process_of_another_version_is_told_so(
    own: StackSettings, broker: Broker, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = created(broker, stages=[LENGTHS])
    as_stage = replace(own, redis_url=redis_server.url_of(STAGE), broker_timeout_s=0.5)
    with Stage(job_id, "lengths", settings=as_stage) as stage:
        monkeypatch.setattr(script_texts, "function_name", lambda name: f"another_{name}")
        with pytest.raises(ContractViolation, match=r"onbeat\.client: the stack has other functions .*the version of"):
            stage.get(timeout_s=1.0)
