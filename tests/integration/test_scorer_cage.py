"""What a scorer can't do to other processes, tried by a hostile plug-in: as root's, as a user's, in a container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onbeat.base.cage.cage import MAX_PROCESSES, SCRATCH_BYTES
from onbeat.base.cage.file_rules import scopes_signals
from tests.integration.cage_driver import CALLS, CLOSED, MADE_UP, MEMORY_MB, READABLE
from tests.integration.kernel_calls import calls

REPOSITORY = Path(__file__).resolve().parents[2]
SECRET = "redis://:a-password-of-the-stack@127.0.0.1:1/0"
NOBODY = "65534"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the cage's locks are Linux's")
AS = {
    "this user": (),
    "an unprivileged user": (NOBODY,),
    "a container": (NOBODY, "container"),
    "root in a container": ("0", "container"),
}

pytestmark = LINUX


@dataclass(frozen=True)
class Outcome:
    who: str
    told: dict[str, Any]

    @property
    def has_namespaces(self) -> bool:
        return not any("namespaces" in one for one in self.told["missing"])

    @property
    def is_limited(self) -> bool:
        return "no limit on processes" not in self.told["missing"]


@pytest.fixture(scope="module", params=AS)
def outcome(request: pytest.FixtureRequest) -> Outcome:
    """What came of each try. One run of the driver serves all tests."""
    arguments = AS[request.param]
    if arguments and os.getuid() != 0:
        pytest.skip("only root can become another user")
    if "container" in arguments and not scopes_signals():
        pytest.skip("without namespaces and Linux 6.12 the try to kill the service would succeed")
    # Not pytest's folder, which no other user may enter.
    with tempfile.TemporaryDirectory(prefix="onbeat-stack-") as folder:
        os.chmod(folder, 0o777)
        run = subprocess.run(
            [sys.executable, "-m", "tests.integration.cage_driver", folder, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "ONBEAT_REDIS_URL": SECRET},
            capture_output=True,
            text=True,
        )
    assert run.returncode == 0, run.stderr
    return Outcome(request.param, json.loads(run.stdout))


def test_each_user_has_the_cage_that_it_can_have(outcome: Outcome) -> None:
    uid = int(AS[outcome.who][0]) if AS[outcome.who] else os.getuid()
    assert outcome.told["uid"] == uid
    if outcome.who == "a container":
        assert not outcome.has_namespaces
        assert "processes that fork on and on may be left behind" in outcome.told["missing"]
        assert len(outcome.told["missing"]) == 4, "namespaces, a uid, and with them the end of all, and a limit"


def test_no_environment_that_a_scorer_can_read_holds_a_secret(outcome: Outcome) -> None:
    assert outcome.told["environments"] == "own 0 bytes, secret False"


def test_the_stacks_files_are_hidden_even_where_their_mode_shows_them(outcome: Outcome) -> None:
    assert outcome.told["read"] == "EACCES"


def test_no_file_of_a_home_folder_is_read_or_listed_but_what_the_operator_adds(outcome: Outcome) -> None:
    assert outcome.told["read a key"] == "EACCES"
    assert outcome.told["list a home"] == "EACCES"
    assert outcome.told["read what the operator added"] == "done"


def test_code_reads_its_libraries_and_the_systems_and_nothing_else_of_the_host(outcome: Outcome) -> None:
    assert outcome.told["read the system's"] == ["done"] * len(READABLE)
    assert outcome.told["read the host's"] == ["EACCES"] * len(CLOSED)


def test_no_connection_can_be_opened_by_tcp_udp_or_a_unix_socket(outcome: Outcome) -> None:
    assert outcome.told["connect"] == "EACCES EACCES EACCES EACCES"


def test_processes_are_limited_and_the_next_item_is_scored(outcome: Outcome) -> None:
    number = int(outcome.told["fork"].split()[0])
    assert number < MAX_PROCESSES or not outcome.is_limited
    assert outcome.told["after fork"] == "1.0"


def test_memory_is_limited_shared_memory_too(outcome: Outcome) -> None:
    shared, private = map(int, outcome.told["fill_memory"].split())
    assert 0 < shared < MEMORY_MB
    assert 0 < private < MEMORY_MB


def test_no_memory_outlives_the_process_that_it_counts_for_and_nothing_is_mounted(outcome: Outcome) -> None:
    assert outcome.told["calls"] == dict.fromkeys(CALLS, "EACCES")


def test_each_call_of_the_kernels_table_leaves_processes_and_files_outside_as_they_are(outcome: Outcome) -> None:
    ended = {
        f"{call.name} {' '.join(call.arguments)}": (call, told)
        for call, told in zip(calls(), outcome.told["walk"], strict=True)
    }
    for text, (call, told) in ended.items():
        if call.ends == "refused" or (call.ends == "attributes" and not outcome.has_namespaces):
            assert told == "EACCES", text
        elif call.ends == "attributes":
            assert told == "EROFS", text
    assert outcome.told["after"] == outcome.told["before"]


def test_what_a_library_does_to_its_own_process_and_files_it_still_may(outcome: Outcome) -> None:
    process, files = ["done"] * 5, ["done" if outcome.has_namespaces else "EACCES"] * 2
    assert outcome.told["itself"].split() == process + files


def test_a_program_of_the_python_tool_has_the_calls_of_its_list_and_no_other(outcome: Outcome) -> None:
    if not outcome.told["program"]:
        pytest.skip("the extra that has the tool was deleted")
    assert outcome.told["program"] == "EACCES ENOSYS", "of the last ones of which no kernel that we have read knows"


def test_no_namespace_of_its_own_makes_a_scorer_root_again_and_threads_still_start(outcome: Outcome) -> None:
    assert outcome.told["clone"] == "EACCES a thread"


def test_a_scorer_writes_nowhere_but_into_a_small_folder_that_the_next_finds_empty(outcome: Outcome) -> None:
    written, *elsewhere = outcome.told["fill_disk"].split()
    assert int(written) == (SCRATCH_BYTES >> 20 if outcome.has_namespaces else 0)
    assert elsewhere == ["EROFS" if outcome.has_namespaces else "EACCES"] * 3
    assert outcome.told["next folder"] == "an empty folder"


def test_privileges_are_gone_for_good_and_no_file_of_the_service_is_open(outcome: Outcome) -> None:
    facts, changed = outcome.told["become_root"].rsplit(" ", 1)
    assert facts == "privileges 0 barred 1 handles 5", "three standard ones, its own socket, and the folder it lists"
    assert changed != "done"


def test_neither_the_service_nor_the_stack_can_be_killed(outcome: Outcome) -> None:
    """The driver, which is the reward service here, survives to report the other outcomes."""
    assert outcome.told["its format"] == "0.0"


def test_what_a_scorer_needs_is_there_in_every_cage(outcome: Outcome) -> None:
    """reasoning-gym imports matplotlib, which wants a folder that it may write into."""
    assert outcome.told.get("reasoning gym", "1.0") == "1.0"


def test_what_a_scorer_left_running_is_gone_with_the_pool(outcome: Outcome) -> None:
    assert outcome.told["leave_a_child"] == "left"
    mark = outcome.told["mark"].encode()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert mark not in command.read_bytes().split(b"\0")


def test_half_a_message_of_gigabytes_costs_its_own_item(outcome: Outcome) -> None:
    assert outcome.told["babble"] == "crashed"


def test_an_answer_that_no_scorer_gives_costs_its_own_item(outcome: Outcome) -> None:
    assert outcome.told["made up"] == ["crashed"] * len(MADE_UP)


def test_a_lie_about_later_rewards_ends_with_its_job(outcome: Outcome) -> None:
    assert outcome.told["lie"] == "lied"
    assert outcome.told["same job"] == "1000.0", "a plug-in keeps its process for a job: what is promised ends here"
    assert outcome.told["another job"] == "1.0"
    assert outcome.told["its format"] == "0.0", "a scorer of ours, in the same job"
