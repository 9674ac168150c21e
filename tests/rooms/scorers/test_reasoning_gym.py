"""No text becomes code: what a model or a data author writes reaches no scorer of reasoning-gym that evaluates it."""

from __future__ import annotations

import builtins
import functools
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from contracts.known_tasks import ITS_SCORERS, NOT_GENERATED, NOT_SCORED, OUR_SCORERS
from contracts.rewards import ReasoningGymReward, RewardItem, Scored, Unscorable
from contracts.spec.rules import judge
from reward_service.scorers import rubric
from reward_service.scorers.reasoning_gym import corrected_scorers, known_package
from tests.builders import job_spec, judged_spec

ALL_TASKS = sorted(DATASETS)
EVALUATING = frozenset({"eval", "exec", "compile", "__import__", "parse_expr", "sympify", "lambdify", "literal_eval"})
WHOLE = ReasoningGymReward(answer_pattern="", strict=False)
STUB = {"question": "?", "answer": "x", "metadata": {}}


@functools.cache
def entry_of(task: str) -> str:
    """JSON of an entry of the task; of those that make none here, of another."""
    return json.dumps(STUB if task in NOT_GENERATED else reasoning_gym.create_dataset(task, size=1, seed=11)[0])


def scored(task: str, completion: str, entry: object, *, component: ReasoningGymReward = WHOLE) -> Scored | Unscorable:
    task_entry = json.dumps({"task": task, "entry": entry})
    item = RewardItem(prompt="?", completion=completion, reference="", task_entry=task_entry)
    return rubric.score_item((component,), item)


def reward(task: str, completion: str, entry: object) -> float:
    result = scored(task, completion, entry)
    assert isinstance(result, Scored), result
    return result.reward


def payloads(marker: str) -> list[str]:
    """What would leave the marker, or never end, if it were evaluated."""
    touch = f"open({marker!r},'w').close()"
    return [
        touch,
        f"[{touch}]",
        f"[[{touch}]]",
        f"__import__('os').system('touch {marker}')",
        f"__import__('os').environ.get('ONBEAT_API_KEY', {touch})",
        f"Symbol('x').__class__.__base__.__subclasses__() and {touch}",
        f"(lambda: {touch})()",
        f"f'{{{touch}}}'",
        f'eval("{touch}")',
        f"x if {touch} else x",
        f"<answer>{touch}</answer>",
        json.dumps([touch]),
        json.dumps({"answer": touch}),
        "(" * 3000 + "1" + ")" * 3000,
        "[" * 3000 + "]" * 3000,
        "9**9**9**9",
        "1e999999999",
        "1" * 5000,
        "¬" * 2000,
    ]


def with_texts_replaced(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: with_texts_replaced(inner, text) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_texts_replaced(inner, text) for inner in value]
    return text if isinstance(value, str) else value


@contextmanager
def compiled_texts() -> Iterator[list[str]]:
    """The texts that are handed to eval, exec or compile inside; none of them gets there."""
    texts: list[str] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def record(source: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(source, (str, bytes)):
                texts.append(str(source)[:200])
                raise PermissionError("a text was about to become code")
            return original(source, *arguments, **options)

        return record

    with pytest.MonkeyPatch.context() as patch:
        for name in ("eval", "exec", "compile"):
            patch.setattr(builtins, name, watched(getattr(builtins, name)))
        yield texts


def test_the_installed_package_is_the_one_whose_scorers_were_read() -> None:
    known_package.check_package()
    assert set(ALL_TASKS) == OUR_SCORERS | ITS_SCORERS | NOT_SCORED.keys()
    assert not OUR_SCORERS & ITS_SCORERS
    assert not (OUR_SCORERS | ITS_SCORERS) & NOT_SCORED.keys()
    assert corrected_scorers.SCORERS.keys() == OUR_SCORERS


@pytest.mark.parametrize("change", ["version", "source"])
def test_another_version_or_source_of_the_package_is_not_run(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    if change == "version":
        monkeypatch.setattr(known_package, "version", lambda name: "0.1.26")
    else:
        monkeypatch.setattr(known_package, "source_digest", lambda folder: "0" * 32)
    known_package.check_package.cache_clear()
    try:
        refusal = rubric.warm_up((ReasoningGymReward(),))
    finally:
        known_package.check_package.cache_clear()
    assert isinstance(refusal, Unscorable)
    assert "reasoning_gym==0.1.25" in refusal.detail


def test_the_source_digest_sees_each_byte_and_each_path(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    first = known_package.source_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    second = known_package.source_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "inner" / "a.py")
    assert len({first, second, known_package.source_digest(tmp_path)}) == 3


@pytest.mark.parametrize("task", ALL_TASKS)
def test_no_completion_becomes_code(task: str, tmp_path: Path) -> None:
    entry = json.loads(entry_of(task))
    scored(task, "a first one, for what is imported late", entry)
    marker = tmp_path / "marker"
    with compiled_texts() as texts:
        for payload in payloads(str(marker)):
            result = scored(task, payload, json.loads(entry_of(task)))
            if task in NOT_SCORED:
                assert isinstance(result, Unscorable)
                assert (result.reason, task in result.detail) == ("bad_reference", True)
            else:
                assert isinstance(result, Scored), (payload[:80], result)
                assert 0.0 <= result.reward < 1.0, payload[:80]
    assert not texts
    assert not marker.exists()


@pytest.mark.parametrize("task", ALL_TASKS)
def test_no_entry_becomes_code(task: str, tmp_path: Path) -> None:
    own_answer = str(json.loads(entry_of(task))["answer"])
    scored(task, "a first one, for what is imported late", json.loads(entry_of(task)))
    marker = tmp_path / "marker"
    with compiled_texts() as texts:
        for payload in payloads(str(marker)):
            for completion in (payload, own_answer, "1", "[1]", '["1"]'):
                scored(task, completion, with_texts_replaced(json.loads(entry_of(task)), payload))
    assert not texts
    assert not marker.exists()


def reachable_names(cls: type) -> set[str]:
    """Every name in the code of a class's scorer and in what it may call inside the package."""
    names: set[str] = set()
    seen: set[types.FunctionType] = set()
    open_functions: list[Any] = [cls.score_answer]  # type: ignore[attr-defined]
    while open_functions:
        function = open_functions.pop()
        if function in seen:
            continue
        seen.add(function)
        found = names_of(function.__code__)
        names |= found
        for owner in (*cls.__mro__, *(value for value in function.__globals__.values() if isinstance(value, type))):
            if owner.__module__.startswith("reasoning_gym"):
                open_functions += [inner for name in found if (inner := plain(owner.__dict__.get(name))) is not None]
        for name in found:
            called = plain(function.__globals__.get(name))
            if called is not None and called.__module__.startswith("reasoning_gym"):
                open_functions.append(called)
    return names


def plain(value: object) -> types.FunctionType | None:
    value = getattr(value, "__func__", value)
    value = value.fget if isinstance(value, property) else value
    return value if isinstance(value, types.FunctionType) else None


def names_of(code: types.CodeType) -> set[str]:
    inner = [names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


@pytest.mark.parametrize("task", sorted(ITS_SCORERS))
def test_a_scorer_of_the_package_that_is_run_reaches_nothing_that_evaluates(task: str) -> None:
    assert not reachable_names(DATASETS[task][0]) & EVALUATING


@pytest.mark.parametrize("task", ["countdown", "number_sorting", "bitwise_arithmetic", "intermediate_integration"])
def test_the_search_for_evaluation_finds_it_where_it_is(task: str) -> None:
    assert reachable_names(DATASETS[task][0]) & EVALUATING


FORGED = """
from reasoning_gym.factory import create_dataset

dataset = create_dataset("spiral_matrix", size=2, seed=11)
entry = dataset[1]
print(dataset.score_answer("no matrix", entry))
path = "reasoning_gym.algorithmic.spiral_matrix"
scorer = f"__import__('sys').modules['{path}'].SpiralMatrixDataset"
dataset.score_answer(f"setattr({scorer}, 'score_answer', lambda *_: 1.0)", entry)
print(dataset.score_answer("no matrix", entry))
"""


def test_an_answer_that_a_scorer_of_the_package_evaluates_writes_the_scores_of_its_process() -> None:
    """The reason why such tasks are refused and not caged: a cage leaves the scorer in reach of what it evaluates."""
    program = subprocess.run([sys.executable, "-c", FORGED], check=True, capture_output=True, text=True)
    assert program.stdout.split() == ["0.0", "1.0"]


@pytest.mark.parametrize("task", sorted(OUR_SCORERS))
def test_our_scorer_knows_the_tasks_own_answers(task: str) -> None:
    for entry in reasoning_gym.create_dataset(task, size=30, seed=3):
        travelled = json.loads(json.dumps(entry))
        assert reward(task, travelled["answer"], travelled) == 1.0, travelled


def metadata(answer: str = "", **values: object) -> dict[str, object]:
    return {"question": "?", "answer": answer, "metadata": values}


COUNTDOWN = metadata(numbers=[94, 4, 61, 6], target=309)
PUZZLE24 = metadata(numbers=[8, 5, 10, 6])
SORTING = metadata("['30.5', '14', '-49']", direction="descending")
COIN = metadata("0.3125")
FACTORS = metadata("2 \N{MULTIPLICATION SIGN} 2 \N{MULTIPLICATION SIGN} 5")


@pytest.mark.parametrize(
    ("task", "entry", "completion", "expected"),
    [
        ("countdown", COUNTDOWN, "94*4 - 61 - 6", 1.0),
        ("countdown", COUNTDOWN, "-6 + (94 * 4) - 61", 1.0),
        ("countdown", COUNTDOWN, "94*4 - 61 - 6 + 0", 0.05),
        ("countdown", COUNTDOWN, "309", 0.05),
        ("countdown", COUNTDOWN, "94*4 - 61 - 6 = 309", 0.01),
        ("countdown", COUNTDOWN, "94/(4-4)", 0.01),
        ("countdown", COUNTDOWN, "6!", 0.01),
        ("countdown", COUNTDOWN, "", 0.01),
        ("puzzle24", PUZZLE24, "10*(8 - 5) - 6", 1.0),
        ("puzzle24", PUZZLE24, "8*3*1*1", 0.01),
        ("puzzle24", PUZZLE24, "(10 - 8) * 6 * 5 / 2.5", 0.01),
        ("number_sorting", SORTING, "['30.5', \"14\", -49.4]", 1.0),
        ("number_sorting", SORTING, "[14, 30.5, -49]", 0.0),
        ("number_sorting", SORTING, "[NaN, NaN, NaN]", 0.0),
        ("number_sorting", SORTING, "30.5, 14, -49", 0.0),
        ("coin_flip", COIN, "5/16", 1.0),
        ("coin_flip", COIN, "0.3", 0.5),
        ("coin_flip", COIN, "0", 1 / 6),
        ("coin_flip", COIN, "1/1e-999999", 0.0),
        ("prime_factorization", FACTORS, "5 \N{MULTIPLICATION SIGN} 2 \N{MULTIPLICATION SIGN} 2", 1.0),
        ("prime_factorization", FACTORS, "4 \N{MULTIPLICATION SIGN} 5", 0.5),
        ("prime_factorization", FACTORS, "2 \N{MULTIPLICATION SIGN} 3", 0.01),
        ("prime_factorization", FACTORS, "two fives", 0.0),
        ("complex_arithmetic", metadata("5", result=[5, 0]), "nan", 0.0),
    ],
)
def test_our_scorers_give_credit_for_what_the_question_asks(
    task: str, entry: dict[str, object], completion: str, expected: float
) -> None:
    assert reward(task, completion, entry) == expected


@pytest.mark.parametrize("turns", [1, 4, 7, 10**9])
def test_a_cubes_face_is_turned_as_often_as_it_shows(turns: int) -> None:
    entry = metadata(cube_size=2, scramble_moves="R'")
    assert (reward("rubiks_cube", f"R{turns}", entry) == 1.0) == (turns % 4 == 1)


def test_a_piece_is_pushed_to_the_wall_and_no_further() -> None:
    entry = {"question": "?", "answer": None, "metadata": {"board_config": "o" * 12 + "AAoooo" + "o" * 18}}
    assert [reward("rush_hour", moves, entry) for moves in ("A+4", "A+999999999999", "A+3")] == [1.0, 1.0, 0.01]


def test_an_answer_of_another_form_is_wrong_and_an_entry_of_another_form_is_an_error() -> None:
    life = json.loads(entry_of("game_of_life"))
    assert reward("game_of_life", '{"a": 1}', life) == 0.0
    bad = scored("chain_sum", "5", {"question": "?", "answer": 5, "metadata": {}})
    assert isinstance(bad, Unscorable)
    assert bad.reason == "bad_reference"


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("chain_summ", "did you mean chain_sum"),
        ("codeio", "executes"),
        ("simple_integration", "evaluates what the model wrote"),
        ("bitwise_arithmetic", "evaluates the problem"),
        ("propositional_logic", "exponential"),
    ],
)
def test_a_task_that_cannot_be_scored_is_known_from_the_spec(task: str, reason: str) -> None:
    spec = job_spec(dataset={"type": "reasoning_gym", "task": task}, reward__components=[{"type": "reasoning_gym"}])
    [refusal] = judge(spec)
    assert refusal.field == "dataset.task"
    assert reason in str(refusal.error)


def test_a_task_without_a_scorer_still_makes_prompts_for_other_rewards() -> None:
    judged_spec(dataset={"type": "reasoning_gym", "task": "intermediate_integration"})


def test_the_text_between_the_last_answer_tags_is_scored() -> None:
    entry = json.loads(entry_of("chain_sum"))
    answer = entry["answer"]
    for completion, expected in (
        (f"so <answer>\n{answer}\n</answer>", 1.0),
        (f"<answer>0</answer> no, <answer>{answer}</answer>", 1.0),
        (f"<answer>{answer}</answer> <answer>x</answer>", 0.0),
        (answer, 0.0),
    ):
        result = scored("chain_sum", completion, entry, component=ReasoningGymReward())
        assert isinstance(result, Scored)
        assert result.breakdown == {"reasoning_gym": expected}


def test_partial_credit_counts_only_when_not_strict() -> None:
    entry = json.loads(entry_of("chain_sum"))
    rambling = f"{entry['answer']} or something else"
    strict = ReasoningGymReward(answer_pattern="")
    assert scored("chain_sum", rambling, entry, component=strict) == Scored(reward=0.0, breakdown={strict.name: 0.0})
    assert 0.0 < reward("chain_sum", rambling, entry) < 1.0
    assert reward("chain_sum", entry["answer"], entry) == 1.0


@pytest.mark.parametrize(
    ("task_entry", "named"),
    [
        ("", "JSON"),
        ("[1]", "expected"),
        ('{"task": "chain_sum", "entry": {"question": "1+1"}}', "answer, metadata"),
        ('{"task": "no_such_task", "entry": {"question": "", "answer": "", "metadata": {}}}', "no_such_task"),
    ],
)
def test_a_task_entry_that_cannot_be_scored_is_a_bad_reference(task_entry: str, named: str) -> None:
    item = RewardItem(prompt="?", completion="no answer tags at all", reference="", task_entry=task_entry)
    refused = rubric.score_item((ReasoningGymReward(),), item)
    assert isinstance(refused, Unscorable)
    assert refused.reason == "bad_reference"
    assert named in refused.detail


def test_without_the_package_each_item_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for refused in (rubric.warm_up((WHOLE,)), scored("chain_sum", "1", STUB)):
        assert isinstance(refused, Unscorable)
        assert refused.reason == "unknown_entry_point"
        assert (
            "`reasoning_gym` needs the package reasoning_gym, which the reward service's host doesn't have"
            in refused.detail
        )
        assert "pip install reasoning-gym there" in refused.detail
