"""Coordinates transfers between a sender and its receivers, through a torch.distributed store in the sender's process.

    layout, newest    of the weights, as JSON; the newest version
    wishes, wish/N    number of requests so far; one request
    answer/N          the sender's assignment for request N
    failure           error of the sender's last failed transfer
    group/N/...       rendezvous of the members of a group

All keys are prefixed with the sender's name, which is hard to guess: knowing the port alone reveals nothing.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from rollmill.errors import WeightSyncError
from rollmill.weights.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """A receiver's request for the newest version."""

    member: str  #: unique name of the receiver
    group: int  #: number of its current group; -1: none
    gpu: str  #: identifier of the GPU, the same in all processes; "" without one


@dataclass(frozen=True, slots=True)
class TransferAssignment:
    """The receiver's place in the next transfer: group, rank and size."""

    group: int
    rank: int
    size: int
    nccl: bool
    version: int
    checksum: int


class Rendezvous:
    """Access to the store, for either side.

    Args:
        store: store with the keys of one sender.
        host: address of this host that the other side can reach.
    """

    def __init__(self, store: TCPStore, name: str, host: str) -> None:
        self.store, self.host = PrefixStore(name, store), host
        self._seen = 0
        self._pending: set[int] = set()  # counted but not written yet; never written if the receiver died in between

    def publish_layout(self, layout: BlockLayout) -> None:
        """Publishes the layout of the sender's weights, before anything else."""
        self.store.set("layout", layout.to_json())

    def layout(self) -> BlockLayout:
        """Layout of the sender's weights."""
        return BlockLayout.from_json(self.store.get("layout").decode())

    def newest(self) -> int | None:
        """The newest version; None before the first."""
        return int(self.store.get("newest")) if self.store.check(["newest"]) else None

    def announce(self, version: int) -> None:
        """Announces the sender's newest version."""
        self.store.set("newest", str(version))

    def ask(self, request: TransferRequest) -> int:
        """Submits a request and returns its number."""
        number = self.store.add("wishes", 1)
        self.store.set(f"wish/{number}", json.dumps(asdict(request)))
        return number

    def asked(self) -> Iterator[tuple[int, TransferRequest]]:
        """Yields the requests since the last call."""
        count = self.store.add("wishes", 0)
        self._pending |= set(range(self._seen + 1, count + 1))
        self._seen = count
        for number in sorted(self._pending):
            if (text := self._taken(f"wish/{number}")) is not None:
                self._pending.remove(number)
                yield number, TransferRequest(**json.loads(text))

    def answer(self, number: int, answer: TransferAssignment) -> None:
        """Sends the assignment for a request."""
        self.store.set(f"answer/{number}", json.dumps(asdict(answer)))

    def answered(self, number: int) -> TransferAssignment | None:
        """Returns the assignment for a request, or None if there is none yet."""
        text = self._taken(f"answer/{number}")
        return None if text is None else TransferAssignment(**json.loads(text))

    def report_failure(self, text: str) -> None:
        """Records why the sender's last transfer failed, for receivers' messages."""
        self.store.set("failure", text)

    def failure(self) -> str:
        """Returns the last report of `report_failure`, or ""."""
        return self.store.get("failure").decode() if self.store.check(["failure"]) else ""

    def _taken(self, key: str) -> bytes | None:
        """Removes and returns a value, or returns None."""
        if not self.store.check([key]):
            return None
        value = self.store.get(key)
        self.store.delete_key(key)
        return value


def serve_rendezvous(host: str, name: str, deadline_s: float) -> tuple[Rendezvous, str]:
    """Creates a store on a free port of this address; also returns its address for receivers, HOST:PORT/NAME.

    Raises:
        WeightSyncError: this host has no such address.
    """
    listener = socket.socket()
    try:
        listener.bind((host, 0))
    except OSError as error:
        raise WeightSyncError(f"weights cannot be sent from {host}: {error.strerror or error}") from error
    port = listener.getsockname()[1]
    store = TCPStore(host, port, None, True, timedelta(seconds=deadline_s), False, False, listener.detach())
    return Rendezvous(store, name, host), f"{host}:{port}/{name}"


def join_rendezvous(address: str, deadline_s: float) -> Rendezvous:
    """Connects to the store at HOST:PORT/NAME. Raises torch's DistNetworkError if there is none."""
    place, _, name = address.partition("/")
    host, _, port = place.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing; finds this host's address on the route
        own = probe.getsockname()[0]
    store = TCPStore(host, int(port), None, False, timedelta(seconds=deadline_s), False)
    return Rendezvous(store, name, own)
