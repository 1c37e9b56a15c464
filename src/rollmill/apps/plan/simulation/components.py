"""Simulated models, judges, trainers and weights: what a stage is built from, without torch or other processes."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rollmill.apps.plan.simulation.clock import SimulatedProcess, VirtualLoop
from rollmill.apps.plan.simulation.engine import SimulationCosts
from rollmill.apps.plan.simulation.history import EventHistory
from rollmill.buffer import ExperienceStore
from rollmill.config.run import StageConfig
from rollmill.data import Taskset
from rollmill.errors import TrainerRankLostError
from rollmill.rewards.base import RewardResult
from rollmill.types import Completion, Experience, IntArray, Task
from rollmill.waiting import OutageLog
from rollmill.weights import FolderReceiver

_ASK_AGAIN_S = 0.5


def digest_of(*parts: object) -> int:
    """A 48-bit digest of values by their text."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def simulated_reward(token_ids: IntArray, index: int) -> float:
    """Reward of a completion, 0 or 1, by its tokens [T] and its index in the group."""
    return float(digest_of(token_ids.astype(np.int32).tobytes(), index) % 2)


class SimulatedTokenizer:
    """Encodes a prompt as a token per character."""

    eos_token_id, bos_token_id, chat_template = 0, None, None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return [ord(letter) for letter in text]

    def get_vocab(self) -> dict[str, int]:
        """One token, for fingerprints."""
        return {"<eos>": 0}


class SimulatedPolicy:
    """A policy without parameters. `digest` stands for its weights: it changes with every batch learned."""

    def __init__(self) -> None:
        self.tokenizer, self.end_id, self.eos_ids = SimulatedTokenizer(), 0, (0,)
        self.model = SimpleNamespace(named_parameters=lambda: iter(()))
        self.device, self.context = torch.device("cpu"), 1 << 20
        self.digest = digest_of("initial weights")


class SimulatedJudges:
    """Judges that all explorers ask. They can be unavailable; then an explorer says so and asks again.

    Args:
        spread: standard deviation of the logarithm of their seconds.
        places: answers that they work on at a time.
    """

    def __init__(self, loop: VirtualLoop, seconds: float, *, spread: float, places: int, seed: int) -> None:
        self._loop, self._seconds, self._spread = loop, seconds, spread
        self._places, self._random = asyncio.Semaphore(places), random.Random(seed)
        self.away_until = 0.0

    async def judge(self, completion: Completion, outages: OutageLog) -> float:
        """Return a reward, 0 or 1, that depends on the tokens alone."""
        while self._loop.time() < self.away_until:
            outages.begin("the judge", "it does not answer")
            await asyncio.sleep(_ASK_AGAIN_S)
        outages.end("the judge")
        if self._seconds > 0:
            async with self._places:
                await asyncio.sleep(self._seconds * self._random.lognormvariate(0.0, self._spread))
        return simulated_reward(completion.token_ids, completion.index)


class SimulatedRewards:
    """The part of a RewardManager that explorers use, for one process."""

    weights: Mapping[str, float] = {"judge": 1.0}

    def __init__(self, judges: SimulatedJudges, outages: OutageLog) -> None:
        self._judges, self._outages = judges, outages

    async def score(
        self, task: Task, completion: Completion, *, group_follows: bool = False, role: str | None = None
    ) -> RewardResult:
        reward = await self._judges.judge(completion, self._outages)
        return RewardResult(reward, {"judge": reward}, {"judge": "ok"}, 0.0)

    async def add_group_rewards(
        self, task: Task, completions: Sequence[Completion], results: Sequence[RewardResult]
    ) -> list[RewardResult]:
        return list(results)

    async def score_group(self, task: Task, completions: Sequence[Completion]) -> list[RewardResult]:
        return list(await asyncio.gather(*(self.score(task, each) for each in completions)))

    def counters(self) -> dict[str, float]:
        """Empty."""
        return {}

    def close(self) -> None:
        """Nothing to close."""


class SimulatedTrainer:
    """A trainer with ranks: a step takes as long as its slowest rank. Its weights are a digest of all it has learned.

    Args:
        history: what it trains on is recorded there.
    """

    def __init__(
        self,
        policy: SimulatedPolicy,
        process: SimulatedProcess,
        costs: SimulationCosts,
        history: EventHistory,
        *,
        ranks: int,
        seed: int,
    ) -> None:
        self._policy, self._process, self._costs, self._history = policy, process, costs, history
        self._ranks, self._random = ranks, random.Random(seed)
        self.rank_dies = False
        self.spent_s = 0.0

    def start(self, *, keeps_policy: bool = True) -> None:
        """Nothing to start."""

    def sharded_weights(self) -> None:
        """None: its weights are not sharded."""

    def gather_policy(self) -> None:
        """Nothing to gather."""

    def precompute(self, experiences: Sequence[Experience], version: int) -> Iterator[None]:
        """No passes before rewards."""
        return iter(())

    def to_compare(
        self, upcoming: Sequence[Sequence[Experience]], experiences: Sequence[Experience], version: int
    ) -> None:
        """No comparison of log-probs."""

    def step(self, experiences: Sequence[Experience], version: int, compared: None) -> dict[str, float]:
        """Learn a batch. Raises TrainerRankLostError if a rank dies."""
        self._history.record("train", version=version, experiences=experiences)
        self._process.require_alive()
        seconds = max(self._random.choice(self._costs.train_s) for _ in range(self._ranks))
        self.spent_s = seconds * self._process.slowness + self._costs.publish_s
        self._process.loop.spend(self.spent_s)
        if self.rank_dies:
            self.rank_dies = False
            raise TrainerRankLostError("rank 1 is gone")
        learned = [(each.id, each.token_ids.tobytes(), each.versions.tobytes(), each.reward) for each in experiences]
        self._policy.digest = digest_of(self._policy.digest, learned)
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._policy.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._policy.digest = state["digest"]

    def export(self, folder: Path, policy: Any) -> None:
        """No model to export."""

    def close(self) -> None:
        """Nothing to close."""


class SimulatedWeights:
    """Published weights, where all processes of a run find them: digests by version of each use of the explorers."""

    def __init__(self) -> None:
        self.digests: dict[str, dict[int, int]] = {}
        self.visible_at: dict[tuple[str, int], float] = {}


class SimulatedSender:
    """The trainer's side; a WeightSender."""

    def __init__(
        self, weights: SimulatedWeights, place: str, policy: SimulatedPolicy, process: SimulatedProcess
    ) -> None:
        self._weights, self._place, self._policy, self._process = weights, place, policy, process
        weights.digests[place] = {}

    def send(self, version: int, weights: Mapping[str, Any]) -> None:
        self._process.require_alive()
        self._weights.digests[self._place][version] = self._policy.digest
        self._weights.visible_at[self._place, version] = self._process.loop.time()

    def restore(self) -> None:
        """Nobody removes them."""

    def close(self) -> None:
        """They stay."""


class SimulatedReceiver(FolderReceiver):
    """An explorer's side, which sees new weights with a delay, as through a network file system."""

    def __init__(self, weights: SimulatedWeights, place: str, loop: VirtualLoop, delay_s: float) -> None:
        self._weights, self._place, self._loop, self._delay_s = weights, place, loop, delay_s
        self.digests: dict[int, int] = {}  #: of the weights received, by version

    def newest(self) -> int | None:
        known = self._weights.digests.get(self._place, {})
        seen = [
            each for each in known if self._weights.visible_at[self._place, each] + self._delay_s <= self._loop.time()
        ]
        return max(seen, default=None)

    def fetch(self, version: int | None = None) -> None:
        """No-op: the engine counts the seconds."""

    def receive(self, into: Mapping[str, Any], version: int | None = None) -> int:
        newest = self.newest()
        assert newest is not None
        self.digests[newest] = self._weights.digests[self._place][newest]
        return newest

    def close(self) -> None:
        """Nothing to close."""


class SimulatedBuffers:
    """Buffers of a run with one store, in memory."""

    def __init__(self, store: ExperienceStore, *, shared: bool) -> None:
        self._store, self.shared = store, shared

    def of_stage(self, config: StageConfig) -> ExperienceStore:
        return self._store

    def of_run(self, store: ExperienceStore) -> list[Any]:
        """No feedback."""
        return []


def simulated_tasks(count: int) -> Taskset:
    """A taskset of so many tasks."""
    return Taskset("simulated", [Task(f"t{number}", "?", answer="!") for number in range(count)], [])
