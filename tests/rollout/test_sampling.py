"""What `rollout` says of sampling reaches the engine from a workflow, and a call may say otherwise."""

from __future__ import annotations

import io
from pathlib import Path

from support.tiny import tiny_run

import rollmill
from rollmill.launch import run
from rollmill.trackers.run_views import PlainView
from rollmill.types import StopReason

FLOW = """
import rollmill

@rollmill.workflow
async def twice(task, policy):
    first = await policy.complete(task.prompt)
    await policy.complete(task.prompt, stop=[], max_new_tokens=3)
    return float(len(first.text))
"""


def test_stop_strings_and_limits_are_those_of_the_run_file_or_of_the_call(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    rl = {"stages": None, "algorithm": {"name": "grpo"}, "evaluation": None, "rewards": None, "steps": 1}
    path = tiny_run(tmp_path, **rl, plugins=["flow.py"], workflow="twice", rollout={"stop": ["1", "2"]})
    run(path, out=tmp_path / "out", view=PlainView(io.StringIO()))
    found = rollmill.load_experiences(tmp_path / "out", 1)
    first = [each for each in found if not each.id.endswith(".1")]
    second = [each for each in found if each.id.endswith(".1")]
    assert any(each.stop_reason is StopReason.STOP for each in first)
    assert not any(character in each.response for each in first for character in "12")
    assert all(each.action_tokens <= 3 and each.stop_reason is not StopReason.STOP for each in second)
    assert any(character in each.response for each in second for character in "12")
    starts = [(one.response[:1], two.response[:1]) for one, two in zip(first, second, strict=True)]
    assert any(one != two for one, two in starts), "each call draws its own random numbers"
