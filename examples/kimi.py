"""Tasks of kimi.yaml's four domains (arithmetic, code, school questions, pictures), and its vision-language model.

    python examples/kimi.py       # writes the checkpoint folder models/kimi, of a model with random weights

A `forgetful` taskset makes mistakes in its solutions, so that a model that imitates it has something left to learn.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from see import write_llava

Row = dict[str, Any]
CELL, SIDE = 4, 3
SIGNS = {"x": ("#..#", ".##.", ".##.", "#..#"), "o": ("####", "#..#", "#..#", "####"), " ": ("....",) * 4}


def _numbers(seed: int, held_out: bool) -> random.Random:
    return random.Random(f"{seed}{' held out' if held_out else ''}")


def math(size: int, seed: int = 0, held_out: bool = False, forgetful: float = 0.0) -> Iterator[Row]:
    """`37+8=` is `45`; a forgetful solution loses the carry."""
    numbers = _numbers(seed, held_out)
    for _ in range(size):
        a, b = numbers.randint(10, 89), numbers.randint(1, 9)
        total = a + b
        carried = a % 10 + b >= 10
        told = total - 10 if carried and numbers.random() < forgetful else total
        yield {"prompt": f"{a}+{b}=", "answer": str(total), "response": str(told)}


def code(size: int, seed: int = 0, held_out: bool = False, forgetful: float = 0.0) -> Iterator[Row]:
    """A function of one operation, as it is described; a forgetful solution takes the operation before it."""
    numbers = _numbers(seed, held_out)
    words = {"plus": "+", "minus": "-", "times": "*"}
    for _ in range(size):
        word, n = numbers.choice(list(words)), numbers.randint(2, 9)
        told = "plus" if numbers.random() < forgetful else word
        value = {"plus": lambda x, n=n: x + n, "minus": lambda x, n=n: x - n, "times": lambda x, n=n: x * n}[word]
        tests = [{"call": "f", "args": [x], "expected": value(x)} for x in (0, 3, 10)]
        yield {"prompt": f"f: x {word} {n}\n", "tests": tests, "response": f"def f(x):\n return x{words[told]}{n}"}


def school(size: int, seed: int = 0, held_out: bool = False, forgetful: float = 0.0) -> Iterator[Row]:
    """Which of three numbers is the largest? A forgetful solution answers A."""
    numbers = _numbers(seed, held_out)
    for _ in range(size):
        options = numbers.sample(range(10), 3)
        answer = "ABC"[options.index(max(options))]
        told = "A" if numbers.random() < forgetful else answer
        asked = " ".join(f"{letter}.{number}" for letter, number in zip("ABC", options, strict=True))
        yield {"prompt": f"largest? {asked}: ", "answer": answer, "response": told}


def pictures(size: int, seed: int = 0, held_out: bool = False, forgetful: float = 0.0) -> Iterator[Row]:
    """A picture of signs; how many are x? A forgetful solution is one too low."""
    numbers = _numbers(seed, held_out)
    for _ in range(size):
        signs = numbers.choices("xo ", k=SIDE * SIDE)
        count = signs.count("x")
        told = max(count - 1, 0) if numbers.random() < forgetful else count
        yield {"prompt": "x? ", "images": [_drawn(signs)], "answer": str(count), "response": str(told)}


def _drawn(signs: list[str]) -> bytes:
    """The signs row by row, black on white, as PNG."""
    image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), "white")
    for i, sign in enumerate(signs):
        for y, line in enumerate(SIGNS[sign]):
            for x, dot in enumerate(line):
                if dot == "#":
                    image.putpixel((i % SIDE * CELL + x, i // SIDE * CELL + y), (0, 0, 0))
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write a LLaVA of 0.4M parameters with random weights, one token per character and cell of a picture."""
    characters = [*map(chr, range(ord(" "), ord("~") + 1)), "\n"]
    write_llava(folder, characters, r"[\s\S]", pixels=CELL * SIDE, patch=CELL, seed=seed)


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description="A small vision-language model with random weights, for kimi.yaml.")
    parser.add_argument("--out", type=Path, default=Path("models/kimi"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(arguments.out, arguments.seed)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
