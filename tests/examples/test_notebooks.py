"""The notebooks of examples/notebooks are up to date, and run from the first to the last cell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_notebooks_are_those_of_their_scripts() -> None:
    assert [path.name for path in NOTEBOOKS] == ["control.ipynb", "first_run.ipynb"]
    done = subprocess.run([sys.executable, str(ROOT / "docs/notebooks.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: str(path.stem))
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "".join(
        output["data"].get("text/html", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "display_data"
    )
    assert ("step 20 of 20" if path.stem == "first_run" else "step 12 of 12") in shown  # the last state of the view
    assert "<svg" in shown
    assert "<th" in shown
