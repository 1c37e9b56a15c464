"""Asking a judge: votes, a reminder where the verdict is malformed, and what becomes of questions without an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollmill.config.rewards import JudgeSection
from rollmill.errors import RewardError
from rollmill.rewards.base import TIMEOUT, Score
from rollmill.rewards.event_loop import gather_or_cancel
from rollmill.rewards.judges.chat import STOP, TOO_LONG, ChatMessage, ChatModelReply, ChatSamplingParams, NoReplyError
from rollmill.rewards.judges.models import build_chat_model
from rollmill.rewards.judges.sanitizing import sanitize_text
from rollmill.rewards.judges.usage import JudgeUsage
from rollmill.rewards.resources import RewardResources

REMINDER = """\
That did not end with a verdict. Give it now, as one line of JSON and nothing else:
{form}"""
_REPEATED = 4000
"""Characters of a malformed reply that the judge is shown again."""

Vote = TypeVar("Vote")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JudgePrompt(Generic[Vote]):
    """Messages, and how to read a reply (None: malformed). `form` shows the verdict's JSON; `schema` describes it."""

    messages: list[ChatMessage]
    read: Callable[[str], Vote | None]
    form: str
    schema: dict[str, Any]


class JudgeClient:
    """Asks the model of one reward, and counts."""

    def __init__(self, config: JudgeSection, resources: RewardResources) -> None:
        self._config = config
        self._model = build_chat_model(config, resources)
        self._announced: set[str] = set()
        self._counters = JudgeUsage(config.prompt_price, config.completion_price)

    async def votes(self, make: Callable[[list[str]], JudgePrompt[Vote]], texts: list[str]) -> list[Vote | None]:
        """What each of the configured votes says to the question about some texts; None where it has no verdict.

        The question is made, and its replies are read, outside the caller's event loop.

        Raises:
            NoReplyError: the question gets no reply, for a reason that lies in the texts.
            RewardError: the model cannot be asked, or the question gets no reply even with empty texts.
        """
        try:
            return await self._model.loop.run(self._votes(make, texts))
        except NoReplyError as error:
            self._counters.add("failed")
            if error.outcome not in self._announced:
                _log.warning("a judge gave no verdict (%s; said once): %s", error.outcome, error)
            self._announced.add(error.outcome)
            raise

    def without(self, outcome: str) -> Score:
        """The verdict on a completion that got none."""
        config = self._config
        return Score(config.timeout_reward if outcome == TIMEOUT else config.unparsable_reward, outcome)

    def counters(self) -> dict[str, float]:
        """Calls, tokens and cost so far."""
        return self._counters.values()

    async def _votes(self, make: Callable[[list[str]], JudgePrompt[Vote]], texts: list[str]) -> list[Vote | None]:
        question = make(texts)
        indices = range(self._config.votes)
        try:
            replies = await self._chat(question, question.messages, indices)
        except NoReplyError as error:
            if error.advice:
                await self._require_reply(make([""] * len(texts)))
            raise
        votes = [self._read(question, reply) for reply in replies]

        async def remind(index: int) -> None:
            votes[index] = await self._reminded(question, replies[index], index)

        await gather_or_cancel(remind(index) for index in indices if votes[index] is None)
        return votes

    async def _reminded(self, question: JudgePrompt[Vote], reply: ChatModelReply, index: int) -> Vote | None:
        """What the judge says when told that its reply had no verdict."""
        said = sanitize_text(reply.text)[-_REPEATED:] or "..."
        reminder = {"role": "user", "content": REMINDER.format(form=question.form)}
        try:
            messages = [*question.messages, {"role": "assistant", "content": said}, reminder]
            [reply] = await self._chat(question, messages, [index])
        except NoReplyError as error:
            if error.outcome != TOO_LONG:
                raise
            return None
        return self._read(question, reply)

    async def _require_reply(self, empty: JudgePrompt[Vote]) -> None:
        """Raises RewardError where even a question about empty texts gets no reply."""
        try:
            await self._chat(empty, empty.messages, [0])
        except NoReplyError as error:
            if error.advice:
                raise RewardError(f"no question is answered, whatever the response: {error}; {error.advice}") from error

    async def _chat(
        self, question: JudgePrompt[Vote], messages: Sequence[ChatMessage], indices: Sequence[int]
    ) -> list[ChatModelReply]:
        config = self._config
        schema = question.schema if config.structured else None
        sampling = ChatSamplingParams(config.temperature, config.max_tokens, config.seed, schema)
        replies = await self._model.chat(messages, sampling, indices)
        for reply in replies:
            self._counters.reply(reply)
        return replies

    def _read(self, question: JudgePrompt[Vote], reply: ChatModelReply) -> Vote | None:
        vote = question.read(reply.text) if reply.finish == STOP else None
        if vote is None:
            self._counters.add("malformed")
        return vote
