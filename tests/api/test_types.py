"""A user's script is checked by mypy against the signatures of the algorithms' classes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.sources import PYTHONPATH

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
from collections.abc import Mapping
import rollmill

def brief(task: rollmill.Task, completion: rollmill.Completion) -> float:
    return 1.0 - len(completion.text) / 12

class Stop(rollmill.Callback):
    def on_step(self, run: rollmill.RunControl, metrics: Mapping[str, object]) -> None:
        run.stop()

rows = [{"prompt": "a"}]
run = rollmill.GRPO(model="m", dataset=rows, rewards=[brief, "exact"], kl=0.1, steps=3, lr=1e-3, callbacks=[Stop()])
print(run.train().metrics[-1], rollmill.evaluate(run)["step"])
rollmill.SFT(model="m", dataset="d", batch=3, trainer={"lr": 1e-3})
rollmill.GRPO(group_sise=3)
rollmill.DPO(steps="many")
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_mypy_knows_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", "--ignore-missing-imports"]
    done = subprocess.run(
        [*command, str(file)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    found = re.findall(r"script.py:(\d+): error: (.*)", done.stdout)
    assert [(int(line), text.partition(";")[0].partition("  [")[0]) for line, text in found] == [
        (15, 'Unexpected keyword argument "group_sise" for "GRPO"'),
        (16, 'Argument "steps" to "DPO" has incompatible type "str"'),
    ], done.stdout + done.stderr
