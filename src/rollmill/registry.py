"""The decorators that register users' rewards, workflows, environments, tools, engines, trackers, algorithms, losses
and advantages."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, overload

from pydantic import ValidationError, create_model

from rollmill.config.algorithms import known_algorithms
from rollmill.config.algorithms.base import AdvantageSection, AlgorithmOptions, LossSection, PolicyGradientOptions
from rollmill.config.engines import ENGINE_FEATURES, EngineSection
from rollmill.config.environments import EnvironmentSection
from rollmill.config.section import NamedSection, Section, register_section, section_from_signature, source_location
from rollmill.config.trackers import TrackerSection
from rollmill.config.workflows import WorkflowSection
from rollmill.errors import ConfigError
from rollmill.user_code import did_you_mean
from rollmill.user_code import import_file as import_file
from rollmill.user_code import import_object as import_object

Function = TypeVar("Function", bound=Callable[..., Any])

_rewards: dict[str, Callable[..., Any]] = {}


@overload
def reward(function: Function) -> Function: ...
@overload
def reward(*, group: bool) -> Callable[[Function], Function]: ...
def reward(function: Any = None, *, group: bool = False) -> Any:
    """Register a reward under its name: `{name: python, function: NAME}` in a run file.

    With `@reward(group=True)` it is called with a task and the list of all its completions. A later function of the
    same name replaces the earlier one.
    """
    if function is None:
        return partial(reward, group=group)
    if group:
        function.group = True
    _rewards[function.__name__] = function
    return function


def find_reward(spec: str) -> Callable[..., Any]:
    """The reward that `spec` names: FILE.py:NAME, package.module:NAME or a registered NAME.

    Raises ConfigError when there is none.
    """
    if ":" in spec:
        found = import_object(spec)
    elif spec in _rewards:
        found = _rewards[spec]
    else:
        known = f"registered: {', '.join(sorted(_rewards))}" if _rewards else "none is registered"
        advice = "decorate it with @rollmill.reward in a file listed under `plugins`, or write FILE.py:NAME"
        raise ConfigError(f"no reward `{spec}`{did_you_mean(spec, _rewards)} ({known}); {advice}")
    if not callable(found):
        raise ConfigError(f"{spec} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def build_component(section: Section, *resources: Any) -> Any:
    """Build the component of a section: a copy of it that is set up with the `resources`, or its implementation,
    called with the section and as many of the `resources` as it takes.

    That of a user's registered function is the function with its options; that of a registered class, an instance made
    from the resources and its options.
    """
    if isinstance(section, NamedSection) and (registered := type(section).function) is not None:
        options = section.arguments()
        if not inspect.isclass(registered):
            return partial(registered, **options)
        return registered(*resources[: _positional_count(registered)], **options)
    if not section.implementation:
        component: Any = section.model_copy()
        component.setup(*resources)
        return component
    build = import_object(section.implementation)
    return build(section, *resources[: _positional_count(build) - 1])


def _positional_count(target: Callable[..., Any]) -> int:
    return sum(each.kind in _POSITIONAL for each in inspect.signature(target).parameters.values())


Target = TypeVar("Target", bound=Callable[..., Any])
JUDGE, ENVIRONMENT, TOOLS, EXAMPLES, ENDPOINT = "judge", "environment", "tools", "examples", "endpoint"
CONTAINER = "container"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def workflow(target: Target) -> Target:
    """Register a workflow under its name: `workflow: NAME`, or `workflow: {name: NAME, ...}` with options.

    It is an `async def solve(task, policy)`. Further parameters are passed by name: `judge` (computes the configured
    `rewards` of a reply), `environment` (a fresh one), `container` (that of `environment: container`), `tools` (those
    of the section), `examples` (other tasks of the taskset that have a worked solution), `endpoint` (the policy as an
    OpenAI-compatible server: `base_url`, `api_key`), and every name under `models`. Keyword-only parameters with a type
    and a default are keys of the run file. It returns the reward: a number, a mapping of parts (their sum counts), the
    result of `judge`, or None to reject the rollout.

    Raises ConfigError naming file and line: it is no async function, does not take task and policy, or an option lacks
    a type or a default.
    """
    where = f"{source_location(target)}: {target.__name__}"
    if not inspect.iscoroutinefunction(target):
        raise ConfigError(f"{where}: a workflow is `async def {target.__name__}(task, policy)`; write `async def`")
    parameters = inspect.signature(target).parameters.values()
    names = [each.name for each in parameters if each.kind in _POSITIONAL]
    if names[:2] != ["task", "policy"]:
        raise ConfigError(f"{where}: a workflow takes task and policy first; found ({', '.join(names)})")
    section: Any = section_from_signature(target, WorkflowSection)
    everything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    section.parts = (*names[2:], "*") if everything else tuple(names[2:])
    section.uses_rewards = JUDGE in names
    section.uses_environment = ENVIRONMENT in names
    section.uses_tools = TOOLS in names or everything
    section.multi_step = True
    register_section("workflow", target.__name__, section)
    return target


def environment(target: Target) -> Target:
    """Register an environment under its name: `environment: NAME`, or `environment: {name: NAME, ...}` with options.

    It is a class with `reset(self, task, seed)`, which returns the first observation, `step(self, action)`, which
    returns a `rollmill.rollout.environments.StepResult`, and, if it holds resources, `close(self)`; each plain or
    async. Keyword-only parameters of `__init__` with a type and a default are keys of the run file. Every rollout has
    its own instance.

    Raises ConfigError naming file and line: it is no such class, or an option lacks a type or a default.
    """
    where = f"{source_location(target)}: {target.__name__}"
    if not inspect.isclass(target):
        raise ConfigError(f"{where}: an environment is a class with reset(self, task, seed) and step(self, action)")
    for name, count in (("reset", 3), ("step", 2)):
        method = inspect.getattr_static(target, name, None)
        taken = [] if not inspect.isfunction(method) else list(inspect.signature(method).parameters.values())
        if len([each for each in taken if each.kind in _POSITIONAL]) != count:
            signature = "reset(self, task, seed)" if name == "reset" else "step(self, action)"
            raise ConfigError(f"{where}: an environment needs a method {signature}")
    register_section("environment", target.__name__, section_from_signature(target, EnvironmentSection))
    return target


def engine(target: Target) -> Target:
    """Register an engine under its name: `engine: NAME`, or `engine: {name: NAME, ...}` with options.

    It is a class with the methods of `rollmill.engines.RolloutEngine`. `__init__` takes the policy
    (`rollmill.models.load.PolicyModel`: model, tokenizer, eos_ids, context) and, if it wants to, the section `rollout`
    and the precision ("bf16" or "fp32"); keyword-only parameters with a type and a default are keys of the run file.
    The model has the trainer's parameters: they have changed when `weights_updated` is called. A class attribute
    `supports` names the optional features that the engine has (`rollmill.config.engines.ENGINE_FEATURES`); a run that
    needs another one is refused.

    Raises ConfigError naming file and line: it is no such class, an option lacks a type or a default, or `supports`
    names an unknown feature.
    """
    methods = ("generate", "stream", "interrupt", "pause", "resume", "weights_updated", "drain", "sleep", "counters")
    _check_methods(target, "an engine", (*methods, "close"))
    section: Any = section_from_signature(target, EngineSection)
    supported = set(getattr(target, "supports", ()))
    if unknown := supported - ENGINE_FEATURES.keys():
        raise ConfigError(
            f"{source_location(target)}: {target.__name__}: `supports` names {', '.join(sorted(map(repr, unknown)))}; "
            f"the features are {', '.join(ENGINE_FEATURES)}"
        )
    if "token_budget" in supported:
        _check_methods(target, "an engine for token budgets", ("wait_for_tokens",))
    section.unsupported = {
        name: f"engine `{target.__name__}` does not name `{name}` ({text}) among the features that it `supports`; use "
        "engine `native`, or remove this"
        for name, text in ENGINE_FEATURES.items()
        if name not in supported
    }
    register_section("engine", target.__name__, section)
    return target


def tracker(target: Target) -> Target:
    """Register a tracker under its name: `monitor: {trackers: [NAME]}`, or `{name: NAME, ...}` with options.

    It is a class with the methods of `rollmill.trackers.Tracker`: `write(self, metrics, experiences)` and
    `close(self)`. `__init__` takes the run (`rollmill.trackers.TrackedRun`: folder, name, resumed_after); keyword-only
    parameters with a type and a default are keys of the run file. It is built again when a run resumes.

    Raises ConfigError naming file and line: it is no such class, or an option lacks a type or a default.
    """
    _check_methods(target, "a tracker", ("write", "close"))
    register_section("tracker", target.__name__, section_from_signature(target, TrackerSection))
    return target


def _check_methods(target: Callable[..., Any], kind: str, methods: Sequence[str]) -> None:
    where = f"{source_location(target)}: {target.__name__}"
    if not inspect.isclass(target):
        raise ConfigError(f"{where}: {kind} is a class with the methods {', '.join(methods)}")
    for name in methods:
        if not callable(inspect.getattr_static(target, name, None)):
            raise ConfigError(f"{where}: {kind} needs a method {name}")


# Algorithms

AlgorithmTarget = TypeVar("AlgorithmTarget", bound=Callable[..., Any] | type[AlgorithmOptions])


def loss(function: Function) -> Function:
    """Registers a per-token loss under its name: `algorithm: {name: grpo, loss: NAME}`.

    The function takes one `rollmill.algorithms.LossInputs` (or parameters named like its fields) and returns a term per
    token, [tokens], to be minimised. Keyword-only parameters with a type and a default are keys of the run file.
    """
    register_section("loss", function.__name__, _loss_part(function))
    return function


def advantage(function: Function) -> Function:
    """Registers an advantage under its name: `algorithm: {name: grpo, advantage: NAME}`.

    The function takes one `rollmill.algorithms.AdvantageInputs` (or parameters named like its fields, such as `rewards`
    and `groups`) and returns one advantage per experience, [N]. Options as for `loss`. A rollout with several
    experiences counts as one of N, unless there is a parameter `episodes`.
    """
    section: Any = section_from_signature(function, AdvantageSection)
    section.uses_episodes = "episodes" in inspect.signature(function).parameters
    register_section("advantage", function.__name__, section)
    return function


def algorithm(target: AlgorithmTarget | None = None, *, base: str = "grpo", **defaults: Any) -> Any:
    """Registers an algorithm under its name: `algorithm: {name: NAME}`.

    On a function: the algorithm `base` with the function as its per-token loss (see `loss`); `defaults` are other keys
    of the section `algorithm`, such as `aggregation="token-mean"` or `kl=0.1`. On a class: a subclass of one of
    `rollmill.config.algorithms`.

    Raises:
        ConfigError: `base` or one of `defaults` is unknown.
    """
    if target is None:
        return lambda decorated: algorithm(decorated, base=base, **defaults)
    if inspect.isclass(target):
        section: Any = target
        register_section("algorithm", str(section.model_fields["name"].default), section)
        return target
    part: Any = _loss_part(target)
    register_section("loss", target.__name__, part)
    register_section("algorithm", target.__name__, _derive_algorithm(target, base, {**defaults, "loss": part()}))
    return target


def loss_section(function: Callable[..., Any]) -> Any:
    """Builds the section `loss` of a function without registering it; see `loss`."""
    part: Any = _loss_part(function)
    return part()


def _loss_part(function: Callable[..., Any]) -> type[NamedSection]:
    """Builds the section of a user's loss, which may have a gradient where the advantage is 0."""
    return section_from_signature(function, _UserLoss)


class _UserLoss(LossSection):
    follows_advantage: ClassVar[bool] = False


def _derive_algorithm(function: Callable[..., Any], base: str, defaults: dict[str, Any]) -> type[AlgorithmOptions]:
    where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {function.__name__}"
    known = known_algorithms()
    parent = known.get(base)
    if parent is None or not issubclass(parent, PolicyGradientOptions):
        near = get_close_matches(base, list(known), n=1)
        hint = f"; did you mean `{near[0]}`?" if near and near[0] != base else ""
        raise ConfigError(f"{where}: base `{base}` is no algorithm that rolls out{hint}; see `rollmill algorithms`")
    try:
        values = parent.model_validate(defaults)
    except ValidationError as error:
        key, text = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise ConfigError(f"{where}: {key}: {text}; correct the decorator's arguments") from error
    fields: dict[str, Any] = {}
    for key in defaults:
        field = copy.copy(parent.model_fields[key])
        field.default = getattr(values, key)
        fields[key] = (field.annotation, field)
    name = function.__name__
    doc = inspect.getdoc(function) or f"`{base}` with the loss `{name}`."
    fields["name"] = (Literal[name], name)
    create: Any = create_model
    created: Any = create(name, __base__=parent, __doc__=doc, **fields)
    created.source = inspect.getsourcefile(function) or ""
    section: type[AlgorithmOptions] = created
    return section
