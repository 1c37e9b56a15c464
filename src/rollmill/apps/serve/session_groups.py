"""Trains on the sessions of a served application: finished sessions are the rollouts.

application -> endpoint -> sessions, rewarded and committed -> groups -> pipeline -> store -> batch
"""

from __future__ import annotations

from collections import OrderedDict

from rollmill.apps.serve.endpoint.protocol import ApiError
from rollmill.apps.serve.endpoint.session import EndpointSession, FinishedSession
from rollmill.config.workflows import LiveRequestsWorkflow
from rollmill.orchestrator.live_requests import LiveRequestBatches
from rollmill.types import Experience


class SessionGrouper:
    """A SessionSink that collects committed sessions into groups, which then pass the pipeline.

    Until its group is complete, a session is stored by itself, so a process that ends loses none.

    Args:
        size: sessions per group, if sessions with equal prompts are compared.
    """

    def __init__(self, config: LiveRequestsWorkflow, size: int, batches: LiveRequestBatches) -> None:
        self._config, self._size, self._batches = config, size, batches
        self._waiting: OrderedDict[str, list[list[Experience]]] = OrderedDict()  # by prompt, the oldest first
        for prompt, experiences in batches.kept():
            self._take(prompt, experiences)

    def check(self, session: EndpointSession) -> None:
        """See SessionSink: refuses sessions without a reward."""
        if session.reward is None:
            text = f"session {session.id} has no reward; post it to /feedback first"
            raise ApiError(text, 409, code="no_reward")

    def take(self, finished: FinishedSession) -> int:
        """See SessionSink. Raises StoreError if the session cannot be written."""
        self._batches.keep(finished.prompt, finished.experiences)
        return self._take(finished.prompt, finished.experiences)

    def _take(self, prompt: str, experiences: list[Experience]) -> int:
        if self._config.group == "session":
            self._batches.arrived([experiences])
            return 0
        alike = self._waiting.setdefault(prompt, [])
        alike.append(experiences)
        if len(alike) == self._size:
            self._batches.arrived(self._waiting.pop(prompt))
        if sum(map(len, self._waiting.values())) <= self._config.pending:
            return 0
        _, oldest = self._waiting.popitem(last=False)
        self._batches.forget(oldest)
        return len(oldest)
