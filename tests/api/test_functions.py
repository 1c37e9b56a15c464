"""The commands as functions: evaluating, grading, serving and resuming from Python."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_runs import ROWS, SMALL, few_letters

import rollmill
from rollmill.errors import ConfigError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> rollmill.TrainingRun:
    folder = tmp_path_factory.mktemp("api") / "run"
    settings = SMALL | {"eval_dataset": ROWS[:3], "steps": 2, "threads": 1}
    return rollmill.GRPO(**settings, rewards=[few_letters], out=folder).train()


@pytest.mark.slow
def test_a_run_is_evaluated_by_its_own_evaluation(trained: rollmill.TrainingRun) -> None:
    found = trained.evaluate()
    assert found["step"] == 2
    last = {key: value for key, value in trained.metrics[-1].items() if key in ("eval/greedy", "eval/sampled")}
    assert {key: found[key] for key in last} == last
    assert rollmill.evaluate(trained.folder, samples=2, greedy=False).keys() >= {"eval/sampled"}


@pytest.mark.slow
def test_any_model_is_evaluated_on_a_dataset(trained: rollmill.TrainingRun) -> None:
    short = lambda task, completion: float(len(completion.text) <= 6)  # noqa: E731
    found = rollmill.evaluate(trained.model_path, dataset=ROWS[:4], rewards=[short], samples=2, max_new_tokens=6)
    assert found["eval/sampled"] == found["eval/greedy"] == 1.0
    assert rollmill.evaluate(trained, dataset=ROWS[:2], rewards=[short], max_new_tokens=6)["step"] == 2
    with pytest.raises(ConfigError, match="needs `dataset` and `rewards`"):
        rollmill.evaluate(trained.model_path)
    with pytest.raises(ConfigError, match="no setting `sample`"):
        rollmill.evaluate(trained.model_path, dataset=ROWS, rewards=["exact"], sample=2)


@pytest.mark.slow
def test_a_loaded_model_is_evaluated_and_trained_on(trained: rollmill.TrainingRun, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trained.model_path)
    tokenizer = AutoTokenizer.from_pretrained(trained.model_path)
    run = rollmill.GRPO(**(SMALL | {"model": model}), tokenizer=tokenizer, rewards=["exact"], out=tmp_path / "run")
    saved = run.config.model.path
    assert isinstance(saved, Path)
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1  # others may read it as the umask says
    assert AutoModelForCausalLM.from_pretrained(saved).lm_head.weight.equal(model.lm_head.weight)
    again = rollmill.GRPO(**(SMALL | {"model": (model, tokenizer)}), rewards=["exact"], out=tmp_path / "run")
    assert again.config.model.path == saved
    with pytest.raises(ConfigError, match="a loaded model needs its tokenizer"):
        rollmill.GRPO(**(SMALL | {"model": model}), rewards=["exact"], out=tmp_path / "run")


def test_a_hub_that_is_away_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match="nobody/nothing does not exist here; as a name of the Hugging Face hub"
    ) as found:
        rollmill.GRPO(**(SMALL | {"model": "nobody/nothing"}), rewards=["exact"], out=tmp_path / "run")
    assert "\n" not in str(found.value)


def test_responses_are_graded() -> None:
    rows = [{"response": "7", "answer": "7", "length": 3}, {"response": "8", "answer": "7", "length": 3}]
    found = rollmill.grade(rows, ["exact", lambda task, completion: float(task.metadata["length"])])
    assert [each.reward for each in found] == [4.0, 3.0]
    assert found[0].parts == {"exact": 1.0, "reward_lambda": 3.0}

    async def cell() -> list[float | None]:
        return [each.reward for each in rollmill.grade(rows, ["exact"])]

    assert asyncio.run(cell()) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="row 1: has no `response`"):
        rollmill.grade([rows[0], {"answer": "7"}], ["exact"])


@pytest.mark.slow
def test_a_model_is_served_until_the_block_ends(trained: rollmill.TrainingRun) -> None:
    with rollmill.serve(trained, name="mine") as server:
        head = {"authorization": f"Bearer {server.key}"}
        assert httpx.get(f"{server.url}/models", headers=head).json()["data"][0]["id"] == "mine"
        body = {"model": "mine", "prompt": "3+1=", "max_tokens": 4}
        made = httpx.post(f"{server.url}/completions", json=body, headers=head, timeout=60).json()
        assert made["usage"]["completion_tokens"] <= 4
        assert httpx.get(f"{server.url}/models").status_code == 401
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/models", headers=head)
    server.stop()


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_resume(trained: rollmill.TrainingRun) -> None:
    steps = len(trained.metrics)
    assert len(rollmill.resume(trained.folder).metrics) == steps
    with pytest.raises(ConfigError, match="holds no run"):
        rollmill.resume(trained.folder / "inputs")


@pytest.mark.slow
def test_functions_of_trl_and_verl_are_rewards(tmp_path: Path) -> None:
    """Closures too, which are stored; both parts are in the metrics, with what they log."""
    wanted = 4

    def brief(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        kwargs["log_metric"]("letters", len(completions[0]))
        return [float(len(text) <= wanted) for text in completions]

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        return {"score": float(ground_truth in solution_str), "shown": 1.0}

    run = rollmill.GRPO(**SMALL, rewards=[brief, compute_score], steps=2, out=tmp_path / "run").train()
    for row in run.metrics:
        if "reward/mean" in row:
            assert row["reward/mean"] == pytest.approx(row["reward/brief"] + row["reward/compute_score"])
            assert row["reward/compute_score/shown"] == 1.0
            assert row["reward/brief/letters"] > 0
