"""A stage worker's process on a real server, under its own role: it is seen, it ends on SIGTERM, and it is gone."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from broker.connection.client import connect
from broker.presence import StagePresence
from contracts.settings import StackSettings
from onbeat.stack.options import StackOptions, child_environment
from onbeat.stack.redis import EmbeddedRedis
from onbeat.stack.stack import EmbeddedStack
from tests.forked import STAGE_WORKER, ForkedChild
from tests.until import until


def test_it_says_what_it_serves_and_leaves_on_a_request_to_end(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    redis_server.load_scripts()  # a test before may have had the server forget them
    settings = StackSettings(redis_url=redis_server.url_of("stage"), model_root=str(tmp_path))
    child = ForkedChild(
        "stages",
        command=(sys.executable, "-m", STAGE_WORKER),
        environment=child_environment(os.environ, settings, port=0),
        log_path=tmp_path / "stages.log",
    )
    board = StagePresence(connect(StackSettings(redis_url=redis_server.url)))
    before = {worker.worker_id for worker in board.live()}
    child.start()
    try:
        live = until(lambda: [seen for seen in board.live() if seen.worker_id not in before], "the worker to be seen")
        assert live[0].serves == ("reference", "reward_model", "teacher"), "it knows no judge"
        assert child.pid is not None
        os.kill(child.pid, signal.SIGTERM)
        child.wait(60.0)
        assert child.exit_code == 0, child.tail()
        assert not [worker for worker in board.live() if worker.worker_id not in before]
        assert "Traceback" not in child.tail()
    finally:
        child.stop(grace_s=0.0)


def test_a_stack_starts_stage_workers_beside_its_generators(tmp_path: Path) -> None:
    stack = EmbeddedStack(StackOptions(run_root=tmp_path, model_root=tmp_path, stage_workers=2))
    children = stack._plan_children(stack._settings())
    found = {child.name: child.command[1:] for child in children if child.name.startswith("stage-")}
    assert found == dict.fromkeys(("stage-1", "stage-2"), ("-m", STAGE_WORKER))
