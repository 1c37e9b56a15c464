"""Checkpoints: atomic, complete, verified, retained by policy.

`RUN/checkpoints/step-000012/` is a Hugging Face checkpoint directory (any program loads it) with three more files:
`state.json` (the run's progress), `trainer.pt` (optimizer, schedule, random state) and `manifest.json` (hashes of all
files). It is written under another name, flushed to the disk and renamed, so a directory named step-N is complete, even
if the process was killed or the power failed. Damaged ones are kept as `damaged-N`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmill.errors import CheckpointError, DamagedCheckpointError, describe_read_error
from rollmill.files import make_durable_folder, read_json_object, sync
from rollmill.orchestrator.manifest import (
    FORMAT,
    STATE,
    TRAINER,
    read_manifest,
    require_format,
    require_manifest,
    write_manifest,
)
from rollmill.orchestrator.state import RunState

if TYPE_CHECKING:
    from rollmill.weights.buckets import ShardedWeights

FOLDER = "checkpoints"
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD, and the flag of Linux's renameat2
_NAME = re.compile(r"step-(\d{6,})")
_ASIDE = re.compile(r"damaged-(\d{6,})(?:-\d+)?")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)))

    def damaged(self) -> list[Path]:
        """Folders of damaged checkpoints that were moved aside, in order."""
        return sorted(path for path in self.folder.glob("damaged-*") if _ASIDE.fullmatch(path.name))

    def path(self, step: int) -> Path:
        """Directory of a step's checkpoint."""
        return self.folder / f"step-{step:06d}"

    def write(
        self,
        step: int,
        model: Any,
        tokenizer: Any,
        state: dict[str, Any],
        trainer: dict[str, Any],
        machine: dict[str, Any],
        export: Callable[[Path], None] | None = None,
        weights: ShardedWeights | None = None,
    ) -> Path:
        """Write the checkpoint of a step. Another one of the same step is replaced when the new one is complete.

        Args:
            machine: contents of machine.json, which are lost with that file otherwise.
            export: writes what a stage produces besides the policy into the folder.
            weights: of a model that has none, since ranks hold parts of them.

        Raises:
            CheckpointError: the disk is full or not writable; older checkpoints are untouched.
        """
        import torch  # commands that only list checkpoints do not need it

        from rollmill.models.from_scratch import save_policy

        final = self.path(step)
        temporary = self.folder / f".writing-{step:06d}-{os.getpid()}"
        try:
            make_durable_folder(self.folder)
            shutil.rmtree(temporary, ignore_errors=True)
            save_policy(model, tokenizer, temporary, weights)
            if export is not None:
                export(temporary)
            with (temporary / TRAINER).open("wb") as file:  # Python's files report why a write fails
                torch.save(trainer, file)
            (temporary / STATE).write_text(json.dumps({"format": FORMAT, **state}, allow_nan=False) + "\n")
            write_manifest(temporary, step=step, machine=machine, stores=state["current"]["stores"])
            if final.exists():
                self._replace(step, temporary)
            else:
                temporary.rename(final)
            sync(self.folder)
        except Exception as error:  # libraries wrap the operating system's error
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {final}: {_reason(error)}. Earlier checkpoints are whole; free some "
                f"space or fix the permissions, then `rollmill resume {self.folder.parent}`."
            ) from error
        return final

    def read(self, step: int, *, mapped: bool = False) -> tuple[RunState, dict[str, Any]]:
        """Read state and trainer state. Call it inside `verifying`, which finds damage.

        Args:
            mapped: leave the trainer's tensors in the file's memory, since no rank holds all of them.

        Raises:
            DamagedCheckpointError: a file is missing.
            CheckpointError: they cannot be read, or are of another format.
        """
        import torch

        path = self.path(step)
        if missing := [f"{name} is missing" for name in (STATE, TRAINER) if not (path / name).is_file()]:
            raise DamagedCheckpointError(path, missing)
        require_manifest(path)
        try:
            state = read_state(path)
            trainer = torch.load(path / TRAINER, map_location="cpu", weights_only=True, mmap=mapped)
        except CheckpointError:
            raise
        except Exception as error:
            raise unreadable(path, error) from error
        return state, trainer

    def machine(self) -> dict[str, Any] | None:
        """Contents of machine.json as the newest checkpoint that can say them has them; None if none can."""
        for step in reversed(self.steps()):
            try:
                manifest = read_manifest(self.path(step))
            except CheckpointError:
                continue
            if manifest is not None:
                return manifest.machine
        return None

    def move_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it is no longer one of the run's; returns its new path."""
        base, number = self.folder / f"damaged-{step:06d}", 2
        target = base
        while target.exists():
            target, number = base.with_name(f"{base.name}-{number}"), number + 1
        self.path(step).rename(target)
        sync(self.folder)
        return target

    def prune(self, keep_last: int, also: Iterable[int]) -> None:
        """Remove all but the newest `keep_last` and the steps in `also`, and leftovers of killed writers."""
        steps = self.steps()
        if surplus := set(steps[:-keep_last]) - set(also):
            for step in surplus:
                self.path(step).rename(self.folder / f".removing-{step:06d}")  # half of one must not look whole
            sync(self.folder)  # nor after a power failure
        self.sweep()

    def _replace(self, step: int, new: Path) -> None:
        """Put a complete checkpoint in the place of another one of the same step."""
        if _exchange(new, self.path(step)):
            shutil.rmtree(new)
            return
        old = self.folder / f".replaced-{step:06d}"  # `sweep` puts it back after a kill at this moment
        self.path(step).rename(old)
        new.rename(self.path(step))
        shutil.rmtree(old)

    def sweep(self) -> None:
        """Remove unfinished checkpoints, and put back one whose replacement did not arrive."""
        for old in self.folder.glob(".replaced-*"):
            step = int(old.name.removeprefix(".replaced-"))
            if self.path(step).exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(self.path(step))
        for left in [*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")]:
            shutil.rmtree(left, ignore_errors=True)


def read_state(folder: Path) -> RunState:
    """Read the state of the run from a checkpoint.

    Raises:
        CheckpointError: it is of another format.
        OSError, ValueError, TypeError, KeyError: it is missing or damaged.
    """
    content = read_json_object(folder / STATE)
    require_format(folder / STATE, content.pop("format", None))
    return RunState.from_json(content)


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Build the CheckpointError for missing or damaged files."""
    return CheckpointError(
        f"cannot read the checkpoint {path}: {describe_read_error(error)}. "
        "Remove that folder to resume from the one before it."
    )


def _exchange(new: Path, old: Path) -> bool:
    """Swap two folders at once, so that `old` always names a complete one; False where the system cannot."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    if not swap(_HERE, os.fsencode(new.absolute()), _HERE, os.fsencode(old.absolute()), _RENAME_EXCHANGE):
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # of some file systems
        return False
    raise OSError(number, os.strerror(number), str(old))


def _reason(error: BaseException) -> str:
    """The operating system's reason, if there is one: torch and safetensors wrap it in their own errors."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return str(error) if found is None else str(found)
