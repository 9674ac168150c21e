"""The tutorial of docs/start.md, done as it stands there, with fewer iterations: from nothing to an exported model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.forked import forking

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"```(console|python)\n(.*?)```", re.DOTALL)
FEW = {"python train.py 100": "python train.py 2", "python train.py": "python train.py 1"}


def test_what_the_tutorial_says_ends_with_a_model_of_ones_own_data_and_reward(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    text = page.partition("## Your first run\n")[2].partition("\n## Other ways")[0]
    project = tmp_path / "my-project"
    environment = forking({name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")})
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for language, block in BLOCK.findall(text):
        if "open(" in block:
            (project / "make_rows.py").write_text(block)
        elif language == "python":
            with (project / "rewards.py").open("a") as file:
                file.write(f"\n\n{block}")
            path = project / "configs" / "job.toml"
            path.write_text(path.read_text().replace("right_digits", re.findall(r"def (\w+)", block)[0]))
        else:
            for line in re.findall(r"^\$ (.*?)(?:  +#.*)?$", block, re.MULTILINE):
                command = re.sub("|".join(FEW), lambda match: FEW[match[0]], line)
                here = project if project.exists() else tmp_path
                done = subprocess.run(command, shell=True, cwd=here, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
                assert "train.py" not in line or done.stdout.splitlines()[-1] == "verified", done.stdout
    assert len((project / "data" / "sums.jsonl").read_text().splitlines()) == 8100
    trained = sorted(project.glob("trained-job-*"), key=lambda path: path.stat().st_mtime)
    assert [json.loads((path / "onbeat.json").read_bytes())["policy_version"] for path in trained] == [1, 2]
    assert (trained[1] / "model.safetensors").is_file()
