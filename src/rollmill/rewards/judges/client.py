"""The judge client: votes, a reminder after a malformed verdict, and handling of requests without a reply."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rollmill.concurrency import gather_or_cancel
from rollmill.errors import RewardError
from rollmill.rewards.base import GATED, NO_ANSWER, NOT_APPLICABLE, TIMEOUT, RewardResult, Score, find_answer
from rollmill.rewards.judges.chat import (
    STOP,
    TOO_LONG,
    ChatMessage,
    ChatModel,
    ChatModelReply,
    ChatSamplingParams,
    NoReplyError,
)
from rollmill.rewards.judges.prompts import sanitize_text
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion

if TYPE_CHECKING:
    from rollmill.rewards.judges.base import LLMJudge

# Counters of a judge's calls, tokens and cost.


@dataclass(slots=True)
class JudgeUsage:
    """Counts of one reward since it was built. Prices are per million tokens; replies from the cache cost nothing.

    `calls` are replies of the model; `failed` requests without one; `malformed` replies without a verdict.
    """

    prompt_price: float = 0.0
    completion_price: float = 0.0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("calls", "cached", "retries", "malformed", "failed", "prompt_tokens", "completion_tokens"), 0
        )
    )

    def add(self, key: str, count: int = 1) -> None:
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
        """Return all counters, and `cost` in the currency of the prices."""
        prompt, completion = self.counts["prompt_tokens"], self.counts["completion_tokens"]
        cost = (prompt * self.prompt_price + completion * self.completion_price) / 1e6
        return {key: float(count) for key, count in self.counts.items()} | {"cost": cost}


# Builds the chat model of a judge; rewards with the same settings share one.

_CONNECTION = {
    "endpoint",
    "model",
    "api_key_env",
    "options",
    "requests_per_minute",
    "tokens_per_minute",
    "max_in_flight",
    "tries",
    "try_s",
    "deadline_s",
    "away_s",
}


def build_chat_model(config: LLMJudge, resources: RewardResources) -> ChatModel:
    """Build the chat model of a reward. Connections and caches are closed with the reward manager.

    Raises:
        ConfigError: the key's variable is not set, the library is missing, or the cache cannot be used.
        ModelError: the folder holds no chat model.
    """
    model: ChatModel
    if config.path is None:
        from rollmill.rewards.judges.endpoint import EndpointChatModel

        settings = config.model_dump_json(include=_CONNECTION)
        model = resources.shared(f"endpoint {settings}", lambda: EndpointChatModel(config))
    else:
        from rollmill.rewards.judges.native import load_native_chat_model

        model = load_native_chat_model(config.path, resources.device)
    if config.cache is None:
        return model
    from rollmill.rewards.judges.chat import CachedChatModel, ChatReplyStore

    path = config.cache.expanduser().absolute()
    return CachedChatModel(model, resources.shared(f"cache {path}", lambda: ChatReplyStore(path)))


REMINDER = """\
That did not end with a verdict. Give it now, as one line of JSON and nothing else:
{form}"""
_REPEATED = 4000
"""Characters of a malformed reply that are shown to the judge again."""

Vote = TypeVar("Vote")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JudgePrompt(Generic[Vote]):
    """Messages, and a parser of the reply (None: malformed). `form` shows the verdict's JSON; `schema` describes it."""

    messages: list[ChatMessage]
    read: Callable[[str], Vote | None]
    form: str
    schema: dict[str, Any]


class JudgeClient:
    """Sends prompts to the model of one reward, and counts calls, tokens and cost."""

    def __init__(self, config: LLMJudge, resources: RewardResources) -> None:
        self._config = config
        self._model = build_chat_model(config, resources)
        self._announced: set[str] = set()
        self._counters = JudgeUsage(config.prompt_price, config.completion_price)

    async def votes(
        self, build_prompt: Callable[[list[str]], JudgePrompt[Vote]], texts: list[str]
    ) -> list[Vote | None]:
        """Return the configured number of votes on some texts; None for a vote without a verdict.

        The prompt is built, and its replies are parsed, outside the caller's event loop.

        Raises:
            NoReplyError: the prompt gets no reply, because of the texts.
            RewardError: the model cannot be called, or the prompt gets no reply even with empty texts.
        """
        try:
            return await self._model.loop.run(self._votes(build_prompt, texts))
        except NoReplyError as error:
            self._counters.add("failed")
            if error.outcome not in self._announced:
                _log.warning("a judge gave no verdict (%s; said once): %s", error.outcome, error)
            self._announced.add(error.outcome)
            raise

    def without(self, outcome: str) -> Score:
        """Return the score of a completion without a verdict."""
        config = self._config
        return Score(config.timeout_reward if outcome == TIMEOUT else config.unparsable_reward, outcome)

    def counters(self) -> dict[str, float]:
        """Return calls, tokens and cost so far."""
        return self._counters.values()

    async def _votes(
        self, build_prompt: Callable[[list[str]], JudgePrompt[Vote]], texts: list[str]
    ) -> list[Vote | None]:
        prompt = build_prompt(texts)
        indices = range(self._config.votes)
        try:
            replies = await self._chat(prompt, prompt.messages, indices)
        except NoReplyError as error:
            if error.advice:
                await self._require_reply(build_prompt([""] * len(texts)))
            raise
        votes = [self._read(prompt, reply) for reply in replies]

        async def retry(index: int) -> None:
            votes[index] = await self._remind(prompt, replies[index], index)

        await gather_or_cancel(retry(index) for index in indices if votes[index] is None)
        return votes

    async def _remind(self, prompt: JudgePrompt[Vote], reply: ChatModelReply, index: int) -> Vote | None:
        """Remind the judge that its reply had no verdict, and parse the new reply."""
        previous = sanitize_text(reply.text)[-_REPEATED:] or "..."
        reminder = {"role": "user", "content": REMINDER.format(form=prompt.form)}
        try:
            messages = [*prompt.messages, {"role": "assistant", "content": previous}, reminder]
            [reply] = await self._chat(prompt, messages, [index])
        except NoReplyError as error:
            if error.outcome != TOO_LONG:
                raise
            return None
        return self._read(prompt, reply)

    async def _require_reply(self, empty: JudgePrompt[Vote]) -> None:
        """Raise RewardError if even a prompt with empty texts gets no reply."""
        try:
            await self._chat(empty, empty.messages, [0])
        except NoReplyError as error:
            if error.advice:
                raise RewardError(f"no request gets a reply, whatever the response: {error}; {error.advice}") from error

    async def _chat(
        self, prompt: JudgePrompt[Vote], messages: Sequence[ChatMessage], indices: Sequence[int]
    ) -> list[ChatModelReply]:
        config = self._config
        schema = prompt.schema if config.structured else None
        sampling = ChatSamplingParams(config.temperature, config.max_tokens, config.seed, schema)
        replies = await self._model.chat(messages, sampling, indices)
        for reply in replies:
            self._counters.reply(reply)
        return replies

    def _read(self, prompt: JudgePrompt[Vote], reply: ChatModelReply) -> Vote | None:
        vote = prompt.read(reply.text) if reply.finish == STOP else None
        if vote is None:
            self._counters.add("malformed")
        return vote


# Scores completions of one task by comparison with each other, one score per distinct answer.


async def score_distinct_texts(
    completions: Sequence[Completion],
    judged: Sequence[RewardResult],
    limit: int,
    client: JudgeClient,
    compare: Callable[[Counter[str]], Awaitable[dict[str, Score]]],
) -> list[Score]:
    """Return a score per completion, in their order.

    `compare` gets each distinct answer once, with its number of completions, and is called if there are at least two
    completions. Gated completions, those without an answer and those longer than `limit` characters do not take part.
    """

    def excluded(result: RewardResult, answer: str | None) -> Score | None:
        if result.failed_gate is not None:
            return Score(None, GATED)
        if answer is None:
            return Score(0.0, NO_ANSWER)
        return client.without(TOO_LONG) if len(answer) > limit else None

    answers = [find_answer(completion) for completion in completions]
    scores = [excluded(result, answer) for result, answer in zip(judged, answers, strict=True)]
    playing = [answer or "" for answer, score in zip(answers, scores, strict=True) if score is None]
    counts = Counter(playing)
    alone = counts.total() < 2
    found = dict.fromkeys(counts, Score(None, NOT_APPLICABLE)) if alone else await compare(counts)
    return [found[answer or ""] if score is None else score for answer, score in zip(answers, scores, strict=True)]
