"""How records are decoded, whatever else the process does meanwhile."""

from __future__ import annotations

import subprocess
import sys

from tests.pipeline import REPOSITORY

THREADS_THAT_MEET_A_SPEC = """
import sys, threading, time, tomllib
from contracts.encoding.wire import convert, decode_json, encode_json
from contracts.spec import JobSpec

sys.setswitchinterval(1e-6)
values = tomllib.load(open("configs/demo.toml", "rb"))
found = []

def meet(after_s, read):
    time.sleep(after_s)
    found.append(read())

reads = [lambda: convert(values, JobSpec), lambda: decode_json(body, JobSpec)]
body = __import__("json").dumps(values).encode()
threads = [threading.Thread(target=meet, args=(number * 2e-4, reads[number % 2])) for number in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len({encode_json(one) for one in found}), len(found))
"""


def test_threads_that_meet_a_type_for_the_first_time_at_once_all_read_it() -> None:
    run = subprocess.run(
        [sys.executable, "-c", THREADS_THAT_MEET_A_SPEC], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout.split()) == (0, ["1", "16"]), run.stderr
