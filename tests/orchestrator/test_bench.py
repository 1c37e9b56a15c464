"""`rollmill bench`: checkpoints and models on several sets, gone on with, compared."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.tiny import GRPO, HELD_OUT, tiny_run

import rollmill
from rollmill.cli import main
from rollmill.errors import CheckpointError
from rollmill.orchestrator import bench as module
from rollmill.orchestrator.eval_targets import find_eval_targets

EVALUATION = {
    "taskset": None,
    "every": 2,
    "sets": {
        "plain": {"taskset": HELD_OUT, "samples": 2},
        "voted": {"taskset": HELD_OUT, "samples": 4, "k": [1, 4], "answer": "text", "greedy": False},
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    path = tiny_run(
        folder, evaluation=EVALUATION, stages=[GRPO | {"steps": 6}], checkpoint={"every": 2, "keep_last": 9}
    )
    rollmill.run(path, [], folder / "run")
    return folder / "run"


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["bench", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_it_finds_what_the_run_found(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, str(run), "--step", "all", "--out", str(tmp_path / "out"))
    assert {each["subject"] for each in found["results"]} == {"run@2", "run@4", "run@6"}
    for step in (2, 4, 6):
        metrics = json.loads((run / "evaluations" / f"step-{step:06d}.json").read_text())["metrics"]
        own = [each for each in found["results"] if each["step"] == step]
        assert len(own) == 7  # greedy and sampled; sampled, pass@1, pass@4, maj@1, maj@4
        for each in own:
            assert each["value"] == metrics[f"eval/{each['set']}/{each['measure']}"]
    assert main(["bench", str(run), "--step", "2,6", "--out", str(tmp_path / "out")]) == 0
    table = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert ["model", "set", "greedy", "sampled", "pass@1", "maj@1", "pass@4", "maj@4"] in table
    assert ["plain", "sampled", "run@2 -> run@6"] in [row[:3] for row in table]


@pytest.mark.slow
def test_it_goes_on_where_it_was_interrupted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [str(run), "--step", "2,6", "--out", str(tmp_path / "out")]
    whole = bench(capsys, *argv)
    [gone] = [path for path in (tmp_path / "out/cells").rglob("voted.set.json") if "run@6" in str(path)]
    gone.unlink()
    seen = []
    evaluated = module._evaluate
    monkeypatch.setattr(
        module, "_evaluate", lambda *args: seen.append((args[2].label, list(args[5]))) or evaluated(*args)
    )
    assert bench(capsys, *argv) == whole
    assert seen == [("run@6", ["voted"])]
    bench(capsys, *argv, "--samples", "6")  # other settings are other numbers
    assert [name for name, _ in seen[1:]] == ["run@2", "run@6"]


def test_models_are_compared_on_the_same_tasks(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "eval.yaml"
    settings = yaml.safe_load((run / "config.yaml").read_text())
    kept = {key: settings["stages"][0][key] for key in ("rewards", "evaluation")} if "stages" in settings else settings
    config.write_text(
        yaml.safe_dump({**{key: kept[key] for key in ("rewards", "evaluation")}, "rollout": {"max_new_tokens": 16}})
    )
    model = run / "checkpoints/step-000006"
    out = tmp_path / "out"
    found = bench(capsys, str(model), str(run), "--config", str(config), "--step", "2", "--k", "1,2", "--out", str(out))
    assert {each["subject"] for each in found["results"]} == {"step-000006", "run@2"}
    assert {each["measure"] for each in found["results"] if each["set"] == "plain"} == {
        "greedy",
        "sampled",
        "pass@1",
        "pass@2",
    }
    values = {(each["subject"], each["set"], each["measure"]): each["value"] for each in found["results"]}
    for each in found["comparisons"]:
        assert (each["one"], each["other"], each["tasks"]) == ("step-000006", "run@2", 6)
        key = each["set"], each["measure"]
        assert each["difference"] == pytest.approx(values["run@2", *key] - values["step-000006", *key])
        assert each["low"] <= each["difference"] <= each["high"]
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert len(rows) == len(found["results"])
    page = (out / "bench.html").read_text()
    assert page.count("<circle") == len(found["results"])
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_changed_tasks_are_other_results(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is stored is of the tasks as they were, wherever their file stands."""
    tasks, config, out = tmp_path / "tasks.jsonl", tmp_path / "eval.yaml", str(tmp_path / "out")
    section = {"taskset": {"path": str(tasks)}, "samples": 2, "threshold": 0}
    rewards = [{"name": "exact"}]
    config.write_text(yaml.safe_dump({"rewards": rewards, "evaluation": section, "rollout": {"max_new_tokens": 4}}))
    counts = []
    for rows in (3, 3, 5):
        tasks.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(rows)))
        found = bench(capsys, str(run), "--config", str(config), "--out", out)
        counts.append({each["tasks"] for each in found["results"]})
    assert counts == [{3}, {3}, {5}]


def test_worked_examples_of_the_training_tasks_are_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = 'evaluation.sets.plain.workflow={"name": "few_shot", "count": 1}'
    found = bench(capsys, str(run), "--set", flow, "--set", "rollout.max_new_tokens=4", "--out", str(tmp_path / "out"))
    assert {each["set"] for each in found["results"]} == {"plain", "voted"}


def test_the_best_checkpoint_of_a_run_that_is_going_on(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "going"
    shutil.copytree(run, copied)
    (copied / "summary.json").unlink()
    state = copied / "checkpoints/step-000006/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"best_step": 4}))
    [found] = find_eval_targets([copied], "best")
    assert found.step == 4


def test_a_checkpoint_that_is_gone_or_broken_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    [gone] = find_eval_targets([copied], "4")
    shutil.rmtree(copied / "checkpoints/step-000004")
    with pytest.raises(CheckpointError, match=r"copied@4: .*step-000004 is not there any more"):
        gone.load(0, torch.device("cpu"))
    (copied / "checkpoints/step-000002/model.safetensors").write_bytes(b"broken")
    assert main(["bench", str(copied), "--step", "2", "--out", str(tmp_path / "out")]) == 1
    assert "step-000002 is damaged: model.safetensors has 6 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["nowhere"], 2, "nowhere is no folder with a run (config.yaml) nor a model"),
        (["RUN", "--step", "5"], 1, "has no checkpoint of step 5; it has: 2, 4, 6"),
        (["RUN", "--step", "newest"], 2, "expected last, best, all, or numbers"),
        (["RUN", "--k", "8"], 2, "pass@8 of plain needs --samples 8 at least, not 2"),
        (["RUN", "--k", "no"], 2, "expected numbers of samples"),
        (["RUN", "RUN"], 2, "is there twice"),
        (["RUN", "--set", 'models={"other": {"policy": "initial"}}', "--set", "workflow=vote"], 2, "models.other"),
        (
            [
                *("RUN", "--set", "evaluation.sets.plain.samples=0", "--set", "rollout.temperature=0"),
                *("--set", "evaluation.sets.voted.sampling.temperature=1", "--samples", "4"),
            ],
            2,
            "evaluation.sets.plain.samples are sampled at this temperature",
        ),
        (["RUN/checkpoints/step-000002"], 2, "give --config FILE with an `evaluation`"),
    ],
)
def test_wrong_input(
    run: Path, argv: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [each.replace("RUN", str(run)) for each in argv]
    assert main(["bench", *argv, "--out", str(tmp_path / "out")]) == code
    assert message in capsys.readouterr().err
