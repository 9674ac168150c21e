"""The committed cases of specs: the records' verdicts are those that the form of the page is tested with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.make_spec_cases import CASES, changed, made, text, verdict

WRITTEN = json.loads(CASES.read_text())


def spec_of(name: str) -> Any:
    base = WRITTEN["bases"][name]
    return base["spec"] if "spec" in base else changed(spec_of(base["of"]), base["at"], base["to"])


@pytest.mark.parametrize("base", WRITTEN["bases"])
def test_each_value_of_a_field_has_the_verdict_that_the_form_is_tested_with(base: str) -> None:
    for case in WRITTEN["cases"]:
        if case["base"] != base:
            continue
        for expected in ("takes", "refuses", "rules_out"):
            for value in case.get(expected, ()):
                assert verdict(changed(spec_of(base), case["at"], value)) == expected, (case["at"], value)


def test_the_cases_are_those_of_the_present_schema() -> None:
    remedy = "a field has changed: `python -m tests.contract.make_spec_cases` makes its cases"
    assert CASES.read_text() == text(made()), remedy


def test_a_spec_of_configs_is_taken() -> None:
    for name, base in WRITTEN["bases"].items():
        if "spec" in base:
            assert verdict(spec_of(name)) == "takes", name
