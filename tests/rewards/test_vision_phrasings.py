"""Answers about pictures that were judged wrongly, and those of the labelled corpus, graded by rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grading_bench.answer_corpus import corpus
from grading_bench.chat_answers import chat_answers
from grading_bench.corpus import BANKS, counts
from support.reward_helpers import judged
from support.rule_helpers import judge_of

from bench.corpus import accepted_by_rollmill
from rollmill.rewards import RewardManager

SEEN: list[tuple[str, Any, str, bool]] = [
    ("count", 5, "有五只猫", True),
    ("count", 5, "共5只", True),
    ("count", 0, "There are no cats", True),
    ("count", 5, "There are 5 cats (2 black, 3 white)", True),
    ("count", 12, "一共有12个苹果", True),
    ("count", 15000, "一万五千", True),
    ("count", 5, "５", True),
    ("count", 5, "There are 4 or 5 cats", False),
    ("chart", "25", "**25**", True),
    ("chart", "25", "\\boxed{25}", True),
    ("chart", "1200000", "1.2 million", True),
    ("chart", "1.2 million", "1200000", True),
    ("chart", "25", "２５", True),
    ("chart", "15000", "一万五千", True),
    ("chart", "12", "答案是12元", True),
    ("vqa", "12", "The answer is 12.", True),
    ("vqa", "red", "\\boxed{red}", True),
    ("vqa", "b", "Ｂ", True),
    ("ocr", "ABC 123", "ＡＢＣ　１２３", True),
]
PICTURES: list[tuple[str, Any, str, bool]] = [
    ("count", 5, "There aren't 4 cups; there are 5.", True),
    ("count", 4, "There aren't 4 cups; there are 5.", False),
    ("count", 12, "\\approx 12", True),
    ("count", 12, "$\\approx 12$", True),
    ("chart", "12", "\\approx 12", True),
    ("chart", "12", "$\\approx 12$", True),
    ("count", 5, "There are five (5) cats.", True),
    ("count", 5, "There are five (6) cats.", False),
    ("chart", "Brazil", "Brazil has the tallest bar.", True),
    ("chart", "Brazil", "The country that has the tallest bar is Brazil.", True),
    ("chart", "Brazil", "Brazil has the tallest bar, but India sells more.", False),
    ("chart", "India", "Brazil has a taller bar than India.", False),
    ("vqa", "red", "Red, because it looks like a rose.", True),
    ("vqa", "rose", "Red, because it looks like a rose.", False),
    ("vqa", "red", "Red, because it looks like a rose, but it might be blue.", False),
]


@pytest.fixture(scope="module")
def judges() -> Iterator[dict[str, RewardManager]]:
    made = {name: judge_of(name) for name in ("count", "chart", "vqa", "ocr")}
    yield made
    for judge in made.values():
        judge.close()


@pytest.mark.parametrize(("reward", "gold", "text", "right"), [*SEEN, *PICTURES])
def test_answers_about_images(judges: dict[str, RewardManager], reward: str, gold: Any, text: str, right: bool) -> None:
    if reward == "ocr":
        pytest.importorskip("rapidfuzz")
    assert judged(judges[reward], gold, text).reward == float(right)


# The library's own tests grade the other answers of the corpus.


@pytest.mark.parametrize("bank", BANKS)
def test_answers_of_the_corpus_are_judged_as_labelled(data_dir: Path, bank: str) -> None:
    rows = [row for row in corpus(data_dir, bank) if row.reward in ("count", "chart", "vqa")]
    assert len(rows) >= 300
    assert counts(rows, accepted_by_rollmill(rows)) == (0, 0)


@pytest.mark.slow
def test_rewards_judge_completions_of_chat_models_as_labelled() -> None:
    rows = chat_answers()[::4]
    assert {"math", "k12", "count"} <= {row.reward for row in rows}
    rejected, accepted = counts(rows, accepted_by_rollmill(rows))
    assert rejected <= 1
    assert accepted == 0
