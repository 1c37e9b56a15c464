"""Builds the teacher's prompts of algorithm `self_distill`: the task's prompt with context hidden from the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollmill.config.algorithms.distillation import SelfDistill
from rollmill.data import encode_privileged_prompt
from rollmill.data.picture_prompts import PicturePrompt
from rollmill.data.template import PromptTemplate
from rollmill.types import Experience, IntArray, Task, split_reasoning


class PrivilegedContext:
    """Sets `teacher_prompt` of experiences.

    Args:
        tasks: by their ids. Experiences of other tasks get no prompt.
        longest: longest sequence of the model in tokens. A completion too long for its teacher's prompt gets none.

    Raises:
        TasksetError: `algorithm.template` is no template.
    """

    def __init__(self, options: SelfDistill, tasks: Mapping[str, Task], tokenizer: Any, longest: int) -> None:
        self._options, self._tasks, self._tokenizer, self._longest = options, tasks, tokenizer, longest
        self._template = PromptTemplate(options.template, "algorithm.template")

    def give(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Set `teacher_prompt` of all experiences that have a context.

        Returns:
            teacher/context, the share of them; teacher/prompt_tokens, the mean length of their prompts.
        """
        groups: dict[tuple[str, object], list[Experience]] = {}
        for each in experiences:
            groups.setdefault((each.group, each.role), []).append(each)
        lengths: list[int] = []
        for each in experiences:
            task = self._tasks.get(each.task_id)
            context = None if task is None else self._context(each, task, groups[each.group, each.role])
            known = None if task is None or context is None else self._prompt(each, task, context)
            each.teacher_prompt, each.teacher_pictures = known or (None, None)
            if each.teacher_prompt is not None:
                lengths.append(len(each.teacher_prompt))
        share = {"teacher/context": len(lengths) / max(len(experiences), 1)}
        return share | ({"teacher/prompt_tokens": float(np.mean(lengths))} if lengths else {})

    def _context(self, experience: Experience, task: Task, group: Sequence[Experience]) -> str | None:
        if self._options.context == "solution":
            return None if task.response is None else split_reasoning(task.response).content or None
        if self._options.context == "answer":
            return None if task.answer is None else str(task.answer)
        least = self._options.success_at_least
        others = (each for each in group if each is not experience and each.reward is not None)
        return next((each.parsed_reply.content for each in others if (each.reward or 0.0) >= least), None)

    def _prompt(self, experience: Experience, task: Task, context: str) -> tuple[IntArray | None, PicturePrompt | None]:
        ids, pictures = encode_privileged_prompt(task, self._tokenizer, self._template, context)
        start = int(np.argmax(experience.action_mask))
        fits = len(ids) + len(experience.token_ids) - start <= self._longest
        return (np.array(ids, np.int32), pictures) if fits else (None, None)
