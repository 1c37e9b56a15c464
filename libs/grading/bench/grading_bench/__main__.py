"""`PYTHONPATH=bench python -m grading_bench`: both benchmarks in one run. The last line is one JSON object."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from importlib.metadata import version
from typing import Any

from grading_bench.answers import MissingDataError, data_dir, pairs
from grading_bench.corpus import accepted_by_library, accepted_by_math_verify, counts, labelled
from grading_bench.speed import by_library, by_math_verify


def main() -> int:
    parser = argparse.ArgumentParser(prog="grading_bench", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="grade one labelled answer of so many")
    parser.add_argument("--count", type=int, default=4000, help="answers for the speed; half of them are right")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    try:
        data = data_dir()
    except MissingDataError as error:
        parser.exit(1, f"grading_bench: {error}\n")
    misjudged: dict[str, Any] = {}
    print(f"{'labelled answers':36}rollmill_grading  math-verify")
    for name, reward in (("mathematics", "math"), ("school questions", "k12")):
        rows = [row for row in labelled(data) if row.reward == reward][:: args.every]
        right = sum(row.right for row in rows)
        ours, peer = counts(rows, accepted_by_library(rows, args.workers)), counts(rows, accepted_by_math_verify(rows))
        print(f"{name:18}{right:5} right, rejected{ours[0]:14}  {peer[0]:11}")
        print(f"{'':18}{len(rows) - right:5} wrong, accepted{ours[1]:14}  {peer[1]:11}")
        correct = [1 - sum(each) / len(rows) for each in (ours, peer)]
        ratio = correct[0] / correct[1]
        print(f"{'':18}graded as labelled   {correct[0]:13.2%}  {correct[1]:11.2%}  ratio {ratio:.2f}")
        misjudged[reward] = {
            "right": right,
            "right_rejected": {"ours": ours[0], "math-verify": peer[0]},
            "wrong": len(rows) - right,
            "wrong_accepted": {"ours": ours[1], "math-verify": peer[1]},
        }
    answers = pairs(args.count)
    speeds = [each(answers, args.workers, args.rounds) for each in (by_library, by_math_verify)]
    medians = [statistics.median(each) for each, _ in speeds]
    ratio = medians[0] / medians[1]
    print(f"{'answers per second':36}{medians[0]:16.0f}  {medians[1]:11.0f}  ratio {ratio:.2f}")
    print(f"{args.count // 2:5} of {args.count} are right; accepted{'':5}{speeds[0][1]:16}  {speeds[1][1]:11}")
    result: dict[str, Any] = {
        "labelled": misjudged,
        "answers_per_second": {"ours": speeds[0][0], "math-verify": speeds[1][0]},
        "ratio": round(ratio, 2),
        "workers": args.workers,
        "machine": platform.platform(),
        "versions": {name: version(name) for name in ("math-verify", "sympy")},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
