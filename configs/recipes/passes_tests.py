"""A reward for programs: the share of a task's tests that the program in a completion passes.

The reward service calls it in its cage: no network, no files of others, an end to memory and processes.
"""

from __future__ import annotations

import re

PROGRAM = re.compile(r"```(?:python)?\s*\n(.*?)```", re.DOTALL)


def passes_tests(completion: str, test_list: list[str]) -> float:
    """Runs the last program of a completion, then each test after it.

    Args:
        completion: The model's answer, with a fenced block of Python.
        test_list: The task's tests, a line of `assert` each.

    Returns:
        The share of tests that pass; 0.0 for an answer without a program, or one that fails by itself.
    """
    programs = PROGRAM.findall(completion)
    if not programs:
        return 0.0
    names: dict[str, object] = {"__name__": "answer"}
    try:
        exec(programs[-1], names)
    except BaseException:
        # A program may raise anything, SystemExit too: it is wrong then, and the scorer goes on.
        return 0.0
    num_passed = 0
    for test in test_list:
        try:
            exec(test, dict(names))
        except BaseException:
            # A failed assertion, or whatever else the program raises in it: this test isn't passed.
            continue
        num_passed += 1
    return num_passed / max(1, len(test_list))
