"""A taskset of verifiers with an environment of its own: the task of `secret_table`, as verifiers writes games."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from onbeat.environments.adapters.secret_table import make_table, pair_of

__all__ = ["LettersEnv", "LettersTaskset"]


class LettersConfig(vf.TasksetConfig):
    num_tasks: int = 64


class LettersData(vf.TaskData):
    pair: str
    answer: str
    told: str


class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def model_turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> Iterator[LettersTask]:
        for place in range(self.config.num_tasks):
            first, second = pair_of({"split": "train", "index": place})
            table = make_table(place)
            yield LettersTask(
                LettersData(
                    prompt=f"{first}+{second}=",
                    pair=first + second,
                    answer=str(table[first] + table[second])[::-1],
                    told=f"{table[first]} {table[second]}",
                ),
                self.config.task,
            )


class LettersEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class LettersEnv(vf.Env[LettersEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply.startswith("?"):
                asked = segment.last_reply[1:]
                segment = await interaction.turn(f"{task.data.told if asked == task.data.pair else '!'}=")
