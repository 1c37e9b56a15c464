"""The run that tests of feedback look at, and a server for a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.feedback_runs import Served, make_run, served


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run; a test that writes in it takes a copy."""
    return make_run(tmp_path_factory.mktemp("runs") / "apples")


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Iterator[Served]:
    """A server that answers."""
    with served(shutil.copytree(made, tmp_path / "apples")) as running:
        yield running
