"""`rollmill check` names the optional libraries that a run needs and does not find."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmill.cli import main
from rollmill.config.checks import extras
from rollmill.config.loader import load_run
from rollmill.config.section import Section

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {
    "model": {"new": {"tokenizer": {"kind": "char"}}},
    "taskset": {"path": "tasks.jsonl"},
    "rewards": [{"name": "exact"}],
}


def missing(tmp_path: Path, **changes: Any) -> list[str]:
    """What is missing where nothing optional is installed."""
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE | changes))
    run = load_run(tmp_path / "run.yaml", require_files=False)
    return extras.find_missing_extras(run, installed=lambda module: False)


@pytest.mark.parametrize(
    ("changes", "key", "extra"),
    [
        ({"taskset": {"path": "tasks.parquet"}}, "taskset.path", "data"),
        ({"taskset": {"path": "hf://me/sums"}}, "taskset.path", "data"),
        ({"taskset": {"generator": {"name": "chain_sum"}}}, "taskset.generator", "reasoning"),
        ({"model": {"path": "hf://me/tiny", "lora": {"rank": 4}}}, "model.lora", "lora"),
        (
            {"rewards": [{"name": "judge", "endpoint": "http://localhost:8000/v1", "model": "m"}]},
            "rewards.0.endpoint",
            "judge",
        ),
        ({"rewards": [{"name": "format", "json_schema": {}}]}, "rewards.0.json_schema", "schema"),
        (
            {"taskset": {"path": "tasks.jsonl", "pipeline": [{"name": "deduplicate", "by": "near"}]}},
            "taskset.pipeline.0.by",
            "dedup",
        ),
        ({"rewards": [{"name": "tool_call"}]}, "rewards.0", "schema"),
        ({"pipeline": ["near_duplicates"]}, "pipeline.0", "dedup"),
        ({"monitor": {"trackers": ["swanlab"]}}, "monitor.trackers.0", "swanlab"),
        ({"monitor": {"tensorboard": True}}, "monitor.tensorboard", "tensorboard"),
        ({"placement": {"name": "ray", "explorers": 1}}, "placement", "ray"),
        ({"buffer": {"url": "postgresql+psycopg://u@h/d"}, "max_staleness": 1}, "buffer.url", "postgres"),
    ],
)
def test_every_optional_library_is_named(changes: dict[str, Any], key: str, extra: str, tmp_path: Path) -> None:
    [found] = missing(tmp_path, **changes)
    assert found.startswith(f"{key} needs the library ")
    assert found.endswith(f"which is not installed: pip install 'rollmill[{extra}]'")


def test_a_run_of_the_core_needs_none(tmp_path: Path) -> None:
    assert missing(tmp_path) == []


def test_the_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sections = [Section]
    for each in sections:
        sections += each.__subclasses__()
    named = {each.needs_extra[0] for each in sections if each.needs_extra is not None}
    assert {"dedup", "gym", "mcp", "ray", "wandb"} <= named <= set(project["optional-dependencies"])


def test_check_refuses_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(tmp_path, rewards=[{"name": "tool_call"}])
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    assert "rewards.0 needs the library jsonschema, which is not installed" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "run.yaml"), "--no-data"]) == 0
    assert "warning: rewards.0 needs the library jsonschema" in capsys.readouterr().err
