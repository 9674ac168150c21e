"""Traces are off without an endpoint, and a bad one is named."""

from __future__ import annotations

import subprocess
import sys

from msgspec.structs import replace

from contracts.settings import StackSettings
from onbeat.base.telemetry.correlation import trace_export
from tests.refusals import refusal_of


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys; from contracts.settings import StackSettings;"
        "from onbeat.base.telemetry.correlation import trace_export;"
        "assert trace_export(StackSettings()) is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bad_endpoint_is_named() -> None:
    with refusal_of("ONBEAT_OTLP_ENDPOINT"):
        trace_export(replace(StackSettings(), otlp_endpoint="collector:4318"))
