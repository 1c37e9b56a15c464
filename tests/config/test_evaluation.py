"""The section `evaluation`: one set, several, and what nothing honours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import HELD_OUT, tiny_run

from rollmill.config.loader import load_evaluation_run, load_run
from rollmill.errors import ConfigError

SET = {"taskset": HELD_OUT, "samples": 4, "k": [1, 4]}


def loaded(folder: Path, evaluation: dict[str, Any], **changes: Any) -> Any:
    path = tiny_run(folder, evaluation=None, **changes)
    run = yaml.safe_load(path.read_text()) | {"evaluation": evaluation}
    path.write_text(yaml.safe_dump(run))
    return load_run(path)


def test_a_set_takes_from_the_stage_what_it_leaves_out(tmp_path: Path) -> None:
    own = {**SET, "sampling": {"temperature": 0.5}, "rewards": [{"name": "format", "pattern": "1"}]}
    stage = loaded(tmp_path, {"sets": {"own": own, "plain": SET}}).stages[1]
    sets = stage.evaluation.all_sets()
    assert list(sets) == ["own", "plain"]
    asked = stage.for_evaluation(sets["own"])
    assert (asked.rollout.temperature, asked.rollout.max_new_tokens) == (0.5, 16)
    assert [each.name for each in asked.rewards] == ["format"]
    assert stage.for_evaluation(sets["plain"]).rewards == stage.rewards
    assert stage.evaluation.watched()[:4] == [
        "eval/own/sampled",
        "eval/own/greedy",
        "eval/own/pass@1",
        "eval/own/pass@4",
    ]


def test_what_check_prints_loads_again(tmp_path: Path) -> None:
    sets = {"own": {**SET, "answer": "text", "sampling": {"top_k": 3}}}
    first = loaded(tmp_path, {"taskset": HELD_OUT, "every": 3, "sets": sets})
    (tmp_path / "again.yaml").write_text(first.to_yaml())
    assert load_run(tmp_path / "again.yaml").stages == first.stages


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"every": 3}, "evaluation.taskset: which tasks"),
        ({"sets": {"a": {**SET, "k": [8]}}}, "evaluation.sets.a.k: pass@8 needs at least 8 samples, and there are 4"),
        ({"sets": {"a": {**SET, "k": [], "answer": "boxed"}}}, "evaluation.sets.a.answer: not honoured without k"),
        ({"sets": {"a": SET}, "samples": 2}, "evaluation.samples: not honoured without evaluation.taskset"),
        ({"sets": {"a/b": SET}}, "evaluation.sets.a/b: expected letters"),
        ({"sets": {"a": {"samples": 2}}}, "evaluation.sets.a.taskset: is required"),
        ({"sets": {"a": {**SET, "temperature": 2}}}, "evaluation.sets.a.temperature: unknown key"),
        (
            {"sets": {"a": {**SET, "workflow": "environment"}}},
            "sets.a.workflow: workflow `environment` acts",
        ),
        ({"sets": {"a": {**SET, "environment": "gymnasium"}}}, "evaluation.sets.a.environment: not honoured"),
        ({"sets": {"a": {**SET, "rewards": []}}}, "evaluation.sets.a.rewards: an evaluation needs at least one reward"),
        (
            {"sets": {"a": {**SET, "sampling": {"temperature": 0}}}},
            "sets.a.sampling.temperature: evaluation.",
        ),
        (
            {"sets": {"a": {"taskset": HELD_OUT | {"sampler": "sequential"}}}},
            "sets.a.taskset.sampler: not honoured",
        ),
        (
            {"sets": {"a": {"taskset": HELD_OUT, "samples": 0, "sampling": {"top_p": 0.9}}}},
            "evaluation.sets.a.sampling.top_p: not honoured with samples: 0",
        ),
        ({"taskset": HELD_OUT, "samples": 2, "k": [4]}, "evaluation.k: pass@4 needs at least 4 samples"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, evaluation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, evaluation)
    assert message in str(caught.value)


def test_metrics_are_gone_by_only_where_they_are_measured(tmp_path: Path) -> None:
    sets = {"sets": {"a": SET}}
    loaded(
        tmp_path,
        sets,
        early_stop={"metric": "eval/a/pass@4", "at_least": 0.5},
        checkpoint={"keep_best": "eval/a/greedy"},
    )
    with pytest.raises(ConfigError, match=r"no evaluation measures `eval/a/pass@2`; did you mean `eval/a/pass@"):
        loaded(tmp_path, sets, early_stop={"metric": "eval/a/pass@2", "at_least": 0.5})
    with pytest.raises(ConfigError, match=r"checkpoint.keep_best: no evaluation measures `eval/b/greedy`"):
        loaded(tmp_path, sets, checkpoint={"keep_best": "eval/b/greedy"})


def test_paths_of_sets_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"evaluation.sets.a.taskset.path: there.jsonl does not exist"):
        loaded(tmp_path, {"sets": {"a": {"taskset": {"path": "there.jsonl"}}}})


def test_a_file_with_nothing_but_an_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(yaml.safe_dump({"rewards": [{"name": "exact"}], "evaluation": {"sets": {"a": SET}}}))
    assert list(load_evaluation_run(path).stages[0].evaluation.all_sets()) == ["a"]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="which model"):
        load_run(path)
    path.write_text(yaml.safe_dump({"evaluation": {"sets": {"a": SET}}}))
    with pytest.raises(ConfigError, match="needs at least one reward"):
        load_evaluation_run(path)
