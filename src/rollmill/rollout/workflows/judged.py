"""Completions scored by another model."""

from __future__ import annotations

import re
from typing import Any

from rollmill.config.workflows import JudgedWorkflow
from rollmill.rollout.policy import Policy
from rollmill.rollout.workflow import WorkflowResult
from rollmill.types import Task

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


async def model_judged(config: JudgedWorkflow, task: Task, policy: Policy, **models: Any) -> WorkflowResult:
    """The last number of the judge's reply, from 0 to 1; None where there is none, or it is off the scale."""
    if isinstance(task.prompt, str):
        reply, prompt = await policy.complete(task.prompt), task.prompt
    else:
        reply, prompt = await policy.chat(list(task.prompt)), task.prompt[-1]["content"]
    places = {"prompt": prompt, "response": reply.text, "answer": str(task.answer), "scale": f"{config.scale:g}"}
    question = re.sub(r"\{(prompt|response|answer|scale)\}", lambda found: places[found[1]], config.question)
    said = await models[config.by].chat([{"role": "user", "content": question}])
    numbers = _NUMBER.findall(said.text)
    score = float(numbers[-1]) if numbers else -1.0
    return score / config.scale if 0 <= score <= config.scale else None
