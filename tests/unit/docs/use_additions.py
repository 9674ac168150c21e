"""Runs in a copy of the packages that has the additions, uses each, and prints what it says as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import sys
from pathlib import Path

SPEC = {
    "name": "job",
    "iterations": 2,
    "model": {"path": "qwen3"},
    "dataset": {"type": "addition"},
    "reward": {"components": [{"type": "exact"}]},
}
said = {}


def spec_of(**tables):
    from contracts.encoding.wire import convert
    from contracts.spec import JobSpec

    return convert(SPEC | tables, JobSpec)


def a_loss():
    import torch

    from consumer.gradient.losses.base import BatchSizes
    from consumer.gradient.losses.family import TokenLogprobs, family_loss

    algorithm = spec_of(algorithm={"loss": "novel"}).algorithm
    logprobs = torch.tensor([[-1.0, -1.5]])
    terms = family_loss(
        TokenLogprobs(policy=logprobs, generator=logprobs),
        advantages=torch.tensor([2.0]),
        loss_mask=torch.ones(1, 2, dtype=torch.bool),
        algorithm=algorithm,
        sizes=BatchSizes(num_tokens=2, max_sampled_tokens=2),
    )
    return [algorithm.clip_range, float(terms.loss_sum)]


def an_advantage():
    import numpy as np

    from consumer.gradient.advantages.family import group_advantages

    return group_advantages(np.array([[1.0, 0.0]]), spec_of(algorithm={"advantage": "novel"}).algorithm).tolist()


def a_data_set():
    from contracts.spec_tables.root import SpecRoot
    from onbeat.prompts.datasets.base import load_dataset

    spec = spec_of(dataset={"type": "novel", "question": "why?"})
    loaded = load_dataset(spec.dataset, num_evaluation=0, seed=3, model_root=SpecRoot(Path(".")))
    return [loaded.train[0].question, loaded.train[0].reference]


def install(name, entry_points):
    """Entry points as pyproject.toml would have them, of a package beside ours."""
    installed = Path(f"{name}-1.0.dist-info")
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(entry_points)


def a_tracker():
    from consumer.trackers import tracker_makers
    from contracts.run_folder import RunFolder

    install("novel_tracker", "[onbeat.trackers]\nnovel = onbeat_extras.trackers.novel:NovelTracker\n")
    makers = tracker_makers(spec_of(trackers=["novel"]), RunFolder(Path("."), "job-1"))
    return makers["novel"]().name


def an_engine():
    from contracts.settings import StackSettings, engine_from
    from producer.engine.factory import make_engine

    options = engine_from({"ONBEAT_ENGINE": "novel", "ONBEAT_ENGINE_WARMTH": "1.5"})
    return make_engine(
        spec_of().model, options=options, settings=StackSettings(), deterministic=True, chunks=lambda _: None
    ).said


def a_store_of_weights():
    import torch

    from contracts.encoding.wire import decode, encode
    from contracts.run_folder import RunFolder
    from contracts.versions import WeightManifest
    from onbeat.weights.layout import layout_of
    from onbeat.weights.receiver import WeightReceiver
    from onbeat.weights.transports import make_publisher, make_stores

    folder = RunFolder(Path("runs").resolve(), "job-1")
    publisher = make_publisher(
        spec_of(weights={"transport": "novel"}), folder, chunks=None, announce=lambda _: None, pause=lambda _: None
    )
    tensors = {"w": torch.arange(3.0)}
    with publisher.begin(layout_of(tensors), policy_version=1) as publication:
        publication.add("w", tensors["w"])
        manifest = decode(encode(publication.finish()), WeightManifest)
    stores = make_stores(folder.weight_root)
    receiver = WeightReceiver({"w": torch.zeros(3)}, stores)
    is_same = receiver.load(manifest) == manifest.weights_digest and torch.equal(receiver.tensors["w"], tensors["w"])
    return [type(publisher).__name__, type(stores["novel"]).__name__, manifest.transport, is_same]


def a_scorer():
    from contracts.rewards import RewardItem
    from reward_service.scorers.rubric import score_item

    spec = spec_of(reward={"components": [{"type": "novel", "bonus": 2.0}]})
    return score_item(spec.reward.components, RewardItem(prompt="", completion="abc", reference="")).breakdown


def an_environment():
    from contracts.environments.messages import Message
    from contracts.environments.service import EnvironmentTable
    from reward_service.player import registry

    install("novel_environment", "[onbeat.environments]\nnovel = onbeat_extras.environments.adapters.novel:Novel\n")
    assert "novel" in registry.names()
    factory, _ = registry.factory_of(EnvironmentTable(name="novel"))
    environment = factory()
    opening = environment.reset({}, 3)
    reply = environment.step(Message(role="assistant", content="3"), 0)
    return [opening, reply.reward, reply.done]


def an_endpoint():
    import httpx

    from contracts.settings import StackSettings
    from gateway.app import create_app
    from gateway.services import Services

    app = create_app(Services(settings=StackSettings(api_key="key"), broker=None))

    async def ask(key):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get("/v1/novel", headers={"Authorization": f"Bearer {key}"})

    right = asyncio.run(ask("key"))
    return [asyncio.run(ask("wrong")).status_code, right.status_code, right.json()]


def a_transition():
    from broker.connection.client import connect, load_scripts
    from contracts.settings import StackSettings

    broker = connect(StackSettings(redis_url=os.environ["REDIS"]))
    load_scripts(os.environ["REDIS"], "ab" * 16)  # as the server's start does
    job_id = f"job-novel-{os.getpid()}"
    counted = [broker.run("novel", job=job_id, by=by)[0] for by in (3, 2)]
    broker.redis.delete(broker.job_keys(job_id).counters)
    broker.close()
    return counted


def a_command():
    from onbeat.cli import run

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run(["novel", "you"])
    return [code, out.getvalue().strip()]


def a_setting():
    from contracts.settings import settings_from
    from docs.make_configuration import configuration_page

    row = [line for line in configuration_page().splitlines() if "NOVEL_S" in line]
    return [settings_from({}).novel_s, settings_from({"ONBEAT_NOVEL_S": "7.5"}).novel_s, *row]


def a_key():
    from docs.make_configuration import configuration_page

    row = [line for line in configuration_page().splitlines() if "novel_prompts" in line]
    return [spec_of().rollout.novel_prompts, spec_of(rollout={"novel_prompts": 7}).rollout.novel_prompts, *row]


def a_metric():
    from consumer.gradient.statistics import MicroBatchStats, Mismatch, Scaling, iteration_numbers
    from contracts.events import IterationMetrics

    stats = MicroBatchStats(
        batch_id="0/train/0",
        rewards=(1.0,),
        component_sums={},
        num_groups=1,
        num_equal_groups=0,
        num_resamples=0,
        num_tokens=1,
        longest_response_tokens=1,
        num_truncated=0,
        mismatch=Mismatch(num_tokens=1, rho_square_sum=1.0),
    )
    numbers = dataclasses.asdict(iteration_numbers([stats], scaling=Scaling(count=1)))
    rest = {name: 0 for name in IterationMetrics.__struct_fields__ if name not in {*numbers, "trajectories"}}
    metrics = IterationMetrics(**numbers | rest | {"num_novel": 4})
    return [numbers["num_novel"], metrics.numbers()["num_novel"]]


uses = {
    "a loss": a_loss,
    "an advantage": an_advantage,
    "a data set": a_data_set,
    "a tracker": a_tracker,
    "an engine": an_engine,
    "a store of weights": a_store_of_weights,
    "a scorer (reward)": a_scorer,
    "an environment": an_environment,
    "an endpoint of the gateway": an_endpoint,
    "a transition in Redis": a_transition,
    "a command": a_command,
    "a setting of the processes": a_setting,
    "a key of a job": a_key,
    "a metric of an iteration": a_metric,
}
for kind, use in uses.items():
    try:
        said[kind] = use()
    except Exception as error:
        said[kind] = f"{type(error).__name__}: {error}"
sys.stdout.write(f"{json.dumps(said)}\n")
