"""Builds the pool of demonstrations or pairs that a stage's section `experts` describes."""

from __future__ import annotations

from rollmill.buffer import DemonstrationPool, ExperienceStore
from rollmill.buffer.experts import TasksetDemonstrations
from rollmill.config.run import StageConfig
from rollmill.data import Taskset, build_sampler, expert_experience, labelled_experience, preference_pair
from rollmill.models.load import PolicyModel
from rollmill.models.run_tokenizer import compute_fingerprint
from rollmill.orchestrator.buffers import Buffers
from rollmill.seeds import derive_seed
from rollmill.types import Experience, Task

EXPERT_STREAM = 0xE4


def build_expert_pool(
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
        return [expert_experience(task, policy.tokenizer, policy.end_id, config.experts.learn)]

    tasks = None
    if worked is not None and worked.tasks:
        stream, batch = derive_seed(seed, EXPERT_STREAM), config.rollout.batch
        tasks = TasksetDemonstrations(
            build_sampler(worked, config.required_taskset.order, stream, batch=batch, observed=False), render
        )
    readers = buffers.of_run(store) if "run" in config.experts.sources else []
    readers += [buffers.of_others(source) for source in config.experts.others]
    return DemonstrationPool(
        tasks,
        readers,
        pairs=algorithm.uses_pairs,
        labels=algorithm.uses_labels,
        rated_at_least=config.experts.rated_at_least,
        tokenizer=compute_fingerprint(policy.tokenizer),
        context=policy.context,
        seed=seed,
    )
