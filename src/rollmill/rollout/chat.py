"""Chat messages as tokens, without ever turning the policy's own tokens into text and back.

A conversation goes on from the tokens the policy has produced: what the template puts behind its turn is added to them.
Where a template does not keep what came before (it drops earlier reasoning, or writes turns of the past differently),
the history is rendered anew: the sample forks there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.errors import EngineError
from rollmill.rollout.chat_template import ChatMessage, ChatTemplate
from rollmill.rollout.tools.formats import ToolFormat
from rollmill.types import Completion


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A turn of the policy and all that came before it."""

    messages: tuple[ChatMessage, ...]  #: the conversation as its user knows it, this turn included
    raw: tuple[ChatMessage, ...]  #: the same, with the policy's turns as it wrote them
    tools: Any  #: what the prompt offered
    prompt: str  #: what the policy saw, as text
    text: str  #: what it wrote, without the token that ended it
    token_ids: tuple[int, ...]  #: prompt and turn
    end: str | None  #: the token that ended it; None where it was cut off, or ended by a stop string


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What the policy is asked: `token_ids` are those of `text`, or go on from tokens it has produced."""

    token_ids: list[int]
    text: str
    raw: tuple[ChatMessage, ...]
    continues: RecordedReply | None


class ChatRenderer:
    """A tokenizer's chat template.

    Args:
        eos_ids: the ids that end a turn of the policy.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.tokenizer, self._eos_ids = tokenizer, eos_ids
        self._template = ChatTemplate(tokenizer)

    def render(
        self, messages: Sequence[ChatMessage], tools: Any = None, *, format: ToolFormat = "auto", name: str = "a chat"
    ) -> str:
        """Messages as text, ready for the policy's turn.

        What the template does not show of tools, calls and results is put into texts, calls in `format`.

        Raises:
            EngineError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if self.tokenizer.chat_template is None:
            raise EngineError(
                f"{name}: the model's tokenizer has no chat template; use a checkpoint with one, or `policy.complete`"
            )
        try:
            return self._template.apply(*self._template.fitted(messages, tools, format))
        except Exception as error:  # templates are programs: they raise Jinja's errors and Python's
            raise EngineError(f"{name}: the tokenizer's chat template refuses the messages: {error}") from error

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        said: Sequence[RecordedReply] = (),
        tools: Any = None,
        *,
        format: ToolFormat = "auto",
        name: str = "a chat",
    ) -> ChatPrompt:
        """The tokens of a conversation, going on from the longest of what was `said` that it begins with.

        Raises EngineError like `render`.
        """
        known = [each for each in said if each.tools == tools and _begins(messages, each.messages)]
        known.sort(key=lambda each: len(each.messages), reverse=True)
        raw = (*known[0].raw, *messages[len(known[0].messages) :]) if known else tuple(messages)
        text = self.render(raw, tools, format=format, name=name)
        for each in known:
            behind = self._behind(each, text)
            if behind is not None:
                return ChatPrompt([*each.token_ids, *self.encode(behind)], text, raw, each)
        return ChatPrompt(self.encode(text), text, raw, None)

    def said(
        self, messages: Sequence[ChatMessage], prompt: ChatPrompt, tools: Any, completion: Completion
    ) -> RecordedReply:
        """The policy's turn, remembered.

        Args:
            messages: the conversation as its user knows it, the turn included.
        """
        ids = completion.token_ids.tolist()
        ended = bool(ids) and ids[-1] in self._eos_ids
        text = self.decode(ids[:-1] if ended else ids)
        raw = (*prompt.raw, {"role": "assistant", "content": text})
        end = self.decode(ids[-1:]) if ended else None
        return RecordedReply(tuple(messages), raw, tools, prompt.text, text, (*prompt.token_ids, *ids), end)

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of a chat; the template has put all special tokens there."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of tokens, special ones included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _behind(self, said: RecordedReply, text: str) -> str | None:
        """What stands behind the turn in a rendered conversation; None where the template has not kept it.

        White space around the turn may differ: templates strip it or put some there, and the tokens stay as they are.
        """
        if not text.startswith(said.prompt):
            return None
        rest = text[len(said.prompt) :]
        own = said.text.strip()
        for shown, written in ((rest, said.text), (rest, own), (rest.lstrip(), own)):
            behind = shown.removeprefix(written)
            if shown.startswith(written) and behind.startswith(said.end or ""):
                return behind.removeprefix(said.end or "")
        return None


def _begins(messages: Sequence[ChatMessage], with_: Sequence[ChatMessage]) -> bool:
    return len(with_) < len(messages) and all(a == b for a, b in zip(messages, with_, strict=False))
