"""Drawn combinations of modes: three steps each, which compute the same as in one process, or are refused by check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.drawn import DRAWN, FACTORS, PLAIN, STEPS, Combination, Design, draw, write_files
from support.forks import Forks, forks
from support.tiny import metrics, rolled_out
from support.vllm_service import PYTHON, needs_vllm

pytestmark = pytest.mark.timeout(600)
DESIGN = Design.read()
SPLIT = ("FSDP", "tensor parallel", "context parallel")


def reference(row: Combination) -> Combination | None:
    """The combination in one process that has to compute the same; None if another engine or order samples."""
    if row.settings["engine"] != "native" or row.settings["timing"] != "synchronous":
        return None
    weights = "full" if row.settings["weights"] in SPLIT else row.settings["weights"]
    return row.changed(processes="one process", weights=weights)


def marks(row: Combination) -> list[Any]:
    found = [pytest.mark.thorough, pytest.mark.slow]
    if row.settings["engine"] == "vLLM":
        found += [pytest.mark.service, needs_vllm]
    return found


class Runs:
    """Runs of combinations in a folder with the files that they name, each made once."""

    def __init__(self, folder: Path, servers: list[Forks]) -> None:
        self._folder, (self._trainer, self._explorer) = write_files(folder), servers
        self.of = cache(self._run)

    def _run(self, row_id: str, out: str) -> Path:
        row = next(each for each in (*DESIGN.rows, *filter(None, map(reference, DESIGN.rows))) if each.id == row_id)
        vllm = {"engine": {"python": str(PYTHON)}} if row.settings["engine"] == "vLLM" else {}
        row.write(self._folder, **vllm)
        both = row.settings["processes"] == "processes"
        if both:
            self._explorer.start("run", "run.yaml", "--set", "mode=explore", "--out", out, folder=self._folder)
        self._trainer.start("run", "run.yaml", "--out", out, folder=self._folder)
        for server in [self._trainer, self._explorer][: 1 + both]:
            done = server.wait()
            assert done.code == 0, done.err + done.out
        return self._folder / out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with ExitStack() as stack:
        servers = [stack.enter_context(forks()) for _ in range(2)]
        yield Runs(tmp_path_factory.mktemp("drawn"), servers)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id, marks=marks(row)) for row in DESIGN.rows])
def test_a_drawn_combination_computes_what_one_process_computes(runs: Runs, row: Combination) -> None:
    out = runs.of(row.id, row.id)
    steps = [each for each in metrics(out) if "loss" in each]
    assert [each["step"] for each in steps] == list(range(1, STEPS + 1))
    assert all(math.isfinite(each["loss"]) and math.isfinite(each["grad_norm"]) for each in steps)
    assert max(each.get("staleness/max", 0) for each in steps) <= (row.settings["timing"] == "asynchronous")
    exact = row.settings["weights"] != "bf16"
    if exact:
        assert max(each.get("logprob_gap/max", 0) for each in steps) < 1e-3
    other = reference(row)
    if other is None or other.id == row.id:
        return
    plain = runs.of(other.id, f"reference {other.id}")
    assert rolled_out(out) == rolled_out(plain)
    for mine, theirs in zip(steps, (each for each in metrics(plain) if "loss" in each), strict=True):
        for key in ("loss", "grad_norm", "reward/mean", "entropy", "kl"):
            if key in theirs:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), (key, mine["step"])


def test_every_two_settings_meet_in_a_run_or_are_refused() -> None:
    met = {pair for row in DESIGN.rows for pair in row.pairs()}
    every = {
        frozenset({(a, x), (b, y)}) for a in FACTORS for b in FACTORS if a < b for x in FACTORS[a] for y in FACTORS[b]
    }
    assert met | DESIGN.refused.keys() == every
    assert not met & DESIGN.refused.keys()


@pytest.mark.slow
def test_what_is_refused_is_still_refused_and_nothing_else(tmp_path: Path) -> None:
    """If not, draw again: `python tests/support/drawn.py`, and `python docs/mode_matrix.py`."""
    write_files(tmp_path)
    assert all(row.refusal(tmp_path) is None for row in DESIGN.rows)
    for pair, reason in DESIGN.refused.items():
        found = PLAIN.changed(**dict(pair)).refusal(tmp_path)
        assert found is not None
        assert reason.partition(";")[0] in found
    assert draw(tmp_path).to_json() == DRAWN.read_text()
