"""Rollouts that are put away or stopped: nothing is lost, doubled, altered or too stale, whatever the lengths."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toys import toy_tokenizer

from rollmill.buffer.memory import MemoryStore
from rollmill.config.algorithms.base import AlgorithmOptions
from rollmill.config.algorithms.baselines import ReMax
from rollmill.config.rewards import RewardManagerConfig
from rollmill.config.run import StageConfig
from rollmill.engines.base import GenerationRequest
from rollmill.orchestrator.oversampling import MAX_STOPS
from rollmill.orchestrator.partial_rollouts import PartialRollouts
from rollmill.orchestrator.scheduler import RolloutScheduler
from rollmill.orchestrator.state import StageState
from rollmill.rewards import build_reward_manager
from rollmill.rollout import Explorer
from rollmill.rollout.base import PartialRollout
from rollmill.seeds import derive_seed
from rollmill.types import Completion, Experience, StopReason, Task

TOKENIZER = toy_tokenizer("char")
JUDGE = build_reward_manager([], RewardManagerConfig())


@dataclass
class ScriptedEngine:
    """An engine whose completions have given lengths, drawn by seed; token t of one is a function of its seed."""

    lengths: list[int]
    rows: int = 6  #: decoded at the same time
    longer_if_greedy: int = 0
    version: int = 0
    tokens_generated: int = 0
    running: list[dict[str, Any]] = field(default_factory=list)
    driver: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return sorted([each async for each in self.stream(request)], key=lambda each: each.index)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        results: asyncio.Queue[Completion] = asyncio.Queue()
        mine = []
        for index in range(request.n):
            begun = request.prefixes[index] if index < len(request.prefixes) else None
            versions = [] if begun is None else begun.versions.tolist()
            seed = derive_seed(request.seed, index)
            row = {"request": request, "index": index, "seed": seed, "versions": versions, "results": results}
            row["length"] = self.length(seed) + self.longer_if_greedy * (request.sampling.temperature == 0)
            mine.append(row)
            if len(versions) == row["length"]:
                results.put_nowait(self.completion(row, StopReason.EOS))
            else:
                self.running.append(row)
        if self.driver is None or self.driver.done():
            self.driver = asyncio.create_task(self.drive())
        try:
            for _ in range(request.n):
                yield await results.get()
        finally:
            self.running = [row for row in self.running if row["results"] is not results]

    def length(self, seed: int) -> int:
        return self.lengths[seed % len(self.lengths)]

    async def drive(self) -> None:
        while self.running:
            for row in self.running[: self.rows]:
                row["versions"].append(self.version)
                self.tokens_generated += 1
                if len(row["versions"]) == row["length"]:
                    row["results"].put_nowait(self.completion(row, StopReason.EOS))
            self.running = [row for row in self.running if len(row["versions"]) < row["length"]]
            await asyncio.sleep(0)

    async def wait_for_tokens(self) -> None:
        await asyncio.sleep(0)

    def interrupt(self) -> None:
        for row in self.running:
            row["results"].put_nowait(self.completion(row, StopReason.ABORTED))
        self.running = []

    def completion(self, row: dict[str, Any], reason: StopReason) -> Completion:
        count = len(row["versions"])
        tokens = expected_tokens(row["seed"], count)
        prompt = np.asarray(row["request"].prompt_ids, np.int32)
        zeros = np.zeros(count, np.float32)
        versions = np.asarray(row["versions"], np.int32)
        return Completion(prompt, tokens, zeros - 1, versions, zeros, "", reason, row["seed"], row["index"])


def expected_tokens(seed: int, count: int) -> np.ndarray[Any, Any]:
    return np.array([derive_seed(seed, at) % 50 for at in range(count)], np.int32)


class CountingSampler:
    """Tasks 0, 1, 2 ..."""

    def __init__(self) -> None:
        self.drawn = 0

    def next(self, step: int) -> Task:
        self.drawn += 1
        return task(str(self.drawn - 1))

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def task(id: str) -> Task:
    return Task(id, "1+1=")


@dataclass
class Stage:
    """Rollouts with what they need; `steps` takes batches as a stage does."""

    lengths: list[int]
    config: StageConfig
    store: MemoryStore = field(default_factory=MemoryStore)

    def __post_init__(self) -> None:
        self.engine, self.sampler = ScriptedEngine(self.lengths), CountingSampler()
        self.rollouts = self.made(Explorer(self.engine, JUDGE, TOKENIZER))  # type: ignore[arg-type]

    def made(self, explorer: Explorer, algorithm: AlgorithmOptions | None = None) -> RolloutScheduler:
        changes = {} if algorithm is None else {"algorithm": algorithm}
        return RolloutScheduler(
            self.config.model_copy(update=changes),
            sampler=self.sampler,  # type: ignore[arg-type]
            explorer=explorer,
            engine=self.engine,
            store=self.store,
            task=task,
            first_version=0,
            seed=5,
        )

    async def step(self, version: int) -> list[list[Experience]]:
        self.engine.version = version
        await self.rollouts.run(version, lambda: 0)
        batch = await self.rollouts.queue.get(self.config.rollout.batch, 10.0)
        self.rollouts.end_step()
        return batch

    async def boundary(self) -> tuple[StageState, Any]:
        state = StageState()
        self.rollouts.mark(state)
        await self.rollouts.snapshot(state)
        return state, self.store.mark()


def config(batch: int, size: int, steps: int, max_staleness: int, **rollout: Any) -> StageConfig:
    options = {"batch": batch, "group_size": size, "max_new_tokens": 50, **rollout}
    return StageConfig.model_validate({"steps": steps, "max_staleness": max_staleness, "rollout": options})


def check_batches(batches: list[list[list[Experience]]], lengths: list[int], size: int) -> list[int]:
    """Every completion is whole and has its own tokens; the tasks, in the order they were learned from."""
    names = []
    for batch in batches:
        for group in batch:
            number = int(group[0].group.rpartition("-")[2])
            names.append(int(group[0].task_id))
            assert [each.id for each in group] == [f"{group[0].group}/{index}" for index in range(size)]
            for index, each in enumerate(group):
                seed = derive_seed(derive_seed(5, number), index)
                count = lengths[seed % len(lengths)]
                response = each.token_ids[each.turns[-1].start :]
                assert response.tolist() == expected_tokens(seed, count).tolist()
                assert each.stop_reason is StopReason.EOS
    return names


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS,
    batch=st.integers(1, 3),
    size=st.integers(1, 3),
    max_staleness=st.integers(1, 3),
    budget=st.integers(1, 200),
    newest=st.booleans(),
)
def test_with_a_token_budget_every_task_is_learned_from_once_in_order_within_the_bound(
    lengths: list[int], batch: int, size: int, max_staleness: int, budget: int, newest: bool
) -> None:
    steps = 6
    partial = {"learn": "newest" if newest else "all"}
    stage = Stage(lengths, config(batch, size, steps, max_staleness, token_budget=budget, partial=partial))
    batches: list[list[list[Experience]]] = []

    async def everything() -> None:
        for version in range(steps):
            batches.append(await stage.step(version))

    asyncio.run(everything())
    assert check_batches(batches, lengths, size) == list(range(steps * batch)), "in the order they were started"
    for version, taken in enumerate(batches):
        for each in (each for group in taken for each in group):
            written = each.versions[each.action_mask]
            assert (np.diff(written) >= 0).all()
            assert 0 <= version - each.oldest_version <= max_staleness
            assert not newest or len(set(written.tolist())) == 1
            assert newest or each.action_tokens == len(each.token_ids) - each.turns[-1].start
    assert stage.sampler.drawn == steps * batch
    assert not stage.store.take_partial(1, step=steps + 1), "nothing is left unfinished"


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, max_staleness=st.integers(1, 3), budget=st.integers(1, 120), cut=st.integers(1, 4))
def test_a_checkpoint_holds_what_was_put_away(lengths: list[int], max_staleness: int, budget: int, cut: int) -> None:
    steps, options = 5, config(2, 2, 5, max_staleness, token_budget=budget)

    async def resumed() -> None:
        whole, other = Stage(lengths, options), Stage(lengths, options)
        expected = []
        state, mark = StageState(), None
        for version in range(steps):
            expected.append(await whole.step(version))
            if version + 1 == cut:
                state, mark = await whole.boundary()
        await other.step(0)  # what an interrupted step has left in the store is gone
        other.store.rewind(mark, step=cut)
        again = Stage(lengths, options, other.store)
        again.rollouts.restore(state)
        for version in range(cut, steps):
            found = await again.step(version)
            for one, two in zip(_flat(found), _flat(expected[version]), strict=True):
                assert one.id == two.id
                assert one.token_ids.tolist() == two.token_ids.tolist()
                assert one.versions.tolist() == two.versions.tolist()

    asyncio.run(resumed())


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS,
    batch=st.integers(1, 4),
    size=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    share=st.sampled_from([0.1, 0.5, 1.0, 2.0]),
)
def test_over_sampling_loses_no_task(
    lengths: list[int], batch: int, size: int, max_staleness: int, share: float
) -> None:
    steps = 8
    stage = Stage(lengths, config(batch, size, steps, max_staleness, oversample=share))
    longest = MAX_STOPS + math.ceil(share * (max_staleness + 1)) + 1  # several may have lost their patience at once
    batches: list[list[list[Experience]]] = []
    state = StageState()

    async def everything() -> None:
        nonlocal state
        for version in range(steps):
            batches.append(await stage.step(version))
            state, _ = await stage.boundary()
            assert all(times <= longest for _, times in state.again)

    asyncio.run(everything())
    learned = check_batches(batches, lengths, size)
    waiting = [int(id) for id, _ in state.again]
    assert len(learned) == steps * batch
    assert sorted(learned + waiting) == list(range(stage.sampler.drawn)), "each learned from once, or waiting"
    for version, taken in enumerate(batches):
        for each in (each for group in taken for each in group):
            assert len(set(each.versions[each.action_mask].tolist())) == 1, "stopped rollouts begin again"
            assert 0 <= version - each.oldest_version <= max_staleness


def test_the_first_groups_are_taken_and_the_bias_is_told() -> None:
    lengths = [1, 1, 1, 30]
    stage = Stage(lengths, config(2, 1, 4, 0, oversample=1.0))

    async def one() -> dict[str, float]:
        taken = _flat(await stage.step(0))
        assert all(each.action_tokens == 1 for each in taken)
        return stage.rollouts.metrics()

    found = asyncio.run(one())
    assert found["rollout/stopped"] == 2
    assert found["rollout/wasted_tokens"] == stage.engine.tokens_generated - 2
    assert found["rollout/length_bias"] == 1 / (stage.engine.tokens_generated / 4)


def test_a_budget_that_is_not_spent_puts_nothing_away() -> None:
    stage = Stage([3, 9], config(2, 2, 4, 1, token_budget=10_000))

    async def one() -> dict[str, float]:
        await stage.step(0)
        return stage.rollouts.metrics()

    found = asyncio.run(one())
    assert (found["rollout/partial"], found["rollout/segments"]) == (0, 1)
    assert len(stage.rollouts.queue) == 2, "with staleness 1 another batch is ready"


def _flat(batch: list[list[Experience]]) -> list[Experience]:
    return [each for group in batch for each in group]


def test_what_an_earlier_stage_has_left_is_not_continued() -> None:
    store, number = MemoryStore(), 7
    left = [replace(unfinished_one(), group="first-000007")]
    PartialRollouts(store, "first").put({number: left}, version=3)
    assert PartialRollouts(store, "second").take(step=4) == {}
    store.rewind(store.mark(), step=3)
    [found] = PartialRollouts(store, "first").take(step=4)[number]
    assert found.token_ids.tolist() == left[0].token_ids.tolist()


class Backwards(Explorer):
    """Returns interrupted groups in the opposite order, as other processes may; notes which were requested."""

    requested: list[int]

    async def part(self, *args: Any, group: str, **options: Any) -> PartialRollout:
        number = int(group.rpartition("-")[2])
        self.requested.append(number)
        found = await super().part(*args, group=group, **options)
        for _ in range(20 - number if found.experiences[0].stop_reason is StopReason.ABORTED else 0):
            await asyncio.sleep(0)
        return found


def test_the_oldest_groups_go_on_first_whichever_was_returned_first() -> None:
    """The step needs them, and an engine decodes in the order of requests."""
    stage = Stage([9], config(2, 1, 4, 2, token_budget=1))
    explorer = Backwards(stage.engine, JUDGE, TOKENIZER)  # type: ignore[arg-type]
    explorer.requested, stage.engine.rows = [], 2
    stage.rollouts = stage.made(explorer)

    async def two() -> None:
        await stage.step(0)
        explorer.requested.clear()
        await stage.step(1)

    asyncio.run(two())
    assert explorer.requested == list(range(2, 8))


def unfinished_one() -> Experience:
    stage = Stage([9], config(1, 1, 4, 1, token_budget=1))

    async def one() -> Experience:
        await stage.rollouts.run(0, lambda: 0)
        return (await stage.rollouts.queue.get(1, 10.0))[0][0]

    return replace(asyncio.run(one()), stop_reason=StopReason.ABORTED)


class Crashing(Explorer):
    """Rollouts of even tasks end at once, and leave nothing to learn from."""

    async def rollout(self, task: Task, *args: Any, **options: Any) -> list[Experience]:
        return await super().rollout(task, *args, **options) if int(task.id) % 2 else []


def test_groups_that_end_early_since_they_were_rejected_do_not_stop_others() -> None:
    stage = Stage([5], config(3, 1, 4, 0, oversample=1.0))
    stage.rollouts = stage.made(Crashing(stage.engine, JUDGE, TOKENIZER))  # type: ignore[arg-type]

    async def one() -> tuple[list[list[Experience]], dict[str, float]]:
        await stage.rollouts.run(0, lambda: 0)
        return await stage.rollouts.queue.get(9, 10.0), stage.rollouts.metrics()

    groups, metrics = asyncio.run(one())
    assert [bool(group) for group in groups] == [False, True] * 3
    assert metrics["rollout/stopped"] == 0
    assert metrics["rollout/wasted_tokens"] == 0


def test_a_group_with_a_greedy_baseline_waits_for_its_tokens_too() -> None:
    stage = Stage([2], config(1, 1, 4, 1))
    stage.engine.longer_if_greedy = 30
    stage.rollouts = stage.made(Explorer(stage.engine, JUDGE, TOKENIZER), ReMax())  # type: ignore[arg-type]

    async def one() -> bool:
        await stage.rollouts.run(0, lambda: 0)
        return bool(stage.engine.running)

    assert not asyncio.run(one()), "weights change now: they must not write the rest of a completion"
