"""What a client's text costs is bounded in time: texts whose cost isn't their length, at each place that reads them.

`make fuzz` draws more of them, and sends them to a real gateway.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from contracts.encoding.wire import encode_json
from contracts.errors import OnbeatError
from contracts.spec.reading import read_json
from contracts.spec.rules import refusals_of
from onbeat.data.rendering import chat_template
from onbeat.data.rendering.chat_template import ChatTemplate, TemplateEnded, TemplateRefuses
from onbeat.scoring.patterns import takes_re2
from tests.builders import job_spec
from tests.costly_texts import PATTERNS, TEMPLATES, drawn

DEMO_MODEL = Path(__file__).parents[2] / "configs" / "models" / "two-digit-addition"
NUM_PATTERNS = int(os.environ.get("FUZZ_EXAMPLES", "48"))
DECODE_CPU_S = 0.25
CHECK_CPU_S = 1.0
"""The processor time of one text, which other work doesn't lengthen; faults took from seconds to minutes."""


@pytest.mark.parametrize(("kind", "pattern"), drawn(PATTERNS, NUM_PATTERNS, seed=51))
def test_a_pattern_costs_its_length_in_a_decode_and_is_checked_within_a_second(kind: str, pattern: str) -> None:
    exact = encode_json({"type": "exact"})
    component = encode_json({"type": "regex", "pattern": pattern})
    body = encode_json(job_spec()).replace(exact[:-1], component + b"," + exact[:-1], 1)
    assert component in body
    started_s = time.process_time()
    with contextlib.suppress(OnbeatError):  # of a pattern that no spec may hold
        refusals_of(read_json(body))
    decoded_s = time.process_time()
    with contextlib.suppress(OnbeatError):  # of what is no pattern
        takes_re2(pattern)
    assert decoded_s - started_s < DECODE_CPU_S, kind
    assert time.process_time() - decoded_s < CHECK_CPU_S, kind


@pytest.mark.parametrize(("kind", "template"), drawn(TEMPLATES, len(TEMPLATES), seed=51))
def test_a_template_of_any_cost_ends_in_a_named_error(
    kind: str, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "LONGEST_S", 0.5)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = template
    used_s = time.process_time()
    with pytest.raises((TemplateEnded, TemplateRefuses)) as error:
        ChatTemplate(tokenizer).write([{"role": "user", "content": "1+1="}], opens_turn=True)
    assert str(error.value), kind
    assert time.process_time() - used_s < CHECK_CPU_S, "another process has the cost"
