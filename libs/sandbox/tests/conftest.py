"""Settings of hypothesis; tests of a backend that this kernel cannot offer say so and are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from kernels import lacks

# The same examples in every run, so that chance fails none.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=50
)
if settings.get_current_profile_name() == "default":  # else a conftest above has chosen one
    settings.load_profile("any machine")

WITHOUT_A_BACKEND = ("test_sandbox_frames.py", "test_sandbox_folders.py", "test_sandbox_cgroups.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name not in WITHOUT_A_BACKEND:
            backend = "landlock" if "landlock" in item.name else "namespaces"
            if lacks(backend):
                item.add_marker(pytest.mark.skip(reason=lacks(backend)))
