"""Checks of workflows, environments, tools and models: keys without effect and conflicting choices."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.config.checks.modes import PAST_ENGINE, PAST_RANKS
from rollmill.config.engines import NativeEngineConfig
from rollmill.config.run import StageConfig
from rollmill.config.tree import KeyPath
from rollmill.config.workflows import LiveRequestsWorkflow

WorkflowConflict = tuple[KeyPath, str]

_TAKEN = ("task", "policy", "judge", "environment", "container", "tools", "examples", "endpoint")


def unused_workflow_keys(stage: StageConfig) -> dict[KeyPath, str]:
    """Returns keys of workflows and their components without effect, each with the reason."""
    keys: dict[KeyPath, str] = {}
    name = stage.workflow.name
    if stage.rows_name_workflows:  # one that a row names may use what the stage's does not
        return keys | _unused_names(stage)
    if all(each.single_turn for each in stage.workflows):
        for key in ("attempts", "time_limit_s", "failures"):
            keys["rollout", key] = f"not honoured by workflow `{name}`, which cannot fail; others honour it"
    if stage.workflow.single_turn:
        if not stage.pipeline:
            text = f"not honoured without a pipeline, which drops groups; workflow `{name}` rejects none; remove it"
            keys["rollout", "refills"] = text
    else:
        keys["rollout", "reuse"] = f"not honoured by workflow `{name}`; it is by `single_turn`"
    sets = [] if stage.evaluation is None else stage.evaluation.all_sets().values()
    views = [stage, *(stage.for_evaluation(each) for each in sets if each.environment is None)]  # in its environment
    if stage.environment is not None and stage.environment.containers:
        if not any(uses_container(each) for each in views):
            text = f"not honoured: nothing of workflow `{name}` works in a container; add a tool (tools: [shell])"
            keys["environment",] = f"{text}, or a reward (rewards: [{{name: container, ...}}])"
    elif not any(each.workflow.uses_environment or each.workflow.takes("environment") for each in views):
        keys["environment",] = f"not honoured by workflow `{name}`, which acts in none; workflow `environment` does"
    if isinstance(stage.workflow, LiveRequestsWorkflow):
        keys |= _unused_live_request_keys(stage, stage.workflow)
    if not stage.workflow.scored_by_rewards:
        for key in ("rewards", "reward_settings"):
            keys[key,] = f"not honoured by workflow `{name}`, which rewards by itself; remove it"
    if not any(each.uses_tools or each.takes("tools") for each in stage.workflows):
        keys["tools",] = f"not honoured by workflow `{name}`, which calls none; `tools` and `react` do"
    for model in stage.models:
        if not any(each.takes(model) for each in stage.workflows):
            text = f"not honoured by workflow `{name}`, which does not take it; a parameter of that name would"
            keys["models", model] = text
    if not any(each.may_have_roles for each in stage.workflows):
        keys["roles",] = f"not honoured by workflow `{name}`, which has none; one of your own may call policy.role"
    taskset = stage.taskset
    if taskset is not None and all(part.chat for part in taskset.parts()):
        for key in stage.workflow.plain_keys:
            keys["workflow", key] = "not honoured with taskset.chat, whose template writes results; remove it"
    if not stage.algorithm.uses_rollouts and stage.evaluation is None:
        for key in ("workflow", "environment", "tools", "roles", "models"):
            keys[key,] = f"not honoured: algorithm `{stage.algorithm.name}` rolls nothing out; remove it"
    return keys


def _unused_names(stage: StageConfig) -> dict[KeyPath, str]:
    """Returns keys that name the workflows of training rows which are not rolled out."""
    if stage.taskset is None or (stage.algorithm.uses_rollouts and stage.workflow.uses_tasks):
        return {}
    text = "not honoured: the stage rolls no tasks out; remove it"
    places: list[KeyPath] = [("taskset", "mix", index) for index in range(len(stage.taskset.mix))] or [("taskset",)]
    return {(*place, "fields", "workflow"): text for place in places}


def uses_container(stage: StageConfig) -> bool:
    """Returns whether something in a rollout of the stage's workflow works in a container."""
    workflow = stage.workflow
    if workflow.single_turn:
        return False
    tools = workflow.uses_tools and any(each.uses_container for each in stage.tools)
    rewarded = workflow.scored_by_rewards and any(each.uses_container for each in stage.rewards)
    return tools or rewarded or workflow.takes("container")


def container_conflicts(stage: StageConfig) -> Iterator[WorkflowConflict]:
    """Yields what works in a container, where there is none, and workflows that a container is no environment for."""
    workflow = stage.workflow
    there_is_one = stage.environment is not None and stage.environment.containers
    add = "add the section environment: {name: container, image: ...}"
    if there_is_one and workflow.uses_environment:
        text = f"workflow `{workflow.name}` acts in episodes, and `container` has none; use workflow `tools` with the"
        yield ("environment",), f"{text} tool `shell`, or take the parameter `container` in a workflow of your own"
    if not there_is_one and "container" in type(workflow).parts:
        yield ("environment",), f"workflow `{workflow.name}` takes the rollout's container; {add}"
    if not there_is_one and workflow.uses_tools:
        for index, tool in enumerate(stage.tools):
            if tool.uses_container:
                yield ("tools", index), f"`{tool.name}` works in the rollout's container; {add}"
    if workflow.scored_by_rewards:
        for index, reward in enumerate(stage.rewards):
            if reward.uses_container and workflow.single_turn:
                text = (
                    f"`{reward.name}` looks at what an agent has done, and workflow `{workflow.name}` is a single reply"
                )
                yield ("rewards", index), f"{text}; use workflow `tools`, `react` or `program`"
            elif reward.uses_container and not there_is_one:
                yield ("rewards", index), f"`{reward.name}` looks into the rollout's container; {add}"


def _unused_live_request_keys(stage: StageConfig, workflow: LiveRequestsWorkflow) -> dict[KeyPath, str]:
    """Returns keys without effect when an application makes the rollouts."""
    text = "not honoured by workflow `live_requests`, which has no tasks; evaluate checkpoints in a run of their own"
    keys: dict[KeyPath, str] = {("evaluation",): text}
    for key in ("token_budget", "partial", "oversample", "reuse", "refills"):
        keys["rollout", key] = (
            "not honoured by workflow `live_requests`, whose rollouts an application makes; remove it"
        )
    if workflow.group == "session":
        keys["rollout", "group_size"] = "not honoured with workflow.group `session`; it is with `prompt`"
    return keys


def workflow_conflicts(stage: StageConfig) -> Iterator[WorkflowConflict]:
    """Yields conflicting choices of a workflow and its components."""
    if stage.workflow.uses_environment and stage.environment is None:
        text = f"workflow `{stage.workflow.name}` acts in one; add a section, for example environment: gymnasium"
        yield ("environment",), text
    yield from container_conflicts(stage)
    yield from ((("workflow", key), text) for key, text in stage.workflow.stage_conflicts(stage))
    if stage.workflow.multi_step and getattr(stage.algorithm, "overlong_buffer", None):
        text = f"max_new_tokens limits a completion, and a rollout of workflow `{stage.workflow.name}` may have several"
        yield ("algorithm", "overlong_buffer"), f"{text}; remove it, or penalise length in `pipeline`"
    if isinstance(stage.workflow, LiveRequestsWorkflow) and stage.algorithm.uses_rollouts:
        yield from _live_requests(stage, stage.workflow)
    if stage.workflow.uses_tools and not stage.tools:
        yield ("tools",), f"workflow `{stage.workflow.name}` calls tools; add some, for example tools: [calculator]"
    names = [None if tool.many else tool.policy_name for tool in stage.tools]
    for index, name in enumerate(names):
        if name is not None and name in names[:index]:
            yield ("tools", index), f"two tools are called `{name}`; give one another name with `called`"
    for name in stage.models:
        if not name.isidentifier() or name in _TAKEN:
            text = "a workflow takes it as a parameter, so it has to be a name of Python's, and none of"
            yield ("models", name), f"{text} {', '.join(_TAKEN)}; rename it"
    for name, model in stage.models.items():
        if model.policy == "past":
            yield from _past_policies(stage, ("models", name, "policy"))
    for key, name in stage.workflow.models.items():
        if name not in stage.models:
            yield ("workflow", key), f"no model `{name}`; add it to the section models, or name another"


def _past_policies(stage: StageConfig, at: KeyPath) -> Iterator[WorkflowConflict]:
    """Yields what copies of the policy that are taken between two steps cannot be combined with."""
    if not isinstance(stage.engine, NativeEngineConfig):
        yield at, f"`past` is not supported with engine `{stage.engine.name}`: {PAST_ENGINE}"
    if stage.max_staleness > 0:
        text = f"with max_staleness {stage.max_staleness} a new copy would replace one that rollouts still talk to"
        yield at, f"`past` is not supported in stages that roll out ahead: {text}; set max_staleness: 0"
    if stage.trainer.ranks > 1:
        yield at, f"`past` is not supported with trainer.ranks {stage.trainer.ranks}: {PAST_RANKS}"
    if stage.offload is not None:
        yield at, "`past` is not supported with `offload`, which would not move the copies; remove offload"


def _live_requests(stage: StageConfig, workflow: LiveRequestsWorkflow) -> Iterator[WorkflowConflict]:
    """Yields what prevents learning from the sessions of an application."""
    if stage.max_staleness == 0:
        text = "conversations go on while weights change, and 0 would drop them; give at least 1, for example 4"
        yield ("max_staleness",), text
    if not stage.buffer.in_database(stage.persistent):
        text = "sessions that were committed since the last checkpoint would be lost with the process; use `sql`"
        yield ("buffer", "store"), text
    advantage = getattr(stage.algorithm, "advantage", None)
    fit = "use algorithm reinforce_plus_plus, reinforce or ppo"
    if advantage is not None and advantage.uses_greedy:
        text = f"`{stage.algorithm.name}` compares with a greedy completion, which no application makes; {fit}"
        yield ("algorithm",), text
    elif advantage is not None and advantage.compares_groups and workflow.group == "session":
        text = (
            f"`{stage.algorithm.name}` compares completions of a group, and each session is a group of its own; {fit}, "
            "or set workflow.group: prompt, where applications repeat their first prompts"
        )
        yield ("algorithm",), text
