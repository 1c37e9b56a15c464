"""A reward of your own: any function of a task and a completion. A run file names it as FILE.py:NAME.

It returns a number, several named parts as a mapping, or None where it does not apply. It may be async. What it raises
ends the run with a message that names the task and the completion.
"""

from __future__ import annotations

from rollmill import Completion, Task


def closeness(task: Task, completion: Completion, scale: float = 9.0) -> dict[str, float]:
    """Two parts: `right` is 1 for the exact answer; `near` is up to a tenth for a close number."""
    text = completion.text.strip()
    if not text.isdecimal():
        return {"right": 0.0, "near": 0.0}
    distance = abs(int(text) - int(task.answer))
    return {"right": float(distance == 0), "near": 0.1 * max(0.0, 1 - distance / scale)}


def guessing(task: Task, completion: Completion) -> float:
    """Score of a guessing game that prints all guesses: up to half for guessing digits, half for the right number."""
    guesses = completion.text.split()
    digits = sum(guess.isdecimal() for guess in guesses)
    return 0.5 * digits / max(len(guesses), 1) + 0.5 * (guesses[-1:] == [str(task.answer)])
