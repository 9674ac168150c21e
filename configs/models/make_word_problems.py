"""Makes models/word-problems-*.jsonl: the rows of configs/curves/word-problems*.toml.

    python configs/models/make_word_problems.py

The rows are questions of reasoning-gym's gsm_symbolic that two equations solve, as the task's own solution writes them.
A row of `sft` has those equations as its completion ("22*2=44, 44-7=37"); rows of `train` and `held-out` have none. No
question is in two files. Equal bytes each time; the files are not committed.
"""

from __future__ import annotations

import json
import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from contracts.spec.datasets import ReasoningGymDataset
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.examples import Example

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "models"
TASK = "gsm_symbolic"
NUM_DRAWN = 9000
"""Questions drawn for the training pool; about one in eight has a solution of two equations."""
NUM_DRAWN_HELD_OUT = 1400
NUM_SFT_ROWS = 512
NUM_TRAIN_ROWS = 512
NUM_HELD_OUT_ROWS = 128
NUM_EQUATIONS = 2
MAX_QUESTION_CHARACTERS = 320
TIMES = "\N{MULTIPLICATION SIGN}x"
"""The signs of a product in the task's solutions, next to *."""
EQUATION = re.compile(rf"(\d+(?:\s*[-+*/{TIMES}]\s*\d+)+)\s*=\s*(\d+)(?![\d.]*\d)")
"""Left side and result of one step of a solution, in whole numbers."""
CURRENCIES = str.maketrans("", "", "$€£")
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}

logger = logging.getLogger("make_word_problems")


def value_of(terms: str) -> float:
    """Returns the value of a left side such as "40-8-16", whose operations are all of one kind.

    Raises ValueError where they are not, since the order of operations would then matter.
    """
    signs = set(re.findall(r"[-+*/]", terms))
    if len(signs) != 1:
        raise ValueError(f"{terms} mixes operations")
    operation = OPERATIONS[signs.pop()]
    first, *others = [float(number) for number in re.findall(r"\d+", terms)]
    for number in others:
        if operation is operator.truediv and number == 0.0:
            raise ValueError(f"{terms} divides by zero")
        first = operation(first, number)
    return first


def equations(example: Example) -> str | None:
    """Returns a question's solution as equations, or None where it has no short and right one.

    Each equation has to hold, its numbers have to stand in the question or before it in the solution, and the last
    result has to be the answer: a few of the task's solutions use numbers that the question doesn't state.
    """
    if len(example.question) > MAX_QUESTION_CHARACTERS:
        return None
    solution = json.loads(example.task_entry)["entry"]["metadata"]["answer_cot"].translate(CURRENCIES)
    known = set(re.findall(r"\d+", example.question))
    steps: list[str] = []
    result = ""
    for left, result in EQUATION.findall(solution):
        terms = re.sub(f"[{TIMES}]", "*", re.sub(r"\s", "", left))
        try:
            is_true = value_of(terms) == float(result)
        except ValueError:
            return None
        if not is_true or not set(re.findall(r"\d+", terms)) <= known:
            return None
        known.add(result)
        steps.append(f"{terms}={result}")
    if len(steps) != NUM_EQUATIONS or result != example.reference:
        return None
    return ", ".join(steps)


def solved(examples: Iterable[Example]) -> Iterator[tuple[Example, str]]:
    for example in examples:
        solution = equations(example)
        if solution is not None:
            yield example, solution


def write_rows(name: str, rows: list[tuple[Example, str]], *, number: int, with_solutions: bool) -> None:
    """Writes `number` rows. Raises SystemExit where there are fewer."""
    if len(rows) < number:
        raise SystemExit(f"{TASK} made {len(rows)} rows for {name}, {number} are needed")
    lines: list[str] = []
    for example, solution in rows[:number]:
        row = {"prompt": example.question, "reference": example.reference, "task_entry": example.task_entry}
        if with_solutions:
            row["completion"] = solution
        lines.append(json.dumps(row) + "\n")
    path = FOLDER / f"word-problems-{name}.jsonl"
    path.write_text("".join(lines))
    logger.info("%s: %d rows", path, number)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    FOLDER.mkdir(exist_ok=True)
    dataset = ReasoningGymDataset(task=TASK, num_train_prompts=NUM_DRAWN)
    examples = load_dataset(dataset, num_evaluation=NUM_DRAWN_HELD_OUT, seed=0, model_root=SpecRoot(REPOSITORY))
    rows = list(solved(examples.train))
    write_rows("sft", rows, number=NUM_SFT_ROWS, with_solutions=True)
    write_rows("train", rows[NUM_SFT_ROWS:], number=NUM_TRAIN_ROWS, with_solutions=False)
    write_rows("held-out", list(solved(examples.evaluation)), number=NUM_HELD_OUT_ROWS, with_solutions=False)


if __name__ == "__main__":
    main()
