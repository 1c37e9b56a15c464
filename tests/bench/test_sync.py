"""`bench sync` and `bench asynchronous` run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.bench_command import bench


@pytest.mark.thorough
@pytest.mark.slow
def test_sync_against_a_memory_copy(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "sync", "--rounds", "1", "--megabytes", "20")
    assert (line["peer_name"], line["unit"]) == ("memory copy", "GB/s")
    cases = {case["case"]: case for case in json.loads((tmp_path / "sync.json").read_text())["cases"]}
    assert set(cases) == {"shared", "broadcast", "folder", "delta", "pickled"}
    assert cases["delta"]["sent"] < cases["folder"]["sent"] / 10


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    options = ("--model", "tiny", "--rounds", "1", "--steps", "2", "--staleness", "2", "--new-tokens", "16")
    line = bench(str(tmp_path), "asynchronous", *options)
    assert (line["peer_name"], line["unit"]) == ("in turn", "steps/s")
    cases = json.loads((tmp_path / "asynchronous.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["max_staleness 2", "max_staleness 2, keep"]
    assert all(0 < case["staleness"] <= 2 for case in cases)
