"""What a chat model is: messages in, replies out. An endpoint and the native engine are two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollmill.rewards.event_loop import EventLoopThread

ChatMessage = dict[str, Any]
"""`role` and `content`: text, or a list of parts as OpenAI's chat API has them."""

STOP, LENGTH = "stop", "length"
TOO_LONG, REFUSED, UNPARSABLE = "too_long", "refused", "unparsable"
TOO_LONG_ADVICE = "shorten the prompt or `rubric`, lower max_tokens, or take a judge with a longer context"
"""Advice where a question is too long."""


@dataclass(frozen=True, slots=True)
class ChatSamplingParams:
    """How replies are sampled. `schema` is a JSON schema that the server is to enforce."""

    temperature: float
    max_tokens: int
    seed: int
    schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChatModelReply:
    """One reply. `finish` is "stop" where the model ended it by itself; tokens are 0 where the server counts none."""

    text: str
    finish: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0
    cached: bool = False


class NoReplyError(Exception):
    """These messages get no reply, for a reason that may lie in them. `outcome`: too_long, refused or timeout.

    `advice` is what helps where it does not lie in the response; empty where it does.
    """

    def __init__(self, outcome: str, says: str, advice: str = "") -> None:
        super().__init__(says)
        self.outcome, self.advice = outcome, advice


class ChatModel(Protocol):
    """Anything that replies to messages."""

    loop: EventLoopThread
    """Where `chat` is called."""
    identity: str
    """What tells this model from others in a cache."""

    async def chat(
        self, messages: Sequence[ChatMessage], sampling: ChatSamplingParams, indices: Sequence[int]
    ) -> list[ChatModelReply]:
        """One reply per index. A sample depends on messages, sampling and its index, not on which others are asked for.

        Raises:
            NoReplyError: these messages get no reply, though others do.
            RewardError: nothing does, or the model cannot be asked this way.
        """
        ...
