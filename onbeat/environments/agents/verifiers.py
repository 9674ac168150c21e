"""A whole environment of verifiers 0.4: `name = "verifiers"`, `params = {taskset = "my_tasks"}`.

    reset   an Env of verifiers begins an episode: its taskset's task, a seat with a harness, an interception server
    step    answers the request that came from the harness by the interception server and verifiers' client to the door

So it is an agent that owns its loop (onbeat/environments/agents/agent.py): verifiers decides what is asked, when
the episode ends, and what it was worth. Its package is imported in the child alone: it is no dependency.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any

import msgspec

from onbeat.environments.agents.agent import Agent, AgentEnvironment
from onbeat.environments.author import BadTask, Episode, Outcome

IN_PROCESS = "onbeat"
"""The harness that is named so is the one of verifiers_harness.py."""
SEAT = "agent"
MAX_READ_TASKS = 1_000_000


class Verifiers(AgentEnvironment):
    """An episode of a package for verifiers: each instance plays one.

    taskset: the id of an installed taskset package. env: the id of an environment that plays it; "" takes the taskset's
    own. seat: the name of its agent, which is the policy. max_turns: of the seat, after which the episode is scored as
    it is; 0 leaves it to the environment. held_out: how many of the first tasks are played by evaluation alone.
    harness: the id of another one. tokenizer, renderer: a folder and a format of the package `renderers`, with which
    verifiers asks by tokens. deterministic: what the environment is. What else there is are options of the taskset.
    """

    def __init__(
        self,
        *,
        taskset: str,
        env: str = "",
        seat: str = SEAT,
        max_turns: int = 0,
        held_out: int = 0,
        harness: str = IN_PROCESS,
        tokenizer: str = "",
        renderer: str = "",
        deterministic: bool = True,
        **options: Any,
    ) -> None:
        if bool(tokenizer) != bool(renderer):
            raise ValueError("tokenizer and renderer are given together: the one's tokens are the other's")
        if not 0 <= held_out <= MAX_READ_TASKS:
            raise ValueError(f"held_out is 0 to {MAX_READ_TASKS}")
        chosen: dict[str, Any] = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
        if max_turns:
            chosen["max_turns"] = max_turns
        config = {"id": env, "taskset": {"id": taskset, **options}, seat: chosen}
        tasks = _tasks_of(msgspec.json.encode(config).decode())
        self._be(
            Agent(function=_play, version=tasks.version, deterministic=deterministic, global_random=True),
            {"tasks": tasks, "held_out": held_out, "tokenizer": tokenizer, "renderer": renderer},
        )


@dataclass
class _Tasks:
    """Tasks of a taskset, read once in a process: it may load a data set, or make tasks for ever."""

    config: dict[str, Any]
    version: str
    source: Iterator[Any]
    read: list[Any]
    guard: threading.Lock

    def at(self, place: int) -> Any:
        """Raises BadTask where there are not so many."""
        with self.guard:
            if place < MAX_READ_TASKS:
                self.read += itertools.islice(self.source, max(0, place + 1 - len(self.read)))
            if place >= len(self.read):
                raise BadTask(f"the taskset has {len(self.read)} tasks, and none of number {place}")
            return self.read[place]


@lru_cache(maxsize=4)
def _tasks_of(config: str) -> _Tasks:
    """Raises what verifiers says of a config that it doesn't take."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # pyright: ignore[reportMissingImports]

    from onbeat.environments.agents import verifiers_harness

    verifiers_harness.offer(IN_PROCESS)
    known = msgspec.json.decode(config)
    env = load_environment(resolve_env_config(msgspec.json.decode(config)))
    if env.taskset.toolsets(env.taskset.config) or env.taskset.task_type().toolsets(env.taskset.config.task):
        raise ValueError(
            "its tools are servers, which verifiers starts beside a folder that a cage doesn't let them write"
        )
    version = f"verifiers {metadata.version('verifiers')}"
    for package in metadata.packages_distributions().get(type(env.taskset).__module__.partition(".")[0], ()):
        if package != "verifiers":
            version += f", {package} {metadata.version(package)}"
    return _Tasks(config=known, version=version, source=iter(env.taskset), read=[], guard=threading.Lock())


async def _play(episode: Episode, *, tasks: _Tasks, held_out: int, tokenizer: str, renderer: str) -> Outcome:
    """Plays one episode; raises where verifiers says that it failed."""
    from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # pyright: ignore[reportMissingImports]

    task = tasks.at(_place(episode.task, held_out))
    # The loaders narrow what they are given in place.
    env = load_environment(resolve_env_config(msgspec.json.decode(msgspec.json.encode(tasks.config))))
    # verifiers reads keys from variables alone. Episodes of one process have keys of their own.
    variable = f"ONBEAT_DOOR_{threading.get_ident()}_API_KEY"
    os.environ[variable] = episode.api_key
    try:
        context = ModelContext(
            model=episode.model, client=_client(episode, variable, tokenizer=tokenizer, renderer=renderer)
        )
        async with env.serving():
            ended = await env.run_episode(task, context)
    finally:
        os.environ.pop(variable, None)
    problems = [*ended.errors, *(error for trace in ended.traces for error in trace.errors)]
    if not ended.ok or problems:
        last = problems[-1] if problems else None
        raise RuntimeError(f"{last.type}: {last.message}"[:2000] if last else "verifiers says that the episode failed")
    if len(ended.traces) != 1:
        raise RuntimeError(f"the episode has {len(ended.traces)} agents' traces, and a trajectory is of one")
    (trace,) = ended.traces
    return Outcome(reward=trace.reward, metrics=_numbers(trace))


def _place(task: Mapping[str, Any], held_out: int) -> int:
    """Where a task of ours lies in the taskset."""
    split, index = task.get("split"), task.get("index")
    if split not in ("train", "evaluation") or not isinstance(index, int):
        raise BadTask("a taskset brings its own tasks: the job's data set is of type `environment`")
    if split == "train":
        return held_out + index
    if index >= held_out:
        raise BadTask(f"evaluation asks for task {index}, and held_out of environment.params is {held_out}")
    return index


def _client(episode: Episode, variable: str, *, tokenizer: str, renderer: str) -> Any:
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig  # pyright: ignore[reportMissingImports]

    if not tokenizer:
        return EvalClientConfig(base_url=episode.base_url, api_key_var=variable)
    from renderers import config_from_name

    return TrainClientConfig(
        base_url=episode.base_url,
        api_key_var=variable,
        renderer=config_from_name(renderer),
        renderer_model_name=tokenizer,
    )


def _numbers(trace: Any) -> dict[str, float]:
    """Returns the rewards' parts and the metrics, for people."""
    rewards = {f"reward_{name}": reward.value for name, reward in trace.rewards.items() if reward is not None}
    return rewards | {name: float(value) for name, value in trace.metrics.items() if value is not None}
