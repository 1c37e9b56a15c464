"""Weights in shared memory: whole, verified, and never overwritten while someone reads them."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmill.errors import DeadlineError, WeightSyncError
from rollmill.weights import SharedMemoryReceiver, SharedMemorySender, shared_memory
from rollmill.weights.shared_memory import slot_files


def weights(value: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"a": torch.full((3, 5), value, dtype=dtype), "b": torch.full((7,), -value), "n": torch.tensor([int(value)])}


def empty() -> dict[str, Tensor]:
    return {name: torch.zeros_like(each) for name, each in weights(0).items()}


def test_what_is_sent_is_received_bit_by_bit(tmp_path: Path) -> None:
    sent = {"odd": torch.randn(1_000_003), "t": torch.randn(64, 32).t(), "h": torch.randn(5).bfloat16()}
    sender = SharedMemorySender(tmp_path / "w", sent)
    sender.send(4, sent)
    received = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in sent.items()}
    receiver = SharedMemoryReceiver(tmp_path / "w")
    assert receiver.receive(received) == 4
    for name, each in sent.items():
        assert torch.equal(each, received[name]), name
    receiver.close()
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_the_newest_version_is_received_and_cast(tmp_path: Path) -> None:
    sender = SharedMemorySender(tmp_path / "w", weights(0), dtype=torch.bfloat16)
    receiver, into = SharedMemoryReceiver(tmp_path / "w"), empty()
    for version in range(1, 6):
        sender.send(version, weights(version))
    assert (receiver.newest(), receiver.receive(into)) == (5, 5)
    assert torch.equal(into["a"], weights(5)["a"])
    assert into["n"] == 5
    assert next(iter(receiver.hold()[1].values())).dtype == torch.bfloat16


def test_a_held_version_is_not_overwritten(tmp_path: Path) -> None:
    """A receiver that does not release one keeps its memory; newer versions go to a new file."""
    sender = SharedMemorySender(tmp_path / "w", weights(0), deadline_s=0.05)
    receiver, other = (SharedMemoryReceiver(tmp_path / "w") for _ in range(2))
    sender.send(1, weights(1))
    version, views = receiver.hold()
    for newer in (2, 3, 4):
        sender.send(newer, weights(newer))
        assert other.receive(empty()) == newer
    assert version == 1
    assert torch.equal(views["a"], weights(1)["a"])
    version, views = receiver.hold()
    assert version == 4
    assert torch.equal(views["a"], weights(4)["a"])
    receiver.release()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["w.0", "w.1", "w.owner"]


def test_a_held_version_is_an_error_where_there_is_no_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = SharedMemorySender(tmp_path / "w", weights(0), deadline_s=0.05)
    sender.send(1, weights(1))
    sender.send(2, weights(2))
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        SharedMemoryReceiver(tmp_path / "w").hold()
        os.write(writer, b".")
        signal.pause()
        os._exit(0)
    os.read(reader, 1)
    sender.send(3, weights(3))  # the child holds version 2

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
    try:
        with pytest.raises(DeadlineError, match=rf"the trainer waited .* for process {child} on .*it is stopped") as e:
            sender.send(4, weights(4))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert "No space left on device" in str(e.value)
    sender.send(4, weights(4))


def test_a_damaged_version_is_an_error(tmp_path: Path) -> None:
    sender = SharedMemorySender(tmp_path / "w", weights(0))
    sender.send(1, weights(1))
    file = slot_files(tmp_path / "w")[0]
    data = bytearray(file.read_bytes())
    data[-sender.layout.size + 3] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
    with pytest.raises(WeightSyncError, match=r"w\.0: version 1 does not have the checksum"):
        SharedMemoryReceiver(tmp_path / "w").receive(empty())


def test_other_shapes_and_names_are_errors(tmp_path: Path) -> None:
    sender = SharedMemorySender(tmp_path / "w", weights(0))
    with pytest.raises(WeightSyncError, match=r"the trainer's model has no tensor b"):
        sender.send(1, {"a": torch.zeros(3, 5)})
    sender.send(1, weights(1))
    with pytest.raises(WeightSyncError, match=r"a of the engine's model has shape \(3,\); the sent one is \(3, 5\)"):
        SharedMemoryReceiver(tmp_path / "w").receive(empty() | {"a": torch.zeros(3)})
    with pytest.raises(WeightSyncError, match="c of the engine's model is not among the sent weights"):
        SharedMemoryReceiver(tmp_path / "w").receive(empty() | {"c": torch.zeros(3)})


def test_a_receiver_without_a_sender_names_what_it_waits_for(tmp_path: Path) -> None:
    receiver = SharedMemoryReceiver(tmp_path / "w", deadline_s=0.01)
    assert receiver.newest() is None
    with pytest.raises(DeadlineError, match=r"weights at .*/w"):
        receiver.receive(empty())


def test_a_sender_that_starts_again_is_followed(tmp_path: Path) -> None:
    receiver, into = SharedMemoryReceiver(tmp_path / "w"), empty()
    first = SharedMemorySender(tmp_path / "w", weights(0))
    first.send(9, weights(9))
    assert receiver.receive(into) == 9
    again = SharedMemorySender(tmp_path / "w", weights(0))
    again.send(8, weights(80))
    assert receiver.receive(into) == 8
    assert into["n"] == 80


def _send_for_ever(path: Path, size: int) -> None:
    torch.set_num_threads(1)
    sender = SharedMemorySender(path, {"w": torch.zeros(size)})
    version = 0
    while True:
        version += 1
        sender.send(version, {"w": torch.full((size,), float(version))})


@pytest.fixture
def sending(tmp_path: Path) -> Any:
    process = mp.get_context("spawn").Process(target=_send_for_ever, args=(tmp_path / "w", 300_000), daemon=True)
    process.start()
    yield process
    process.kill()
    process.join()


@pytest.mark.slow
def test_no_version_is_ever_torn(tmp_path: Path, sending: Any) -> None:
    receiver, into, seen = SharedMemoryReceiver(tmp_path / "w"), {"w": torch.zeros(300_000)}, set()
    receiver.receive(into)  # the sender has started
    ends = time.monotonic() + 30
    while len(seen) < 50 and time.monotonic() < ends:
        version = receiver.receive(into)
        assert into["w"].min() == into["w"].max() == version
        seen.add(version)
    assert len(seen) == 50


@pytest.mark.slow
def test_a_sender_that_is_killed_amid_a_version_leaves_the_last_one(tmp_path: Path, sending: Any) -> None:
    receiver, into = SharedMemoryReceiver(tmp_path / "w"), {"w": torch.zeros(300_000)}
    receiver.receive(into)
    for _ in range(3):
        time.sleep(0.01)
    os.kill(sending.pid, signal.SIGKILL)
    sending.join()
    version = receiver.receive(into)
    assert into["w"].min() == into["w"].max() == version


def _make_senders(paths: list[Path]) -> None:
    senders = [SharedMemorySender(path, weights(0)) for path in paths]
    for sender in senders:
        sender.send(1, weights(1))
    time.sleep(600)


@pytest.mark.slow
def test_the_next_sender_removes_what_one_that_was_killed_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "shared_memory_folder", lambda: tmp_path)
    engine = tmp_path / "rollmill-vllm-x"
    engine.mkdir()
    alive = SharedMemorySender(tmp_path / "rollmill-alive", weights(0))
    paths = [tmp_path / "rollmill-killed", engine / "weights"]
    process = mp.get_context("spawn").Process(target=_make_senders, args=(paths,), daemon=True)
    process.start()
    for path in paths:
        SharedMemoryReceiver(path).receive(empty())
    process.kill()
    process.join()
    assert len(list(tmp_path.iterdir())) == 7
    SharedMemorySender(tmp_path / "rollmill-next", weights(0)).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rollmill-alive.{n}" for n in (0, 1, "owner")]
    alive.close()
    assert list(tmp_path.iterdir()) == []


def test_a_sender_without_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = iter([None, OSError(errno.ENOSPC, "No space left on device")])

    def allocate(*arguments: int) -> None:
        if (error := next(room)) is not None:
            raise error

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(WeightSyncError, match=r"No space left on device\. Two versions"):
        SharedMemorySender(tmp_path / "w", weights(0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checksum", ["xxh3", "crc32"])
def test_damage_is_noticed_by_either_checksum(tmp_path: Path, checksum: str) -> None:
    sender = SharedMemorySender(tmp_path / "w", weights(0), checksum=checksum)
    sender.send(1, weights(1))
    receiver, into = SharedMemoryReceiver(tmp_path / "w"), empty()
    assert receiver.receive(into) == 1
    sender.send(2, weights(2))
    file = slot_files(tmp_path / "w")[1]
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    with file.open("r+b") as target:
        target.write(data)
    with pytest.raises(WeightSyncError, match="does not have the checksum it was sent with"):
        receiver.receive(into)
    receiver.close()
    sender.close()
