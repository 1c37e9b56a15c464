"""Builds the operators of a pipeline, runs experiences through them, and registers users' operators."""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rollmill.config.operators import CustomOperatorSection, OperatorSection
from rollmill.config.section import register_section, section_from_signature, source_location
from rollmill.errors import ConfigError, DeadlineError, PipelineError, RollmillError
from rollmill.pipelines.batch import Batch, OperatorReport, PipelineContext
from rollmill.progress import Progress, count_progress
from rollmill.registry import build_component
from rollmill.types import Experience, ExperienceSource, task_domain
from rollmill.waiting import patient_timeout

if TYPE_CHECKING:
    from rollmill.config.rewards import Reward
    from rollmill.rewards import RewardManager

Operator = Callable[[Batch], Any]
"""Changes a batch, reports to it and returns None or an awaitable. An operator with state has `state_dict` and
`load_state_dict`; one with processes or connections has `close`."""


class Pipeline:
    """Named operators in order. Names are unique: a second `length` is called `length-2`.

    Args:
        taken: experiences that each operator is given, by origin; others pass it by. Default: all.
    """

    def __init__(
        self, operators: Sequence[tuple[str, Operator]], taken: Sequence[frozenset[ExperienceSource]] = ()
    ) -> None:
        self._operators: dict[str, Operator] = {}
        for name, operator in operators:
            count = sum(known.partition("-")[0] == name for known in self._operators)
            self._operators[f"{name}-{count + 1}" if count else name] = operator
        self._taken = dict(zip(self._operators, taken or [frozenset(ExperienceSource)] * len(operators), strict=True))
        self._reports = {name: OperatorReport() for name in self._operators}
        self._turn = asyncio.Lock()  # rollouts and demonstrations come from tasks of their own

    def __len__(self) -> int:
        return len(self._operators)

    async def process(self, experiences: Sequence[Experience], context: PipelineContext) -> list[Experience]:
        """Process whole groups; returns the remaining and new experiences. Changes experiences in place.

        If an operator drops one of a preference pair, the other is dropped, too.

        Raises:
            PipelineError: an operator raised; names it and the first experience's task.
            DeadlineError: an operator exceeded `context.deadline_s`.
        """
        current = list(experiences)
        async with self._turn:
            for name in self._operators:
                current = await self._apply(name, current, context)
        return current

    async def _apply(self, name: str, current: list[Experience], context: PipelineContext) -> list[Experience]:
        operator, given = self._operators[name], [each for each in current if each.source in self._taken[name]]
        if given:
            batch = Batch(given, context, name)
            try:
                done = operator(batch)
                if inspect.isawaitable(done):
                    done = await _in_time(done, name, given[0].task_id, context.deadline_s)
                if done is not None:
                    raise TypeError(f"returned a {type(done).__name__}; an operator changes its batch, returns nothing")
            except RollmillError:
                raise
            except (Exception, SystemExit) as error:
                what, instead = "experiences", "take it out of `pipeline`"
                if given[0].source is not ExperienceSource.ROLLOUT:
                    what, instead = f"{given[0].source} experiences", "give it `sources: [usual]`, so that it sees none"
                raise PipelineError(
                    f"operator `{name}` failed on {what} of task {given[0].task_id}: "
                    f"{type(error).__name__}: {error}{_place(error)}; correct it, or {instead}"
                ) from error
            _drop_broken_pairs(batch, given)
            self._reports[name].add(batch.report)
            count_progress(Progress.GROUPS)
            names, left = {each.id for each in given}, {each.id: each for each in batch.experiences}
            made = [each for each in left.values() if each.id not in names]
            current = [each for each in current if each.id not in names or each.id in left] + made
        return current

    def reports(self) -> dict[str, OperatorReport]:
        """Report of each operator since `take_reports`."""
        return dict(self._reports)

    def take_reports(self) -> dict[str, OperatorReport]:
        """Report of each operator since the last call; resets them."""
        found, self._reports = self._reports, {name: OperatorReport() for name in self._operators}
        return found

    def describe_dropped(self) -> str:
        """List what the operators have dropped since `take_reports`, and why; empty if nothing."""
        found = [(name, report) for name, report in self.reports().items() if report.dropped]
        return "; ".join(
            f"`{name}` dropped {report.dropped} completions "
            f"({', '.join(f'{count} {reason}' for reason, count in report.reasons.items())})"
            for name, report in found
        )

    def metrics(self) -> dict[str, float]:
        """Counts of each operator since the last call, under the names of metrics."""
        reports = self.take_reports().items()
        return {
            f"pipeline/{name}/{key}": float(value) for name, each in reports for key, value in each.numbers().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """State of the operators as plain JSON: a copy that later batches do not change.

        Raises PipelineError naming an operator whose state is not JSON.
        """
        return {name: _copied(name, each) for name, each in self._operators.items() if hasattr(each, "state_dict")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in state.items():
            self._operators[name].load_state_dict(each)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close all operators, even if one of them fails."""
        with ExitStack() as stack:
            for operator in self._operators.values():
                if hasattr(operator, "close"):
                    stack.callback(operator.close)


def _drop_broken_pairs(batch: Batch, given: Sequence[Experience]) -> None:
    """Drop what is left of preference pairs of which an operator has dropped one."""
    left = {each.id for each in batch.experiences}
    broken = {each.group for each in given if each.source is ExperienceSource.PREFERENCE and each.id not in left}
    for experience in batch.experiences:
        if experience.source is ExperienceSource.PREFERENCE and experience.group in broken:
            batch.drop(experience, "other of a pair")


async def _in_time(work: Awaitable[Any], operator: str, task: str, deadline_s: float) -> Any:
    """Await an operator. Raises DeadlineError."""
    limit: asyncio.Timeout | None = None
    try:
        async with patient_timeout(deadline_s) as limit:
            return await work
    except TimeoutError:
        if limit is None or not limit.expired():  # the operator's own
            raise
        advice = "Look for what the operator waits for, or raise rollout.deadline_s."
        raise DeadlineError("the pipeline", f"operator `{operator}` on task {task}", deadline_s, advice) from None


def _copied(name: str, operator: Any) -> Any:
    try:
        return json.loads(json.dumps(operator.state_dict()))
    except (TypeError, ValueError) as error:
        text = f"state_dict of operator `{name}` gives what JSON cannot hold: {error}"
        raise PipelineError(f"{text}; give numbers, texts, lists and mappings with text keys") from error


def _place(error: BaseException) -> str:
    """Location where an error was raised, as ` (FILE:LINE)`."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


Target = TypeVar("Target", bound=Callable[..., Any])


def operator(target: Target) -> Target:
    """Register an operator under its name: `pipeline: [{name: NAME, ...}]`.

    A function takes one `rollmill.pipelines.Batch` and returns nothing; it may be `async`. A class is instantiated once
    per stage and called with batches; if it has `state_dict` and `load_state_dict`, checkpoints contain its state.
    Keyword-only parameters (of the function, or of `__init__`) with a type and a default are keys of the run file.

    Raises ConfigError naming file and line: a parameter lacks a type or a default, or the operator cannot be called
    with a batch.
    """
    _check_calls(target)
    section = section_from_signature(target, CustomOperatorSection)
    register_section("pipeline", target.__name__, section)
    return target


@dataclass(frozen=True, slots=True)
class PipelineResources:
    """Resources of the run that operators need."""

    build_reward_manager: Callable[[Sequence[Reward]], RewardManager]
    """Builds further rewards; the operator closes them."""
    seed: int


def build_pipeline(sections: Sequence[OperatorSection], resources: PipelineResources) -> Pipeline:
    """Build the pipeline of a stage.

    Raises ConfigError if an operator needs a package that is not installed, and errors of building rewards.
    """
    with ExitStack() as made_so_far:
        operators = []
        for section in sections:
            operator = build_component(section, resources)
            if hasattr(operator, "close"):
                made_so_far.callback(operator.close)
            operators.append((section.name, operator))
        made_so_far.pop_all()
    return Pipeline(operators, [section.taken for section in sections])


class DomainPipelines(Pipeline):
    """The pipelines of a stage's domains, with the interface of one. Operators are called DOMAIN/NAME."""

    def __init__(self, pipelines: Mapping[str, Pipeline]) -> None:
        self._pipelines = dict(pipelines)

    def __len__(self) -> int:
        return sum(len(each) for each in self._pipelines.values())

    async def process(self, experiences: Sequence[Experience], context: PipelineContext) -> list[Experience]:
        """Process experiences of one domain, that of the first. Those of none, such as an answer that somebody posted
        to a prompt of their own, stay as they are."""
        own = self._pipelines.get(task_domain(experiences[0].task_id))
        return list(experiences) if own is None else await own.process(experiences, context)

    def reports(self) -> dict[str, OperatorReport]:
        return {f"{name}/{key}": each for name, one in self._pipelines.items() for key, each in one.reports().items()}

    def take_reports(self) -> dict[str, OperatorReport]:
        return {
            f"{name}/{key}": each for name, one in self._pipelines.items() for key, each in one.take_reports().items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._pipelines.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in state.items():
            self._pipelines[name].load_state_dict(each)

    def close(self) -> None:
        with ExitStack() as stack:
            for each in self._pipelines.values():
                stack.callback(each.close)


def build_domain_pipelines(builders: Mapping[str, Callable[[], Pipeline]]) -> Pipeline:
    """Build the pipeline of each domain; a stage without domains has one, with the name "".

    Raises like the builders.
    """
    with ExitStack() as made_so_far:
        pipelines = {}
        for name, build in builders.items():
            pipelines[name] = build()
            made_so_far.callback(pipelines[name].close)
        made_so_far.pop_all()
    return pipelines[""] if "" in pipelines else DomainPipelines(pipelines)


def _check_calls(target: Callable[..., Any]) -> None:
    where = f"{source_location(target)}: {target.__name__}"
    if not inspect.isclass(target):
        _check_takes(inspect.signature(target), 1, f"{where}: an operator takes one batch, as in def NAME(batch)")
        return
    _check_takes(inspect.signature(target), 0, f"{where}: options of an operator stand behind `*` in __init__")
    if "__call__" not in dir(target) or not inspect.isfunction(target.__call__):
        raise ConfigError(f"{where}: an operator needs a method __call__(self, batch)")
    signature = inspect.signature(target.__call__)
    _check_takes(signature, 2, f"{where}: __call__ takes one batch, as in def __call__(self, batch)")


def _check_takes(signature: inspect.Signature, count: int, otherwise: str) -> None:
    """Raises ConfigError unless the signature has exactly `count` positional parameters."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [each for each in signature.parameters.values() if each.kind in positional]
    if len(taken) != count:
        raise ConfigError(f"{otherwise}; found {signature}")
