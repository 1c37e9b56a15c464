"""Labelled answers as models write them: references of published tasks in many phrasings, right and wrong.

Generated from the data and a fixed seed. `phrasings` selects one of four banks of sentences, `first` to `fourth`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grading_bench.answer_phrasings import FIRST, FOURTH, SECOND, THIRD, Bank

FRUIT = {"A": "apple", "B": "banana", "C": "cherry", "D": "date palm"}
WORDS = ["red", "a dog", "tennis", "skateboard", "kitchen", "pizza", "umbrella", "blue and white", "wood", "snow"]
STATES = ["water", "steel", "steam", "oil"]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A completion, its task, and whether it is right. `group` is a row of the result table."""

    group: str
    reward: str
    gold: Any
    text: str
    right: bool
    metadata: dict[str, Any] = field(default_factory=dict)


def corpus(data: Path, phrasings: str = "first") -> list[Labelled]:
    """All labelled answers of one bank of phrasings."""
    bank = {"first": FIRST, "second": SECOND, "third": THIRD, "fourth": FOURTH}[phrasings]
    rng = random.Random(phrasings)
    made = [*_formulas(data, bank, rng), *_numbers(data, bank, rng), *_chinese(data, bank, rng)]
    made += [*_choices(data, bank, rng), *_own(bank, rng), *_pictures(data, bank, rng)]
    return made


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _pairs(golds: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Pair each reference with another one that is certainly different."""
    for gold in golds:
        yield gold, next(other for other in rng.sample(golds, len(golds)) if _bare(other) != _bare(gold))


def _bare(text: str) -> str:
    return re.sub(r"[\s$\\{}]|left|right", "", text)


def _written(
    group: str,
    reward: str,
    gold: Any,
    own: str,
    other: str,
    bank: tuple[list[str], list[str]],
    rng: random.Random,
    metadata: dict[str, Any] | None = None,
    count: int = 2,
    more: dict[str, str] | None = None,
) -> Iterator[Labelled]:
    """The reference in some phrasings (right), another answer in one of them (wrong), and retractions (wrong)."""
    right, wrong = bank
    keys, more = metadata or {}, more or {}
    for template in rng.sample(right, min(count, len(right))):
        yield Labelled(group, reward, gold, _filled(template, own, other, more), True, keys)
    yield Labelled(group, reward, gold, _filled(rng.choice(right), other, own, more), False, keys)
    for template in rng.sample(wrong, min(count - 1, len(wrong))):
        yield Labelled(group, reward, gold, _filled(template, own, other, more), False, keys)


def _filled(template: str, own: str, other: str, more: dict[str, str]) -> str:
    for mark, text in {"@o": own, "@w": other, **more}.items():
        template = template.replace(mark, text)
    return template


def _formulas(data: Path, bank: Bank, rng: random.Random) -> Iterator[Labelled]:
    rows = _rows(data / "math/gaokao2023en.jsonl")
    answers = [row["answer"].strip().strip("$").strip() for row in rows]
    golds = [
        each for each in answers if each and "$" not in each and not re.search(r"[\u4e00-\u9fff]|[A-Za-z]{4,} ", each)
    ]
    for gold, other in _pairs(rng.sample(golds, 130), rng):
        yield from _written("math formulas", "math", gold, gold, other, bank.formulas, rng)


def _numbers(data: Path, bank: Bank, rng: random.Random) -> Iterator[Labelled]:
    rows = _rows(data / "gsm8k/test.jsonl")
    golds = [row["answer"].rpartition("#### ")[2].strip() for row in rows]
    for gold in rng.sample(golds, 80):
        other = str(int(gold.replace(",", "")) + rng.choice([-1, 1, 2, 10]))
        yield from _written("math numbers", "math", gold, gold, other, bank.numbers, rng)
    for gold in rng.sample(golds, 50):
        other = str(int(gold.replace(",", "")) + rng.choice([-1, 1, 2, 10]))
        yield from _written("k12 numeric", "k12", gold, gold, other, bank.numbers, rng, {"k12": {"type": "numeric"}})


def _chinese(data: Path, bank: Bank, rng: random.Random) -> Iterator[Labelled]:
    rows = [row for row in _rows(data / "k12/cmath.jsonl") if re.fullmatch(r"\d+", row["answer"])]
    for row in rng.sample(rows, 60):
        unit = found[1] if (found := re.search(r"多少([元个只本页人米岁棵])", row["question"])) else "个"
        other = str(int(row["answer"]) + rng.choice([1, 2, 9]))
        for reward, keys in (("k12", {"k12": {"type": "numeric"}}), ("math", {})):
            group = "k12 numeric, Chinese" if reward == "k12" else "math numbers, Chinese"
            yield from _written(
                group, reward, row["answer"], row["answer"], other, bank.chinese, rng, keys, more={"@u": unit}
            )
    cloze = [row["answer"] for row in _rows(data / "k12/gaokao_math_cloze.jsonl") if row["answer"].count("$") in (0, 2)]
    golds = [each.strip("$ ") for each in cloze if not re.search(r"[;；或\u4e00-\u9fff]|\bor\b", each)]
    for gold, other in _pairs(rng.sample(golds, 50), rng):
        yield from _written("k12 blank", "k12", gold, gold, other, bank.formulas, rng, {"k12": {"type": "blank"}})
    for _ in range(25):
        first, second, other = (str(each) for each in rng.sample(range(2, 99), 3))
        yield from _written(
            "k12 blanks",
            "k12",
            [first, second],
            first,
            other,
            bank.blanks,
            rng,
            {"k12": {"type": "blank"}},
            more={"@2": second},
        )


def _choices(data: Path, bank: Bank, rng: random.Random) -> Iterator[Labelled]:
    rows = [row for row in _rows(data / "k12/mmlu_stem.jsonl") if all(len(each) > 3 for each in row["choices"])]
    for row in rng.sample(rows, 60):
        options = dict(zip("ABCD", row["choices"], strict=True))
        letter = "ABCD"[row["answer"]]
        yield from _choice("k12 single", letter, options, bank.letters, rng)
    for row in rng.sample(_rows(data / "k12/gaokao_math_qa.jsonl"), 50):
        if len(row["label"]) == 1:
            yield from _choice("k12 single", row["label"], row["options"], bank.letters, rng)
    for letter in "ABCD" * 4:
        yield from _choice("k12 single", letter, {}, bank.letters, rng)
        yield from _choice("math letters", letter, {}, bank.letters, rng, reward="math")


def _choice(
    group: str,
    letter: str,
    options: dict[str, str],
    bank: tuple[list[str], list[str]],
    rng: random.Random,
    reward: str = "k12",
) -> Iterator[Labelled]:
    other = rng.choice([each for each in "ABCD" if each != letter])
    keys: dict[str, Any] = (
        {"k12": {"type": "single", **({"options": options} if options else {})}} if reward == "k12" else {}
    )
    right, wrong = ([each for each in part if options or ("@t" not in each and "@x" not in each)] for part in bank)
    texts = {"@t": options.get(letter, ""), "@x": options.get(other, "")}
    yield from _written(group, reward, letter, letter, other, (right, wrong), rng, keys, more=texts)


def _own(bank: Bank, rng: random.Random) -> Iterator[Labelled]:
    options = dict(zip("ABCD", STATES, strict=True))
    for _ in range(25):
        one, two, three, _four = rng.sample("ABCD", 4)
        one, two = sorted((one, two))
        more = {"@2": two, "@t": options[one], "@s": options[two]}
        keys = {"k12": {"type": "multiple", "options": options}}
        yield from _written("k12 multiple", "k12", one + two, one, three, bank.letter_sets, rng, keys, more=more)
    for truth in [True, False] * 12:
        yes, no = (bank.truths, bank.falsehoods) if truth else (bank.falsehoods, bank.truths)
        for text in rng.sample(yes, 2):
            yield Labelled("k12 true_false", "k12", truth, text, True, {"k12": {"type": "true_false"}})
        for text in [rng.choice(no), rng.choice(bank.neither)]:
            yield Labelled("k12 true_false", "k12", truth, text, False, {"k12": {"type": "true_false"}})
    for _ in range(15):
        order = rng.sample("ABCD", 4)
        wrong = [order[1], order[0], *order[2:]]
        for template in rng.sample(bank.orders, 2):
            for labels, right in ((order, True), (wrong, False)):
                text = template
                for index, label in enumerate(labels, 1):
                    text = text.replace(f"@{index}", label)
                yield Labelled("k12 ordering", "k12", order, text, right, {"k12": {"type": "ordering"}})
                pairs = {str(index): label for index, label in enumerate(order[:3], 1)}
        for template in rng.sample(bank.pairs, 2):
            for labels, right in ((order, True), (wrong, False)):
                text = template
                for index, label in enumerate(labels[:3], 1):
                    text = text.replace(f"@{index}", label)
                keys = {"k12": {"type": "matching"}}
                yield Labelled("k12 matching", "k12", pairs, text, right, keys)


def _pictures(data: Path, bank: Bank, rng: random.Random) -> Iterator[Labelled]:
    for _ in range(50):
        count = rng.randrange(2, 40)
        yield from _written("count", "count", count, str(count), str(count + rng.choice([1, 2])), bank.counts, rng)
    for _ in range(50):
        value = rng.choice([str(rng.randrange(100, 1800)), f"{rng.uniform(5, 95):.1f}", f"{rng.randrange(2, 95)}%"])
        number = float(value.rstrip("%"))
        other = f"{number * 1.4:.1f}" + "%" * value.endswith("%")
        yield from _written("chart", "chart", value, value, other, bank.charts, rng)
    for gold, other in _pairs(WORDS * 4, rng):
        yield from _written("vqa", "vqa", gold, gold, other, bank.questions, rng)
