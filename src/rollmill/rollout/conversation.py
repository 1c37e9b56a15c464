"""A conversation with a model, through its chat template or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.rollout.chat_template import ChatMessage
from rollmill.rollout.environments.base import Observation, observation_text
from rollmill.rollout.policy import Policy, Reply
from rollmill.types import Task


class PolicyConversation:
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
    def of_task(cls, policy: Policy, task: Task) -> PolicyConversation:
        """One that begins with the task's prompt."""
        return cls(policy, task.prompt)

    @property
    def plain(self) -> bool:
        """Whether it is plain text."""
        return self._text is not None

    def tell(self, content: Observation, role: str = "user") -> None:
        """Add what the policy sees before its next turn: a text, or messages. Nothing is added for an empty one.

        A text behind a message of the same role becomes part of it: many templates want roles to take turns. In plain
        text messages stand as what they say.
        """
        if not self.plain:
            self._tell_messages([{"role": role, "content": content}] if isinstance(content, str) else content)
        elif self._token_ids is None:
            self._text = f"{self._text}{observation_text(content)}"
        else:
            self._token_ids += self._policy.encode(observation_text(content))

    def _tell_messages(self, messages: Sequence[ChatMessage]) -> None:
        for message in messages:
            last = self.messages[-1] if self.messages else {}
            if message["content"] == "":
                continue
            if _is_users_text(message) and _is_users_text(last):
                text = f"{last['content']}\n\n{message['content']}"
                self.messages[-1] = {"role": "user", "content": text}
            else:
                self.messages.append(dict(message))

    def said(self, reply: Reply) -> None:
        """Add what the policy has said in another conversation: its message, or in plain text its very tokens."""
        if not self.plain:
            self.messages.append(reply.message)
            return
        assert self._text is not None
        if self._token_ids is None:
            self._token_ids = self._policy.encode(self._text, start=True)
        self._token_ids += reply.completion.token_ids.tolist()

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


def _is_users_text(message: ChatMessage) -> bool:
    return message.keys() == {"role", "content"} and message["role"] == "user" and isinstance(message["content"], str)
