"""Measures how long a long job takes to open on the page: `python -m page.measure`, for 1,000 and 10,000 iterations.

a run folder and events as a trainer leaves them ─▶ gateway ─▶ headless Chromium ─▶ bytes on the wire, seconds to curves
"""

from __future__ import annotations

import random
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn
from msgspec.structs import replace
from playwright.sync_api import Browser, sync_playwright

from broker.connection.client import Broker, connect
from contracts.encoding.json_lines import append_json_lines
from contracts.events import CheckpointWritten, IterationCommitted, IterationMetrics
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.services import Services
from onbeat.base.http.server import server_config
from onbeat.client.spec_file import load_spec
from onbeat.stack.access import page_address
from onbeat.stack.ports import free_port
from onbeat.stack.redis import EmbeddedRedis

ROOT = Path(__file__).parents[1]
LENGTHS = (1_000, 10_000)
TIMES = 3
KEY = "measured"


def iteration(number: int, dice: random.Random) -> IterationMetrics:
    """The numbers of an iteration as the demo's are: most have all their digits."""
    metrics = IterationMetrics(
        iteration=number,
        policy_version=number,
        trainer_epoch=1,
        num_batches=8,
        num_completions=512,
        num_tokens=dice.randrange(2000, 2400),
        reward_components={"exact": dice.random()},
        response_tokens_max=5,
        lag_counts=(),
        loss_metrics={},
        started_s=1.79e9 + number * 0.4 + dice.random(),
        **dict.fromkeys(DIGITS, 0.0),  # type: ignore[arg-type]
    )
    numbers = {name: dice.random() for name in DIGITS}
    return replace(metrics, **numbers, loss_metrics={name: dice.random() for name in LOSS_DIGITS})


DIGITS = [
    *("reward_mean", "reward_std", "zero_advantage_share", "response_tokens_mean", "truncated_share", "loss"),
    *("entropy", "grad_norm", "learning_rate", "mismatch_k3", "mismatch_max", "effective_sample_share"),
    *("wall_s", "generation_s", "training_s", "waiting_s", "step_s", "publish_s", "bubble_s", "tokens_per_s"),
    *("trained_tokens_per_s", "advantage_mean", "advantage_std", "advantage_max"),
]
LOSS_DIGITS = ["clip_share", "clip_low_share", "clip_high_share", "corrected_share", "entropy_trained_tokens"]


def long_job(services: Services, length: int) -> str:
    spec = load_spec(ROOT / "configs" / "demo.toml", [f'name="{length} iterations"', f"iterations={length}"])
    job_id, _ = services.jobs.create(spec)
    folder = RunFolder(services.settings.run_root_path, job_id)
    folder.path.mkdir(parents=True)
    dice = random.Random(0)
    rows = [iteration(number, dice) for number in range(length)]
    append_json_lines(folder.metrics, rows)
    services.jobs.move(job_id, JobState.RUNNING)
    for row in rows:
        at_s = row.started_s + row.wall_s
        services.jobs.tell(job_id, IterationCommitted(at_s=at_s, metrics=row, weights_digest="a" * 64))
        if row.iteration % 50 == 49:
            checkpoint = f"{job_id}/checkpoints/i{row.iteration:06}"
            event = CheckpointWritten(at_s=at_s, iteration=row.iteration, directory=checkpoint, weights_digest="a" * 64)
            services.jobs.tell(job_id, event)
    services.broker.redis.hset(services.broker.job_keys(job_id).fence, "committed", length - 1)
    services.jobs.move(job_id, JobState.SUCCEEDED)
    return job_id


@contextmanager
def serving(services: Services) -> Iterator[str]:
    port = free_port()
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(server_config(create_app(services), grace_s=2.0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        services.closing.set()
        server.should_exit = True
        thread.join()
        listener.close()


def opening(browser: Browser, url: str, job_id: str, *, last: int) -> tuple[float, float, int]:
    """(seconds until the curve ends at its last iteration; until it has all; bytes until 2 s later), with no cache."""
    context = browser.new_context()
    page = context.new_page()
    wire = context.new_cdp_session(page)
    wire.send("Network.enable")
    sizes: list[int] = []
    wire.on("Network.dataReceived", lambda event: sizes.append(event["encodedDataLength"]))
    wire.on("Network.responseReceived", lambda event: sizes.append(event["response"].get("encodedDataLength", 0)))
    started_s = time.monotonic()
    page.goto(page_address(url, KEY, job_id=job_id))
    curve = page.get_by_role("slider", name=re.compile(rf"^Reward\. .* at {last}$"))
    curve.wait_for(timeout=120_000)
    shown_s = time.monotonic() - started_s
    curve.and_(page.locator("[aria-busy=false]")).wait_for(timeout=120_000)
    whole_s = time.monotonic() - started_s
    page.wait_for_timeout(2000)
    context.close()
    return shown_s, whole_s, sum(sizes)


def main() -> None:
    with TemporaryDirectory(prefix="onbeat-measure-") as folder, EmbeddedRedis(Path(folder) / "redis") as redis:
        settings = StackSettings(redis_url=redis.url, run_root=folder, api_key=KEY, model_root=str(ROOT))
        broker: Broker = connect(settings)
        services = Services(settings=settings, broker=broker)
        jobs = {length: long_job(services, length) for length in LENGTHS}
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        with serving(services) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for length, job_id in jobs.items():
                for _ in range(TIMES):
                    shown_s, whole_s, size = opening(browser, url, job_id, last=length - 1)
                    sys.stdout.write(
                        f"{length:>6} iterations  {shown_s:5.2f} s  whole {whole_s:5.2f} s  {size / 1e6:.2f} MB\n"
                    )
            browser.close()


if __name__ == "__main__":
    main()
