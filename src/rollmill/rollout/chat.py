"""Chat messages as tokens, without ever turning the policy's own tokens into text and back.

A conversation goes on from the tokens the policy has produced: what the template puts behind its turn is added to them.
Where a template does not keep what came before (it drops earlier reasoning, or writes turns of the past differently),
the history is rendered anew: the sample forks there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollmill.errors import EngineError
from rollmill.rollout.tools.formats import ToolCall, ToolFormat, describe_tools, render_tool_calls, wrap_tool_response
from rollmill.types import Completion

# What a chat template knows of system messages, tools, calls and results; messages fitted to what it does not.
#
# Templates are programs that nobody can read off what they do, so each is shown a small conversation and its answer is
# looked at.

ChatMessage = Mapping[str, Any]
"""One message of a chat as OpenAI's interface has it: `role`, `content`, perhaps `tool_calls` and others."""

_MARK = "rollmillprobe"
_ASKED = {"role": "user", "content": "question"}
_SAID = {"role": "assistant", "content": "answer"}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _MARK, "description": "a tool", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def apply(self, messages: Sequence[ChatMessage], tools: Any = None) -> str:
        """Messages as text, ready for the policy's turn. Raises whatever the template raises."""
        text: str = self._tokenizer.apply_chat_template(
            [dict(each) for each in messages], tools=tools, add_generation_prompt=True, tokenize=False
        )
        return text

    @cached_property
    def supports_system(self) -> bool:
        """Whether it shows a system message."""
        return self._shows([{"role": "system", "content": _MARK}, _ASKED])

    @cached_property
    def supports_tools(self) -> bool:
        """Whether it shows the tools of a chat."""
        return self._shows([_ASKED], [_PROBE_TOOL])

    @cached_property
    def supports_tool_results(self) -> bool:
        """Whether it shows messages of the role `tool` behind a call that stands in the text of a turn."""
        result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "tool", "content": _MARK}
        return self._shows([_ASKED, _SAID, result, _SAID, _ASKED])

    @cached_property
    def supports_tool_calls(self) -> bool:
        """Whether it shows `tool_calls` of a message."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": _MARK, "arguments": {}}}
        return self._shows([_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}])

    def fitted(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None, format: ToolFormat
    ) -> tuple[list[ChatMessage], Any]:
        """Messages and tools as the template takes them: what it would not show is put into texts.

        Messages in front become the same texts whatever comes behind them, so that a conversation can go on.
        """
        found: list[ChatMessage] = []
        for message in messages:
            if message["role"] == "tool" and not self.supports_tool_results:
                _add_to_user(found, wrap_tool_response(_text(message)))
            elif message["role"] == "user" and found and found[-1].get("of_tool") and _plain(message):
                _add_to_user(found, _text(message))
            elif message.get("tool_calls"):
                found.append(self._with_calls(message, format))
            else:
                found.append(message)
        fitting = [{key: value for key, value in each.items() if key != "of_tool"} for each in found]
        if not tools or self.supports_tools:
            return list(fitting), tools
        return self._told(fitting, describe_tools(tools, format)), None

    def _with_calls(self, message: ChatMessage, format: ToolFormat) -> ChatMessage:
        """A turn that was not the policy's own, with its calls. Templates take arguments as objects."""
        calls = [_call(each) for each in message["tool_calls"]]
        if not self.supports_tool_calls:
            text = "\n".join(each for each in (_text(message), render_tool_calls(calls, format)) if each)
            return {"role": message["role"], "content": text}
        given = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in calls
        ]
        return {**message, "content": _text(message), "tool_calls": given}

    def _told(self, messages: list[dict[str, Any]], text: str) -> list[ChatMessage]:
        """The messages with a text in the system message, or in front of the first one where there can be none."""
        first = messages[0] if messages else {}
        if first.get("role") == "system" or (messages and not self.supports_system):
            before = [text, _text(first)] if first["role"] != "system" else [_text(first), text]
            return [{**first, "content": "\n\n".join(before)}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def _shows(self, messages: list[dict[str, Any]], tools: Any = None) -> bool:
        try:
            return _MARK in self.apply(messages, tools)
        except Exception:  # templates raise Jinja's errors and Python's: then this one takes no such thing
            return False


def _call(entry: Mapping[str, Any]) -> ToolCall:
    """An entry of `tool_calls`, whose arguments are text in OpenAI's format."""
    function = entry["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError):  # as a policy may have written it
            arguments = json.loads(arguments or "{}")
    return ToolCall(entry.get("id", ""), function["name"], arguments)


def _plain(message: ChatMessage) -> bool:
    return isinstance(message["content"], str)


def _text(message: ChatMessage) -> str:
    return message.get("content") or ""


def _add_to_user(found: list[ChatMessage], text: str) -> None:
    """Results that follow each other, and what a user says behind them, are one turn: some templates demand it."""
    if found and found[-1].get("of_tool"):
        found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{text}"}
    else:
        found.append({"role": "user", "content": text, "of_tool": True})


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
