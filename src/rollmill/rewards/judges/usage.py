"""What asking a judge costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollmill.rewards.judges.chat import ChatModelReply


@dataclass(slots=True)
class JudgeUsage:
    """Counts of one reward since it was made. Prices are per million tokens; replies from the cache cost nothing.

    `calls` are replies that a model gave; `failed` questions that got none; `malformed` replies without a verdict.
    """

    prompt_price: float = 0.0
    completion_price: float = 0.0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("calls", "cached", "retries", "malformed", "failed", "prompt_tokens", "completion_tokens"), 0
        )
    )

    def add(self, key: str, count: int = 1) -> None:
        """Count something."""
        self.counts[key] += count

    def reply(self, reply: ChatModelReply) -> None:
        """Count a reply and its tokens."""
        if reply.cached:
            self.add("cached")
            return
        self.add("calls")
        self.add("retries", reply.retries)
        self.add("prompt_tokens", reply.prompt_tokens)
        self.add("completion_tokens", reply.completion_tokens)

    def values(self) -> dict[str, float]:
        """All counts, and `cost` in the currency of the prices."""
        prompt, completion = self.counts["prompt_tokens"], self.counts["completion_tokens"]
        cost = (prompt * self.prompt_price + completion * self.completion_price) / 1e6
        return {key: float(count) for key, count in self.counts.items()} | {"cost": cost}
