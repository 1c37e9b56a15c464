"""Checkpoints: atomic, complete, retained by policy.

`RUN/checkpoints/step-000012/` is a Hugging Face checkpoint directory (any program loads it) with two more files:
`state.json` (the run's progress) and `trainer.pt` (optimizer, schedule, random state). It is written under another name
and renamed, so a directory named step-N is complete, even if the process was killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from rollmill.errors import CheckpointError
from rollmill.models.from_scratch import save_policy
from rollmill.orchestrator.state import RunState

FOLDER = "checkpoints"
STATE = "state.json"
TRAINER = "trainer.pt"
_NAME = re.compile(r"step-(\d{6,})")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)))

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
        export: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the checkpoint of a step that has none.

        Args:
            export: writes what a stage produces besides the policy into the folder.

        Raises:
            CheckpointError: the disk is full or not writable; older checkpoints are untouched.
        """
        final = self.path(step)
        assert not final.exists(), "replacing a checkpoint would leave a moment without any"
        temporary = self.folder / f".writing-{step:06d}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            save_policy(model, tokenizer, temporary)
            if export is not None:
                export(temporary)
            with (temporary / TRAINER).open("wb") as file:  # Python's files report why a write fails
                torch.save(trainer, file)
            (temporary / STATE).write_text(json.dumps(state, allow_nan=False) + "\n")
            _flush(temporary)
            temporary.rename(final)
            _flush_directory(self.folder)
        except Exception as error:  # libraries wrap the operating system's error
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {final}: {_reason(error)}. Earlier checkpoints are whole; free some "
                f"space or mend the permissions, then `rollmill resume {self.folder.parent}`."
            ) from error
        return final

    def read(self, step: int) -> tuple[RunState, dict[str, Any]]:
        """Read state and trainer state.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        path = self.path(step)
        try:
            state = RunState.from_json(json.loads((path / STATE).read_text()))
            trainer = torch.load(path / TRAINER, map_location="cpu", weights_only=True)
        except Exception as error:
            raise unreadable(path, error) from error
        return state, trainer

    def prune(self, keep_last: int, also: Iterable[int]) -> None:
        """Remove all but the newest `keep_last` and the steps in `also`, and leftovers of killed writers."""
        steps = self.steps()
        for step in set(steps[:-keep_last]) - set(also):
            self.path(step).rename(self.folder / f".removing-{step:06d}")  # half of a checkpoint must not look whole
        self.sweep()

    def sweep(self) -> None:
        """Remove unfinished checkpoints."""
        for left in [*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")]:
            shutil.rmtree(left, ignore_errors=True)


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Build the CheckpointError for missing or damaged files."""
    return CheckpointError(
        f"cannot read the checkpoint {path}: {error}. Remove that folder to resume from the one before it."
    )


def _reason(error: BaseException) -> str:
    """The operating system's reason, if there is one: torch and safetensors wrap it in their own errors."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return str(error) if found is None else str(found)


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            _flush(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _flush_directory(folder)


def _flush_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
