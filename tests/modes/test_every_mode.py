"""Every feature in every mode: in one process, with explorers as processes or on Ray, with several ranks; with the
native engine and with vLLM. `rollmill check --matrix` names these tests.

Each mode has one run with nearly everything in it, whose command is killed and resumed, and one with adapters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.buffer_groups import experience
from support.forks import Forks, ended, forks, send
from support.paced import CUT, begun, forget_begun, hold, release, write_paced
from support.picture_models import picture_run
from support.tiny import merged, require_log_probs, tiny_run
from support.vllm_service import PYTHON, needs_vllm

from rollmill.buffer import ExperienceKind, Group, open_run_store
from rollmill.buffer.base import FEEDBACK, version_segments
from rollmill.config.checks.modes import RUN_MODES, Deployment, RunMode
from rollmill.orchestrator.metrics import REPLAYED
from rollmill.trackers import read_metrics
from rollmill.trackers.rollout_log import load_experiences
from rollmill.trackers.step_timeline import read_step_timelines
from rollmill.types import Experience, StopReason

STEPS, GROUPS, KILLED_AFTER = 6, 4, 2
STOP = "7"
IDS = [f"train-{number:06d}/{index}" for number in range(STEPS * GROUPS) for index in range(4)]
PLUGIN = """
import asyncio

import rollmill


@rollmill.operator
def mark(batch) -> None:
    '''Notes that a completion was here.'''
    for experience in batch.experiences:
        experience.info["marked"] = True


async def slow(task, completion):
    await asyncio.sleep(0.05)
    return float(sum(map(completion.text.count, "01234")))


async def high(task, completion):
    return float(sum(map(completion.text.count, "56789")))


@rollmill.workflow
async def pair(task, policy, judge):
    first = await policy.role("first").complete(task.prompt, max_new_tokens=12)
    second = await policy.role("second").complete(task.prompt + first.text, max_new_tokens=12)
    return {"second": await judge(second), "first": await judge(first)}


@rollmill.workflow
async def duel(task, policy, opponent):
    mine, theirs = await policy.complete(task.prompt), await opponent.complete(task.prompt, max_new_tokens=4)
    return {"won": float(mine.text > theirs.text), "at": 0.0 if opponent.copied_at is None else 1.0}
"""
REPETITION = {"period": 1, "times": 3, "tokens": 3, "penalty": 0.25}
EVERYTHING: dict[str, Any] = {
    "stages": None,
    "model": {"new": {"hidden_size": 64}},
    "plugins": ["plugin.py", *CUT["plugins"]],
    "rewards": [{"name": "python", "function": "plugin.py:slow"}],
    "algorithm": {"name": "grpo"},
    "steps": STEPS,
    "max_staleness": CUT["max_staleness"],
    "rollout": {
        **CUT["rollout"],
        "max_new_tokens": 40,
        "max_sequences": 2,
        "stop": [STOP],
        "repetition": REPETITION,
    },
    "trainer": {"lr": 1e-3},
    "buffer": {"replay": {"groups": 1}},
    "pipeline": [{"name": "mark"}],
    "evaluation": {"every": 3},
    "checkpoint": {"every": 1, "keep_last": 99},
    "trainer_away_s": 120,
}
ADAPTERS: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "steps": 3,
    "rollout": {"oversample": 0.5, "max_new_tokens": 24},
    "rewards": [{"name": "python", "function": "plugin.py:slow"}],
    "plugins": ["plugin.py"],
    "trainer": {"lr": 1e-2},
    "evaluation": None,
    "checkpoint": {"every": 99},
    "trainer_away_s": 120,
}
ROLES: dict[str, Any] = {
    "workflow": "pair",
    "roles": {"first": {}, "second": {}},
    "rewards": [
        {"name": "python", "function": "plugin.py:slow", "role": "first"},
        {"name": "python", "function": "plugin.py:high", "role": "second"},
    ],
}
DRAFTS = {"rollout": {"ngram_draft": {"length": 1, "tokens": 3}}}
TRUNCATED = {"rollout": {"top_p": 0.95}}


def mode_params(
    *, only: Callable[[RunMode], bool] = lambda mode: True, starts_vllm: bool = False, starts_ray: bool = False
) -> list[Any]:
    """The columns as parameters; those that need long, as tests that start a vLLM or a Ray of their own, are left to
    `make test-thorough`."""
    found = []
    for mode in filter(only, RUN_MODES):
        marks = [pytest.mark.slow, pytest.mark.net]
        if mode.engine == "vllm":
            marks = [pytest.mark.service, needs_vllm]
            marks += [pytest.mark.thorough] * (starts_vllm or mode.deployment is not Deployment.ONE_PROCESS)
        elif starts_ray and mode.deployment is Deployment.RAY:
            marks += [pytest.mark.thorough]
        found.append(pytest.param(mode, id=mode.id, marks=marks))
    return found


pytestmark = pytest.mark.timeout(900)
in_every_mode = pytest.mark.parametrize("mode", mode_params())
in_modes_of_its_own = pytest.mark.parametrize("mode", mode_params(starts_vllm=True))
with_native = pytest.mark.parametrize("mode", mode_params(only=lambda mode: mode.engine == "native"))


def made_once(make: Callable[[Any], Path]) -> Callable[[Any], Path]:
    """`make`, whose result, or failure, is kept."""

    @cache
    def attempt(of: Any) -> Path | str:
        try:
            return make(of)
        except (Exception, AssertionError) as error:
            return f"{type(error).__name__}: {error}"

    def made(of: Any) -> Path:
        found = attempt(of)
        assert isinstance(found, Path), found
        return found

    return made


def publishes(mode: RunMode) -> bool:
    """True if the engine has a copy of the weights."""
    return mode.engine == "vllm" or mode.deployment in (Deployment.PROCESSES, Deployment.RAY)


class Runs:
    """The runs of a mode, each made when the first test asks for it."""

    def __init__(self, folder: Path, servers: list[Forks]) -> None:
        self._folder, self._trainer, self._explorer = folder, *servers
        self.everything, self.adapters = made_once(self._everything), made_once(self._adapters)
        self.reference = made_once(self._reference)

    def _everything(self, mode: RunMode) -> Path:
        """A run that is killed after some steps, rated by a person, and resumed."""
        folder = self._written(mode, "everything", EVERYTHING)
        out = folder / "out"
        hold(folder, after=KILLED_AFTER)
        self._begin(mode, folder)
        deadline = time.monotonic() + 600
        while not begun(folder, step=KILLED_AFTER + 3):  # which the step that is held has started
            assert not ended(self._trainer.pid), self._trainer.wait().err
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert send(self._trainer.pid)
        self._trainer.wait()
        assert len(steps(out)) == KILLED_AFTER
        forget_begun(folder)
        release(folder)
        store = open_run_store(out, read_only=False)
        rating = Group("rating-1", [experience("rating-1/0", reward=7.5)], ExperienceKind.RATED, writer=FEEDBACK)
        rating.author, rating.info = "ann", {"of": IDS}
        store.put([rating])
        store.close()
        self._trainer.start("resume", "out", folder=folder)
        self._finish(mode)
        return out

    def _adapters(self, mode: RunMode) -> Path:
        """Adapters on the run's last checkpoint, with roles, over-sampling, truncation, and drafts."""
        model = {"path": str(self.everything(mode) / f"checkpoints/step-{STEPS:06d}"), "new": None}
        changes = merged(ADAPTERS | ROLES, merged(TRUNCATED, DRAFTS if mode.engine == "native" else {}))
        if publishes(mode):
            changes |= {"max_staleness": 1, "sync_interval": 2}
        folder = self._written(mode, "adapters", changes | {"model": model | {"lora": {"rank": 4}}})
        self._begin(mode, folder)
        self._finish(mode)
        return folder / "out"

    def _reference(self, engine: str) -> Path:
        """One step in one process without a budget."""
        mode = RunMode(Deployment.ONE_PROCESS, engine)
        more = {"max_staleness": 0, "steps": 1, "evaluation": None, "buffer": None, "rollout": {"token_budget": None}}
        folder = self._written(mode, "reference", merged(EVERYTHING, more))
        self._begin(mode, folder)
        self._finish(mode)
        return folder / "out"

    def offloaded(self, mode: RunMode) -> Path:
        """A run with reference and critic, most of which leave the device in phases that do not need them."""
        algorithm = {"name": "ppo", "kl": 0.05, "critic": {"lr": 1e-3}}
        places = {"reference": "disk", "optimizer": "disk", "critic_optimizer": "disk"}
        elsewhere = {"engine": "destroyed", "policy": "disk"} if publishes(mode) else {}
        more = {"algorithm": algorithm, "steps": 2, "rollout": {"oversample": None}}
        changes = merged(ADAPTERS, more | {"offload": places | elsewhere, "monitor": {"timeline_every": 1}})
        folder = self._written(mode, "offloaded", merged(changes, {"model": {"new": {"hidden_size": 64}}}))
        self._begin(mode, folder)
        self._finish(mode)
        return folder / "out"

    def duels(self, mode: RunMode) -> Path:
        """A run against the policy and its past copies."""
        models = {"opponent": {"policy": "past", "every": 1, "keep": 2}}
        changes = merged(ADAPTERS, {"workflow": "duel", "models": models}) | {"rewards": None}
        folder = self._written(mode, "duels", changes)
        self._begin(mode, folder)
        self._finish(mode)
        return folder / "out"

    def refused(self, mode: RunMode, settings: dict[str, Any]) -> str:
        """The error of a run that cannot start."""
        folder = self._written(mode, "refused", merged(ADAPTERS, settings))
        self._trainer.start("run", "run.yaml", "--out", "out", folder=folder)
        done = self._trainer.wait()
        assert done.code in (1, 2)
        return done.err

    def reuse(self, mode: RunMode) -> Path:
        """A run that rolls out the same few tasks in each step."""
        rollout = {"reuse": {}, "oversample": None}
        changes = merged(ADAPTERS, {"rollout": rollout, "taskset": {"options": {"size": 4}}})
        folder = self._written(mode, "reuse", changes)
        self._begin(mode, folder)
        self._finish(mode)
        return folder / "out"

    def sees(self, mode: RunMode) -> Path:
        """A run of a vision-language model on pictures."""
        folder = self._folder / mode.id / "sees"
        more: dict[str, Any] = {"trainer": {"lr": 1e-3}, "stages": None, "algorithm": {"name": "grpo"}, "steps": 3}
        more |= {"trainer_away_s": 120} if mode.deployment is Deployment.PROCESSES else {}
        place = mode.settings()
        if mode.engine == "vllm":
            place["engine"] |= {"python": str(PYTHON), "cache_gb": 0.1}
        # the family that vLLM has without torchvision; it has no kernel for smaller heads
        picture_run(folder, "idefics3", {"head_dim": 32}, **merged(more, place))
        self._begin(mode, folder)
        self._finish(mode)
        return folder / "out"

    def _written(self, mode: RunMode, name: str, changes: dict[str, Any]) -> Path:
        folder = self._folder / mode.id / name
        folder.mkdir(parents=True)
        (folder / "plugin.py").write_text(PLUGIN)
        write_paced(folder, steps=STEPS)
        place = mode.settings()
        if mode.engine == "vllm":
            place["engine"] |= {"python": str(PYTHON), "cache_gb": 0.1}
        if mode.deployment is Deployment.RAY:
            place["placement"] |= {"cpus": 0.5}
            if mode.engine == "vllm":  # a group may go on in another engine
                place["placement"]["explorers"] = [{"engine": place.pop("engine")}, {}]
        if mode.deployment is not Deployment.PROCESSES:
            changes = merged(changes, {"trainer_away_s": None})
        tiny_run(folder, **merged(changes, place))
        return folder

    def _begin(self, mode: RunMode, folder: Path) -> None:
        if mode.deployment is Deployment.PROCESSES:
            self._explorer.start("run", "run.yaml", "--set", "mode=explore", "--out", "out", folder=folder)
        self._trainer.start("run", "run.yaml", "--out", "out", folder=folder)

    def _finish(self, mode: RunMode) -> None:
        for server in (self._trainer, self._explorer)[: 1 + (mode.deployment is Deployment.PROCESSES)]:
            done = server.wait()
            assert done.code == 0, done.err + done.out


@pytest.fixture(scope="module")
def runs(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with ExitStack() as stack:
        yield Runs(tmp_path_factory.mktemp("modes"), [server, stack.enter_context(forks())])


def steps(out: Path) -> list[dict[str, Any]]:
    """The metrics of training steps."""
    return [dict(row) for row in read_metrics(out) if "loss" in row]


def learned(out: Path) -> list[Experience]:
    """What was rolled out for each step, without what was replayed."""
    experiences = [each for row in steps(out) for each in load_experiences(out, step=row["step"])]
    return [each for each in experiences if not each.info.get(REPLAYED)]


@in_every_mode
def test_a_killed_run_goes_on(runs: Runs, mode: RunMode) -> None:
    """Every group is learned from once, in the order in which it was started."""
    out = runs.everything(mode)
    assert [row["step"] for row in steps(out)] == list(range(1, STEPS + 1))
    assert [each.id for each in learned(out)] == IDS


@in_every_mode
def test_a_budget_cuts_completions_and_they_go_on(runs: Runs, mode: RunMode) -> None:
    out = runs.everything(mode)
    assert sum(row["rollout/partial"] for row in steps(out)) > 0
    assert sum(row["rollout/continued"] for row in steps(out)) > 0
    assert all(each.stop_reason is not StopReason.ABORTED for each in learned(out))
    assert max(len(version_segments(each)) for each in learned(out)) > 1


@in_every_mode
def test_every_token_has_the_log_prob_of_its_weights(runs: Runs, mode: RunMode) -> None:
    out = runs.everything(mode)
    compared = require_log_probs(out, learned(out))
    assert {1, 2, 3} < compared.keys()  # each has begun groups, and a later one has continued the last of them
    assert max(row["logprob_gap/max"] for row in steps(out)) < 1e-3


@in_every_mode
def test_stale_tokens_stay_within_the_bound(runs: Runs, mode: RunMode) -> None:
    out = runs.everything(mode)
    assert 0 < max(row["staleness/max"] for row in steps(out)) <= 2


@in_every_mode
def test_repetition_ends_completions(runs: Runs, mode: RunMode) -> None:
    ended = [each.stop_reason is StopReason.REPETITION for each in learned(runs.everything(mode))]
    assert 0 < sum(ended) < len(ended)
    for each, repeated in zip(learned(runs.everything(mode)), ended, strict=True):
        assert each.reward_parts["rollout/repetition"] == (-0.25 if repeated else 0.0)


@in_every_mode
def test_completions_end_at_stop_strings(runs: Runs, mode: RunMode) -> None:
    experiences = learned(runs.everything(mode))
    assert any(each.stop_reason is StopReason.STOP for each in experiences)
    assert not any(STOP in each.response for each in experiences)


@in_modes_of_its_own
def test_a_policy_sees(runs: Runs, mode: RunMode) -> None:
    """Engine and trainer agree on every token; without its picture, log-probs of this model differ by whole nats."""
    out = runs.sees(mode)
    assert len(steps(out)) == 3
    assert max(row["logprob_gap/max"] for row in steps(out)) < 1e-4
    assert all(each.info["images"] for each in learned(out))


@in_every_mode
def test_held_out_tasks_are_evaluated(runs: Runs, mode: RunMode) -> None:
    summary = json.loads((runs.everything(mode) / "summary.json").read_text())
    assert [each["step"] for each in summary["evaluations"]] == [0, 3, 6]


@in_every_mode
def test_earlier_groups_are_replayed(runs: Runs, mode: RunMode) -> None:
    assert [row["replay/groups"] for row in steps(runs.everything(mode))] == [0] + [1] * (STEPS - 1)


@in_every_mode
def test_groups_pass_the_pipeline(runs: Runs, mode: RunMode) -> None:
    assert all(each.info["marked"] for each in learned(runs.everything(mode)))


@in_every_mode
def test_ratings_of_people_count(runs: Runs, mode: RunMode) -> None:
    """A person's rating replaces the reward of a group that is replayed."""
    last = load_experiences(runs.everything(mode), step=STEPS)
    again = [each for each in last if each.info.get(REPLAYED)]
    assert [(each.reward, each.info["rated_by"]) for each in again] == [(7.5, "ann")] * 4


@in_modes_of_its_own
def test_a_completion_is_a_function_of_its_seed(runs: Runs, mode: RunMode) -> None:
    """The first step's groups are those of another run without a budget, in one process."""
    mixed = mode.deployment is Deployment.RAY and mode.engine == "vllm"
    expected = {}
    for engine in ("native", "vllm") if mixed else (mode.engine,):
        for each in learned(runs.reference(engine)):
            expected.setdefault(each.id, []).append(each.token_ids.tolist())
    found = [each for each in learned(runs.everything(mode)) if each.id in expected]
    assert len(found) == GROUPS * 4
    assert all(each.token_ids.tolist() in expected[each.id] for each in found)


@in_modes_of_its_own
def test_the_slowest_groups_are_stopped(runs: Runs, mode: RunMode) -> None:
    rows = steps(runs.adapters(mode))
    assert [row["rollout/stopped"] for row in rows] == [2] * 3
    assert all(row["rollout/wasted_tokens"] >= 0 for row in rows)


@in_every_mode
def test_adapters_reach_the_engine(runs: Runs, mode: RunMode) -> None:
    """The engine's log-probs are those of the trainer, after every change of the adapters."""
    rows = steps(runs.adapters(mode))
    assert max(row["logprob_gap/max"] for row in rows) < 1e-3
    assert all(row["grad_norm"] > 0 for row in rows)
    assert versions_of(runs.adapters(mode)) == ({0, 2} if publishes(mode) else {0, 1, 2})


def versions_of(out: Path) -> set[int]:
    return {version for each in learned(out) for version in each.versions[each.action_mask].tolist()}


@pytest.mark.parametrize("mode", mode_params(starts_vllm=True, starts_ray=True))
def test_components_leave_by_phase(runs: Runs, mode: RunMode) -> None:
    """DeepSeek-R1's picture: the engine's memory is freed, then reference and critic come, then the optimizers."""
    out = runs.offloaded(mode)
    rows = steps(out)
    assert [row["step"] for row in rows] == [1, 2]
    for name in ("reference", "critic_optimizer"):
        assert all(row[f"residency/{name}/gb"] > 0 for row in rows[1:])
    assert max(row["logprob_gap/max"] for row in rows) < 1e-3
    if mode.engine == "vllm":
        assert [row["engine/destroyed"] for row in rows] == [1, 1]
    if publishes(mode):
        assert all(row["residency/policy/gb"] > 0 for row in rows)
        held = [kind for row in read_step_timelines(out).values() for kind in row["bytes"]]
        named = "/explorer 0 " if mode.deployment in (Deployment.PROCESSES, Deployment.RAY) else "/engine"
        assert {kind.split("/")[1] for kind in held if named in kind} == {"rollout"}
    if mode.deployment in (Deployment.PROCESSES, Deployment.RAY):
        assert all(row["residency/explorers/gb"] > 0 for row in rows)


@pytest.mark.parametrize("mode", mode_params(starts_ray=True))
def test_a_memory_budget_counts_the_engine(runs: Runs, mode: RunMode) -> None:
    """vLLM with its cache, the copies of explorers, or the policy's own weights."""
    error = runs.refused(mode, {"offload": {"budget_gb": 1e-5}})
    part = "policy"
    if publishes(mode):
        part = "engine 0.107" if mode.engine == "vllm" else "engine"
    assert "stage train: offload.budget_gb: the budget is 1e-05 GB, and the phase `rollout` needs" in error
    assert f"({part}" in error


@pytest.mark.parametrize("mode", mode_params(only=publishes))
def test_weights_are_published_every_other_step(runs: Runs, mode: RunMode) -> None:
    """The second step's rollouts are by the weights of the first."""
    assert versions_of(runs.adapters(mode)) == {0, 2}
    assert [row["staleness/max"] for row in steps(runs.adapters(mode))] == [0, 1, 0]


@in_modes_of_its_own
def test_each_role_has_its_own_rewards(runs: Runs, mode: RunMode) -> None:
    out = runs.adapters(mode)
    for row in steps(out):
        assert row["role/first/completions"] == row["role/second/completions"] == 16
    by_role: dict[str, list[Experience]] = {"first": [], "second": []}
    for each in learned(out):
        by_role[each.role].append(each)
    for role, name, digits in (("first", "slow", "01234"), ("second", "high", "56789")):
        for each in by_role[role]:
            assert each.reward_parts == {name: float(sum(map(each.response.count, digits)))}


@pytest.mark.parametrize("mode", mode_params(only=lambda mode: mode == RunMode(Deployment.ONE_PROCESS, "native")))
def test_opponents_are_past_copies(runs: Runs, mode: RunMode) -> None:
    """Of the steps before; in the first step the policy is the only copy."""
    out = runs.duels(mode)
    assert {each.reward_parts["at"] for each in learned(out)} == {0.0, 1.0}
    last = out / "checkpoints/step-000003/trainer.pt"
    assert list(torch.load(last, weights_only=True)["frozen"]["past"]["opponent"]) == [2, 3]


@in_every_mode
def test_truncated_tokens_have_exact_log_probs(runs: Runs, mode: RunMode) -> None:
    assert max(row["logprob_gap/max"] for row in steps(runs.adapters(mode))) < 1e-3


@with_native
def test_n_grams_are_drafts(runs: Runs, mode: RunMode) -> None:
    """They change no log-prob. Explorers elsewhere do not report how many were accepted."""
    rows = steps(runs.adapters(mode))
    assert max(row["logprob_gap/max"] for row in rows) < 1e-3
    if mode.deployment in (Deployment.ONE_PROCESS, Deployment.RANKS):
        assert any("rollout/guess/accepted" in row for row in rows)


@pytest.mark.parametrize(
    "mode",
    mode_params(
        only=lambda mode: mode.engine == "native" and mode.deployment in (Deployment.ONE_PROCESS, Deployment.RANKS)
    ),
)
def test_earlier_completions_are_drafts(runs: Runs, mode: RunMode) -> None:
    rows = steps(runs.reuse(mode))
    assert all(row["rollout/reuse/accepted"] > 0 for row in rows[1:])
    assert max(row["logprob_gap/max"] for row in rows) < 1e-3
