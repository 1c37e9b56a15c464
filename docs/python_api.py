"""Writes src/rollmill/api/algorithms.pyi, the typed signatures of the algorithms' classes; `--check` only compares it.

Type checkers and editors read it; the keys, types and texts come from the models of the run file.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from generated_files import write_or_check
from pydantic.fields import FieldInfo

from rollmill.api.algorithms import algorithm_classes
from rollmill.api.training_run import setting_homes
from rollmill.config.algorithms import known_algorithms
from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.config.key_docs import describe_meaning
from rollmill.config.rollout import RolloutConfig
from rollmill.config.run import RunConfig
from rollmill.config.section import Section
from rollmill.config.trainer import TrainerConfig

FILE = Path(__file__).resolve().parents[1] / "src" / "rollmill" / "api" / "algorithms.pyi"
_HEAD = '''\
"""Written by docs/python_api.py from the models of the run file; a test compares it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from rollmill.api.training_run import TrainingRun
from rollmill.config.section import Section
from rollmill.orchestrator.run_control import Callback

SectionLike = str | Mapping[str, Any] | Section
ModelLike = str | Path | Mapping[str, Any] | Section | Any
DatasetLike = (
    str | Path | Mapping[str, Any] | Section | Iterable[Mapping[str, Any]] | Callable[..., Iterable[Mapping[str, Any]]]
)
RewardLike = SectionLike | Callable[..., Any]

def algorithm_classes() -> dict[str, type[TrainingRun]]: ...

'''
_INIT = """\
    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[{settings}],
    ) -> None: ...
"""
_OBJECTS = {
    "kl": "float | SectionLike",
    "rewards": "RewardLike | Sequence[RewardLike]",
    "taskset": "DatasetLike",
    "plugins": "Sequence[str | Path]",
    "stages": "Sequence[Mapping[str, Any]]",
    "domains": "Mapping[str, Mapping[str, Any]]",
}
_ARGUMENTS = {"model", "rewards", "algorithm"}


def stub() -> str:
    """Returns the text of the file."""
    return _formatted("".join(_parts()))


def _parts() -> Iterator[str]:
    yield _HEAD
    homes = setting_homes(None)
    fields: dict[str, FieldInfo] = {}
    for key, home in homes.items():
        section: type[Section] = {"": RunConfig, "rollout": RolloutConfig, "trainer": TrainerConfig}[home]
        fields[key] = section.model_fields[key]
    for key in _ARGUMENTS:
        fields.pop(key, None)
    yield _settings("RunSettings", "TypedDict", "Settings of every run.", fields)
    common = {key: field for key, field in PolicyGradientOptions.model_fields.items() if key != "name"}
    yield _settings("PolicyGradientSettings", "RunSettings", "Settings of policy-gradient algorithms.", common)
    for name in algorithm_classes():
        section = next(each for each in known_algorithms().values() if each.__name__ == name)
        gradient = issubclass(section, PolicyGradientOptions)
        base, known = ("PolicyGradientSettings", {**fields, **common}) if gradient else ("RunSettings", fields)
        own = {key: field for key, field in section.model_fields.items() if key not in {"name", *known}}
        settings = f"{name}Settings" if own else base
        if own:
            yield _settings(settings, base, f"Settings of {name}.", own)
        yield f"class {name}(TrainingRun):\n{_docstring(section.__doc__ or name)}\n{_INIT.format(settings=settings)}\n"


def _settings(name: str, base: str, text: str, fields: Mapping[str, FieldInfo]) -> str:
    head = f"class {name}({base}, total=False):\n{_docstring(text)}"
    keys = (
        f"    {key}: {_OBJECTS.get(key) or _type(each.annotation)}\n{_meaning(key, each)}"
        for key, each in fields.items()
    )
    return head + "".join(keys) + "\n"


def _meaning(key: str, field: FieldInfo) -> str:
    text = describe_meaning(key, field).replace("\\|", "|")
    return _docstring(text) if text else ""


def _docstring(text: str) -> str:
    whole = " ".join(text.split()).replace("\\", "\\\\")
    lines = textwrap.wrap(whole, 120 - 4 - 6)
    if len(lines) <= 1:
        return f'    """{whole}"""\n'
    lines = textwrap.wrap(whole, 120 - 4, initial_indent='"""'.rjust(3))
    if len(lines[-1]) > 112:
        lines.append("")
    return textwrap.indent("\n".join(lines) + '"""', "    ") + "\n"


def _type(annotation: Any) -> str:
    """Returns the annotation as a caller may write it: a section is also its name or a mapping."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(_type(each) for each in arguments))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is list:
        return f"Sequence[{_type(arguments[0])}]"
    if origin is tuple:
        return f"Sequence[{_type(arguments[0])}]"
    if origin is dict:
        return f"Mapping[{_type(arguments[0])}, {_type(arguments[1])}]"
    if annotation in (int, float, bool, str):
        return str(annotation.__name__)
    if annotation in (None, NoneType):
        return "None"
    if annotation is Path:
        return "str | Path"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "SectionLike"
    return "Any"


def _formatted(text: str) -> str:
    ruff = Path(sys.executable).with_name("ruff")
    command = [str(ruff), "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Writes or compares the file; returns the exit code."""
    return write_or_check([(FILE, stub())], "python_api.py", sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
