"""`rollmill merge`: checkpoints and run directories in, one checkpoint out, and its complaints."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.forks import Forks
from support.tiny import GRPO, SFT, tiny_run
from support.toys import toy_checkpoint

from rollmill.cli import main

FAILED, USAGE = 1, 2
NOBODY = 65534 if os.getuid() == 0 else None  # root may write anywhere
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with checkpoints a, b and c of one architecture."""
    for seed, name in enumerate("abc"):
        toy_checkpoint(tmp_path / name, "qwen3", seed)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_summary_says_what_was_averaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "a", "b", "c", "--out", "new/out", "--weights", "2,1,1", "--json"]) == 0
    tensors = load_file("new/out/model.safetensors")
    assert json.loads(capsys.readouterr().out) == {
        "out": str(folder / "new/out"),
        "method": "linear",
        "checkpoints": ["a", "b", "c"],
        "weights": [0.5, 0.25, 0.25],
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "dtypes": ["float32"],
    }
    a, b, c = (load_file(f"{name}/model.safetensors")["lm_head.weight"].double() for name in "abc")
    assert tensors["lm_head.weight"].equal((a / 2 + b / 4 + c / 4).float())


def test_the_last_line_is_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["merge", "a", "b", "--out", "out", "--weights=1.5,-0.5", "--method", "slerp", "--dtype", "bf16"]
    assert main(argv) == 0
    assert capsys.readouterr().out == "wrote out (0.10M parameters, bfloat16): slerp average of 1.5 x a, -0.5 x b\n"


def test_equal_weights_are_the_default(folder: Path) -> None:
    assert main(["merge", "a", "b", "--out", "out"]) == 0
    assert main(["merge", "a", "b", "--out", "same", "--weights", "3,3"]) == 0
    assert Path("out", WEIGHTS).read_bytes() == Path("same", WEIGHTS).read_bytes()
    assert main(["merge", "a", "b", "--out", "other", "--weights", "1,3"]) == 0
    assert Path("out", WEIGHTS).read_bytes() != Path("other", WEIGHTS).read_bytes()


def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    stages = [SFT | {"steps": 1}, GRPO | {"steps": 1}]
    tiny_run(tmp_path, stages=stages, evaluation=None, trainer={"warmup_steps": 0})
    assert main(["run", str(tmp_path / "run.yaml"), "--out", str(run)]) == 0
    capsys.readouterr()
    first, newest = run / "checkpoints/step-000001", run / "checkpoints/step-000002"
    assert main(["merge", str(run), str(first), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == [str(newest), str(first)]
    merged, a, b = (load_file(path / WEIGHTS) for path in (out, newest, first))
    assert any(not a[name].equal(b[name]) for name in a)
    assert all(merged[name].equal(((a[name].double() + b[name].double()) / 2).float()) for name in a)
    tiny_run(tmp_path, model={"path": str(out), "new": None}, stages=[GRPO | {"steps": 1}], evaluation=None)
    assert main(["run", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "next")]) == 0


def test_an_empty_folder_may_be_the_result(folder: Path) -> None:
    Path("out").mkdir()
    Path(f".out.writing-{2**22}").mkdir()  # of a merge that was killed
    assert main(["merge", "a", "b", "--out", "out"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c", "out"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a"], "one checkpoint (a) has no average; give two or more"),
        (["a", "b", "--weights", "1"], "--weights 1: 1 weights for 2 checkpoints; give one per checkpoint"),
        (["a", "b", "--weights", ""], "--weights : expected numbers with commas between them, such as 0.5,0.5"),
        (["a", "b", "--weights", "0.5;0.5"], "--weights 0.5;0.5: expected numbers with commas"),
        (["a", "b", "--weights", "1,nan"], "--weights 1,nan: not all are finite"),
        (["a", "b", "--weights", "inf,1"], "--weights inf,1: not all are finite"),
        (["a", "b", "--weights", "0,0"], "--weights 0,0: the sum is 0, so they cannot be scaled to sum to 1"),
        (["a", "b", "c", "--weights", "0.1,0.2,-0.3"], "--weights 0.1,0.2,-0.3: the sum is 0"),
        (["a", "b", "c", "--method", "slerp"], "--method slerp takes two checkpoints, found 3; use linear"),
        (["a", "b", "--method", "ties"], "--method is linear or slerp, not 'ties'"),
        (["a", "b", "--dtype", "int8"], "--dtype is fp32, bf16, fp16, not 'int8'"),
        (["a", "b", "--out", "c"], "c exists and is not empty; choose another folder with --out"),
        (["a", "b", "--out", "a/config.json"], "a/config.json is a file; choose another folder with --out"),
    ],
)
def test_wrong_usage_says_what_to_do(
    folder: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", "--out", "out", *argv]) == USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c"]


def test_out_is_required(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "a", "b"]) == USAGE
    assert "Missing option '--out'" in capsys.readouterr().err


def test_folders_that_hold_no_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    Path("begun").mkdir()
    Path("begun/config.yaml").write_text("name: begun\n")
    for name, message in {
        "nonesuch": "nonesuch does not exist; give the folder of a checkpoint, or a run directory",
        "empty": "empty is not a checkpoint (no config.json); give a folder in Hugging Face format, or a run directory",
        "begun": "begun is a run without checkpoints; resume it, or give another folder",
    }.items():
        assert main(["merge", "a", name, "--out", "out"]) == FAILED
        assert capsys.readouterr().err == message + "\n"
    assert not Path("out").exists()


def test_checkpoints_that_do_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy_checkpoint(folder / "wide", "qwen3", intermediate_size=128)
    toy_checkpoint(folder / "llama", "llama")
    assert main(["merge", "a", "wide", "--out", "out"]) == FAILED
    assert "has shape [64, 128], but [64, 96] in a; only checkpoints of one size" in capsys.readouterr().err
    assert main(["merge", "a", "b", "llama", "--out", "out"]) == FAILED
    assert "llama: config.json: architectures is ['LlamaForCausalLM'], but ['Qwen3ForC" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(server: Forks, folder: Path) -> None:
    opened(folder)
    with tempfile.TemporaryDirectory() as closed:  # pytest's folders admit their owner alone, so not even to this one
        Path(closed).chmod(0o555)
        ended = server.run("merge", "a", "b", "--out", f"{closed}/out", folder=folder, uid=NOBODY)
        assert list(Path(closed).iterdir()) == []
    assert ended.code == FAILED
    reason = f"[Errno 13] Permission denied: '{closed}/.out.writing-"
    assert ended.err.startswith(f"cannot write the merged checkpoint {closed}/out: {reason}")
    assert ended.err.endswith("fix the permissions, or choose another folder with --out.\n")


@pytest.mark.parametrize(
    ("checkpoint", "closed", "message"),
    [
        (
            "run/checkpoints/step-000001",
            "run",
            "Permission denied: 'run/checkpoints/step-000001/config.yaml'; fix",
        ),
        ("run", "run/checkpoints", "Permission denied: 'run/checkpoints'; fix its permissions\n"),
        ("b", "b/config.json", "Permission denied: 'b/config.json'; fix it or copy it again\n"),
        ("b", "b/model.safetensors", "Permission denied: 'b/model.safetensors'; fix it or copy it again\n"),
    ],
)
def test_what_cannot_be_read_is_named(server: Forks, folder: Path, checkpoint: str, closed: str, message: str) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/config.yaml").touch()
    opened(folder)
    mode = Path(closed).stat().st_mode
    Path(closed).chmod(0)
    ended = server.run("merge", "a", checkpoint, "--out", "out", folder=folder, uid=NOBODY)
    Path(closed).chmod(mode)  # so that pytest can remove it
    assert ended.code == FAILED
    assert ended.err.startswith(f"{checkpoint} cannot be read: [Errno 13] {message}"), ended.err
    assert len(ended.err.splitlines()) == 1
    assert not Path("out").exists()


def opened(folder: Path) -> None:
    """Let other users read a folder: pytest and safetensors make files for their owner alone."""
    folder.chmod(0o755)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def test_a_full_disk_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollmill.models.merge.save_file", full)
    assert main(["merge", "a", "b", "--out", "out"]) == FAILED
    assert "out: [Errno 28] No space left on device. Free some space" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c"]
