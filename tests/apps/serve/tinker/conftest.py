"""Without the package tinker these tests are left out; `test_tinker.py` runs them in its environment."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.toys import toy_checkpoint

collect_ignore_glob = [] if importlib.util.find_spec("tinker") else ["test_*.py"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_checkpoint(tmp_path_factory.mktemp("models") / "toy", "qwen3")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")
