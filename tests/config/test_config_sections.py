"""Components are found in their packages: every section names an implementation that takes it."""

from __future__ import annotations

import ast
import inspect
from pkgutil import iter_modules
from typing import Any

import pytest

from rollmill import config as configs
from rollmill.config import (
    engines,
    environments,
    operators,
    rewards,
    samplers,
    task_operators,
    tools,
    trackers,
    workflows,
)
from rollmill.config.section import find_sections, module_sections, section_from_signature, section_tag
from rollmill.config.workflows import WorkflowSection
from rollmill.registry import import_object

HOMES: dict[str, tuple[Any, type[Any]]] = {
    "rewards": (rewards, rewards.RewardSection),
    "operators": (operators, operators.OperatorSection),
    "workflows": (workflows, workflows.WorkflowSection),
    "environments": (environments, environments.EnvironmentSection),
    "tools": (tools, tools.ToolSection),
    "task_operators": (task_operators, task_operators.TaskOperatorSection),
    "samplers": (samplers, samplers.SamplerSection),
    "engines": (engines, engines.EngineSection),
    "trackers": (trackers, trackers.TrackerSection),
}


def sections(kind: str) -> list[type[Any]]:
    home, base = HOMES[kind]
    if hasattr(home, "__path__"):
        return find_sections(home.__name__, home.__path__, base)
    return module_sections(home.__name__, base)


def test_no_package_of_sections_is_left_out() -> None:
    found = {each.name for each in iter_modules(configs.__path__) if each.ispkg}
    others = {"checks", "importing", "algorithms"}  # functions of algorithms take no section: test_algorithms_names.py
    assert found - others <= set(HOMES)


@pytest.mark.parametrize("kind", HOMES)
def test_every_implementation_exists_and_takes_its_section_first(kind: str) -> None:
    found = sections(kind)
    assert len({section_tag(each) for each in found}) == len(found) > 0
    for section in found:
        if issubclass(section, WorkflowSection) and section.single_turn:
            continue
        implementation = import_object(section.implementation)
        first = next(iter(inspect.signature(implementation).parameters.values()))
        named = str(first.annotation).rpartition(".")[2]
        assert named in [each.__name__ for each in section.__mro__] or " | " in str(first.annotation), section


def test_a_file_in_the_package_is_enough(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shouting.py").write_text(
        "from typing import Literal\n"
        "from rollmill.config.rewards.base import RewardSection\n"
        "class ShoutingReward(RewardSection):\n"
        "    implementation = 'shouting:ShoutingScorer'\n"
        "    name: Literal['shouting']\n"
        "    least: float = 0.0\n"
        "class ShoutingScorer: ...\n"
    )
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    assert "shouting" in [section_tag(each) for each in sections("rewards")]


def test_a_registered_section_is_made_without_parsing_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11's ast.parse fails now and then where other threads parse; a plugin may be imported beside them."""

    def parse(*args: Any, **kwargs: Any) -> Any:
        raise SystemError("AST constructor recursion depth mismatch")

    def mine(batch: Any, *, share: float = 0.5) -> None:
        """An operator."""

    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", parse)
        section = section_from_signature(mine, operators.OperatorSection)
    assert section.model_validate({"name": "mine", "share": 0.25}).arguments() == {"share": 0.25}
