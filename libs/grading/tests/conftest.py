"""Shared fixtures: graders, and the folder with real data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rollmill_grading import MathGrader, SchoolGrader

# The same examples in every run, so that chance fails none. HYPOTHESIS_PROFILE=search tries many others.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=50
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "any machine"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with real data: $ROLLMILL_DATA, or shared/data beside the repository. Skips where there is none."""
    root = Path(__file__).resolve().parents[3]
    folder = Path(os.environ.get("ROLLMILL_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set ROLLMILL_DATA")
    return folder


@pytest.fixture(scope="module")
def math() -> Iterator[MathGrader]:
    with MathGrader(time_limit_s=20) as grader:
        yield grader


@pytest.fixture(scope="module")
def school() -> Iterator[SchoolGrader]:
    with SchoolGrader(time_limit_s=20) as grader:
        yield grader
