"""Moves what has to move before a phase begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_map_only

from rollmill.config.offload import Phase
from rollmill.models.storage import view_storage_like
from rollmill.offload.components import Offloadable
from rollmill.offload.plan import GB, OffloadPlan, StorageTier
from rollmill.trackers.host_memory import peak_rss, reset_peak_rss, trim_heap

# The most memory that each phase takes: resident set of the process on a CPU, torch's allocations on a GPU.


class PhasePeakMemory:
    """Peaks by phase, in bytes. A phase lasts until the next one begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """What is taken from now on is this phase's."""
        self._note()
        self._phase = phase

    def take(self) -> dict[str, int]:
        """The peaks since the last call."""
        self._note()
        taken, self._peaks = self._peaks, {}
        return taken

    def _note(self) -> None:
        """Read the mark, and set it back to what is taken now."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            peak = peak_rss()
            reset_peak_rss()
        if self._phase is not None:
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0))


POLICY, CAST = "policy", "cast"  #: the engine's cast is made from the policy
_SHARED_BY_STAGES = (POLICY, "rewards")  #: the next stage has the same ones


class OffloadManager:
    """Residents and the plan they follow. At first everything is on the device."""

    def __init__(self, residents: Sequence[Offloadable], plan: OffloadPlan, device: torch.device) -> None:
        self.plan, self._device = plan, device
        self._residents = residents
        self._peaks = PhasePeakMemory(device)
        self._phase: Phase | None = None
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}

    def enter(self, phase: Phase) -> bool:
        """A phase begins: what it has no use for leaves, then what it needs comes. Whether anything was copied.

        Raises:
            OffloadError: there is no room where something goes; it is where it was, and others may have left: what a
                phase needs comes when one is entered again.
        """
        if phase == self._phase:
            return False
        self._phase = None
        places = self.plan.places[phase]
        going = [each for each in self._residents if places[each.name] != "device" and each.name != POLICY]
        others = [each for each in self._residents if each not in going]
        left = sum(self._move(each, places[each.name]) for each in going)
        if left:
            self._give_back()
        self._peaks.begin(phase)
        stays = places[POLICY] == "device"
        turns = {POLICY: 0 if stays else 2, CAST: 1}  # when the cast is made the policy may go, and there is room
        others.sort(key=lambda each: turns.get(each.name, 3))
        came = sum(self._move(each, places[each.name]) for each in others)
        if not stays:
            self._give_back()
        self._phase = phase
        return left + came > 0

    def whole(self, state: Any) -> Any:
        """`state` (dicts and lists of tensors) with copies in the place of tensors whose memory is away: what a
        checkpoint keeps. The copies are read where they are, so nothing comes back for it.
        """
        copies = {address: copy for each in self._residents for address, copy in each.copies().items()}

        def present(tensor: Tensor) -> Tensor:
            copy: UntypedStorage | None = copies.get(tensor.untyped_storage()._cdata)
            return tensor if copy is None else view_storage_like(copy, tensor)

        return tree_map_only(Tensor, present, state)

    def metrics(self) -> dict[str, float]:
        """Since the last call: memory/PHASE, the peak in GB, and of what was moved residency/NAME/gb and /seconds."""
        found = {f"memory/{phase}": peak / GB for phase, peak in self._peaks.take().items()}
        for name, moved in self._bytes.items():
            found |= {f"residency/{name}/gb": moved / GB, f"residency/{name}/seconds": self._seconds[name]}
        self._seconds, self._bytes = {}, {}
        return found

    def close(self) -> None:
        """Bring back what others go on with, and free what the rest has elsewhere."""
        for each in self._residents:
            if each.name in _SHARED_BY_STAGES:
                each.move("device")
            each.close()
        self._phase = None

    def _move(self, resident: Offloadable, place: StorageTier) -> int:
        began = time.perf_counter()
        moved = resident.move(place)
        if moved:
            name = resident.name
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
            self._bytes[name] = self._bytes.get(name, 0) + moved
        return moved

    def _give_back(self) -> None:
        """To the system: glibc keeps what is freed, in case it is wanted again."""
        if self._device.type == "cpu":
            trim_heap()
