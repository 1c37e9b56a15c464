"""Fingerprints of the model folders that a run reads besides its checkpoints: teachers, references, judges.

A run keeps them in `machine.json`, so that a start shows whether somebody has changed a model since the last one.
A fingerprint is the size of each file and a hash of both of its ends: cheap, and another training changes it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollmill.config.loader import LoadedRun
from rollmill.errors import ModelError
from rollmill.files import read_json_object
from rollmill.models.gguf import SUFFIX
from rollmill.orchestrator.setup import MACHINE, store_machine

_KEY = "models"
_SUFFIXES = (".json", ".safetensors", ".gguf", ".bin", ".model", ".txt", ".jinja", ".py")
_END = 1 << 16

Fingerprints = dict[str, dict[str, str]]
"""By folder and file."""


def check_models(loaded: LoadedRun, run_dir: Path) -> list[str]:
    """Compare the run's model folders with those of its last start, and record them; returns a message for each change.

    Raises:
        ModelError: the folder under the run's adapters has changed: they fit no other weights.
    """
    machine = read_json_object(run_dir / MACHINE)
    before: Fingerprints = machine.get(_KEY, {})
    now = {str(folder): fingerprint(folder) for folder in _folders(loaded)}
    changed = {folder: text for folder in now if folder in before and (text := _changes(before[folder], now[folder]))}
    base = str(loaded.config.model.path)
    if loaded.config.model.lora is not None and base in changed:
        raise ModelError(
            f"{base} has changed since the run's last start ({changed[base]}), and the run's adapters fit only the "
            f"former weights. Put them back, or start a new run; to accept the change, remove `{_KEY}` from "
            f"{run_dir / MACHINE}."
        )
    if now != before:
        store_machine(
            run_dir, {key: value for key, value in machine.items() if key != _KEY} | ({_KEY: now} if now else {})
        )
    return [f"warning: {folder} has changed since the run's last start: {text}" for folder, text in changed.items()]


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the size, and the hash of both ends, of each file of a model's folder, or of a GGUF file."""
    found = {}
    for path in [folder] if folder.is_file() else sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES and path.is_file():
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                ends = file.read(_END)
                file.seek(max(0, size - _END))
                found[path.name] = f"{size} {hashlib.sha256(ends + file.read()).hexdigest()[:32]}"
    return found


def _changes(before: dict[str, str], now: dict[str, str]) -> str:
    words = dict.fromkeys(now.keys() - before.keys(), "is new")
    words |= dict.fromkeys(before.keys() - now.keys(), "is missing")
    words |= {name: "has other content" for name in now.keys() & before.keys() if now[name] != before[name]}
    return ", ".join(f"{name} {word}" for name, word in sorted(words.items()))


def _folders(loaded: LoadedRun) -> list[Path]:
    """The model folders that the run file names; that of the policy if adapters need it after the start, too."""
    model = loaded.config.model
    found = set(_paths([loaded.stages, model.path if model.lora is not None else None]))
    return sorted(path for path in found if (path / "config.json").is_file() or _has_gguf(path))


def _has_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX or any(path.glob(f"*{SUFFIX}"))


def _paths(value: Any) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, BaseModel):
        yield from _paths([each for _, each in value])
    elif isinstance(value, dict):
        yield from _paths(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for each in value:
            yield from _paths(each)
