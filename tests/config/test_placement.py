"""The section `placement`: explorers that differ, what each kind may say, and what its engine cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rollmill.cli import main
from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.placement import ExplorerSpec, RayPlacement
from rollmill.errors import ConfigError
from rollmill.remote.ray_scaling import explorer_needs

GOOD = """\
model: {new: {hidden_size: 32}}
taskset: {path: tasks.jsonl}
"""
REWARDS = "rewards: [{name: math}]\n"
RAY = "placement: {name: ray, explorers: %s}\n"
MIXED = GOOD + REWARDS + RAY % "[{engine: vllm}, {count: 2, threads: 2}]"
SFT = GOOD + "algorithm: {name: sft}\n"
ALL = "[{engine: vllm}, {engine: native}]"
NEITHER = "expected a whole number of at least 1, or a list of kinds, found"

CASES = {
    "none": (GOOD + REWARDS + RAY % "0", f"run.yaml:4: placement.explorers: {NEITHER} `0`"),
    "no kinds": (GOOD + REWARDS + RAY % "[]", f"placement.explorers: {NEITHER} an empty list"),
    "a word": (GOOD + REWARDS + RAY % "some", f"placement.explorers: {NEITHER} `some`"),
    "a kind alone": (GOOD + REWARDS + RAY % "{count: 2}", f"placement.explorers: {NEITHER} a section"),
    "none of a kind": (
        GOOD + REWARDS + RAY % "[{}, {count: 0}]",
        "run.yaml:4: placement.explorers.1.count: expected at least 1, found `0`",
    ),
    "an unknown key of a kind": (
        GOOD + REWARDS + RAY % "[{thread: 2}]",
        "placement.explorers.0.thread: unknown key; did you mean `threads`?",
    ),
    "an engine that there is not": (GOOD + REWARDS + RAY % "[{engine: sglang}]", "placement.explorers.0.engine"),
    "a server without tokens": (
        GOOD + REWARDS + RAY % "[{}, {engine: openai}]",
        "placement.explorers.1.engine: a server with OpenAI's API gives neither tokens nor their log-probs",
    ),
    "a key of `placement` in the wrong place": (
        GOOD + REWARDS + "explorers: 2",
        "run.yaml:4: explorers: unknown key; it is honoured as `placement.explorers (placement ray)`",
    ),
    "a key of another placement": (
        GOOD + REWARDS + "placement: {name: inline, explorers: 2}",
        "placement.explorers: `explorers` is honoured by placement `ray`, not by `inline`",
    ),
    "what the engine of a kind does not offer": (
        MIXED + "rollout: {reuse: {}}",
        "run.yaml:4: placement.explorers.0.engine: rollout.reuse of stage train: engine `vllm` takes no drafts",
    ),
    "what the engine of a kind does not offer to an evaluation": (
        MIXED + "evaluation: {taskset: {path: tasks.jsonl}, sampling: {temperature: 0.001}}",
        "placement.explorers.0.engine: evaluation.sampling.temperature of stage train: engine `vllm` raises",
    ),
    "what the engine of a kind does not offer to one of the stages": (
        MIXED + "stages: [{name: a}, {name: b, rollout: {ngram_draft: {}}}]",
        "placement.explorers.0.engine: rollout.ngram_draft of stage b: engine `vllm` has speculative decoding of its",
    ),
    "weights that are not published": (
        GOOD + REWARDS + "max_staleness: 3\nsync_interval: 2",
        "run.yaml:5: sync_interval: the native engine in the trainer's process decodes with the trainer's own, newest",
    ),
    "weights that get too old": (
        GOOD + REWARDS + RAY % "2" + "max_staleness: 1\nstages: [{name: a}, {name: b, sync_interval: 3}]",
        "run.yaml:6: stages.1.sync_interval: rollouts use weights that are up to 2 steps old, and max_staleness is 1;",
    ),
    "an engine that no explorer has": (
        GOOD + REWARDS + RAY % ALL + "engine: vllm",
        "run.yaml:5: engine: not honoured: every kind of placement.explorers has its own; remove it",
    ),
    "an engine of a stage that no explorer has": (
        GOOD + REWARDS + RAY % ALL + "stages: [{name: a}, {name: b, engine: vllm}]",
        "run.yaml:5: stages.1.engine: not honoured: every kind",
    ),
    "cores that no explorer takes": (
        GOOD + REWARDS + "placement: {name: ray, cpus: 2, explorers: [{cpus: 1}, {cpus: 0}]}",
        "run.yaml:4: placement.cpus: not honoured: every kind of placement.explorers has its own; remove it",
    ),
    "nothing to generate": (
        SFT + RAY % "[{engine: vllm}]",
        "placement.explorers.0.engine: not honoured: no stage rolls out or is evaluated; remove it",
    ),
    "nothing to compute": (SFT + RAY % "[{}, {threads: 2}]", "placement.explorers.1.threads: not honoured: no stage"),
}


@pytest.fixture(autouse=True)
def _tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "response": "2"}\n')


def loaded(text: str) -> LoadedRun:
    Path("run.yaml").write_text(text)
    return load_run(Path("run.yaml"))


def placed(text: str) -> RayPlacement:
    placement = loaded(text).config.placement
    assert isinstance(placement, RayPlacement)
    return placement


@pytest.mark.parametrize("name", CASES)
def test_errors(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = CASES[name]
    Path("run.yaml").write_text(text)
    assert main(["check", "run.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_a_number_is_one_kind() -> None:
    for explorers in ("3", "[{count: 3}]"):
        assert placed(GOOD + REWARDS + RAY % explorers).explorers == [ExplorerSpec(count=3)]
    assert placed(GOOD + REWARDS + "placement: ray").explorers == [ExplorerSpec(count=1)]


def test_every_explorer_has_a_kind_and_reserves_what_it_says_or_all_do() -> None:
    kinds = "[{gpus: 1, engine: vllm}, {count: 2, cpus: 2, threads: 2}, {cpus: 0}]"
    found = placed(GOOD + REWARDS + f"placement: {{name: ray, cpus: 0.5, explorers: {kinds}}}")
    assert [kind.threads for kind in found.every_explorer] == [None, 2, 2, None]
    needs = [(0.5, 1), (2, 0), (2, 0), (0, 0), (0, 0), (0, 0)]  # those of `rollmill scale` are of the last kind
    for count in (1, 4, 6):
        assert [(need.cpus, need.gpus) for need in explorer_needs(found, count)] == needs[:count]


def test_a_kind_s_engine_replaces_the_stage_s() -> None:
    run = loaded(MIXED)
    assert isinstance(run.config.placement, RayPlacement)
    names = [run.stages[0].with_engine(kind.engine).engine.name for kind in run.config.placement.explorers]
    assert names == ["vllm", "native"]
    assert run.stages[0].engine.name == "native"


def test_a_stage_s_drafts_are_right_where_no_kind_has_the_stage_s_engine() -> None:
    loaded(GOOD + REWARDS + RAY % "[{engine: native}]" + "rollout: {ngram_draft: {}}\n")
    with pytest.raises(ConfigError, match=r"run.yaml:5: rollout\.ngram_draft: engine `vllm`"):
        loaded(GOOD + REWARDS + RAY % "[{engine: native}, {}]" + "rollout: {ngram_draft: {}}\nengine: vllm\n")


def test_the_python_of_a_kind_is_looked_up(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    kinds = placed(GOOD + REWARDS + RAY % "[{engine: {name: vllm, python: python}}]").explorers
    assert getattr(kinds[0].engine, "python", None) == tmp_path / "python"


@pytest.mark.parametrize("more", ["", "stages: [{name: a}, {name: b}]\n"])
def test_a_resolved_run_loads_to_the_same_run(more: str) -> None:
    explorers = "[{cpus: 1, gpus: 0, engine: vllm}, {cpus: 2, gpus: 0, engine: native, threads: 2}]"
    first = loaded(GOOD + REWARDS + RAY % explorers + more)
    again = loaded(first.to_yaml())
    assert again.config.placement == first.config.placement
    assert again.stages == first.stages
    assert not {"cpus", "gpus"} & yaml.safe_load(first.to_yaml())["placement"].keys()


def test_check_shows_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(MIXED)
    assert main(["check", "run.yaml"]) == 0
    assert "placement   ray: 1 x explorer (engine vllm), 2 x explorer (threads 2)\n" in capsys.readouterr().out


def test_plan_refuses_a_kind_that_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(MIXED)
    assert main(["plan", "run.yaml"]) == 2
    assert "placement.explorers.0.engine: `plan` measures the native engine" in capsys.readouterr().err
