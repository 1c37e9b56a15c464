"""`rollmill report`: the report of a run that has not ended, or that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.run_factory import make_run

from rollmill.cli import main


def test_the_report_of_a_killed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "sums", steps=24)
    for name in ("summary.json", "report.html"):
        (run / name).unlink(missing_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "stage": "rl", "los')  # it was killed while it wrote
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    assert "carry-repair" in page
    assert "Highest rewards" in page  # completions were found


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
