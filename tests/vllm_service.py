"""Whether tests can use vLLM, which lives in an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON = Path(os.environ.get("ROLLMILL_VLLM_PYTHON", Path(__file__).parents[1] / ".venv-vllm/bin/python"))

needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}; `make vllm-setup` installs it")
