"""Broadcasts weights from the trainer to explorers on any hosts.

`BroadcastSender` keeps the newest version; each `BroadcastReceiver` requests it when a newer version is announced, when
it joins late, and again when a transfer failed. The next group consists of the receivers that request at that time, so
one that dies or is new needs no special handling.
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
from rollmill.weights.buckets import load_tensors, pack_block
from rollmill.weights.cuda_ipc import IPCSender
from rollmill.weights.layout import BlockLayout, compute_checksum
from rollmill.weights.rendezvous import (
    Rendezvous,
    TransferAssignment,
    TransferRequest,
    join_rendezvous,
    serve_rendezvous,
)

_POLL_S = 0.003
_END_S = 5.0
_ATTEMPTS = 5
_CONNECT_S = 30.0


@dataclass(frozen=True, eq=False, slots=True)
class _Packed:
    version: int
    checksum: int
    block: Tensor


class BroadcastSender:
    """Packs versions into two alternating blocks; a thread sends the newest one.

    The trainer may change its parameters as soon as `send` returns. `address` is for BroadcastReceiver.

    Args:
        host: address of this host that receivers can reach.
        name: unique and hard to guess.
        dtype: type to send floating-point tensors as; None keeps their types.
        device: the trainer's device, to use NCCL if this one and all receivers' are distinct GPUs.
        window_s: time that a request waits for those of other receivers without the newest version.
        deadline_s: timeout for a member to join a group, and for a bucket to arrive.
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
        self._sending: Tensor | None = None  # the block being sent
        self._changed = threading.Condition()
        self._rendezvous, self.address = serve_rendezvous(host, name, deadline_s)
        self._rendezvous.publish_layout(self.layout)
        self._requests: dict[str, tuple[int, TransferRequest]] = {}  # member -> (request number, request)
        self._versions: dict[str, int] = {}  # member -> its version, if it will request the next one; -1: failed
        self._group: BroadcastGroup | None = None
        self._members: tuple[str, ...] = ()  # members of the group, in order of their ranks
        self._number = 0
        self._closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="rollmill-broadcast", daemon=True)
        self._thread.start()

    def send(self, version: int, weights: Mapping[str, Tensor], readers: IPCSender | None = None) -> None:
        if self._failure is not None:
            raise self._failure
        self.layout.require(weights, "the trainer's model")
        block = self._blocks[0 if self._newest is None or self._newest.block is self._blocks[1] else 1]
        with self._changed:
            if not self._changed.wait_for(lambda: self._sending is not block, 10 * self._deadline_s):
                advice = "The network is too slow for them, or one hangs; see `rollmill status`."
                raise DeadlineError("the trainer", "explorers that get older weights", 10 * self._deadline_s, advice)
        packed = _Packed(version, pack_block(weights, self.layout, block, readers=readers), block)
        with self._changed:
            self._newest = packed

    def restore(self) -> None:
        """No-op: there are no files."""

    def close(self) -> None:
        """Ends the thread; receivers keep their weights."""
        self._closed = True
        self._leave()
        self._thread.join(_END_S)

    def _serve(self) -> None:
        announced = None
        try:
            while not self._closed:
                if self._newest is not None and self._newest.version != announced:
                    announced = self._newest.version
                    self._rendezvous.announce(announced)
                if requests := self._gather():
                    self._transfer(requests)
                else:
                    time.sleep(_POLL_S)
        except Exception as error:
            self._failure = error  # raised by the next `send`

    def _gather(self) -> dict[str, tuple[int, TransferRequest]]:
        """Collects the requests of the next transfer; empty if there are none."""
        self._poll_requests()
        if not self._requests or self._newest is None:
            return {}
        ends = time.monotonic() + self._window_s
        while (lacking := self._lacking()) and time.monotonic() < ends and not self._closed:
            time.sleep(_POLL_S)
            self._poll_requests()
        for member in lacking:
            del self._versions[member]  # dead or busy: do not wait for it until it requests again
        requests, self._requests = self._requests, {}
        return requests

    def _poll_requests(self) -> None:
        for number, request in self._rendezvous.asked():
            self._requests[request.member] = number, request

    def _lacking(self) -> set[str]:
        """Members that will request the newest version but have not yet."""
        assert self._newest is not None
        return {who for who, version in self._versions.items() if version != self._newest.version} - set(self._requests)

    def _transfer(self, requests: dict[str, tuple[int, TransferRequest]]) -> None:
        """Sends the newest version to the members that requested it. If it fails they request again."""
        with self._changed:
            packed = self._newest
            assert packed is not None
            self._sending = packed.block
        group = self._group if self._group_unchanged(requests) else None
        if group is None:
            self._leave()
            self._number, self._members = self._number + 1, tuple(requests)
        nccl = self._can_use_nccl([request for _, request in requests.values()])
        size = len(self._members) + 1
        for rank, member in enumerate(self._members, 1):
            answer = TransferAssignment(self._number, rank, size, nccl, packed.version, packed.checksum)
            self._rendezvous.answer(requests[member][0], answer)
        try:
            if group is None:
                group = self._group = self._create_group(size, nccl)
            group.broadcast(packed.block)
            self._versions |= dict.fromkeys(requests, packed.version)
        except RuntimeError as error:
            del group  # the last reference: closes its connections
            self._leave()
            self._versions |= dict.fromkeys(requests, -1)
            self._rendezvous.report_failure(str(error).splitlines()[0])
        finally:
            with self._changed:
                self._sending = None
                self._changed.notify_all()

    def _group_unchanged(self, requests: dict[str, tuple[int, TransferRequest]]) -> bool:
        """True if exactly the members of the group have requested, and none has left it."""
        present = all(request.group == self._number for _, request in requests.values())
        return present and set(requests) == set(self._members)

    def _can_use_nccl(self, requests: list[TransferRequest]) -> bool:
        gpus = [self._gpu, *(request.gpu for request in requests)]
        return all(gpus) and len(set(gpus)) == len(gpus)

    def _create_group(self, size: int, nccl: bool) -> BroadcastGroup:
        device = self._device if nccl else None
        store, seconds = self._rendezvous.store, self._deadline_s
        return BroadcastGroup(store, self._number, 0, size, self._host, device=device, deadline_s=seconds)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class BroadcastReceiver:
    """Receives what the BroadcastSender at `address` sends. Call `fetch` and `receive` from one thread at a time.

    Args:
        device: final device of the weights, to use NCCL if it is a GPU of its own, as the sender's and all others' are.
        deadline_s: timeout for the sender to begin.
        transfer_s: timeout for a member to join a group, and for a bucket to arrive.
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
        self._rendezvous: Rendezvous | None = None
        self._layout = BlockLayout({})
        self._block = torch.zeros(0, dtype=torch.uint8)
        self._fetched: int | None = None  # version in the block, until it is received
        self._group: BroadcastGroup | None = None
        self._closed = False

    def newest(self) -> int | None:
        return self._connect().newest()

    def fetch(self) -> None:
        """Brings the newest version into this process, for `receive`; the engine may continue meanwhile.

        Raises:
            WeightSyncError: the sender is gone, or the weights repeatedly arrived damaged.
            DeadlineError: the sender did not begin in time.
        """
        self._fetched, why = None, ""
        for _ in range(_ATTEMPTS):
            answer = self._request_transfer()
            try:
                self._take_part(answer)
            except RuntimeError as error:
                why = str(error).splitlines()[0]
            else:
                if compute_checksum(self._layout, self._block) == answer.checksum:
                    self._fetched = answer.version
                    return
                why = "they arrived damaged"
            self._leave()
        text = f"weights from {self._address} did not arrive whole in {_ATTEMPTS} transfers; the last one: {why}"
        raise WeightSyncError(f"{text}. {self._describe_failure()}")

    def receive(self, into: Mapping[str, Tensor]) -> int:
        """Takes the fetched version, or else the newest one."""
        if self._fetched is None:
            self.fetch()
        self._require_open()
        version, self._fetched = self._fetched, None
        assert version is not None
        self._layout.require(into, "the engine's model")
        load_tensors(self._layout, self._block, into)
        return version

    def close(self) -> None:
        """Leaves the group; a `fetch` in another thread raises."""
        self._closed = True
        self._leave()

    def _request_transfer(self) -> TransferAssignment:
        """Requests the newest version and waits for the sender's assignment."""
        ends = time.monotonic() + self._deadline_s
        try:
            rendezvous = self._connect()
            number = rendezvous.ask(
                TransferRequest(self._name, -1 if self._group is None else self._group.number, self._gpu)
            )
            while (answer := rendezvous.answered(number)) is None:
                self._require_open()
                if time.monotonic() > ends:
                    advice = "Does the trainer train, and do others get weights?"
                    raise DeadlineError("an explorer", f"weights from {self._address}", self._deadline_s, advice)
                time.sleep(_POLL_S)
        except dist.DistError as error:
            raise WeightSyncError(f"the sender of weights at {self._address} is gone: {error}") from error
        return answer

    def _require_open(self) -> None:
        if self._closed:
            raise WeightSyncError(f"the receiver of weights from {self._address} is closed")

    def _connect(self) -> Rendezvous:
        if self._rendezvous is None:
            rendezvous = join_rendezvous(self._address, _CONNECT_S)
            self._layout = rendezvous.layout()
            self._block = torch.zeros(self._layout.size, dtype=torch.uint8)
            self._rendezvous = rendezvous
        return self._rendezvous

    def _take_part(self, answer: TransferAssignment) -> None:
        """Joins the assigned group, if necessary, and takes part in the broadcast.

        Raises:
            RuntimeError: another member has ended, or is too slow.
        """
        group = self._group
        if group is None or group.number != answer.group:
            self._leave()
            rendezvous, device = self._connect(), self._device if answer.nccl else None
            place = answer.group, answer.rank, answer.size, rendezvous.host
            group = self._group = BroadcastGroup(rendezvous.store, *place, device=device, deadline_s=self._transfer_s)
        group.broadcast(self._block)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _describe_failure(self) -> str:
        """Describes the sender's last failure."""
        try:
            failure = self._connect().failure()
        except dist.DistError:
            return "The sender is gone"
        return f"The sender says: {failure}" if failure else "The sender noticed nothing"
