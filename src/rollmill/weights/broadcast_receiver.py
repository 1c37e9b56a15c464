"""The explorer's side of weights that are broadcast: it asks for the newest version, and takes it over whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rollmill.errors import DeadlineError, WeightSyncError
from rollmill.weights.broadcast_group import BroadcastGroup, gpu_uuid
from rollmill.weights.checksum import compute_checksum
from rollmill.weights.layout import BlockLayout
from rollmill.weights.rendezvous import Rendezvous, TransferAssignment, TransferRequest, join_rendezvous

_POLL_S = 0.003
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
                time.sleep(_POLL_S)
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
