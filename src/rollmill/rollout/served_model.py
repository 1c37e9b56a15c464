"""Rollouts by a model behind an endpoint instead of the policy, with rewards.

They cannot be trained on: an endpoint gives neither tokens nor their log-probs.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmill.config.rollout import SamplingConfig
from rollmill.config.run import StageConfig
from rollmill.errors import ConfigError
from rollmill.rewards.judges.chat import LENGTH, ChatModelReply, NoReplyError
from rollmill.rewards.stage_rewards import StageRewards
from rollmill.rollout.base import OnGenerated
from rollmill.rollout.runner import assign_reward
from rollmill.seeds import derive_seed
from rollmill.types import Completion, Experience, StopReason, Task, experience_from_completion, split_reply

if TYPE_CHECKING:
    from rollmill.rewards.judges.endpoint import EndpointChatModel

COMPLETION_TOKENS_KEY = "tokens"
"""Key of Experience.info: number of completion tokens, as reported by the server."""
_SEEDS = 2**31
_UNKNOWN = {
    "stop_token_ids": "the numbers of another model's tokens mean nothing to it",
    "repetition": "an endpoint does not look for repetition",
}


class ServedModel:
    """A served model, shared by its explorers, and a record of its failures.

    Args:
        name: its name in errors.
        completes: texts go to `/completions`; otherwise each becomes the only message of a chat.
    """

    def __init__(self, name: str, endpoint: EndpointChatModel, *, completes: bool) -> None:
        self.name, self._endpoint, self._completes = name, endpoint, completes
        self.unanswered: list[str] = []  #: one reason for each missing completion

    async def completion(
        self, task: Task, sampling: SamplingConfig, seed: int, index: int
    ) -> tuple[Completion, int] | None:
        """Generate a completion of a task's prompt, without tokens; return it and its token count. None: no reply to
        it.

        Raises:
            RewardError: the endpoint does not reply at all.
        """
        prompt: Any = task.prompt
        if isinstance(prompt, str) and not self._completes:
            prompt = [{"role": "user", "content": prompt}]
        began = time.perf_counter()
        try:
            work = self._endpoint.ask(prompt, _body(sampling, derive_seed(seed, index) % _SEEDS))
            reply = await self._endpoint.loop.run(work)
        except NoReplyError as error:
            self.unanswered.append(f"task {task.id}: {error}")
            return None
        made = _completion(reply, seed, index, began)
        if self._completes and isinstance(task.prompt, str):
            made.reply = split_reply(made.text, task.prompt)
        return made, reply.completion_tokens

    def close(self) -> None:
        self._endpoint.close()


class ServedExplorer:
    """Rolls out with a served model instead of the policy."""

    def __init__(self, model: ServedModel, rewards: StageRewards) -> None:
        self._model, self._rewards = model, rewards

    async def rollout(
        self,
        task: Task,
        sampling: SamplingConfig,
        *,
        n: int,
        seed: int,
        group: str,
        generated: OnGenerated | None = None,
    ) -> list[Experience]:
        """Missing completions are left out. Raises RewardError."""
        calls = [self._model.completion(task, sampling, seed, index) for index in range(n)]
        found = [each for each in await asyncio.gather(*calls) if each is not None]
        prompt = task.prompt if isinstance(task.prompt, str) else _shown(task.prompt)
        experiences = [
            experience_from_completion(
                each, id=f"{group}/{each.index}", task_id=task.id, group=group, prompt=prompt, temperature=1.0
            )
            for each, _ in found
        ]
        for experience, (_, tokens) in zip(experiences, found, strict=True):
            experience.info[COMPLETION_TOKENS_KEY] = tokens
        if generated is not None:
            generated(experiences)
        results = await self._rewards.score_group(task, [each for each, _ in found])
        for experience, result in zip(experiences, results, strict=True):
            assign_reward(experience, result)
        return experiences


def check_endpoint_support(stage: StageConfig, name: str) -> None:
    """Raise ConfigError if a stage, or a set of held-out tasks, needs features that endpoints lack."""
    if not stage.workflow.single_turn:
        text = f"workflow `{stage.workflow.name}` needs a policy with tokens"
        raise ConfigError(f"{name}: {text}; a model behind an endpoint is asked by `single_turn` alone")
    if stage.rows_name_workflows:
        text = "rows may name workflows that need a policy with tokens (taskset.fields.workflow)"
        raise ConfigError(f"{name}: {text}; remove that key, or leave this model out")
    for key, why in _UNKNOWN.items():
        if getattr(stage.rollout, key):
            raise ConfigError(f"{name}: {key}: {why}; remove it, or leave this model out")


def _body(sampling: SamplingConfig, seed: int) -> dict[str, Any]:
    """The fields of a request; default values are left out, since not all servers know every field."""
    body: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
    }
    optional = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
    body |= {key: value for key, (value, off) in optional.items() if value != off}
    return body | ({"stop": list(sampling.stop)} if sampling.stop else {})


def _completion(reply: ChatModelReply, seed: int, index: int, began: float) -> Completion:
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    reason = StopReason.LENGTH if reply.finish == LENGTH else StopReason.EOS
    made = Completion(ids, ids, numbers, ids, numbers, reply.text, reason, seed, index)
    made.submitted_at = made.started_at = began
    made.finished_at = time.perf_counter()
    return made


def _shown(messages: Any) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
