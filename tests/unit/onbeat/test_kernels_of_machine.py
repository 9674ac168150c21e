"""By which library a job's products are: measured once for a machine, remembered, and recorded with the job."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from contracts.settings import StackSettings
from gateway.submission import with_matmul
from onbeat.base import machine_kernels as kernels_of_machine
from onbeat.base.machine_kernels import ProductSpeed, kind_of_machine, matmul_of_machine
from tests.builders import job_spec

FAST = ProductSpeed(torch_flop_s=1.0e11, onednn_flop_s=2.3e11)
ALIKE = ProductSpeed(torch_flop_s=1.0e11, onednn_flop_s=1.1e11)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_of_machine, "_known", {})


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[ProductSpeed]:
    """What a child would measure, one after the other."""
    coming: list[ProductSpeed] = []
    monkeypatch.setattr(kernels_of_machine, "_measured_by_a_child", lambda: coming.pop(0) if coming else None)
    return coming


def test_a_real_child_measures_both_libraries_and_the_file_remembers_them(tmp_path: Path) -> None:
    cache = tmp_path / "made" / "product-speed.json"
    matmul = matmul_of_machine(cache)
    (speed,) = json.loads(cache.read_text()).values()
    assert speed["torch_flop_s"] > 1e8
    assert matmul == ("onednn" if speed["onednn_flop_s"] > 1.3 * speed["torch_flop_s"] else "torch")


def test_the_child_is_given_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environments: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        environments.append(env)
        raise subprocess.TimeoutExpired(command, 60.0)

    monkeypatch.setenv("ONBEAT_API_KEY", "a-key")
    monkeypatch.setattr(subprocess, "run", run)
    assert matmul_of_machine(tmp_path / "file.json") == "torch", "what can't be measured is torch's"
    assert "a-key" not in environments[0].values()


@pytest.mark.parametrize(("speed", "matmul"), [(FAST, "onednn"), (ALIKE, "torch")])
def test_a_machine_is_measured_once_also_for_the_next_process(
    tmp_path: Path, measurements: list[ProductSpeed], speed: ProductSpeed, matmul: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "file.json"
    measurements.append(speed)
    assert [matmul_of_machine(cache) for _ in range(2)] == [matmul] * 2
    monkeypatch.setattr(kernels_of_machine, "_known", {})  # as a process that starts
    assert matmul_of_machine(cache) == matmul
    assert measurements == []


def test_a_machine_of_another_kind_is_measured_for_itself(
    tmp_path: Path, measurements: list[ProductSpeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "file.json"
    measurements += [FAST, ALIKE]
    own = kind_of_machine()
    assert matmul_of_machine(cache) == "onednn"
    monkeypatch.setattr(kernels_of_machine, "kind_of_machine", lambda: "another")
    assert matmul_of_machine(cache) == "torch"
    assert set(json.loads(cache.read_text())) == {own, "another"}


def test_a_measurement_that_failed_is_not_tried_again_by_this_process(
    tmp_path: Path, measurements: list[ProductSpeed]
) -> None:
    """Each submission would wait a minute for it, and jobs of one process would differ by a passing fault."""
    assert matmul_of_machine(tmp_path / "file.json") == "torch"
    measurements.append(FAST)
    assert matmul_of_machine(tmp_path / "file.json") == "torch"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"x": {"torch_flop_s": "much"}}'])
def test_a_damaged_file_remembers_nothing(tmp_path: Path, measurements: list[ProductSpeed], text: str) -> None:
    cache = tmp_path / "file.json"
    cache.write_text(text)
    measurements.append(FAST)
    assert matmul_of_machine(cache) == "onednn"


def test_a_folder_that_cannot_be_written_costs_the_memory_of_this_process_alone(
    tmp_path: Path, measurements: list[ProductSpeed]
) -> None:
    (tmp_path / "file").write_text("")
    measurements.append(FAST)
    assert [matmul_of_machine(tmp_path / "file" / "speed.json") for _ in range(2)] == ["onednn"] * 2


def test_a_user_without_a_home_has_the_choice_too(
    measurements: list[ProductSpeed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    measurements.append(FAST)
    assert matmul_of_machine() == "onednn"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as of a user that no data base has
    assert kernels_of_machine._user_cache() == Path("/dev/null/onbeat")


def test_a_job_has_the_choice_in_its_spec_and_its_own_key_overrides_it(measurements: list[ProductSpeed]) -> None:
    settings = StackSettings(matmul="measured")
    measurements.append(FAST)
    chosen = with_matmul(job_spec(), settings)
    assert chosen.model.matmul == "onednn"
    assert chosen == replace(job_spec(), model=replace(job_spec().model, matmul="onednn")), "nothing else changes"
    for asked in ("torch", "onednn"):
        spec = job_spec(model__matmul=asked)
        assert with_matmul(spec, settings) == spec


@pytest.mark.parametrize(
    ("settings", "spec", "matmul"),
    [
        (StackSettings(matmul="torch"), job_spec(), "torch"),
        (StackSettings(matmul="onednn"), job_spec(), "onednn"),
        (StackSettings(matmul="onednn", device="cuda"), job_spec(), "torch"),
        (StackSettings(matmul="onednn"), job_spec(model__dtype="bfloat16"), UNSET),
    ],
)
def test_what_needs_no_measurement_makes_none(settings: StackSettings, spec: Any, matmul: Any) -> None:
    assert with_matmul(spec, settings).model.matmul == matmul
