"""Three-digit addition by columns, with traces of a teacher that forgets most carries.

    347+285    ->    7+5+0=12 4+8+1=13 3+2+1=06 #632

Each column reads digit + digit + carry = two digits; the answer follows `#`. The teacher writes carry 0 instead of 1
with probability `forget`, and continues from there, so its answers are wrong whenever it forgot. A model that imitates
it forgets as often; reinforcement learning keeps the traces that lead to right answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from zlib import crc32


def rows(
    size: int, seed: int = 0, forget: float = 0.0, digits: int = 3, held_out: bool = False
) -> Iterator[dict[str, str]]:
    """Yields rows with prompt, answer (the true sum) and response (the teacher's trace).

    Args:
        size: number of rows; all prompts are different.
        seed: seed of the draw.
        forget: probability of forgetting a carry.
        digits: digits of each number, leading zeros not written.
        held_out: draw from the held-out tenth of all pairs.
    """
    generator = random.Random(seed)
    limit = 10**digits
    most = int((limit - limit // 10) ** 2 * (0.05 if held_out else 0.8))
    if size > most:
        raise ValueError(f"size {size} asks for more different sums than there are to draw from; at most {most}")
    seen: set[tuple[int, int]] = set()
    while len(seen) < size:
        pair = generator.randrange(limit // 10, limit), generator.randrange(limit // 10, limit)
        if pair in seen or is_held_out(*pair) != held_out:
            continue
        seen.add(pair)
        yield {
            "prompt": f"{pair[0]}+{pair[1]}\n",
            "answer": str(pair[0] + pair[1]),
            "response": trace(*pair, forget=forget, generator=generator, digits=digits),
        }


def is_held_out(a: int, b: int) -> bool:
    """Returns whether the pair belongs to the held-out tenth, by a hash that does not depend on the seed."""
    return crc32(f"{a}+{b}".encode()) % 10 == 0


def trace(a: int, b: int, *, forget: float, generator: random.Random, digits: int = 3) -> str:
    """Returns the teacher's working, column by column from the right."""
    columns, result, carry = [], "", 0
    for place in range(digits):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        columns.append(f"{x}+{y}+{carry}={total:02d}")
        result = f"{total % 10}{result}"
        carry = total // 10
        if carry and place < digits - 1 and generator.random() < forget:
            carry = 0
    return " ".join(columns) + f" #{int(f'{carry}{result}')}"
