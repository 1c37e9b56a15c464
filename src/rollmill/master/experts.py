"""The pool of demonstrations or pairs that a stage's section `experts` describes."""

from __future__ import annotations

from rollmill.buffer import ExpertPool, Store
from rollmill.buffer.experts import TaskExperts
from rollmill.config.run import StageConfig
from rollmill.core.types import Experience, Task
from rollmill.engines.native.rng import fold
from rollmill.master.buffers import Buffers
from rollmill.models.load import Policy
from rollmill.models.run_tokenizer import fingerprint
from rollmill.tasks import Taskset, build_sampler, expert_experience, labelled_completion, preference_pair

EXPERT_STREAM = 0xE4


def expert_pool(
    config: StageConfig, worked: Taskset | None, policy: Policy, store: Store, buffers: Buffers, *, seed: int
) -> ExpertPool:
    """What the stage imitates or prefers. `worked` are the tasks with solutions, where `taskset` is a source."""
    algorithm = config.algorithm

    def render(task: Task, place: int) -> list[Experience]:
        if algorithm.uses_labels:
            return [labelled_completion(task, policy.tokenizer, policy.end_id, f"{task.id}/{place}")]
        if algorithm.uses_pairs:
            return preference_pair(task, policy.tokenizer, policy.end_id, f"{task.id}/{place}")
        return [expert_experience(task, policy.tokenizer, policy.end_id)]

    tasks = None
    if worked is not None:
        stream, batch = fold(seed, EXPERT_STREAM), config.rollout.batch
        tasks = TaskExperts(build_sampler(worked, config.tasks_from.order, stream, batch=batch, observed=False), render)
    shelves = buffers.of_run(store) if "run" in config.experts.sources else []
    shelves += [buffers.of_others(source) for source in config.experts.others]
    return ExpertPool(
        tasks,
        shelves,
        pairs=algorithm.uses_pairs,
        labels=algorithm.uses_labels,
        rated_at_least=config.experts.rated_at_least,
        tokenizer=fingerprint(policy.tokenizer),
        context=policy.context,
        seed=seed,
    )
