"""Held-out scores as a table."""

from __future__ import annotations

from msgspec import UNSET
from rich.table import Table

from contracts.jobs import EvaluationScore, SetScore
from onbeat.terminal.words import UNKNOWN, one_line, score

OWN_SET = "held-out"
"""The set by which the job is judged; its score has no name of its own."""


def score_table(evaluation: EvaluationScore) -> Table:
    """Returns a row for each set of held-out prompts: the mean reward of its samples with its standard error, the one
    of greedy decoding, and pass@k."""
    rows: dict[str, EvaluationScore | SetScore] = {OWN_SET: evaluation}
    rows |= evaluation.sets or {}
    sizes = sorted({passes.k for of_set in rows.values() for passes in of_set.pass_at or ()})
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("set", "prompts", "sampled", "greedy", *(f"pass@{size}" for size in sizes)):
        table.add_column(name, no_wrap=True)
    for name, of_set in rows.items():
        shares = {passes.k: f"{passes.share:.3f} ± {passes.error:.3f}" for passes in of_set.pass_at or ()}
        cells = [shares.get(size, UNKNOWN) for size in sizes]
        table.add_row(one_line(name), str(of_set.num_prompts), with_error(of_set), score(of_set.greedy), *cells)
    return table


def with_error(of_set: EvaluationScore | SetScore) -> str:
    """Returns `0.412 ± 0.021`, the mean reward with its standard error over the prompts, where there is one."""
    if of_set.sampled_error is UNSET:
        return score(of_set.sampled)
    return f"{score(of_set.sampled)} ± {of_set.sampled_error:.2g}"
