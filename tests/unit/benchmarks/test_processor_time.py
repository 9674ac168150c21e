"""What a stack's processor time is put down to."""

from __future__ import annotations

from benchmarks._processor_time import OTHER, place_of, waits_in

PASS = "token_outputs (/x/consumer/gradient/log_probs.py:40)"
BACKWARD = f"{PASS};_engine_run_backward (/x/torch/autograd/graph.py:860)"


def test_the_innermost_function_that_is_known_decides() -> None:
    assert place_of(f"{PASS};forward (/x/torch/nn/modules/linear.py:130)") == "passes: forward"
    assert place_of(BACKWARD) == "passes: backward"
    assert place_of(f"{BACKWARD};add (/x/consumer/gradient/accumulation.py:90)") == "passes: exact sums"
    assert place_of("f (/x/lib.py:1)") == OTHER


def test_a_thread_that_was_just_woken_computes_nothing_yet() -> None:
    assert waits_in(f"{PASS};Condition.wait (/x/threading.py:320)")
    assert not waits_in(f"Condition.wait (/x/threading.py:320);{PASS}")
