"""The table of reasoning-gym's tasks, for one version of the package: by what each is scored, and if it makes prompts.

Some of its scorers evaluate as Python what the model wrote, or what stands in the data set's entry. The table below is
the result of reading every scorer of one version, with all that it calls: a task stands in one of three sets, and no
other version of the package is run. Nothing of the package is imported here.
"""

from __future__ import annotations

import difflib
import re

from contracts.encoding.wire import decode_json
from contracts.errors import InvalidInput
from contracts.rewards import TaskEntry
from contracts.spec.datasets import ReasoningGymDataset

VERSION = "0.1.25"
"""The version of reasoning-gym whose scorers were read."""

INSTALL = "pip install 'onbeat[reasoning-gym]'"
"""The command that installs this version: the package is optional."""

SOURCE_DIGEST = "ecd3adb611015abb3483b0f9e9530af8"
"""BLAKE2b-128 over the paths and bytes of its Python files (`known_package.py` of the scorer)."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OUR_SCORERS = frozenset({"coin_flip", "countdown", "number_sorting", "puzzle24"})
"""`corrected_scorers.py` of the scorer scores these: the package's scorers reward what the question forbids."""

ITS_SCORERS = _names(
    """
    ab acre advanced_geometry aiw arc_1d base_conversion basic_arithmetic bf binary_alternation caesar_cipher
    calendar_arithmetic chain_sum circuit_logic color_cube_rotation complex_arithmetic count_bits count_primes
    course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font
    fraction_simplification futoshiki game_of_life gcd graph_color group_anagrams gsm_symbolic isomorphic_strings jugs
    kakurasu knight_swap knights_knaves largest_island lcm leg_counting letter_counting letter_jumble list_functions
    mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid needle_haystack number_filtering number_format
    number_sequence palindrome_generation palindrome_partitioning path_star polynomial_equations pool_matrix
    power_function prime_factorization products quantum_lock ransom_note rectangle_count rotate_matrix rotten_oranges
    rubiks_cube rush_hour self_reference sentence_reordering shortest_path simple_equations simple_geometry sokoban
    spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism time_intervals
    tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
    """
)
"""Scored by the package's own scorers, which evaluate nothing."""

EVALUATES_THE_ANSWER = "its scorer evaluates what the model wrote, which can then write its own score"
"""Why a cage is no cure: it keeps such a text from the host, but not from the scorer that runs in the same process."""

NOT_SCORED = {
    "arc_agi": "its scorer compares tuples, which an entry in JSON doesn't have",
    "binary_matrix": EVALUATES_THE_ANSWER,
    "bitwise_arithmetic": "its scorer evaluates the problem that stands in the data set's entry",
    "boxnet": "its scorer raises errors, and searches without end, on malformed answers",
    "codeio": "its scorer compares trees of the model's making without a bound",
    "composite": "it has no scorer of its own",
    "game_of_life_halting": "its scorer takes any answer for the right one",
    "intermediate_integration": EVALUATES_THE_ANSWER,
    "n_queens": EVALUATES_THE_ANSWER,
    "polynomial_multiplication": EVALUATES_THE_ANSWER,
    "propositional_logic": "its scorer takes exponential time on some answers",
    "rearc": "its scorer compares tuples, which an entry in JSON doesn't have",
    "simple_integration": EVALUATES_THE_ANSWER,
    "spiral_matrix": EVALUATES_THE_ANSWER,
    "string_insertion": EVALUATES_THE_ANSWER,
}
"""Task → why no reward of type `reasoning_gym` is had for it."""

NOT_GENERATED = {"codeio": "it executes the programs of its data file", "composite": "its parameters are other tasks"}
"""Task → why it makes no prompts."""

FILE_PARAMETERS = frozenset({"data_file", "static_font"})
"""Parameters of tasks that name a file or a font: one of the package's own, never a path."""

FILE_CURE = "leave it out, or use letters, digits, `_`, `-` and `.`"
"""The cure of one that is a path."""

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

ENTRY_FIELDS = frozenset({"question", "answer", "metadata"})


def read_task_entry(text: str) -> TaskEntry:
    """Raises InvalidInput for text that is no entry, and for a task that isn't scored."""
    try:
        task_entry = decode_json(text, TaskEntry)
    except InvalidInput as error:
        raise InvalidInput(str(error), field="task_entry", cure='{"task": name, "entry": {…}}') from error
    missing = ENTRY_FIELDS - task_entry.entry.keys()
    if missing:
        raise InvalidInput(f"entry lacks {', '.join(sorted(missing))}", field="task_entry")
    check_scored(task_entry.task, field="task_entry")
    return task_entry


def check_scored(task: str, *, field: str) -> None:
    """Raises InvalidInput for a task that no scorer is known to be safe for."""
    _check_known(task, field=field)
    if task in NOT_SCORED:
        raise InvalidInput(
            f"`{task}` is not scored: {NOT_SCORED[task]}",
            field=field,
            cure="choose another task, or a reward of another type",
        )


def check_version(installed: str) -> None:
    """Raises InvalidInput for a version of the package whose scorers have not been read."""
    if installed != VERSION:
        raise InvalidInput(
            f"reasoning-gym {installed} is installed, whose scorers we haven't checked for running code",
            field="reasoning_gym",
            cure=f"install reasoning_gym=={VERSION}",
        )


def check_generated(dataset: ReasoningGymDataset) -> None:
    """Raises InvalidInput for a task whose prompts aren't made here, whatever spec it came by.

    The judge has refused such a spec. What makes the prompts looks once more, since a task may execute what it reads.
    """
    task = dataset.task
    _check_known(task, field="dataset.task")
    if task in NOT_GENERATED:
        raise InvalidInput(
            f"`{task}` makes no prompts here: {NOT_GENERATED[task]}", field="dataset.task", cure="choose another task"
        )
    for name in path_parameters(dataset):
        raise InvalidInput(
            "names one of the package's own files, never a path", field=f"dataset.params.{name}", cure=FILE_CURE
        )


def path_parameters(dataset: ReasoningGymDataset) -> list[str]:
    """Returns the parameters of a task that name a file or a font by what may be a path."""
    names = sorted(FILE_PARAMETERS & dataset.params.keys())
    return [name for name in names if not PLAIN_NAME.fullmatch(str(dataset.params[name]))]


def is_known(task: str) -> bool:
    """Returns True for a task of the package."""
    return task in OUR_SCORERS or task in ITS_SCORERS or task in NOT_SCORED


def cure_of_unknown(task: str) -> str:
    """Returns the names that a task of no such name may stand for, or where the tasks are listed."""
    close = difflib.get_close_matches(task[:100], sorted(OUR_SCORERS | ITS_SCORERS), n=3)
    return f"did you mean {' or '.join(close)}?" if close else "docs/rewards.md#reasoning-gym lists the tasks"


def _check_known(task: str, *, field: str) -> None:
    if not is_known(task):
        raise InvalidInput(f"`{task[:100]}` is no task of reasoning-gym", field=field, cure=cure_of_unknown(task))
