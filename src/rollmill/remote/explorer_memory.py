"""Offloading in an explorer's process: what it holds leaves the device while the trainer needs that (`offload`)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import torch
from torch import nn

from rollmill.config.checks.offload import engine_has_process, reward_models
from rollmill.config.engines import VLLMEngineConfig
from rollmill.config.offload import Phase
from rollmill.config.run import StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.engines.native import NativeEngine
from rollmill.offload import Offloadable, OffloadManager, OffloadPlan, RebuildableComponent, offload_tensors
from rollmill.offload.components import ThreadBoundComponent
from rollmill.offload.manager import CAST, POLICY
from rollmill.offload.plan import ENGINE, GB, StorageTier, vllm_bytes
from rollmill.rewards.builtin.model import LoadedRewardModel, loaded_reward_models

_HERE: Phase = "rollout"
_OFFLOADED: Phase = "train"  #: and `inference`, which needs nothing of an explorer, either
_CACHE, _REWARDS = "cache", "rewards"
MOVED = "residency/explorers"
"""Prefix of the metrics of an explorer's moves: /gb and /seconds, of all components together."""


class ExplorerMemory:
    """Moves an explorer's components: its copy of the weights, the engine's cast and cache or vLLM's process, and its
    reward models. At first all are on the device.

    Args:
        stage: as this explorer sees it.
        model: this process's copy of the policy.
        has_weights: the copy has weights; else vLLM reads the trainer's itself, and the copy only describes them.
        device: of the copy and of reward models.
        precision: of the engine, bf16 or fp32.
        folder: of the files that replace host memory on a CPU.
    """

    def __init__(
        self,
        stage: StageConfig,
        model: nn.Module,
        engine: RolloutEngine,
        *,
        has_weights: bool,
        device: torch.device,
        precision: str,
        folder: Path,
    ) -> None:
        self._engine, self._device, self._folder = engine, device, folder
        self._rewards = reward_models(stage)
        self._scorers: list[LoadedRewardModel] = []
        self._process_bytes = 0
        if engine_has_process(stage) and isinstance(stage.engine, VLLMEngineConfig):
            self._process_bytes = vllm_bytes(stage.engine, model, precision)
        self._components: list[Offloadable] = []
        if has_weights:
            self._components.append(offload_tensors(POLICY, model.parameters, folder, device.type))
        if isinstance(engine, NativeEngine):  # the only one with memory in this process
            core = engine.core
            self._components += [
                RebuildableComponent(CAST, core.weights.bytes, destroy=core.destroy_weights),
                RebuildableComponent(_CACHE, core.cache_bytes, destroy=core.destroy_cache),
            ]
        tier: StorageTier = "disk" if device.type == "cpu" else "memory"
        tiers: dict[str, StorageTier] = {POLICY: tier, CAST: "destroyed", _CACHE: "destroyed", _REWARDS: tier}
        plan = OffloadPlan({_HERE: dict.fromkeys(tiers, "device"), _OFFLOADED: tiers}, {})
        self._manager = OffloadManager(self._components, plan, device)
        self._moving = asyncio.Lock()
        self._moved: dict[str, float] = defaultdict(float)
        self.is_offloaded = False

    async def offload(self) -> None:
        """Free the device once nothing is generated any more. Raises OffloadError if there is no room elsewhere."""
        async with self._moving:
            if self.is_offloaded:
                return
            self._find_scorers()
            await self._engine.drain()
            await self._end_process()
            await asyncio.to_thread(self._manager.enter, _OFFLOADED)  # the trainer's questions are answered meanwhile
            self.is_offloaded = True

    async def _end_process(self) -> None:
        """End vLLM's process, if there is one."""
        if not self._process_bytes:
            return
        began, before = time.perf_counter(), self._engine.counters().get("destroyed", 0)
        await self._engine.sleep(destroy=True)
        if ended := self._engine.counters().get("destroyed", 0) - before:
            self._moved["engine/destroyed"] += ended
            self._moved[f"{MOVED}/gb"] += self._process_bytes / GB
            self._moved[f"{MOVED}/seconds"] += time.perf_counter() - began

    async def restore(self) -> None:
        """Bring everything back, apart from vLLM's process, which its first request starts."""
        async with self._moving:
            if self.is_offloaded:
                await asyncio.to_thread(self._manager.enter, _HERE)
                self.is_offloaded = False

    def device_bytes(self) -> dict[str, int]:
        """Bytes of each component that is on the device now; those of vLLM's process are an estimate."""
        self._find_scorers()
        found: Counter[str] = Counter()
        for each in self._components:
            found[each.name] += each.bytes()
        found[ENGINE] = 0 if self.is_offloaded else self._process_bytes
        return {name: size for name, size in found.items() if size}

    def metrics(self) -> dict[str, float]:
        """Moves since the last call."""
        moved, self._moved = self._moved, defaultdict(float)
        for key, value in self._manager.metrics().items():
            if key.startswith("residency/"):
                moved[f"{MOVED}/{key.rpartition('/')[2]}"] += value
        return dict(moved)

    def close(self) -> None:
        """Bring back what the process uses in later stages, and free all copies."""
        self._manager.close()

    def _find_scorers(self) -> None:
        """Take over reward models that have been loaded meanwhile."""
        for scorer in loaded_reward_models(self._rewards, str(self._device)):
            if scorer not in self._scorers:
                self._scorers.append(scorer)
                weights = offload_tensors(_REWARDS, scorer.model.parameters, self._folder, self._device.type)
                scorer.wake = partial(weights.move, "device")
                self._components.append(ThreadBoundComponent(weights, scorer.thread))
