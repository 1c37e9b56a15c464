"""Runs the tests in `tinker/` with the package tinker, which has an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from support.sources import PYTHONPATH

ROOT = Path(__file__).resolve().parents[3]
OWN = ROOT / ".venv-tinker/bin/python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("tinker") is not None, reason="they run by themselves"),
    pytest.mark.skipif(not OWN.is_file(), reason="needs .venv-tinker/bin/python: make tinker-setup"),
]


def test_they_pass_in_the_environment_of_tinker() -> None:
    words = [str(OWN), "-m", "pytest", "tests/apps/serve/tinker", "-p", "no:cacheprovider", "-m", "not thorough"]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]
