"""The section `pipeline`: shorthands, paths, what is refused and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.config.loader import LoadedRun, load_run
from rollmill.errors import ConfigError
from rollmill.pipelines.builtin.verification import CheckOperator, VerifyOperator

RUN = """\
model: {new: {hidden_size: 32}}
taskset: {path: tasks.jsonl}
rewards: [{name: math, weight: 0.5}, {name: format, pattern: a}]
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str, required: bool = False) -> LoadedRun:
    Path("run.yaml").write_text(RUN + text)
    return load_run(Path("run.yaml"), overrides, require_files=required)


def test_a_name_alone_and_what_a_resolved_file_says_are_the_same() -> None:
    loaded = load(
        "pipeline: [invalid_reward, {name: verify, rewards: [{name: exact}], part: math, weight: 0.5}, pairs, "
        "{name: test_cases, code: {name: code, time_limit_s: 2}}, "
        "{name: data_juicer, process: [{text_length_filter: {min_len: 2}}]}]\n"
    )
    first = [each.model_dump() for each in loaded.stages[0].pipeline]
    Path("again.yaml").write_text(loaded.to_yaml())
    again = load_run(Path("again.yaml"), require_files=False)
    assert [each.model_dump() for each in again.stages[0].pipeline] == first
    assert [each["name"] for each in first] == ["invalid_reward", "verify", "pairs", "test_cases", "data_juicer"]


def test_set_reaches_into_an_operator_and_its_rewards() -> None:
    text = "pipeline: [{name: reward_filter, at_least: 0}, {name: verify, rewards: [{name: exact}]}]\n"
    filtered, verify = (
        load(text, "pipeline.0.at_least=0.5", "pipeline.1.rewards.0.after=is", "pipeline.1.share=0.2")
        .stages[0]
        .pipeline
    )
    assert filtered.model_dump()["at_least"] == 0.5
    assert isinstance(verify, VerifyOperator)
    assert (verify.share, verify.rewards[0].model_dump()["after"]) == (0.2, "is")


def test_paths_inside_operators_are_settled_like_those_of_rewards(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text("def right(task, completion):\n    return 1.0\n")
    (tmp_path / "lib" / "base.yaml").write_text(
        RUN + "pipeline:\n  - {name: verify, rewards: [{name: python, function: 'mine.py:right'}]}\n"
        "  - {name: check, reward: {name: python, function: 'mine.py:right'}}\n"
    )
    Path("run.yaml").write_text("include: lib/base.yaml\n")
    verify, check = load_run(Path("run.yaml"), require_files=False).stages[0].pipeline
    assert isinstance(verify, VerifyOperator)
    assert isinstance(check, CheckOperator)
    for reward in (verify.rewards[0], check.reward):
        assert reward.model_dump()["function"] == f"{tmp_path}/lib/mine.py:right"


def test_stages_have_pipelines_of_their_own() -> None:
    stages = "stages: [{name: a, pipeline: [truncated]}, {name: b, pipeline: []}]\n"
    assert [len(stage.pipeline) for stage in load(stages).stages] == [1, 0]


WRONG = {
    "a name that is none": (
        "[{name: reward_fliter, at_least: 1}]",
        "pipeline.0.name: `reward_fliter` is not known; did you mean `reward_filter`?",
    ),
    "a name alone that is none": ("[truncate]", "pipeline.0.name: `truncate` is not known; did you mean `truncated`?"),
    "no name": ("[{at_least: 1}]", "pipeline.0.name: is required"),
    "a key of another operator": (
        "[{name: pairs, within: run}]",
        "pipeline.0.within: `within` is honoured by operator `duplicates` and `near_duplicates`, not by `pairs`",
    ),
    "a typo": ("[{name: reward_filter, at_lest: 1}]", "pipeline.0.at_lest: unknown key; did you mean `at_least`?"),
    "bounds in the wrong order": (
        "[{name: length_filter, at_least: 5, at_most: 3}]",
        "pipeline.0: at_least (5) is above at_most (3)",
    ),
    "no bounds": ("[reward_filter]", "pipeline.0: give at_least, at_most or both"),
    "a key without effect": (
        "[{name: pairs, longer: 2.0}]",
        "pipeline.0: longer is honoured with by: length; remove it",
    ),
    "a threshold without effect": (
        "[{name: pairs, threshold: 0.5}]",
        "pipeline.0: threshold is honoured with by: length",
    ),
    "a penalty without effect": (
        "[{name: verify, rewards: [{name: exact}], penalty: 2}]",
        "pipeline.0: penalty is honoured with otherwise: penalty",
    ),
    "a memory without effect": (
        "[{name: duplicates, memory: 5}]",
        "pipeline.0: memory is honoured with within: task and within: run; remove it",
    ),
    "a part without effect": (
        "[{name: priority, by: length, part: math}]",
        "pipeline.0: part is honoured by those that look at rewards, not by: length; remove it",
    ),
    "slow programs that would be dropped": (
        "[invalid_reward]\nstages: [{name: a, rewards: [{name: code}]}]",
        "pipeline.0.outcomes: `timeout` of the reward `code` says that a program was too slow",
    ),
    "no rewards": ("[{name: verify}]", "pipeline.0.rewards: is required"),
    "an unknown reward inside": (
        "[{name: verify, rewards: [{name: exakt}]}]",
        "pipeline.0.rewards.0.name: `exakt` is not known; did you mean `exact`?",
    ),
    "a typo inside": ("[{name: verify, rewards: [{name: exact, stripp: true}]}]", "pipeline.0.rewards.0.stripp: "),
    "a wrong pattern inside": (
        "[{name: check, reward: {name: format, pattern: '('}}]",
        "pipeline.0.reward.pattern: not a regular expression",
    ),
    "a function inside": (
        "[{name: verify, rewards: [{name: python, function: 'a b'}]}]",
        "pipeline.0.rewards.0.function: expected FILE.py:NAME",
    ),
    "a weight inside a check": (
        "[{name: check, reward: {name: exact, weight: 2}}]",
        "pipeline.0: reward.weight is not honoured here",
    ),
    "a part that is none": (
        "[{name: reward_filter, at_least: 1, part: maths}]",
        "pipeline.0.part: no reward `maths`; there are math, format",
    ),
    "another weight": (
        "[{name: verify, part: math, rewards: [{name: exact}]}]",
        "pipeline.0.weight: reward `math` has weight 0.5, and `verify` would take it for 1; give weight: 0.5",
    ),
    "nothing to compare": (
        "[group_variance]\nrollout: {group_size: 1}\nalgorithm: {name: reinforce}",
        "pipeline.0.name: `group_variance` compares the completions of a group",
    ),
    "one completion to tell apart": (
        "[diversity]\nrollout: {group_size: 1}\nalgorithm: {name: reinforce}",
        "pipeline.0.name: `diversity` compares the completions of a group",
    ),
    "duplicates of one completion": (
        "[duplicates]\nrollout: {group_size: 1}\nalgorithm: {name: reinforce}",
        "pipeline.0.name: `duplicates` compares the completions of a group",
    ),
    "a weight inside test_cases": (
        "[{name: test_cases, code: {name: code, weight: 0.5}}]",
        "pipeline.0: code.weight is not honoured here: tests are passed or failed; remove it",
    ),
    "a part that does not count yet": (
        "[{name: verify, part: format, rewards: [{name: exact}]}]\n"
        "stages: [{name: a, rewards: [{name: exact}, {name: format, pattern: a, after_steps: 9}]}]",
        "pipeline.0.part: reward `format` counts after 9 steps",
    ),
    "a rate of what a check leaves": (
        "[{name: check, reward: {name: exact}}, success_rate]",
        "pipeline.1.name: `check` comes first",
    ),
    "priorities that nobody reads": ("[priority]", "pipeline.0.name: priorities matter only with buffer.replay"),
    "a rate of what is left": (
        "[{name: reward_filter, at_least: 1}, success_rate]",
        "pipeline.1.name: `reward_filter` comes first",
    ),
    "the same penalty twice": (
        "[overlong_penalty]\nalgorithm: {name: dapo, overlong_buffer: 4}",
        "pipeline.0.name: algorithm.overlong_buffer takes the same penalty off",
    ),
    "a buffer beyond the limit": (
        "[{name: overlong_penalty, buffer: 64}]\nrollout: {max_new_tokens: 32}",
        "pipeline.0.buffer: 64 is above rollout.max_new_tokens (32)",
    ),
    "parts that no longer add up": (
        "[{name: scale, factor: 2}]\nalgorithm: {name: gdpo}",
        "pipeline.0.name: advantage `gdpo` sees the parts of the reward",
    ),
    "a sum that gdpo does not see": (
        "[{name: verify, rewards: [{name: exact}]}]\nalgorithm: {name: gdpo}",
        "and `verify` changes their sum; say which part",
    ),
    "a baseline out of reach": (
        "[length_reward]\nalgorithm: {name: remax}",
        "pipeline.0.name: advantage `remax` compares with a greedy completion",
    ),
    "nothing rolled out": (
        "[truncated]\nalgorithm: {name: sft}",
        "pipeline: not honoured: algorithm `sft` learns from worked solutions",
    ),
    "two operators of Data-Juicer in one": (
        "[{name: data_juicer, process: [{a: {}, b: {}}]}]",
        "pipeline.0: each entry of process is one operator",
    ),
    "a path that is missing": (
        "[{name: verify, rewards: [{name: model, path: nowhere}]}]",
        "pipeline.0.rewards.0.path: nowhere does not exist",
    ),
    "a judge that is slower than the deadline": (
        "[{name: verify, rewards: [{name: judge, endpoint: 'http://localhost:1/v1', model: m, deadline_s: 400}]}]",
        "reward_settings.deadline_s (300) is not above",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_mistakes_are_named(case: str) -> None:
    text, message = WRONG[case]
    Path("tasks.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as caught:
        load(f"pipeline: {text}\n", required=True)
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.yaml:")
