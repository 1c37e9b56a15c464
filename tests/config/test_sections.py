"""Components are found in their packages: each is a section that does the work, or names what takes it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import pickle
import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from rollmill import config as configs
from rollmill.config import (
    engines,
)
from rollmill.config.environments import EnvironmentSection
from rollmill.config.operators import OperatorSection
from rollmill.config.rewards import Reward
from rollmill.config.run import StageConfig
from rollmill.config.samplers import SamplerSection
from rollmill.config.section import find_sections, module_sections, section_from_signature, section_tag
from rollmill.config.task_operators import TaskOperatorSection
from rollmill.config.tools import ToolSection
from rollmill.config.trackers import TrackerSection
from rollmill.config.workflows import WorkflowSection
from rollmill.registry import build_component, import_object
from rollmill.rewards import build_reward_manager, builtin
from rollmill.rewards.grading import completion_from_text
from rollmill.types import Task

HOMES: dict[str, tuple[Any, type[Any]]] = {
    "rewards": (builtin, Reward),
    "engines": (engines, engines.EngineSection),
}

COMPONENTS: dict[str, tuple[type[Any], str]] = {
    "rollmill.pipelines.builtin": (OperatorSection, "__call__"),
    "rollmill.data.operators.builtin": (TaskOperatorSection, "__call__"),
    "rollmill.data.samplers.builtin": (SamplerSection, "next"),
    "rollmill.rollout.tools.builtin": (ToolSection, "open"),
    "rollmill.trackers.builtin": (TrackerSection, "write"),
    "rollmill.rollout.environments.builtin": (EnvironmentSection, "step"),
    "rollmill.rollout.workflows": (WorkflowSection, "solve"),
}
"""Package -> base of its components, and the method that does their work."""


def components(package: str) -> list[type[Any]]:
    return find_sections(package, import_module(package).__path__, COMPONENTS[package][0])


def sections(kind: str) -> list[type[Any]]:
    home, base = HOMES[kind]
    if hasattr(home, "__path__"):
        return find_sections(home.__name__, home.__path__, base)
    return module_sections(home.__name__, base)


def test_no_package_of_sections_is_left_out() -> None:
    found = {each.name for each in iter_modules(configs.__path__) if each.ispkg}
    others = {"checks", "importing", "algorithms"}  # functions of algorithms take no section: test_names.py
    assert found - others <= set(HOMES)


@pytest.mark.parametrize("kind", [kind for kind in HOMES if kind != "rewards"])
def test_every_implementation_exists_and_takes_its_section_first(kind: str) -> None:
    found = sections(kind)
    assert len({section_tag(each) for each in found}) == len(found) > 0
    for section in found:
        implementation = import_object(section.implementation)
        first = next(iter(inspect.signature(implementation).parameters.values()))
        named = str(first.annotation).rpartition(".")[2]
        assert named in [each.__name__ for each in section.__mro__] or " | " in str(first.annotation), section


@pytest.mark.parametrize("package", COMPONENTS)
def test_every_component_does_its_work_itself(package: str) -> None:
    base, method = COMPONENTS[package]
    found = components(package)
    assert len({section_tag(each) for each in found}) == len(found) > 0
    for section in found:
        # one with containers has no episodes: it says what container a task gets
        own = "of_task" if getattr(section, "containers", False) else method
        assert getattr(section, own, None) is not getattr(base, own, None), section
        assert not section.implementation


@pytest.mark.parametrize("package", COMPONENTS)
def test_a_section_of_a_run_file_has_no_state(package: str) -> None:
    """A run works with a copy; sections are sent to other processes and compared."""
    for section in components(package):
        made = section.model_construct(name=section_tag(section))
        assert not made.__pydantic_private__
        assert pickle.loads(pickle.dumps(made)) == made


def test_a_stage_works_with_a_copy_of_the_section() -> None:
    section = StageConfig.model_validate({"pipeline": [{"name": "duplicates", "within": "run"}]}).pipeline[0]
    as_read, built = pickle.dumps(section), build_component(section, None)
    built.load_state_dict({"seen": ["a"]})
    assert built.state_dict() == {"seen": ["a"]}
    assert pickle.dumps(section) == as_read
    assert section != built
    assert section == type(section).model_validate(built.model_dump())


def test_components_can_be_imported_before_the_run_file() -> None:
    """The search would miss those of a module that is half imported."""
    lines = ["import sys, importlib, pkgutil"]
    for package in COMPONENTS:
        lines += [
            f"for each in pkgutil.iter_modules(importlib.import_module('{package}').__path__):",
            f"    importlib.import_module(f'{package}.{{each.name}}')",
        ]
    lines += ["print(sorted(sys.modules.keys() & {'rollmill.config.components', 'torch', 'transformers'}))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
        section = section_from_signature(mine, OperatorSection)
    assert section.model_validate({"name": "mine", "share": 0.25}).arguments() == {"share": 0.25}
