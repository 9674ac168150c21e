"""`python -m tests.model [--faults N]`: explores the instances, then every mutation; exit 1 if one is not as listed."""

from __future__ import annotations

import argparse
import sys

from tests.model import groups
from tests.model.explorer import Result, explore
from tests.model.mutations import (
    BOUNDED,
    CROWDED,
    DELAYED,
    EVALUATING,
    FORGETFUL,
    JUDGED,
    MORTAL,
    NEEDED,
    ONE,
    PROVING,
    PROVING_ANEW,
    PROVING_BOUNDED,
    PROVING_DELAYED,
    RECALLED,
    REDUNDANT,
    RESAMPLED,
    RESAMPLED_TWICE,
    SELDOM,
    STAGED,
    TIGHT,
    TWO_BATCHES,
    TWO_KINDS,
    mutated,
)
from tests.model.state import Bounds

FULL = Bounds()
"""2 trainers, 2 generators, 2 batches, 2 iterations."""
INSTANCES = (
    FULL,
    FULL._replace(is_deterministic=False),
    FULL._replace(first_batches=1),
    FULL._replace(iterations=1, faults=2),
    ONE._replace(faults=2),
    RESAMPLED_TWICE,
    ONE._replace(may_remove=True, faults=2),
    FORGETFUL,
    FORGETFUL._replace(is_deterministic=False),
    ONE._replace(faults=3, max_epochs=8, may_end=False),
    DELAYED._replace(generators=2),
    DELAYED._replace(lag=2, iterations=4),
    DELAYED._replace(faults=2, may_damage=True, may_end=False, lost_writes=0),
    EVALUATING._replace(iterations=3),
    BOUNDED,
    BOUNDED._replace(batches=2, evaluations=1),
    BOUNDED._replace(lag=2, iterations=4),
    BOUNDED._replace(faults=2, may_end=False, lost_writes=0),
    SELDOM._replace(lag=1),
    TWO_KINDS._replace(generators=3),
    TWO_KINDS._replace(trainers=1, faults=2),
    TWO_KINDS._replace(lag=1, iterations=3),
    FORGETFUL._replace(lag=1, trainers=1, is_deterministic=False),
    FORGETFUL._replace(lag=1, trainers=1, is_deterministic=False, is_bounded=True),
    STAGED._replace(iterations=2),
    STAGED._replace(trainers=1, faults=2),
    JUDGED,
    JUDGED._replace(trainers=1, faults=2),
    RECALLED,
    MORTAL,
    MORTAL._replace(batches=2, stages=((1, ()),), stage_workers=2, may_end=False),
    CROWDED,
    TIGHT,
    STAGED._replace(stage_workers=1, lag=1, iterations=3, may_end=False),
    STAGED._replace(lag=1, iterations=2, may_end=False),
    STAGED._replace(stage_workers=1, batches=2, evaluations=1, lag=1, iterations=2, may_end=False),
    PROVING._replace(may_end=True),
    PROVING._replace(generators=2),
    PROVING_ANEW._replace(faults=2),
    PROVING_DELAYED,
    PROVING_BOUNDED,
)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _report(result: Result) -> None:
    _say(
        f"  {result.num_states:,} states, {result.num_transitions:,} transitions, depth {result.depth}, "
        f"{result.seconds:.0f} s: {result.breaks or _holds(result)}"
    )
    for line in result.trace:
        _say(f"    {line}")


def _holds(result: Result) -> str:
    return "all holds, no state is stuck" if result.is_complete else "all holds in these; there are more"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.model")
    parser.add_argument("--faults", type=int, help="explore the full instance with so many, and nothing else")
    parser.add_argument("--max-states", type=int, default=5_000_000, help="a search ends there")
    chosen = parser.parse_args(arguments)
    faults = chosen.faults
    is_right = True
    for bounds in INSTANCES if faults is None else (FULL._replace(faults=faults),):
        _say(str(bounds))
        result = explore(bounds, max_states=chosen.max_states)
        is_right = is_right and not result.breaks and (result.is_complete or faults is not None)
        _report(result)
    if faults is not None:
        return 0 if is_right else 1
    for mutation in NEEDED:
        _say(f"without {' and '.join(mutation.off)}: {mutation.means}")
        result = mutated(mutation.bounds, mutation.off)
        is_right = is_right and result.breaks.startswith(mutation.breaks)
        _report(result)
    for one in REDUNDANT:
        _say(f"without {' and '.join(one.off)}: {one.means}; kept because: {one.kept_for}")
        instances = (ONE, TWO_BATCHES, RESAMPLED, RESAMPLED_TWICE, DELAYED, BOUNDED, EVALUATING, STAGED, MORTAL)
        broken = [found.breaks for bounds in instances if (found := mutated(bounds, one.off)).breaks]
        is_right = is_right and not broken
        _say(f"  {', '.join(broken) or 'breaks nothing'}")
    return 0 if _are_groups_right() and is_right else 1


def _are_groups_right() -> bool:
    """Explores the hosts that form a trainer, and each of their mutations."""
    is_right = True
    for bounds in groups.INSTANCES:
        _say(f"hosts: {bounds}")
        result = groups.explored(bounds)
        is_right = is_right and not result.breaks and result.is_complete
        _report(result)
    for one in groups.MUTATIONS:
        _say(f"without {one.off}: {one.means}")
        result = groups.explored(one.bounds, one.off)
        is_right = is_right and bool(result.breaks) == bool(one.breaks) and result.breaks.startswith(one.breaks)
        _report(result)
    return is_right


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
