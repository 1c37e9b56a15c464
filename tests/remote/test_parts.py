"""Groups that explorers begin, hand back and continue, in any order: what was sampled is kept to the bit, and with
weights that do not change a group is what it would have been undisturbed."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toys import toy_checkpoint

from rollmill.buffer.base import version_segments
from rollmill.config.model import ModelConfig
from rollmill.config.placement import ExplorerSpec
from rollmill.config.run import StageConfig
from rollmill.models.load import load_policy
from rollmill.remote.stage_worker import RolloutReply, RolloutRequest, StageWorker, WorkerSetup, trainable_parameters
from rollmill.types import Experience, StopReason, Task
from rollmill.weights import FolderSender

STAGE = StageConfig.model_validate(
    {
        "rewards": [{"name": "format", "pattern": ".*[a-m].*"}],
        "max_staleness": 9,
        "rollout": {"max_new_tokens": 20, "max_sequences": 5, "token_budget": 1, "stop": ["e"], "repetition": {}},
    }
)
TASKS = [Task(id=f"t{number}", prompt="how many apples are there?"[: 5 + 7 * number]) for number in range(3)]


class Explorers:
    """Two explorers with the same weights, whose requests and replies travel as bytes."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        model, device = ModelConfig(path=checkpoint), torch.device("cpu")
        policies = [load_policy(model, texts=(), seed=0, device=device) for _ in range(2)]
        self._weights = trainable_parameters(policies[0])
        self._sender = FolderSender(folder, self._weights)
        self.publish(0)
        setups = [
            WorkerSetup(STAGE.model_dump_json(), each, "fp32", 1, [], [], "folder", str(folder)) for each in policies
        ]
        self.workers = [StageWorker(setup, ExplorerSpec()) for setup in setups]

    def publish(self, version: int) -> None:
        """Send the same weights as another version."""
        self._sender.send(version, self._weights)

    async def roll_out(self, worker: int, request: RolloutRequest) -> list[Experience]:
        reply = await self.workers[worker].rollout(pickle.loads(pickle.dumps(request)))
        found = pickle.loads(pickle.dumps(reply))
        assert isinstance(found, RolloutReply)
        return found.experiences

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
        self._sender.close()


@contextmanager
def explorers(folder: Path) -> Iterator[Explorers]:
    """Explorers, and an event loop that outlasts a call."""
    made = Explorers(folder / "weights", toy_checkpoint(folder / "model", "qwen3"))
    yield made


def request_of(number: int, version: int) -> RolloutRequest:
    return RolloutRequest(TASKS[number], STAGE.rollout, 3, 40 + number, f"g{number}", version)


def unfinished(group: list[Experience]) -> bool:
    return any(each.stop_reason is StopReason.ABORTED for each in group)


async def in_parts(found: Explorers, rounds: list[tuple[int, list[int]]]) -> list[list[Experience]]:
    """Roll out the groups in rounds of at most so many tokens, each group by the explorer that the round names."""
    groups: dict[int, list[Experience]] = {}
    part = 0
    for version, (tokens, chosen) in enumerate([*rounds, (10**6, [0, 1, 0])], 1):
        found.publish(version)
        numbers = [number for number in range(3) if number not in groups or unfinished(groups[number])]
        work = []
        for number in numbers:
            request = replace(request_of(number, version), part=part, begun=groups.get(number, []))
            part += 1
            work.append(asyncio.ensure_future(found.roll_out(chosen[number], request)))
        before = sum(each.tokens_generated for each in found.workers)
        while not all(each.done() for each in work):
            await asyncio.sleep(0)
            if sum(each.tokens_generated for each in found.workers) - before >= tokens:
                for worker in found.workers:
                    worker.interrupt(part - 1)
        for number, each in zip(numbers, work, strict=True):
            after, earlier = each.result(), groups.get(number, [])
            require_kept(earlier, after, version)
            groups[number] = after
    return [groups[number] for number in range(3)]


def require_kept(earlier: list[Experience], later: list[Experience], version: int) -> None:
    """What was sampled before is kept to the bit, and what is new has the version of the weights."""
    for one, other in zip(earlier, later, strict=False):
        cut = len(one.token_ids)
        for name in ("token_ids", "logprobs", "versions", "action_mask"):
            assert getattr(other, name)[:cut].tolist() == getattr(one, name).tolist()
    for other in later:
        begun = len(earlier[int(other.id.rpartition("/")[2])].token_ids) if earlier else 0
        new = other.versions[max(begun, other.turns[-1].start) :]
        assert set(new.tolist()) <= {version}
        assert (other.reward is None) == unfinished(later)


@pytest.mark.slow
def test_groups_are_what_they_would_have_been(tmp_path: Path) -> None:
    asked = st.lists(st.tuples(st.integers(0, 90), st.lists(st.integers(0, 1), min_size=3, max_size=3)), max_size=5)
    count, pieces = 0, list[int]()

    @given(asked)
    @settings(max_examples=12, deadline=None)
    def holds(rounds: list[tuple[int, list[int]]]) -> None:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        folder.mkdir()

        async def main() -> tuple[list[list[Experience]], list[list[Experience]]]:
            with explorers(folder) as found:
                whole = [await found.roll_out(0, request_of(number, 0)) for number in range(3)]
                parts = await in_parts(found, rounds)
                await found.close()
                return whole, parts

        whole, parts = asyncio.run(main())
        for one, other in zip(chain(*whole), chain(*parts), strict=True):
            pieces.append(len(version_segments(other)))
            assert other.token_ids.tolist() == one.token_ids.tolist()
            assert other.action_mask.tolist() == one.action_mask.tolist()
            assert (other.id, other.response, other.stop_reason) == (one.id, one.response, one.stop_reason)
            assert other.reward == one.reward
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-5)

    holds()
    assert max(pieces) > 2


def test_what_is_interrupted_before_it_arrives_comes_back_as_it_was(tmp_path: Path) -> None:
    async def main() -> tuple[list[Experience], list[Experience], list[Experience]]:
        with explorers(tmp_path) as found:
            found.workers[0].interrupt(1)
            empty = await found.roll_out(0, replace(request_of(1, 0), part=0))
            begun = await found.roll_out(0, replace(request_of(1, 0), part=1, begun=empty))
            whole = await found.roll_out(0, replace(request_of(1, 0), part=2, begun=begun))
            assert sum(each.tokens_generated for each in found.workers) == sum(each.action_tokens for each in whole)
            await found.close()
            return empty, begun, whole

    empty, begun, whole = asyncio.run(main())
    assert [each.stop_reason for each in (*empty, *begun)] == [StopReason.ABORTED] * 6
    assert all(not each.action_mask.any() for each in (*empty, *begun))
    assert [each.id for each in empty] == [each.id for each in whole] == ["g1/0", "g1/1", "g1/2"]
    assert all(each.reward is not None for each in whole)
