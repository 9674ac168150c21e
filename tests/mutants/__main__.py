"""Leaves each guard out, and says which absences no test notices.

python -m tests.mutants                       all of them, two at once
python -m tests.mutants consumer broker       those in sources whose path begins so

Exit code 1 where the absence of a guard is noticed by no test and the guard isn't in `kept.py`, or the other way round.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.mutants.guards import Guard
from tests.mutants.kept import KEPT
from tests.mutants.run import Verdict, guards_of, load_libraries, without, without_any_left_out
from tests.mutants.sources import TESTS

AT_ONCE = 2


def verdicts(prefixes: tuple[str, ...]) -> Iterator[tuple[Guard, Verdict]]:
    """Each guard, and how the tests end without it.

    Raises RuntimeError where a test fails with all guards in place.
    """
    sources = [source for source in TESTS if source.startswith(prefixes)]
    guards = [(guard, TESTS[source]) for source in sources for guard in guards_of(source)]
    files = sorted({test for source in sources for test in TESTS[source]})
    # Forked before any of ours is imported, as each of its children is.
    with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("fork")) as pool:
        for file, verdict in zip(files, pool.map(without_any_left_out, [[file] for file in files]), strict=True):
            if verdict.test:
                raise RuntimeError(f"{verdict.test} fails by itself")
            say(f"unharmed    {verdict.seconds:4.0f} s {file}")
        found = pool.map(without, [guard for guard, _ in guards], [tests for _, tests in guards])
        for (guard, _), verdict in zip(guards, found, strict=True):
            yield guard, verdict


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    began_s = time.monotonic()
    load_libraries()
    prefixes = tuple(sys.argv[1:]) or ("",)
    names: set[str] = set()
    alive: dict[str, int] = {}
    for guard, verdict in verdicts(prefixes):
        names.add(guard.name)
        if not verdict.test:
            alive[guard.name] = guard.line
        kind = "NOT NOTICED" if not verdict.test else "hangs" if verdict.hangs else "noticed"
        say(f"{kind:11} {verdict.seconds:4.0f} s line {guard.line:3} {guard.name}")
        if verdict.test:
            say(f"{'':18} by {verdict.test}")
    problems = [f"no test notices it: {name} (line {line})" for name, line in alive.items() if name not in KEPT]
    listed = {name for name in KEPT if name.startswith(prefixes)}
    problems += [f"kept.py lists it, and a test notices it: {name}" for name in sorted(listed & (names - alive.keys()))]
    problems += [f"kept.py lists what isn't there: {name}" for name in sorted(listed - names)]
    say("\n".join(problems))
    say(
        f"{len(names)} guards, {len(names) - len(alive)} noticed by a test, {len(alive)} not "
        f"({len(alive.keys() & KEPT.keys())} with a reason), in {time.monotonic() - began_s:.0f} s"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
