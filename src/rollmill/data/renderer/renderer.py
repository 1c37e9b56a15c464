"""Conversations to tokens and back: prompts, demonstrations, replies, and the prompts that continue them.

One renderer serves rollouts, demonstrations, judges on local models, agents, `serve` and evaluation. The chat template
is the truth: what is rendered is the template's text. What it cannot show, or what could not be trained or read back
exactly, is refused with the place where the texts part.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Any, Literal

from rollmill.data.renderer.call_formats import (
    ATTEMPT,
    MarkedCalls,
    Parser,
    ToolFormat,
    describe_tools,
    learn_calls,
    parse_calls,
    render_tool_calls,
    text_parser,
    wrap_tool_response,
)
from rollmill.data.renderer.families import FamilyRenderer, families_of
from rollmill.data.renderer.template import (
    ANSWER,
    CALL_ID,
    MARK,
    OTHER_MARK,
    QUESTION,
    ChatMessage,
    ChatTemplate,
    Switches,
    call_message,
    common_prefix,
    probe_tool,
)
from rollmill.data.renderer.tokens import encode_pieces
from rollmill.errors import ChatTemplateError
from rollmill.types import REASONING_START, ParsedReply, ToolCall, split_reasoning

log = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]] | None
"""Descriptions of tools in OpenAI's format."""

_MOST_BOUND = 32
PROBE_ARGUMENTS: dict[str, Any] = {
    "text": 'a </tool_call> "b" </think>\n\U0001f642 {c}',
    "number": 7,
    "flag": True,
    "nested": {"list": [1, "two", {"three": 3.5}]},
}
"""Arguments that a format of calls must write and read back."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt, ready for the policy's turn."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class _TurnEnd:
    """Places in a text: the end of a turn's content, and the token that ends the turn."""

    content: int
    start: int
    stop: int


class Renderer:
    """Renders the conversations of one model, and reads its turns.

    Args:
        stop_ids: ids at which the checkpoint's generation ends.
        day: the date that templates print which ask for today's.
        switches: variables of the chat template, such as `enable_thinking`.

    Attributes:
        template: the tokenizer's chat template.
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
        self.stop_ids = stop_ids | self._own_stops()

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
            reply = self.parse(ids, self.encode(before[0]))
            known = self.tokenizer.decode(self.encode(turn["content"]), skip_special_tokens=True)  # to small tokenizers
            answered = _spaceless(reply.content) == _spaceless(known) and reply.reasoning_finished
            if not answered or (turn is reasoned and not (reply.reasoning or "").strip()):
                raise ChatTemplateError(
                    f"the tokenizer's chat template writes {'reasoning' if turn is reasoned else 'an answer'} in a "
                    f"format that cannot be read back: {text[0]!r} was read as {reply.content!r}, with the reasoning "
                    f"{reply.reasoning!r}; use another template"
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

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the exact text of tokens, special ones included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

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
            self.require_readable_calls()
        return RenderedPrompt(self.encode(text), text)

    def encode(self, text: str) -> list[int]:
        """Tokenize a piece of a chat; the template has written all special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

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
        added, drops the turn's reasoning or calls, or the end of a turn is unknown.
        """
        last = len(messages) - 1
        before = self.text(messages[:last], tools)
        pieces, at = list[tuple[str, bool]](), 0
        whole = self.template.render(messages, tools, prompt=False)
        self.template.check_shown(messages, tools, whole)
        for i in range(first, last):
            if messages[i]["role"] == "assistant":
                start, end = self._span(whole, messages, i, tools)
                pieces += [(whole[at:start], False), (whole[start:end], True)]
                at = end
        if before[:at] != whole[:at]:
            raise self._parted("an earlier turn", before, whole)
        turn = self._turn(whole, before, messages, tools)
        ends = (self.template.call_end, self.template.turn_end, str(self.tokenizer.eos_token))
        written = next((each for each in ends if each and turn.endswith(each)), "")
        token = self._token(written)
        if token is None or token not in self.stop_ids:
            raise ChatTemplateError(
                f"turns end with {written!r} in the tokenizer's chat template, and generation does not end there; add "
                "its id to eos_token_id in generation_config.json"
            )
        return [*pieces, (before[at:], False), (turn, True)]

    def _turn(self, whole: str, before: str, messages: Sequence[ChatMessage], tools: Tools) -> str:
        """Text of the last turn, as it continues the prompt `before`, up to and with its end."""
        turn = messages[-1]
        joint = self.template.whole_tokens(before, common_prefix(before, whole), whole)
        context = self.template.render(messages[:-1], tools, prompt=False)
        if joint < common_prefix(context.rstrip(), before):
            raise self._parted("the prompt", before, whole)
        text, missing = whole[joint:], before[joint:]
        reasoning = _reasoning(turn)
        start_tag, end_tag = self.template.reasoning_tags
        if reasoning and missing.strip() and not missing.rstrip().endswith(start_tag.strip()):
            raise ChatTemplateError(
                "the response has reasoning, and the prompt closes it before the turn begins (thinking is switched "
                "off); set chat_template_kwargs: {enable_thinking: true}, or leave the reasoning out"
            )
        opened = missing.rstrip().endswith(start_tag.strip())
        if missing.strip() and not opened and self._cleaned(missing, self.template.special_tokens) == missing:
            raise self._parted("the prompt", before, whole)
        if opened:  # the prompt opens reasoning that the template then drops
            if reasoning and REASONING_START in text:
                raise ChatTemplateError(
                    "the response has reasoning in its content, which the chat template does not take out, and the "
                    "prompt opens reasoning; give it as `reasoning_content`"
                )
            if reasoning and reasoning not in text:
                text = f"{reasoning}{end_tag}{text.lstrip().removeprefix(end_tag.strip()).lstrip()}"
            elif not reasoning and not text.lstrip().startswith(end_tag.strip()):
                text = f"{end_tag.lstrip() if missing.endswith(chr(10)) else end_tag}{text.lstrip()}"
        if reasoning and reasoning not in text:
            raise ChatTemplateError(
                "the tokenizer's chat template does not show the reasoning of the last message; leave "
                "`reasoning_content` out, or use a checkpoint whose template knows it"
            )
        calls = [str(each.get("function", each)["name"]) for each in turn.get("tool_calls") or ()]
        if missing_calls := [name for name in calls if name not in text]:
            raise ChatTemplateError(
                f"the response calls the tool `{missing_calls[0]}`, which the tokenizer's chat template does not write "
                "after a prompt; use a checkpoint whose template knows tool calls"
            )
        content = split_reasoning(turn.get("content") or "").content.strip()
        if content and content not in text:
            raise ChatTemplateError("the tokenizer's chat template does not show the last message as it is")
        end = (self.template.call_end if calls else self.template.turn_end) or self.tokenizer.eos_token
        at = text.find(
            end, max(text.rfind(content) + len(content) if content else 0, *(text.rfind(n) for n in calls), 0)
        )
        return text[: at + len(end)] if at >= 0 else f"{text}{end}"

    def _span(self, whole: str, messages: Sequence[ChatMessage], i: int, tools: Tools) -> tuple[int, int]:
        """Where the turn of message `i` begins and ends in a conversation's text."""
        turn = messages[i]
        content = turn.get("content") or ""
        mark = OTHER_MARK if content.startswith(MARK[0]) else MARK
        if mark is OTHER_MARK:
            mark = f"#{mark}"
        plain = [*messages[:i], {"role": "assistant", "content": mark}, *messages[i + 1 :]]
        differs = common_prefix(whole, self.template.render(plain, tools, prompt=False))
        context = self.template.render(messages[:i], tools, prompt=False)
        prompt = self.template.render(messages[:i], tools)
        header = prompt[common_prefix(context, prompt) :]
        opened = header.find(self.template.reasoning_tags[0].strip())
        head = header if opened < 0 else header[:opened]
        start = differs
        if whole.startswith(prompt):
            start = len(prompt)
        elif head.strip():
            begin = whole.rfind(head, 0, differs + len(head))
            if begin < 0:
                raise self._parted(f"the turn of message {i + 1}", prompt, whole)
            start = begin + len(head)
            rest = header[len(head) :]
            start += self.template.whole_tokens(rest, common_prefix(rest, whole[start:]), whole[start:])
        calls = turn.get("tool_calls")
        end = self._end_of_turn(whole, messages, i, tools)
        if end is None or end.stop < start:
            kind = "turn that calls tools" if calls else "turn"
            raise ChatTemplateError(
                f"the end of a {kind} before the last one is not known in the tokenizer's chat template"
            )
        return start, end.stop

    def _end_of_turn(
        self,
        text: str,
        messages: Sequence[ChatMessage],
        i: int,
        tools: Tools,
        *,
        prompt: bool = False,
    ) -> _TurnEnd | None:
        """Where the turn of message `i` ends in a conversation's text; None if the template writes no end there."""
        turn, mark = messages[i], MARK
        calls = turn.get("tool_calls")
        if calls:
            altered = {**turn, "tool_calls": [*calls[:-1], _altered(calls[-1])]}
        else:
            content = (turn.get("content") or "").rstrip()
            mark = f"{MARK}{'0' if content[-1:] != '0' else '1'}"
            altered = {**turn, "content": f"{content}{mark}"}
        other = self.template.render([*messages[:i], altered, *messages[i + 1 :]], tools, prompt=prompt)
        behind = len(text) - common_prefix(reversed(text), reversed(other))
        if calls:
            ends = [each for each in (self.template.turn_end, self.template.call_end) if each]
            places = [(text.index(each, behind), each) for each in ends if each in text[behind:]]
            at, call_end = min(places, default=(-1, ""))
            return None if at < 0 else _TurnEnd(at, at, at + len(call_end))
        at = text.find(self.template.turn_end, behind) if self.template.turn_end else -1
        between = text[behind:at].removeprefix(self._answer_frame[1]) if at >= 0 else "other text"
        if not self._cleaned(between, self.template.special_tokens).strip():
            return _TurnEnd(behind, at, at + len(self.template.turn_end))
        start = behind + len(text[behind:]) - len(text[behind:].lstrip())
        ends = [each for each in self.template.special_tokens if text.startswith(each, start)]
        if not ends:
            return None if self.template.turn_end else _TurnEnd(behind, behind, behind)
        return _TurnEnd(behind, start, start + len(max(ends, key=len)))

    def _parted(self, what: str, expected: str, found: str) -> ChatTemplateError:
        at = common_prefix(expected, found)
        return ChatTemplateError(
            f"the tokenizer's chat template changes {what} when the next turn is added, so the turn would not continue "
            f"the prompt of a rollout; they part after {expected[max(0, at - 40) : at]!r}: {expected[at : at + 40]!r} "
            f"became {found[at : at + 40]!r}"
        )

    # -- replies -----------------------------------------------------------------------------------------------

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
            reply = family.parse(ids, prompt_ids, tools, salt=salt)
            if reply.tool_calls and not (thought := self._answer(ids, prompt_ids, stop_text)).reasoning_finished:
                return thought  # the library takes a call for the end of reasoning that was not closed
            written = self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids).removesuffix(stop_text)
            marked = any(mark in written for mark in self.template.special_tokens)
            if not (marked or reply.tool_calls or reply.malformed):  # the family's reading needs its marks
                plain = self._answer(ids, prompt_ids, stop_text)
                reply = plain if plain.reasoning is None else reply
            if stop_text and reply.reasoning is not None and not reply.reasoning_finished:
                reply = replace(reply, reasoning=reply.reasoning.removesuffix(stop_text))
            reply = replace(reply, content=reply.content.removesuffix(stop_text))
            if not reads_calls and (reply.tool_calls or reply.malformed):
                raw = self._answer(ids, prompt_ids, stop_text)
                reply = ParsedReply(
                    self._cleaned(raw.content), reply.reasoning, reasoning_finished=reply.reasoning_finished
                )
        else:
            reply = self._answer(ids, prompt_ids, stop_text)
            if reads_calls and reply.reasoning_finished:
                parser: Parser = text_parser(format)
                if format == "auto" and self.native_calls and self.call_format is not None:
                    parser = self.call_format.parse
                found = parse_calls(reply.content, parser, salt=salt, stopped=bool(stop_text))
                reply = replace(found, reasoning=reply.reasoning)
            reply = replace(reply, content=self._cleaned(reply.content))
        if reads_calls and format == "auto" and not (reply.tool_calls or reply.malformed):
            reply = replace(reply, malformed=self._attempts(reply.content))
        if reply.tool_calls and any(tag in reply.content for tag in self._closing_tags):
            broken = "text of a call stands behind its end; a tag of the format is part of an argument"
            raw = self._answer(ids, prompt_ids, stop_text)
            reply = replace(reply, content=self._cleaned(raw.content), tool_calls=[], malformed=[broken])
        if self.template.single_call and len(reply.tool_calls) > 1:
            more = f"the model's chat template has one call a turn; {len(reply.tool_calls) - 1} more were left out"
            reply = replace(reply, tool_calls=reply.tool_calls[:1], malformed=[*reply.malformed, more])
        whole = self.tokenizer.decode(ids, skip_special_tokens=True) if text is None else text
        if not (reply.reasoning or reply.tool_calls) and whole.strip() == reply.content.strip():
            return replace(reply, content=whole)
        return reply

    def _attempts(self, content: str) -> list[str]:
        """Errors of calls in formats without marks: a JSON object with a name that is cut off or damaged."""
        marked = self.native_calls and (self.call_format is None or self.call_format.start.strip())
        if marked and (self.call_format is not None or self._written_call.lstrip()[:1] != "{"):
            return []
        return ["not JSON, or cut off"] if ATTEMPT.match(content.strip()) else []

    @cached_property
    def _written_call(self) -> str:
        """A call as the template writes it; empty if it writes none."""
        if not (self.template.supports_tools and self.template.supports_tool_calls):
            return ""
        turn, tools = call_message([ToolCall(CALL_ID, MARK, {"text": "value"})]), [probe_tool()]
        try:
            return self._written(self.template.render([QUESTION], tools), turn, tools) or ""
        except ChatTemplateError:
            return ""

    @cached_property
    def _closing_tags(self) -> frozenset[str]:
        """Closing tags of the format of calls, such as `</parameter>`, of which an answer beside a call has none."""
        return frozenset(re.findall(r"</[\w:]+>", self._written_call))

    def _answer(self, ids: list[int], prompt_ids: Sequence[int], stop_text: str) -> ParsedReply:
        """Split a turn at its reasoning, with special tokens."""
        raw = self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids).removesuffix(stop_text)
        start, end = (each.strip() for each in self.template.reasoning_tags)
        opened = self.decode(prompt_ids[-len(start) - 8 :]).rstrip().endswith(start) if len(prompt_ids) else False
        opened = opened or raw.lstrip().startswith(end)
        reply = split_reasoning(raw, opened=opened, start=start, end=end)
        before, behind = self._answer_frame
        content = reply.content
        if before and content.startswith(before):
            content = content.removeprefix(before)
        return replace(reply, content=content.removesuffix(behind) if behind else content)

    @cached_property
    def _answer_frame(self) -> tuple[str, str]:
        """Texts with special tokens that the template writes before and after an answer, within the policy's turn."""
        turn = {"role": "assistant", "content": MARK}
        try:
            before = self.template.render([QUESTION])
            whole = self.template.render([QUESTION, turn], prompt=False)
            text = self._turn(whole, before, [QUESTION, turn], None)
        except ChatTemplateError:
            return "", ""
        start, _, end = text.removesuffix(self.template.turn_end).partition(MARK)
        tag = self.template.reasoning_tags[1].strip()
        start = start.rpartition(tag)[2] if tag in start else start
        return (start if start.strip() else ""), (end if end.strip() else "")

    def _stop_text(self, ids: list[int], text: str | None) -> str:
        """The stop string that ended a turn, and what follows it in the last token; empty without one."""
        whole: str = self.tokenizer.decode(ids, skip_special_tokens=True) if text is not None else ""
        return whole[len(text) :] if text is not None and whole.startswith(text) else ""

    def _cleaned(self, text: str, tokens: Iterable[str] | None = None) -> str:
        """A text without special tokens, or other ones."""
        for token in self.tokenizer.all_special_tokens if tokens is None else tokens:
            if token in text:
                text = text.replace(token, "")
        return text

    @cached_property
    def family(self) -> FamilyRenderer | None:
        """The library's renderer of the model's family: one that reads what the template writes; else None.

        One that reads every argument is preferred, else one that reads those without the family's own tags: in formats
        that are not JSON (Qwen 3.5, GLM) nothing tells a tag in an argument from the closing one. A format of JSON that
        was learned from the template needs no family.
        """
        if not (self.template.supports_tools and self.template.supports_tool_calls):
            return None
        known = list(families_of(self.tokenizer, self.template.switches))
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
                before = self.template.render([QUESTION], [probe_tool()])
                whole = self.template.render([QUESTION, turn], [probe_tool()], prompt=False)
                try:
                    text = self._turn(whole, before, [QUESTION, turn], [probe_tool()])
                except ChatTemplateError:
                    if "reasoning_content" not in turn:
                        raise
                    continue  # thinking is switched off
                ids = self.encode(text)
                reply = family.parse(ids, self.encode(before), [probe_tool()])
                if not _same(reply, turn):
                    return False
        except (ChatTemplateError, AssertionError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return True

    def _probe_turns(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Turns of every kind that the template can show."""
        turns: list[dict[str, Any]] = [dict(ANSWER)]
        if self.template.supports_reasoning:
            turns.append({**ANSWER, "reasoning_content": "a thought"})
        if self.template.supports_tools and self.template.supports_tool_calls:
            turns.append(call_message([ToolCall(CALL_ID, MARK, arguments)]))
        return turns

    @cached_property
    def call_format(self) -> MarkedCalls | None:
        """The template's own format of calls, if it is one that can be learned from its text."""
        if not (self.template.supports_tools and self.template.supports_tool_calls):
            return None
        tools = [probe_tool(), probe_tool(OTHER_MARK)]
        simple = {"text": "value", "number": 7}
        one = call_message([ToolCall(CALL_ID, MARK, simple)])
        two = call_message([ToolCall(CALL_ID, MARK, simple), ToolCall("ihgfedcba", OTHER_MARK, simple)])
        try:
            before = self.template.render([QUESTION], tools)
            texts = [self._written(before, each, tools) for each in (one, two)]
            assert texts[0] is not None
            found = learn_calls(texts[0], texts[1], (MARK, OTHER_MARK), simple, CALL_ID)
            last = max((found.start.rfind(each) for each in self.template.special_tokens), default=-1)
            if last > 0:  # an answer may stand between the marks
                found = replace(found, section=found.section + found.start[:last], start=found.start[last:])
            hard = PROBE_ARGUMENTS | ({"text": 'a </tool_call> "b" {c}'} if found.python else {})
            for turn in (one, call_message([ToolCall(CALL_ID, MARK, hard)]), *([two] if texts[1] else [])):
                text = self._written(before, turn, tools)
                if text is None or not _same(parse_calls(text, found.parse), turn):
                    return None
        except (ChatTemplateError, AssertionError):
            return None
        return found

    def _written(self, before: str, turn: ChatMessage, tools: Tools) -> str | None:
        """The answer of a probe's turn as the template writes it, without its reasoning and end; None if it refuses."""
        try:
            whole = self.template.render([QUESTION, turn], tools, prompt=False)
            text = self._turn(whole, before, [QUESTION, turn], tools)
        except ChatTemplateError:
            return None
        start, end = (each.strip() for each in self.template.reasoning_tags)
        text = text.removesuffix(self.template.call_end)
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
        template = self.template
        native = template.supports_tools and template.supports_tool_calls
        if native and self.family is None and self.call_format is None:
            log.warning(
                "the chat template writes tool calls in a format that cannot be read; tools are described in the "
                "system message, and called in the format of Hermes, instead"
            )
            return False
        return native

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
        if not self._answer(list(completion_ids), prompt_ids, "").reasoning_finished:
            return None  # the template shows no unfinished reasoning
        before = self.template.render(messages[:i], tools)
        text = self.template.render(messages, tools)
        before = before.rstrip()  # white space around a turn may differ: templates strip and add some
        if not text.startswith(before):
            return None
        end = self._end_of_turn(text, messages, i, tools, prompt=True)
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
        said = self._answer(ids, prompt_ids, "")
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

        Earlier messages become the same text whatever follows, so that a conversation can continue.
        """
        found: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] == "tool" and not self.template.supports_tool_results:
                _add_to_user(found, wrap_tool_response(_text(message)))
            elif (
                message["role"] == "user" and found and found[-1].get("of_tool") and isinstance(message["content"], str)
            ):
                _add_to_user(found, _text(message))
            elif message.get("tool_calls") and not self.native_calls:
                calls = render_tool_calls([_call(each) for each in message["tool_calls"]], format)
                text = "\n".join(each for each in (_text(message), calls) if each)
                found.append({"role": message["role"], "content": text})
            else:
                found.append(dict(message))
        fitting = [{key: value for key, value in each.items() if key != "of_tool"} for each in found]
        if not tools:
            return list(fitting), None
        if not self.native_calls:
            return self._with_system_text(fitting, describe_tools(tools, format)), None
        return list(fitting), tools

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


def _reasoning(message: ChatMessage) -> str:
    """The reasoning of a message: its key `reasoning_content`, or the tags in its content."""
    given = message.get("reasoning_content")
    return (given if given is not None else split_reasoning(message.get("content") or "").reasoning or "").strip()


def _same(reply: ParsedReply, turn: ChatMessage) -> bool:
    """True if a turn was read as it was written."""
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in turn.get("tool_calls") or ()]
    return (
        [(each.name, each.arguments) for each in reply.tool_calls] == calls
        and not reply.malformed
        and reply.reasoning_finished
        and reply.content.strip() == (turn["content"] or "").strip()
        and (reply.reasoning or "").strip() == (turn.get("reasoning_content") or "").strip()
    )


def _spaceless(text: str) -> str:
    """A text without its white space, which templates add and strip around turns."""
    return "".join(text.split())


def _altered(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Another call in place of one."""
    function = entry.get("function", entry)
    return {**entry, "function": {**function, "arguments": {OTHER_MARK: OTHER_MARK}}}


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
