"""Which environments there are, and which ones the service trusts before a cage holds them: those of its package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import encode
from contracts.environments.service import EnvironmentTable, Failure
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.base.process.entry_points import names_in
from reward_service.player import registry
from reward_service.player.player import Playable, load, warm_up
from reward_service.player.protocol import Loaded
from tests import builders

MODULE = """
from onbeat.environments.author import Environment
from onbeat.environments.provisions import Provision

MADE = []


class Lent(Environment):
    def __init__(self, part=None):
        MADE.append(part)


def part(settings):
    return lambda table: b"1"


PROVISIONS = {
    "lent": Provision(limits={"processes": 7}, is_only_imported=True, from_operator=part),
    "taken": Provision(limits={"processes": 7}, from_operator=part),
    "lacking": Provision(distribution="no-such-package", extra="lacking"),
}
"""

Install = Callable[..., None]
"""(distribution, its entry points, texts of its modules by their names)"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Packages that are installed before all others: one with our name stands in for ours."""

    def install(distribution: str, entry_points: str, **modules: str) -> None:
        builders.install(tmp_path, distribution, entry_points)
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)

    monkeypatch.syspath_prepend(str(tmp_path))
    registry._provisions.cache_clear()
    yield install
    registry._provisions.cache_clear()
    for name in ("offered_by_ours", "offered_by_others"):
        sys.modules.pop(name, None)


OF_OURS = """
[onbeat.environments]
lent = offered_by_ours:Lent
plain = offered_by_ours:Lent
lacking = offered_by_ours:Lent
gone = no_such_folder:Gone

[onbeat.environment_provisions]
ours = offered_by_ours:PROVISIONS
"""
OF_OTHERS = """
[onbeat.environments]
taken = offered_by_others:Lent

[onbeat.environment_provisions]
theirs = offered_by_others:PROVISIONS
"""


def table(name: str) -> EnvironmentTable:
    return EnvironmentTable(name=name)


def test_an_environment_of_ours_has_its_provision_and_the_version_of_its_package(install: Install) -> None:
    install("onbeat", OF_OURS, offered_by_ours=MODULE)
    assert {"lent", "plain", "lacking", "gone"} <= set(names_in(registry.GROUP))
    assert registry.provision_of(table("lent")).limits == {"processes": 7}
    assert registry.provision_of(table("plain")).limits == {}
    (part,) = [part for name, part in registry.operators_parts(StackSettings()).items() if name == "lent"]
    playable = load(table("lent"), part(table("lent")))
    assert isinstance(playable, Playable)
    assert playable.facts.version == "onbeat 1.0"
    assert sys.modules["offered_by_ours"].MADE == [b"1"]


def test_the_nursery_makes_one_of_ours_unless_that_runs_code_of_others(install: Install) -> None:
    install("onbeat", OF_OURS, offered_by_ours=MODULE)
    for name in ("lent", "lacking", "gone", "absent"):
        warm_up(encode(table(name)))
    assert sys.modules["offered_by_ours"].MADE == []
    warm_up(encode(table("plain")))
    assert sys.modules["offered_by_ours"].MADE == [None]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("lacking", "No package metadata was found for no-such-package"), ("gone", "No module named 'no_such_folder'")],
)
def test_one_of_ours_that_lacks_its_package_or_its_folder_says_so(install: Install, name: str, problem: str) -> None:
    install("onbeat", OF_OURS, offered_by_ours=MODULE)
    loaded = load(table(name))
    assert isinstance(loaded, Loaded)
    assert isinstance(loaded.failure, Failure)
    assert problem in loaded.failure.detail
    assert ("pip install 'onbeat[lacking]' there" in loaded.failure.detail) == (name == "lacking")
    assert loaded.field == "environment.name"


def test_a_package_of_others_is_imported_in_no_service_has_no_provision_and_is_told_no_setting(
    install: Install,
) -> None:
    install("others", OF_OTHERS, offered_by_others=MODULE)
    install("onbeat", OF_OURS, offered_by_ours=MODULE)
    registry.operators_parts(StackSettings())
    provision = registry.provision_of(table("taken"))
    assert (provision.limits, provision.from_operator) == ({}, None)
    warm_up(encode(table("taken")))
    assert "offered_by_others" not in sys.modules
    assert registry.factory_of(table("taken"))[1] == "others 1.0"


def test_a_name_that_two_packages_offer_is_refused_and_neither_is_imported(install: Install) -> None:
    install("onbeat", OF_OURS, offered_by_ours=MODULE)
    install("others", OF_OTHERS.replace("taken =", "plain ="), offered_by_others=MODULE)
    with pytest.raises(InvalidInput, match=r"several packages offer `plain`.*onbeat 1\.0, others 1\.0"):
        registry.factory_of(table("plain"))
    assert "offered_by_others" not in sys.modules
    assert metadata.version("others") == "1.0"


OF_FILE = """
class lent:
    version = "9"
    deterministic = True

    def __init__(self, part=0):
        self.part = part
"""


def test_a_class_of_a_file_is_no_other_environment_of_its_name_and_its_version_is_its_text(install: Install) -> None:
    install("onbeat", OF_OURS, offered_by_ours=MODULE)
    asked = EnvironmentTable(name="lent", source=OF_FILE, params={"part": 3})
    assert not registry.is_ours(asked)
    assert registry.provision_of(asked).limits == {}
    warm_up(encode(asked))
    playable = load(asked)
    assert isinstance(playable, Playable)
    assert playable.make().part == 3
    assert playable.facts.version == f"lent {content_digest(OF_FILE.encode())}"
    assert playable.facts.deterministic
    assert "offered_by_ours" not in sys.modules


@pytest.mark.parametrize(
    ("source", "problem"), [("1 / 0", "ZeroDivisionError"), ("lent = 3", "not callable"), ("other = 3", "lent")]
)
def test_a_file_that_has_no_such_class_says_so(source: str, problem: str) -> None:
    loaded = load(EnvironmentTable(name="lent", source=source))
    assert isinstance(loaded, Loaded)
    assert isinstance(loaded.failure, Failure)
    assert problem in loaded.failure.detail
