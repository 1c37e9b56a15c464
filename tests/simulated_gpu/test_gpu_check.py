"""The benchmarks of the GPU check run on the simulated device, on which TRL does not (part `train`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.sources import PYTHONPATH, ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.thorough, pytest.mark.timeout(900), pytest.mark.usefixtures("simulated")]


def test_rollouts_and_large_models_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_BENCH_CACHE", str(tmp_path))
    site = str(ROOT / "tests/support/simulated_cuda/site")
    monkeypatch.setenv("PYTHONPATH", f"{site}:{PYTHONPATH}")
    command = [sys.executable, "-m", "bench", "gpu_check", "--trial", "--parts", "rollout,large"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = ROOT / "build" / "gpu-trial"
    assert {each["outcome"] for each in json.loads((folder / "summary.json").read_text())["parts"].values()} == {
        "passed"
    }
    rollout, large = (json.loads((folder / f"{name}.json").read_text())["cases"] for name in ("rollout", "large"))
    assert [each["peer_name"].split()[0] for each in rollout] == ["roof", "transformers"]
    assert [each["case"] for each in large] == ["tiny rollout", "tiny train"]
    assert all(0 < each["peer"] < each["ours"] for each in (rollout[0], *large))  # seconds, and the least
    assert {"share_of_bandwidth", "peak_gb"} <= large[0].keys()
    assert {"mfu", "peak_gb"} <= large[1].keys()
