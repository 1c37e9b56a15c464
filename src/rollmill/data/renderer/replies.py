"""Turns of the policy, taken apart: reasoning, answer and tool calls, in the model's own form."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from rollmill.data.renderer.call_formats import (
    ATTEMPT,
    MarkedCalls,
    Parser,
    ToolFormat,
    learn_calls,
    parse_calls,
    text_parser,
)
from rollmill.data.renderer.call_tags import CallTags
from rollmill.data.renderer.families import FamilyRenderer, families_of
from rollmill.data.renderer.template import (
    ANSWER,
    CALL_ID,
    MARK,
    OTHER_MARK,
    QUESTION,
    ChatMessage,
    Tools,
    call_message,
    probe_tool,
)
from rollmill.data.renderer.turns import TurnTexts
from rollmill.errors import ChatTemplateError
from rollmill.types import ParsedReply, ToolCall, split_reasoning

log = logging.getLogger(__name__)

PROBE_ARGUMENTS: dict[str, Any] = {
    "text": 'a </tool_call> "b" </think>\n\U0001f642 {c}',
    "number": 7,
    "flag": True,
    "nested": {"list": [1, "two", {"three": 3.5}]},
}
"""Arguments that a format of calls must write and read back."""


class ReplyParser:
    """Reads the turns of one model: by the library's renderer of its family, or as its template writes them.

    Args:
        stop_ids: ids that end a turn.
    """

    def __init__(self, turns: TurnTexts, stop_ids: frozenset[int]) -> None:
        self._turns, self._template, self._stop_ids = turns, turns.template, stop_ids
        self._tokenizer = turns.template.tokenizer

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        tools: Tools = None,
        *,
        calls: bool | None = None,
        format: ToolFormat = "auto",
        text: str | None = None,
        salt: str = "",
    ) -> ParsedReply:
        """Take a turn of the policy apart. Never raises for anything that a policy writes.

        Args:
            prompt_ids: the prompt that it continues, which may have opened its reasoning.
            calls: whether calls are read; default: if there are tools, or another format than the model's own.
            text: the turn without special tokens, up to a stop string; default: the tokens' text.
            salt: makes the ids of calls differ between equal turns.
        """
        ids = list(token_ids)
        family = self.family
        reads_calls = bool(tools) or format != "auto" if calls is None else calls
        stop_text = self._stop_text(ids, text)
        if family is not None and format == "auto":
            said = self.split(ids, prompt_ids, stop_text)
            if self.text_tags and said.reasoning is not None:
                if not said.reasoning_finished:
                    return said
                rest = self.parse(self._template.encode(said.content), (), tools, calls=calls, salt=salt)
                return replace(rest, reasoning=said.reasoning)
            try:
                reply = family.parse(ids, prompt_ids, tools, salt=salt)
            except (ValueError, RecursionError) as error:
                reply = replace(said, malformed=[str(error)])
            hidden = self.call_tags.hide(said.content) if reads_calls else said.content
            if hidden != said.content:  # the library would end an argument at a tag within it
                before, _, behind = self._template.decode(ids).rpartition(said.content)
                shown = self._template.encode(f"{before}{hidden}{behind}")
                other = reply
                with suppress(ValueError, RecursionError):
                    other = family.parse(shown, prompt_ids, tools, salt=salt)
                if other.tool_calls and not (other.malformed or self.call_tags.in_text(other.content)):
                    restore = self.call_tags.restore
                    own = [replace(each, arguments=restore(each.arguments)) for each in other.tool_calls]
                    reply = replace(other, tool_calls=own, content=restore(other.content))
            if reply.tool_calls and not said.reasoning_finished:
                return said  # the library takes a call for the end of reasoning that was not closed
            written = self._template.decode(ids[:-1] if ids and ids[-1] in self._stop_ids else ids).removesuffix(
                stop_text
            )
            marked = any(mark in written for mark in self._template.special_tokens)
            if not (marked or reply.tool_calls or reply.malformed):  # the family's reading needs its marks
                reply = said
            if stop_text and reply.reasoning is not None and not reply.reasoning_finished:
                reply = replace(reply, reasoning=reply.reasoning.removesuffix(stop_text))
            reply = replace(reply, content=reply.content.removesuffix(stop_text))
            if not reads_calls and (reply.tool_calls or reply.malformed):
                raw = self.split(ids, prompt_ids, stop_text)
                reply = ParsedReply(
                    self._template.without_tokens(raw.content),
                    reply.reasoning,
                    reasoning_finished=reply.reasoning_finished,
                )
        else:
            reply = self.split(ids, prompt_ids, stop_text)
            if reads_calls and reply.reasoning_finished:
                parser: Parser = text_parser(format)
                if format == "auto" and self.native_calls and self.call_format is not None:
                    parser = self.call_format.parse
                found = parse_calls(reply.content, parser, salt=salt, stopped=bool(stop_text))
                reply = replace(found, reasoning=reply.reasoning)
            reply = replace(reply, content=self._template.without_tokens(reply.content))
        if reads_calls and format == "auto" and not (reply.tool_calls or reply.malformed):
            reply = replace(reply, malformed=self._attempts(reply.content))
        if reply.tool_calls and any(map(self.call_tags.in_text, [reply.content, *(e.name for e in reply.tool_calls)])):
            broken = "text of a call stands behind its end; a tag of the format is part of an argument"
            raw = self.split(ids, prompt_ids, stop_text)
            reply = replace(
                reply, content=self._template.without_tokens(raw.content), tool_calls=[], malformed=[broken]
            )
        if self._template.single_call and len(reply.tool_calls) > 1:
            more = f"the model's chat template has one call a turn; {len(reply.tool_calls) - 1} more were left out"
            reply = replace(reply, tool_calls=reply.tool_calls[:1], malformed=[*reply.malformed, more])
        whole = self._tokenizer.decode(ids, skip_special_tokens=True) if text is None else text
        if not (reply.reasoning or reply.tool_calls) and whole.strip() == reply.content.strip():
            return replace(reply, content=whole)
        return reply

    @cached_property
    def text_tags(self) -> bool:
        """True if the tags of reasoning are plain text, of which the model's family knows nothing (Llama 3.1)."""
        tags = {each.strip() for each in self._template.reasoning_tags}
        return not (self._template.supports_reasoning or tags & self._template.special_tokens)

    def _attempts(self, content: str) -> list[str]:
        """Errors of calls in formats without marks: a JSON object with a name that is cut off or damaged."""
        marked = self.native_calls and (self.call_format is None or self.call_format.start.strip())
        if marked and (self.call_format is not None or self._written_call.lstrip()[:1] != "{"):
            return []
        text = self._template.without_tokens(content, self._template.special_tokens)  # such as <|python_tag|>
        return ["not JSON, cut off, or behind a token of another format"] if ATTEMPT.match(text.strip()) else []

    @cached_property
    def _written_call(self) -> str:
        """A call as the template writes it; empty if it writes none."""
        if not (self._template.supports_tools and self._template.supports_tool_calls):
            return ""
        turn, tools = call_message([ToolCall(CALL_ID, MARK, {"text": "value"})]), [probe_tool()]
        try:
            return self._written(self._template.render([QUESTION], tools), turn, tools) or ""
        except ChatTemplateError:
            return ""

    @cached_property
    def call_tags(self) -> CallTags:
        """The closing tags of the template's own format of calls; none if it writes none."""
        arguments, tools = {"text": "value", "number": 7}, [probe_tool(), probe_tool(OTHER_MARK)]
        calls = [ToolCall(CALL_ID, MARK, arguments), ToolCall("ihgfedcba", OTHER_MARK, arguments)]
        if self._written_call:
            before = self._template.render([QUESTION], tools)
            for several in (calls, calls[:1]):  # some templates have one call a turn
                if written := self._written(before, call_message(several), tools):
                    return CallTags(written)
        return CallTags("")

    def split(self, ids: list[int], prompt_ids: Sequence[int], stop_text: str) -> ParsedReply:
        """Split a turn's exact text at its reasoning. Calls stay in the content, and special tokens everywhere."""
        raw = self._template.decode(ids[:-1] if ids and ids[-1] in self._stop_ids else ids).removesuffix(stop_text)
        start, end = (each.strip() for each in self._template.reasoning_tags)
        opened = (
            self._template.decode(prompt_ids[-len(start) - 8 :]).rstrip().endswith(start) if len(prompt_ids) else False
        )
        opened = opened or raw.lstrip().startswith(end)
        reply = split_reasoning(raw, opened=opened, start=start, end=end)
        before, behind = self._turns.answer_frame
        content = reply.content
        if before and content.startswith(before):
            content = content.removeprefix(before)
        return replace(reply, content=content.removesuffix(behind) if behind else content)

    def _stop_text(self, ids: list[int], text: str | None) -> str:
        """The stop string that ended a turn, and what follows it in the last token; empty without one."""
        whole: str = self._tokenizer.decode(ids, skip_special_tokens=True) if text is not None else ""
        return whole[len(text) :] if text is not None and whole.startswith(text) else ""

    @cached_property
    def family(self) -> FamilyRenderer | None:
        """The library's renderer of the model's family: one that reads what the template writes; else None.

        One that reads every argument is preferred, else one that reads those without the family's own tags: in formats
        that are not JSON (Qwen 3.5, GLM) only what follows tells a tag in an argument from the closing one. A format of
        JSON that was learned from the template needs no family.
        """
        if not (self._template.supports_tools and self._template.supports_tool_calls):
            return None
        known = list(families_of(self._tokenizer, self._template.switches))
        if (strict := next((each for each in known if self._reads(each, PROBE_ARGUMENTS)), None)) is not None:
            return strict
        if self.call_format is not None:
            return None
        simple = {key: value for key, value in PROBE_ARGUMENTS.items() if key != "flag"}  # which some write as Python's
        simple |= {"text": 'a "b"\n\U0001f642 {c}'}
        return next((each for each in known if self._reads(each, simple)), None)

    def _reads(self, family: FamilyRenderer, arguments: dict[str, Any]) -> bool:
        """True if a family's renderer reads back the turns that the template writes."""
        try:
            for turn in self._probe_turns(arguments):
                before = self._template.render([QUESTION], [probe_tool()])
                whole = self._template.render([QUESTION, turn], [probe_tool()], prompt=False)
                try:
                    text = self._turns.last(whole, before, [QUESTION, turn], [probe_tool()])
                except ChatTemplateError:
                    if "reasoning_content" not in turn:
                        raise
                    continue  # thinking is switched off
                ids = self._template.encode(text)
                reply = family.parse(ids, self._template.encode(before), [probe_tool()])
                if not same_turn(reply, turn):
                    return False
        except (ChatTemplateError, AssertionError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return True

    def _probe_turns(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Turns of every kind that the template can show."""
        turns: list[dict[str, Any]] = [dict(ANSWER)]
        if self._template.supports_reasoning:
            turns.append({**ANSWER, "reasoning_content": "a thought"})
        if self._template.supports_tools and self._template.supports_tool_calls:
            turns.append(call_message([ToolCall(CALL_ID, MARK, arguments)]))
        return turns

    @cached_property
    def call_format(self) -> MarkedCalls | None:
        """The template's own format of calls, if it is one that can be learned from its text."""
        if not (self._template.supports_tools and self._template.supports_tool_calls):
            return None
        tools = [probe_tool(), probe_tool(OTHER_MARK)]
        simple = {"text": "value", "number": 7}
        one = call_message([ToolCall(CALL_ID, MARK, simple)])
        two = call_message([ToolCall(CALL_ID, MARK, simple), ToolCall("ihgfedcba", OTHER_MARK, simple)])
        try:
            before = self._template.render([QUESTION], tools)
            texts = [self._written(before, each, tools) for each in (one, two)]
            assert texts[0] is not None
            found = learn_calls(texts[0], texts[1], (MARK, OTHER_MARK), simple, CALL_ID)
            last = max((found.start.rfind(each) for each in self._template.special_tokens), default=-1)
            if last > 0:  # an answer may stand between the marks
                found = replace(found, section=found.section + found.start[:last], start=found.start[last:])
            hard = PROBE_ARGUMENTS | ({"text": 'a </tool_call> "b" {c}'} if found.python else {})
            for turn in (one, call_message([ToolCall(CALL_ID, MARK, hard)]), *([two] if texts[1] else [])):
                text = self._written(before, turn, tools)
                if text is None or not same_turn(parse_calls(text, found.parse), turn):
                    return None
        except (ChatTemplateError, AssertionError):
            return None
        return found

    def _written(self, before: str, turn: ChatMessage, tools: Tools) -> str | None:
        """The answer of a probe's turn as the template writes it, without its reasoning and end; None if it refuses."""
        try:
            whole = self._template.render([QUESTION, turn], tools, prompt=False)
            text = self._turns.last(whole, before, [QUESTION, turn], tools)
        except ChatTemplateError:
            return None
        start, end = (each.strip() for each in self._template.reasoning_tags)
        text = text.removesuffix(self._template.call_end)
        opened = before.rstrip().endswith(start)
        return split_reasoning(text, opened=opened, start=start, end=end).content

    def require_readable_calls(self) -> None:
        """Raise ChatTemplateError if the policy's calls, in the format that the template shows, could not be read."""
        if not self.native_calls:
            raise ChatTemplateError(
                "the tokenizer's chat template shows tools, and its tool calls cannot be read; use a workflow with "
                "tools, which describes them in the system message, or leave the prompt's tools out by "
                'taskset.fields.tools: ""'
            )

    @cached_property
    def native_calls(self) -> bool:
        """True if the template shows tools and calls, and its calls are read back exactly.

        Otherwise tools are described in the system message, and calls are text in the format of Hermes.
        """
        template = self._template
        native = template.supports_tools and template.supports_tool_calls
        if native and self.family is None and self.call_format is None:
            log.warning(
                "the chat template writes tool calls in a format that cannot be read; tools are described in the "
                "system message, and called in the format of Hermes, instead"
            )
            return False
        return native


def same_turn(reply: ParsedReply, turn: ChatMessage) -> bool:
    """True if a turn was read as it was written."""
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in turn.get("tool_calls") or ()]
    return (
        [(each.name, each.arguments) for each in reply.tool_calls] == calls
        and not reply.malformed
        and reply.reasoning_finished
        and reply.content.strip() == (turn["content"] or "").strip()
        and (reply.reasoning or "").strip() == (turn.get("reasoning_content") or "").strip()
    )
