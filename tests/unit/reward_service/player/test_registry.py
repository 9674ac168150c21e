"""Which environments there are, and which ones the service trusts before a cage holds them: those of its package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import encode
from contracts.environments.service import EnvironmentTable, Failure
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.environments.built_in import BuiltInEnvironment, OperatorsPart
from reward_service.player import registry
from reward_service.player.player import Playable, load, warm_up
from reward_service.player.protocol import Loaded
from tests import builders

MODULE = """
from onbeat.environments.author import Environment

MADE = []


class Lent(Environment):
    def __init__(self, part=None):
        MADE.append(part)
"""


def load_lent() -> Callable[..., Any]:
    return import_module("offered_by_ours").Lent


def load_nothing() -> Callable[..., Any]:
    return import_module("no_such_folder").Gone


def read_part(settings: StackSettings) -> OperatorsPart:
    return lambda table: b"1"


OURS = {
    "lent": BuiltInEnvironment(load=load_lent, limits={"processes": 7}, is_only_imported=True, from_operator=read_part),
    "plain": BuiltInEnvironment(load=load_lent),
    "lacking": BuiltInEnvironment(load=load_lent, distribution="no-such-package", extra="lacking"),
    "gone": BuiltInEnvironment(load=load_nothing),
}
OF_OTHERS = """
[onbeat.environments]
taken = offered_by_others:Lent
"""
Install = Callable[..., None]
"""(distribution, its entry points, texts of its modules by their names)"""


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table of Onbeat's own environments is OURS, and their module can be imported."""
    (tmp_path / "offered_by_ours.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "BUILT_IN", OURS)
    yield
    for name in ("offered_by_ours", "offered_by_others"):
        sys.modules.pop(name, None)


@pytest.fixture
def install(ours: None, tmp_path: Path) -> Install:
    def install(distribution: str, entry_points: str, **modules: str) -> None:
        builders.install(tmp_path, distribution, entry_points)
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)

    return install


def table(name: str) -> EnvironmentTable:
    return EnvironmentTable(name=name)


@pytest.mark.usefixtures("ours")
def test_an_environment_of_ours_has_its_limits_its_part_and_the_version_of_its_package() -> None:
    assert {"lent", "plain", "lacking", "gone"} <= set(registry.environment_names())
    lent = registry.built_in_environment(table("lent"))
    assert lent is not None
    assert lent.limits == {"processes": 7}
    parts = registry.operators_parts(StackSettings())
    assert parts.keys() == {"lent"}
    part = parts["lent"]
    playable = load(table("lent"), part(table("lent")))
    assert isinstance(playable, Playable)
    assert playable.facts.version == f"onbeat {metadata.version('onbeat')}"
    assert sys.modules["offered_by_ours"].MADE == [b"1"]


@pytest.mark.usefixtures("ours")
def test_the_nursery_makes_one_of_ours_unless_that_runs_code_of_others() -> None:
    for name in ("lent", "lacking", "gone", "absent"):
        warm_up(encode(table(name)))
    assert sys.modules["offered_by_ours"].MADE == []
    warm_up(encode(table("plain")))
    assert sys.modules["offered_by_ours"].MADE == [None]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("lacking", "No package metadata was found for no-such-package"), ("gone", "No module named 'no_such_folder'")],
)
@pytest.mark.usefixtures("ours")
def test_one_of_ours_that_lacks_its_package_or_a_module_says_so(name: str, problem: str) -> None:
    loaded = load(table(name))
    assert isinstance(loaded, Loaded)
    assert isinstance(loaded.failure, Failure)
    assert problem in loaded.failure.detail
    assert ("pip install 'onbeat[lacking]' there" in loaded.failure.detail) == (name == "lacking")
    assert loaded.field == "environment.name"


def test_a_package_of_others_is_imported_in_no_service_and_has_neither_limits_of_its_own_nor_a_setting(
    install: Install,
) -> None:
    install("others", OF_OTHERS, offered_by_others=MODULE)
    assert "taken" in registry.environment_names()
    assert "taken" not in registry.operators_parts(StackSettings())
    assert registry.built_in_environment(table("taken")) is None
    warm_up(encode(table("taken")))
    assert "offered_by_others" not in sys.modules
    assert registry.factory_of(table("taken"))[1] == "others 1.0"


def test_a_name_of_ours_that_a_package_offers_too_is_refused_and_neither_is_imported(install: Install) -> None:
    install("others", OF_OTHERS.replace("taken =", "plain ="), offered_by_others=MODULE)
    with pytest.raises(InvalidInput, match=r"several packages offer `plain`.*onbeat [\d.]+, others 1\.0"):
        registry.factory_of(table("plain"))
    assert not {"offered_by_ours", "offered_by_others"} & sys.modules.keys()


def test_a_name_that_two_packages_offer_is_refused_and_neither_is_imported(install: Install) -> None:
    for package in ("others", "rivals"):
        install(package, OF_OTHERS, offered_by_others=MODULE)
    with pytest.raises(InvalidInput, match=r"several packages offer `taken`.*others 1\.0, rivals 1\.0"):
        registry.factory_of(table("taken"))
    assert "offered_by_others" not in sys.modules


OF_FILE = """
class lent:
    version = "9"
    deterministic = True

    def __init__(self, part=0):
        self.part = part
"""


@pytest.mark.usefixtures("ours")
def test_a_class_of_a_file_is_no_other_environment_of_its_name_and_its_version_is_its_text() -> None:
    asked = EnvironmentTable(name="lent", source=OF_FILE, params={"part": 3})
    assert registry.built_in_environment(asked) is None
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
