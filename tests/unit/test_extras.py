"""The core stands without its extras: nothing of it names them, and its tests pass where they were deleted.

Two rooms' tests do here; all of them do, too, in a clone without `onbeat_extras` and `tests/extras`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from onbeat.process.own_packages import PACKAGES
from tests.unit.test_house import tracked

ROOT = Path(__file__).parents[2]
EXTRAS = ROOT / "onbeat_extras"
WITH_EXTRAS = {
    "configs/models/make_secret_table.py": "the demo whose dialogues it trains on",
    "docs/make_site.py": "the metrics of the stack",
    "examples/rejection_sampling.py": "records of rollouts",
    "onbeat/__init__.py": "the names that programs import, for type checkers",
    "onbeat/client/__init__.py": "the same",
    "onbeat/process/own_packages.py": "the list of packages that are ours",
    "tests/contract/test_distillation.py": "the tokens that a teacher's stage sends",
    "tests/contract/test_trl.py": "the same",
    "tests/contract/test_trl_options.py": "the same",
    "tests/contract/test_trl_run.py": "the rule of health that ends a job by its score",
    "tests/contract/golden_files.py": "records that extras keep or answer",
    "tests/e2e/test_embedded_stack.py": "what a stack tells processes of one's own",
    "tests/e2e/test_shell_blocks.py": "the tests that run a page's commands",
    "tests/forked.py": "the process of a stage worker",
    "tests/fakes.py": "the canary of an engine that has to prove itself",
    "tests/task_worker.py": "a worker of tasks as a process",
    "tests/hosts/machines.py": "hosts that serve a cache",
    "tests/hosts/test_objects.py": "the same",
    "tests/hosts/test_pods.py": "the object store of pods",
    "tests/integration/hostile_plugin/hostile_rewards.py": "the Python tool in a scorer's cage, where it is there",
    "tests/integration/test_hostile_roles.py": "the report on the streams of a job that is attacked",
    "tests/integration/test_recording.py": "how a record comes about",
    "tests/integration/test_hosts.py": "the launcher, which says that clocks are apart",
    "tests/e2e/test_examples.py": "the same",
    "tests/integration/test_client.py": "records of rollouts",
    "tests/integration/test_http_page.py": "the same",
    "tests/integration/test_edited_files.py": "a stage's model that is edited",
    "tests/page/test_inside.py": "the same",
    "tests/recorded.py": "the same",
    "tests/mutants/kept.py": "guards that are left out, of extras too",
    "tests/mutants/sources.py": "the same",
    "tests/unit/onbeat/weights/test_registered_store.py": "a model that is exported out of such a store",
    "tests/integration/test_lost_leases.py": "the report on the streams of a job, which counts them",
    "tests/page/test_tasks.py": "where an export lies that the page downloads",
    "tests/unit/test_kubernetes.py": "the modules that pods of tasks run",
    "tests/unit/test_extras.py": "",
    "tests/unit/test_house.py": "how small a tracker may be",
    "tests/unit/test_make_targets.py": "what vLLM's environment collects",
}
"""File outside the extras that names them → what it does with them."""

OF_THE_CORE = ("tests/unit/onbeat/stack", "tests/unit/reward_service/player")


def test_what_is_no_extra_names_none() -> None:
    naming = {
        name
        for path in tracked("*.py", "*.lua")
        if not (name := str(path.relative_to(ROOT))).startswith(("onbeat_extras/", "tests/extras/", "benchmarks/"))
        if any(word in path.read_text() for word in ("onbeat_extras", "tests.extras", "tests/extras"))
    }
    assert naming == set(WITH_EXTRAS)


def test_each_extra_has_its_tests() -> None:
    rooms = {path.name for path in EXTRAS.iterdir() if (path / "__init__.py").exists()}
    assert rooms == {path.name for path in (ROOT / "tests" / "extras").iterdir() if any(path.glob("test_*.py"))}


def test_the_core_starts_and_passes_its_tests_where_the_extras_were_deleted(tmp_path: Path) -> None:
    for package in {*PACKAGES, "tests", "configs", "examples", "benchmarks", "docs", "page"} - {EXTRAS.name}:
        ignored = shutil.ignore_patterns("__pycache__", "node_modules", "extras", "results")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # Without `site` no path leads back to this checkout, as its installation would have it.
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{sysconfig.get_path('purelib')}"}

    def ran(*arguments: str) -> str:
        command = [sys.executable, "-S", "-m", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    commands = ran("onbeat", "--help")
    assert "submit" in commands
    assert "chaos" not in commands
    ran("pytest", "-p", "no:cacheprovider", *OF_THE_CORE)
