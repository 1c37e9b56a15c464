"""Products of three-digit numbers, demonstrated by a teacher that often uses the calculator wrongly or not at all.

The demonstrations are dialogues: a call of the tool, its result, the answer. Each turn of the policy is a separate
row, whose prompt is the dialogue so far.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]


def questions(size: int, seed: int = 0) -> Iterator[Row]:
    """Rows with prompt and answer; all prompts are different. Odd and even seeds share no prompt."""
    generator, seen = random.Random(seed), set[tuple[int, int]]()
    while len(seen) < size:
        pair = generator.randrange(100, 1000), generator.randrange(100, 1000)
        if pair not in seen and sum(pair) % 2 == seed % 2:
            seen.add(pair)
            yield {"prompt": [_said("user", f"{pair[0]}*{pair[1]}")], "answer": str(pair[0] * pair[1])}


def demonstrations(size: int, seed: int = 0, calls: float = 0.5, right: float = 0.5) -> Iterator[Row]:
    """Rows of dialogues, one per turn.

    Args:
        size: dialogues.
        calls: share of those that use the tool; others guess the answer.
        right: share of the calls that ask for the right product; others mistake a digit.
    """
    generator = random.Random(seed)
    for row in questions(size, seed):
        [question], expression = row["prompt"], row["prompt"][0]["content"]
        if generator.random() >= calls:
            yield row | {"response": str(generator.randrange(10_000, 1_000_000))}
            continue
        asked = expression if generator.random() < right else _mistaken(expression, generator)
        call = json.dumps({"tool": "calc", "args": {"expression": asked}})
        left, times = asked.split("*")
        result = str(int(left) * int(times))
        yield row | {"response": call}
        yield {
            "prompt": [question, _said("assistant", call), _said("tool", result)],
            "answer": row["answer"],
            "response": result,
        }


def _mistaken(expression: str, generator: random.Random) -> str:
    """Replace one digit by another one; no number begins with 0."""
    at = generator.choice([0, 1, 2, 4, 5, 6])
    digit = generator.choice([each for each in "123456789" if each != expression[at]])
    return f"{expression[:at]}{digit}{expression[at + 1 :]}"


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
