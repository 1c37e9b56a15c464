"""Checks that a chat template can show a taskset's chats, before a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from rollmill.data.encoding import LearnedTurns, encode_demonstration, encode_prompt
from rollmill.data.images import image_refs_of
from rollmill.data.layouts import REJECTED_MESSAGE, RESPONSE_MESSAGE, RESPONSE_MESSAGES, SWITCHES, TOOLS
from rollmill.types import REASONING_END, REASONING_START, Task


def check_chats(
    tasks: Iterable[Task], tokenizer: Any, *, rolled_out: bool, imitated: bool, learn: LearnedTurns = "last"
) -> None:
    """Render one chat of each kind; tasks with pictures, which need a processor, and texts are left out.

    Chats are of one kind if they have the same roles, keys of messages, tools and switches, and the same special
    tokens and tags of reasoning in their texts: a template tells chats apart by these. The run itself renders all.

    Args:
        rolled_out: prompts are rolled out.
        imitated: responses, and rejected ones, are learned from.

    Raises TasksetError naming the first task that the template cannot show, or not so that it could be trained.
    """
    kinds, marks = set[str](), _marks(tokenizer)
    for task in tasks:
        if isinstance(task.prompt, str) or image_refs_of(task.metadata) or (kind := _kind(task, marks)) in kinds:
            continue
        kinds.add(kind)
        if rolled_out:
            encode_prompt(task, tokenizer)
        if imitated and task.response is not None:
            encode_demonstration(task, tokenizer, tokenizer.eos_token_id, learn=learn)
        if imitated and task.rejected is not None:
            encode_demonstration(task, tokenizer, tokenizer.eos_token_id, rejected=True)


def _marks(tokenizer: Any) -> re.Pattern[str]:
    """A pattern for special tokens and tags of reasoning."""
    marks = {REASONING_START, REASONING_END, *tokenizer.all_special_tokens}
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def _kind(task: Task, marks: re.Pattern[str]) -> str:
    """Describe all that a chat template may tell apart."""
    messages: list[Any] = list(task.prompt)
    for key in (RESPONSE_MESSAGE, RESPONSE_MESSAGES, REJECTED_MESSAGE):
        own = task.metadata.get(key) or []
        messages += own if isinstance(own, list) else [own]
    shapes = [(each["role"], sorted(each), len(each.get("tool_calls") or ())) for each in messages]
    texts = [*(each.get("content") or "" for each in messages), task.response or "", task.rejected or ""]
    found = [(not text.strip(), sorted(set(marks.findall(text)))) for text in texts]
    tools = [each.get("function", each).get("name") for each in task.metadata.get(TOOLS) or ()]
    has = task.response is not None, task.rejected is not None
    return json.dumps([shapes, tools, task.metadata.get(SWITCHES), has, found], default=str)
