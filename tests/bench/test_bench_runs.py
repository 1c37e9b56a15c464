"""Benchmarks end to end on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> dict[str, Any]:
    program = (
        "import sys; from pathlib import Path; import bench.report as r; "
        "r.finish.__kwdefaults__['folder'] = Path(sys.argv[1]); "
        "from bench.__main__ import main; sys.exit(main(sys.argv[2:]))"
    )
    folder, *rest = arguments
    done = subprocess.run([sys.executable, "-c", program, folder, *rest], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_rollout_against_transformers(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "rollout", "--models", "tiny", "--without", "vllm", "--rounds", "1")
    assert line["peer_name"] == "transformers"
    assert line["ratio"] == pytest.approx(line["ours"] / line["peer"], rel=1e-2)


@pytest.mark.slow
def test_step_against_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    line = bench(str(tmp_path), "step", "--models", "tiny", "--rounds", "1")
    assert line["unit"] == "s"
    assert line["peer_name"].startswith("trl")
    case = json.loads((tmp_path / "step.json").read_text())["cases"][0]
    assert len(case["peer_settings"]) == 3


@pytest.mark.slow
def test_sampling(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "sampling", "--rows", "8", "--vocab", "4096", "--rounds", "1")
    assert line["unit"] == "ms"


def test_gpu_check_without_a_gpu(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for options, code in (([], 1), (["--allow-missing"], 0)):
        done = subprocess.run(
            [sys.executable, "-m", "bench", "gpu_check", *options], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == code
        assert "no CUDA device" in done.stdout
