"""`rollmill init` writes a first run file that `rollmill check` accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.cli import main
from rollmill.config.loader import load_run


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_first_run_file_is_short_and_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    assert "rollmill check run.yaml" in capsys.readouterr().out
    text = Path("run.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert text.count("#") > 10
    assert main(["check", "--no-data", "run.yaml"]) == 0, capsys.readouterr().err
    run = load_run(Path("run.yaml"), require_files=False)
    assert [stage.algorithm.name for stage in run.stages] == ["sft", "grpo"]


def test_first_run_file_takes_a_checkpoint_instead() -> None:
    Path("checkpoint").mkdir()
    main(["init"])
    assert main(["check", "--no-data", "run.yaml", "--set", "model.path=checkpoint"]) == 0


def test_existing_file_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("precious", encoding="utf-8")
    assert main(["init", "mine.yaml"]) == 2
    assert "mine.yaml exists; choose another name, or overwrite it with --force" in capsys.readouterr().err
    assert Path("mine.yaml").read_text(encoding="utf-8") == "precious"
    assert main(["init", "mine.yaml", "--force"]) == 0
    assert Path("mine.yaml").read_text(encoding="utf-8") != "precious"


def test_unwritable_place(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert main(["init", "file/run.yaml"]) == 2
    assert "file/run.yaml: cannot be written" in capsys.readouterr().err
