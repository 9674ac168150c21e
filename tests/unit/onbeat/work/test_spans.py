"""A report that a stop meets: it goes on, is told once, and leaves no traceback where its server never answers."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from typing import Any

from contracts.errors import BrokerUnavailable
from contracts.events import TimelineSpan
from onbeat.work.calls import BrokerCalls, last_word
from onbeat.work.spans import Reports, Spans


async def test_a_report_whose_server_hangs_is_left_behind_without_a_word() -> None:
    said: list[dict[str, Any]] = []
    begun, answers = threading.Event(), threading.Event()

    def report(job_id: str, spans: Sequence[TimelineSpan]) -> None:
        begun.set()
        answers.wait()
        raise BrokerUnavailable("this process ends")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    spans, calls = Spans("generator-a"), BrokerCalls(timeout_s=60.0, full_timeout_s=60.0)
    reports = Reports(spans, calls, report)
    spans.record("job", "load", iteration=0, started_s=0.0, ended_s=1.0)
    spans.idle.set()
    running = asyncio.create_task(reports.run())
    await asyncio.to_thread(begun.wait)
    running.cancel()
    await asyncio.wait({running})
    await last_word(reports.send(), 0.01)
    calls.break_off()
    answers.set()
    await asyncio.wait([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
    del reports, running
    gc.collect()
    await asyncio.sleep(0)
    calls.close()
    assert said == []
