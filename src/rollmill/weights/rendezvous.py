"""Where a sender and its receivers agree on transfers: a store of torch.distributed in the sender's process.

    layout, newest    of the weights, as JSON; the newest version
    wishes, wish/N    how many there were; one of them
    answer/N          what the sender says to it
    failure           what the sender's last failed transfer failed by
    group/N/...       how the members of a group find each other

All keys are below the sender's name, which is hard to guess: who knows the port alone learns nothing.
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
    """A receiver asks for the newest version."""

    member: str  #: who it is; no other receiver is called so
    group: int  #: the number of the group it is in; -1: none
    gpu: str  #: its own, see `gpu_of`


@dataclass(frozen=True, slots=True)
class TransferAssignment:
    """The receiver takes part in the next transfer of a group, as this rank of so many."""

    group: int
    rank: int
    size: int
    nccl: bool
    version: int
    checksum: int


class Rendezvous:
    """One side's access to the store.

    Args:
        store: with the keys of one sender.
        host: the address of this host by which the other side reaches it.
    """

    def __init__(self, store: TCPStore, name: str, host: str) -> None:
        self.store, self.host = PrefixStore(name, store), host
        self._seen = 0
        self._awaited: set[int] = set()  # announced, but not there yet: for good, where a receiver dies just then

    def publish_layout(self, layout: BlockLayout) -> None:
        """The sender's first word: what it sends."""
        self.store.set("layout", layout.to_json())

    def layout(self) -> BlockLayout:
        """What is sent."""
        return BlockLayout.from_json(self.store.get("layout").decode())

    def newest(self) -> int | None:
        """The newest version; None before the first."""
        return int(self.store.get("newest")) if self.store.check(["newest"]) else None

    def announce(self, version: int) -> None:
        """The sender has a newer version."""
        self.store.set("newest", str(version))

    def ask(self, wish: TransferRequest) -> int:
        """The number of the wish."""
        number = self.store.add("wishes", 1)
        self.store.set(f"wish/{number}", json.dumps(asdict(wish)))
        return number

    def asked(self) -> Iterator[tuple[int, TransferRequest]]:
        """Wishes that have come since the last call."""
        count = self.store.add("wishes", 0)
        self._awaited |= set(range(self._seen + 1, count + 1))
        self._seen = count
        for number in sorted(self._awaited):
            if (text := self._taken(f"wish/{number}")) is not None:
                self._awaited.remove(number)
                yield number, TransferRequest(**json.loads(text))

    def answer(self, number: int, answer: TransferAssignment) -> None:
        """The sender's answer to the wish of that number."""
        self.store.set(f"answer/{number}", json.dumps(asdict(answer)))

    def answered(self, number: int) -> TransferAssignment | None:
        """The answer to one's wish, if it has come."""
        text = self._taken(f"answer/{number}")
        return None if text is None else TransferAssignment(**json.loads(text))

    def report_failure(self, text: str) -> None:
        """What made the sender's last transfer fail, for receivers' messages."""
        self.store.set("failure", text)

    def failure(self) -> str:
        """See `tell_failure`; "" where none has failed."""
        return self.store.get("failure").decode() if self.store.check(["failure"]) else ""

    def _taken(self, key: str) -> bytes | None:
        """What was there, and is no longer."""
        if not self.store.check([key]):
            return None
        value = self.store.get(key)
        self.store.delete_key(key)
        return value


def serve_rendezvous(host: str, name: str, deadline_s: float) -> tuple[Rendezvous, str]:
    """A new store on this host, on a free port of this address alone, and where receivers find it: HOST:PORT/NAME.

    Raises WeightSyncError where this host has no such address.
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
    """The store at HOST:PORT/NAME. Raises torch's DistNetworkError where there is none."""
    place, _, name = address.partition("/")
    host, _, port = place.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, int(port)))  # sends nothing; says which of this host's addresses leads there
        own = way.getsockname()[0]
    store = TCPStore(host, int(port), None, False, timedelta(seconds=deadline_s), False)
    return Rendezvous(store, name, own)
