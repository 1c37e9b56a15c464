"""Operators of users' files, from a run file to what they do."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from support.made_up import context, group, ids, rewards

import rollmill
from rollmill.cli import main
from rollmill.config import section as parts
from rollmill.config.loader import LoadedRun, load_run
from rollmill.errors import ConfigError, PipelineError
from rollmill.pipelines.pipeline import PipelineResources, build_pipeline
from rollmill.rewards import build_reward_manager

RUN = """\
model: {new: {hidden_size: 32}}
taskset: {path: tasks.jsonl}
rewards: [{name: exact}]
plugins: [mine.py]
"""
MINE = '''\
from __future__ import annotations

import asyncio
from dataclasses import dataclass

import rollmill
from rollmill.pipelines import Batch


@rollmill.operator
def no_sorry(batch: Batch, *, words: list[str] = ["sorry"]) -> None:
    """Drops completions that apologise."""
    for experience in batch.experiences:
        if any(word in experience.response for word in words):
            batch.drop(experience, "sorry")


@rollmill.operator
async def slowly(batch: Batch, *, by: float = 0.5) -> None:
    await asyncio.sleep(0)
    for experience in batch.experiences:
        experience.reward += by
        batch.change(experience, "raised")


@rollmill.operator
class FirstOnly:
    """Keeps the first completions of the run."""

    def __init__(self, *, count: int = 2) -> None:
        self.count, self.seen = count, 0

    def __call__(self, batch: Batch) -> None:
        for experience in batch.experiences:
            self.seen += 1
            if self.seen > self.count:
                batch.drop(experience, "enough")

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


@rollmill.operator
@dataclass(kw_only=True)
class Capped:
    most: float = 1.0

    async def __call__(self, batch: Batch) -> None:
        for experience in batch.experiences:
            experience.reward = min(experience.reward, self.most)
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    Path("mine.py").write_text(MINE)


def load(text: str, *overrides: str) -> LoadedRun:
    Path("run.yaml").write_text(RUN + text)
    return load_run(Path("run.yaml"), overrides, require_files=False)


def run(loaded: LoadedRun, *groups: list[Any]) -> list[Any]:
    made = build_pipeline(loaded.stages[0].pipeline, PipelineResources(build_reward_manager, 0))
    return [each for members in groups for each in asyncio.run(made.process(members, context()))]


def test_functions_coroutines_and_classes_are_operators() -> None:
    loaded = load(
        "pipeline:\n  - no_sorry\n  - {name: slowly, by: 0.25}\n  - {name: FirstOnly, count: 3}\n  - Capped\n"
    )
    texts = ["so sorry", "it is 12", "it is 13"]
    found = run(loaded, group([1.0, 0.0, 1.0], text=texts), group([0.0, 0.5], name="g1"))
    assert ids(found) == ["g0/1", "g0/2", "g1/0"]
    assert rewards(found) == [0.25, 1.0, 0.25]
    Path("again.yaml").write_text(loaded.to_yaml())
    again = load_run(Path("again.yaml"), require_files=False)
    assert again.stages[0].pipeline[2].model_dump() == {"name": "FirstOnly", "sources": None, "count": 3}


def test_what_a_class_remembers_is_in_the_pipeline_s_state() -> None:
    loaded = load("pipeline: [{name: FirstOnly, count: 3}, {name: FirstOnly, count: 9}]\n")
    made = build_pipeline(loaded.stages[0].pipeline, PipelineResources(build_reward_manager, 0))
    asyncio.run(made.process(group([1.0, 1.0]), context()))
    assert made.state_dict() == {"FirstOnly": {"seen": 2}, "FirstOnly-2": {"seen": 2}}
    other = build_pipeline(loaded.stages[0].pipeline, PipelineResources(build_reward_manager, 0))
    other.load_state_dict(made.state_dict())
    assert ids(asyncio.run(other.process(group([1.0, 1.0], name="g1"), context()))) == ["g1/0"]


def test_options_are_set_from_the_command_line() -> None:
    loaded = load(
        "pipeline: [{name: FirstOnly}, {name: reward_filter, at_least: 0}]\n",
        "pipeline.0.count=1",
        "pipeline.1.at_least=0.5",
    )
    assert [each.model_dump(exclude={"part", "at_most", "sources"}) for each in loaded.stages[0].pipeline] == [
        {"name": "FirstOnly", "count": 1},
        {"name": "reward_filter", "at_least": 0.5},
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{name: FirstOnly, cuont: 1}", "run.yaml:5: pipeline.0.cuont: unknown key; did you mean `count`?"),
        (
            "{name: FirstOnly, seed: 1}",
            "run.yaml:5: pipeline.0.seed: unknown key; valid here: `name`, `sources` and `count`",
        ),
        ("{name: FirstOnly, count: many}", "run.yaml:5: pipeline.0.count: expected a whole number, found `many`"),
        ("{name: FirstOnyl}", "run.yaml:5: pipeline.0.name: `FirstOnyl` is not known; did you mean `FirstOnly`?"),
        (
            "{name: reward_fliter}",
            "run.yaml:5: pipeline.0.name: `reward_fliter` is not known; did you mean `reward_filter`?",
        ),
        ("no_sory", "run.yaml:5: pipeline.0.name: `no_sory` is not known; did you mean `no_sorry`?"),
    ],
)
def test_mistakes_in_the_run_file(entry: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(RUN + f"pipeline: [{entry}]\n")
    assert main(["check", "run.yaml", "--no-data"]) == 2
    assert message in capsys.readouterr().err


WRONG = {
    "no type": ("def mine(batch, *, limit=3): ...", "mine: the option `limit` needs a type and a default"),
    "no default": (
        "class Mine:\n    def __init__(self, *, limit: int): ...\n    def __call__(self, batch): ...",
        "Mine: the option `limit` needs a type and a default",
    ),
    "a default of another type": (
        "def mine(batch, *, limit: int = 'x'): ...",
        "mine: the default of the option `limit` is wrong",
    ),
    "a name that is taken": ("def mine(batch, *, name: str = 'x'): ...", "mine: an option cannot be called `name`"),
    "a name of the section": (
        "def mine(batch, *, arguments: int = 1): ...",
        "mine: an option cannot be called `arguments`",
    ),
    "no batch": ("def mine(): ...", "mine: an operator takes one batch, as in def NAME(batch); found ()"),
    "two arguments": ("def mine(batch, limit): ...", "mine: an operator takes one batch"),
    "a positional option": (
        "class Mine:\n    def __init__(self, limit: int = 1): ...\n    def __call__(self, batch): ...",
        "Mine: options of an operator stand behind `*` in __init__",
    ),
    "not callable": (
        "class Mine:\n    def apply(self, batch): ...",
        "Mine: an operator needs a method __call__(self, batch)",
    ),
    "__call__ without a batch": ("class Mine:\n    def __call__(self): ...", "Mine: __call__ takes one batch"),
    "an unknown type": (
        "def mine(batch, *, limit: Decimal = 1): ...",
        "mine: a type is not known: name 'Decimal' is not defined",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_mistakes_in_the_decorated_code_name_file_and_line(case: str) -> None:
    code, message = WRONG[case]
    Path("mine.py").write_text(f"from __future__ import annotations\nimport rollmill\n\n@rollmill.operator\n{code}\n")
    with pytest.raises(ConfigError) as caught:
        load("pipeline: []\n")
    place, _, text = str(caught.value).partition(": ")
    assert text.startswith(message)
    assert place in (f"{Path.cwd()}/mine.py:4", f"{Path.cwd()}/mine.py:5")


def test_what_an_operator_raises_names_its_file_and_line() -> None:
    Path("mine.py").write_text(
        "import rollmill\n\n@rollmill.operator\nasync def mine(batch):\n    batch.experiences[5]\n"
    )
    loaded = load("pipeline: [mine]\n")
    with pytest.raises(PipelineError, match=r"operator `mine` failed .*IndexError.*mine\.py:5\)"):
        run(loaded, group([1.0]))


def test_the_decorator_gives_back_what_it_decorates() -> None:
    def plain_one(batch: Any) -> None: ...

    assert rollmill.operator(plain_one) is plain_one
