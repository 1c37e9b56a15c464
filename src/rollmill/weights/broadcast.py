"""Weights from the trainer to explorers on any hosts: kept by the sender, and broadcast to those that ask.

Receivers ask when they are told that there is a newer version, when they come late, and again when a transfer failed.
So one that dies or is new is no special case: the next group is of those that ask then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollmill.errors import DeadlineError
from rollmill.weights.broadcast_group import BroadcastGroup, gpu_uuid
from rollmill.weights.checksum import pack_block
from rollmill.weights.layout import BlockLayout
from rollmill.weights.rendezvous import TransferAssignment, TransferRequest, serve_rendezvous

_POLL_S = 0.003
_END_S = 5.0


@dataclass(frozen=True, eq=False, slots=True)
class _Packed:
    version: int
    checksum: int
    block: Tensor


class BroadcastSender:
    """Packs versions into two blocks in turn; a thread sends the newer one. So the trainer may change its parameters
    as soon as `send` returns. `address` is where a BroadcastReceiver finds it.

    Args:
        host: the address of this host by which receivers reach it.
        name: hard to guess; no other sender's.
        dtype: what floating-point tensors are sent as; None leaves each as it is.
        device: the trainer's, if NCCL shall be used where this and all receivers' are GPUs of their own.
        window_s: how long one that asks waits for others that lack the newest version, too.
        deadline_s: how long a member of a group may take to come, and a bucket to arrive.
    """

    def __init__(
        self,
        host: str,
        name: str,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        window_s: float = 0.5,
        deadline_s: float = 30.0,
    ) -> None:
        self.layout = BlockLayout.of(weights, dtype)
        self._host, self._device, self._window_s, self._deadline_s = host, device, window_s, deadline_s
        self._gpu = "" if device is None else gpu_uuid(device)
        self._blocks = [torch.zeros(self.layout.size, dtype=torch.uint8) for _ in range(2)]
        self._newest: _Packed | None = None
        self._sent_now: Tensor | None = None  # the block that is on its way
        self._changed = threading.Condition()
        self._meeting, self.address = serve_rendezvous(host, name, deadline_s)
        self._meeting.publish_layout(self.layout)
        self._asked: dict[str, tuple[int, TransferRequest]] = {}  # by member
        self._has: dict[str, int] = {}  # version by member, of those that will ask for the next one; -1: it failed
        self._group: BroadcastGroup | None = None
        self._members: tuple[str, ...] = ()  # of the group, in the order of their ranks
        self._number = 0
        self._closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="rollmill-broadcast", daemon=True)
        self._thread.start()

    def send(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """See WeightSender."""
        if self._failure is not None:
            raise self._failure
        self.layout.require(weights, "the trainer's model")
        block = self._blocks[0 if self._newest is None or self._newest.block is self._blocks[1] else 1]
        with self._changed:
            if not self._changed.wait_for(lambda: self._sent_now is not block, 10 * self._deadline_s):
                advice = "The network is too slow for them, or one hangs; see `rollmill status`."
                raise DeadlineError("the trainer", "explorers that get older weights", 10 * self._deadline_s, advice)
        packed = _Packed(version, pack_block(weights, self.layout, block), block)
        with self._changed:
            self._newest = packed

    def close(self) -> None:
        """End the thread; receivers keep what they have."""
        self._closed = True
        self._leave()
        self._thread.join(_END_S)

    def _serve(self) -> None:
        announced = None
        try:
            while not self._closed:
                if self._newest is not None and self._newest.version != announced:
                    announced = self._newest.version
                    self._meeting.announce(announced)
                if wishes := self._gather():
                    self._transfer(wishes)
                else:
                    time.sleep(_POLL_S)
        except Exception as error:
            self._failure = error  # raised by the next `send`

    def _gather(self) -> dict[str, tuple[int, TransferRequest]]:
        """Those that take part in the next transfer; none, if none has asked."""
        self._look()
        if not self._asked or self._newest is None:
            return {}
        ends = time.monotonic() + self._window_s
        while (lacking := self._lacking()) and time.monotonic() < ends and not self._closed:
            time.sleep(_POLL_S)
            self._look()
        for member in lacking:
            del self._has[member]  # dead, or busy for long: nobody waits for it until it has asked
        asked, self._asked = self._asked, {}
        return asked

    def _look(self) -> None:
        for number, wish in self._meeting.asked():
            self._asked[wish.member] = number, wish

    def _lacking(self) -> set[str]:
        """Who will ask for the newest version, and has not."""
        assert self._newest is not None
        return {who for who, version in self._has.items() if version != self._newest.version} - set(self._asked)

    def _transfer(self, asked: dict[str, tuple[int, TransferRequest]]) -> None:
        """Send the newest version to those that asked. Where it fails they ask again."""
        with self._changed:
            packed = self._newest
            assert packed is not None
            self._sent_now = packed.block
        group = self._group if self._stays(asked) else None
        if group is None:
            self._leave()
            self._number, self._members = self._number + 1, tuple(asked)
        nccl = self._nccl([wish for _, wish in asked.values()])
        size = len(self._members) + 1
        for rank, member in enumerate(self._members, 1):
            answer = TransferAssignment(self._number, rank, size, nccl, packed.version, packed.checksum)
            self._meeting.answer(asked[member][0], answer)
        try:
            if group is None:
                group = self._group = self._made(size, nccl)
            group.broadcast(packed.block)
            self._has |= dict.fromkeys(asked, packed.version)
        except RuntimeError as error:
            del group  # the last reference: its connections end with it
            self._leave()
            self._has |= dict.fromkeys(asked, -1)
            self._meeting.report_failure(str(error).splitlines()[0])
        finally:
            with self._changed:
                self._sent_now = None
                self._changed.notify_all()

    def _stays(self, asked: dict[str, tuple[int, TransferRequest]]) -> bool:
        """Whether exactly the members of the group have asked, and none has left it."""
        present = all(wish.group == self._number for _, wish in asked.values())
        return present and set(asked) == set(self._members)

    def _nccl(self, wishes: list[TransferRequest]) -> bool:
        gpus = [self._gpu, *(wish.gpu for wish in wishes)]
        return all(gpus) and len(set(gpus)) == len(gpus)

    def _made(self, size: int, nccl: bool) -> BroadcastGroup:
        device = self._device if nccl else None
        store, seconds = self._meeting.store, self._deadline_s
        return BroadcastGroup(store, self._number, 0, size, self._host, device=device, deadline_s=seconds)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
