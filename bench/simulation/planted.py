"""Bugs that are planted in the orchestrator's real code, one at a time, to see that the simulation finds them.

A bug replaces text of one function while the simulation runs. Its text has to occur exactly once, so a change of that
function shows here (`tests/apps/plan`).
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from bench.harness import RESULTS, ROOT, BenchError, note
from bench.simulation.scenario import draw_scenario
from bench.simulation.world import Outcome, simulate_seed

FOUND = 0.9
"""Share of the bugs that has to be found."""
TABLE = RESULTS / "simulation.json"


@dataclass(frozen=True)
class PlantedBug:
    """A bug: in `function` of `module` (of rollmill), `old` becomes `new`."""

    name: str
    module: str
    function: str
    old: str
    new: str


_SCHEDULER, _QUEUE, _POOL = "orchestrator.scheduler", "buffer.group_queue", "remote.worker_pool"
_WORKER, _STAGES, _MEMORY = "remote.stage_worker", "orchestrator.stages", "buffer.memory"

BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "pacing admits one version too many",
        "orchestrator.pacing",
        "Pacing.may_start",
        "self.steps_ahead + 1",
        "self.steps_ahead + 2",
    ),
    PlantedBug(
        "pacing admits one version too few",
        "orchestrator.pacing",
        "Pacing.may_start",
        "self.steps_ahead + 1",
        "max(self.max_staleness, 1)",
    ),
    PlantedBug(
        "pacing starts groups for steps after the last one",
        "orchestrator.pacing",
        "Pacing.may_start",
        "self.steps)",
        "self.steps + 1)",
    ),
    PlantedBug(
        "pacing does not count the groups in the buffer",
        _SCHEDULER,
        "RolloutScheduler.run",
        "ahead = waiting() + len(self.queue)",
        "ahead = len(self.queue)",
    ),
    PlantedBug(
        "a group's seed follows from the queue's length, not its number",
        _SCHEDULER,
        "RolloutScheduler._start",
        "derive_seed(self._seed, number)",
        "derive_seed(self._seed, len(self.queue))",
    ),
    PlantedBug(
        "one of the unfinished groups of a step is not put away",
        "orchestrator.partial_rollouts",
        "PartialRollouts.put",
        "in groups.items()",
        "in list(groups.items())[1:]",
    ),
    PlantedBug(
        "an unfinished completion goes on without its tokens' versions",
        "rollout.explorer",
        "completion_prefix",
        "experience.versions[mine]",
        "experience.versions[mine] * 0",
    ),
    PlantedBug(
        "a resumed run counts its groups from 0 again",
        _SCHEDULER,
        "RolloutScheduler.restore",
        "self._submitted = state.submitted",
        "self._submitted = 0",
    ),
    PlantedBug(
        "the sampler's state is not restored",
        _SCHEDULER,
        "RolloutScheduler.restore",
        "self._sampler.load_state_dict(state.tasks)",
        "pass",
    ),
    PlantedBug(
        "groups that were running at a checkpoint are not started again",
        _SCHEDULER,
        "RolloutScheduler.restore",
        "[(number, task) for number, task in state.unfinished]",
        "[]",
    ),
    PlantedBug(
        "finished groups of a checkpoint are not restored",
        _SCHEDULER,
        "RolloutScheduler.restore",
        "dict(zip(state.numbers, groups, strict=True))",
        "{}",
    ),
    PlantedBug(
        "stopped tasks are not restored",
        _SCHEDULER,
        "RolloutScheduler.restore",
        "for id, times in state.again]",
        "for id, times in ()]",
    ),
    PlantedBug(
        "a checkpoint leaves out the oldest group",
        _SCHEDULER,
        "RolloutScheduler.mark",
        "self.queue.all()",
        "self.queue.all()[1:]",
    ),
    PlantedBug(
        "a checkpoint forgets what other processes have not finished",
        _SCHEDULER,
        "RolloutScheduler.snapshot",
        "if group not in waiting",
        "if group in waiting",
    ),
    PlantedBug(
        "the queue keeps the order of arrival",
        _QUEUE,
        "GroupQueue.put",
        "dict(sorted(self._groups.items()))",
        "dict(self._groups.items())",
    ),
    PlantedBug(
        "a batch takes the groups that finished first",
        _QUEUE,
        "GroupQueue.get",
        "self.first(groups)",
        "sorted(self.all(), key=lambda each: not each.future.done())[:groups]",
    ),
    PlantedBug(
        "the news that a group has its tokens is lost", _QUEUE, "GroupQueue._arrive", "self._news.set()", "pass"
    ),
    PlantedBug(
        "a group stays in the queue after it was taken",
        _QUEUE,
        "GroupQueue.get",
        "del self._groups[group.number]",
        "self._groups[group.number]",
    ),
    PlantedBug(
        "a group that is put again is stored again",
        _MEMORY,
        "MemoryStore.put",
        "if group.id not in self._ids:",
        "if group.id:",
    ),
    PlantedBug(
        "a group that is put again is inserted again",
        "buffer.sql",
        "SqlStore.put",
        "if id not in known:",
        "if id:",
    ),
    PlantedBug(
        "the store forgets that it has handed a group out",
        _MEMORY,
        "MemoryStore._hand_out",
        "entry.uses.append(GroupUse(step, position, first))",
        "GroupUse(step, position, first)",
    ),
    PlantedBug(
        "a checkpoint forgets which groups were trained on",
        _MEMORY,
        "encode_entry",
        "for use in entry.uses]",
        "for use in ()]",
    ),
    PlantedBug(
        "groups of other processes are trained on at any age",
        "orchestrator.batches",
        "RolloutBatches._oldest",
        "if self._shared:",
        "if False:",
    ),
    PlantedBug(
        "replayed groups are not marked",
        "orchestrator.batches",
        "_marked",
        "REPLAYED: True",
        "REPLAYED.title(): True",
    ),
    PlantedBug(
        "rewards are paired with completions in the order in which these ended",
        "rollout.explorer",
        "Explorer._group",
        "*(pending[each.index] for each in ordered)",
        "*pending.values()",
    ),
    PlantedBug(
        "a rollout begins with the weights that happen to be there",
        _WORKER,
        "StageWorker.rollout",
        "self.update(request.version)",
        "self.update(0)",
    ),
    PlantedBug(
        "an explorer asks for any version of the weights",
        "remote.rollouts",
        "RemoteExplorer.rollout",
        "version = self._explorers.version",
        "version = 0",
    ),
    PlantedBug(
        "an explorer announces the version it was asked for, not the one it received",
        _WORKER,
        "StageWorker._update",
        "self._rollouts.publish(here)",
        "self._rollouts.publish(version)",
    ),
    PlantedBug(
        "an explorer does not wait until weights are visible",
        _WORKER,
        "StageWorker._update",
        "not isinstance(self._receiver, BroadcastReceiver)",
        "self._receiver is None",
    ),
    PlantedBug(
        "every second version is not sent",
        "remote.rollouts",
        "RemoteRollouts.publish",
        "self._sender.send(version, weights)",
        "version % 2 or self._sender.send(version, weights)",
    ),
    PlantedBug(
        "a lost worker's call is not made again",
        _POOL,
        "WorkerPool.call",
        "self._lose(worker, start_id, str(lost))",
        "raise",
    ),
    PlantedBug(
        "each failed call of a dead worker starts it again",
        _POOL,
        "WorkerPool._lose",
        "worker.start_id != start_id or ",
        "",
    ),
    PlantedBug(
        "a rollout that is dropped because its explorer begins again is not answered",
        "remote.explorer_worker",
        "ExplorerWorker.rollout",
        "raise WorkerNotReadyError(use) from None",
        "raise",
    ),
    PlantedBug(
        "weights are published before the step is counted",
        _STAGES,
        "Stage.publish",
        "self.backend.publish(self.version)",
        "self.backend.publish(self.version - 1)",
    ),
    PlantedBug(
        "the store is not brought back to the checkpoint",
        _STAGES,
        "Stage._rewind",
        "self.store.rewind(",
        "(lambda *mark, **step: None)(",
    ),
    PlantedBug(
        "the boundary between two steps is not noted",
        _STAGES,
        "Stage.finish_step",
        "self._mark_boundary()",
        "pass",
    ),
)


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant a bug while the body runs; None: none. Raises BenchError if its text is not there exactly once."""
    if name is None:
        yield
        return
    bug = next((each for each in BUGS if each.name == name), None)
    if bug is None:
        raise BenchError(f"no bug is called {name!r}; they are {', '.join(each.name for each in BUGS)}")
    function = _function(bug)
    before = function.__code__
    function.__code__ = _changed_code(bug, function)
    try:
        yield
    finally:
        function.__code__ = before


def _function(bug: PlantedBug) -> FunctionType:
    found: Any = import_module(f"rollmill.{bug.module}")
    for part in bug.function.split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "__func__", found)
    assert isinstance(found, FunctionType)
    return found


def _changed_code(bug: PlantedBug, function: FunctionType) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(bug.old) != 1:
        raise BenchError(
            f"{bug.function} has {source.count(bug.old)} times {bug.old!r}; correct the planted bug {bug.name!r}"
        )
    compiled = compile(f"from __future__ import annotations\n{source.replace(bug.old, bug.new)}", bug.module, "exec")
    code = next(each for each in compiled.co_consts if isinstance(each, CodeType) and each.co_name == function.__name__)
    if code.co_freevars != function.__code__.co_freevars:
        raise BenchError(f"{bug.function} uses variables of an outer function; plant {bug.name!r} elsewhere")
    return code


def replay_bug(name: str, seed: int) -> Outcome:
    """Run a seed with a bug planted."""
    with planted(name):
        return simulate_seed(draw_scenario(seed))


def search(seeds: int, only: str) -> int:
    """Look for the bugs whose names contain `only`, and bring the table up to date after each of them.

    The seed that found a bug last is tried first, then the first `seeds` ones. Returns 1 if too few are found.

    Raises BenchError if no name contains `only`.
    """
    if not any(only in bug.name for bug in BUGS):
        raise BenchError(f"no bug's name has {only!r}; they are {', '.join(each.name for each in BUGS)}")
    known = {row["bug"]: row for row in json.loads(TABLE.read_text())["bugs"]} if TABLE.is_file() else {}
    for bug in BUGS:
        if only in bug.name:
            known[bug.name] = row = _search_bug(bug, seeds, known.get(bug.name, {}).get("seed"))
            note(f"  {row['seed']!s:>5}  {row['invariant'] or 'NOT FOUND':10} {bug.name}")
            rows = [known[each.name] for each in BUGS if each.name in known]
            found = sum(row["seed"] is not None for row in rows)
            record = {"bench": "simulation", "planted": len(rows), "found": found, "bugs": rows}
            TABLE.write_text(json.dumps(record, indent=1).replace(f"{ROOT}/", "") + "\n")  # of this checkout
    print(json.dumps({"bench": "simulation", "planted": len(rows), "found": found}))
    return int(found < FOUND * len(rows))


def _search_bug(bug: PlantedBug, seeds: int, last: int | None) -> dict[str, Any]:
    row = {"bug": bug.name, "where": f"{bug.module}:{bug.function}", "invariant": None, "seed": None}
    for seed in [*([] if last is None else [last]), *range(seeds)]:
        violation = replay_bug(bug.name, seed).violation
        if violation is not None:
            return row | {"invariant": violation.invariant, "seed": seed, "says": str(violation)}
    return row
