"""Single-player games of TextArena: `name = "textarena"`, `params = {game = "GuessTheNumber-v0"}`.

The game is a function of the task's seed. The reward comes with the last turn, as the game gives it; the model sees
what the game says after each of its turns, without its own words repeated.
"""

from __future__ import annotations

from typing import Any

from onbeat.environments.author import Environment, Message, Opening, Reply

SEEDS = 2**31
_known: set[str] = set()
"""Games that were tried in this process: one player can play them."""


class TextArena(Environment):
    """One game. `brackets`: a move without brackets gets them, as TextArena's own wrapper does it."""

    global_random = True

    def __init__(self, *, game: str, brackets: bool = True) -> None:
        import textarena

        self._own = textarena.ObservationType.PLAYER_ACTION
        self._env: Any = textarena.make(f"{game}-raw" if f"{game}-raw" in _registry() else game)
        while isinstance(self._env, textarena.ObservationWrapper):
            self._env = self._env.env
        if game not in _known:
            try:
                self._env.reset(num_players=1, seed=0)
            except AssertionError as error:
                raise ValueError(f"`{game}` is no game for one player: {error}") from error
            _known.add(game)
        self._brackets = brackets

    def reset(self, task: dict[str, Any], seed: int) -> Opening:
        self._env.reset(num_players=1, seed=seed % SEEDS)
        return Opening(self._said())

    def step(self, message: Message, turn: int) -> Reply:
        move = message.content
        done, _ = self._env.step(f"[{move}]" if self._brackets and "[" not in move and "]" not in move else move)
        if not done:
            return Reply(self._said())
        rewards, facts = self._env.close()
        known = facts.get(0, {})
        metrics = {"game_turns": float(known.get("turn_count", 0)), "invalid_move": float(known.get("invalid_move", 0))}
        return Reply(str(known.get("reason") or "The game is over."), float((rewards or {}).get(0, 0.0)), True, metrics)

    def _said(self) -> str:
        """What the game said since the last time."""
        _, observations = self._env.get_observation()
        return "\n".join(text.strip("\n") for _, text, kind in observations or () if kind != self._own)


def _registry() -> Any:
    from textarena.envs.registration import ENV_REGISTRY

    return ENV_REGISTRY
