"""An exception's text in a reason: the author's own words, and of a library the place alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onbeat.base.cage.fault_text import MAX_CHARS, fault_text
from onbeat.base.process.entry_points import defined_in


def raised_by(function: Callable[[], object]) -> str:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        function()
    error = caught.value
    assert error.__traceback__ is not None
    # Without the frame of this module, which stands in for the service's code: what lies below it is foreign.
    return fault_text(error.with_traceback(error.__traceback__.tb_next))


def of_file(text: str) -> str:
    return raised_by(defined_in(f"def score():\n{text}", "score"))


def test_the_authors_own_words_are_told() -> None:
    assert of_file("    raise ValueError('no number in the answer')") == "ValueError: no number in the answer"
    assert of_file("    return {}['answer']") == "KeyError: 'answer'"
    assert of_file("    import helpers_of_mine") == "ModuleNotFoundError: No module named 'helpers_of_mine'"


def test_a_librarys_words_are_not_told_but_its_place_and_the_authors_line(tmp_path: Path) -> None:
    secret = tmp_path / "secret-name"
    text = of_file(f"    import pathlib\n    pathlib.Path({str(secret)!r}).read_text()")
    assert text.startswith("FileNotFoundError, raised in pathlib.py:")
    assert text.endswith(", called at score.py:3")
    assert "secret-name" not in text
    text = of_file("    import json\n    json.loads('{a secret')")
    assert text.startswith("JSONDecodeError, raised in json/decoder.py:")


def test_a_module_next_to_the_authors_is_the_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("import parts_of_mine\ndef score():\n    parts_of_mine.score()\n")
    (tmp_path / "parts_of_mine.py").write_text("def score():\n    raise ValueError('no answer')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import rewards_of_mine  # type: ignore[import-not-found]

    assert raised_by(rewards_of_mine.score) == "ValueError: no answer"
    for name in ("rewards_of_mine", "parts_of_mine"):
        del sys.modules[name]


def test_a_text_is_cut_and_one_that_cannot_be_shown_is_said() -> None:
    text = of_file("    raise ValueError('a' * 100_000)")
    assert len(text) == MAX_CHARS
    assert text.endswith("a…")
    class_text = (
        "    class E(BaseException):\n        def __str__(self):\n            raise SystemExit(1)\n    raise E()"
    )
    assert of_file(class_text) == "E: an error that can't be shown"


def test_an_error_of_our_own_code_keeps_its_words() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert fault_text(caught.value.with_traceback(None)).startswith("JSONDecodeError: Expecting property name")
