"""What is counted of the mutants that mutmut made and ran."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bench.harness import BenchError
from bench.mutation import ACCEPTED, AREAS, counted_mutants, row_of

ROOT = Path(__file__).resolve().parents[2]
MODULE = "src/pack/changed.py"
MUTATED = """
def x_total__mutmut_orig(values, *, more=1):
    if values:
        return sum(values) + more
    return 0
def x_total__mutmut_1(values, *, more=2):
    if values:
        return sum(values) + more
    return 0
def x_total__mutmut_2(values, *, more=1):
    if values:
        return sum(values) - more
    return 0
class Pairs:
    def xǁPairsǁindex__mutmut_orig(self, a, b):
        return list(zip(a, b, strict=True))
    def xǁPairsǁindex__mutmut_1(self, a, b):
        return list(zip(a, b, strict=False))
    def xǁPairsǁindex__mutmut_2(self, a, b):
        return list(zip(a, b, ))
    def xǁPairsǁindex__mutmut_3(self, a, b):
        return list(zip(a, strict=True))
"""
KEYS = ("x_total__mutmut_1", "x_total__mutmut_2", *(f"xǁPairsǁindex__mutmut_{n}" for n in (1, 2, 3)))


def ran(folder: Path, *codes: int | None) -> Path:
    """A folder in which mutmut ended with these exit codes of pytest."""
    file = folder / "mutants" / MODULE
    file.parent.mkdir(parents=True)
    file.write_text(MUTATED)
    found = dict(zip((f"pack.changed.{key}" for key in KEYS), codes, strict=True))
    file.with_name("changed.py.meta").write_text(json.dumps({"exit_code_by_key": found}))
    return folder


def test_a_mutant_is_named_by_its_function_and_what_changes(tmp_path: Path) -> None:
    assert list(counted_mutants(ran(tmp_path, 0, 1, 0, 0, 33), MODULE)) == [
        ("total: def total(values, *, more=1): -> def total(values, *, more=2):", 0),
        ("total: return sum(values) + more -> return sum(values) - more", 1),
        ("Pairs.index: return list(zip(a, b, strict=True)) -> return list(zip(a, strict=True))", 33),
    ]


@pytest.mark.parametrize("code", [None, 2, 35])
def test_a_mutant_that_was_not_run_to_an_end_is_an_error(tmp_path: Path, code: int | None) -> None:
    with pytest.raises(BenchError, match="x_total__mutmut_2"):
        list(counted_mutants(ran(tmp_path, 0, code, 0, 0, 1), MODULE))


def test_equivalent_mutants_do_not_count() -> None:
    mutants = [("f: a -> b", 0), ("f: a -> c", 33), ("g: a -> b", 0), ("g: a -> c", 1), ("g: a -> d", 24)]
    assert row_of(mutants, {"f: a -> b": "b is a", "g: a -> c": "killed in fact"}) == {
        "mutants": 5,
        "counted": 4,
        "killed": 2,
        "survivors": [
            {"mutant": "f: a -> b", "reason": "b is a"},
            {"mutant": "f: a -> c", "reason": "no test calls it"},
            {"mutant": "g: a -> b", "reason": "no test notices it"},
        ],
    }


def test_accepted_mutants_are_of_modules_that_are_tested() -> None:
    modules = {str(path.relative_to(ROOT)) for area in AREAS for path in ROOT.glob(area)}
    assert set(tomllib.loads(ACCEPTED.read_text())) <= modules


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tests_notice_changes_of_the_queue(tmp_path: Path) -> None:
    pytest.importorskip("mutmut")
    command = ["-m", "bench", "mutation", "--module", "group_queue", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["share"] >= 0.95
    [row] = json.loads((tmp_path / "mutation.json").read_text())["modules"].values()
    assert row["mutants"] > 50
