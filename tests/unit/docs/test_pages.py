"""The pages of docs/ lead to each other, and the specs and settings that they show are jobs that the judge accepts."""

from __future__ import annotations

import copy
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from contracts.known_tasks import ITS_SCORERS, OUR_SCORERS, cure_of_unknown
from onbeat.client.spec_file import parse_spec, read_toml

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "decisions").glob("*.md")])
REFERENCE = (
    "job.md",
    "data.md",
    "sampling.md",
    "rewards.md",
    "losses.md",
    "kl.md",
    "schedules.md",
    "evaluation.md",
    "checkpoints.md",
    "adapters.md",
    "hardware.md",
)
"""Pages about the tables of a spec, in the order of docs/job.md."""
WITH_SPECS = (*REFERENCE, "from-trl.md")
"""Pages whose blocks of a spec are held against the judge."""
DEMO = ROOT / "configs" / "demo.toml"
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (onbeat demo .*)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """Returns the anchor that the site and hosts of repositories make of a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return text.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in HEADING.findall(FENCED.sub("", page.read_text()))}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a spec's values with those of a block in their place; tables with a `type` are replaced whole."""
    values = copy.deepcopy(dict(base))
    for key, value in changes.items():
        is_table = isinstance(value, dict) and "type" not in value and isinstance(values.get(key), dict)
        values[key] = merged(values[key], value) if is_table else value
    return values


def specs_shown() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (page and block, values of the job): a whole spec, or the demo's with the block's tables."""
    for name in WITH_SPECS:
        for number, block in enumerate(TOML.findall((DOCS / name).read_text())):
            values = tomllib.loads(block)
            yield f"{name}-{number}", values if "name" in values else merged(read_toml(DEMO), values)


def demos_shown() -> list[tuple[str, str]]:
    """Lists (page, command) of each demo that a page tells a reader to run."""
    return [(name, command) for name in REFERENCE for command in COMMAND.findall((DOCS / name).read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_to_a_section_leads_to_a_heading(page: Path) -> None:
    for target, name in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve() if target else page
        if path.suffix == ".md":
            assert name in anchors(path), f"{target}#{name}"


@pytest.mark.parametrize(("place", "values"), list(specs_shown()), ids=[place for place, _ in specs_shown()])
def test_each_block_of_a_spec_is_part_of_a_job_that_the_judge_accepts(place: str, values: dict[str, Any]) -> None:
    parse_spec(values)


@pytest.mark.parametrize(("page", "command"), demos_shown())
def test_each_demo_that_a_page_shows_is_a_job_that_the_judge_accepts(page: str, command: str) -> None:
    words = shlex.split(command.partition(" # ")[0])
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    settings = [word for flag, word in zip(words[2::2], words[3::2], strict=True) if flag == "--set"]
    names = {
        "--schedule": "schedule",
        "--max-policy-lag": "max_policy_lag",
        "--correction": "algorithm.correction",
    }
    settings += [f"{names[flag]}={value}" for flag, value in flags.items() if flag in names]
    assert set(flags) <= {"--set", "--spec", *names}
    path = ROOT / flags.get("--spec", "configs/demo.toml")
    if path.name == "my-job.toml":
        (block,) = TOML.findall((DOCS / page).read_text())
        parse_spec(tomllib.loads(block), settings)
    else:
        parse_spec(read_toml(path), settings)


@pytest.mark.parametrize("name", REFERENCE)
def test_each_page_about_a_table_has_an_example_and_stands_in_the_index(name: str) -> None:
    text = (DOCS / name).read_text()
    assert TOML.search(text) or COMMAND.search(text)
    assert name == "job.md" or f"]({name}" in (DOCS / "job.md").read_text()


def test_the_page_that_a_refusal_names_lists_each_task_that_the_package_scores() -> None:
    page, _, section = cure_of_unknown("chess").split()[0].partition("#")
    text = (ROOT / page).read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    listed = text.partition("These are the ")[2].partition(".\n")[0]
    assert int(listed.split(":")[0]) == len(ITS_SCORERS)
    assert set(re.findall(r"`(\w+)`", listed)) == ITS_SCORERS
    assert {*OUR_SCORERS} <= set(re.findall(r"`(\w+)`", text))
