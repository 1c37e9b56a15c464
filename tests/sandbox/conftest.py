"""The sandbox needs user namespaces; without them its tests say so and are skipped."""

from __future__ import annotations

import subprocess
import sys

import pytest

NEW_USER_AND_MOUNT = 0x10000000 | 0x00020000
UNSHARE = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({NEW_USER_AND_MOUNT}) != 0)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/sandbox" in item.path.as_posix()]
    if here and subprocess.run([sys.executable, "-c", UNSHARE]).returncode:
        for item in here:
            item.add_marker(pytest.mark.skip(reason="the kernel allows no user namespaces here"))
