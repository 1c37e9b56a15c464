"""The demonstrations or pairs of a stage's section `offline_data`: their pool, and their way through the pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.buffer import DemonstrationPool, ExperienceStore
from rollmill.buffer.base import split_by_kind
from rollmill.buffer.offline_data import DrawnGroup, TasksetDemonstrations
from rollmill.config.run import StageConfig
from rollmill.data import Taskset, build_sampler, demonstration_experience, labelled_experience, preference_pair
from rollmill.models.load import PolicyModel
from rollmill.models.run_tokenizer import compute_fingerprint
from rollmill.orchestrator.buffers import Buffers
from rollmill.pipelines import Pipeline, PipelineContext
from rollmill.pipelines.batch import copy_experience
from rollmill.seeds import derive_seed
from rollmill.types import Experience, Task

EXPERT_STREAM = 0xE4


def build_demonstration_pool(
    config: StageConfig,
    worked: Taskset | None,
    policy: PolicyModel,
    store: ExperienceStore,
    buffers: Buffers,
    *,
    seed: int,
) -> DemonstrationPool:
    """Build the pool of demonstrations or pairs. `worked` are the tasks with solutions, where `taskset` is a source."""
    algorithm = config.algorithm

    def render(task: Task, place: int) -> list[Experience]:
        if algorithm.uses_labels:
            return [labelled_experience(task, policy.tokenizer, policy.end_id, f"{task.id}/{place}")]
        if algorithm.uses_pairs:
            return preference_pair(task, policy.tokenizer, policy.end_id, f"{task.id}/{place}")
        return [demonstration_experience(task, policy.tokenizer, policy.end_id, config.offline_data.learn)]

    tasks = None
    if worked is not None and worked.tasks:
        stream, batch = derive_seed(seed, EXPERT_STREAM), config.rollout.batch
        tasks = TasksetDemonstrations(
            build_sampler(worked, config.required_taskset.sampler, stream, batch=batch, observed=False),
            render,
            worked.tasks,
        )
    readers = buffers.of_run(store) if "run" in config.offline_data.sources else []
    readers += [buffers.of_others(source) for source in config.offline_data.others]
    return DemonstrationPool(
        tasks,
        readers,
        pairs=algorithm.uses_pairs,
        labels=algorithm.uses_labels,
        rated_at_least=config.offline_data.rated_at_least,
        tokenizer=compute_fingerprint(policy.tokenizer),
        context=policy.context,
        seed=seed,
    )


class OfflineData:
    """Demonstrations, labelled completions or pairs of a stage, as its pipeline leaves them.

    They pass the pipeline whenever they are drawn, from the taskset as well as from stores; only what the run's own
    pipeline has made does not. New experiences of operators go to the store.

    Args:
        tasks: of the stage, by id.
    """

    def __init__(
        self,
        pool: DemonstrationPool,
        pipeline: Pipeline,
        store: ExperienceStore,
        config: StageConfig,
        policy: PolicyModel,
        tasks: Mapping[str, Task],
    ) -> None:
        self.pool, self._pipeline, self._store, self._config = pool, pipeline, store, config
        self._policy, self._tasks, self._views = policy, tasks, config.by_domain()

    async def draw(self, count: int, *, step: int, version: int) -> list[Experience]:
        """Draw the experiences of `count` demonstrations, labelled completions or pairs.

        Others are drawn for those that the pipeline drops, at most `rollout.refills` times as many as are needed; then
        there are fewer.

        Args:
            step: training step of the stage, from 0.
            version: of the weights.

        Raises like `Pipeline.process`.
        """
        if not len(self._pipeline):
            return self.pool.draw(count, step=step)
        found: list[Experience] = []
        drawn, dropped = set[str](), set[str]()
        missing, left, in_vain = count, count * (1 + self._config.rollout.refills), 0
        while missing and left > 0 and in_vain <= len(dropped):  # else all that there is has been dropped
            groups = self.pool.draw_groups(min(missing, left), drawn, step=step)
            if not groups:
                break
            left -= len(groups)
            fresh = [each for each in groups if each.key not in dropped]
            in_vain = 0 if fresh else in_vain + len(groups)
            for group in fresh:
                kept = group.experiences if group.processed else await self._process(group, version)
                found += kept
                missing -= bool(kept)
                if not kept:
                    dropped.add(group.key)
        return found

    async def _process(self, group: DrawnGroup, version: int) -> list[Experience]:
        """Pass a group through the pipeline; return what is left of it."""
        copies = [copy_experience(each) for each in group.experiences]
        names = {each.id for each in copies}
        left = await self._pipeline.process(copies, self._context(version, copies[0]))
        made: dict[str, list[Experience]] = {}
        for each in left:
            if each.id not in names:
                made.setdefault(each.group, []).append(each)
        fingerprint = compute_fingerprint(self._policy.tokenizer)
        self._store.put([one for name, own in made.items() for one in split_by_kind(own, name, fingerprint)])
        return [each for each in left if each.id in names]

    def _context(self, version: int, first: Experience) -> PipelineContext:
        config = self._views.get(self._config.domain_of(first.task_id), self._config)
        own = Task(first.task_id, first.prompt)  # of a prompt that somebody posted

        def task(name: str) -> Task:
            return self._tasks[name] if name in self._tasks or name != first.task_id else own

        return PipelineContext(
            step=version + 1,
            version=version,
            tokenizer=self._policy.tokenizer,
            end_id=self._policy.end_id,
            max_new_tokens=config.rollout.max_new_tokens,
            deadline_s=self._config.rollout.deadline_s,
            task=task,
            observe=lambda *_: None,  # they say nothing about what the policy can do
        )
