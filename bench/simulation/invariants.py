"""What has to be true after every event of a simulated run, whatever goes wrong on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.simulation.scenario import Scenario
from rollmill.apps.plan.simulation.components import digest_of, simulated_reward
from rollmill.apps.plan.simulation.engine import shown_digest, simulated_tokens
from rollmill.apps.plan.simulation.history import SimulationEvent
from rollmill.apps.plan.simulation.stage import SimulatedStage
from rollmill.buffer import ExperienceKind
from rollmill.orchestrator.metrics import REPLAYED
from rollmill.seeds import derive_seed
from rollmill.types import Experience

IMPORT = "import-"
"""Prefix of the groups that another process puts into the store."""
PACING, ONCE, VERSIONS, CONTENT, PROGRESS, RESUME = "pacing", "once", "versions", "content", "progress", "resume"
INVARIANTS = {
    PACING: "no more groups are under way than max_staleness admits, and none is trained on that is staler",
    ONCE: "every group is trained on once, whole and in order, or accounted for; every task once per epoch",
    VERSIONS: "versions grow by one; explorers never go back, nor start a group with older weights than it asks for",
    CONTENT: "a token, its log-prob, version and reward are those of the weights that made it",
    PROGRESS: "as many groups are under way as max_staleness admits, and the run is done within its deadline; "
    "the trainer goes on whatever happens to others",
    RESUME: "a run that was killed and resumed learns what an undisturbed one does, where its mode promises so",
}


class ViolationError(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class InvariantChecks:
    """Looks at every event of one run. All methods raise ViolationError."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._config = scenario, scenario.config
        self.stage: SimulatedStage | None = None
        self.learned: list[list[tuple[str, str, int]]] = []  #: batches by version: group, task, digest of its content
        self._digests: list[int] = []  # of the weights, by version
        self._explorers: dict[tuple[str, int], int] = {}  # version of the weights of each explorer's stage
        self.starts = 0

    # -- events ------------------------------------------------------------------------------------------------

    def look(self, event: SimulationEvent) -> None:
        """Check an event."""
        match event.kind:
            case "begin":
                self._begin(**event.facts)
            case "train":
                self._train(**event.facts)
            case "publish":
                self._publish(**event.facts)
            case "weights":
                self._weights(**event.facts)
            case "rolled out":
                self._rolled_out(**event.facts)
        self.after_turn()

    def after_turn(self) -> None:
        """Check what the trainer has under way."""
        stage = self.stage
        if stage is None or stage.batches is None:
            return
        scheduler: Any = stage.batches._scheduler
        rollout, done = self._config.rollout, stage.state.step
        admitted = (min(self._config.max_staleness + 1, self._config.steps - done)) * rollout.batch
        extra = int(np.ceil(round(rollout.oversample * admitted, 9))) if rollout.oversample else 0
        if self._scenario.shared:  # groups of others take places of those that are under way
            extra += sum(fault.kind == "import" for fault in self._scenario.faults)
        if len(scheduler.queue) > admitted + extra:
            raise ViolationError(PACING, f"{len(scheduler.queue)} groups under way at version {done}, not {admitted}")

    def _begin(self, version: int, digest: int) -> None:
        self.starts += 1
        if version > len(self.learned):
            raise ViolationError(RESUME, f"resumed at version {version}, of which only {len(self.learned)} were made")
        if version < len(self._digests) and self._digests[version] != digest:
            raise ViolationError(RESUME, f"the weights of version {version} are others than before")
        del self.learned[version:], self._digests[version + 1 :]
        if not self._digests:
            self._digests.append(digest)

    def _publish(self, version: int, digest: int) -> None:
        if version != len(self._digests) or version != len(self.learned):
            raise ViolationError(VERSIONS, f"version {version} is published after {len(self._digests) - 1}")
        self._digests.append(digest)

    def _weights(self, by: str, version: int, start_id: int) -> None:
        if version < self._explorers.get((by, start_id), 0):
            raise ViolationError(VERSIONS, f"{by} goes back to version {version}")
        self._explorers[by, start_id] = version

    def _rolled_out(self, by: str, group: str, wanted: int, oldest: int) -> None:
        if oldest < wanted:
            raise ViolationError(VERSIONS, f"{by} begins {group} with version {oldest}, not at least {wanted}")

    # -- a batch -----------------------------------------------------------------------------------------------

    def _train(self, version: int, experiences: Sequence[Experience]) -> None:
        if version != len(self.learned):
            raise ViolationError(VERSIONS, f"version {version} is trained on after {len(self.learned)} steps")
        fresh: dict[str, list[Experience]] = {}
        again: dict[str, list[Experience]] = {}
        for each in experiences:
            (again if REPLAYED in each.info else fresh).setdefault(each.group, []).append(each)
        known = {group for batch in self.learned for group, _, _ in batch}
        for name, group in fresh.items():
            if name in known:
                raise ViolationError(ONCE, f"{name} is trained on a second time, at version {version}")
            self._whole(name, group)
            self._stale(name, group, version)
        for name, group in again.items():
            if name not in known:
                raise ViolationError(ONCE, f"{name} is replayed before it was trained on")
            self._whole(name, group)
        if len(fresh) != self._config.rollout.batch:
            raise ViolationError(ONCE, f"a batch of {len(fresh)} groups, not {self._config.rollout.batch}")
        for each in experiences:
            if not each.group.startswith(IMPORT):
                self._true(each, version)
        self._in_order(fresh)
        self._in_use(version)
        self.learned.append([(name, group[0].task_id, _content(group)) for name, group in fresh.items()])

    def _whole(self, name: str, group: Sequence[Experience]) -> None:
        size = self._config.rollout.group_size
        if len({each.id for each in group}) != len(group) or len(group) != size:
            raise ViolationError(ONCE, f"{name} has {len(group)} completions, not {size} different ones")

    def _stale(self, name: str, group: Sequence[Experience], version: int) -> None:
        """The oldest token counts, also where an operator takes it out of the loss.

        A group of another process may have tokens of a version that the trainer has lost with a crash: the store keeps
        what others have put into it, and it counts as fresh.
        """
        newest = self._config.rollout.partial.learn == "newest"
        versions = [each.versions[each.action_mask] for each in group]
        oldest = min(int(each.min()) for each in versions if each.size)
        age = self._config.buffer.max_age
        limit = min(self._config.max_staleness, age) if age is not None else self._config.max_staleness
        if name.startswith(IMPORT) and oldest > version:
            return
        if not 0 <= oldest <= version or (version - oldest > limit and not newest):
            raise ViolationError(PACING, f"{name} with tokens of version {oldest} is trained on at {version}")

    def _true(self, each: Experience, version: int) -> None:
        mine = each.action_mask
        versions, shown = each.versions[mine], each.logprobs[mine]
        expected = np.array([-shown_digest(self._digests[of]) for of in versions], np.float32)
        if not np.array_equal(shown, expected):
            raise ViolationError(CONTENT, f"{each.id} has tokens of other weights than those of its versions")
        if np.any(np.diff(versions) < 0) or (len(versions) and versions[-1] > version):
            raise ViolationError(CONTENT, f"{each.id} has tokens of decreasing versions, or of later ones")
        if each.reward not in (0.0, 1.0) or list(each.reward_parts.values()) != [each.reward]:
            raise ViolationError(CONTENT, f"{each.id} has the reward {each.reward}")
        number, index = (int(part) for part in each.id.rpartition("-")[2].split("/"))
        tokens, first = each.token_ids, each.turns[0].end
        if each.reward != simulated_reward(tokens[first:], index):
            raise ViolationError(CONTENT, f"{each.id} has the reward of other tokens")
        assert self.stage is not None
        seed = derive_seed(self.stage.seed, number)
        for position, digest in zip(np.flatnonzero(mine), (self._digests[of] for of in versions), strict=True):
            if tokens[position] != simulated_tokens(seed, index, position - first, digest):
                raise ViolationError(CONTENT, f"{each.id} has another token {position - first} than its seed gives")

    def _in_order(self, fresh: dict[str, list[Experience]]) -> None:
        if self._config.rollout.token_budget is not None:
            return  # unfinished groups are overtaken
        numbers = [int(name.rpartition("-")[2]) for name in fresh if not name.startswith(IMPORT)]
        batch = self._config.rollout.batch
        first = batch * len(self.learned)
        if self._scenario.plain and numbers != list(range(first, first + batch)):
            raise ViolationError(ONCE, f"groups {numbers} are trained on, not the {batch} from {first} on")
        before = [int(name.rpartition("-")[2]) for each in self.learned for name, _, _ in each if name[:6] == "train-"]
        if numbers != sorted(numbers) or (before and numbers and numbers[0] < max(before)):
            raise ViolationError(ONCE, f"groups {numbers} are trained on after {before[-1:]}: not in their order")

    def _in_use(self, version: int) -> None:
        """As many groups as the pacing rule admits are under way, besides the batch."""
        stage, config = self.stage, self._config
        if stage is None or not self._scenario.plain or stage.batches is None:
            return
        queue = len(stage.batches._scheduler.queue)
        admitted = (min(config.max_staleness + 1, config.steps - version) - 1) * config.rollout.batch
        if queue != admitted:
            raise ViolationError(
                PROGRESS, f"{queue} groups under way beside the batch of version {version}, not {admitted}"
            )

    # -- the end -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Check a run that is done: nothing is left over, and every task had its turns."""
        if len(self.learned) != self._config.steps:
            raise ViolationError(PROGRESS, f"{len(self.learned)} of {self._config.steps} steps were made")
        assert self.stage is not None
        if self._config.rollout.token_budget is not None and self._config.buffer.max_age is None:
            self._accounted(self.stage)
        if not self._scenario.plain:
            return
        left = self.stage.store.waiting() + len(self.stage.batches._scheduler.queue)  # type: ignore[union-attr]
        if left:
            raise ViolationError(ONCE, f"{left} groups were never trained on")
        tasks = [task for batch in self.learned for _, task, _ in batch]
        size = self._scenario.tasks
        for first in range(0, len(tasks), size):
            if most := [task for task, count in Counter(tasks[first : first + size]).items() if count > 1]:
                raise ViolationError(ONCE, f"task {most[0]} is rolled out twice in an epoch")

    def _accounted(self, stage: SimulatedStage) -> None:
        """Every group was trained on, is under way, or is put away unfinished."""
        scheduler: Any = stage.batches._scheduler  # type: ignore[union-attr]
        known = {int(name.rpartition("-")[2]) for batch in self.learned for name, _, _ in batch}
        known |= {group.number for group in scheduler.queue.all()}
        known |= {int(group.info["number"]) for _, group in stage.store.read(ExperienceKind.PARTIAL)}
        if lost := set(range(scheduler._submitted)) - known:
            raise ViolationError(ONCE, f"groups {sorted(lost)} were neither finished nor put away")

    def compare(self, undisturbed: InvariantChecks) -> None:
        """Compare a disturbed run with the same run undisturbed."""
        if self._scenario.repeatable:
            for version, (mine, others) in enumerate(zip(self.learned, undisturbed.learned, strict=True)):
                if mine != others:
                    names = [[group for group, _, _ in each] for each in (mine, others)]
                    raise ViolationError(RESUME, f"step {version + 1} learned {names[0]}, undisturbed {names[1]}")
            if self._digests != undisturbed._digests:
                raise ViolationError(RESUME, "the weights differ from those of an undisturbed run")
        elif self._scenario.plain:
            tasks = [
                [(group, task) for batch in each.learned for group, task, _ in batch] for each in (self, undisturbed)
            ]
            if tasks[0] != tasks[1]:
                raise ViolationError(RESUME, "the groups have other tasks than in an undisturbed run")


def _content(group: Sequence[Experience]) -> int:
    return digest_of([(each.id, each.token_ids.tobytes(), each.versions.tobytes(), each.reward) for each in group])
