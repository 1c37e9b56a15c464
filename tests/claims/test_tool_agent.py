"""A policy learns to call a tool: success rises, calls become more, and fewer of them are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rollmill

EXAMPLE = Path(__file__).parents[2] / "examples/tool_agent.yaml"
REWARD, CALLS = "reward/mean", "tools/calc/calls"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tool_calling_agent_of_the_example_learns(tmp_path: Path) -> None:
    rollmill.run(EXAMPLE, ["evaluation.every=1000", "stages.0.steps=300", "stages.1.steps=25"], tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    practised = [line for line in lines if REWARD in line]
    first, last = practised[1:6], practised[-6:-1]  # without steps that count the calls of an evaluation
    mean = {name: [sum(line[name] for line in part) / 5 for part in (first, last)] for name in (REWARD, CALLS)}
    assert mean[REWARD][1] > mean[REWARD][0] + 0.2
    assert mean[CALLS][1] > mean[CALLS][0] + 20  # of 128 rollouts
    before, after = [line["eval/sampled"] for line in lines if "eval/sampled" in line]
    assert after > before + 0.15


@pytest.mark.slow
def test_a_few_steps_of_the_example_call_the_tool(tmp_path: Path) -> None:
    few = ["evaluation.limit=4", "stages.0.steps=60", "stages.1.steps=2", "rollout.batch=4"]
    rollmill.run(EXAMPLE, few, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    practised = [line for line in lines if REWARD in line]
    assert len(practised) == 2
    assert all(CALLS in line for line in practised)
