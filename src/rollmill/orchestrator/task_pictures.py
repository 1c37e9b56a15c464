"""Pictures of experiences, which buffers and other processes do not store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmill.data import encode_pictures
from rollmill.data.images import image_refs_of
from rollmill.data.picture_turns import join_turns, turns_of
from rollmill.errors import TrainingError
from rollmill.models.load import PolicyModel
from rollmill.models.vision import picture_processor
from rollmill.types import Experience, Task


class TaskPictures:
    """Attaches the pictures of tasks, or of the turns of a conversation, to experiences that are trained on.

    Args:
        tasks: of the stage, and those whose solutions are imitated or compared.
    """

    def __init__(self, policy: PolicyModel, tasks: Sequence[Task]) -> None:
        self._policy, self._processor = policy, picture_processor(policy.model)
        self._tasks: dict[str, Task] = {}
        if self._processor is not None:
            self._tasks = {task.id: task for task in tasks if image_refs_of(task.metadata)}

    def attach(self, experiences: Sequence[Experience]) -> None:
        """Give experiences the pictures of their turns or tasks, which buffers and other processes do not store.

        Raises TrainingError if a prompt is not the one of its rollout, or its task is not one of the stage's, and
        TasksetError if a picture is gone.
        """
        processor = self._processor
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
            task = self._tasks.get(experience.task_id)
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
