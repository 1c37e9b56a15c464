"""References of all published tasks in the data folder, and equations and systems made of them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from grading_bench.answer_forms import form_of

_BOX = re.compile(r"\\boxed\s*\{")
_LONGEST = 120


def references(data: Path) -> list[str]:
    """Different references that have a form, without dollar signs, in the order of the files."""
    found = [
        row["answer"].rpartition("#### ")[2]
        for name in ("train", "test")
        for row in _rows(data / f"gsm8k/{name}.jsonl")
    ]
    found += [row["answer"] for name in ("cmath", "cn_middle_school") for row in _rows(data / f"k12/{name}.jsonl")]
    found += [row["answer"] for row in _rows(data / "k12/gaokao_math_cloze.jsonl")]
    found += [option for row in _rows(data / "k12/gaokao_math_qa.jsonl") for option in row["options"].values()]
    found += [str(row["answer"]) for row in _rows(data / "math/aime24.jsonl")]
    found += [row["answer"] for row in _rows(data / "math/gaokao2023en.jsonl")]
    found += [box for row in _rows(data / "math/minerva_math.jsonl") if (box := _boxed(row["solution"]))]
    bare = [re.sub(r"(?<!\\)\$", "", str(each)).strip() for each in found]
    return [each for each in dict.fromkeys(bare) if len(each) <= _LONGEST and form_of(each) is not None]


def made_references(plain: list[str], rng: random.Random) -> list[str]:
    r"""Statements with a reference in them: `3+4=7`, `x=3 \quad y=4`, `\frac{dy}{dx}=2x`, `f(2)=3`, `x^2+4=0`."""
    values = [each for each in plain if (form := form_of(each)) is not None and form.kind == "value" and len(each) < 40]
    whole = [each for each in values if re.fullmatch(r"\d{1,4}", each)]
    made = []
    for one in rng.sample(whole, min(len(whole), 60)):
        part = rng.randrange(1, 30)
        made += [f"{part}+{int(one)}={part + int(one)}", f"x^2+{one}=0"]
        made.append(rf"\sqrt{{{int(one) ** 2}}}={one}")
    for one in rng.sample(values, min(len(values), 80)):
        name = rng.choice(["x", "a", "S", "k"])
        made += [f"{name}={one}", rf"\frac{{dy}}{{dx}}={one}", f"y'={one}", f"f(2)={one}"]
    return list(dict.fromkeys(made))


def systems(plain: list[str], rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Pairs of statements and how they are joined: (first value, second value, separator)."""
    values = [each for each in plain if (form := form_of(each)) is not None and form.kind == "value" and len(each) < 25]
    separators = [r" \quad ", r" \\ ", r" \; ", "\n", ", ", r",\ ", r" \qquad "]
    return [(*rng.sample(values, 2), separators[index % len(separators)]) for index in range(count)]  # type: ignore[misc]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _boxed(text: str) -> str:
    """Return the content of the last box."""
    starts = list(_BOX.finditer(text))
    if not starts:
        return ""
    depth = 1
    for at in range(starts[-1].end(), len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[starts[-1].end() : at].strip()
    return ""
