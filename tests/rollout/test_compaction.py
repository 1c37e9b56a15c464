"""Context compaction: a long conversation is summarised, and each segment is learned from with the prompt it had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import GRPO, SFT, tiny_run

import rollmill
from rollmill.errors import ConfigError
from rollmill.types import Experience

CLIMB = """
import rollmill
from rollmill.rollout.environments import StepResult

@rollmill.environment
class Climb:
    def reset(self, task, seed):
        self.at = 0
        return "=10"

    def step(self, action):
        self.at += 1
        return StepResult(f"={self.at + 1}0", 0.1 * len(set(action)), self.at == 6)
"""
SHORT = {"instruction": "+++", "opening": "++{summary}++", "max_new_tokens": 5}


def climbed(folder: Path, **workflow: Any) -> Path:
    """The directory of a tiny run whose second stage climbs six steps, for one training step."""
    (folder / "climb.py").write_text(CLIMB)
    acting = {"environment": {"name": "Climb"}, "workflow": {"name": "environment", **workflow}}
    stages = [SFT | {"steps": 1}, GRPO | {"steps": 1} | acting]
    model = {"new": {"context": 128}}
    sizes = {"max_new_tokens": 4}
    path = tiny_run(
        folder, plugins=["climb.py"], rollout=sizes, model=model, rewards=None, evaluation=None, stages=stages
    )
    rollmill.run(path, out=folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return climbed(tmp_path_factory.mktemp("climb"), compaction={"at_tokens": 40, **SHORT})


def episodes(found: list[Experience]) -> Iterator[list[Experience]]:
    for name in dict.fromkeys(one.episode or one.id for one in found):
        yield [one for one in found if name in (one.episode, one.id)]


def test_every_segment_has_its_own_prompt_and_each_completion_counts_once(run: Path) -> None:
    found = rollmill.load_experiences(run, 2)
    numbers = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    segments = list(episodes(found))
    assert len(segments) == 16
    assert numbers["episode/compactions"] == pytest.approx(len(found) / 16 - 1)
    assert len(found) > 16
    assert numbers["episode/turns"] == 6
    assert numbers["logprob_gap/max"] < 1e-4
    for each in segments:
        start = each[0].prompt.removesuffix("=10")
        assert len({one.reward for one in each}) == 1
        for before, after in pairwise(each):
            assert before.turns[-2].text.endswith("\n\n+++\n")
            assert after.prompt.startswith(f"{start}\n\n++{before.response.strip()}++\n\n=")
        said = [turn.text for one in each for turn in one.turns if turn.role == "assistant"]
        assert len(said) == 6 + len(each) - 1
        for one in each:
            own = np.zeros(len(one.token_ids), bool)
            for turn in one.turns:
                own[turn.start : turn.end] = turn.role == "assistant"
            assert (one.action_mask == own).all()
            assert len(one.token_ids) < 40 + 4 + len("=10") + 10 + 5


def test_gradients_are_those_of_the_segments(run: Path) -> None:
    """A rollout counts once in its group, and each token once in the mean, after the prompt of its own segment."""
    found = rollmill.load_experiences(run, 2)
    with rollmill.TrainablePolicy(
        run / "checkpoints/step-000001", trainer={"precision": "fp32"}, device="cpu"
    ) as policy:
        policy.forward_backward(found, loss={"name": "grpo", "aggregation": "token-mean"})
        ours = {
            name: weight.grad.clone() for name, weight in policy.model.named_parameters() if weight.grad is not None
        }
        policy.model.zero_grad()
        groups: dict[str, dict[str, float]] = {}
        for one in found:
            groups.setdefault(one.group, {})[one.episode or one.id] = float(one.reward or 0)
        total = 0.0
        for one in found:
            rewards = np.array(list(groups[one.group].values()))
            advantage = (float(one.reward or 0) - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            ids = torch.tensor(one.token_ids, dtype=torch.long)[None]
            logprobs = torch.log_softmax(policy.model(ids).logits[0, :-1].float(), -1)
            picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            total = total - (picked * torch.tensor(one.action_mask[1:]) * advantage).sum()
        (total / sum(int(one.action_mask.sum()) for one in found)).backward()  # type: ignore[union-attr]
        theirs = {name: weight.grad for name, weight in policy.model.named_parameters() if weight.grad is not None}
    assert ours.keys() == theirs.keys()
    assert max(float(each.abs().max()) for each in ours.values()) > 1e-4
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-6, msg=name)


def test_a_short_conversation_stays_whole(tmp_path: Path) -> None:
    found = rollmill.load_experiences(climbed(tmp_path, compaction={"at_tokens": 120, **SHORT}), 2)
    assert len(found) == 16


def test_without_compaction_the_episode_is_one_experience(tmp_path: Path) -> None:
    assert len(rollmill.load_experiences(climbed(tmp_path), 2)) == 16


def test_with_a_number_of_observations_there_is_nothing_to_compact(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workflow\.compaction: not honoured with history as a number"):
        climbed(tmp_path, history=2, compaction={"at_tokens": 40})


def test_the_place_of_the_summary_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the place \{summary\} is missing"):
        climbed(tmp_path, compaction={"at_tokens": 40, "opening": "Notes"})
