"""Settings of another framework. Every key that is read is remembered, so those without a counterpart are known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollmill.config.yaml_file import read_plain_yaml
from rollmill.errors import ConfigError
from rollmill.files import MAX_YAML_BYTES, read_text

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_VARIABLE = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^}]*?)\s*)?\}")
_OVERRIDE = re.compile(r"""- (?P<quote>["']?)\+{0,2}(?P<key>[\w.]+)=(?P<value>.*?)(?P=quote)""")


class ForeignSettings:
    """Flat settings (`actor_rollout_ref.actor.optim.lr`) of a configuration file.

    Args:
        values: as read from YAML, nested or flat.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(_flat(values))
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values and self._values[key] is not None

    @property
    def top_level(self) -> set[str]:
        """The keys that the file begins with, such as `actor_rollout_ref`."""
        return {key.partition(".")[0] for key in self._values}

    def take(self, key: str, default: Any = None) -> Any:
        """Returns a value, or `default` if it is missing or null. References to other keys are followed."""
        self._read.add(key)
        value = self._resolved(self._values.get(key), 0)
        return default if value is None else value

    def section(self, prefix: str) -> dict[str, Any]:
        """Returns all values below a key, and takes them."""
        inside = {key: value for key, value in self._values.items() if key.startswith(f"{prefix}.")}
        self._read |= inside.keys()
        return {key.removeprefix(f"{prefix}."): value for key, value in inside.items()}

    def unread(self) -> dict[str, Any]:
        """The settings that nothing has taken, without nulls and empty lists."""
        empty: tuple[Any, ...] = (None, [], {})
        return {key: value for key, value in self._values.items() if key not in self._read and value not in empty}

    def _resolved(self, value: Any, depth: int) -> Any:
        if not isinstance(value, str):
            return value
        if (whole := _REFERENCE.fullmatch(value)) and depth < 10:
            return self._resolved(self._values.get(whole[1]), depth + 1)
        text = _VARIABLE.sub(lambda found: f"${{env:{found[1]}{'' if found[2] is None else f':{found[2]}'}}}", value)
        return None if "${" in text and "${env:" not in text else text


def read_foreign(path: Path) -> ForeignSettings:
    """Reads a YAML file, or the list of `key=value` overrides that Hydra stores as overrides.yaml.

    Raises ConfigError if it holds no settings.
    """
    lines = [line.strip() for line in read_text(path, MAX_YAML_BYTES).splitlines() if line.strip()]
    if lines and all(_OVERRIDE.fullmatch(line) for line in lines):
        matches = [found for line in lines if (found := _OVERRIDE.fullmatch(line))]
        return ForeignSettings({found["key"]: _scalar(found["value"]) for found in matches})
    return ForeignSettings(read_plain_yaml(path))


@dataclass
class ImportedRun:
    """A run file made of another framework's settings, or of an earlier run file."""

    framework: str
    sections: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Settings without a counterpart, each with the reason, or what to do instead."""
    notes: list[str] = field(default_factory=list)
    """Differences, and what is left to be written."""
    unneeded: list[str] = field(default_factory=list)
    """Settings that nothing here corresponds to, and that change no result: logging, processes, kernels."""
    text: str = ""
    """The run file, if it was one before; else it is made of the sections."""

    def put(self, key: str, value: Any) -> None:
        """Sets a key of the run file, such as `trainer.lr`; None leaves it out."""
        if value is None:
            return
        *sections, last = key.split(".")
        inner = self.sections
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value

    def lose(self, values: Mapping[str, Any], prefix: str, why: str = "no counterpart", **harmless: Any) -> None:
        """Lists values of a section that nothing was made of, apart from nulls and from those in `harmless`."""
        for key, value in values.items():
            if value not in (None, [], {}) and (key not in harmless or harmless[key] != value):
                self.lost.setdefault(f"{prefix}.{key}", f"{why} (its value: {value!r:.60})")

    def finish(self, settings: ForeignSettings, unneeded: tuple[str, ...], prefix: str = "") -> None:
        """Lists the settings that were not taken: as unneeded if one of these names, or the beginning of one that ends
        in `*`, fits. `prefix` is put before their names."""
        for key, value in settings.unread().items():
            if any(key.startswith(name[:-1]) if name.endswith("*") else _below(key, name) for name in unneeded):
                self.unneeded.append(prefix + key)
            else:
                self.lost.setdefault(prefix + key, f"no counterpart (its value: {value!r:.60})")


def _below(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def hub_or_path(name: Any, revision: Any = None) -> str | None:
    """Returns a model or data set as a run file names it: a local path as it is, an id of the hub as `hf://ID@REV`."""
    if name is None:
        return None
    text = str(name)
    local = text.startswith(("/", ".", "~", "$", "hf://")) or Path(text).exists() or Path(text).suffix in _FILES
    if local or text.count("/") > 1:
        return text
    return f"hf://{text}" + (f"@{revision}" if revision not in (None, "main") else "")


_FILES = (".jsonl", ".json", ".parquet", ".csv")


def put_steps(run: ImportedRun, most: Any, epochs: Any, rows: int | None, batch: int, keys: tuple[str, str]) -> int:
    """Sets and returns the steps of a run: `most`, else epochs over `rows`, else a guess with a note.

    Args:
        keys: of the other framework's numbers of steps and of epochs, for errors.
    """
    if most is not None:
        steps = whole(most, keys[0])
    elif rows is not None:
        steps = max(1, whole(epochs, keys[1]) * (rows // batch))
    else:
        steps = 100
        run.notes.append(
            f"steps: {steps} is a guess for total_epochs {epochs}: steps = epochs x rows / {batch}; give --rows N"
        )
    run.put("steps", steps)
    return steps


def number(value: Any, key: str) -> float:
    """Converts a value to a number. Raises ConfigError naming the key."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}: expected a number, found {value!r:.60}") from None


def whole(value: Any, key: str) -> int:
    """Converts a value to a whole number. Raises ConfigError naming the key."""
    found = number(value, key)
    if found != int(found):
        raise ConfigError(f"{key}: expected a whole number, found {value!r:.60}")
    return int(found)


def ratio(of: float, to: float, what: str) -> int:
    """Divides a batch. Raises ConfigError if it does not come out even."""
    if to <= 0 or of % to:
        raise ConfigError(f"{what}: {of:g} is not a multiple of {to:g}, so batches would not be whole")
    return int(of // to)


def put_schedule(run: ImportedRun, schedule: str, known: Mapping[str, str], key: str) -> str:
    """Sets and returns the schedule of the learning rate; one without a counterpart is listed, and constant."""
    if schedule not in known:
        run.lost[key] = f"{schedule}: schedules are constant, linear and cosine"
    found = known.get(schedule, "constant")
    run.put("trainer.schedule", found)
    return found


def _scalar(text: str) -> Any:
    """Converts the value of an override: a number, true, false, null, a list or text."""
    try:
        return float(text) if re.search(r"[.eE]", text) else int(text)
    except ValueError:
        return yaml.safe_load(text) if text else None


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping) and (values or not prefix):
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, values
