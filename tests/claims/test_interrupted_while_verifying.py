"""Ctrl-C while a pipeline works on a group: the checkpoint holds that group as it was before, and nothing twice."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import outcome, tiny_run

from rollmill.launch import resume, run
from rollmill.trackers.run_views import PlainView

RL: dict[str, Any] = {"stages": None, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-3}, "evaluation": None}
OPERATOR = """
import asyncio, os, signal
from pathlib import Path
import rollmill

@rollmill.operator
class Interrupted:
    \"\"\"Changes all it sees in place, and remembers it; presses Ctrl-C once.\"\"\"
    def __init__(self, *, at: int = 0, marker: str = ""):
        self.at, self.marker, self.seen = at, Path(marker), 0
    async def __call__(self, batch):
        for each in batch.experiences:
            self.seen += 1
            each.reward += 0.01 * self.seen
            each.info["outcomes"]["times"] = each.info["outcomes"].get("times", 0) + 1
            each.action_mask[-1] = not each.action_mask[-1]
        if batch.experiences[0].group.endswith(f"-{self.at:06d}") and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)
        if self.seen % 3 == 0:
            for each in batch.experiences:
                batch.drop(each, "a third")
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]
"""
REPLAY = {"groups": 2, "order": "priority", "priority": "advantage", "max_uses": 3, "decay": 0.8}
MADE = {"name": "demonstrations", "part": "format", "threshold": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "one_step_off": {"max_staleness": 1},
    "asynchronous": {"max_staleness": 3, "taskset": {"sampler": "prioritised"}, "buffer": {"replay": REPLAY}},
    "memory": {"max_staleness": 3, "buffer": {"store": "memory", "replay": REPLAY}},
    "mix": {"max_staleness": 1, "algorithm": {"name": "mix"}, "buffer": {"replay": REPLAY}},
    "mix_memory": {"max_staleness": 1, "algorithm": {"name": "mix"}, "buffer": {"store": "memory"}},
}


def outcomes(folder: Path, variant: str, at: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a run that was interrupted at a group's turn and resumed, and of one that was not."""
    (folder / "operators.py").write_text(OPERATOR)
    marker = folder / "pressed"
    operator = {"name": "Interrupted", "at": at, "marker": str(marker), "sources": ["usual"]}  # others have no reward
    pipeline = [operator, MADE]
    changes = {"plugins": [str(folder / "operators.py")], "pipeline": pipeline, "steps": 5, "checkpoint": {"every": 2}}
    path, view = tiny_run(folder, **(RL | changes | VARIANTS[variant])), PlainView(io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        run(path, out=folder / "interrupted", view=view)
    done = len((folder / "interrupted" / "metrics.jsonl").read_text().splitlines())
    state = json.loads(sorted((folder / "interrupted/checkpoints").glob("*/state.json"))[-1].read_text())
    assert state["current"]["step"] == done
    resume(folder / "interrupted", view=view)
    run(path, out=folder / "whole", view=view)
    return outcome(folder / "interrupted"), outcome(folder / "whole")


def check(folder: Path, variant: str, at: int) -> None:
    found, expected = outcomes(folder, variant, at)
    for what in expected.keys() - {"checkpoints"}:  # the one of the interruption is kept, too
        assert found[what] == expected[what], what


@pytest.mark.slow
def test_a_group_that_was_being_verified_is_verified_again_from_the_start(tmp_path: Path) -> None:
    check(tmp_path, "one_step_off", at=9)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("variant", "at"),
    [
        (variant, at)
        if (variant, at) in {("synchronous", 2), ("asynchronous", 10), ("mix_memory", 10)}
        else pytest.param(variant, at, marks=pytest.mark.thorough)
        for variant in VARIANTS
        for at in (2, 10)
    ],
)
def test_nor_does_it_matter_in_other_modes(tmp_path: Path, variant: str, at: int) -> None:
    check(tmp_path, variant, at)
