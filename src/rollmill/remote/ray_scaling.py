"""The actors of explorers on Ray, in the process that supervises the run, and changes of their number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollmill.config.placement import ExplorerSpec, RayPlacement
from rollmill.errors import RollmillError
from rollmill.ray_session import ray_module
from rollmill.remote.placement_group import PlacementGroup, ResourceRequest
from rollmill.remote.ray_explorers import ExplorerActor
from rollmill.remote.run_state import EXPLORER
from rollmill.remote.scaling import (
    LOOK_S,
    ScaleAnswer,
    ScaleRequest,
    answer_requests,
    count_explorers,
    describe_change,
    read_answer,
)
from rollmill.remote.worker_pool import SHUTDOWN_S, START_S

_FREE_S = 10.0
"""Wait for resources that Ray is about to release."""


def explorer_specs(placement: RayPlacement, count: int) -> list[ExplorerSpec]:
    """The specifications of `count` explorers, by number; those beyond the run file's are of its last kind."""
    specs = placement.every_explorer
    return [specs[min(number, len(specs) - 1)] for number in range(count)]


def number_of_explorers(placement: RayPlacement, run_dir: Path) -> int:
    """The number that `rollmill scale` has set, else that of the run file. Raises CorruptFileError."""
    answer = read_answer(run_dir)
    return len(placement.every_explorer) if answer is None else answer.explorers


def explorer_needs(placement: RayPlacement, count: int) -> list[ResourceRequest]:
    """Resources that each of `count` explorers reserves, by number."""
    return [
        ResourceRequest(
            placement.cpus if kind.cpus is None else kind.cpus,
            placement.gpus if kind.gpus is None else kind.gpus,
        )
        for kind in explorer_specs(placement, count)
    ]


class ExplorerActors:
    """The actors, by name; Ray restarts one that ends.

    Args:
        group: the placement group, which has a bundle for each of the first `count` explorers.
    """

    def __init__(self, placement: RayPlacement, group: PlacementGroup, run_dir: Path, count: int) -> None:
        self._placement, self._group, self._run_dir = placement, group, run_dir
        self.reserved = count  #: number of explorers in the placement group
        self.used: dict[str, Any] = {}  #: those that a trainer uses
        self._others: dict[str, Any] = {}  # those that start or leave
        for number in range(count):
            self.used[_name(number)] = self._create(number)

    @property
    def all(self) -> list[Any]:
        """All actors, also those that start or leave."""
        return [*self.used.values(), *self._others.values()]

    async def start(self, count: int) -> dict[str, Any]:
        """Start further ones, up to `count`, and wait until they answer. Raises _RefusedError if that is impossible."""
        numbers = range(len(self.used), count)
        needs = explorer_needs(self._placement, count)
        await _until_free([needs[number] for number in numbers if number >= self.reserved])
        started = {_name(number): self._create(number) for number in numbers}
        self._others |= started
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*(_awaited(actor.ready.remote()) for actor in started.values()))
        except TimeoutError:
            await self.end(started)
            raise _RefusedError(f"Ray has not started them within {START_S:.0f} s; `ray status` shows why") from None
        except ray_module().exceptions.RayError as error:
            await self.end(started)
            raise _RefusedError(str(error).strip().splitlines()[-1]) from None
        return started

    def use(self, actors: dict[str, Any]) -> None:
        """Have the trainer, and one that takes its place, use these; others start or leave."""
        self._others = {name: actor for name, actor in (self._others | self.used).items() if name not in actors}
        self.used = dict(actors)

    async def end(self, actors: dict[str, Any]) -> None:
        """End actors that no trainer uses: they free their resources first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                closed = (_awaited(each.close.remote("left: rollmill scale")) for each in actors.values())
                await asyncio.gather(*closed, return_exceptions=True)
        for name, actor in actors.items():
            ray_module().kill(actor)
            self._others.pop(name, None)

    def _create(self, number: int) -> Any:
        kind = explorer_specs(self._placement, number + 1)[number]
        need = explorer_needs(self._placement, number + 1)[number]
        options = self._group.options(number) if number < self.reserved else self._group.options_beside(need)
        options |= {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 10_000}
        made = ray_module().remote(ExplorerActor).options(**options)
        return made.remote(self._run_dir, _name(number), kind)


class ExplorerScaling:
    """Answers the requests of `rollmill scale`, beside the run.

    Args:
        trainer: the trainer's actor at the time of the call; None while there is none.
        message: shows the user a message.
    """

    def __init__(
        self, run_dir: Path, actors: ExplorerActors, trainer: Callable[[], Any], message: Callable[[str], None]
    ) -> None:
        self._run_dir, self._actors, self._trainer, self._message = run_dir, actors, trainer, message

    async def run(self) -> None:
        """Answer requests, one after the other, until this is cancelled."""
        failures = (RollmillError, ray_module().exceptions.RayError, ConnectionError)
        await answer_requests(self._run_dir, self._scale, self._message, failures)

    async def _scale(self, request: ScaleRequest) -> ScaleAnswer:
        before, wanted = dict(self._actors.used), request.explorers
        started: dict[str, Any] = {}
        try:
            started = await self._actors.start(wanted)
            self._actors.use(dict(list((before | started).items())[:wanted]))
            await self._switch()
        except _RefusedError as refused:
            self._actors.use(before)
            if started:
                await self._switch()
                await self._actors.end(started)
            text = f"{count_explorers(len(before))} as before, not {wanted}: {refused}"
            return ScaleAnswer(request.id, len(before), len(before), text, refused=True)
        await self._actors.end({name: actor for name, actor in before.items() if name not in self._actors.used})
        return ScaleAnswer(request.id, wanted, len(before), describe_change(len(before), wanted))

    async def _switch(self) -> None:
        """Have the trainer use the actors that are to be used now; one that takes its place does so from the start.

        Raises _RefusedError if new explorers cannot begin.
        """
        while True:
            trainer = self._trainer()
            try:
                failure = None if trainer is None else await trainer.use_explorers.remote(self._actors.used)
            except ray_module().exceptions.RayActorError:
                failure = None
            if failure:
                raise _RefusedError(failure)
            if failure is not None:
                return
            await asyncio.sleep(LOOK_S)


class _RefusedError(RollmillError):
    """The number of explorers cannot be changed."""


async def _until_free(needs: Sequence[ResourceRequest]) -> None:
    """Wait for resources beside those of the placement group. Raises _RefusedError if they do not become free."""
    wanted = {name: sum(each.bundle.get(name, 0.0) for each in needs) for name in ("CPU", "GPU")}
    for _ in range(int(_FREE_S / LOOK_S)):
        free = await asyncio.to_thread(ray_module().available_resources)
        lacking = [name for name, count in wanted.items() if count > free.get(name, 0.0)]
        if not lacking:
            return
        have = await asyncio.to_thread(ray_module().cluster_resources)
        if any(wanted[name] > have.get(name, 0.0) for name in lacking):
            break  # waiting would not help
        await asyncio.sleep(LOOK_S)
    texts = [f"{wanted[name]:g} {name}s, of which Ray has {free.get(name, 0.0):g} left" for name in lacking]
    raise _RefusedError(f"they need {' and '.join(texts)}; lower placement.cpus or placement.gpus, or free some")


def _name(number: int) -> str:
    return f"{EXPLORER} {number}"


async def _awaited(reference: Any) -> Any:
    return await reference
