"""Tasks of the board that no example has: sorting digits, and countdown. Their teachers are often wrong.

Both raise ValueError if there are too few problems for the size.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

Row = dict[str, str]
_MOST_DRAWS = 100_000  # without a new problem


def sorting(size: int, seed: int = 0, mistakes: float = 0.0, digits: int = 6, held_out: bool = False) -> Iterator[Row]:
    """Yield rows whose answer are the prompt's digits in ascending order, followed by `.`.

    Args:
        mistakes: share of responses in which the teacher exchanged two different digits.
        held_out: digits that other rows do not have.
    """
    generator, seen = random.Random(f"{seed} {held_out}"), set[str]()
    for _ in _draws(seen, size):
        text = "".join(generator.choice("0123456789") for _ in range(digits))
        right = "".join(sorted(text))
        if text in seen or right == text or (int(text) % 10 == 7) != held_out:
            continue
        seen.add(text)
        response = right
        if generator.random() < mistakes:
            i, j = generator.choice([(i, j) for i in range(digits) for j in range(i) if right[i] != right[j]])
            swapped = list(right)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            response = "".join(swapped)
        yield {"prompt": f"{text}\n", "answer": right, "response": response}


def countdown(
    size: int, seed: int = 0, mistakes: float = 0.0, numbers: int = 4, held_out: bool = False
) -> Iterator[Row]:
    """Yield rows that ask for an expression of these numbers, each used once, that has the value behind `=`.

    Args:
        mistakes: share of responses in which the teacher changed one operator.
        held_out: problems that other rows do not have.
    """
    generator, seen = random.Random(f"{seed} {held_out}"), set[str]()
    for _ in _draws(seen, size):
        values = [generator.randint(1, 9) for _ in range(numbers)]
        signs = [generator.choice("+-") for _ in range(numbers - 1)]
        expression = _joined(values, signs)
        target = _value(expression)
        prompt = f"{' '.join(map(str, values))}={target}\n"
        if prompt in seen or not 0 <= target < 100 or (sum(values) % 5 == 2) != held_out:
            continue
        seen.add(prompt)
        if generator.random() < mistakes:
            at = generator.randrange(numbers - 1)
            signs[at] = generator.choice([each for each in "+-" if each != signs[at]])
        yield {"prompt": prompt, "answer": prompt.strip(), "response": _joined(values, signs)}


def countdown_score(completion: str, answer: str) -> float:
    """Reward: 1 if the expression uses exactly the problem's numbers and has its value."""
    numbers, _, target = answer.partition("=")
    try:
        tree = ast.parse(completion.strip(), mode="eval")
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        right = Counter(used) == Counter(map(int, numbers.split())) and _result(tree.body) == int(target)
    except (SyntaxError, ValueError, TypeError, RecursionError, OverflowError):
        return 0.0
    return float(right)


def countdown_reward(task: Any, completion: Any) -> float:
    """`countdown_score` as a reward of a run file."""
    return countdown_score(completion.text, task.answer)


def _draws(seen: set[str], size: int) -> Iterator[None]:
    """Go on until there are `size` problems."""
    without_new, before = 0, 0
    while len(seen) < size:
        without_new = 0 if len(seen) > before else without_new + 1
        if without_new > _MOST_DRAWS:
            raise ValueError(f"size {size} is more than there are problems: {len(seen)} were found")
        before = len(seen)
        yield


def _joined(values: list[int], signs: list[str]) -> str:
    return str(values[0]) + "".join(f"{sign}{value}" for sign, value in zip(signs, values[1:], strict=True))


def _value(expression: str) -> int:
    return _result(ast.parse(expression, mode="eval").body)


def _result(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = _result(node.left), _result(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
    raise ValueError("only whole numbers, +, - and * are allowed")
