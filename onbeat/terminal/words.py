"""Numbers and series as people read them, and the lag of what was sampled. Pure."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

from contracts.events import IterationMetrics
from onbeat.base.telemetry.logs import shown

BLOCKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "\N{EN DASH}"


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """Draws a block for each bucket of neighbouring finite values, between the smallest and the largest bucket."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    buckets = _buckets(values, min(width, len(values)))
    low = min(buckets)
    high = max(buckets)
    half = high / 2 - low / 2  # the whole may be beyond every number
    if not half:
        return BLOCKS[len(BLOCKS) // 2] * len(buckets)
    return "".join(BLOCKS[round((value / 2 - low / 2) / half * (len(BLOCKS) - 1))] for value in buckets)


def duration(seconds: float | None) -> str:
    """`42 ms`, `4.2 s`, `1 min 05 s`, `2 h 03 min`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.095:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def ago(at_s: float, now_s: float | None = None) -> str:
    """`37 s ago`, `5 min ago`, `2 h ago`, `9 days ago`, from a Unix time."""
    passed_s = max(0.0, (time.time() if now_s is None else now_s) - at_s)
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if passed_s >= 2 * length_s:
            return f"{passed_s // length_s:.0f} {unit} ago"
    return f"{passed_s:.0f} s ago"


def size(num_bytes: float) -> str:
    """`812 B`, `45.2 KB`, `1.5 MB`: powers of 1024."""
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1024:
            if unit == "B":
                return f"{num_bytes:.0f} {unit}"
            return f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GB"


def count(number: float) -> str:
    """`4 812`: thin groups of three."""
    return f"{number:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def plural(number: int, noun: str) -> str:
    """`1 generator`, `2 generators`, `3 batches`, `2 copies`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def number(value: float) -> str:
    """Three significant digits, as page/src/ui/format.ts has them: `0.812`, `12.3`, `5.2e-4`, `12 346`."""
    size = abs(value)
    if not math.isfinite(value) or size >= 1e15 or 0 < size < 0.0009995:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}" if exponent else mantissa
    if size >= 999.5 or value == int(value):
        return count(value)
    return f"{value:#.3g}".rstrip(".") if size >= 0.1 else f"{value:.3g}"


def share(part: float) -> str:
    """`93.1%`, `4%`, `0.02%`."""
    return f"{float(f'{100 * part:.3g}'):g}%"


def score(value: float | None) -> str:
    return UNKNOWN if value is None else number(value)


def by_reason(counts: dict[str, int]) -> str:
    """`0`, or `3 (stale 2, duplicate 1)`."""
    total = sum(counts.values())
    if not total:
        return "0"
    reasons = sorted(((number, reason) for reason, number in counts.items() if number), reverse=True)
    return f"{total} ({', '.join(f'{reason} {number}' for number, reason in reasons)})"


def one_line(text: str) -> str:
    """Makes foreign text one line, without what would move a cursor, or begin a line that looks like one of ours."""
    return shown(text)


def short(digest: str) -> str:
    return f"{digest[:12]}…" if digest else UNKNOWN


def _buckets(values: Sequence[float], number: int) -> list[float]:
    edges = [index * len(values) // number for index in range(number + 1)]
    return [sum(value / (end - start) for value in values[start:end]) for start, end in itertools.pairwise(edges)]


def lag_in_words(iteration: int, oldest_version: int, newest_version: int) -> str:
    """`2`, or `0 to 2` where several versions may sample the iteration."""
    least = iteration - newest_version
    most = iteration - oldest_version
    return str(most) if least == most else f"{least} to {most}"


def lags_of(metrics: IterationMetrics) -> str:
    """`lag 2` where all batches have it; else `lag 0.8 (2 batches of 0, 6 of 1)`."""
    counts = [(lag, number) for lag, number in enumerate(metrics.lag_counts) if number]
    if len(counts) == 1:
        return f"lag {counts[0][0]}"
    parts = [f"{number} of {lag}" for lag, number in counts]
    if counts:
        parts[0] = f"{plural(counts[0][1], 'batch')} of {counts[0][0]}"
    return f"lag {metrics.lag_mean:.1f} ({', '.join(parts)})"


def staleness(metrics: IterationMetrics) -> str:
    """`K3 0.0123   effective samples 93.1%   corrected 1.2%`: over the tokens that went through the trainer's model."""
    effective = share(metrics.effective_sample_share)
    corrected = share(metrics.loss_metrics.get("corrected_share", 0.0))
    return f"K3 {number(metrics.mismatch_k3)}   effective samples {effective}   corrected {corrected}"
