"""Numbers as people read them."""

from __future__ import annotations

import pytest

from onbeat.terminal.words import by_reason, count, duration, number, plural, share, short, size, sparkline


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "\N{EN DASH}"),
        (0.0, "0 ms"),
        (0.0423, "42.3 ms"),
        (0.46, "0.5 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (65, "1 min 05 s"),
        (7380, "2 h 03 min"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.2e-4, "5.2e-4"),
        (1e-6, "1e-6"),
        (-5.2e-4, "-5.2e-4"),
        (0.00123, "0.00123"),
        (0.05, "0.05"),
        (0.2, "0.200"),
        (0.8123, "0.812"),
        (1.0, "1"),
        (12.34, "12.3"),
        (123.4, "123"),
        (12345.6, "12\u202f346"),
        (0.0, "0"),
        (1e30, "1e30"),
        (float("nan"), "nan"),
    ],
)
def test_a_number_has_three_significant_digits(value: float, text: str) -> None:
    """The page has the same ones: page/src/ui/format.test.ts."""
    assert number(value) == text


def test_a_share_has_them_too() -> None:
    assert [share(part) for part in (0.9312, 0.0002, 1.0, 0.0)] == ["93.1%", "0.02%", "100%", "0%"]


def test_sparkline_runs_from_the_smallest_to_the_largest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▅▅"
    assert sparkline([1e308, -1e308, float("nan"), 0.0, float("inf")]) == "█▁▅"
    assert sparkline([5e-324, 0.0]) == "▅▅"


def test_a_long_series_is_squeezed_into_the_width_by_means() -> None:
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"
    assert len(sparkline(list(range(1000)), width=40)) == 40


def test_sizes_counts_plurals_and_digests() -> None:
    assert [size(n) for n in (812, 46285, 1572864, 3 * 1024**3)] == ["812 B", "45.2 KB", "1.5 MB", "3.0 GB"]
    assert count(4812.4) == "4\u202f812"
    assert [plural(1, "batch"), plural(3, "batch"), plural(2, "generator")] == ["1 batch", "3 batches", "2 generators"]
    assert [plural(1, "copy"), plural(2, "copy")] == ["1 copy", "2 copies"]
    assert short("0123456789abcdef") == "0123456789ab…"


def test_refusals_are_shown_by_reason_the_most_frequent_first() -> None:
    assert by_reason({}) == "0"
    assert by_reason({"stale": 1, "duplicate": 3, "future": 0}) == "4 (duplicate 3, stale 1)"
