"""The end of a trainer's process: a thread that is in a pass by then is not unwound, which torch would abort."""

from __future__ import annotations

import subprocess
import sys

import pytest

from contracts.jobs import TrainerExit

PROGRAM = """
import atexit, threading
from consumer.__main__ import end

atexit.register(print, "Python's own end")
threading.Thread(target=threading.Event().wait, name={name!r}, daemon=True).start()
end({code})
"""


@pytest.mark.parametrize(
    ("name", "expected"), [("passes 1", ""), ("rank 0", ""), ("trainer lease", "Python's own end\n")]
)
def test_a_process_whose_thread_is_in_a_pass_ends_with_its_code_and_past_python_s_own_end(
    name: str, expected: str
) -> None:
    program = PROGRAM.format(name=name, code=int(TrainerExit.FAILED))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (TrainerExit.FAILED, expected), ended.stderr
