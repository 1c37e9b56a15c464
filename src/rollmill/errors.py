"""Errors meant for users: each says what is wrong, where, and what to do. The command line prints no traceback."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path


class RollmillError(Exception):
    """Base of every error that a user can cause or fix. `exit_code` is the exit code of the command line."""

    exit_code = 1


class ConfigError(RollmillError, ValueError):
    """A run file, an override or a command-line argument is wrong (exit code 2)."""

    exit_code = 2


class CorruptFileError(RollmillError, ValueError):
    """A file that rollmill wrote is damaged."""


class TasksetError(RollmillError, ValueError):
    """A taskset is missing, empty or holds rows that cannot become tasks."""


class RewardError(RollmillError):
    """A reward raised, or returned something that is not a reward."""


class ModelError(RollmillError, ValueError):
    """A checkpoint folder, its tokenizer or its configuration cannot be used."""


class EndpointLostError(RewardError):
    """A judge's server no longer answers."""

    recoverable = True


class WorkflowError(RollmillError):
    """A workflow or an environment raised, or returned something that is not a reward."""


class EpisodeError(WorkflowError):
    """An environment raised, crashed or timed out. Only the rollout that used it fails."""


class EngineError(RollmillError):
    """A rollout request cannot be served, for example a prompt longer than the context."""


class EngineLostError(EngineError):
    """A process that generates completions has ended, or cannot be restarted."""

    recoverable = True


class ContextLengthError(EngineError):
    """A prompt leaves no room for a completion in the model's context."""


class TrainingError(RollmillError):
    """Training cannot continue, for example because the loss is not finite."""


class TrainerRankLostError(TrainingError):
    """A trainer process has ended. Resuming from the newest checkpoint may be enough."""


class StoreError(RollmillError):
    """A buffer's database cannot be reached, read or written."""


class PipelineError(RollmillError):
    """An operator of a pipeline raised, or left nothing to train on."""


class WeightSyncError(RollmillError):
    """Weights cannot be sent, arrived damaged, or do not fit the receiver."""


class OffloadError(RollmillError):
    """Tensors cannot be offloaded from the device, or cannot be brought back."""


class CheckpointError(RollmillError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing or changed. `damage` has a sentence for each."""

    def __init__(self, folder: Path, damage: Sequence[str]) -> None:
        super().__init__(
            f"the checkpoint {folder} is damaged: {'; '.join(damage)}. Choose another one (`rollmill checkpoints RUN "
            "--verify` lists them), or put its files back. Changed on purpose? Then use a copy of the folder without "
            "manifest.json and state.json."
        )
        self.folder, self.damage = folder, list(damage)

    def __reduce__(self) -> tuple[type[DamagedCheckpointError], tuple[Path, list[str]]]:
        """Support pickling, because it may be raised in another process than it is caught in."""
        return type(self), (self.folder, self.damage)


class DeadlineError(RollmillError):
    """A wait timed out. The message names who waited, for whom, for how long and what to do."""

    def __init__(self, waiter: str, owner: str, seconds: float, advice: str) -> None:
        super().__init__(f"{waiter} waited {seconds:.0f} s for {owner}. {advice}")
        self.waiter, self.owner, self.seconds, self.advice = waiter, owner, seconds, advice

    def __reduce__(self) -> tuple[type[DeadlineError], tuple[str, str, float, str]]:
        """Support pickling, because it may be raised in another process than it is caught in."""
        return type(self), (self.waiter, self.owner, self.seconds, self.advice)


class UserExitError(RollmillError):
    """A user's code ended the process (`sys.exit`, `exit`). A run ends by itself, or by an exception."""

    @classmethod
    def of(cls, error: SystemExit) -> UserExitError:
        """Build the error, with the line that ended the process."""
        code = "" if error.code is None else repr(error.code)
        place = user_code_location(error) or "user code"
        return cls(f"{place}: it ended the process by sys.exit({code}); raise an exception that says what is wrong")


class SandboxError(RollmillError):
    """No safe sandbox can be built here, or an invalid request. The message has what is missing."""


def user_code_location(error: BaseException) -> str:
    """Return FILE:LINE of the innermost frame outside libraries and rollmill, where a user's code failed; or ""."""
    libraries = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [
        each for each in frames if not each[0].startswith(libraries) and not re.search("(site|dist)-packages", each[0])
    ]
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""
