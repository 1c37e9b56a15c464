"""What a run file may say beside algorithm `reward_model`, and of the reward `model`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.cli import main
from rollmill.config.loader import load_run

BASE = "model: {new: {hidden_size: 32}}\ntaskset: {path: pairs.jsonl}\n"
HELD_OUT = "evaluation: {taskset: {path: tasks.jsonl}}\nrewards: [{name: exact}]\n"
ROLLS = "rollout: {max_new_tokens: 8}\n"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(text: str, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    Path("run.yaml").write_text(text)
    assert main(["check", "run.yaml", *argv]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "algorithm: {name: reward_model}\n" + HELD_OUT,
            "run.yaml:4: evaluation: not honoured by algorithm `reward_model`, which changes no policy; the metric",
        ),
        (
            "algorithm: {name: reward_model}\nrewards: [{name: exact}]\n",
            "run.yaml:4: rewards: not honoured: algorithm `reward_model` learns from preference pairs",
        ),
        (
            "algorithm: {name: reward_model}\ntrainer: {logprob_chunk: 8}\n",
            "run.yaml:4: trainer.logprob_chunk: not honoured by algorithm `reward_model`, which needs no log-probs",
        ),
        (
            "stages: [{name: a, algorithm: {name: reward_model}}, {name: b, algorithm: {name: sft}}]\n",
            "stages.0.algorithm: algorithm `reward_model` changes no policy, and checkpoints of later stages do not",
        ),
        ("algorithm: {name: reward_model, margin: -1}\n", "algorithm.margin: "),
        ("algorithm: {name: reward_model, beta: 1}\n", "run.yaml:3: algorithm.beta: "),
    ],
)
def test_what_a_reward_model_does_not_honour(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(BASE + text, capsys, "--no-data")


def test_lora_is_not_for_reward_models(capsys: pytest.CaptureFixture[str]) -> None:
    text = "model: {path: folder, lora: {rank: 4}}\ntaskset: {path: pairs.jsonl}\nalgorithm: {name: reward_model}\n"
    message = "model.lora: algorithm `reward_model` trains all weights of a model of its own; remove this"
    assert message in refused(text, capsys, "--no-data")


def test_an_evaluation_of_the_whole_file_serves_the_stages_before() -> None:
    stages = "stages: [{name: a, algorithm: {name: sft}}, {name: b, algorithm: {name: reward_model}}]\n"
    Path("run.yaml").write_text(BASE + HELD_OUT + ROLLS + stages)
    first, last = load_run(Path("run.yaml"), require_files=False).stages
    assert first.evaluation is not None
    assert last.evaluation is None


def test_the_path_of_a_reward_model_is_settled() -> None:
    Path("models/judge").mkdir(parents=True)
    Path("pairs.jsonl").touch()
    Path("models/run.yaml").write_text(BASE + "rewards: [{name: exact}, {name: model, path: judge}]\n")
    reward = load_run(Path("models/run.yaml")).stages[0].rewards[1]
    assert reward.path == Path.cwd() / "models/judge"  # type: ignore[union-attr]


def test_a_missing_reward_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pairs.jsonl").touch()
    found = refused(BASE + "rewards: [{name: model, path: judge}]\n", capsys)
    assert "run.yaml:3: rewards.0.path: judge does not exist (looked in" in found
    assert "give the folder of a reward model on this machine, or `hf://ORG/NAME` for one of the hub" in found
