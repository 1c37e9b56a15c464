"""Conversations to tokens and back: prompts, demonstrations, replies, and the prompts that continue them.

One renderer serves rollouts, demonstrations, judges on local models, agents, `serve` and evaluation. The chat template
is the truth: what is rendered is the template's text. What it cannot show, or what could not be trained or read back
exactly, is refused with the place where the texts part.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, Literal

from rollmill.data.renderer.call_formats import (
    ToolFormat,
    describe_tools,
    render_tool_calls,
    wrap_tool_response,
)
from rollmill.data.renderer.families import lacks_library
from rollmill.data.renderer.replies import ReplyParser
from rollmill.data.renderer.template import (
    ANSWER,
    MARK,
    QUESTION,
    ChatMessage,
    ChatTemplate,
    Switches,
    Tools,
    common_prefix,
)
from rollmill.data.renderer.tokens import encode_pieces
from rollmill.data.renderer.turns import TurnTexts, reasoning_of
from rollmill.errors import ChatTemplateError
from rollmill.types import ToolCall, split_reasoning

log = logging.getLogger(__name__)

_MOST_BOUND = 32


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt, ready for the policy's turn."""

    token_ids: list[int]
    text: str


class Renderer:
    """Renders the conversations of one model, and reads its turns.

    Args:
        stop_ids: ids at which the checkpoint's generation ends.
        day: the date that templates print which ask for today's.
        switches: variables of the chat template, such as `enable_thinking`.

    Attributes:
        template: the tokenizer's chat template.
        replies: reads the policy's turns; `parse` is its method.
        encode, decode: those of the template, without added tokens, and with special ones.
        stop_ids: ids that end a turn: the given ones, and those that the template ends turns with.

    Raises ChatTemplateError if the tokenizer has no usable chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: frozenset[int] = frozenset(),
        day: date | None = None,
        switches: Switches | None = None,
    ) -> None:
        processor = getattr(tokenizer, "picture_processor", None)
        if (
            tokenizer.chat_template is None
            and getattr(processor and processor.processor, "chat_template", None) is None
        ):
            raise ChatTemplateError("the model's tokenizer has no chat template; use a checkpoint with one")
        self.tokenizer, self.template = tokenizer, ChatTemplate(tokenizer, day or date.today(), switches)
        self._given_stops = stop_ids
        self._bound = dict[str, Renderer]()
        self._said = set[str]()
        self.encode, self.decode = self.template.encode, self.template.decode
        self.stop_ids = stop_ids | self._own_stops()
        self._turns = TurnTexts(self.template)
        self.replies = ReplyParser(self._turns, self.stop_ids)
        self.parse = self.replies.parse

    def bound(self, switches: Switches | None) -> Renderer:
        """Return the renderer with other variables of the template besides its own ones.

        Raises ChatTemplateError like `load_renderer`.
        """
        key = json.dumps(switches or {}, sort_keys=True, default=str)
        if not switches:
            return self
        if key not in self._bound:
            settings = {**self.template.switches, **switches}
            made = Renderer(self.tokenizer, self._given_stops, self.template.day, settings)
            made.check()
            self._bound[key] = made
            if len(self._bound) > _MOST_BOUND:  # clients of an endpoint choose them
                del self._bound[next(iter(self._bound))]
        return self._bound[key]

    def check(self) -> None:
        """Check that an answer continues its question's prompt, ends where generation ends, and is read back.

        Reasoning has to be read back, too, if the template shows any.

        Raises ChatTemplateError that says what is not so.
        """
        reasoned = {**ANSWER, "reasoning_content": "a thought"}
        for turn in [dict(ANSWER), *([reasoned] if self.template.supports_reasoning else [])]:
            try:
                before, text = self.demonstration_pieces([QUESTION, turn], 1)[-2:]
            except ChatTemplateError:
                if turn is reasoned:
                    continue  # thinking is switched off
                raise
            ids = self.encode(text[0])
            if stops := [each for each in ids[:-1] if each in self.stop_ids]:
                raise ChatTemplateError(
                    f"the tokenizer's chat template writes {self.decode(stops[:1])!r} within a turn, where generation "
                    "ends; correct eos_token_id in generation_config.json, or use another template"
                )
            reply = self.replies.parse(ids, self.encode(before[0]))
            known = self.tokenizer.decode(self.encode(turn["content"]), skip_special_tokens=True)  # to small tokenizers
            answered = _spaceless(reply.content) == _spaceless(known) and reply.reasoning_finished
            if not answered or (turn is reasoned and not (reply.reasoning or "").strip()):
                remedy = "use another template"
                if lacks_library(self.tokenizer):
                    remedy = "install the library that may read it: pip install 'rollmill[chat]'"
                raise ChatTemplateError(
                    f"the tokenizer's chat template writes {'reasoning' if turn is reasoned else 'an answer'} in a "
                    f"format that cannot be read back: {text[0]!r} was read as {reply.content!r}, with the reasoning "
                    f"{reply.reasoning!r}; {remedy}"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return _forgotten, ()

    def _own_stops(self) -> set[int]:
        """The id of the token that the template ends turns with, and of that of calls if generation ends there, too."""
        found = set[int]()
        try:
            end, call_end = self.template.turn_end, self.template.call_end
        except ChatTemplateError:
            return found  # said when it is used
        last = self.template.last_special(self.template.render([QUESTION, ANSWER], prompt=False))
        for text in (end, call_end):
            token = self._token(text)
            if token is not None and (token in self._given_stops or (last and text == end)):
                found.add(token)
        return found

    @property
    def turn_end_id(self) -> int | None:
        """The id of the token that ends a turn; None if the template writes none."""
        return self._token(self.template.turn_end)

    def _token(self, text: str) -> int | None:
        """The id of a special token; None for other texts."""
        token = self.tokenizer.convert_tokens_to_ids(text) if text else None
        return token if isinstance(token, int) and self.decode([token]) == text else None

    # -- prompts -----------------------------------------------------------------------------------------------

    def text(self, messages: Sequence[ChatMessage], tools: Tools = None) -> str:
        """Render messages as text, ready for the policy's turn.

        Raises ChatTemplateError if the template refuses the messages, or does not show one of them or a tool.
        """
        text = self.template.render(messages, tools)
        self.template.check_shown(messages, tools, text)
        return text

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools = None) -> RenderedPrompt:
        """Render and tokenize messages, ready for the policy's turn.

        Raises ChatTemplateError like `text`, and if calls of the tools could not be read.
        """
        text = self.text(messages, tools)
        if tools:
            self.replies.require_readable_calls()
        return RenderedPrompt(self.encode(text), text)

    # -- demonstrations ----------------------------------------------------------------------------------------

    def demonstration(
        self,
        messages: Sequence[ChatMessage],
        first: int,
        tools: Tools = None,
        learn: Literal["last", "all"] = "all",
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation that ends with an assistant's turn; True marks tokens that the policy is to learn.

        Args:
            first: number of the first message that is not the prompt's.
            learn: "all": every assistant's turn from message `first` on; "last": the last one.

        Raises ChatTemplateError like `demonstration_pieces`.
        """
        pieces = self.demonstration_pieces(messages, len(messages) - 1 if learn == "last" else first, tools)
        encoded = encode_pieces(self.tokenizer, [text for text, _ in pieces])
        self.check_learned(encoded, pieces)
        mask = [learned for ids, (_, learned) in zip(encoded, pieces, strict=True) for _ in ids]
        return [token for ids in encoded for token in ids], mask

    def demonstration_pieces(
        self, messages: Sequence[ChatMessage], first: int, tools: Tools = None
    ) -> list[tuple[str, bool]]:
        """Split a conversation that ends with an assistant's turn into texts that are learned (True), and others.

        Every assistant's turn from message `first` on is learned. The last one continues the prompt of a rollout
        exactly, and ends with the token at which a rollout ends. Its reasoning is learned as well; if the prompt opens
        the reasoning, the turn closes it.

        Raises ChatTemplateError if the template does not show a message, changes earlier messages when the turn is
        added, drops the last turn's reasoning or calls, or the end of a turn is unknown.
        """
        last = len(messages) - 1
        before = self.text(messages[:last], tools)
        pieces, at = list[tuple[str, bool]](), 0
        whole = self.template.render(messages, tools, prompt=False)
        self.template.check_shown(messages, tools, whole)
        for i in range(first, last):
            if messages[i]["role"] == "assistant":
                start, end = self._turns.span(whole, messages, i, tools)
                stops = self._token(whole[end.start : end.stop]) in self.stop_ids
                stop = end.stop if stops else end.start  # gpt-oss: an end at which nothing stops
                pieces += [(whole[at:start], False), (whole[start:stop], True)]
                at = stop
                if reasoning_of(messages[i]) not in pieces[-1][0]:
                    self._warn_once(
                        "the chat template drops the reasoning of turns before the last one; these are learned "
                        "without it"
                    )
        if before[:at] != whole[:at]:
            raise self._turns.parted("an earlier turn", before, whole)
        turn = self._turns.last(whole, before, messages, tools)
        ends = (self.template.call_end, self.template.turn_end, str(self.tokenizer.eos_token))
        written = next((each for each in ends if each and turn.endswith(each)), "")
        token = self._token(written)
        if token is None or token not in self.stop_ids:
            raise ChatTemplateError(
                f"turns end with {written!r} in the tokenizer's chat template, and generation does not end there; add "
                "its id to eos_token_id in generation_config.json"
            )
        return [*pieces, (before[at:], False), (turn, True)]

    def answer_text(self, prompt: str, content: str) -> str:
        """Return the turn, without its end, that answers a rollout's prompt with a text: as the template writes it.

        A text with its own end of reasoning, and one after a prompt that ends in another way (with thinking switched
        off), stay as they are.
        """
        header, frame = self._answer_header
        closed = self.template.reasoning_tags[1].strip() in content
        return content if closed or not header or not prompt.endswith(header) else f"{frame}{content}"

    @cached_property
    def _answer_header(self) -> tuple[str, str]:
        """The end of a prompt, and what the template writes between it and an answer."""
        try:
            context = self.template.render([QUESTION], prompt=False)
            (before, _), (turn, _) = self.demonstration_pieces([QUESTION, {**ANSWER, "content": MARK}], 1)[-2:]
        except ChatTemplateError:
            return "", ""
        return before[common_prefix(context, before) :], turn.partition(MARK)[0]

    def check_learned(self, encoded: Sequence[Sequence[int]], pieces: Sequence[tuple[str, bool]]) -> None:
        """Raise ChatTemplateError if a learned piece goes on behind a token at which generation ends."""
        for ids, (text, learned) in zip(encoded, pieces, strict=True):
            if learned and (stops := [each for each in ids[:-1] if each in self.stop_ids]):
                raise ChatTemplateError(
                    f"the response has {self.decode(stops[:1])!r}, at which generation ends, before its end: "
                    f"{text[-80:]!r}; leave it out, the chat template writes the end of a turn"
                )

    # -- the next turn -----------------------------------------------------------------------------------------

    def continue_prompt(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[ChatMessage],
        tools: Tools = None,
    ) -> list[int] | None:
        """Tokens of the next prompt, which begins with exactly the tokens of a prompt and its completion.

        None if the template changes the history, as by dropping earlier reasoning: then it is rendered again.

        Args:
            messages: the conversation, in which the last assistant's message is the completion as `parse` reads it,
                and further messages after it.
        """
        behind = self.text_behind(prompt_ids, completion_ids, messages, tools)
        return None if behind is None else [*prompt_ids, *completion_ids, *self.encode(behind)]

    def text_behind(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[ChatMessage],
        tools: Tools = None,
        *,
        turn: int | None = None,
    ) -> str | None:
        """Text that follows a completion in the next prompt, see `continue_prompt`.

        Args:
            turn: number of the completion's message; default: the last assistant's.
        """
        i = max((i for i, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
        i = i if turn is None else turn
        if i < 0 or i == len(messages) - 1:
            return None
        if not self.replies.split(list(completion_ids), prompt_ids, "").reasoning_finished:
            return None  # the template shows no unfinished reasoning
        before = self.template.render(messages[:i], tools)
        text = self.template.render(messages, tools)
        before = before.rstrip()  # white space around a turn may differ: templates strip and add some
        if not text.startswith(before):
            return None
        end = self._turns.end(text, messages, i, tools, prompt=True)
        if end is None or end.start < len(before):
            return None
        alone = self.template.render(messages[: i + 1], tools, prompt=False)  # the turn before anything followed
        content = split_reasoning(messages[i].get("content") or "").content.strip()
        ids = list(completion_ids)
        sampled = f"{before}{self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)}"
        shown = _spaceless(text[: end.start])
        if shown != _spaceless(sampled) and not _spaceless(alone).startswith(shown):
            return None
        if content not in text[len(before) : end.start]:
            return None
        said = self.replies.split(ids, prompt_ids, "")
        if said.reasoning is not None and self.template.reasoning_tags[1].strip() not in text[len(before) : end.start]:
            return None
        if completion_ids and completion_ids[-1] in self.stop_ids:
            return text[end.stop :] if self.decode(completion_ids[-1:]) == text[end.start : end.stop] else None
        return text[end.start if sampled.endswith(text[end.content : end.start]) else end.content :]

    # -- templates that lack something -------------------------------------------------------------------------

    def fitted(
        self, messages: Sequence[ChatMessage], tools: Tools, format: ToolFormat = "auto"
    ) -> tuple[list[ChatMessage], Tools]:
        """Fit messages and tools of an agent to the template: parts that it would not render become text.

        Tools are described in the system message, too, if another format of calls than the model's own is asked for.
        Text beside calls, which a policy may write, is left out of the history if the template shows none. The text of
        a special token in a tool's result is parted by a space, since it would end the turn. Earlier messages become
        the same text whatever follows, so that a conversation can continue.
        """
        native = format == "auto" and self.replies.native_calls
        found: list[dict[str, Any]] = []
        for message in map(self._without_control, messages):
            if message["role"] == "tool" and not self.template.supports_tool_results:
                _add_to_user(found, wrap_tool_response(_text(message)))
            elif (
                message["role"] == "user" and found and found[-1].get("of_tool") and isinstance(message["content"], str)
            ):
                _add_to_user(found, _text(message))
            elif message.get("tool_calls") and not native:
                calls = render_tool_calls([_call(each) for each in message["tool_calls"]], format)
                text = "\n".join(each for each in (_text(message), calls) if each)
                found.append({"role": message["role"], "content": text})
            elif message.get("tool_calls") and not self._shows_text_beside_calls(message):
                found.append({**message, "content": None})
            else:
                found.append(dict(message))
        fitting = [{key: value for key, value in each.items() if key != "of_tool"} for each in found]
        if not tools:
            return list(fitting), None
        if not native:
            return self._with_system_text(fitting, describe_tools(tools, format)), None
        return list(fitting), tools

    def _without_control(self, message: ChatMessage) -> ChatMessage:
        """Part the special tokens in a tool's result."""
        if message["role"] != "tool" or not message.get("content"):
            return message
        if isinstance(message["content"], str):
            return {**message, "content": self._part_tokens(message["content"])}
        parts = [
            {**part, "text": self._part_tokens(part["text"])} if part.get("type") == "text" else part
            for part in message["content"]
        ]
        return {**message, "content": parts}

    def _part_tokens(self, text: str) -> str:
        parted = self._control_tokens.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        if parted != text:
            self._warn_once("a tool's result has the text of a special token; a space is put into it")
        return parted

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        special = sorted(self.tokenizer.all_special_tokens, key=len, reverse=True)
        return re.compile("|".join(re.escape(each) for each in special if len(each) > 2) or "(?!)")

    def _shows_text_beside_calls(self, message: ChatMessage) -> bool:
        """True if a message that calls tools has no text, or one that the template shows."""
        thinks = bool(message.get("reasoning_content"))
        if not _text(message).strip() or thinks in self.template.text_beside_calls:
            return True
        self._warn_once("the chat template shows no text beside tool calls; it is left out of the history")
        return False

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            log.warning(text)
        self._said.add(text)

    def _with_system_text(self, messages: list[dict[str, Any]], text: str) -> list[ChatMessage]:
        """Add a text to the system message, or before the first message if the template supports none."""
        first = messages[0] if messages else {}
        if first.get("role") == "system" or (messages and not self.template.supports_system):
            before = [text, _text(first)] if first["role"] != "system" else [_text(first), text]
            return [{**first, "content": "\n\n".join(before)}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


def load_renderer(tokenizer: Any, *, stop_ids: frozenset[int] | None = None, day: date | None = None) -> Renderer:
    """Build the renderer of a tokenizer, and check that its template can be trained.

    Raises ChatTemplateError if it has no chat template, or it fails `Renderer.check`.
    """
    eos = tokenizer.eos_token_id
    renderer = Renderer(tokenizer, stop_ids or frozenset([] if eos is None else [eos]), day)
    renderer.check()
    return renderer


def renderer_of(tokenizer: Any) -> Renderer:
    """Return the renderer of a tokenizer, made at its first use. Raises ChatTemplateError like `load_renderer`."""
    found: Renderer | None = getattr(tokenizer, "renderer", None)
    if found is None or found.template.processor is not getattr(tokenizer, "picture_processor", None):
        eos, day = tokenizer.eos_token_id, getattr(tokenizer, "template_day", None)
        stop_ids = getattr(tokenizer, "stop_ids", None) or frozenset([] if eos is None else [eos])
        found = tokenizer.renderer = load_renderer(tokenizer, stop_ids=stop_ids, day=day)
    return found


def _forgotten() -> None:
    """Stands for a renderer in copies of a tokenizer, which make their own."""


def _spaceless(text: str) -> str:
    """A text without its white space, which templates add and strip around turns."""
    return "".join(text.split())


def _call(entry: Mapping[str, Any]) -> ToolCall:
    """Parse an entry of `tool_calls`, whose arguments are text in OpenAI's format."""
    function = entry["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError):  # as a policy may have written it
            arguments = json.loads(arguments or "{}")
    return ToolCall(entry.get("id", ""), function["name"], arguments)


def _text(message: ChatMessage) -> str:
    return message.get("content") or ""


def _add_to_user(found: list[dict[str, Any]], text: str) -> None:
    """Join consecutive results, and a user's text after them, into one turn, as some templates require."""
    if found and found[-1].get("of_tool"):
        found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{text}"}
    else:
        found.append({"role": "user", "content": text, "of_tool": True})
