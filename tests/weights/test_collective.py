"""Blocks of any size, in buckets of any size, between members of a group (gloo)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from rollmill.weights import broadcast_group
from rollmill.weights.broadcast_group import BroadcastGroup, gpu_uuid

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def groups() -> Iterator[list[BroadcastGroup]]:
    """All three members, in threads of this process."""
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda rank: BroadcastGroup(store, 1, rank, 3, HERE, deadline_s=20.0), range(3)))
    yield made
    for each in made:
        each.close()


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 3000), bucket=st.integers(1, 700).map(lambda n: n * 5), seed=st.integers(0, 99))
def test_all_bytes_arrive(
    groups: list[BroadcastGroup], monkeypatch: pytest.MonkeyPatch, size: int, bucket: int, seed: int
) -> None:
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", bucket)
    sent = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    blocks = [sent.clone(), torch.zeros_like(sent), torch.ones_like(sent)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda group, block: group.broadcast(block), groups, blocks))
    assert all(torch.equal(each, sent) for each in blocks)


def test_what_others_wait_for_fails_when_one_leaves() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        sends, waits = threads.map(lambda rank: BroadcastGroup(store, 2, rank, 2, HERE, deadline_s=60.0), range(2))
    failed: list[str] = []

    def wait() -> None:
        try:
            waits.broadcast(torch.zeros(9, dtype=torch.uint8))
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    sends.close()
    thread.join(20)
    assert failed


def test_a_member_that_does_not_come_is_waited_for_in_vain_but_not_for_ever() -> None:
    with pytest.raises(RuntimeError):
        BroadcastGroup(HashStore(), 3, 0, 2, HERE, deadline_s=0.5)


def test_a_cpu_is_no_gpu() -> None:
    assert gpu_uuid(torch.device("cpu")) == ""
