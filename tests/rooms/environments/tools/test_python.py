"""The Python tool: what a program of a model's is answered, and what it can't do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.base.cage.frames import Frames
from onbeat.environments.tools import program
from onbeat.environments.tools.python import Program, Python
from tests.until import until

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the locks of programs are Linux's")
OS = "import collections; os = collections._sys.modules['os']\n"
"""A way to the module that it may not import: the locks are the kernel's."""
FOUND = "import collections\nglobals().update(collections._sys.modules)\n"
"""All that the zygote has imported."""
ERRNO = "[Errno 13] Permission denied"
DENIED = f"PermissionError: {ERRNO}"
NEVER = "error: it waits for something that never comes"
TOO_LONG = "error: it took more than 1 s of processor time"
CHANCE = """
import random
random.seed()
print(hash('a'), random.random(), random.Random().random(), id([]), id(random))
"""
"""What Python itself draws anew in each process."""


@pytest.fixture(scope="module")
def python() -> Python:
    return Python(cpu_s=1, output_chars=200)


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("1 + 1", "2"),
        ("print('a')\n[x * x for x in range(3)]", "a\n[0, 1, 4]"),
        ("x = 1", "(no output)"),
        ("import math\nmath.comb(5, 2)", "10"),
        ("1 / 0", "  line 1, in <module>\nZeroDivisionError: division by zero"),
        ("print('a')\nraise SystemExit", "a"),
        ("'a' * 10 ** 11", "MemoryError: more than 256 MiB"),
        ("while True: pass", TOO_LONG),
    ],
)
def test_a_program_is_answered_with_what_it_prints_and_the_value_of_its_last_line(
    python: Python, code: str, answer: str
) -> None:
    assert python.run(code) == answer


def test_output_is_bounded_and_errors_are_answers(python: Python) -> None:
    assert python.run("print('x' * 10 ** 7)") == "x" * 200 + "\nerror: the output was cut after 200 characters"
    assert python.run("import os").startswith("  line 1, in <module>\nImportError: there is no module os here")
    assert "SyntaxError" in python.run("def f(: pass")
    assert python.run("1" * 70_000) == "error: a program has 65536 characters at most"


def test_no_program_knows_of_another_and_equal_ones_have_equal_answers(python: Python) -> None:
    python.run("import math; math.pi = 3")
    assert python.run("import math; math.pi") == "3.141592653589793"
    for code in (
        "import random; random.random()",
        "hash('text')",
        "object()",
        "import datetime; datetime.datetime.now()",
        "{'a', 'b', 'c'}",
    ):
        assert python.run(code) == python.run(code)
    fresh = [
        sys.executable,
        "-c",
        f"from onbeat.environments.tools.python import Python; print(Python().run({CHANCE!r}))",
    ]
    others = {subprocess.run(fresh, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert others == {python.run(CHANCE) + "\n"}


def test_what_a_program_said_before_it_took_too_long_depends_on_the_machine_and_is_no_answer(python: Python) -> None:
    assert python.run("n = 0\nwhile n := n + 1:\n    n % 400000 or print(n)") == TOO_LONG


@LINUX
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(1)\ntime.sleep(1000)", f"1\n  line 4, in <module>\n{DENIED}"),
        ("select.select([], [], [], 1000)", f"  line 3, in <module>\n{DENIED}"),
        ("while True:\n    print(1)\n    time.sleep(0.2)", f"1\n  line 5, in <module>\n{DENIED}"),
        ("signal.pause(); print(2)", "2"),
        ("_thread.allocate_lock().acquire(); print(1)", "1"),
        ("lock = _thread.allocate_lock(); lock.acquire(); lock.acquire(timeout=1000)", "False"),
        ("lock = _thread.allocate_lock(); lock.acquire(); print(1); lock.acquire()", NEVER),
        ("os.close(1); os.close(2); time.sleep(1000)", f"  line 3, in <module>\n{DENIED}"),
        ("os.close(1)\nwhile True: pass", f"  line 3, in <module>\n{DENIED}"),
        ("sys.stdout.close(); sys.stderr.close(); select.select([], [], [])", "(no output)"),
        ("resource.setrlimit(resource.RLIMIT_CPU, (0, 0))", f"  line 3, in <module>\n{DENIED}"),
        ("signal.signal(signal.SIGXCPU, lambda *_: print(1))", f"  line 3, in <module>\n{DENIED}"),
        ("signal.raise_signal(signal.SIGKILL)", f"  line 3, in <module>\n{DENIED}"),
        ("signal.setitimer(signal.ITIMER_REAL, 1)", f"  line 3, in <module>\nsignal.itimer_error: {ERRNO}"),
    ],
)
def test_a_program_that_hangs_by_any_call_is_answered_by_the_call_and_not_by_the_clock(
    python: Python, code: str, answer: str
) -> None:
    assert python.run(FOUND + code) == answer


@LINUX
@pytest.mark.parametrize(
    "code",
    [
        "os.close(1); os.close(2); time.sleep(1000)",
        "time.sleep(1000)",
        "while True:\n    print(1)\n    time.sleep(0.02)",
    ],
    ids=["says no more", "says nothing", "says ever more"],
)
def test_where_no_filter_holds_a_program_that_sleeps_is_answered_and_its_reader_goes_on(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_FILTER": b"", "LOOK_S": 0.02, "WAIT_S": 1.0, "WAIT_FACTOR": 0.0}.items():
        monkeypatch.setattr(program, name, value)
    ends, own = os._exit, os.getpid()

    def end(code: int) -> None:
        """A zygote ends where its program just had no processor as time was up; here that would end all tests."""
        if os.getpid() == own:
            raise InterruptedError(code)
        ends(code)

    monkeypatch.setattr(os, "_exit", end)
    asked = Program(code=FOUND + code, cpu_s=1, memory_mb=256, output_chars=4000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames = Frames(theirs, max_bytes=1)
        # On a loaded machine it may be so, and is asked again.
        answer = until(lambda: program._run(asked, frames), "an answer", away=(InterruptedError,))
    assert answer == NEVER


def test_a_program_may_not_import_by_a_call_and_c_code_of_its_modules_may(python: Python) -> None:
    assert "there is no module time here" in python.run("__import__('time').time()")
    dates = "import datetime\ndatetime.date(2020, 1, 2).strftime('%d.%m.'), datetime.datetime.strptime('7', '%m').month"
    assert python.run(dates) == "('02.01.', 7)"


@LINUX
def test_a_program_has_no_files_no_network_no_processes_and_no_signals(python: Python, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the answer")
    tries = {
        f"open({str(secret)!r}).read()": "PermissionError",
        f"open({str(tmp_path / 'new')!r}, 'w')": "PermissionError",
        OS + f"os.listdir({str(tmp_path)!r})": "PermissionError",
        OS + "os.fork()": "PermissionError",
        OS + f"os.kill({os.getpid()}, 9)": "PermissionError",
        OS + "os.kill(os.getppid(), 9)": "PermissionError",
        OS + "os.execv('/bin/true', ['true'])": "PermissionError",
        OS + f"open('/proc/{os.getpid()}/mem', 'rb')": "PermissionError",
        OS + "open(f'/proc/{os.getppid()}/mem', 'rb')": "PermissionError",
        OS + "import collections; collections._sys.modules['socket'].socket()": "PermissionError",
        OS + "collections._sys.modules['threading'].Thread(target=print).start()": "can't start new thread",
    }
    for code, answer in tries.items():
        assert answer in python.run(code), code
    assert python.run("1") == "1"
