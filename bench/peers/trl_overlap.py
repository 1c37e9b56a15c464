"""Worker: one GRPO step of TRL per command, with rewards that take as long as the last rollouts did."""

from __future__ import annotations

import time
from typing import Any

from bench.models import SHAPES
from bench.peers.trl_step import arguments, train
from bench.worker import Channel


class Costly:
    """Share of even token ids, after computing or sleeping as long as the rollouts took."""

    __name__ = "costly"

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        self.cost = self.began = self.ended = 0.0

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.began = time.perf_counter()
        if self.waits:
            time.sleep(self.cost)
        else:
            until = time.process_time() + self.cost
            while time.process_time() < until:
                pass
        self.ended = time.perf_counter()
        return [sum(1 for token in ids if token % 2 == 0) / max(len(ids), 1) for ids in completion_ids]


def main() -> None:
    parser = arguments()
    parser.add_argument("--mean-tokens", type=int, default=48)
    parser.add_argument("--waits", action="store_true")
    args = parser.parse_args()
    reward = Costly(args.waits)

    def report(began: float, seconds: float) -> dict[str, Any]:
        rollout_s, rewards_s = reward.began - began, reward.ended - reward.began
        together_s, reward.cost = rollout_s + rewards_s, rollout_s
        return {
            "rollout_s": rollout_s,
            "rewards_s": rewards_s,
            "together_s": together_s,
            "of_the_longer": together_s / max(rollout_s, rewards_s),
        }

    stops = list(range(0, SHAPES[args.model].vocab_size, args.mean_tokens))
    train(args, Channel(), reward, report, generation_kwargs={"eos_token_id": stops})


if __name__ == "__main__":
    main()
