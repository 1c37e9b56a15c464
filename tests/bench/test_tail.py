"""The lengths of `bench tail`, and that it finds no prompt lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.bench_command import bench

from bench.ours.tail import length


def test_lengths_are_log_normal_and_cut() -> None:
    logs = np.log([length(seed, 1000, 10**6) for seed in range(4000)])
    assert np.median(logs) == pytest.approx(np.log(1000), abs=0.08)
    assert logs.std() == pytest.approx(1.0, abs=0.05)
    assert max(length(seed, 1000, 1200) for seed in range(50)) == 1200


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_partial_rollouts_and_over_sampling_lose_nothing(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "tail", "--model", "test", "--rounds", "1", "--seeds", "")
    assert (line["peer_name"], line["unit"]) == ("waiting for the slowest", "tokens/s")
    cases = {case["case"]: case for case in json.loads((tmp_path / "tail.json").read_text())["cases"]}
    assert cases["partial"]["true_bias"] == 1.0
    assert cases["oversample"]["true_bias"] < 1.0
    assert len(cases["oversample"]["length_bias"]) == 4
