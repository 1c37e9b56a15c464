"""Opponents that are past copies of the policy: which one a rollout draws, when copies are taken, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from support.tiny import GRPO, HELD_OUT, SFT, tiny_run

import rollmill
from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.config.model import AuxiliaryModelConfig, ModelConfig
from rollmill.config.rollout import SamplingConfig
from rollmill.engines.native import NativeEngine
from rollmill.errors import ConfigError
from rollmill.models.load import PolicyModel, load_policy
from rollmill.rollout.past_policies import PastPolicies
from rollmill.types import Experience

GAME = """
from zlib import crc32

import rollmill

@rollmill.workflow
async def game(task, policy, opponent):
    mine = await policy.complete(task.prompt, max_new_tokens=5)
    theirs = await opponent.complete(task.prompt, max_new_tokens=5)
    at = -1 if opponent.copied_at is None else opponent.copied_at
    hashed = crc32(theirs.text.encode()) % 9973
    return {"longer": float(len(mine.text) > len(theirs.text)), "theirs": 1e-6 * hashed, "at": 1e-6 * at}
"""
PAST = {"policy": "past", "every": 2, "keep": 2, "latest": 0.25}
WARM, STEPS = 1, 7  # training steps of the first stage, and of the second, which has opponents


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run against greedy opponents, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("past")
    (folder / "flow.py").write_text(GAME)
    stages = [SFT | {"steps": WARM}, GRPO | {"steps": STEPS, "workflow": "game", "trainer": {"lr": 0.03}}]
    shared: dict[str, Any] = {"plugins": ["flow.py"], "rewards": None, "evaluation": None, "stages": stages}
    checkpoint = {"every": 1, "keep_last": 99}
    rollout = {"batch": 2, "group_size": 4, "max_new_tokens": 5}
    path = tiny_run(
        folder, **shared, checkpoint=checkpoint, rollout=rollout, models={"opponent": PAST | {"temperature": 0}}
    )
    rollmill.run(path, out=folder / "run")
    return folder / "run"


def weights(run: Path, step: int) -> PolicyModel:
    """The policy after a step of the second stage."""
    folder = run / f"checkpoints/step-{WARM + step:06d}"
    return load_policy(ModelConfig(path=folder), texts=[], seed=0, device=torch.device("cpu"))


def part(one: Experience, name: str) -> int:
    return round(1e6 * (one.reward_parts[name] or 0.0))


@torch.no_grad()
def greedy_reply(policy: PolicyModel, ids: list[int]) -> str:
    """The first five tokens of the network's own choice, computed anew for each."""
    prompt = len(ids)
    while len(ids) < prompt + 5:
        ids = [*ids, int(policy.model(torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] in policy.eos_ids:
            ids.pop()
            break
    return str(policy.tokenizer.decode(ids[prompt:], skip_special_tokens=True))


def test_a_rollout_meets_the_newest_copies_or_the_current_policy(run: Path) -> None:
    drawn: dict[int, set[int]] = {}
    known = {step: weights(run, step) for step in range(STEPS)}
    unlike_current = 0
    for step in range(STEPS):  # finished steps of the stage when these rollouts were made
        for one in rollmill.load_experiences(run, WARM + step + 1):
            at = part(one, "at")
            drawn.setdefault(step, set()).add(at)
            prompt = one.token_ids[: one.turns[0].end].tolist()
            reply = greedy_reply(known[step if at < 0 else at], prompt)
            assert part(one, "theirs") == crc32(reply.encode()) % 9973, (step, at, reply)
            unlike_current += at >= 0 and greedy_reply(known[step], prompt) != reply
    newest = [{0}, {0}, {0, 2}, {0, 2}, {2, 4}, {2, 4}, {4, 6}]
    assert all(drawn[step] - {-1} <= newest[step] for step in range(STEPS)), drawn
    assert set().union(*drawn.values()) >= {-1, 0, 2, 4}
    assert unlike_current > 5  # so these replies tell a copy from the current policy


def past_policies(policy: PolicyModel, **section: Any) -> PastPolicies:
    def build(model: torch.nn.Module) -> NativeEngine:
        return NativeEngine(model, policy.tokenizer, eos_ids=policy.eos_ids, context=policy.context)

    config = AuxiliaryModelConfig.model_validate(PAST | section)
    return PastPolicies("opponent", 0, config, policy, build(policy.model), build, SamplingConfig())


@pytest.mark.slow
def test_proportions_and_schedule(run: Path) -> None:
    past = past_policies(weights(run, 0), every=3, keep=3)
    kept = [past.steps]
    for step in range(1, 14):
        past.finish_step(step)
        kept.append(past.steps)
    assert kept[2:4] == [[0], [0, 3]]
    assert kept[8:10] == [[0, 3, 6], [3, 6, 9]]
    assert kept[13] == [6, 9, 12]
    counts = Counter(past.choose(seed) for seed in range(600))
    assert set(counts) == {None, 6, 9, 12}
    assert all(abs(count / 600 - 0.25) < 0.05 for count in counts.values()), counts  # a fixed set of seeds
    skewed = past_policies(weights(run, 0), latest=0.7)
    assert abs(sum(skewed.choose(seed) is None for seed in range(600)) / 600 - 0.7) < 0.05
    assert None not in {past_policies(weights(run, 0), latest=0).choose(seed) for seed in range(200)}


def test_a_state_brings_the_same_copies_back(run: Path) -> None:
    policy = weights(run, 0)
    past = past_policies(policy)
    for step in range(1, 5):
        policy.model.load_state_dict(weights(run, step).model.state_dict())
        past.finish_step(step)
    other = past_policies(weights(run, 6))
    other.load_state_dict(past.state_dict())
    assert other.steps == past.steps == [2, 4]
    for step, copy in other.state_dict().items():
        expected = weights(run, step).model.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in copy.items())
    assert [other.choose(seed) for seed in range(50)] == [past.choose(seed) for seed in range(50)]
    for each in (past, other):
        each.finish_step(6)
        assert each.steps == [4, 6]


def test_checkpoints_hold_the_copies_that_are_kept(run: Path) -> None:
    state = torch.load(run / f"checkpoints/step-{WARM + 5:06d}/trainer.pt", weights_only=True)["frozen"]
    assert state["initial"] is None
    assert list(state["past"]["opponent"]) == [2, 4]


def test_a_checkpoint_alone_has_no_past(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = f"stages.1.evaluation={json.dumps({'taskset': HELD_OUT})}"
    assert main(["bench", str(run), "--set", held_out, "--out", str(tmp_path / "out")]) == 2
    assert (
        "models.opponent: earlier weights of the policy are known only while the run trains" in capsys.readouterr().err
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vllm": ({"engine": "vllm"}, "`past` is not supported with engine `vllm`"),
    "ahead": ({"max_staleness": 1}, "`past` is not supported in stages that roll out ahead"),
    "ranks": ({"trainer": {"ranks": 2}}, r"`past` is not supported with trainer\.ranks 2"),
    "offload": ({"offload": "auto", "trainer": {"precision": "bf16"}}, "`past` is not supported with `offload`"),
    "lora": (
        {"model": {"path": "folder", "new": None, "lora": {"rank": 2}}},
        r"model\.lora: models\.opponent is a mix",
    ),
    "mode train": ({"mode": "train"}, r"models\.opponent\.policy: .*not kept for explorers"),
    "ray": (
        {"placement": {"name": "ray", "explorers": 1}},
        r"models\.opponent\.policy, which needs .*not kept for explorers",
    ),
    "every": (
        {"models": {"opponent": {"policy": "initial", "every": 3}}},
        "every is honoured with policy: past, not with",
    ),
    "keep": (
        {"models": {"opponent": {"path": "folder", "keep": 2}}},
        "keep is honoured with policy: past, not with path",
    ),
    "latest": ({"models": {"opponent": PAST | {"latest": 1}}}, r"models\.opponent\.latest"),
    "two sources": (
        {"models": {"opponent": PAST | {"path": "folder"}}},
        "give exactly one of path, policy and endpoint",
    ),
    "endpoint's": ({"models": {"opponent": PAST | {"tries": 3}}}, "tries is honoured with endpoint, not with policy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_an_error_of_the_run_file(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    (tmp_path / "flow.py").write_text(GAME)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text(json.dumps({}))
    base: dict[str, Any] = {"plugins": ["flow.py"], "rewards": None, "evaluation": None, "stages": None}
    base |= {"workflow": "game", "models": {"opponent": PAST}, "algorithm": {"name": "grpo"}}
    load_run(tiny_run(tmp_path, **base))
    with pytest.raises(ConfigError, match=message):
        load_run(tiny_run(tmp_path, **base | changes))
