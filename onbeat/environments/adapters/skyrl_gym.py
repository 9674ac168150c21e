"""Environments of skyrl-gym (`skyrl_gym.make`): `name = "skyrl_gym"`, `params = {env = "gsm8k_multi_turn"}`.

Their `extras` are the example's entry, where it is a JSON object; what they read most, `reward_spec.ground_truth` and
`reward_model.ground_truth`, is the example's reference where the entry doesn't say it. What an environment would change
in the model's own message (`postprocessed_action`) stays as it was sampled: that is what is trained.
"""

from __future__ import annotations

import json
from typing import Any

from onbeat.environments.author import BadTask, Environment, Message, Opening, Reply


class SkyRLGym(Environment):
    """One registered environment, with `max_turns` where it takes that, and its own options as further parameters."""

    global_random = True

    def __init__(self, *, env: str, deterministic: bool = True, max_turns: int = 0, **options: Any) -> None:
        """deterministic: false for one that asks a server (search)."""
        import skyrl_gym
        from omegaconf import OmegaConf

        if env not in skyrl_gym.registry:
            raise ValueError(f"skyrl-gym has no environment `{env}`; it has: {', '.join(sorted(skyrl_gym.registry))}")
        self.deterministic = deterministic
        self._make = lambda extras: skyrl_gym.make(env, env_config=OmegaConf.create(options), extras=extras)
        self._max_turns = max_turns
        self._env: Any = None

    def reset(self, task: dict[str, Any], seed: int) -> Opening:
        extras = _extras(task)
        if self._max_turns:
            extras["max_turns"] = self._max_turns
        prompt = extras.pop("prompt", None) or [{"role": "user", "content": str(task.get("question", ""))}]
        try:
            self._env = self._make(extras)
        except (AssertionError, KeyError) as error:
            raise BadTask(f"the environment refuses its extras: {error!r}") from error
        messages, _ = self._env.init(prompt)
        return Opening(messages)

    def step(self, message: Message, turn: int) -> Reply:
        found = self._env.step(message.content)
        metrics = _numbers(found.get("metadata")) | _numbers(self._env.get_metrics())
        return Reply(found["observations"] or (), float(found["reward"]), bool(found["done"]), metrics)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _extras(task: dict[str, Any]) -> dict[str, Any]:
    reference = str(task.get("reference", ""))
    extras: dict[str, Any] = {
        "reward_spec": {"ground_truth": reference},
        "reward_model": {"ground_truth": reference},
        "extra_info": {},
    }
    try:
        entry = json.loads(task.get("entry") or "{}")
    except ValueError as error:
        raise BadTask(f"the entry is no JSON: {error}") from error
    return extras | entry if isinstance(entry, dict) else extras


def _numbers(found: Any) -> dict[str, float]:
    known = found if isinstance(found, dict) else {}
    return {str(name): float(value) for name, value in known.items() if isinstance(value, int | float)}
