"""Where Prometheus finds the processes of an embedded stack."""

from __future__ import annotations

import json
from pathlib import Path

from contracts.settings import PREFIX, settings_from
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack
from onbeat.stack.targets import KEY as KEY_FILE
from onbeat.stack.targets import TARGETS

KEY = f"{PREFIX}METRICS_KEY"


def test_with_metrics_each_process_has_a_port_and_prometheus_finds_it_with_a_key_of_its_own(tmp_path: Path) -> None:
    stack = EmbeddedStack(StackOptions(run_root=tmp_path, model_root=tmp_path, generators=2, metrics=True))
    stack.start_redis()
    try:
        told = {child.name: settings_from(child.environment) for child in stack._plan_children(stack._settings())}
        stack._targets.write(tmp_path, stack._urls)
        files = [tmp_path / TARGETS, tmp_path / KEY_FILE]
        groups = {one["labels"]["instance"]: one["targets"] for one in json.loads(files[0].read_bytes())}
        key = files[1].read_text()
        assert files[1].stat().st_mode & 0o077 == 0
    finally:
        stack.stop()
    assert not any(path.exists() for path in files)
    assert groups["generator-1"] == [f"127.0.0.1:{told['generator-1'].metrics_port}"]
    assert groups["trainer"] == [f"127.0.0.1:{told['consumer'].trainer_metrics_port}"]
    assert set(groups) == {"gateway", "reward_service", "consumer", "trainer", "generator-1", "generator-2"}
    ports = [settings.metrics_port for settings in told.values() if settings.metrics_port]
    assert len(set(ports)) == len(ports) == 3
    assert {settings.metrics_key for settings in told.values()} == {key}
    assert key != told["gateway"].api_key
    assert not any(KEY in role and role[KEY] for role in stack._roles(stack._settings()).values())
