"""Tests of a backend that this kernel cannot offer say so and are skipped."""

from __future__ import annotations

import pytest
from kernels import lacks

WITHOUT_A_BACKEND = ("test_sandbox_frames.py", "test_sandbox_folders.py", "test_sandbox_cgroups.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/sandbox" in item.path.as_posix() and item.path.name not in WITHOUT_A_BACKEND:
            backend = "landlock" if "landlock" in item.name else "namespaces"
            if lacks(backend):
                item.add_marker(pytest.mark.skip(reason=lacks(backend)))
