"""What a stage is made of, as its configuration says: the judge, the trainer, the supply of experiences."""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.buffer import Store
from rollmill.buffer.ratings import Ratings
from rollmill.config.rewards import RewardConfig
from rollmill.config.run import StageConfig
from rollmill.config.workflows import Traffic
from rollmill.core.types import Task
from rollmill.explorer.base import Explores
from rollmill.master.context import RunContext
from rollmill.master.online import OnlineSupply, Unasked
from rollmill.master.producing import Facts, Line
from rollmill.master.rollouts import Counts, Rollouts
from rollmill.master.supply import Supply
from rollmill.models.load import Policy, load_teacher
from rollmill.models.run_tokenizer import fingerprint
from rollmill.monitor.trace import Trace
from rollmill.pipelines.build import Resources, build_pipeline
from rollmill.recipes import Distill
from rollmill.rewards import Judge, build_judge
from rollmill.tasks import Taskset, build_sampler
from rollmill.trainer import RankedTrainer, ScoreTrainer, Trainer
from rollmill.trainer.build import Plan
from rollmill.trainer.check import require_right
from rollmill.trainer.rank_actor import Actors
from rollmill.trainer.ranks import Ranks


def judge_of(config: StageConfig, policy: Policy, rewards: Sequence[RewardConfig]) -> Judge:
    """A judge by these rewards, with the stage's limits."""
    return build_judge(rewards, config.judging, tokenizer=policy.tokenizer, device=str(policy.device))


def trainer_of(
    config: StageConfig,
    policy: Policy,
    judge: Judge | None,
    context: RunContext,
    *,
    seed: int,
    kept_versions: int,
) -> Trainer | ScoreTrainer | RankedTrainer:
    """What learns: the policy, or a reward model that begins as the policy."""
    algorithm = config.algorithm
    plan = Plan(
        algorithm,
        config.trainer,
        context.precision,
        total_steps=config.steps,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=seed,
        reward_weights=None if judge is None else dict(judge.weights),
        plugins=tuple(context.plugins),
        kept_versions=kept_versions,
    )
    teacher = None
    if isinstance(algorithm, Distill) and algorithm.teacher is not None:
        teacher = load_teacher(algorithm.teacher, policy)
        require_right(teacher, algorithm.teacher)
    if config.trainer.ranks > 1:
        crew = Actors(context.ranks) if context.ranks else None
        return RankedTrainer(plan, policy.model, teacher, policy.device, context.run_dir, crew)
    return plan.trainer(policy.model, teacher, policy.device, Ranks.of_process())


def supply_of(config: StageConfig, line: Line, ratings: Ratings, *, first_version: int, seed: int) -> Supply:
    """Where experiences come from: rollouts of the tasks, or an application's traffic."""
    made = OnlineSupply if isinstance(config.workflow, Traffic) else Supply
    return made(config, line, ratings, first_version=first_version, seed=seed)


def line_of(
    config: StageConfig,
    policy: Policy,
    tasks: Taskset,
    *,
    explorer: Explores,
    engine: Counts,
    store: Store,
    trace: Trace,
    first_version: int,
    seed: int,
    prefix: str | None = None,
) -> Line:
    """What groups pass through; `prefix` begins their names (default: the stage's)."""
    advantage = getattr(config.algorithm, "advantage", None)
    by_id: dict[str, Task] = {task.id: task for task in tasks.tasks}
    batch = config.rollout.batch
    online = isinstance(config.workflow, Traffic)
    sampler = Unasked() if online else build_sampler(tasks, config.tasks_from.order, seed, batch=batch)
    rollouts = Rollouts(
        config,
        sampler=sampler,
        explorer=explorer,
        engine=engine,
        store=store,
        task=by_id.__getitem__,
        first_version=first_version,
        seed=seed,
        uses_greedy=advantage is not None and advantage.uses_greedy,
        prefix=prefix,
    )

    def make_judge(rewards: Sequence[RewardConfig]) -> Judge:
        return judge_of(config, policy, rewards)

    facts = Facts(policy.tokenizer, fingerprint(policy.tokenizer), policy.end_id, by_id.__getitem__)
    return Line(sampler, rollouts, build_pipeline(config.pipeline, Resources(make_judge, seed)), store, facts, trace)
