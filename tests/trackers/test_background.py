"""A tracker in a thread: order, failures, services that are slow or never answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.run_factory import rollouts
from support.waiting import wait_until

from rollmill.errors import RollmillError
from rollmill.trackers.background import BackgroundTracker
from rollmill.trackers.metrics_log import Metrics


class Service:
    """Takes records once it is reachable; fails at the step `broken`."""

    def __init__(self, broken: int = -1) -> None:
        self.reachable, self.closed, self.broken = threading.Event(), False, broken
        self.seen: list[tuple[Any, int]] = []
        self.threads: set[int] = set()

    def write(self, metrics: Metrics, experiences: Sequence[Any] = ()) -> None:
        assert self.reachable.wait(60)
        if metrics["step"] == self.broken:
            raise ConnectionError("no route")
        self.seen.append((metrics["step"], len(experiences)))
        self.threads.add(threading.get_ident())

    def close(self) -> None:
        self.closed = True


def test_records_arrive_in_order_in_one_other_thread() -> None:
    service = Service()
    tracker = BackgroundTracker(lambda: service, completions=2)
    found = rollouts(np.random.default_rng(0), 1)
    for step in range(5):
        tracker.write({"step": step}, found)
    assert service.seen == []  # nobody waits for it
    service.reachable.set()
    tracker.close()
    assert service.seen == [(step, 2) for step in range(5)]
    assert service.closed
    assert len(service.threads - {threading.get_ident()}) == 1


def test_a_failure_is_raised_by_the_next_call() -> None:
    service = Service(broken=1)
    service.reachable.set()
    tracker = BackgroundTracker(lambda: service)
    tracker.write({"step": 0})
    tracker.write({"step": 1})
    wait_until(lambda: tracker._failure is not None)
    with pytest.raises(ConnectionError, match="no route"):
        tracker.write({"step": 2})
    with pytest.raises(ConnectionError, match="no route"):
        tracker.close()
    assert service.seen == [(0, 0)]


def test_a_failure_to_open_is_raised_at_once() -> None:
    def build() -> Service:
        raise PermissionError("no key")

    with pytest.raises(PermissionError, match="no key"):
        BackgroundTracker(build)


def test_a_service_that_does_not_answer_is_given_up() -> None:
    service, never = Service(), threading.Event()

    def build() -> Service:
        never.wait(60)
        return service

    with pytest.raises(RollmillError, match=r"could not be opened within 0\.05 s"):
        BackgroundTracker(build, open_timeout=0.05)
    never.set()
    tracker = BackgroundTracker(lambda: service, longest_queue=2, close_timeout=0.05)
    tracker.write({"step": 0})
    wait_until(lambda: tracker._records.empty())  # the service has it
    tracker.write({"step": 1})
    tracker.write({"step": 2})
    with pytest.raises(RollmillError, match="it is 2 records behind"):
        tracker.write({"step": 3})
    with pytest.raises(RollmillError, match=r"not ended within 0.05 s, with 2 records"):
        tracker.close()
    service.reachable.set()
