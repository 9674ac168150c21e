"""A function of a program becomes a text that does the same by itself, or is refused by the name of what it uses."""

from __future__ import annotations

import io
import json
import linecache
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta as span
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import InvalidInput
from contracts.rewards import PluginReward, RewardItem
from onbeat.environments.author import Environment as Base
from onbeat.environments.author import Message, Reply
from onbeat.training.function_source import name_of, source_of
from reward_service.scorers import plugin

ANSWER = re.compile(r"answer:\s*(\d+)", re.IGNORECASE)
SCORES = {"right": 1.0, "close": 0.5, "others": (0.0, [None, True])}
OPEN = io.StringIO()
HALF = 0.5 * math.inf
strip = OPEN
"""A name that is also a method's."""


@dataclass
class Guess:
    """What a completion says."""

    number: int = 7

    def is_near(self, other: int) -> bool:
        return abs(self.number - other) <= span(days=1).days


def read(completion: str) -> Guess | None:
    found = ANSWER.search(completion)
    return Guess(number=int(found[1])) if found else None


def graded(completion: str, reference: str) -> float:
    """Uses a class, a function, a pattern, a table, a module and a name of another module."""
    guess = read(completion.strip())
    if guess is None:
        return json.loads("0.25")
    of_guess = [guess.number == int(number) for number in [reference]]
    if all(of_guess):
        return SCORES["right"]
    return SCORES["close"] if guess.is_near(int(reference)) else math.floor(0.5)


def counted(completion: str, again: bool = True) -> float:
    """Calls itself."""
    return 1.0 + counted(completion, False) if again else float(len(completion))


class Guessing(Base):
    """An environment."""

    smallest = 7

    def reset(self, task: dict[str, Any], seed: int) -> str:
        return "answer: ?"

    def step(self, message: Message, turn: int) -> Reply:
        guess = read(message.content)
        is_near = guess is not None and guess.is_near(self.smallest)
        return Reply(reward=SCORES["right" if is_near else "close"], done=True)


def with_open_file(completion: str) -> float:
    return float(len(OPEN.getvalue()))


def with_infinity(completion: str) -> float:
    return HALF


def enclosed() -> Callable[[str], float]:
    factor = 2.0

    def scaled(completion: str) -> float:
        return factor * len(completion)

    return scaled


def by_itself(function: Callable[..., Any], completion: str, reference: str = "") -> float:
    """What the scorer gives, which has the text alone."""
    name, source = name_of(function, "reward"), source_of(function)
    component = PluginReward(entry_point=name, file=f"{name}.py", source=source)
    return plugin.score(component, RewardItem(prompt="", completion=completion, reference=reference))


@pytest.mark.parametrize("completion", ["Answer: 12", "answer: 13", "answer: 40", "twelve"])
def test_the_text_gives_what_the_function_gives(completion: str) -> None:
    assert by_itself(graded, completion, "12") == graded(completion, "12")


def test_a_function_may_call_itself_and_leaves_out_what_it_does_not_name() -> None:
    assert by_itself(counted, "abc") == counted("abc") == 4.0
    assert "ANSWER" not in source_of(counted)


def test_the_same_function_has_the_same_text_each_time() -> None:
    assert source_of(graded) == source_of(graded)
    assert source_of(graded).count("import re as re\n") == 1


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda completion: 1.0, "reward <lambda>: is no function with a name"),
        (len, "reward len: is no function with a name"),
        (enclosed(), "reward scaled: uses factor of the function around it"),
        (with_open_file, "reward with_open_file: uses `OPEN`, a StringIO, which can't be written down"),
        (with_infinity, "reward with_infinity: uses `HALF`, a float, which can't be written down"),
    ],
)
def test_what_has_no_text_of_its_own_is_refused_by_its_name(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(problem)):
        source_of(function)


def test_a_function_whose_text_is_in_no_file_is_refused() -> None:
    names: dict[str, Any] = {"__name__": "typed"}
    exec("def typed(completion):\n    return 1.0\n", names)
    with pytest.raises(InvalidInput, match="the source of `typed` cannot be read"):
        source_of(names["typed"])


def test_a_function_of_a_notebooks_cell_has_its_text() -> None:
    cell = "def of_cell(completion):\n    return float(LENGTH)\n"
    linecache.cache["<cell 1>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell 1>")
    names: dict[str, Any] = {"__name__": "__main__", "LENGTH": 3}
    exec(compile(cell, "<cell 1>", "exec"), names)
    assert by_itself(names["of_cell"], "abc") == 3.0


def test_a_class_brings_its_base_and_what_its_methods_use() -> None:
    text = source_of(Guessing, field="environment")
    names: dict[str, Any] = {"__name__": "by_itself"}
    exec(text, names)
    guessing = names["Guessing"]()
    assert guessing.step(Message(role="assistant", content="answer: 8"), 0).reward == SCORES["right"]
    assert "from onbeat.environments.author import Environment as Base" in text
    assert "NOTHING" not in text


def test_functions_of_one_module_share_a_text_and_one_of_another_is_refused() -> None:
    text = source_of(graded, counted, read, field="tools")
    assert text.count("def read(") == text.count("def counted(") == 1
    with pytest.raises(InvalidInput, match="tools graded: `score` is of reward_service"):
        source_of(graded, plugin.score, field="tools")


def test_a_class_of_a_notebooks_cell_has_its_text() -> None:
    cell = "class OfCell:\n    first = 2\n\n    def reset(self, task, seed):\n        return str(LENGTH + self.first)\n"
    linecache.cache["<cell 2>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell 2>")
    names: dict[str, Any] = {"__name__": "no_file_of_this_name", "LENGTH": 3}
    exec(compile(cell, "<cell 2>", "exec"), names)
    alone: dict[str, Any] = {"__name__": "by_itself"}
    exec(source_of(names["OfCell"], field="environment"), alone)
    assert alone["OfCell"]().reset({}, 0) == "5"


def test_a_class_within_a_function_is_refused() -> None:
    class Within:
        def reset(self) -> None: ...

    with pytest.raises(InvalidInput, match="environment Within: uses the names of the function around it"):
        source_of(Within, field="environment")


PROGRAM = """
import json
import helpers
import parts.numbers
from helpers import gold
from onbeat.training.function_source import source_of

def by_name(completion): return gold(completion)
def by_module(completion): return helpers.gold(completion)
def by_package(completion): return parts.numbers.one

texts = []
for function in (by_name, by_module, by_package):
    try:
        texts.append(source_of(function))
    except Exception as error:
        texts.append(str(error))
print(json.dumps(texts))
"""
HELPERS = """import math
from scale import SCALE


def gold(completion):
    return SCALE * math.sqrt(float(completion))
"""


def test_a_module_next_to_the_program_goes_along_with_what_it_imports_and_a_package_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program"
    (program / "parts").mkdir(parents=True)
    (program / "parts" / "__init__.py").touch()
    (program / "parts" / "numbers.py").write_text("one = 1.0\n")
    (program / "scale.py").write_text("SCALE = 2.0\n")
    (program / "helpers.py").write_text(HELPERS)
    (program / "program.py").write_text(PROGRAM)
    ended = subprocess.run([sys.executable, str(program / "program.py")], capture_output=True, text=True, timeout=120)
    *sources, refusal = json.loads(ended.stdout)
    assert refusal.startswith("reward by_package: uses `parts` of parts, a package next to the program")
    assert refusal.endswith("(put the helper into the same file, or install it where the reward service runs)")
    for name, source in zip(("by_name", "by_module"), sources, strict=True):
        call = f"from onbeat.base.cage.fault_text import fault_text\ntry: {name}('-1')\n"
        call += "except ValueError as error: print(fault_text(error.with_traceback(error.__traceback__.tb_next)))\n"
        alone = subprocess.run(
            [sys.executable, "-c", f"{source}\nprint({name}('4'))\n{call}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        score, fault = alone.stdout.splitlines()
        assert score == "4.0"
        assert "at helpers.py:6 in gold: return SCALE * math.sqrt(float(completion))" in fault
