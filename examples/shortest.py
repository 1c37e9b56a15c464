"""Training data for shorter completions, from a run's stored rollouts (Kimi k1.5, arXiv:2501.12599, section 2.4).

    python examples/shortest.py runs/mine --sft short.jsonl --pairs pairs.jsonl

`short.jsonl` holds each task's shortest correct completion as `response`, for SFT. `pairs.jsonl` holds, for DPO, that
completion as `chosen` and as `rejected` each longer wrong one and each correct one of at least 1.5 times its length.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rollmill import load_experiences
from rollmill.types import Experience, ExperienceSource, StopReason

Row = dict[str, str]


def by_task(experiences: Iterable[Experience]) -> list[list[Experience]]:
    """Scored rollouts in groups of the same prompt, each group from the shortest to the longest."""
    groups: dict[str, list[Experience]] = defaultdict(list)
    for experience in experiences:
        if experience.source is ExperienceSource.ROLLOUT and experience.reward is not None:
            groups[experience.prompt].append(experience)
    return [sorted(group, key=lambda each: each.action_tokens) for group in groups.values()]


def is_correct(experience: Experience, threshold: float) -> bool:
    """True if a completion earned the reward and was not cut off."""
    ended = experience.stop_reason in (StopReason.EOS, StopReason.STOP)
    return ended and experience.reward is not None and experience.reward >= threshold


def shortest_and_pairs(run: Path, threshold: float = 1.0, longer: float = 1.5) -> tuple[list[Row], list[Row]]:
    """Rows for SFT and rows for DPO. A completion is correct if its reward is at least `threshold`."""
    shortest: list[Row] = []
    pairs: dict[str, Row] = {}
    for group in by_task(load_experiences(run)):
        best = next((each for each in group if is_correct(each, threshold)), None)
        if best is None:
            continue
        shortest.append({"prompt": best.prompt, "response": best.response})
        for each in group:
            least = longer * best.action_tokens if is_correct(each, threshold) else best.action_tokens + 1
            if each.action_tokens >= least:
                pair = {"prompt": best.prompt, "chosen": best.response, "rejected": each.response}
                pairs[json.dumps(pair)] = pair  # the same completion may have been rolled out twice
    return shortest, list(pairs.values())


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Shortest correct completions and preference pairs from a run.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--sft", type=Path, default=Path("short.jsonl"))
    parser.add_argument("--pairs", type=Path, default=Path("pairs.jsonl"))
    parser.add_argument("--threshold", type=float, default=1.0, help="reward from which a completion is correct")
    arguments = parser.parse_args()
    shortest, pairs = shortest_and_pairs(arguments.run, arguments.threshold)
    for path, rows in ((arguments.sft, shortest), (arguments.pairs, pairs)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
