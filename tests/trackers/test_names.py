"""Names of TRL and verl beside rollmill's, for the same numbers; trackers whose package is missing are named."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny import tiny_run

from rollmill.cli import main
from rollmill.config.monitor import MonitorConfig
from rollmill.trackers.metric_names import add_names, other_names

METRICS = {
    "step": 3,
    "stage": "train",
    "reward/mean": 0.5,
    "reward/exact": 0.25,
    "reward/timeouts": 0.0,
    "reward/k12/physics": 1.0,
    "lr": None,
    "eval/pass@4": 0.75,
    "eval/hard/maj@8": 0.5,
    "eval/pass@4_low": 0.1,
}


def test_names_of_trl_and_verl_are_added() -> None:
    assert add_names(METRICS, "rollmill") == METRICS
    assert add_names(METRICS, "trl") == METRICS | {
        "train/global_step": 3,
        "train/reward": 0.5,
        "train/rewards/exact/mean": 0.25,
        "train/learning_rate": None,
    }
    assert add_names(METRICS, "verl") == METRICS | {
        "training/global_step": 3,
        "critic/score/mean": 0.5,
        "critic/rewards/mean": 0.5,
        "actor/lr": None,
        "val-core/test/acc/best@4/mean": 0.75,
        "val-core/hard/acc/maj@8/mean": 0.5,
    }


@pytest.mark.parametrize("names", ["trl", "verl"])
def test_no_name_of_another_framework_hides_one_of_ours(names: str) -> None:
    table = other_names(names)  # type: ignore[arg-type]
    theirs = [name for each in table.values() for name in each]
    assert len(theirs) == len(set(theirs))
    assert not set(theirs) & set(table)


def test_the_page_has_every_name() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/guide/trackers.md").read_text()
    for names in ("trl", "verl"):
        for ours, theirs in other_names(names).items():  # type: ignore[arg-type]
            assert f"| `{ours}` | {', '.join(f'`{name}`' for name in theirs)} |" in page, ours


def test_trl_has_the_names_that_are_said_to_be_its() -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs trl")
    files = [Path(spec.origin).parent / f"trainer/{name}_trainer.py" for name in ("grpo", "dpo")]
    source = "".join(file.read_text() for file in files)
    of_transformers = {"global_step", "loss", "grad_norm", "learning_rate"}
    pattern = {"rewards/NAME/mean": "rewards/{reward_func_name}/mean", "step_time": "step_time"}
    for each in other_names("trl").values():
        name = each[0].removeprefix("train/")
        assert name in of_transformers or f'"{pattern.get(name, name)}"' in source, name


def test_a_tracker_without_its_package_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("swanlab") is not None:
        pytest.skip("swanlab is installed here")
    run = tmp_path / "run.yaml"
    run.write_text(
        "name: tracked\nsteps: 1\nrollout: {max_new_tokens: 4}\nmonitor: {trackers: [swanlab]}\n"
        "model: {new: {hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, context: 64, tokenizer: {kind: char}}}\n"
        'taskset: {function: "rollmill.quickstart.addition:rows", options: {size: 4, seed: 1, digits: 2}}\n'
        "rewards: [{name: exact}]\n"
    )
    expected = (
        f"{run}: monitor.trackers.0 needs the library swanlab, which is not installed: pip install 'rollmill[swanlab]'"
    )
    assert main(["check", str(run)]) == 2
    assert expected in capsys.readouterr().err.replace("\n", " ")
    assert main(["run", str(run), "--out", str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err.replace("\n", " ")
    assert main(["check", str(run), "--no-data"]) == 0


def test_a_folder_is_not_taken_for_a_package(tmp_path: Path) -> None:
    """W&B leaves a folder of its name where it ran."""
    (tmp_path / "swanlab").mkdir()
    program = (
        "import sys, importlib.util; from rollmill.config.checks.extras import require_extras\n"
        "from rollmill.config.loader import load_run\n"
        "from pathlib import Path; run = load_run(Path(sys.argv[1]), require_files=False)\n"
        "sys.path = ['.'] + [each for each in sys.path if 'site-packages' not in each]; importlib.invalidate_caches()\n"
        "assert importlib.util.find_spec('swanlab') is not None\n"
        "require_extras(run, 'monitor')"
    )
    run = tiny_run(tmp_path, monitor={"trackers": ["swanlab"]})
    done = subprocess.run(
        [sys.executable, "-c", program, str(run)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "ConfigError" in done.stderr


def test_tensorboard_counts_as_a_tracker_once() -> None:
    config = MonitorConfig.model_validate({"trackers": ["tensorboard", "trackio"], "tensorboard": True})
    assert [each.name for each in config.all_trackers()] == ["tensorboard", "trackio"]
