"""A question of the data set, answered with tools: `name = "tools"`, `params = {tools = "calculator,python"}`.

The model calls tools as often as it likes; its first message without a call is its answer, which is rewarded with 1.0
where it is the example's reference.
"""

from __future__ import annotations

from typing import Any

from onbeat.environments.author import BadTask, Environment, Message, Opening, Reply
from onbeat_extras.environments.adapters.answers import READERS, are_equal
from onbeat_extras.environments.tools.calculator import calculate
from onbeat_extras.environments.tools.python import ProgramStuck, Python
from onbeat_extras.environments.tools.toolbox import Toolbox

KNOWN = ("calculator", "python")


class Tools(Environment):
    """`answer`: where it stands in the last message: in `<answer>…</answer>` (tag), as its last number, or all of it.

    `python_s`, `python_memory_mb`, `python_chars`: what one program may take and say. `system`: a first message.
    """

    def __init__(
        self,
        *,
        tools: str = "calculator",
        answer: str = "number",
        system: str = "",
        python_s: int = 2,
        python_memory_mb: int = 256,
        python_chars: int = 4000,
    ) -> None:
        names = [name.strip() for name in tools.split(",") if name.strip()]
        if unknown := [name for name in names if name not in KNOWN]:
            raise ValueError(f"there is no tool `{unknown[0]}`; there are: {', '.join(KNOWN)}")
        if answer not in READERS:
            raise ValueError(f"answer is one of {', '.join(READERS)}, and not {answer}")
        interpreter = Python(cpu_s=python_s, memory_mb=python_memory_mb, output_chars=python_chars)

        def python(code: str) -> str:
            """Runs a Python program of its own; answers what it prints, and the value of its last line.

            Args:
                code: The program. It has the standard library's modules for numbers and texts, no files and no network.
            """
            return interpreter.run(code)

        functions = {"calculator": calculate, "python": python}
        self._box = Toolbox([functions[name] for name in names], passes=(ProgramStuck,))
        self._read = READERS[answer]
        self._system = system

    def reset(self, task: dict[str, Any], seed: int) -> Opening:
        if "question" not in task or "reference" not in task:
            raise BadTask("it has no question and reference: the job needs a data set of examples")
        self._reference = str(task["reference"])
        first = [Message(role="system", content=self._system)] if self._system else []
        return Opening([*first, Message(role="user", content=str(task["question"]))], tools=self._box.tools)

    def step(self, message: Message, turn: int) -> Reply:
        if message.tool_calls or message.malformed:
            return Reply(self._box.answer(message), metrics=self._metrics())
        answer = self._read(message.content)
        is_right = answer is not None and are_equal(answer, self._reference)
        return Reply(reward=float(is_right), done=True, metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        return {"tool_calls": float(self._box.num_calls), "refused_tool_calls": float(self._box.num_refused)}
