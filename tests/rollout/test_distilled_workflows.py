"""On-policy distillation from a teacher: rollouts of workflows, of one turn or several, without rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_run
from transformers import AutoModelForCausalLM

import rollmill
from rollmill.models.from_scratch import save_policy
from rollmill.models.load import read_tokenizer
from rollmill.types import Experience

ROOT = Path(__file__).parents[2]
NO_REWARDS: dict[str, Any] = {"rewards": None, "evaluation": None, "stages": None}
TWO_TURNS = """
import rollmill

@rollmill.workflow
async def two_turns(task, policy):
    first = await policy.complete(task.prompt, max_new_tokens=6)
    await policy.complete([*first.token_ids, *policy.encode("0")], max_new_tokens=6)
"""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that has learned a little of how dialogues with a tool go."""
    folder = tmp_path_factory.mktemp("teacher")
    tasks = {
        "function": f"{ROOT}/examples/tool_agent.py:demonstrations",
        "options": {"size": 200, "calls": 1, "digits": None},
    }
    model = {"new": {"context": 128, "tokenizer": {"kind": "bpe", "vocab_size": 320}}}
    sft = {"algorithm": {"name": "sft", "batch": 8}, "steps": 40, "trainer": {"lr": 1e-2}}
    path = tiny_run(folder, **NO_REWARDS, **sft, taskset=tasks, model=model, rollout=None)
    rollmill.run(path, [], folder / "run")
    return folder / "run/checkpoints/step-000040"


def distilled(folder: Path, teacher: Path, workflow: str, **changes: Any) -> tuple[list[Any], list[float]]:
    """Experiences of the last step, and the loss of every step, of a student of the same shape."""
    tasks = {"function": f"{ROOT}/examples/tool_agent.py:questions", "options": {"size": 50, "digits": None}}
    path = tiny_run(
        folder,
        **NO_REWARDS,
        **changes,
        taskset=tasks,
        steps=3,
        model={"path": str(teacher), "new": None},
        trainer={"lr": 1e-3},
        rollout={"max_new_tokens": 24, "temperature": 1.0},
        algorithm={"name": "distill", "teacher": str(teacher)},
    )
    rollmill.run(path, [f"workflow={workflow}"], folder / "run")
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return rollmill.load_experiences(folder / "run", 3), [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_turns_with_tools_are_distilled_without_rewards(tmp_path: Path, teacher: Path) -> None:
    options = {"tools": [{"name": "calculator", "called": "calc"}]}
    found, losses = distilled(tmp_path, teacher, "{name: tools, describe: false, turns: 3}", **options)
    assert any(len(one.turns) > 2 for one in found)
    assert all(one.reward is None for one in found)
    assert losses[0] == pytest.approx(0, abs=1e-5)  # the student is the teacher


@pytest.mark.slow
@pytest.mark.parametrize(
    "workflow", [pytest.param("single_turn", marks=[pytest.mark.slow, pytest.mark.thorough]), "two_turns"]
)
def test_a_student_comes_closer_to_its_teacher(tmp_path: Path, teacher: Path, workflow: str) -> None:
    (tmp_path / "flow.py").write_text(TWO_TURNS)
    text = {"function": "rollmill.quickstart.addition:rows", "options": {"size": 50, "digits": 2}}
    other = _other(teacher, tmp_path / "other")
    path = tiny_run(
        tmp_path,
        **NO_REWARDS,
        plugins=["flow.py"],
        taskset=text,
        steps=20,
        model={"path": str(teacher), "new": None},
        trainer={"lr": 1e-3},
        rollout={"batch": 8, "group_size": 4, "max_new_tokens": 12},
        algorithm={"name": "distill", "teacher": str(other)},
    )
    rollmill.run(path, [f"workflow={workflow}"], tmp_path / "run")
    found = rollmill.load_experiences(tmp_path / "run", 1)
    before, after = (_divergence(each, other, found) for each in (teacher, tmp_path / "run/checkpoints/step-000020"))
    assert before > 0.1
    assert after < 0.75 * before
    [*_, one] = rollmill.load_experiences(tmp_path / "run", 20)
    assert len(one.turns) == (2 if workflow == "single_turn" else 4)


def _divergence(student: Path, teacher: Path, batch: list[Experience]) -> float:
    """KL(student || teacher) of whole distributions, mean over the action tokens of a batch that both are given."""
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (student, teacher)]
    total, tokens = 0.0, 0
    for one in batch:
        at = torch.tensor(one.action_mask.nonzero()[0]) - 1
        with torch.no_grad():
            ids = torch.tensor(one.token_ids)[None].long()
            own, other = (model(input_ids=ids).logits[0, at].log_softmax(-1) for model in models)
        total += float((own.exp() * (own - other)).sum())
        tokens += len(at)
    return total / tokens


def _other(teacher: Path, folder: Path) -> Path:
    """The same architecture and vocabulary with other weights: the teacher is to be reached."""
    folder.mkdir()
    model = AutoModelForCausalLM.from_pretrained(teacher)
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    save_policy(model, read_tokenizer(teacher, {}), folder)
    return folder
