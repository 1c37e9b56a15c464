"""Python functions as tools, with schemas from their signatures and docstrings."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from rollmill.concurrency import FunctionThreads, FunctionTimeoutError
from rollmill.config.section import register_section, section_from_signature, source_location
from rollmill.config.tools import ToolSection
from rollmill.errors import ConfigError, RollmillError
from rollmill.registry import Target
from rollmill.rollout.environments.base import picture_parts
from rollmill.rollout.tools.toolbox import Tool, ToolCallable, ToolError
from rollmill.types import Task

AnyFunction = Callable[..., Any]
TASK_PARAMETER = "task"
"""A parameter of this name gets the rollout's task; the policy does not see it."""
_GIVEN = inspect.Parameter.POSITIONAL_OR_KEYWORD
_ARGUMENT = re.compile(r"^\s+(\w+)(?: *\([^)]*\))?: *(.+(?:\n\s{6,}.+)*)", re.MULTILINE)


class FunctionTool:
    """A typed function, plain or async; plain ones run in threads.

    Raises ConfigError naming file and line: a parameter has no type, or a type without a JSON schema.
    """

    def __init__(self, function: AnyFunction) -> None:
        self._function, self._where = function, f"{source_location(function)}: {function.__name__}"
        self.description, self._param_docs = _parse_docstring(function)
        parameters = [each for each in inspect.signature(function).parameters.values() if each.kind is _GIVEN]
        self._takes_task = any(each.name == TASK_PARAMETER for each in parameters)
        self._parameters = [each for each in parameters if each.name != TASK_PARAMETER]
        self._adapter, self.schema = self._typed()

    def _typed(self) -> tuple[TypeAdapter[dict[str, Any]], dict[str, Any]]:
        hints = get_type_hints(self._function, include_extras=True)
        fields: dict[str, Any] = {}
        for each in self._parameters:
            if each.name not in hints:
                raise ConfigError(f"{self._where}: the parameter `{each.name}` needs a type, such as `: str`")
            type_: Any = hints[each.name]
            annotated = Annotated[type_, Field(description=self._param_docs.get(each.name))]
            fields[each.name] = annotated if each.default is inspect.Parameter.empty else NotRequired[annotated]
        make: Any = TypedDict  # the name of a type for type checkers, a function at run time
        made: Any = make("Arguments", fields)
        made.__pydantic_config__ = ConfigDict(extra="forbid")
        try:
            adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(made)
            schema = adapter.json_schema()
        except PydanticUserError as error:
            raise ConfigError(f"{self._where}: a parameter has a type that JSON has not: {error.message}") from error
        schema.pop("title", None)
        schema.setdefault("properties", {})
        for each in self._parameters:
            entry = schema["properties"][each.name]
            entry.pop("title", None)
            if each.default is not inspect.Parameter.empty:
                entry["default"] = adapter.dump_python({each.name: each.default}, mode="json")[each.name]
        return adapter, schema

    def caller(
        self, task: Task, options: dict[str, Any], threads: FunctionThreads, time_limit_s: float
    ) -> ToolCallable:
        """Build the callable for one rollout; `options` are its keyword-only parameters."""
        given = {TASK_PARAMETER: task} if self._takes_task else {}

        async def call(arguments: dict[str, Any]) -> str | list[dict[str, Any]]:
            work = partial(self._function, **self.checked(arguments), **given, **options)
            try:
                found = await self._result(work, threads, time_limit_s)
                if (parts := picture_parts(found, self._function.__name__)) is not None:
                    return parts
                return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
            except (RollmillError, ToolError):
                raise
            except (TimeoutError, FunctionTimeoutError):
                raise ToolError(f"no result after {time_limit_s:g} s") from None
            except (Exception, SystemExit) as error:  # raised by the user's function
                raise ToolError(f"{type(error).__name__}: {error}") from error

        return call

    async def _result(self, work: Callable[[], Any], threads: FunctionThreads, time_limit_s: float) -> Any:
        if inspect.iscoroutinefunction(self._function):
            async with asyncio.timeout(time_limit_s):
                return await work()
        return await threads.call(self._function.__name__, work, time_limit_s)

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert arguments to the function's types. Raises ToolError that explains each invalid one."""
        try:
            return self._adapter.validate_python(arguments)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
            raise ToolError(f"wrong arguments: {'; '.join(wrong)}") from None

    def tool(self, name: str, description: str | None, call: ToolCallable) -> Tool:
        return Tool(name, description or self.description, self.schema, call)


def _parse_docstring(function: AnyFunction) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and the descriptions of parameters under `Args:`."""
    text, _, arguments = (inspect.getdoc(function) or "").partition("\nArgs:")
    arguments = re.split(r"\n(?=\S)", arguments)[0]
    return text.strip(), {name: " ".join(description.split()) for name, description in _ARGUMENT.findall(arguments)}


def tool(target: Target) -> Target:
    """Register a tool under its name: `tools: [NAME]`, or `{name: NAME, ...}` with options.

    It is a typed function, plain or async. The policy provides its arguments: the JSON schema comes from the types,
    descriptions from the docstring (`Args:`). A parameter `task` receives the rollout's task and is not part of the
    schema. Keyword-only parameters with a type and a default are keys of the run file. The policy sees the returned
    value as text or JSON, and the message of an exception.

    Raises ConfigError naming file and line: it is no function, or a parameter lacks a type.
    """
    where = f"{source_location(target)}: {target.__name__}"
    if not inspect.isfunction(target):
        raise ConfigError(f"{where}: a tool is a function, plain or async")
    FunctionTool(target)
    register_section("tool", target.__name__, section_from_signature(target, ToolSection))
    return target
