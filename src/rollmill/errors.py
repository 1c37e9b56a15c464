"""Errors meant for users: each says what is wrong, where, and what to do. The command line prints no traceback."""

from __future__ import annotations

import errno
import pickle
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar


class RollmillError(Exception):
    """Base of every error that a user can cause or fix. `exit_code` is the exit code of the command line."""

    exit_code = 1
    recoverable: ClassVar[bool] = False
    """True if something outside the run failed (a process, a server, a wait), so that the same run may succeed when it
    starts again from its newest checkpoint. False if it would fail again: wrong settings, errors of users' code."""


class ConfigError(RollmillError, ValueError):
    """A run file, an override or a command-line argument is wrong (exit code 2)."""

    exit_code = 2


class CorruptFileError(RollmillError, ValueError):
    """A file that rollmill wrote is damaged."""


class TasksetError(RollmillError, ValueError):
    """A taskset is missing, empty or holds rows that cannot become tasks."""


class ChatTemplateError(RollmillError, ValueError):
    """The model's chat template cannot show a conversation, or what it shows could not be trained or read rightly."""


class RewardError(RollmillError):
    """A reward raised, or returned something that is not a reward."""


class ModelError(RollmillError, ValueError):
    """A checkpoint folder, its tokenizer or its configuration cannot be used."""


class GraderLostError(RewardError):
    """A process that scores completions has died, again and again."""

    recoverable = True


class EndpointLostError(RewardError):
    """A judge's server no longer answers."""

    recoverable = True


class WorkflowError(RollmillError):
    """A workflow or an environment raised, or returned something that is not a reward."""


class EpisodeError(WorkflowError):
    """An environment raised, crashed or timed out. Only the rollout that used it fails."""


class EngineError(RollmillError):
    """A rollout request cannot be served, for example a prompt longer than the context."""


class UnsupportedRequestError(EngineError):
    """A rollout request asks for what the engine does not do, such as truncation."""


class EngineLostError(EngineError):
    """A process that generates completions has ended, or cannot be restarted."""

    recoverable = True


class ContextLengthError(EngineError):
    """A prompt leaves no room for a completion in the model's context."""


class TrainingError(RollmillError):
    """Training cannot continue, for example because the loss is not finite."""


class TrainerRankLostError(TrainingError):
    """A trainer process has ended. Resuming from the newest checkpoint may be enough."""

    recoverable = True


class TrainerRankMemoryError(TrainerRankLostError):
    """A trainer process has no memory left, or the kernel has killed it for that."""


class StoreError(RollmillError):
    """A buffer's database cannot be reached, read or written."""


class StoreLostError(StoreError):
    """A buffer's database was not reachable for longer than its outage may last."""

    recoverable = True


class PipelineError(RollmillError):
    """An operator of a pipeline raised, or left nothing to train on."""


class WeightSyncError(RollmillError):
    """Weights cannot be sent, arrived damaged, or do not fit the receiver."""

    recoverable = True


class OffloadError(RollmillError):
    """Tensors cannot be offloaded from the device, or cannot be brought back."""


class CallbackError(RollmillError):
    """A callback of a run raised."""


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

    recoverable = True

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


_LIBRARY = re.compile(r"(?:site|dist)-packages|/libs/\w+/src/rollmill_\w+/")
"""Part of the name of a library's file; of rollmill's own libraries where they are installed from a checkout, too."""


def user_code_location(error: BaseException) -> str:
    """Return FILE:LINE of the innermost frame outside libraries and rollmill, where a user's code failed; or ""."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [each for each in frames if user_code_frame(each[0])]
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def user_code_frame(filename: str) -> bool:
    """True if a frame of this file is outside of libraries and of rollmill."""
    libraries = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    return not filename.startswith(libraries) and not _LIBRARY.search(filename)


def explain_path_error(error: OSError) -> str | None:
    """Return the message for an operating system error about a path that the user gave; None for any other error."""
    if error.errno not in _OF_PATHS or error.filename is None:
        return None
    return f"{error.filename}: {error.strerror}; correct the path, or fix its permissions"


def describe_read_error(error: Exception) -> str:
    """Describe an error of the libraries that read models.

    torch refuses to run the programs that a file of its own format can hold, and then explains how to run them; a file
    that is no pickle at all makes it raise errors without a sentence.
    """
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"code ({found[1]})" if found else "more than tensors, or is damaged"
        return f"a file of PyTorch (such as *.bin) holds {what}; none of it was run. Get the weights as *.safetensors"
    return str(error) if " " in str(error) else f"{type(error).__name__}: {error}; a file is damaged"


_VMSTAT, _CGROUPS = Path("/proc/vmstat"), Path("/sys/fs/cgroup")
_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


# Failures after which a run may start again


def is_recoverable(error: BaseException) -> bool:
    """True if an error, or one that it was raised from, is recoverable (see RollmillError), or is out of memory."""
    return not isinstance(error, ConfigError | UserExitError) and any(
        is_memory_error(each) or (isinstance(each, RollmillError) and each.recoverable) for each in _with_causes(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error, or one that it was raised from, says that host or device have no memory left."""
    return any(map(is_memory_error, _with_causes(error)))


def is_memory_error(error: BaseException) -> bool:
    """True if this error itself says that memory ran out. Torch, which this module does not import, has its own."""
    if isinstance(error, MemoryError | TrainerRankMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text or "CUDA out of memory" in text


def count_oom_kills() -> int:
    """Processes of this control group that the kernel has killed because memory ran out.

    The whole host is counted only where the group has no counter: a foreign process, or a judged program in a group of
    its own, may run out of memory without any harm to this run.
    """
    counters = [path for path in _event_files() if path.exists()]
    return sum(map(_oom_kills_in, counters or [_VMSTAT]))


def _event_files() -> list[Path]:
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, kinds, path in groups:
        if not kinds:
            found.append(_CGROUPS / path.lstrip("/") / "memory.events.local")
        elif "memory" in kinds.split(","):
            found.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return found


def _oom_kills_in(path: Path) -> int:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] == "oom_kill")


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Each error once: users' code can raise an error from itself."""
    seen, left = set(), [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        left += () if each.__cause__ is None else (each.__cause__,)
