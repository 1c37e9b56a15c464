"""Optional libraries that a run needs, and that are not installed: `rollmill check` names them before a run does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from rollmill.config.environments import GymnasiumSection, ReasoningGymSection, TextArenaSection
from rollmill.config.hub import parse_reference, reference_of
from rollmill.config.loader import LoadedRun
from rollmill.config.model import AuxiliaryModelConfig, ModelConfig
from rollmill.config.placement import RayPlacement
from rollmill.config.rewards.judges import JudgeSection
from rollmill.config.rewards.math import ReasoningGymReward
from rollmill.config.rewards.text import FormatReward, LanguageReward, ToolCallReward
from rollmill.config.rewards.vision import OCRReward
from rollmill.config.rows import FieldsConfig, GeneratorConfig, RowsSection
from rollmill.config.section import Section
from rollmill.config.task_operators import DeduplicateTasks
from rollmill.config.tools import MCPTool, SearchTool
from rollmill.config.tree import KeyPath, format_key_path
from rollmill.config.workflows import ProgramWorkflow, TrafficWorkflow

_Need = tuple[type[Section], str, str, Callable[[Any], str | None]]


def _always(_: Any) -> str | None:
    return ""


def _rows(section: RowsSection) -> str | None:
    """The key of rows whose reader is an extra; `datasets` reads folders, and brings pyarrow."""
    path = section.path
    if path is None:
        return None
    remote = parse_reference(str(path)) is not None or reference_of(path) is not None
    return "path" if path.suffix.lower() == ".parquet" or path.is_dir() or remote else None


_NEEDS: tuple[_Need, ...] = (
    (RowsSection, "data", "pyarrow", _rows),
    (GeneratorConfig, "reasoning", "reasoning_gym", _always),
    (ReasoningGymSection, "reasoning", "reasoning_gym", _always),
    (ReasoningGymReward, "reasoning", "reasoning_gym", _always),
    (GymnasiumSection, "gym", "gymnasium", _always),
    (TextArenaSection, "textarena", "textarena", _always),
    (ModelConfig, "lora", "peft", lambda model: "lora" if model.lora is not None else None),
    (AuxiliaryModelConfig, "judge", "openai", lambda model: "endpoint" if model.endpoint is not None else None),
    (JudgeSection, "judge", "openai", lambda judge: "endpoint" if judge.endpoint is not None else None),
    (FormatReward, "schema", "jsonschema", lambda reward: _schema_key(reward)),
    (ToolCallReward, "schema", "jsonschema", _always),
    (LanguageReward, "language", "py3langid", lambda reward: "method" if reward.method == "identify" else None),
    (OCRReward, "vision", "rapidfuzz", _always),
    (FieldsConfig, "vision", "PIL", lambda fields: "images" if fields.images else None),
    (DeduplicateTasks, "dedup", "datasketch", lambda operator: "by" if operator.by == "near" else None),
    (SearchTool, "search", "bm25s", _always),
    (MCPTool, "mcp", "mcp", _always),
    (ProgramWorkflow, "serve", "uvicorn", _always),
    (TrafficWorkflow, "serve", "uvicorn", _always),
    (RayPlacement, "ray", "ray", _always),
)
"""Sections, the extra and the module that they need, and the key that says so: "" is the section itself, None none.
Sections that always need one may say so themselves (`Section.needs_extra`).
Trackers name their package themselves (`MonitorConfig.require_packages`)."""


def find_missing_extras(run: LoadedRun, installed: Callable[[str], bool] | None = None) -> list[str]:
    """Returns a sentence for each key that needs a library which is not installed, with the command that installs it.

    Args:
        installed: says whether a module can be imported; default: by looking for it.
    """
    known = installed or _is_installed
    found: dict[str, None] = {}
    for prefix, section in _sections(run):
        for path, each in section.walk(prefix):
            own = [] if each.needs_extra is None else [(type(each), *each.needs_extra, _always)]
            for kind, extra, module, key_of in (*own, *_NEEDS):
                if isinstance(each, kind) and (key := key_of(each)) is not None and not known(module):
                    where = format_key_path((*path, key) if key else path)
                    found[f"{where} needs the library {module}, which is not installed: {_command(extra)}"] = None
    for prefix, stage in _stages(run):
        url = stage.buffer.url or ""
        if url.startswith("postgresql") and not known("psycopg"):
            where = format_key_path((*prefix, "buffer", "url"))
            found[f"{where} needs the library psycopg, which is not installed: {_command('postgres')}"] = None
    return list(found)


def _sections(run: LoadedRun) -> Iterator[tuple[KeyPath, Section]]:
    """Yields the sections of the whole run, and the stages; the first stage's sections are those of the run, too."""
    for key in ("model", "placement"):
        yield (key,), getattr(run.config, key)
    yield from _stages(run)


def _stages(run: LoadedRun) -> Iterator[tuple[KeyPath, Any]]:
    for index, stage in enumerate(run.stages):
        yield ("stages", index) if run.config.stages else (), stage


def _schema_key(reward: FormatReward) -> str | None:
    if reward.json_schema is not None:
        return "json_schema"
    return "schema_column" if reward.schema_column is not None else None


def _is_installed(module: str) -> bool:
    """True if the module can be imported; a folder of its name in the current folder is none."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def _command(extra: str) -> str:
    return f"pip install 'rollmill[{extra}]'"
