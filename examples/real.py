"""Trains examples/real.yaml and shows what the model has learned: `python examples/real.py`, or `make quickstart-real`.

Ends with a table of the held-out requests, before and after: the share of right bookings, and of right values by key.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from restaurant import requests, score

import rollmill

RUN_FILE = Path(__file__).with_name("real.yaml")
SHOWN = 3


def main() -> None:
    """Runs the file, or shows a finished run again."""
    parser = argparse.ArgumentParser(description="Train examples/real.yaml and show what the model has learned.")
    parser.add_argument("--out", type=Path, help="run directory (default: numbered); a finished run is only shown")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the file")
    args = parser.parse_args()
    out = args.out or Path("runs", time.strftime("real-%Y%m%d-%H%M%S"))
    if not (out / "summary.json").is_file():
        rollmill.run(RUN_FILE, overrides=args.set, out=out)
    print(describe(out))


def describe(out: Path) -> str:
    """Returns the table of a finished run, and some requests with the bookings before and after."""
    summary = json.loads((out / "summary.json").read_text())
    before, after = (evaluation(out, summary["evaluations"][at]["step"]) for at in (0, -1))
    held_out = list(requests(len(before), seed=2, held_out=True))
    tasks = [(row["prompt"][-1]["content"], row["answer"]) for row in held_out]
    lines = [f"{len(tasks)} held-out requests, greedy{'before':>16}{'after':>9}"]
    for name, part in (("right bookings", None), *((f"  right {key}", key) for key in json.loads(tasks[0][1]))):
        shares = [sum(right(answer, text, part) for (_, answer), text in zip(tasks, found, strict=True)) / len(tasks)
                  for found in (before, after)]  # fmt: skip
        lines.append(f"{name:<34}{shares[0]:>9.1%}{shares[1]:>9.1%}")
    wrong = [at for at, (_, answer) in enumerate(tasks) if not right(answer, before[at])]
    for at in wrong[:SHOWN]:
        lines += ["", f"  {tasks[at][0]}"]
        for when, text in (("before", before[at]), ("after", after[at])):
            mark = "right" if right(tasks[at][1], text) else "wrong"
            lines.append(f"    {when:6}  {' '.join(text.split())}   {mark}")
    return "\n".join([*lines, "", f"{summary['steps']} steps in {summary['seconds']:.0f} s; curves: {out}/report.html"])


def evaluation(out: Path, step: int) -> list[str]:
    """Returns the completions of an evaluation, in the order of its tasks."""
    file = out / "evaluations" / f"step-{step:06d}.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row["response"] for row in sorted(rows, key=lambda row: int(row["task_id"].rpartition(":")[2]))]


def right(answer: str, text: str, key: str | None = None) -> bool:
    """Returns whether a completion is the booking, or has the right value of one key."""
    if key is None:
        return score(answer, text)["exact"] > 0
    try:
        found: Any = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and json.dumps(found.get(key)) == json.dumps(json.loads(answer)[key])


if __name__ == "__main__":
    main()
