"""The page's logic without a browser: the tests beside its sources, by vitest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "page"
VITEST = PAGE / "node_modules" / ".bin" / "vitest"


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node on PATH")
@pytest.mark.skipif(not VITEST.exists(), reason="the page's packages are not there: `make page`")
def test_lanes_heat_strips_and_texts_are_what_they_should_be() -> None:
    """Each test is in `page/src/**/*.test.ts`; its name is in the answer where it fails."""
    answer = subprocess.run(
        [str(VITEST), "run", "--reporter=dot"],
        cwd=PAGE,
        env=os.environ | {"NO_COLOR": "1", "CI": "1"},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert " passed" in answer.stdout
