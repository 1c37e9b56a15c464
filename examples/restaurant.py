"""Requests to restaurants in plain English, and a reward for the booking that a model makes of them.

A booking is a JSON object with five keys. Two of them are not in the request as they have to be written: the time is on
the 12-hour clock, and some requests count the friends and not the guest. The prompt holds one worked example.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from rollmill import Completion, Task

EXAMPLE = (
    {
        "role": "system",
        "content": "Write the booking as a JSON object with the keys restaurant, name, day, time and people. "
        "Answer with the object only.",
    },
    {
        "role": "user",
        "content": "Good morning, Miller speaking. Do you have a table at Rosa's Kitchen for Friday at 6 pm? "
        "There will be 3 of us.",
    },
    {
        "role": "assistant",
        "content": '{"restaurant": "Rosa\'s Kitchen", "name": "Miller", "day": "Friday", "time": "18:00", "people": 3}',
    },
)
REQUESTS = (
    "Hi, this is {name}. I would like a table for {people} at {restaurant} on {day} at {hour} pm.",
    "Could you book {restaurant} for us? We are {people}, on {day}, {hour} in the evening. The name is {name}.",
    "{name} here. I want to come to {restaurant} with {friends} friends on {day} at {hour} pm.",
    "Please reserve for {day}, {hour} pm: {people} people, under the name {name}, at {restaurant}.",
)
RESTAURANTS = (
    "Bella Vista",
    "The Old Mill",
    "Sakura",
    "Chez Marcel",
    "Blue Lagoon",
    "Taj Palace",
    "Casa Pepe",
    "Olive Tree",
)
NAMES = (
    *("Adams", "Baker", "Carter", "Diaz", "Evans", "Fischer", "Garcia", "Hughes", "Ivanov", "Jensen"),
    *("Klein", "Lopez", "Meyer", "Novak", "Olsen", "Patel", "Quinn", "Rossi", "Schmidt", "Turner"),
)
HELD_OUT_RESTAURANTS = ("Green Door", "Il Forno", "Lucky Dragon", "Harbour House")
HELD_OUT_NAMES = ("Becker", "Costa", "Dubois", "Hansen", "Murphy", "Nakamura", "Singh", "Walker")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def requests(size: int, seed: int = 0, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yields rows with prompt (messages) and answer (the booking); held-out ones have other names and restaurants."""
    generator = random.Random(seed)
    for _ in range(size):
        people, hour = generator.randint(3, 9), generator.randint(6, 10)
        booking = {
            "restaurant": generator.choice(HELD_OUT_RESTAURANTS if held_out else RESTAURANTS),
            "name": generator.choice(HELD_OUT_NAMES if held_out else NAMES),
            "day": generator.choice(DAYS),
            "time": f"{hour + 12}:00",
            "people": people,
        }
        request = generator.choice(REQUESTS).format(**booking, hour=hour, friends=people - 1)
        yield {"prompt": [*EXAMPLE, {"role": "user", "content": request}], "answer": json.dumps(booking)}


def booking(task: Task, completion: Completion) -> dict[str, float]:
    """Two parts: `keys` is up to a half, for keys with the right value; `exact` is a half for the right object."""
    return score(str(task.answer), completion.text)


def score(answer: str, text: str) -> dict[str, float]:
    """Compares a text with the booking. Text that is no JSON object, or has more beside it, is worth nothing."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return {"keys": 0.0, "exact": 0.0}
    wanted = json.loads(answer)
    right = sum(json.dumps(found[key]) == json.dumps(value) for key, value in wanted.items() if key in found)
    extra = len(found.keys() - wanted.keys())
    exact = right == len(wanted) and not extra
    return {"keys": 0.5 * max(0, right - extra) / len(wanted), "exact": 0.5 * exact}
