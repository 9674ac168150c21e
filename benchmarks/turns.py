"""What later turns of trajectories cost an engine: their past kept, fed again, and filled anew as by single turns.

    onbeat bench turns

Each way plays the same game: after a turn every row is told so many tokens, and goes on. The processor time of the
later turns counts, of one thread; the opening costs all ways the same. The ways alternate, round by round, and a ratio
compares neighbours. What was kept and what was fed again must have sampled the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks._results import REPOSITORY, write_result
from benchmarks.decode import Rivals, make_8m
from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.encoding.wire import encode
from contracts.rollouts import Completion, PromptBatch, turn_seed
from contracts.sampling import SamplingParams
from producer.engine.base import Trajectories, Turn

EXPECTED = (
    "from decision 67's numbers to a first token, with 20 sampled ones behind it: filled over kept 3 to 4x of the tool "
    "demo's model behind 290 tokens, 3 to 4x of 8 M behind 450, 1.5 to 2.5x behind 50 in four turns; 0.75 to 1.0x "
    "where what a row is told is several times as long as all before it; fed again between the two, but there"
)
WAYS = ("kept", "fed again", "filled")


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    prompts: int
    group_size: int
    opening: int
    """Tokens of a prompt."""
    told: int = 20
    """Tokens that each row sees between two turns."""
    sampled: int = 20
    """Tokens of a turn."""
    turns: int = 2


CASES = (
    Case(model="tool demo", prompts=8, group_size=4, opening=290),
    Case(model="8 M", prompts=8, group_size=4, opening=50, turns=4),
    Case(model="8 M", prompts=8, group_size=4, opening=450),
    Case(model="8 M", prompts=2, group_size=4, opening=40, told=200),
)


def play(rivals: Rivals, case: Case, way: str) -> tuple[float, bytes]:
    """(processor seconds of the later turns, what they sampled)."""
    prompts = [[2 + (7 * at + place) % 50 for place in range(case.opening)] for at in range(case.prompts)]
    sampling = SamplingParams(max_new_tokens=case.sampled, min_new_tokens=case.sampled)
    opening = replace(rivals.batch(prompts, group_size=case.group_size, max_new_tokens=case.sampled), sampling=sampling)
    trajectories = Trajectories(opening=opening)
    contexts = [list(prompt) for prompt in prompts for _ in range(case.group_size)]
    batch, turn = opening, Turn(trajectories=trajectories)
    took_s, sampled = 0.0, []
    for number in range(case.turns):
        if way == "fed again":
            trajectories.kept.clear()
        started_s = time.process_time()
        groups = asyncio.run(rivals.engine.generate(batch, None if way == "filled" and number else turn))
        if number:
            took_s += time.process_time() - started_s
            sampled.append(groups)
        rows: list[Completion] = [completion for group in groups for completion in group]
        for row, completion in enumerate(rows):
            tokens = unpack_int32(completion.token_ids)
            contexts[row] += [*tokens, *(2 + (tokens[0] + 3 * place) % 50 for place in range(case.told))]
        batch = next_turn(opening, contexts, number + 1)
        turn = Turn(trajectories=trajectories, rows=range(len(contexts)))
    return took_s, encode(sampled)


def next_turn(opening: PromptBatch, contexts: list[list[int]], number: int) -> PromptBatch:
    prompts = []
    for row, context in enumerate(contexts):
        prompt = opening.prompts[row // opening.group_size]
        seed = turn_seed(opening, prompt, sample=row % opening.group_size, turn=number)
        prompts.append(replace(prompt, token_ids=pack_int32(context), sampler_seed=seed))
    return replace(opening, group_size=1, prompts=tuple(prompts))


def measure(rivals: Rivals, case: Case, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, and the ratios of each round to what was kept."""
    took_s: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):
        sampled = {}
        for way in WAYS:
            seconds, sampled[way] = play(rivals, case, way)
            took_s[way].append(seconds)
        if sampled["kept"] != sampled["fed again"]:
            raise AssertionError("a trajectory has other bytes where its past was fed again")
    found: dict[str, Any] = {name: getattr(case, name) for name in ("opening", "told", "sampled", "turns")}
    found["rows"] = case.prompts * case.group_size
    for way in WAYS:
        ratios = sorted(other / kept for other, kept in zip(took_s[way][1:], took_s["kept"][1:], strict=True))
        found[way] = {
            "cpu_ms": round(1000 * statistics.median(took_s[way][1:]), 1),
            "ratio": round(statistics.median(ratios), 2),
            "ratios": [round(ratio, 2) for ratio in ratios],
        }
    return found


def folder_of(name: str) -> Callable[[Path], Path]:
    def made(scratch: Path) -> Path:
        if name == "tool demo":
            return REPOSITORY / "configs/models/secret-table"
        make_8m(scratch / "model")
        return scratch / "model"

    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench turns", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case, beside a first one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="turns-") as scratch:
            rivals = Rivals(folder_of(case.model)(Path(scratch)), Path(scratch))
            found = measure(rivals, case, arguments.rounds)
            rivals.close()
        results.setdefault(case.model, []).append(found)
        print(case.model, found, flush=True)
    path = write_result("turns", {"expected": EXPECTED, "threads": 1, "models": results})
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
