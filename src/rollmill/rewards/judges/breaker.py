"""Circuit breakers: requests to an unreachable endpoint wait, and one probe at a time finds out when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rollmill.waiting import OUTAGES

FAILURES_TO_PROBE = 3
"""Failures in a row, without a reply in between, after which an endpoint that has answered before is probed."""
GO, PROBE, WAIT = "go", "probe", "wait"


class CircuitBreaker:
    """State of one endpoint, for all models and threads of this process that use it.

    Args:
        name: the endpoint in messages.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.users = 0
        self.last_reply = float("-inf")  #: time of its last reply, by the clock
        self.reason = ""  #: of its last failed probe
        self.probes = 0  #: failed ones, since it is open
        self._clock, self._lock = clock, threading.Lock()
        self._failures, self._first_failure = 0, 0.0  # since the last reply
        self.is_open = False  #: the endpoint is unreachable
        self.probing = False  #: a request is finding out whether it is
        self._next_probe = 0.0

    @property
    def answered(self) -> bool:
        """True if it has answered before."""
        return self.last_reply > float("-inf")

    def turn(self) -> str:
        """Say what a request does now: GO, WAIT, or PROBE; a probe ends by `end_probe`."""
        with self._lock:
            if not self.is_open:
                return WAIT if self.probing else GO
            if self.probing or self._clock() < self._next_probe:
                return WAIT
            self.probing = True
            return PROBE

    def failed(self, rate_limited: bool = False) -> bool:
        """Count a failed request; True if the caller sends a probe now.

        Args:
            rate_limited: the endpoint is there, but has too many requests.
        """
        with self._lock:
            if self._failures == 0:
                self._first_failure = self._clock()
            self._failures += not rate_limited
            if self._failures < FAILURES_TO_PROBE or not self.answered:
                return False
        return self.claim_probe()

    def claim_probe(self) -> bool:
        """True if the caller sends a probe now; False if another one does, or the endpoint is known to be down."""
        with self._lock:
            if self.is_open or self.probing:
                return False
            self.probing = True
            return True

    def end_probe(self) -> None:
        """End a probe, whatever came of it."""
        with self._lock:
            self.probing = False

    def replied(self) -> None:
        """Note a reply: the endpoint is there."""
        with self._lock:
            self.last_reply, self._failures, self.probes = self._clock(), 0, 0
            opened, self.is_open = self.is_open, False
            seconds = self._clock() - self._first_failure
        if opened:
            OUTAGES.end(self.name, f"{self.name} answers again after {seconds:.0f} s; the run goes on")

    def probed(self, reason: str, wait_s: float, patience_s: float) -> None:
        """Note a probe without a reply: an endpoint that has answered before is unreachable.

        Args:
            wait_s: seconds until the next probe.
            patience_s: how long requests wait for it, for the message.
        """
        with self._lock:
            if not self.answered:
                return
            opened, self.is_open, self.reason = not self.is_open, True, reason
            self.probes += 1
            self._next_probe = self._clock() + wait_s
        if opened:
            text = f"{self.name} does not answer ({reason}); the run waits for it, up to {patience_s:g} s"
            OUTAGES.begin(self.name, f"does not answer: {reason}", text)

    def away_s(self) -> float:
        """Seconds since its first failure; 0 while it is not known to be unreachable."""
        with self._lock:
            return self._clock() - self._first_failure if self.is_open else 0.0


_BREAKERS: dict[str, CircuitBreaker] = {}
_MAKING = threading.Lock()


def acquire_breaker(name: str) -> CircuitBreaker:
    """Return the breaker of an endpoint, for one more user."""
    with _MAKING:
        breaker = _BREAKERS.setdefault(name, CircuitBreaker(name))
        breaker.users += 1
        return breaker


def release_breaker(breaker: CircuitBreaker) -> None:
    """Let go of a breaker; after the last user its outage is forgotten."""
    with _MAKING:
        breaker.users -= 1
        if breaker.users == 0 and _BREAKERS.get(breaker.name) is breaker:
            del _BREAKERS[breaker.name]
            OUTAGES.end(breaker.name)
