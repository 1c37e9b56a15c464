"""Without the package tinker these tests are left out; `test_tinker.py` runs them in its environment."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("tinker") else ["test_*.py"]
