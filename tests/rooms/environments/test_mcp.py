"""Environment `mcp`: the tools of a real MCP server, in the cage of its session; what a bad server costs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from contracts.encoding.wire import encode
from contracts.environments.messages import Message
from contracts.environments.service import EnvironmentTable, Failure, InitialObservation, Result, Step, Turned
from contracts.errors import InvalidInput
from onbeat.environments.author import NoAnswer
from onbeat.environments.mcp_servers import McpServer, Offered, offered, servers_from
from onbeat.environments.tools.mcp_connection import Connection, ServerGone
from reward_service.app import create_app
from reward_service.player.player import Playable, load
from reward_service.player.protocol import Loaded
from reward_service.playing.pool import EnvironmentPool
from tests.chaos.short_job import long_variant
from tests.integration.test_environment_pool import read, until
from tests.played import SETTINGS, Asked, asked, new, reply_of, said
from tests.rooms.environments.test_built_in_environments import call

HERE = Path(__file__).parent
TASK = json.dumps({"question": "What do two pears and an apple cost?", "reference": "11", "entry": ""})
MARK = f"for-{os.getpid()}"


def program(name: str) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(HERE / name), MARK], "env": {"OWN": "a value"}}


SERVERS = {"store": program("mcp_server.py"), "rude": program("rude_mcp_server.py")}


@asynccontextmanager
async def stores(**settings: Any) -> AsyncIterator[Asked]:
    async with asked(replace(SETTINGS, mcp_servers=json.dumps(SERVERS), **settings)) as ask:
        yield ask


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    (root / "stack.json").write_text("a key")
    return root


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Asked]:
    """One pool: a child imports the protocol's package, which takes a second."""
    pool = EnvironmentPool(replace(SETTINGS, mcp_servers=json.dumps(SERVERS), run_root=str(root)))
    yield Asked(pool)
    pool.shut()


async def opened(ask: Asked, number: int = 0, *, limit_s: float = 60.0, **params: Any) -> Result:
    params = {"server": "store", **params}
    (result,) = await ask.open("mcp", new(number, task=TASK), limit_s=limit_s, params=params)
    return result


async def stepped(ask: Asked, number: int, turn: int, message: Message) -> Result:
    (result,) = await ask.pool.step([Step(session_id=f"s{number}", turn=turn, message=message)])
    return result


def observation_of(result: Result) -> InitialObservation:
    assert isinstance(result, Turned), result
    assert result.observation is not UNSET
    return result.observation


def test_a_question_is_answered_with_the_tools_of_a_server_that_lives_as_long_as_its_session(store: Asked) -> None:
    async def run(ask: Asked) -> None:
        params: dict[str, Any] = {"chars": 100, "tools": "price, raise_price, show, long"}
        observation = observation_of(await opened(ask, **params))
        assert [tool.name for tool in observation.tools] == ["price", "raise_price", "show", "long"]
        assert observation.tools[0].description == "Says what one piece costs."
        assert observation.tools[1].parameters["properties"]["by"]["type"] == "integer"
        messages = [
            call("raise_price", thing="apple"),
            call("price", thing="apple"),
            call("price", thing="plum"),
            call("price", weight=1),
            call("search"),
            call("show", thing="apple"),
            call("long", characters=2_000_000),
            Message(role="assistant", malformed="a brace is missing"),
            said("That is 4 + 4 + 4, no: 11."),
        ]
        replies = [reply_of(await stepped(ask, 0, turn, one)) for turn, one in enumerate(messages)]
        answers = [reply.messages[0] for reply in replies[:-1]]
        assert {one.role for one in answers} == {"tool"}
        texts = [one.content for one in answers]
        assert texts[:2] == ["done", "4"]
        assert texts[2].startswith("error: ")
        assert texts[3].startswith("error: ")
        assert "thing" in texts[3]
        assert texts[4] == "error: there is no tool `search`; there are: price, raise_price, show, long"
        assert texts[5] == "an apple\n[image image/png]"
        assert texts[6] == "x" * 100 + "\nerror: the answer was cut after 100 characters"
        assert texts[7] == "error: the tool call can't be read: a brace is missing"
        assert replies[-1].reward == 1.0
        assert replies[-1].done
        assert replies[-1].metrics == {"tool_calls": 8.0, "refused_tool_calls": 4.0}
        assert len(servers_running()) == 1
        observation_of(await opened(ask, 1, **params))
        assert reply_of(await stepped(ask, 1, 0, call("price", thing="apple"))).messages[0].content == "3"
        ask.pool.close(["s0", "s1"])
        await until(lambda: not servers_running())

    asyncio.run(run(store))


def servers_running() -> list[str]:
    """The servers that this test process's cages run."""
    return [str(path) for path in Path("/proc").glob("[0-9]*/cmdline") if MARK.encode() in read(path).split(b"\0")]


def test_a_server_that_breaks_costs_its_own_session_by_a_reason(store: Asked, root: Path) -> None:
    in_a_call = {
        "die": ("raised", "the MCP server ended"),
        "nonsense": ("invalid_reply", "what is no message of MCP"),
        "flood": ("invalid_reply", "more than 1000 messages"),
    }
    in_its_cage = {
        "connect": "error: PermissionError",
        f"read {root}/stack.json": "error: PermissionError",
        "see": "[] a value",
    }

    async def run(ask: Asked) -> None:
        observation_of(await opened(ask, 9, server="rude"))
        for number, (act, (reason, problem)) in enumerate(in_a_call.items()):
            observation_of(await opened(ask, number, server="rude"))
            found = await stepped(ask, number, 0, call("do", act=act))
            assert isinstance(found, Failure), found
            assert (found.reason, problem in found.detail) == (reason, True), found
        await until(lambda: len(servers_running()) == 1)
        for turn, (act, text) in enumerate(in_its_cage.items()):
            assert reply_of(await stepped(ask, 9, turn, call("do", act=act))).messages[0].content == text
        lie = reply_of(await stepped(ask, 9, len(in_its_cage), call("do", act="lie"))).messages[0].content
        assert lie.startswith("error: ")
        ask.pool.close(["s9"])

    asyncio.run(run(store))


@long_variant
async def test_a_server_that_hangs_meets_the_deadline_of_its_step_and_takes_its_tree_with_it() -> None:
    mark = f"left-by-a-server-{os.getpid()}"
    async with stores() as ask:
        observation_of(await opened(ask, server="rude", limit_s=60.0))
        ask.pool.close(["s0"])
        observation_of(await opened(ask, server="rude", limit_s=1.0))
        found = await stepped(ask, 0, 0, call("do", act=f"hang {mark}"))
        assert isinstance(found, Failure)
        assert found.reason == "timeout"
        assert not [one for one in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in read(one)]
        assert not servers_running()


@pytest.mark.parametrize(
    ("script", "kind", "problem"),
    [
        ("echo Welcome!; cat", NoAnswer, "no message of MCP"),
        ("exit 1", ServerGone, "the MCP server ended"),
        ("exec head -c 40000000 /dev/zero", NoAnswer, "more than 16777216 bytes"),
    ],
)
async def test_what_never_begins_as_a_server_is_refused(script: str, kind: type[Exception], problem: str) -> None:
    connection = Connection(McpServer(command="/bin/sh", args=("-c", script)))
    with pytest.raises(kind, match=problem):
        await connection.open()
    await connection.close()


def test_a_spec_names_only_what_the_operator_allowed_and_says_nothing_of_what_is_run() -> None:
    allowed = servers_from(json.dumps(SERVERS))
    tables: dict[str, dict[str, Any]] = {
        "allows no MCP server `shell` (ONBEAT_MCP_SERVERS); there are: rude, store": {"server": "shell"},
        "passed as keyword arguments: 'operators_part'": {"server": "store", "operators_part": "{}"},
        "unexpected keyword argument 'command'": {"server": "store", "command": "/bin/sh"},
        "missing 1 required keyword-only argument: 'server'": {},
        "answer is one of": {"server": "store", "answer": "poem"},
        "chars is 1 to": {"server": "store", "chars": 0},
    }
    for problem, params in tables.items():
        table = EnvironmentTable(name="mcp", params=params)
        loaded = load(table, encode(offered(allowed, table)))
        assert isinstance(loaded, Loaded)
        assert loaded.failure is not None
        assert (problem in loaded.failure.detail, loaded.field) == (True, "environment.params"), loaded
    table = EnvironmentTable(name="mcp", params={"server": "store"})
    playable = load(table, encode(offered(allowed, table)))
    assert isinstance(playable, Playable)
    assert playable.facts.deterministic is False
    assert offered(allowed, table) == Offered(names=("rude", "store"), server=allowed["store"])


@pytest.mark.parametrize(
    "setting",
    ["{", '{"one": {"command": ""}}', '{"one": {}}', "/no/such/file", '{"one": {"command": "no-such-program"}}'],
)
def test_a_setting_that_allows_nothing_that_can_be_run_is_refused_when_the_service_starts(setting: str) -> None:
    with pytest.raises(InvalidInput, match="ONBEAT_MCP_SERVERS"):
        create_app(replace(SETTINGS, mcp_servers=setting))


def test_the_setting_may_name_a_file_and_a_program_is_found_where_the_service_runs(tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text('{"one": {"command": "sh", "args": ["-c", "true"]}}')
    (one,) = servers_from(str(tmp_path / "servers.json")).values()
    assert one.command.endswith("/sh")
    assert one.command.startswith("/")
