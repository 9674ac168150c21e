"""docs/loss-terms.md, made of the terms themselves: `python -m docs.make_loss_terms > docs/loss-terms.md`.

TERMS of consumer/gradient/terms/table.py ─▶ docstrings, needs, metrics with their meanings ─▶ one page
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from consumer.gradient.terms import table
from consumer.gradient.terms.base import LossTerm

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "loss-terms.md"
INTRO = """\
# The terms of a loss

This page is generated from the terms: `python -m docs.make_loss_terms > docs/loss-terms.md`.

The loss of a job is a sum of terms. Each term gives every sampled token a loss; the terms that are means over samples
are multiplied by the correction's weight, the others are added to them, and the [normaliser](losses.md#losses) of
`algorithm.loss` makes one number of the tokens. [Change Onbeat](change.md#a-term-of-the-loss) says how to add a term.

A term reports *metrics*. They are in `loss_metrics` of each line of `metrics.jsonl` and of each update of it, on the
page, in Prometheus as `onbeat_job_NAME`, and in the trackers. Each is a mean over those of the iteration's optimizer
steps that have it. *Sampled tokens* are all that were sampled; *trained tokens* are those that went through the
trainer's model.
"""


def loss_terms_page() -> str:
    """Returns the whole page, ending in one line break."""
    sections = [_section(term) for term in table.TERMS]
    return "\n".join([INTRO, *sections])


def _section(term: type[LossTerm]) -> str:
    """Returns a term's section: what it is, where, what it needs, its metrics."""
    needs = "needs nothing more"
    if term.needs:
        needs = "needs the " + " and the ".join(sorted(need.value for need in term.needs))
    # A file outside the repository, as a test's, is named as it is.
    file = Path(inspect.getfile(term))
    place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
    return "\n".join(
        [
            f"## `{term.name}`\n",
            inspect.getdoc(term) or "",
            "",
            f"In addition to the log-probs of policy and generator it {needs}. Its file is `{place}`.\n",
            *_metric_rows(term),
        ]
    )


def _metric_rows(term: type[LossTerm]) -> Iterator[str]:
    yield "| metric | is |"
    yield "| --- | --- |"
    for metric in term.metrics:
        meaning = metric.meaning.replace("|", "\\|")
        yield f"| `{metric.name}` | {meaning} |"
    yield ""


def main() -> None:
    sys.stdout.write(loss_terms_page())


if __name__ == "__main__":
    main()
