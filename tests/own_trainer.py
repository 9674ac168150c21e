"""A job in this process: a real trainer in the test's thread, and a generator without a model in another one."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from msgspec import UNSET

from broker.connection.client import Broker
from broker.generator_side import GeneratorSide, ProofDue
from broker.job_store import JobStore
from broker.presence import Presence
from consumer.trainer.job_run import train
from contracts.encoding.arrays import pack_int32
from contracts.jobs import TrainerExit
from contracts.monitor import GeneratorSeen
from contracts.rollouts import PromptBatch, RolloutBatch, RolloutGroup
from contracts.settings import StackSettings
from onbeat.base.process.waiting import Waiting
from tests.builders import batch_of, rollout

GENERATOR = "generator-own"


def sampled(batch: PromptBatch, *, salt: str = "") -> RolloutBatch:
    """What a generator would publish: tokens and rewards are a function of the batch and the salt."""
    draw = random.Random(hashlib.blake2b(f"{batch.batch_id} {salt}".encode()).digest())

    def one_rollout() -> object:
        tokens = [draw.randrange(3, 60) for _ in range(draw.randint(1, 5))]
        return rollout(tokens, float(draw.random() < 0.5), logprobs=[-draw.uniform(0.5, 5.0) for _ in tokens])

    template = batch_of([([5], [one_rollout()])])  # type: ignore[list-item]
    groups = tuple(
        RolloutGroup(
            prompt_id=prompt.prompt_id,
            prompt_index=prompt.index,
            prompt_token_ids=pack_int32(np.frombuffer(prompt.token_ids, dtype="<i4").tolist()),
            rollouts=tuple(one_rollout() for _ in range(batch.group_size)),  # type: ignore[misc]
        )
        for prompt in batch.prompts
    )
    return RolloutBatch(
        job_id=batch.job_id,
        batch_id=batch.batch_id,
        iteration=batch.iteration,
        purpose=batch.purpose,
        policy_version=batch.policy_version,
        weights_digest=batch.weights_digest,
        group_size=batch.group_size,
        generator_id=GENERATOR,
        attempt=1,
        timings=template.timings,
        groups=groups,
    )


@contextmanager
def generating(broker: Broker, job_id: str, *, salt: Callable[[], str] = lambda: "") -> Iterator[None]:
    """A generator that samples whatever is dispatched, until the end of the `with`."""
    side, presence = GeneratorSide(broker, job_id, GENERATOR), Presence(broker)
    closing = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not closing.is_set():
                presence.beat(GeneratorSeen(worker_id=GENERATOR))
                claim = side.claim(30.0)
                if claim is None:
                    side.wait_for_prompts(0.1)
                elif isinstance(claim, ProofDue):
                    # What is played computes as the trainer does.
                    probe = claim.manifest.probe
                    assert probe is not UNSET
                    assert side.prove(claim.manifest, probe.logprobs, kind="played").is_proved
                else:
                    side.publish(claim, sampled(claim.prompt_batch, salt=salt()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()
        torch.use_deterministic_algorithms(False)
    assert not errors, errors


def one_trainer(settings: StackSettings, broker: Broker, job_id: str) -> int:
    """Counts and runs a trainer as a consumer does, once the lease of the one before has run out.

    Returns its exit code, or raises its death.
    """
    jobs = JobStore(broker)
    jobs.count_trainer_start(job_id)
    waiting = Waiting("the lease", deadline_s=60.0)
    while (code := train(settings, broker, jobs.spec(job_id), job_id)) == TrainerExit.HELD:
        waiting.poke()
    return code


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
