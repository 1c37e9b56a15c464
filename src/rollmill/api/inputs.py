"""Models, datasets and functions that a script or a notebook holds, as entries of a run file.

What has no name in a file (a loaded model, rows, a closure) is written into a folder of the run, so that reward
processes and a later resume find it.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from rollmill.config.hub import fetch_named, parse_reference
from rollmill.config.section import Section
from rollmill.errors import ConfigError
from rollmill.files import atomic_write, share_files
from rollmill.user_code import store_object

_MARK = ".complete"

INPUTS, RUN_FILE = "inputs", "run.yaml"
"""Names of the folder of a script's models and data, and of the run file written from them."""


class RunInputs:
    """Writes what a run gets as Python objects into `folder`, and returns the run file's entries for it.

    Files are named by their contents: the same input is written once, and no file of another run is changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def section(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the keys of a run, a stage, a domain or an evaluation: `dataset` becomes `taskset`, and objects
        become paths and references.

        Raises ConfigError naming a value that no run file can hold.
        """
        found: dict[str, Any] = {}
        for key, value in values.items():
            match key:
                case "dataset":
                    found["taskset"] = self.taskset(value)
                case "taskset":
                    found[key] = self.taskset(value)
                case "rewards" if value is not None:
                    listed = value if isinstance(value, list | tuple) else [value]
                    found[key] = [self.reward(each) for each in listed]
                case "evaluation" if isinstance(value, Mapping):
                    sets = {"sets": self._each(value["sets"])} if isinstance(value.get("sets"), Mapping) else {}
                    found[key] = self.section(value) | sets
                case "domains" if isinstance(value, Mapping):
                    found[key] = self._each(value)
                case "stages" if isinstance(value, list | tuple):
                    found[key] = [self.section(each) if isinstance(each, Mapping) else each for each in value]
                case _:
                    found[key] = self._plain(value, key)
        return found

    def _each(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.section(each) if isinstance(each, Mapping) else each for name, each in sections.items()}

    # -- models ------------------------------------------------------------------------------------------------

    def model(self, value: Any, tokenizer: Any = None) -> Any:
        """Return the section `model`: of a folder, a section, a hub id, or a loaded model, which is saved.

        Raises ConfigError if a loaded model has no tokenizer, or the hub cannot be reached.
        """
        if isinstance(value, tuple) and len(value) == 2:
            value, tokenizer = value
        if isinstance(value, Mapping | Section):
            return self._plain(value, "model")
        if isinstance(value, str | Path):
            if tokenizer is not None:
                raise ConfigError("tokenizer: a model's folder has its own; leave it out, or load the model as well")
            return {"path": find_model(value)}
        if not hasattr(value, "save_pretrained"):
            raise ConfigError(
                f"model: expected a folder, a hub id, a section or a transformers model, found a {type(value).__name__}"
            )
        if not hasattr(tokenizer, "save_pretrained"):
            raise ConfigError("model: a loaded model needs its tokenizer: model=model, tokenizer=tokenizer")
        return {"path": str(self._saved_model(value, tokenizer))}

    def _saved_model(self, model: Any, tokenizer: Any) -> Path:
        """Save weights as they are now; a model that was changed gets another folder."""
        digest = sha256()
        for name, tensor in model.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(_bytes_type()).numpy().tobytes())
        folder = self.folder / f"model-{digest.hexdigest()[:8]}"
        if not (folder / _MARK).exists():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            share_files(folder)
            atomic_write(folder / _MARK, b"")
        return folder

    # -- datasets ----------------------------------------------------------------------------------------------

    def taskset(self, value: Any) -> Any:
        """Return the section `taskset`: of a file or folder, a section, rows, a function that yields rows, or a
        `datasets.Dataset`."""
        if isinstance(value, str | Path):
            return {"path": str(value)}
        if isinstance(value, Mapping):
            rows = self.taskset(value["rows"]) if "rows" in value else {}
            mix = {"mix": [self.taskset(each) for each in value["mix"]]} if isinstance(value.get("mix"), list) else {}
            code = {"function": self.function(value["function"])} if callable(value.get("function")) else {}
            rest = {key: each for key, each in value.items() if key not in {"rows", *mix, *code}}
            return {**self._plain(rest, "taskset"), **rows, **mix, **code}
        if isinstance(value, Section):
            return self._plain(value, "taskset")
        if hasattr(value, "save_to_disk"):
            return {"path": str(self._saved_dataset(value))}
        if callable(value):
            return {"function": self.function(value)}
        if isinstance(value, Iterable):
            return {"path": str(self._rows(value))}
        raise ConfigError(
            f"dataset: expected rows, a function that yields rows, a datasets.Dataset, a path or a section, found a "
            f"{type(value).__name__}"
        )

    def _rows(self, rows: Iterable[Any]) -> Path:
        lines = []
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(f"dataset: row {number} is a {type(row).__name__}, not a mapping of columns")
            try:
                lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise ConfigError(f"dataset: row {number} has a value that JSON cannot hold: {error}") from error
        data = "".join(lines).encode("utf-8", "surrogatepass")
        path = self.folder / f"rows-{sha256(data).hexdigest()[:8]}.jsonl"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, data, durable=True)
        return path

    def _saved_dataset(self, dataset: Any) -> Path:
        splits = dataset if isinstance(dataset, Mapping) else {"": dataset}
        marks = [f"{name} {getattr(each, '_fingerprint', id(each))}" for name, each in splits.items()]
        folder = self.folder / f"dataset-{sha256(repr(marks).encode()).hexdigest()[:8]}"
        if not (folder / _MARK).exists():
            dataset.save_to_disk(str(folder))
            atomic_write(folder / _MARK, b"")
        return folder

    # -- functions ---------------------------------------------------------------------------------------------

    def reward(self, value: Any) -> Any:
        """Return an entry of `rewards`: of a function or a callable object, a section, or a name."""
        if isinstance(value, Mapping) and callable(value.get("function")):
            rest = {key: each for key, each in value.items() if key != "function"}
            return {**self.reward(value["function"]), **self._plain(rest, "rewards")}
        if isinstance(value, str):
            return {"name": "python", "function": value} if ":" in value else {"name": value}
        if isinstance(value, Mapping | Section):
            return self._plain(value, "rewards")
        if callable(value):
            return {"name": "python", "function": self.function(value)}
        raise ConfigError(f"rewards: expected functions, names or sections, found a {type(value).__name__}")

    def function(self, target: Callable[..., Any]) -> str:
        """Return a reference of a function or a callable object, FILE.py:NAME or package.module:NAME if it has one;
        everything else, and what the script defines itself, is stored.

        Raises ConfigError if it cannot be stored.
        """
        return _importable(target) or store_object(self.folder, target, _name(target))

    def _plain(self, value: Any, key: str) -> Any:
        """Return what YAML can hold. Raises ConfigError naming the key."""
        if isinstance(value, Section):
            chosen = {"name": value.name} if hasattr(value, "name") else {}
            return {**value.model_dump(mode="json", exclude_unset=True), **chosen}
        if isinstance(value, Mapping):
            return {str(name): self._plain(each, f"{key}.{name}") for name, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return [self._plain(each, f"{key}.{index}") for index, each in enumerate(value)]
        if isinstance(value, Path):
            return str(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ConfigError(f"{key}: a run file cannot hold a {type(value).__name__}; give a number, text, list or dict")


def find_model(source: str | Path) -> str:
    """Return the folder of a model. An id of the Hugging Face hub is downloaded, or found in its cache.

    Raises ConfigError if it is neither a folder nor an id, or the hub cannot be reached.
    """
    text = str(source)
    reference = None if text == "new" or Path(text).expanduser().exists() else parse_reference(text, [Path.cwd()])
    if reference is None:
        return text
    try:
        return str(fetch_named(text, reference, "model"))
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from error


def _importable(target: Any) -> str | None:
    """Return the reference of a function or a class that a module defines, so that another process can import it."""
    name = getattr(target, "__name__", "")
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not target:
        return None
    if "." in module.__name__:
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None)
    return f"{Path(file).absolute()}:{name}" if file and file.endswith(".py") else None


def _name(target: Any) -> str:
    """Return the name of a function in metrics; a lambda and an object are called after what they are."""
    found = getattr(target, "__name__", type(target).__name__)
    if found == "<lambda>":
        return "reward_lambda" if len(inspect.signature(target).parameters) else "rows"
    return re.sub(r"\W", "_", found)


def _bytes_type() -> Any:
    import torch

    return torch.uint8
