"""A conversation with a model, through its chat template or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.core.types import Task
from rollmill.explorer.policy import Policy, Reply
from rollmill.explorer.template import ChatMessage


class Dialogue:
    """Goes on turn by turn. One that begins with a text is plain text: what is said to the policy is added as it is.

    Attributes:
        messages: of a chat, so far.
    """

    def __init__(self, policy: Policy, start: str | Sequence[ChatMessage]) -> None:
        self._policy = policy
        self._text: str | None = start if isinstance(start, str) else None
        self._token_ids: list[int] | None = None
        self.messages: list[ChatMessage] = [] if isinstance(start, str) else list(start)

    @classmethod
    def of_task(cls, policy: Policy, task: Task) -> Dialogue:
        """One that begins with the task's prompt."""
        return cls(policy, task.prompt)

    @property
    def plain(self) -> bool:
        """Whether it is plain text."""
        return self._text is not None

    def tell(self, content: str, role: str = "user") -> None:
        """Add what the policy sees before its next turn."""
        if not self.plain:
            self.messages.append({"role": role, "content": content})
        elif self._token_ids is None:
            self._text = f"{self._text}{content}"
        else:
            self._token_ids += self._policy.encode(content)

    async def ask(self, **options: Any) -> Reply:
        """The policy's next turn; keyword arguments as those of `Policy.chat`."""
        if not self.plain:
            reply = await self._policy.chat(self.messages, **options)
            self.messages.append(reply.message)
            return reply
        assert self._text is not None
        reply = await self._policy.complete(self._text if self._token_ids is None else self._token_ids, **options)
        self._token_ids = reply.token_ids
        return reply
