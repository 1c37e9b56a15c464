"""Weights by broadcast: receivers in processes of their own, which come late, are killed, or get damaged bytes."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmill.errors import DeadlineError, WeightSyncError
from rollmill.weights import BroadcastReceiver, BroadcastSender, broadcast_group
from rollmill.weights.broadcast_group import BroadcastGroup
from rollmill.weights.rendezvous import Rendezvous, TransferAssignment, TransferRequest, join_rendezvous

HERE, SMALL = "127.0.0.1", 4096
SLOTS = mp.get_context("forkserver")
SLOTS.set_forkserver_preload(["rollmill.weights"])


def weights(version: int) -> dict[str, Tensor]:
    """All of a version; every element tells which one."""
    made = {"a": torch.full((1000, 7), 1.0), "b": torch.full((13,), 2.0).bfloat16(), "c": torch.full((5000,), 3.0)}
    return {name: each * (version + 1) for name, each in made.items()}


def whole(found: dict[str, Tensor], version: int) -> bool:
    return all(torch.equal(found[name], each) for name, each in weights(version).items())


def receives(address: str, commands: Connection, transfer_s: float) -> None:
    """A process that receives when it is told how, and says what it got: a version that is whole, or an error."""
    torch.set_num_threads(1)
    broadcast_group.BUCKET_BYTES = SMALL
    receiver = BroadcastReceiver(address, transfer_s=transfer_s)
    while (habit := commands.recv()) is not None:
        if habit == "dies before":
            receiver._leave()  # of the group, so that another one has to be made
        _behave(habit)
        into = {name: torch.zeros_like(each) for name, each in weights(0).items()}
        try:
            version = receiver.receive(into)
            commands.send(version if whole(into, version) else "torn")
        except WeightSyncError as error:
            commands.send(str(error))
    receiver.close()


def _behave(habit: str) -> None:
    """From now on the process dies in a transfer, or before one, or is sent other bytes than those of the trainer."""
    finish, broadcast, arrived = BroadcastGroup._finish, BroadcastGroup.broadcast, 0

    def dies_before(*arguments: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dies_between(self: BroadcastGroup, work: Any) -> None:
        nonlocal arrived
        finish(self, work)
        arrived += 1
        if arrived == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def damages(self: BroadcastGroup, block: Tensor) -> None:
        broadcast(self, block)
        block[5] ^= 1
        if habit == "is damaged once":
            BroadcastGroup.broadcast = broadcast  # type: ignore[method-assign]

    match habit:
        case "dies before":
            BroadcastGroup.__init__ = dies_before  # type: ignore[method-assign]
        case "dies between":
            BroadcastGroup._finish = dies_between  # type: ignore[method-assign]
        case "is damaged" | "is damaged once":
            BroadcastGroup.broadcast = damages  # type: ignore[method-assign]


class Explorer:
    """Such a process, seen from here."""

    def __init__(self, address: str, transfer_s: float = 2.0) -> None:
        self._pipe, theirs = SLOTS.Pipe()
        self.process = SLOTS.Process(target=receives, args=(address, theirs, transfer_s), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, habit: str = "") -> None:
        self._pipe.send(habit)

    def got(self, seconds: float = 30.0) -> Any:
        assert self._pipe.poll(seconds), "it hangs"
        return self._pipe.recv()

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
        self.process.join(10)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", SMALL)


@pytest.fixture
def sender() -> Iterator[BroadcastSender]:
    made = BroadcastSender(HERE, "name", weights(0), window_s=1.0, deadline_s=2.0)
    yield made
    made.close()


@pytest.fixture
def patient() -> Iterator[BroadcastSender]:
    made = BroadcastSender(HERE, "name", weights(0), window_s=10.0, deadline_s=20.0)
    yield made
    made.close()


def all_get(explorers: list[Explorer], version: int) -> None:
    for each in explorers:
        each.ask()
    assert [each.got() for each in explorers] == [version] * len(explorers)


@pytest.mark.slow
def test_every_version_reaches_all_by_one_broadcast(patient: BroadcastSender, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = BroadcastSender._create_group

    def made(self: BroadcastSender, size: int, nccl: bool) -> BroadcastGroup:
        sizes.append(size)
        return plain(self, size, nccl)

    monkeypatch.setattr(BroadcastSender, "_create_group", made)
    explorers = [Explorer(patient.address, 20.0) for _ in range(3)]
    for version in range(6):
        patient.send(version, weights(version))
        all_get(explorers, version)
    assert sizes[-1] == 4
    assert len(sizes) <= 4, "one for each that came, and then one for all, which stays"
    for each in explorers:
        each.end()
        assert each.process.exitcode == 0


def test_who_comes_late_gets_the_newest_version_whatever_the_trainer_does(sender: BroadcastSender) -> None:
    mine = weights(3)
    sender.send(3, mine)
    for each in mine.values():
        each.zero_()  # in the middle of a step
    first = Explorer(sender.address)
    all_get([first], 3)
    sender.send(4, weights(4))
    second = Explorer(sender.address)
    all_get([first, second], 4)
    all_get([second], 4)
    for each in (first, second):
        each.end()


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["dies between", "dies before"])
def test_who_is_killed_in_a_transfer_keeps_nobody_from_the_weights(sender: BroadcastSender, habit: str) -> None:
    explorers, dying = [Explorer(sender.address) for _ in range(2)], Explorer(sender.address)
    sender.send(0, weights(0))
    all_get([*explorers, dying], 0)
    sender.send(1, weights(1))
    dying.ask(habit)
    all_get(explorers, 1)
    dying.process.join(10)
    assert dying.process.exitcode == -signal.SIGKILL
    another = Explorer(sender.address)
    sender.send(2, weights(2))
    all_get([*explorers, another], 2)
    for each in [*explorers, another]:
        each.end()


def test_damaged_weights_are_sent_again_and_are_an_error_in_the_end(sender: BroadcastSender) -> None:
    sender.send(0, weights(0))
    explorers = [Explorer(sender.address) for _ in range(3)]
    for each, habit in zip(explorers, ("", "is damaged once", "is damaged"), strict=True):
        each.ask(habit)
    assert [each.got() for each in explorers[:2]] == [0, 0]
    said = explorers[2].got()
    assert f"weights from {sender.address} did not arrive whole in 5 transfers; the last one: they arrived dam" in said
    for each in explorers:
        each.end()


@pytest.mark.slow
def test_never_torn_and_never_older_while_versions_follow_each_other(sender: BroadcastSender) -> None:
    explorers = [Explorer(sender.address) for _ in range(2)]
    sender.send(0, weights(0))
    found: dict[int, list[int]] = {n: [] for n in range(2)}

    def ask(number: int) -> None:
        for _ in range(15):
            explorers[number].ask()
            found[number].append(explorers[number].got())

    threads = [threading.Thread(target=ask, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    version = 0
    while any(thread.is_alive() for thread in threads):
        version += 1
        sender.send(version, weights(version))
        time.sleep(0.002)
    for versions in found.values():
        assert len(versions) == 15
        assert versions == sorted(versions)
        assert versions[-1] > 0
    for each in explorers:
        each.end()


def receiver_of(sender: BroadcastSender, deadline_s: float = 20.0) -> BroadcastReceiver:
    return BroadcastReceiver(sender.address, deadline_s=deadline_s)


def test_types_may_differ_and_shapes_may_not() -> None:
    sender = BroadcastSender(HERE, "name", weights(0), dtype=torch.bfloat16)
    receiver = receiver_of(sender)
    assert receiver.newest() is None
    sender.send(5, weights(5))
    into = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in weights(0).items()}
    receiver.fetch()
    assert receiver.receive(into) == 5
    assert receiver.newest() == 5
    assert torch.equal(into["a"], weights(5)["a"].double())
    with pytest.raises(WeightSyncError, match=r"a of the engine's model has shape \(3,\); the sent one is"):
        receiver.receive(weights(0) | {"a": torch.zeros(3)})
    with pytest.raises(WeightSyncError, match="the trainer's model has no tensor b"):
        sender.send(6, {name: each for name, each in weights(0).items() if name != "b"})
    receiver.close()
    sender.close()


def test_waiting_has_a_deadline_and_a_closed_receiver_wants_nothing(sender: BroadcastSender) -> None:
    with pytest.raises(DeadlineError, match="an explorer waited 0 s for weights from "):
        receiver_of(sender, 0.05).receive(weights(0))
    receiver = receiver_of(sender)
    raised: list[Exception] = []

    def fetch() -> None:
        try:
            receiver.fetch()
        except WeightSyncError as error:
            raised.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    time.sleep(0.05)
    receiver.close()
    thread.join(5)
    assert "is closed" in str(raised)


def test_a_sender_that_is_gone_is_an_error() -> None:
    pipe, theirs = SLOTS.Pipe()
    process = SLOTS.Process(target=_sends, args=(theirs,), daemon=True)
    process.start()
    receiver = BroadcastReceiver(pipe.recv())
    into = weights(7)
    assert receiver.receive(into) == 0
    process.kill()
    process.join()
    with pytest.raises(WeightSyncError, match=r"the sender of weights at .* is gone"):
        receiver.receive(into)
    assert whole(into, 0)


def _sends(pipe: Connection) -> None:
    broadcast_group.BUCKET_BYTES = SMALL
    sender = BroadcastSender(HERE, "name", weights(0))
    sender.send(0, weights(0))
    pipe.send(sender.address)
    time.sleep(60)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="weights cannot be sent from 192"):
        BroadcastSender("192.0.2.1", "name", weights(0))


def test_a_wish_that_is_never_written_delays_nobody(sender: BroadcastSender) -> None:
    meeting = join_rendezvous(sender.address, 5.0)
    meeting.store.add("wishes", 1)  # and dies
    sender.send(0, weights(0))
    into = weights(7)
    receiver = receiver_of(sender)
    assert receiver.receive(into) == 0
    assert whole(into, 0)
    receiver.close()


def test_wishes_and_answers_are_read_once(sender: BroadcastSender) -> None:
    mine, theirs = (Rendezvous(join_rendezvous(sender.address, 5.0).store, "apart", HERE) for _ in range(2))
    wish, answer = TransferRequest("who", -1, ""), TransferAssignment(3, 1, 2, False, 7, 2**64 - 1)
    number = theirs.ask(wish)
    assert theirs.answered(number) is None
    assert list(mine.asked()) == [(number, wish)]
    assert not list(mine.asked())
    mine.answer(number, answer)
    assert theirs.answered(number) == answer
    assert theirs.answered(number) is None


@pytest.mark.parametrize(
    ("mine", "others", "chosen"),
    [
        ("", ["x"], False),
        ("x", [""], False),
        ("x", ["y", "x"], False),
        ("x", ["y", "y"], False),
        ("x", ["y", "z"], True),
    ],
)
def test_nccl_is_for_gpus_of_their_own(sender: BroadcastSender, mine: str, others: Iterable[str], chosen: bool) -> None:
    sender._gpu = mine
    assert sender._can_use_nccl([TransferRequest("", -1, gpu) for gpu in others]) == chosen
