"""Moves components as the offload plan requires before each phase, and measures the peak memory of phases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_map_only

from rollmill.config.offload import Phase
from rollmill.models.cpu.host_memory import peak_rss, reset_peak_rss, trim_heap
from rollmill.models.storage import view_storage_like
from rollmill.offload.components import Offloadable
from rollmill.offload.plan import GB, OffloadPlan, StorageTier


class PhasePeakMemory:
    """Peak memory by phase in bytes: the process's component set on a CPU, torch's allocations on a GPU.

    A phase lasts until the next one begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        self._record()
        self._phase = phase

    def take(self) -> dict[str, int]:
        """Returns and clears the peaks since the last call."""
        self._record()
        taken, self._peaks = self._peaks, {}
        return taken

    def _record(self) -> None:
        """Records the peak and resets the counter."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            peak = peak_rss()
            reset_peak_rss()
        if self._phase is not None:
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0))


POLICY, CAST = "policy", "cast"  #: the engine's cast is built from the policy
_SHARED_BY_STAGES = (POLICY, "rewards")  #: used by the next stage as well


class OffloadManager:
    """Moves components according to a plan. Initially everything is on the device."""

    def __init__(self, components: Sequence[Offloadable], plan: OffloadPlan, device: torch.device) -> None:
        self.plan, self._device = plan, device
        self._components = components
        self._peaks = PhasePeakMemory(device)
        self._phase: Phase | None = None
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}

    def enter(self, phase: Phase) -> bool:
        """Enters a phase: offloads what it does not need, then loads what it needs. Returns whether anything was
        copied.

        Raises:
            OffloadError: a target has no room. The component stays, others may have moved; entering a phase again loads
                what it needs.
        """
        if phase == self._phase:
            return False
        self._phase = None
        places = self.plan.places[phase]
        leaving = [each for each in self._components if places[each.name] != "device" and each.name != POLICY]
        others = [each for each in self._components if each not in leaving]
        left = sum(self._move(each, places[each.name]) for each in leaving)
        if left:
            self._release_memory()
        self._peaks.begin(phase)
        stays = places[POLICY] == "device"
        turns = {POLICY: 0 if stays else 2, CAST: 1}  # once the cast is built the policy may leave, which makes room
        others.sort(key=lambda each: turns.get(each.name, 3))
        loaded = sum(self._move(each, places[each.name]) for each in others)
        if not stays:
            self._release_memory()
        self._phase = phase
        return left + loaded > 0

    def device_bytes(self, phase: Phase) -> dict[str, int]:
        """Bytes of each component that is on the device in a phase; those of gradients, and of an engine in a process
        of its own, are estimates."""
        places = self.plan.places[phase]
        sizes = dict(self.plan.components) | {each.name: each.bytes() for each in self._components}
        return {name: sizes[name] for name, place in places.items() if place == "device" and sizes.get(name)}

    def whole(self, state: Any) -> Any:
        """Replaces offloaded tensors in `state` (dicts and lists of tensors) with their copies, for a checkpoint.

        The copies are used where they are, so nothing is loaded.
        """
        copies = {address: copy for each in self._components for address, copy in each.copies().items()}

        def present(tensor: Tensor) -> Tensor:
            copy: UntypedStorage | None = copies.get(tensor.untyped_storage()._cdata)
            return tensor if copy is None else view_storage_like(copy, tensor)

        return tree_map_only(Tensor, present, state)

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call: memory/PHASE (peak in GB), and residency/NAME/gb and /seconds of what
        was moved.
        """
        found = {f"memory/{phase}": peak / GB for phase, peak in self._peaks.take().items()}
        for name, moved in self._bytes.items():
            found |= {f"residency/{name}/gb": moved / GB, f"residency/{name}/seconds": self._seconds[name]}
        self._seconds, self._bytes = {}, {}
        return found

    def close(self) -> None:
        """Loads what later stages use, and frees all copies."""
        for each in self._components:
            if each.name in _SHARED_BY_STAGES:
                each.move("device")
            each.close()
        self._phase = None

    def _move(self, component: Offloadable, place: StorageTier) -> int:
        began = time.perf_counter()
        moved = component.move(place)
        if moved:
            name = component.name
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
            self._bytes[name] = self._bytes.get(name, 0) + moved
        return moved

    def _release_memory(self) -> None:
        """Returns freed memory to the system, since glibc and torch's allocator keep it: on a GPU, for other processes
        there, such as vLLM."""
        if self._device.type == "cpu":
            trim_heap()
        elif self._device.type == "cuda":
            torch.cuda.empty_cache()
