"""Published files, each through its preset: every reference is accepted as models write it, shuffled ones are not."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.reward_helpers import completion

from rollmill.config.taskset import TasksetConfig
from rollmill.data.taskset import load_taskset
from rollmill.rewards import RewardManager, build_reward_manager
from rollmill.rewards.builtin.k12 import K12Reward
from rollmill.types import Task
from rollmill_grading.normalization import comparison_key

LAYOUTS = {
    "cmath": ("cmath", 600),
    "cn_middle_school": ("cn_middle_school", 101),
    "gaokao_math_cloze": ("gaokao_cloze", 118),
    "gaokao_math_qa": ("gaokao_qa", 351),
    "mmlu_stem": ("mmlu", 3018),
}
"""File -> preset, rows."""


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardManager]:
    with build_reward_manager([K12Reward(name="k12", time_limit_s=10)]) as judge:
        yield judge


def tasks_of(data_dir: Path, name: str) -> list[Task]:
    preset, rows = LAYOUTS[name]
    taskset = load_taskset(TasksetConfig.model_validate({"path": data_dir / "k12" / f"{name}.jsonl", "preset": preset}))
    assert (len(taskset.tasks), taskset.rejected) == (rows, [])
    return taskset.tasks


def rewards(judge: RewardManager, pairs: list[tuple[Task, str]]) -> list[float | None]:
    async def all_of_them() -> list[float | None]:
        return [(await judge.score(task, completion(text))).reward for task, text in pairs]

    return asyncio.run(all_of_them())


def shown(task: Task) -> str:
    return "; ".join(task.answer) if isinstance(task.answer, list) else str(task.answer)


def formulations(task: Task) -> list[str]:
    """The reference as models of both languages write it."""
    column, answer = task.metadata["k12"], shown(task)
    texts = [
        answer,
        f"The answer is {answer}.",
        f"First, 3 + 4 = 7.\n\n**Answer:** {answer}",
        f"So it is $\\boxed{{{answer}}}$.",
        f"解：略，3+4=7。\n故答案为：{answer}。",
        f"#### {answer}",
    ]
    if isinstance(task.answer, list) and len(task.answer) > 1:
        texts.append("Thus " + ", ".join(f"$\\boxed{{{each}}}$" for each in task.answer) + ".")
        texts.append("答案：\n" + "\n".join(f"（{n}）{each}" for n, each in enumerate(task.answer, 1)))
    if column["type"] == "numeric":
        unit = column.get("unit", "个")
        texts += [f"答：一共是{answer}{unit}。", f"答案是 {answer} {unit}", f"x = {answer}", f"It is {answer}."]
    if column["type"] == "multiple":
        texts += [f"故选：{answer}.", f"The correct options are {', '.join(answer)}.", f"答案是{'、'.join(answer)}"]
    if column["type"] == "single":
        texts += [f"故选：{answer}.", f"因此选{answer}。", f"Option {answer} is correct.", f"The answer is ({answer})."]
        if option := column.get("options", {}).get(answer):
            texts += [f"Answer: ({answer}) {option}", f"The answer is {answer}. {option}"]
            texts += [f"Answer: {option}"] if option.strip("*") and not re.fullmatch("[A-Za-z]", option) else []
    return texts


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_reference_is_accepted_in_every_formulation(
    judge: RewardManager, data_dir: Path, name: str, part: int
) -> None:
    part *= 8 if name == "mmlu_stem" else 1  # there are 3,018
    written = [formulations(task)[index % part :: part] for index, task in enumerate(tasks_of(data_dir, name))]
    pairs = [(task, text) for task, texts in zip(tasks_of(data_dir, name), written, strict=True) for text in texts]
    found = rewards(judge, pairs)
    refused = [(task.id, text[-80:]) for (task, text), reward in zip(pairs, found, strict=True) if reward != 1]
    assert refused == []


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_shuffled_answers_are_rejected(judge: RewardManager, data_dir: Path, name: str, step: int) -> None:
    tasks = tasks_of(data_dir, name)
    others = random.Random(0).sample(tasks, len(tasks))
    pairs = [
        (task, text)
        for task, other in zip(tasks, others, strict=True)
        if comparison_key(shown(task)) != comparison_key(shown(other))
        for text in (f"The answer is {shown(other)}.", f"故答案为：{shown(other)}。", f"\\boxed{{{shown(other)}}}")
    ]
    step *= 4 if name == "mmlu_stem" else 1
    pairs = pairs[::step]  # no multiple of 3, so that all three formulations are among them
    earned = [reward or 0.0 for reward in rewards(judge, pairs)]
    assert len(earned) > 0.6 * 3 * len(tasks) / step
    assert sum(reward < 1 for reward in earned) >= 0.99 * len(earned)
    assert sum(earned) <= 0.01 * len(earned) or name == "gaokao_math_qa"  # there AB earns half of ABD


def test_every_layout_says_subject_and_grade(data_dir: Path) -> None:
    grades = {name: {task.metadata["k12"].get("grade") for task in tasks_of(data_dir, name)} for name in LAYOUTS}
    assert grades == {
        "cmath": {1, 2, 3, 4, 5, 6},
        "cn_middle_school": {"middle_school"},
        "gaokao_math_cloze": {12},
        "gaokao_math_qa": {12},
        "mmlu_stem": {"elementary", "high_school", "college", None},
    }
    assert all(task.metadata["k12"]["subject"] for name in LAYOUTS for task in tasks_of(data_dir, name))


def test_what_the_presets_read(data_dir: Path) -> None:
    by_id = {task.id: task for name in LAYOUTS for task in tasks_of(data_dir, name)}
    assert by_id["cn_middle_school:0"].metadata["k12"]["options"] == {"A": "-2", "B": "0", "C": "3", "D": "-1/2"}
    assert by_id["cn_middle_school:10"].answer == ["82", "4564"]
    assert by_id["cn_middle_school:90"].answer == ["x \\geq -3, x \\neq 0"]
    assert by_id["gaokao_math_cloze:1"].answer == ["$5$", "$10$"]
    unordered = [id for id, task in by_id.items() if task.metadata["k12"].get("unordered")]
    assert unordered == ["gaokao_math_cloze:39"]
    several = [task.answer for task in by_id.values() if task.metadata["k12"]["type"] == "multiple"]
    assert sorted(several) == ["ABD", "AC", "AC", "ACD", "AD", "BCD", "CD"]
    assert str(by_id["mmlu_stem:0"].prompt).endswith("\nD. increase the mortality rate")
    units = [task.metadata["k12"].get("unit") for id, task in by_id.items() if id.startswith("cmath")]
    assert units.count(None) < 400
    assert {"元", "千克", "厘米", "平方厘米", "小时"} <= {unit for unit in units if unit}


def test_real_answers_to_one_question(judge: RewardManager, data_dir: Path) -> None:
    """`100千克稻谷可碾米75千克，1吨稻谷可碾米多少千克？` in other units."""
    task = next(each for each in tasks_of(data_dir, "cmath") if "稻谷可碾米多少千克" in str(each.prompt))
    texts = [
        "750千克",
        "0.75吨",
        "1t=1000kg, 1000×0.75=750(千克)\n答:1吨稻谷可碾米750千克。",
        "75千克",
        "750吨",
        "0.75",
    ]
    assert rewards(judge, [(task, text) for text in texts]) == [1, 1, 1, 0, 0, 0]
