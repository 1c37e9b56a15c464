"""Components are found in their packages: every section names an implementation that takes it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import subprocess
import sys
from pkgutil import iter_modules
from typing import Any

import pytest

from rollmill import config as configs
from rollmill.config import (
    engines,
    environments,
    operators,
    samplers,
    task_operators,
    tools,
    trackers,
    workflows,
)
from rollmill.config.rewards import Reward
from rollmill.config.section import find_sections, module_sections, section_from_signature, section_tag
from rollmill.config.workflows import WorkflowSection
from rollmill.registry import import_object
from rollmill.rewards import build_reward_manager, builtin
from rollmill.rewards.grading import completion_from_text
from rollmill.types import Task

HOMES: dict[str, tuple[Any, type[Any]]] = {
    "rewards": (builtin, Reward),
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


@pytest.mark.parametrize("kind", [kind for kind in HOMES if kind != "rewards"])
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


SHOUTING = """\
from typing import Literal
from rollmill.config.rewards import Reward
from rollmill.rewards.base import Score

class ShoutingReward(Reward):
    name: Literal["shouting"]
    least: float = 0.0

    async def score(self, task, completion):
        share = sum(map(str.isupper, completion.text)) / len(completion.text)
        return Score(share if share >= self.least else 0.0)
"""


def test_a_file_in_the_package_is_enough(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shouting.py").write_text(SHOUTING)
    monkeypatch.setattr(builtin, "__path__", [*builtin.__path__, str(tmp_path)])
    (shouting,) = (each for each in sections("rewards") if section_tag(each) == "shouting")
    with build_reward_manager([shouting(name="shouting", least=0.5, weight=2.0)]) as manager:
        task = Task("t", "p")
        scored = [asyncio.run(manager.score(task, completion_from_text(task, text))) for text in ("YES!", "No!!")]
    assert [each.reward for each in scored] == [1.5, 0.0]


def test_reading_a_run_file_imports_no_slow_library_and_all_rewards() -> None:
    """Each module of a reward may be imported first, as in a process that gets a pickled reward: none is missing
    then."""
    program = (
        "import sys, importlib, pkgutil\n"
        "import rollmill.rewards.builtin as builtin\n"
        "names = [f'{builtin.__name__}.{each.name}' for each in pkgutil.iter_modules(builtin.__path__)]\n"
        "for name in names: importlib.import_module(name)\n"
        "slow = {'torch', 'transformers', 'sympy', 'PIL', 'asyncio', 'regex', 'openai', 'rollmill_grading'}\n"
        "early = {'rollmill.config.run', 'rollmill.config.evaluation', 'rollmill.config.domains'}\n"
        "assert not (slow | early) & set(sys.modules), (slow | early) & set(sys.modules)\n"
        "from rollmill.config.rewards import built_in_rewards\n"
        "from rollmill.config.section import section_tag\n"
        "assert [f'{builtin.__name__}.{section_tag(each)}' for each in built_in_rewards()] == sorted(names)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


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
