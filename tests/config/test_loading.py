"""What a run file means: values, variables, includes, overrides, paths and stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.loader import LoadedRun, apply_override, load_run
from rollmill.config.tree import ConfigProblem, merge_trees, to_plain_data
from rollmill.config.yaml_file import read_yaml, write_yaml

GOOD = """\
model: {new: {hidden_size: 32}}
taskset: {path: tasks.jsonl, preset: gsm8k}
rewards: [{name: math}, {name: format, pattern: '#### .*', weight: 0.5}]
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str, name: str = "run.yaml", require_files: bool = False) -> LoadedRun:
    Path(name).write_text(text, encoding="utf-8")
    return load_run(Path(name), overrides, require_files=require_files)


def test_single_stage_is_called_train() -> None:
    run = load(GOOD + "name: mine\nsteps: 7")
    assert (run.config.name, run.out) == ("mine", Path("runs/mine"))
    assert [(stage.name, stage.steps) for stage in run.stages] == [("train", 7)]
    assert run.stages[0].algorithm.name == "grpo"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("2.5e-3", 0.0025),
        ("-.5", -0.5),
        ("3", 3),
        ("0x10", 16),
        ("1:30", "1:30"),
        ("010", "010"),
        ("2024-01-01", "2024-01-01"),
        ("yes", "yes"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("1e", "1e"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    Path("a.yaml").write_text(f"key: {text}\n", encoding="utf-8")
    read = to_plain_data(read_yaml(Path("a.yaml"), []))["key"]
    assert read == value
    assert type(read) is type(value)


whole_numbers = st.integers(1 - 2**63, 2**63 - 1)  # larger ones are refused
scalars = (
    st.none()
    | st.booleans()
    | whole_numbers
    | st.floats(allow_nan=False)
    | st.text("ab1: #'\"{}[]-~.e\n", max_size=8)
    | st.sampled_from(["1e-4", "1:30", "yes", "null", "<<", "010", ".5", "1_0"])
)
documents = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xy"), inner, max_size=3)
    ),
    max_size=4,
)


@given(document=documents)
def test_what_we_write_we_read(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("yaml") / "a.yaml"
    file.write_text(write_yaml(document), encoding="utf-8")
    problems: list[ConfigProblem] = []
    assert to_plain_data(read_yaml(file, problems)) == document
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == document
    assert problems == []


@given(base=documents, top=documents)
def test_overlay_keeps_what_top_does_not_mention(
    base: dict[str, Any], top: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("yaml")
    trees = []
    for name, document in (("base", base), ("top", top)):
        (folder / name).write_text(write_yaml(document), encoding="utf-8")
        trees.append(read_yaml(folder / name, []))
    merged = to_plain_data(merge_trees(*trees))
    assert set(merged) == set(base) | set(top)
    for key, value in merged.items():
        if key not in top:
            assert value == base[key]
        elif not isinstance(top[key], dict) or not isinstance(base.get(key), dict):
            assert value == top[key]


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_T", "7")
    run = load(
        GOOD + "name: run-${env:ROLLMILL_T}-${env:ROLLMILL_NO:x}\nsteps: ${env:ROLLMILL_T}\nseed: ${env:ROLLMILL_NO:3}"
    )
    assert (run.config.name, run.stages[0].steps, run.config.seed) == ("run-7-x", 7, 3)


def test_anchors_and_merge_keys() -> None:
    Path("a.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: [{x: 5}, *a]}\n", encoding="utf-8")
    read = to_plain_data(read_yaml(Path("a.yaml"), []))
    assert (read["b"], read["c"]) == ({"x": 1, "y": 3}, {"x": 5, "y": 2})


def test_includes_lie_below_the_including_file() -> None:
    Path("parts").mkdir()
    Path("parts/deep.yaml").write_text("seed: 1\nsteps: 1\nname: deep\n", encoding="utf-8")
    Path("parts/base.yaml").write_text(
        "include: deep.yaml\nsteps: 2\ntrainer: {lr: 1e-3, eps: 1e-6}\n", encoding="utf-8"
    )
    Path("parts/more.yaml").write_text("trainer: {lr: 2e-3}\nrollout: {stop: [a, b]}\n", encoding="utf-8")
    run = load(GOOD + "include: [parts/base.yaml, parts/more.yaml]\nname: top\nrollout: {stop: [c]}")
    stage = run.stages[0]
    assert (run.config.name, run.config.seed, stage.steps) == ("top", 1, 2)
    assert (stage.trainer.lr, stage.trainer.eps, stage.rollout.stop) == (2e-3, 1e-6, ["c"])


def test_overrides() -> None:
    run = load(
        GOOD + "stages: [{name: a, steps: 1}, {name: b, steps: 2}]",
        "stages.1.steps=9",
        "rewards.1.weight=2",
        "rewards.1.pattern=####",
        "trainer.lr=1e-4",
        "taskset.template=Question: {question} # think",
        "rollout.stop=['Question:', \"\\n\"]",
        "trainer.lr=2e-4",
    )
    last = run.stages[1]
    assert (last.steps, last.trainer.lr) == (9, 2e-4)
    assert (last.rewards[1].weight, last.rewards[1].pattern) == (2, "####")  # type: ignore[union-attr]
    assert last.taskset.template == "Question: {question} # think"
    assert last.rollout.stop == ["Question:", "\n"]


@given(
    document=documents,
    value=whole_numbers,
    keys=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_override_changes_that_value_only(
    document: dict[str, Any], value: int, keys: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("yaml") / "a.yaml"
    file.write_text(write_yaml(document), encoding="utf-8")
    root, problems = read_yaml(file, []), list[ConfigProblem]()
    changed = apply_override(root, f"{'.'.join(keys)}={value}", file.parent, problems)
    assert to_plain_data(root) == document, "the tree itself is never changed"
    if problems:
        assert to_plain_data(changed) == document
        return
    expected: Any = document
    for key in keys[:-1]:
        expected[key] = expected[key] if expected.get(key) is not None else {}
        expected = expected[key]
    expected[keys[-1]] = value
    assert to_plain_data(changed) == document


def test_paths_are_found_here_then_beside_the_run_file() -> None:
    Path("conf/data").mkdir(parents=True)
    Path("data").mkdir()
    for file in ("data/here.jsonl", "conf/data/here.jsonl", "conf/data/there.jsonl", "conf/score.py"):
        Path(file).touch()
    text = GOOD.replace("tasks.jsonl", "data/here.jsonl").replace("name: math", "name: python, function: 'score.py:f'")
    run = load(
        text + "evaluation: {taskset: {path: data/there.jsonl}}\nplugins: [score.py]",
        name="conf/run.yaml",
        require_files=True,
    )
    stage = run.stages[0]
    assert stage.taskset.path == Path("data/here.jsonl").absolute()
    assert stage.evaluation is not None
    assert stage.evaluation.taskset.path == Path("conf/data/there.jsonl").absolute()
    assert run.config.plugins == [Path("conf/score.py").absolute()]
    assert stage.rewards[0].function == f"{Path('conf/score.py').absolute()}:f"  # type: ignore[union-attr]


def test_stages_are_the_file_overlaid_with_their_own_keys() -> None:
    run = load(
        GOOD
        + """\
trainer: {lr: 1e-3, weight_decay: 0.1}
rollout: {group_size: 4}
algorithm: {name: grpo, kl: 0.1}
evaluation: {taskset: {path: test.jsonl, preset: gsm8k}, every: 5}
stages:
  - {name: warm, steps: 3, algorithm: {name: sft}, trainer: {lr: 1e-2}, taskset: {path: other.jsonl}}
  - {name: rl, taskset: {limit: 9}, algorithm: {entropy: 0.01}, evaluation: {every: 2}}
  - {name: last, rewards: [{name: exact}], evaluation: null}
"""
    )
    warm, rl, last = run.stages
    assert (warm.trainer.lr, warm.trainer.weight_decay, rl.trainer.lr) == (1e-2, 0.1, 1e-3)
    assert warm.algorithm.model_dump() == {"name": "sft", "batch": 32, "aggregation": "token-mean"}
    assert (warm.taskset.path, warm.taskset.preset) == (Path("other.jsonl"), None), (
        "another source brings its own layout"
    )
    assert (rl.taskset.path, rl.taskset.preset, rl.taskset.limit) == (Path("tasks.jsonl"), "gsm8k", 9)
    assert (rl.algorithm.kl.coefficient, rl.algorithm.entropy) == (0.1, 0.01)  # type: ignore[union-attr]
    assert warm.evaluation is not None
    assert rl.evaluation is not None
    assert (warm.evaluation.every, rl.evaluation.every, last.evaluation) == (5, 2, None)
    assert [reward.name for reward in last.rewards] == ["exact"]


def test_every_stage_may_bring_its_own_taskset() -> None:
    text = GOOD.replace("taskset: {path: tasks.jsonl, preset: gsm8k}\n", "")
    run = load(text + "stages: [{name: a, taskset: {path: a.csv}}, {name: b, taskset: {generator: {name: chain_sum}}}]")
    assert [stage.taskset.path for stage in run.stages] == [Path("a.csv"), None]


def test_model_recipe_stands_by_when_a_checkpoint_is_given() -> None:
    Path("checkpoint").mkdir()
    run = load(GOOD, "model.path=checkpoint")
    assert run.config.model.path == Path("checkpoint").absolute()
    assert run.config.model.new is not None


def test_empty_override_is_null() -> None:
    assert load(GOOD + "evaluation: {taskset: {path: t.csv}}", "evaluation=").stages[0].evaluation is None


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "steps: 3\nseed: 4\ntrainer: {schedule: linear, min_lr_ratio: 0.1}\n",
        "algorithm: {name: sft}\nevaluation: {taskset: {path: t.jsonl}}\n",
        "rollout: {batch: 2}\nstages:\n- {name: a, algorithm: {name: sft}}\n- {name: b, algorithm: {name: mix}}\n",
        "algorithm: {name: grpo, advantage: {scale: none}}\nevaluation: {taskset: {path: t.jsonl}, samples: 0}\n"
        "early_stop: {metric: eval/greedy, patience: 2}\n",
    ],
)
def test_resolved_run_loads_to_the_same_run(extra: str) -> None:
    run = load(GOOD + extra)
    again = load(run.to_yaml(), name="resolved.yaml")
    assert again.stages == run.stages
    assert again.resolved() == run.resolved()
    assert again.config.model_dump(exclude={"stages"}) == run.config.model_dump(exclude={"stages"})
