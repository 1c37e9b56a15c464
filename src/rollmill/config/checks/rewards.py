"""Checks of `rewards` and `pipeline`: what the stage lacks for them, and operators that conflict with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.config.checks.evaluation import evaluation_set_path
from rollmill.config.operators import OperatorSection, RewardOperatorSection
from rollmill.config.placement import RayPlacement
from rollmill.config.rewards import Reward, reward_part_names
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import KeyPath, format_key_path
from rollmill.config.validation_errors import join_quoted
from rollmill.config.workflows import WorkflowSection


def reward_conflicts(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields key paths within the stage for its rewards, its pipeline, and the rewards of evaluation sets."""
    if stage.environment is not None and stage.environment.needs_generator:
        yield from _ungenerated(stage, ("environment",))
    yield from _rewards(stage)
    yield from _evaluated_rewards(stage)
    yield from _pipeline(stage)


def _rewards(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    learns = stage.algorithm.uses_rollouts and stage.algorithm.needs_rewards
    if not stage.workflow.scored_by_rewards:
        return
    scoring = _scoring(stage, stage.workflow)
    users = [f"algorithm `{stage.algorithm.name}`"] if learns else []
    users += ["evaluation"] if _evaluated_by(stage) and stage.algorithm.trains_policy else []
    users += [f"workflow `{stage.workflow.name}`"] if stage.workflow.needs_rewards else []
    if users and not stage.rewards:
        yield ("rewards",), f"{' and '.join(users)} needs at least one reward; for example rewards: [{{name: math}}]"
    if users and stage.rewards and not scoring:
        text = f"all rewards are of roles, and workflow `{stage.workflow.name}` has none"
        yield ("rewards",), f"{text}; add a reward without `role`, or use a workflow of your own"
    if stage.rewards and all(reward.weight == 0 for reward in stage.rewards):
        yield ("rewards",), "every weight is 0, so nothing is rewarded; give one part another weight"
    yield from _reward_list(stage, stage.rewards, ("rewards",))


def _scoring(stage: StageConfig, workflow: WorkflowSection) -> list[Reward]:
    """Returns the rewards that may score rollouts of a workflow."""
    return [each for each in stage.rewards if each.role is None or workflow.may_have_roles]


def _evaluated_by(stage: StageConfig) -> bool:
    """Returns whether some evaluation set uses the stage's own rewards."""
    sets = [] if stage.evaluation is None else stage.evaluation.all_sets().values()
    return any(each.rewards is None and each.workflow is None for each in sets)


def _evaluated_rewards(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """Checks the rewards of evaluation sets."""
    for name, each in (stage.evaluation.all_sets() if stage.evaluation is not None else {}).items():
        at = evaluation_set_path(name)
        if each.rewards is not None:
            yield from _reward_list(stage, each.rewards, (*at, "rewards"))
        seen = stage.for_evaluation(each)
        if seen.workflow.scored_by_rewards and seen.rewards and not _scoring(seen, seen.workflow):
            text = f"all rewards are of roles, and workflow `{seen.workflow.name}` has none; give the set rewards"
            yield (*at, "rewards"), f"{text} without `role`"
        if each.role is not None and each.role not in seen.roles:
            yield (*at, "role"), _no_role(seen, each.role)


def _reward_list(stage: StageConfig, rewards: Sequence[Reward], at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Checks the rewards at `at`: a list, or a single reward without a list."""
    for index, reward in enumerate(rewards):
        here = at if at[-1] != "rewards" else (*at, index)
        names = [name for other, name in enumerate(reward_part_names(rewards)) if other != index]
        for key, read in reward.other_rewards().items():
            if read.partition("/")[0] not in names:
                known = f"there are {', '.join(names)}" if names else "there is no other reward"
                yield (*here, key), f"no reward `{read}`; {known}"
        if reward.needs_generator:
            yield from _ungenerated(stage, here)
        if reward.role is not None and at[0] == "pipeline":
            yield (*here, "role"), "an operator scores the completions of all roles; remove it"
        elif reward.role is not None and reward.role not in stage.roles:
            yield (*here, "role"), _no_role(stage, reward.role)


def _no_role(stage: StageConfig, name: str) -> str:
    known = f"there are {join_quoted(list(stage.roles))}" if stage.roles else "there are none"
    return f"no role `{name}` in the section `roles`: {known}; add it there, or correct the name"


def _ungenerated(stage: StageConfig, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    tasksets = {"taskset": stage.taskset if stage.algorithm.uses_rollouts and at[0] != "evaluation" else None}
    for name, each in (stage.evaluation.all_sets() if stage.evaluation is not None else {}).items():
        own = at[: len(evaluation_set_path(name)) + 1] == (*evaluation_set_path(name), "rewards")
        inherited = {"rewards": not each.rewards, "environment": each.environment is None}
        if own or inherited.get(str(at[0]), False):
            tasksets[format_key_path((*evaluation_set_path(name), "taskset"))] = each.taskset
    for key, taskset in tasksets.items():
        if taskset is not None and any(part.generator is None for part in taskset.parts()):
            text = f"`reasoning_gym` scores only tasks of a generator, and {key} has none"
            part = "environment" if at[0] == "environment" else "reward"
            yield (*at, "name"), f"{text}; give {key}.generator or use another {part}"


def _pipeline(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields key paths within the stage, each with the problem and a remedy."""
    for index, operator in enumerate(stage.pipeline):
        at = ("pipeline", index)
        if not operator.taken & stage.algorithm.sources:
            continue
        for key, rewards in operator.reward_lists:
            yield from _reward_list(stage, rewards, (*at, *key))
        if not stage.algorithm.uses_rollouts:
            continue
        if isinstance(operator, RewardOperatorSection):
            yield from _operator_part(stage, operator, at)
        yield from _compared(stage, operator, at)
        yield from _operator_advantage(stage, operator, at)
        yield from (((*at, key), text) for key, text in operator.stage_conflicts(stage))


def _operator_part(stage: StageConfig, operator: RewardOperatorSection, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Checks that a part is one of the stage's rewards."""
    if operator.part is None:
        return
    names, name = reward_part_names(stage.rewards), operator.part.partition("/")[0]
    if name not in names:
        known = f"there are {', '.join(names)}" if names else "there is none at all"
        yield (*at, "part"), f"no reward `{name}`; {known}"


def _compared(stage: StageConfig, operator: OperatorSection, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if operator.compares_completions and stage.rollout.group_size == 1:
        text = f"`{operator.name}` compares the completions of a group, and rollout.group_size is 1"
        yield (*at, "name"), f"{text}; raise that, or remove this"


def _operator_advantage(stage: StageConfig, operator: OperatorSection, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    algorithm = stage.algorithm
    if not isinstance(algorithm, PolicyGradientOptions):
        return
    advantage = algorithm.advantage
    if advantage.uses_parts and operator.rewrites_rewards:
        text = f"advantage `{advantage.name}` sees the parts of the reward, and `{operator.name}` changes their sum"
        yield (*at, "name"), f"{text}; remove it"
    if advantage.uses_greedy and operator.adds_to_rewards:
        text = f"advantage `{advantage.name}` compares with a greedy completion, whose reward `{operator.name}` would"
        yield (*at, "name"), f"{text} not reach; use a reward of the run file instead"


def change_conflicts(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Yields planned changes of weights that no stage can make, each with a remedy."""
    views = [view for stage in stages for view in stage.by_domain().values()]
    known = list(dict.fromkeys(name for view in views for name in reward_part_names(view.rewards)))
    for index, change in enumerate(config.changes):
        for name in change.rewards:
            if config.is_split or isinstance(config.placement, RayPlacement):
                text = "rewards are computed by explorers in other processes, where weights cannot change"
                yield ("changes", index, "rewards"), f"{text}; remove it, or train in one process"
            elif name not in known:
                listed = join_quoted(known) if known else "none"
                yield ("changes", index, "rewards", name), f"no stage has such a reward; there are {listed}"
