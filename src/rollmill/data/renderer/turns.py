"""Finds the beginning and end of turns in the text of a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollmill.data.renderer.template import (
    MARK,
    OTHER_MARK,
    QUESTION,
    ChatMessage,
    ChatTemplate,
    Tools,
    common_prefix,
)
from rollmill.errors import ChatTemplateError
from rollmill.types import REASONING_START, split_reasoning


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Places in a text: the end of a turn's content, and the token that ends the turn."""

    content: int
    start: int
    stop: int


class TurnTexts:
    """Finds turns in a template's text. A place is found by rendering a conversation with and without a mark there."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def last(self, whole: str, before: str, messages: Sequence[ChatMessage], tools: Tools) -> str:
        """Return the text of the last turn, as it continues the prompt `before`, up to and with its end.

        Args:
            whole: the text of all messages.

        Raises ChatTemplateError if the turn does not continue the prompt, or the template does not show all of it.
        """
        turn = messages[-1]
        joint = self.template.whole_tokens(before, common_prefix(before, whole), whole)
        context = self.template.render(messages[:-1], tools, prompt=False)
        if joint < common_prefix(context.rstrip(), before):
            raise self.parted("the prompt", before, whole)
        text, missing = whole[joint:], before[joint:]
        reasoning = reasoning_of(turn)
        start_tag, end_tag = self.template.reasoning_tags
        if reasoning and missing.strip() and not missing.rstrip().endswith(start_tag.strip()):
            raise ChatTemplateError(
                "the response has reasoning, and the prompt closes it before the turn begins (thinking is switched "
                "off); set chat_template_kwargs: {enable_thinking: true}, or leave the reasoning out"
            )
        opened = missing.rstrip().endswith(start_tag.strip())
        if (
            missing.strip()
            and not opened
            and self.template.without_tokens(missing, self.template.special_tokens) == missing
        ):
            raise self.parted("the prompt", before, whole)
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
        end = (self.template.call_end if calls else self.template.turn_end) or self.template.tokenizer.eos_token
        if end is None:
            raise ChatTemplateError(
                "the tokenizer's chat template writes no special token at the end of a turn, and the tokenizer has no "
                "eos_token; set one in tokenizer_config.json"
            )
        body = text.rpartition(end)[0]  # a short content, or a tool's name, may be a part of the end's text
        behind = body.rfind(content) + len(content) if content else 0
        at = text.find(end, max(behind, *(body.rfind(name) for name in calls), 0))
        return text[: at + len(end)] if at >= 0 else f"{text}{end}"

    def span(self, whole: str, messages: Sequence[ChatMessage], i: int, tools: Tools) -> tuple[int, TurnEnd]:
        """Return where the policy's turn of message `i` begins in a conversation's text, and where it ends.

        Raises ChatTemplateError if either is not known.
        """
        turn = messages[i]
        content = turn.get("content") or ""
        mark = OTHER_MARK if content.startswith(MARK[0]) else MARK
        if mark is OTHER_MARK:
            mark = f"#{mark}"
        other: dict[str, Any] = {"role": "assistant", "content": mark}
        if turn.get("tool_calls"):  # templates refuse results without a call
            other["tool_calls"] = [_altered(each, OTHER_MARK) for each in turn["tool_calls"]]
        plain = [*messages[:i], other, *messages[i + 1 :]]
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
                raise self.parted(f"the turn of message {i + 1}", prompt, whole)
            start = begin + len(head)
            rest = header[len(head) :]
            start += self.template.whole_tokens(rest, common_prefix(rest, whole[start:]), whole[start:])
        calls = turn.get("tool_calls")
        end = self.end(whole, messages, i, tools)
        if end is None or end.stop < start:
            kind = "turn that calls tools" if calls else "turn"
            raise ChatTemplateError(
                f"the end of a {kind} before the last one is not known in the tokenizer's chat template"
            )
        return start, end

    def end(
        self,
        text: str,
        messages: Sequence[ChatMessage],
        i: int,
        tools: Tools,
        *,
        prompt: bool = False,
    ) -> TurnEnd | None:
        """Return where the turn of message `i` ends in a conversation's text; None if the template ends it nowhere."""
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
            return None if at < 0 else TurnEnd(at, at, at + len(call_end))
        at = text.find(self.template.turn_end, behind) if self.template.turn_end else -1
        between = text[behind:at].removeprefix(self.answer_frame[1]) if at >= 0 else "other text"
        if not self.template.without_tokens(between, self.template.special_tokens).strip():
            return TurnEnd(behind, at, at + len(self.template.turn_end))
        start = behind + len(text[behind:]) - len(text[behind:].lstrip())
        ends = [each for each in self.template.special_tokens if text.startswith(each, start)]
        if not ends:
            return None if self.template.turn_end else TurnEnd(behind, behind, behind)
        return TurnEnd(behind, start, start + len(max(ends, key=len)))

    @cached_property
    def answer_frame(self) -> tuple[str, str]:
        """Texts with special tokens that the template writes before and after an answer, within the policy's turn."""
        turn = {"role": "assistant", "content": MARK}
        try:
            before = self.template.render([QUESTION])
            whole = self.template.render([QUESTION, turn], prompt=False)
            text = self.last(whole, before, [QUESTION, turn], None)
        except ChatTemplateError:
            return "", ""
        start, _, end = text.removesuffix(self.template.turn_end).partition(MARK)
        tag = self.template.reasoning_tags[1].strip()
        start = start.rpartition(tag)[2] if tag in start else start
        return (start if start.strip() else ""), (end if end.strip() else "")

    def parted(self, what: str, expected: str, found: str) -> ChatTemplateError:
        """Build the error for a text that a further turn changes; it shows where the texts part."""
        at = common_prefix(expected, found)
        return ChatTemplateError(
            f"the tokenizer's chat template changes {what} when the next turn is added, so the turn would not continue "
            f"the prompt of a rollout; they part after {expected[max(0, at - 40) : at]!r}: {expected[at : at + 40]!r} "
            f"became {found[at : at + 40]!r}"
        )


def reasoning_of(message: ChatMessage) -> str:
    """The reasoning of a message: its key `reasoning_content`, or the tags in its content."""
    given = message.get("reasoning_content")
    return (given if given is not None else split_reasoning(message.get("content") or "").reasoning or "").strip()


def _altered(entry: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
    """Another call in place of one."""
    function = entry.get("function", entry)
    altered = {**function, "name": name or function["name"], "arguments": {OTHER_MARK: OTHER_MARK}}
    return {**entry, "function": altered}
