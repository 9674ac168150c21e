"""The reward service with real scorer processes, a real uvicorn server on loopback, and hostile scorers."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from fastapi import FastAPI
from msgspec.structs import replace

from contracts.encoding.arrays import pack_int32
from contracts.encoding.wire import decode, decode_json, encode, encode_json
from contracts.errors import Unavailable
from contracts.rewards import (
    ExactReward,
    FormatReward,
    LengthReward,
    PluginReward,
    RegexReward,
    RewardComponent,
    RewardItem,
    RewardRequest,
    RewardResponse,
    Scored,
    Unscorable,
)
from contracts.settings import StackSettings
from onbeat.base.cage.printed import MAX_CHARS_A_MINUTE
from onbeat.base.process.waiting import Waiting
from onbeat.stack.ports import free_port
from reward_service.app import create_app
from reward_service.scoring import pool as scorer_pool
from reward_service.scoring import scoring_thread
from reward_service.scoring.pool import ScorerPool
from tests.served import serving

KEY = "reward-key"
SETTINGS = StackSettings(reward_key=KEY)
BEARER = {"Authorization": f"Bearer {KEY}"}
MSGPACK = {"Content-Type": "application/msgpack"}
ITEM_S = 2.0
"""For an item where one hangs; a loaded machine scores another in less."""
BACKTRACKS = r"(?=a)(a+)+$"
"""It never ends over many `a` and a `b`: RE2 has no look-ahead, so `re` matches it."""
# What hangs here sleeps: a loop would take a core until its time is over. What computes without end is a pattern.
PLUGIN_SOURCE = '''
import os, signal, subprocess, sys, threading

def hostile(*, prompt, completion, reference, task_entry):
    """The completion says what to do."""
    if completion == "hang":
        threading.Event().wait()
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "exit":
        os._exit(3)
    if completion == "raise":
        raise ValueError("no")
    return len(completion)

calls = 0

def gated(*, prompt, completion, reference, task_entry):
    """How many items this process has scored; enters by the FIFO `reference`, and waits at the FIFO `task_entry`."""
    global calls
    calls += 1
    if reference:
        open(reference).close()
        open(task_entry).close()
    return float(calls)

def hang_with_a_child(*, prompt, completion, reference, task_entry):
    """The child has the prompt as its last argument, and a session of its own."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", prompt], start_new_session=True)
    open(reference).close()
    threading.Event().wait()
'''
ENTRY_POINTS = """[onbeat.rewards]
hostile = hostile_rewards:hostile
gated = hostile_rewards:gated
hang_with_a_child = hostile_rewards:hang_with_a_child
dies_at_import = dies_at_import:reward
hangs_at_import = hangs_at_import:reward
"""


@pytest.fixture(scope="module")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What installing a package with entry points leaves on the path."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "hostile_rewards.py").write_text(PLUGIN_SOURCE)
    (folder / "dies_at_import.py").write_text("import os\nos._exit(7)\n")
    (folder / "hangs_at_import.py").write_text("import threading\nthreading.Event().wait()\n")
    info = folder / "hostile_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture
def plugins(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scorer processes inherit the path of the process that starts them."""
    monkeypatch.syspath_prepend(str(plugin_folder))
    return plugin_folder


def submit(pool: ScorerPool, components: Any, items: Any, **options: Any) -> Future[Any]:
    return pool.submit(RewardRequest(components=components, items=items, **options))


@contextmanager
def open_pool(num_threads: int = 1) -> Iterator[ScorerPool]:
    pool = ScorerPool(num_threads=num_threads)
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def serve(app: FastAPI) -> Iterator[httpx.Client]:
    with serving(app) as url, httpx.Client(base_url=url, timeout=60.0, headers=BEARER) as client:
        yield client


def items_of(*completions: str, reference: str = "") -> tuple[RewardItem, ...]:
    return tuple(RewardItem(prompt="", completion=completion, reference=reference) for completion in completions)


def post(client: httpx.Client, *components: RewardComponent, items: tuple[RewardItem, ...]) -> RewardResponse:
    request = RewardRequest(components=components, items=items, item_timeout_s=ITEM_S)
    response = client.post("/v1/score", content=encode(request), headers=MSGPACK)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/msgpack"
    return decode(response.content, RewardResponse)


def reasons(results: tuple[Scored | Unscorable, ...]) -> list[str]:
    return [result.reason if isinstance(result, Unscorable) else "scored" for result in results]


def metric(client: httpx.Client, name: str) -> float:
    """Value of one line of the exposition; 0.0 if it is not there yet."""
    lines = client.get("/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def wait_until_gone(pid: int) -> None:
    """Returns when the process has ended; fails after a minute."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 60.0)[0], f"process {pid} is still there"
    finally:
        os.close(handle)


def family(pid: int) -> list[int]:
    """A process with all that descend from it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def with_argument(argument: str) -> list[int]:
    """Processes that were started with it."""
    found: list[int] = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [int(command.parent.name)] * (argument.encode() in command.read_bytes().split(b"\0"))
    return found


@pytest.mark.parametrize(("num_threads"), [1, 2])
def test_hanging_and_dying_scorers_cost_only_their_own_items(plugins: Path, num_threads: int) -> None:
    with open_pool(num_threads) as pool:
        completions = ("a", "hang", "bb", "die", "ccc", "exit", "raise", "dddd")
        work = submit(pool, (PluginReward(entry_point="hostile"),), items_of(*completions), item_timeout_s=ITEM_S)
        results = work.result()
        assert pool.is_alive
    assert reasons(results) == ["scored", "timeout", "scored", "crashed", "scored", "crashed", "raised", "scored"]
    assert [result.reward for result in results if isinstance(result, Scored)] == [1.0, 2.0, 3.0, 4.0]
    lost = {index: result for index, result in enumerate(results) if isinstance(result, Unscorable)}
    assert {result.component for result in lost.values()} == {"hostile"}
    assert "2 s" in lost[1].detail
    assert "SIGKILL" in lost[3].detail
    assert "exit code 3" in lost[5].detail


def test_a_function_of_a_file_is_called_with_what_it_names_and_two_files_of_one_name_are_two() -> None:
    def of_file(source: str) -> PluginReward:
        return PluginReward(entry_point="reward", file="rewards.py", source=source)

    counts = of_file(
        "import re\n\n\ndef reward(completion, reference):\n    return len(re.findall(reference, completion))"
    )
    names = of_file("def reward(**given):\n    return len(given)")
    raises = of_file("def reward(completion):\n    return completion.no_such_thing")
    item = RewardItem(prompt="", completion="aba", reference="a")
    with open_pool() as pool:
        both, raised = (
            submit(pool, rubric, (item,), item_timeout_s=10.0, job_id="job-1").result()[0]
            for rubric in ((counts, names), (raises,))
        )
    assert both == Scored(reward=9.0, breakdown={"reward": 2.0, "reward_2": 7.0})
    assert isinstance(raised, Unscorable)
    line = "rewards.py:2 in reward: return completion.no_such_thing"
    assert raised.detail == f"AttributeError: 'str' object has no attribute 'no_such_thing', at {line}"


TALKS = """
def talks(completion):
    print("look at", completion)
    print("\\x1b[31mred", end="")
    return 1.0 / len(completion)
"""


def test_what_a_reward_prints_is_in_the_log_with_the_traceback_and_the_completion_where_it_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talks = PluginReward(entry_point="talks", file="folder/mine.py", source=TALKS)
    item = RewardItem(prompt="how?", completion="so", reference="r")
    with open_pool() as pool, caplog.at_level(logging.INFO):
        scored = submit(pool, (talks,), (item,), item_timeout_s=10.0, job_id="job-1").result()
        assert rewards(scored) == [0.5]
        lines = [record.getMessage() for record in caplog.records if " prints: " in record.getMessage()]
        assert lines == ["job-1 prints: look at so", "job-1 prints: \\x1b[31mred"]
        caplog.clear()
        (raised,) = submit(pool, (talks,), items_of(""), item_timeout_s=10.0, job_id="job-1").result()
    assert isinstance(raised, Unscorable)
    assert (
        raised.detail
        == "ZeroDivisionError: float division by zero, at mine.py:5 in talks: return 1.0 / len(completion)"
    )
    for line in (
        'File "folder/mine.py", line 5, in talks',
        "ZeroDivisionError: float division by zero",
        "completion: ''",
    ):
        assert f"job-1 prints: {line}" in caplog.text.replace("prints:   ", "prints: ")


def test_a_reward_that_prints_without_end_costs_its_own_lines_alone(caplog: pytest.LogCaptureFixture) -> None:
    source = "def floods(completion):\n    for _ in range(10_000):\n        print('x' * 100)\n    return 1.0\n"
    floods = PluginReward(entry_point="floods", file="floods.py", source=source)
    with open_pool(num_threads=1) as pool, caplog.at_level(logging.INFO):
        result = submit(pool, (floods,), items_of(*"abcdefghijklmno"), item_timeout_s=10.0, job_id="job-1").result()
    assert rewards(result) == [1.0] * 15
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("job-1 prints")]
    assert sum(map(len, lines)) < 2 * MAX_CHARS_A_MINUTE
    assert "more characters)" in caplog.text
    assert lines[-1] == f"job-1 prints more than {MAX_CHARS_A_MINUTE} characters a minute; the rest is left out"


OF_TRL = """
def right(completions, prompts, solution, level=1, **kwargs):
    assert set(kwargs) >= {"completion_ids", "hint"} and not {"solution", "level"} & set(kwargs)
    assert level == [2, 3] and prompts == ["p", "p"]
    return [float(text == answer) for text, answer in zip(completions, solution)]


def alone(completion, solution):
    return float(completion == solution)
"""


def test_a_function_of_trls_signature_gets_the_columns_that_it_names_as_lists() -> None:
    def of_file(name: str) -> PluginReward:
        return PluginReward(entry_point=name, file="rewards.py", source=OF_TRL)

    rows = ('{"solution": "4", "level": 2, "hint": "even"}', '{"solution": "5", "level": 3, "hint": "odd"}')
    items = tuple(RewardItem(prompt="p", completion="4", reference="", metadata=row) for row in rows)
    with open_pool() as pool:
        rubric = (of_file("right"), of_file("alone"))
        results = submit(pool, rubric, items, group_size=2, item_timeout_s=10.0, job_id="job-1").result()
        assert results == (
            Scored(reward=2.0, breakdown={"right": 1.0, "alone": 1.0}),
            Scored(reward=0.0, breakdown={"right": 0.0, "alone": 0.0}),
        )
        without = (RewardItem(prompt="p", completion="4", reference="", metadata='{"level": 2, "hint": ""}'),)
        for name in ("right", "alone"):
            refused = submit(pool, (of_file(name),), without, item_timeout_s=10.0, job_id="job-2").result()[0]
            assert isinstance(refused, Unscorable)
            assert (refused.reason, refused.component) == ("unknown_entry_point", name)
            assert f"`{name}` can't be called: it needs `solution`" in refused.detail
            assert "name a column in dataset.metadata_columns" in refused.detail


ONE_NAME = """
def same(completions, prompt, prompts, **kwargs):
    assert prompt == prompts
    return [float(question.startswith("2")) for question, _ in zip(prompt, completions, strict=True)]
"""


def test_a_function_for_whole_groups_gets_the_list_of_prompts_by_either_name() -> None:
    same = PluginReward(entry_point="same", file="rewards.py", source=ONE_NAME)
    items = tuple(RewardItem(prompt=text, completion="4", reference="") for text in ("2+2=", "3+1="))
    with open_pool() as pool:
        results = submit(pool, (same,), items, group_size=1, item_timeout_s=10.0, job_id="job-1").result()
    assert rewards(results) == [1.0, 0.0]


SHARES = """
import threading

calls = 0

def share(completions, prompts, metadata, finish_reasons, completion_ids, group_size):
    global calls
    calls += 1
    if "hang" in prompts:
        threading.Event().wait()
    groups = [completions[start : start + group_size] for start in range(0, len(completions), group_size)]
    sizes = [sum(map(len, group)) for group in groups for _ in group]
    assert [one["level"] for one in metadata] == list(range(len(completions))), "the items of a request, in order"
    assert (set(finish_reasons), {tuple(ids) for ids in completion_ids}) == ({"stop"}, {(7, 8)})
    return [100 * calls + len(text) / size for text, size in zip(completions, sizes)]
"""


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_function_that_names_completions_is_called_once_for_whole_groups(plugins: Path, num_threads: int) -> None:
    def items(prompt: str) -> tuple[RewardItem, ...]:
        told = {"finish_reason": "stop", "token_ids": pack_int32([7, 8]), "reference": "", "prompt": prompt}
        texts = ("a", "die", "bb", "bb", "raise", "cc")
        return tuple(RewardItem(completion=c, metadata=f'{{"level": {n}}}', **told) for n, c in enumerate(texts))

    share = PluginReward(entry_point="share", file="share.py", source=SHARES)
    rubric, asked = (PluginReward(entry_point="hostile", weight=0.0), share), (1, 2, 3, 5)
    options = {"to_score": asked, "group_size": 2, "item_timeout_s": ITEM_S}
    with open_pool(num_threads) as pool:
        results = submit(pool, rubric, items(""), **options).result()
        assert reasons(results) == ["crashed", "scored", "scored", "scored"], "who dies, dies alone"
        assert rewards(results) == [100.5, 100.5, 100 + 2 / 7], "of one call, with those that are not asked for"
        hung = submit(pool, rubric, items("hang"), **options).result()
        assert reasons(hung) == ["crashed", "timeout", "timeout", "timeout"]
        assert {one.component for one in hung[1:]} == {"share"}
        assert "scoring 6 items in one call took more than 2 s" in hung[1].detail
        stated = (replace(share, on_unscorable=-3.0), LengthReward(target_chars=2, max_chars=9))
        settled = submit(pool, stated, items("hang"), **options, settles=True).result()
        assert [one.breakdown["share"] for one in settled] == [-3.0] * 4
        assert [one.unscorable for one in settled] == [{"share": "timeout"}] * 4


def test_plugin_that_dies_at_import_fails_its_request_and_not_the_next(plugins: Path) -> None:
    with open_pool() as pool:
        broken = submit(pool, (PluginReward(entry_point="dies_at_import"),), items_of("a", "b"), item_timeout_s=20.0)
        assert reasons(broken.result()) == ["crashed", "crashed"]
        sound = submit(pool, (FormatReward(pattern="a"),), items_of("a"), item_timeout_s=10.0)
        assert reasons(sound.result()) == ["scored"]


def test_plugin_that_hangs_at_import_is_killed_after_the_time_to_start(plugins: Path) -> None:
    pool = ScorerPool(num_threads=1, warm_up_timeout_s=3.0)
    try:
        hanging = submit(pool, (PluginReward(entry_point="hangs_at_import"),), items_of("a", "b"), item_timeout_s=1.0)
        assert reasons(hanging.result()) == ["timeout", "timeout"]
        assert "took more than 3 s; its process was killed" in str(hanging.result()[0])
    finally:
        pool.close()


def test_unknown_plugin_is_told_without_losing_a_process(plugins: Path) -> None:
    restarts: list[int] = []
    pool = ScorerPool(num_threads=1, on_restart=lambda: restarts.append(1))
    try:
        work = submit(pool, (PluginReward(entry_point="absent"),), items_of("a", "b"), item_timeout_s=20.0)
        assert reasons(work.result()) == ["unknown_entry_point", "unknown_entry_point"]
        assert "hostile" in str(work.result()[0])
    finally:
        pool.close()
    assert restarts == []


class Gate:
    """One item that waits inside the scorer process until the test lets it go. It can write nowhere: it reads FIFOs."""

    def __init__(self, folder: Path) -> None:
        folder = Path(tempfile.mkdtemp(dir=folder))
        folder.chmod(0o755)
        self.entered = folder / "entered"
        self.release = folder / "release"
        os.mkfifo(self.entered)
        os.mkfifo(self.release)

    def closed_item(self, completion: str = "") -> RewardItem:
        return RewardItem(prompt="", completion=completion, reference=str(self.entered), task_entry=str(self.release))

    def wait_for_entry(self) -> None:
        self.entered.open("w").close()

    def let_go(self) -> None:
        self.release.open("w").close()


OPEN_ITEM = RewardItem(prompt="", completion="", reference="")
GATED = (PluginReward(entry_point="gated"),)


def submit_gated(pool: ScorerPool, *items: RewardItem) -> Future[Any]:
    return submit(pool, GATED, items, item_timeout_s=60.0, job_id="job-1")


def rewards(results: tuple[Scored | Unscorable, ...]) -> list[float]:
    return [result.reward for result in results if isinstance(result, Scored)]


def test_requests_take_turns(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_thread, "TURN_S", 0.0)
    gate = Gate(plugins)
    with open_pool() as pool:
        long = submit_gated(pool, gate.closed_item(), OPEN_ITEM, OPEN_ITEM)
        gate.wait_for_entry()
        short = submit_gated(pool, OPEN_ITEM)
        gate.let_go()
        assert (rewards(long.result()), rewards(short.result())) == ([1.0, 2.0, 4.0], [3.0])


def test_cancelled_request_leaves_its_remaining_items_unscored(plugins: Path) -> None:
    gate = Gate(plugins)
    with open_pool() as pool:
        given_up = submit_gated(pool, gate.closed_item(), OPEN_ITEM)
        gate.wait_for_entry()
        assert given_up.cancel()
        gate.let_go()
        assert rewards(submit_gated(pool, OPEN_ITEM).result()) == [2.0]


def test_closing_the_pool_ends_running_work_and_every_process(plugins: Path) -> None:
    gate = Gate(plugins)
    pool = ScorerPool(num_threads=1)
    running = submit_gated(pool, gate.closed_item(), OPEN_ITEM)
    gate.wait_for_entry()
    (keeper,) = [pid for thread in pool._threads for pid in thread.pids()]
    pids = family(keeper)
    assert len(pids) == 3, "keeper, nursery, scorer process"
    pool.close()
    for pid in pids:
        wait_until_gone(pid)
    with pytest.raises(Unavailable, match="closed"):
        running.result()
    with pytest.raises(Unavailable, match="closed"):
        submit(pool, (FormatReward(pattern="a"),), items_of("a"), item_timeout_s=1.0)
    assert not pool.is_alive


def test_processes_that_a_scorer_started_are_killed_with_it(plugins: Path) -> None:
    gate = Gate(plugins)
    mark = f"mark-{gate.entered}"
    child = RewardItem(prompt=mark, completion="", reference=str(gate.entered))
    with open_pool() as pool:
        work = submit(pool, (PluginReward(entry_point="hang_with_a_child"),), (child,), item_timeout_s=5.0)
        gate.wait_for_entry()
        with Waiting("the child's command line to show", deadline_s=60.0) as waiting:
            while not with_argument(mark):  # Popen may return a moment before the kernel shows it
                waiting.poke()
        assert reasons(work.result()) == ["timeout"]
        assert with_argument(mark) == [], "it had a session of its own, and is gone before the item is answered"


def test_catastrophic_regex_is_stopped_over_http_and_its_neighbours_are_scored() -> None:
    with serve(create_app(SETTINGS, num_threads=1)) as client:
        response = post(client, RegexReward(pattern=BACKTRACKS), items=items_of("aa", "a" * 50 + "b", "b"))
        assert reasons(response.results) == ["scored", "timeout", "scored"]
        assert [result.reward for result in response.results if isinstance(result, Scored)] == [1.0, 0.0]
        assert metric(client, "onbeat_reward_worker_restarts_total") == 1.0
        assert metric(client, 'onbeat_reward_items_total{outcome="timeout"}') == 1.0
        assert metric(client, 'onbeat_reward_items_total{outcome="scored"}') == 2.0
        assert metric(client, 'onbeat_reward_requests_total{status="200"}') == 1.0
        assert metric(client, "onbeat_reward_request_seconds_count") == 1.0
        assert client.get("/readyz").json() == {"status": "ready"}


def test_what_hangs_gets_the_score_that_is_stated_for_it_once_nobody_will_ask_again(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_pool, "FIRST_CALL_S", ITEM_S)
    components = (
        RegexReward(pattern=BACKTRACKS, on_unscorable=-1.0, weight=2.0),
        FormatReward(pattern=".*"),
        PluginReward(entry_point="hostile"),
    )
    hanging = "a" * 50 + "b"
    with open_pool() as pool:

        def ask(settles: bool, completion: str) -> Scored | Unscorable:
            work = submit(
                pool, components, items_of(completion), item_timeout_s=ITEM_S, job_id="job-1", settles=settles
            )
            return work.result()[0]

        assert reasons((ask(False, hanging),)) == ["timeout"]
        assert ask(True, hanging) == Scored(
            reward=-2.0 + 1.0 + 51.0,
            breakdown={"regex": -1.0, "format": 1.0, "hostile": 51.0},
            unscorable={"regex": "timeout"},
        )
        assert ask(True, "aa") == Scored(reward=5.0, breakdown={"regex": 1.0, "format": 1.0, "hostile": 2.0})
        assert reasons((ask(True, "raise"),)) == ["raised"], "the plug-in states no score"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serve(create_app(SETTINGS, num_threads=1, max_body_bytes=100_000)) as client:
        yield client


def test_json_and_messagepack_give_the_same_answer(client: httpx.Client) -> None:
    request = RewardRequest(components=(ExactReward(),), items=items_of("5", "6", reference="5"))
    expected = RewardResponse(
        results=(Scored(reward=1.0, breakdown={"exact": 1.0}), Scored(reward=0.0, breakdown={"exact": 0.0}))
    )
    as_json = client.post(
        "/v1/score", content=encode_json(request), headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert as_json.headers["content-type"] == "application/json"
    assert decode_json(as_json.content, RewardResponse) == expected
    for media_type in ("application/msgpack", "application/x-msgpack"):
        packed = client.post("/v1/score", content=encode(request), headers={"Content-Type": media_type})
        assert packed.headers["content-type"] == "application/msgpack"
        assert decode(packed.content, RewardResponse) == expected


def test_any_messagepack_client_can_ask_and_read(client: httpx.Client) -> None:
    body = {
        "components": [{"type": "exact"}, {"type": "numeric", "weight": 0.5}],
        "items": [
            {"prompt": "2+3=", "completion": "5", "reference": "5"},
            {"prompt": "2+3=", "completion": "5", "reference": "five"},
        ],
    }
    response = client.post("/v1/score", content=msgpack.packb(body), headers=MSGPACK)
    first, second = msgpack.unpackb(response.content)["results"]
    assert first == {"type": "scored", "reward": 1.5, "breakdown": {"exact": 1.0, "numeric": 1.0}}
    assert (second["type"], second["reason"], second["component"]) == ("unscorable", "bad_reference", "numeric")


def test_rubric_of_heavy_scorers_is_scored_in_the_worker_processes(client: httpx.Client) -> None:
    item = RewardItem(prompt="2+3=", completion="<answer>5</answer>", reference="5")
    response = post(client, FormatReward(pattern=".*5.*"), RegexReward(pattern="5", weight=0.5), items=(item,))
    assert response.results == (Scored(reward=1.5, breakdown={"format": 1.0, "regex": 1.0}),)


def test_each_source_of_a_mixture_is_scored_there_by_its_own_scorers(client: httpx.Client) -> None:
    rubric = (RegexReward(pattern="5", sources=("sums",)), RegexReward(pattern="B", sources=("names",)), ExactReward())
    items = [RewardItem(prompt="", completion="5", reference="5", source=source) for source in ("sums", "names")]
    first, second = post(client, *rubric, items=(*items,)).results
    assert first == Scored(reward=2.0, breakdown={"regex": 1.0, "exact": 1.0})
    assert second == Scored(reward=1.0, breakdown={"regex_2": 0.0, "exact": 1.0})


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(" * 2000 + ")" * 2000])
def test_a_pattern_that_is_none_costs_its_items_and_no_process(client: httpx.Client, pattern: str) -> None:
    restarts = metric(client, "onbeat_reward_worker_restarts_total")
    results = post(client, RegexReward(pattern=pattern, on_unscorable=1.0), items=items_of("a", "b")).results
    assert reasons(results) == ["bad_pattern", "bad_pattern"], "no score hides it"
    assert "is not a regular expression" in str(results[0])
    assert metric(client, "onbeat_reward_worker_restarts_total") == restarts


VALID_ITEM = {"prompt": "", "completion": "", "reference": ""}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"components": [{"type": "exact"}], "items": []}, 422, "items"),
        ({"components": [], "items": [VALID_ITEM]}, 422, "components"),
        ({"components": [{"type": "nope"}], "items": [VALID_ITEM]}, 422, "components[0].type"),
        (
            {"components": [{"type": "regex", "pattern": "a" * 4097}], "items": [VALID_ITEM]},
            422,
            "components[0].pattern",
        ),
        ({"components": [{"type": "exact", "weight": 1e9}], "items": [VALID_ITEM]}, 422, "components[0].weight"),
        ({"components": [{"type": "exact"}], "items": [VALID_ITEM | {"reference": 5}]}, 422, "items[0].reference"),
        ({"components": [{"type": "exact"}], "items": [VALID_ITEM], "item_timeout_s": 0}, 422, "item_timeout_s"),
        ({"components": [{"type": "exact"}], "items": [VALID_ITEM], "to_score": [0, 0]}, 422, None),
        ({"components": [{"type": "exact"}], "items": [VALID_ITEM], "to_score": [0] * 4097}, 422, "to_score"),
        ([1, 2], 422, None),
    ],
)
def test_bad_field_is_named_in_both_encodings(client: httpx.Client, body: Any, status: int, field: str | None) -> None:
    for content, media_type in (
        (json.dumps(body).encode(), "application/json"),
        (msgpack.packb(body), "application/msgpack"),
    ):
        response = client.post("/v1/score", content=content, headers={"Content-Type": media_type})
        assert response.headers["content-type"] == "application/problem+json"
        problem = response.json()
        assert (response.status_code, problem["status"], problem["field"]) == (status, status, field)
        assert problem["detail"]


@pytest.mark.parametrize(
    ("media_type", "content", "status"),
    [
        ("application/json", b"{", 400),
        ("application/json", b'{"components": [{"type": "\xff"}]}', 400),
        ("application/msgpack", b"\xc1", 400),
        ("application/msgpack", b"", 400),
        ("text/plain", b"5", 415),
        ("application/json", b" " * 100_001, 413),
    ],
)
def test_body_that_cannot_be_read_is_a_problem(
    client: httpx.Client, media_type: str, content: bytes, status: int
) -> None:
    response = client.post("/v1/score", content=content, headers={"Content-Type": media_type})
    assert response.status_code == response.json()["status"] == status
    assert response.headers["content-type"] == "application/problem+json"


def test_body_of_undeclared_length_is_refused_at_the_limit(client: httpx.Client) -> None:
    chunks = (b" " * 10_000 for _ in range(11))
    response = client.post("/v1/score", content=chunks, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert "100000" in response.json()["detail"]


def test_unknown_path_and_method_are_problems_too(client: httpx.Client) -> None:
    assert client.get("/v1/scores").json()["status"] == 404
    response = client.get("/v1/score")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.headers["content-type"] == "application/problem+json"


def test_health_answers_while_a_scorer_hangs(plugins: Path) -> None:
    gate = Gate(plugins)
    with serve(create_app(SETTINGS, num_threads=1)) as client, ThreadPoolExecutor(1) as threads:
        request = RewardRequest(components=GATED, items=(gate.closed_item(),))
        waiting = threads.submit(client.post, "/v1/score", content=encode(request), headers=MSGPACK)
        gate.wait_for_entry()
        assert client.get("/healthz").json() == {"status": "ok"}
        assert not waiting.done()
        gate.let_go()
        assert reasons(decode(waiting.result().content, RewardResponse).results) == ["scored"]


def test_client_that_goes_away_frees_its_place(plugins: Path) -> None:
    gate = Gate(plugins)
    with serve(create_app(SETTINGS, num_threads=1)) as client:
        body = encode(RewardRequest(components=GATED, items=(gate.closed_item(), OPEN_ITEM), job_id="job-1"))
        head = (
            f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/msgpack\r\nContent-Length: {len(body)}"
        )
        with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as impatient:
            impatient.sendall(head.encode() + b"\r\n\r\n" + body)
            gate.wait_for_entry()
        while metric(client, 'onbeat_reward_requests_total{status="499"}') == 0.0:
            assert client.get("/healthz").status_code == 200
        gate.let_go()
        after = encode(RewardRequest(components=GATED, items=(OPEN_ITEM,), job_id="job-1"))
        answer = decode(client.post("/v1/score", content=after, headers=MSGPACK).content, RewardResponse)
        assert rewards(answer.results) == [2.0], "the second item of the client that went away was not scored"


class Service:
    """`python -m reward_service` as its own process."""

    def __init__(self, plugin_folder: Path, **variables: str) -> None:
        self.port = free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
        self.environment = environment | {
            "ONBEAT_PORT": str(self.port),
            "ONBEAT_REWARD_KEY": KEY,
            "PYTHONPATH": str(plugin_folder),
            **variables,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reward_service"], env=self.environment, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert f"listening on http://127.0.0.1:{self.port}" in line, line
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60.0, headers=BEARER)

    def scorer_pids(self) -> list[int]:
        """Its scorer processes, once it has scored an item."""
        assert reasons(post(self.client, FormatReward(pattern="a"), items=items_of("a")).results) == ["scored"]
        scorers = family(self.process.pid)[1:]
        assert len(scorers) >= 3, "keeper, nursery, scorer process"
        return scorers

    def end(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.fixture
def service(plugin_folder: Path) -> Iterator[Service]:
    service = Service(plugin_folder)
    try:
        yield service
    finally:
        service.end()


def test_the_service_forgets_the_secrets_of_others_that_it_was_started_with(plugin_folder: Path) -> None:
    others = {"ONBEAT_REDIS_URL": "redis://:a-password@127.0.0.1:1/0", "ONBEAT_API_KEY": "the-gateways-key"}
    others["ONBEAT_REDIS_PASSWORD_FILE"] = "/nowhere/a-file-of-others"
    service = Service(plugin_folder, **others)
    try:
        environment = Path(f"/proc/{service.process.pid}/environ").read_bytes()
        assert KEY.encode() in environment, "its own"
        assert not any(secret.encode() in environment for secret in others.values())
    finally:
        service.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_service_ends_cleanly_on_a_signal(service: Service, number: signal.Signals) -> None:
    scorers = service.scorer_pids()
    service.process.send_signal(number)
    _, errors = service.process.communicate(timeout=120)
    assert service.process.returncode == 0
    assert "Traceback" not in errors
    for pid in scorers:
        wait_until_gone(pid)


def test_killed_service_leaves_no_process_even_if_a_scorer_holds_the_interpreter(
    service: Service, plugin_folder: Path
) -> None:
    gate = Gate(plugin_folder)
    request = RewardRequest(
        components=(PluginReward(entry_point="gated"), RegexReward(pattern=BACKTRACKS)),
        items=(gate.closed_item("a" * 50 + "b"),),
        item_timeout_s=600.0,
    )
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(service.client.post, "/v1/score", content=encode(request), headers=MSGPACK)
        gate.wait_for_entry()
        scorers = family(service.process.pid)[1:]
        gate.let_go()  # into a match that never ends, inside C code: no thread of the process runs again
        service.process.kill()
        assert isinstance(hanging.exception(), httpx.TransportError)
    for pid in scorers:
        wait_until_gone(pid)


def test_port_in_use_is_one_line_and_exit_code_2(service: Service) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "reward_service"], env=service.environment, capture_output=True, text=True, timeout=300
    )
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1
    assert "ONBEAT_PORT" in second.stderr
    assert str(service.port) in second.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ONBEAT_PORT", "eighty"), ("ONBEAT_PORT", "70000"), ("ONBEAT_PROT", "80"), ("ONBEAT_REWARD_KEY", "")],
)
def test_bad_setting_is_one_line_that_names_it(variable: str, value: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "reward_service"],
        env={**os.environ, "ONBEAT_REWARD_KEY": KEY, variable: value},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert variable in result.stderr
