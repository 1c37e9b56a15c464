"""Users' files that were written for an earlier version."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.config.algorithms import known_algorithms
from rollmill.data.verifiers import rows
from rollmill.errors import ConfigError, RewardError
from rollmill.registry import import_file, import_object
from rollmill.rollout.environments import StepResult
from rollmill.rollout.policy import PolicyConversation
from rollmill.types import Completion, ExperienceSource, Task

FILE = """
from rollmill.core import Task as SameTask
from rollmill.core.errors import RewardError
from rollmill.core.types import Completion, Source, Task
from rollmill.explorer.dialogue import Dialogue
from rollmill.explorer.environments import StepResult
from rollmill.recipes import GRPO
from rollmill.tasks.images import read_image
"""


def test_documented_paths_of_an_earlier_version_are_found(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FILE)
    module = import_file(tmp_path / "reward.py")
    assert (module.SameTask, module.Task, module.Completion) == (Task, Task, Completion)
    assert (module.Source, module.RewardError) == (ExperienceSource, RewardError)
    assert (module.Dialogue, module.StepResult) == (PolicyConversation, StepResult)
    assert module.GRPO is known_algorithms()["grpo"]
    assert import_object("rollmill.tasks.verifiers:rows") is rows


def test_what_never_was_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("from rollmill.core.types import Nothing\n")
    with pytest.raises(ConfigError, match="cannot import name 'Nothing'"):
        import_file(tmp_path / "odd.py")
    with pytest.raises(ConfigError, match=r"module `rollmill\.core\.nothing` cannot be imported"):
        import_object("rollmill.core.nothing:x")
