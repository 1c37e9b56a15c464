"""Libraries stand alone: users of other trainers install them without rollmill."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from support.sources import ROOT

LIBRARIES = sorted(path.parent for path in ROOT.glob("libs/*/pyproject.toml"))


def imported(file: Path) -> set[str]:
    """Top-level names of what a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_a_library_its_tests_and_its_benchmark_import_nothing_of_rollmill(library: Path) -> None:
    files = [file for folder in ("src", "tests", "bench") for file in (library / folder).rglob("*.py")]
    assert files
    assert [file.name for file in files if {"rollmill", "bench"} & imported(file)] == []


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_rollmill_depends_on_it_by_name(library: Path) -> None:
    project, own = (tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (ROOT, library))
    assert any(each.startswith(own["name"]) for each in project["dependencies"])
    assert not any(each.startswith("rollmill") for each in own["dependencies"])
    assert (library / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
