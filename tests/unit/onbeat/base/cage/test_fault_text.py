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
    return raised_by(defined_in(f"def score():\n{text}", "score", file="folder/score.py"))


def test_the_authors_own_words_are_told_with_the_line_of_the_authors_code() -> None:
    line = "raise ValueError('no number in the answer')"
    assert of_file(f"    {line}") == f"ValueError: no number in the answer, at score.py:2 in score: {line}"
    assert of_file("    return {}['answer']") == "KeyError: 'answer', at score.py:2 in score: return {}['answer']"
    text = of_file("    import helpers_of_mine")
    assert text == (
        "ModuleNotFoundError: No module named 'helpers_of_mine', at score.py:2 in score: import helpers_of_mine"
    )


def test_a_librarys_words_are_not_told_but_its_place_and_the_authors_line(tmp_path: Path) -> None:
    secret = tmp_path / "secret-name"
    text = of_file(f"    import pathlib; path = {str(secret)!r}\n    pathlib.Path(path).read_text()")
    assert text.startswith("FileNotFoundError, raised in pathlib.py:")
    assert text.endswith(", called at score.py:3 in score: pathlib.Path(path).read_text()")
    assert "secret-name" not in text
    text = of_file("    import json\n    json.loads('{a secret')")
    assert text.startswith("JSONDecodeError, raised in json/decoder.py:")


def test_a_module_next_to_the_authors_is_the_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("import parts_of_mine\ndef score():\n    parts_of_mine.score()\n")
    (tmp_path / "parts_of_mine.py").write_text("def score():\n    raise ValueError('no answer')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import rewards_of_mine  # type: ignore[import-not-found]

    at = "parts_of_mine.py:2 in score: raise ValueError('no answer')"
    assert raised_by(rewards_of_mine.score) == f"ValueError: no answer, at {at}"
    for name in ("rewards_of_mine", "parts_of_mine"):
        del sys.modules[name]


def test_a_text_is_cut_and_one_that_cannot_be_shown_is_said() -> None:
    text = of_file("    raise ValueError('a' * 100_000)")
    assert len(text) == MAX_CHARS
    assert text.endswith("a…, at score.py:2 in score: raise ValueError('a' * 100_000)")
    class_text = (
        "    class E(BaseException):\n        def __str__(self):\n            raise SystemExit(1)\n    raise E()"
    )
    assert of_file(class_text) == "E: an error that can't be shown, at score.py:5 in score: raise E()"


def test_an_error_of_our_own_code_keeps_its_words() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert fault_text(caught.value.with_traceback(None)).startswith("JSONDecodeError: Expecting property name")
