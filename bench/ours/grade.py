"""Worker: grades a list of answers with the math reward, in this process and one grader process."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from grading_bench.answers import pairs

from bench.worker import Channel, serve, versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=4000)
    args = parser.parse_args()
    channel = Channel()

    import numpy as np

    from rollmill.config.rewards import RewardManagerConfig
    from rollmill.rewards import build_reward_manager
    from rollmill.rewards.builtin.math import MathReward
    from rollmill.types import Completion, StopReason, Task

    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    answers = [
        (Task(str(i), "", answer), Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=0))
        for i, (text, answer) in enumerate(pairs(args.count))
    ]
    judge = build_reward_manager([MathReward(name="math", time_limit_s=10.0)], RewardManagerConfig(workers=2))

    async def judged() -> list[Any]:
        return await asyncio.gather(*(judge.score(task, completion) for task, completion in answers))

    def run() -> dict[str, Any]:
        started = time.perf_counter()
        found = asyncio.run(judged())
        seconds = time.perf_counter() - started
        correct = sum(each.reward == 1.0 for each in found)
        late = sum(each.outcomes["math"] not in ("ok", "no_answer") for each in found)
        asked = sum(each.spans["math"].started > each.spans["math"].requested for each in found)
        return {"per_second": len(answers) / seconds, "correct": correct, "not_judged": late, "asked": asked}

    serve(channel, run, versions=versions("math-verify", "sympy"))
    judge.close()


if __name__ == "__main__":
    main()
