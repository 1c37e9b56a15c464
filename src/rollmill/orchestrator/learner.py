"""The trainer of a stage, alone or with other ranks, and the thread it can run in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from rollmill.config.algorithms.distillation import SelfDistill
from rollmill.config.run import StageConfig
from rollmill.data import encode_pictures
from rollmill.data.images import image_refs_of
from rollmill.data.picture_turns import join_turns, turns_of
from rollmill.errors import TrainingError
from rollmill.models.load import PolicyModel
from rollmill.models.vision import picture_processor
from rollmill.orchestrator.components import build_trainer
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.privileged_context import PrivilegedContext
from rollmill.rewards import RewardManager
from rollmill.types import Experience, Task


class Learner:
    """Updates the weights of `policy`, or of a reward model initialized from the policy.

    Args:
        tasks: the training tasks.
        shown: tasks whose solutions are imitated or compared, where these are others.
        kept_versions: number of earlier versions whose weights are kept to compare log-probs.
    """

    def __init__(
        self,
        config: StageConfig,
        policy: PolicyModel,
        rewards: RewardManager | None,
        context: RunContext,
        tasks: Sequence[Task],
        *,
        seed: int,
        shown: Sequence[Task] = (),
        kept_versions: int = 0,
    ) -> None:
        self._policy = policy
        self._privileged: PrivilegedContext | None = None
        if isinstance(config.algorithm, SelfDistill):
            by_id = {task.id: task for task in tasks}
            self._privileged = PrivilegedContext(config.algorithm, by_id, policy.tokenizer, policy.context)
        self._seen: dict[str, Task] = {}
        if picture_processor(policy.model) is not None:
            self._seen = {task.id: task for task in (*tasks, *shown) if image_refs_of(task.metadata)}
        self.trainer = build_trainer(config, policy, rewards, context, seed=seed, kept_versions=kept_versions)
        threads = (torch.get_num_threads(),)
        self._thread = ThreadPoolExecutor(1, "rollmill-trainer", torch.set_num_threads, threads)

    def start(self) -> None:
        """Start the trainer's other ranks, if any."""
        self.trainer.start()

    def precompute(self, experiences: Sequence[Experience], version: int) -> Iterator[None]:
        """Runs the trainer's forward passes that need no rewards, one per iteration, with the pictures attached."""
        self._attach_pictures(experiences)
        return self.trainer.precompute(experiences, version)

    def step(
        self, experiences: Sequence[Experience], version: int, upcoming: Sequence[Sequence[Experience]] = ()
    ) -> dict[str, float]:
        """Make the optimizer steps of one batch.

        Args:
            upcoming: completions of later steps, batch by batch.
        """
        for each in (experiences, *upcoming):
            self._attach_pictures(each)
        shown = {} if self._privileged is None else self._privileged.give(experiences)
        compared = self.trainer.to_compare(upcoming, experiences, version)
        return self.trainer.step(experiences, version, compared) | shown

    def _attach_pictures(self, experiences: Sequence[Experience]) -> None:
        """Give experiences the pictures of their turns or tasks, which buffers and other processes do not store.

        Raises TrainingError if a prompt is not the one of its rollout, or its task is not one of the stage's, and
        TasksetError if a picture is gone.
        """
        processor = picture_processor(self._policy.model)
        if processor is None:
            return
        for experience in experiences:
            if experience.pictures is not None:
                continue
            turns = turns_of(experience)
            if turns is not None:
                name = f"experience {experience.id}"
                experience.pictures = join_turns(processor, experience.token_ids.tolist(), turns, name)
                continue
            task = self._seen.get(experience.task_id)
            if task is None:
                actions = np.flatnonzero(experience.action_mask)
                prompt = experience.token_ids[: actions[0] if len(actions) else None]
                if (prompt == processor.image_token_id).any():
                    raise TrainingError(
                        f"experience {experience.id} has pictures, and the stage has no task {experience.task_id} to "
                        "take them from; use the taskset that the experience was made with, or another buffer"
                    )
                continue
            pictures = encode_pictures(task, self._policy.tokenizer)
            assert pictures is not None
            if experience.token_ids[: len(pictures.token_ids)].tolist() != pictures.token_ids:
                raise TrainingError(
                    f"experience {experience.id} does not begin with the prompt of task {task.id}; its pictures are "
                    "prepared otherwise than in its rollout, so start a new run"
                )
            experience.pictures = pictures

    async def step_in_thread(
        self, experiences: Sequence[Experience], version: int, upcoming: Sequence[Sequence[Experience]] = ()
    ) -> dict[str, float]:
        """Run `step` in a thread, so that requests and explorers are served meanwhile.

        Once started it is not cancelled: changed weights belong to the step.
        """
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._thread, self.step, experiences, version, upcoming)
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
        return work.result()

    def export(self, folder: Path) -> None:
        """Write the reward model into a checkpoint's folder, if one is trained."""
        self.trainer.export(folder, self._policy)

    def close(self) -> None:
        """Stop other ranks and the thread."""
        self.trainer.close()
        self._thread.shutdown()
