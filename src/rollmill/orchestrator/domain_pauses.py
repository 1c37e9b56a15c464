"""Pauses a domain that has lost a service, such as its judge or its environment, so that the others go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from rollmill.config.run import StageConfig
from rollmill.data import Sampler
from rollmill.errors import EndpointLostError, WorkflowError
from rollmill.rewards.judges.base import LLMJudge
from rollmill.types import Experience
from rollmill.waiting import OUTAGES

_POLL_S = 0.25


async def pause_on_loss(
    domain: str, work: Coroutine[Any, Any, list[Experience]], stage: StageConfig, sampler: Sampler, patience_s: float
) -> list[Experience]:
    """Return a group's experiences; none if its domain has lost a service and is paused.

    The scheduler then rolls out another task in its place.
    """
    return await unless_lost(domain, work, stage, sampler, patience_s) or []


async def unless_lost(
    domain: str, work: Coroutine[Any, Any, list[Experience]], stage: StageConfig, sampler: Sampler, patience_s: float
) -> list[Experience] | None:
    """Return a group's experiences; None if its domain has lost a service and is paused.

    Args:
        work: the group's rollout; cancelled if its domain is paused.
        stage: the stage as the domain sees it.
        patience_s: seconds without an answer after which an endpoint counts as lost.

    Raises EndpointLostError and WorkflowError if the sampler cannot pause the domain, and other errors of `work`.
    """
    running = asyncio.ensure_future(work)
    try:
        while not running.done():
            await asyncio.wait([running], timeout=_POLL_S)
            lost = "" if running.done() else lost_service(stage, patience_s)
            if lost and sampler.pause(domain, lost):
                return None
        return running.result()
    except (EndpointLostError, WorkflowError) as error:
        if not sampler.pause(domain, str(error)):
            raise
        return None
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait([running])


def lost_service(stage: StageConfig, seconds: float) -> str:
    """Describe a service of the stage's rewards or models that has been unavailable for this long; empty if none is."""
    endpoints = [each.endpoint for each in stage.rewards if isinstance(each, LLMJudge)]
    endpoints += [each.endpoint for each in stage.models.values()]
    for outage in OUTAGES.current():
        if time.monotonic() - outage.since >= seconds and any(each and each in outage.name for each in endpoints):
            return f"{outage.name} {outage.reason}"
    return ""
