"""FrozenLake for a new model: maps as tasks, short observations, and demonstrations by a weak teacher.

SFFF/FHFH/FFFH/HFFG          the task: S start, F ice, H hole, G goal
00#FF#>D                     row and column; the cells to the left, below, right and above; the action
10#FHS>D
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import generate_random_map

MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}


def maps(size: int, seed: int = 0, side: int = 4, ice: float = 0.75) -> Iterator[dict[str, Any]]:
    """Tasks with random solvable maps. No map occurs twice, also not with two different seeds below 10."""
    seen: set[str] = set()
    number = seed
    while len(seen) < size:
        rows = generate_random_map(size=side, p=ice, seed=number)
        number += 10
        prompt = "/".join(rows) + "\n"
        if prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt, "options": {"desc": rows}, "seed": number}


def demonstrations(size: int, seed: int = 0, clumsy: float = 0.5) -> Iterator[dict[str, Any]]:
    """Maps with an episode of a teacher that takes the shortest way, except for some random moves."""
    generator = random.Random(seed)
    for row in maps(size, seed):
        yield row | {"response": _episode(row["options"]["desc"], clumsy, generator)}


def surroundings(environment: Any, observation: Any) -> str:
    """Observation of the player, as text."""
    inside = environment.unwrapped
    rows = ["".join(cell.decode() for cell in row) for row in inside.desc]
    return seen_from(rows, divmod(int(inside.s), len(rows)))


def seen_from(rows: list[str], place: tuple[int, int]) -> str:
    """A place and the cells around it; # is beyond the edge."""
    around = "".join(_cell(rows, _neighbour(place, move)) for move in MOVES)
    return f"{place[0]}{place[1]}{around}>"


def _episode(rows: list[str], clumsy: float, generator: random.Random) -> str:
    place, text = (0, 0), ""
    for _ in range(12):
        move = generator.choice(list(MOVES)) if generator.random() < clumsy else _best(rows, place)
        text += f"{seen_from(rows, place)}{move}\n"
        there = _neighbour(place, move)
        place = place if _cell(rows, there) == "#" else there
        if _cell(rows, place) in "HG":
            break
    return text


def _best(rows: list[str], start: tuple[int, int]) -> str:
    """The first move of a shortest way to the goal."""
    queue = [(start, "")]
    seen = {start}
    for place, first in queue:
        if _cell(rows, place) == "G":
            return first
        for move in MOVES:
            there = _neighbour(place, move)
            if there not in seen and _cell(rows, there) in "SFG":
                seen.add(there)
                queue.append((there, first or move))
    raise ValueError(f"no way to the goal of {rows}")


def _neighbour(place: tuple[int, int], move: str) -> tuple[int, int]:
    return place[0] + MOVES[move][0], place[1] + MOVES[move][1]


def _cell(rows: list[str], place: tuple[int, int]) -> str:
    inside = 0 <= place[0] < len(rows) and 0 <= place[1] < len(rows)
    return rows[place[0]][place[1]] if inside else "#"
