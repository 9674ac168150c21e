"""A question of the data set, answered with tools: `name = "tools"`, `params = {tools = "calculator,python"}`.

A file's class may add functions of its own:

    class Looking(Tools):
        functions = (look_up,)

The model calls tools as often as it likes; its first message without a call is its answer, which is rewarded with 1.0
where it is the example's reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from onbeat.environments.adapters.answers import Question
from onbeat.environments.author import Environment, InitialObservation, Message, Reply
from onbeat.environments.tools.calculator import calculate
from onbeat.environments.tools.python import ProgramStuck, Python
from onbeat.environments.tools.toolbox import Toolbox


class Tools(Environment):
    """`answer`: where it stands in the last message: in `<answer>…</answer>` (tag), as its last number, or all of it.

    `python_s`, `python_memory_mb`, `python_chars`: what one program may take and say. `system`: a first message.
    """

    functions: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """Tools beside the calculator and the interpreter."""

    def __init__(
        self,
        *,
        tools: str = "",
        answer: str = "number",
        system: str = "",
        python_s: int = 2,
        python_memory_mb: int = 256,
        python_chars: int = 4000,
    ) -> None:
        self._question = Question(answer=answer, system=system)
        interpreter = Python(cpu_s=python_s, memory_mb=python_memory_mb, output_chars=python_chars)

        def python(code: str) -> str:
            """Runs a Python program of its own; answers what it prints, and the value of its last line.

            Args:
                code: The program. It has the standard library's modules for numbers and texts, no files and no network.
            """
            return interpreter.run(code)

        own = {function.__name__: function for function in self.functions}
        functions = {"calculator": calculate, "python": python} | own
        names = [name.strip() for name in tools.split(",") if name.strip()] or list(own) or ["calculator"]
        unknown = [name for name in names if name not in functions]
        if unknown:
            raise ValueError(f"there is no tool `{unknown[0]}`; there are: {', '.join(functions)}")
        self._box = Toolbox([functions[name] for name in names], passes=(ProgramStuck,))

    def reset(self, task: dict[str, Any], seed: int) -> InitialObservation:
        return InitialObservation(self._question.messages(task), tools=self._box.tools)

    def step(self, message: Message, turn: int) -> Reply:
        if message.tool_calls or message.malformed:
            return Reply(self._box.answer(message), metrics=self._box.calls.metrics())
        return self._question.reply(message, self._box.calls.metrics())
