"""Leaves each guard out, and says which absences no test notices.

python -m tests.mutants                       all of them
python -m tests.mutants consumer broker       those in sources whose path begins so

Exit code 1 where the absence of a guard is noticed by no test and the guard isn't in `kept.py`, or the other way round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from tests.mutants.guards import Guard
from tests.mutants.kept import KEPT
from tests.mutants.run import guards_of, is_noticed, load_libraries, seconds_of
from tests.mutants.sources import TESTS

DEADLINE_S = 30.0
DEADLINE_FACTOR = 4.0
"""A mutant's deadline over the time of its tests unharmed: without a guard that ends a loop they hang."""


def survivors(prefixes: tuple[str, ...]) -> Iterator[tuple[Guard, bool]]:
    """Each guard, and whether no test notices that it is absent."""
    unharmed_s: dict[tuple[str, ...], float] = {}
    for source, tests in TESTS.items():
        if not source.startswith(prefixes):
            continue
        if tests not in unharmed_s:
            unharmed_s[tests] = seconds_of(tests)
        deadline_s = DEADLINE_S + DEADLINE_FACTOR * unharmed_s[tests]
        for guard in guards_of(source):
            yield guard, not is_noticed(guard, tests, deadline_s=deadline_s)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    began_s = time.monotonic()
    load_libraries()
    prefixes = tuple(sys.argv[1:]) or ("",)
    names: set[str] = set()
    alive: dict[str, int] = {}
    for guard, survives in survivors(prefixes):
        names.add(guard.name)
        if survives:
            alive[guard.name] = guard.line
        say(f"{'NOT NOTICED' if survives else 'noticed':11} line {guard.line:3} {guard.name}")
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
