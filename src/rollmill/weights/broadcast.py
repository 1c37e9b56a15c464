"""Weights from the trainer to explorers on any hosts: kept by the sender, and broadcast to those that ask.

Receivers ask when they are told that there is a newer version, when they come late, and again when a transfer failed.
So one that dies or is new is no special case: the next group is of those that ask then.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rollmill.errors import DeadlineError, WeightSyncError
from rollmill.weights.broadcast_group import BroadcastGroup, gpu_uuid
from rollmill.weights.layout import BlockLayout, compute_checksum, pack_block
from rollmill.weights.rendezvous import (
    Rendezvous,
    TransferAssignment,
    TransferRequest,
    join_rendezvous,
    serve_rendezvous,
)

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


# The explorer's side of weights that are broadcast: it asks for the newest version, and takes it over whole.

_POLL_S_BROADCAST_RECEIVER = 0.003
_ATTEMPTS = 5
_CONNECT_S = 30.0


class BroadcastReceiver:
    """Gets what the BroadcastSender at `address` sends. One thread at a time may call `fetch` or `receive`.

    Args:
        device: where the weights go to in the end; see `device` of BroadcastSender.
        deadline_s: how long to wait for the sender to begin.
        transfer_s: how long a member of a group may take to come, and a bucket to arrive.
    """

    def __init__(
        self,
        address: str,
        *,
        device: torch.device | None = None,
        deadline_s: float = 300.0,
        transfer_s: float = 30.0,
    ) -> None:
        self._address, self._deadline_s, self._transfer_s = address, deadline_s, transfer_s
        self._device, self._gpu = device, "" if device is None else gpu_uuid(device)
        self._name = uuid.uuid4().hex
        self._meeting: Rendezvous | None = None
        self._layout = BlockLayout({})
        self._block = torch.zeros(0, dtype=torch.uint8)
        self._here: int | None = None  # the version of the block, until it is received
        self._group: BroadcastGroup | None = None
        self._closed = False

    def newest(self) -> int | None:
        """See WeightReceiver."""
        return self._met().newest()

    def fetch(self) -> None:
        """Bring the newest version into this process, for `receive`; the engine may go on meanwhile.

        Raises:
            WeightSyncError: the sender is gone, or the weights arrived damaged again and again.
            DeadlineError: it did not begin to send.
        """
        self._here, why = None, ""
        for _ in range(_ATTEMPTS):
            answer = self._answered()
            try:
                self._take_part(answer)
            except RuntimeError as error:
                why = str(error).splitlines()[0]
            else:
                if compute_checksum(self._layout, self._block) == answer.checksum:
                    self._here = answer.version
                    return
                why = "they arrived damaged"
            self._leave()
        text = f"weights from {self._address} did not arrive whole in {_ATTEMPTS} transfers; the last one: {why}"
        raise WeightSyncError(f"{text}. {self._said()}")

    def receive(self, into: Mapping[str, Tensor]) -> int:
        """See WeightReceiver; what `fetch` has brought, or else the newest version."""
        if self._here is None:
            self.fetch()
        self._require_open()
        version, self._here = self._here, None
        assert version is not None
        self._layout.require(into, "the engine's model")
        with torch.no_grad():
            for name, view in self._layout.tensors(self._block).items():
                into[name].detach().copy_(view)
        return version

    def close(self) -> None:
        """Leave the others; `fetch` ends with an error, if it is under way in another thread."""
        self._closed = True
        self._leave()

    def _answered(self) -> TransferAssignment:
        """Ask for the newest version, and wait for the sender's turn to send it."""
        ends = time.monotonic() + self._deadline_s
        try:
            meeting = self._met()
            number = meeting.ask(
                TransferRequest(self._name, -1 if self._group is None else self._group.number, self._gpu)
            )
            while (answer := meeting.answered(number)) is None:
                self._require_open()
                if time.monotonic() > ends:
                    advice = "Does the trainer train, and do others get weights?"
                    raise DeadlineError("an explorer", f"weights from {self._address}", self._deadline_s, advice)
                time.sleep(_POLL_S_BROADCAST_RECEIVER)
        except dist.DistError as error:
            raise WeightSyncError(f"the sender of weights at {self._address} is gone: {error}") from error
        return answer

    def _require_open(self) -> None:
        if self._closed:
            raise WeightSyncError(f"weights from {self._address} are no longer wanted")

    def _met(self) -> Rendezvous:
        if self._meeting is None:
            meeting = join_rendezvous(self._address, _CONNECT_S)
            self._layout = meeting.layout()
            self._block = torch.zeros(self._layout.size, dtype=torch.uint8)
            self._meeting = meeting
        return self._meeting

    def _take_part(self, answer: TransferAssignment) -> None:
        """Raises RuntimeError where another member ends, or is too slow."""
        group = self._group
        if group is None or group.number != answer.group:
            self._leave()
            meeting, device = self._met(), self._device if answer.nccl else None
            place = answer.group, answer.rank, answer.size, meeting.host
            group = self._group = BroadcastGroup(meeting.store, *place, device=device, deadline_s=self._transfer_s)
        group.broadcast(self._block)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _said(self) -> str:
        """What the sender says of it."""
        try:
            said = self._met().failure()
        except dist.DistError:
            return "The sender is gone"
        return f"The sender says: {said}" if said else "The sender noticed nothing"
