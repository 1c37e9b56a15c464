"""Runs the model's functions in a separate sandbox session, which can import only the standard library."""

from __future__ import annotations

import json
import marshal
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from rollmill.rewards.code.tests import COMPILE_ERROR, OUTCOMES
from rollmill_sandbox import Sandbox, SandboxLimits, SandboxSession

VALUES, CANDIDATE, CHECKER = "values", "inside_candidate", "inside_checker"
_PACKAGE = __package__
_LOADER = """\
import marshal, sys, types
for name, code in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(marshal.loads(code), module.__dict__)
"""


@cache
def bundle(*names: str) -> str:
    """Return a program that loads these modules, each of which may import those before it. The last one is `module`."""
    modules = [(f"{_PACKAGE}.{name}", _compiled(name)) for name in names]
    return _LOADER.format(modules=modules)


def _compiled(name: str) -> bytes:
    """Compile a module to bytes for the same Python version, which the sandbox runs."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return marshal.dumps(compile(text, f"<{name}>", "exec"))


class CallResult(NamedTuple):
    """The result of a call. With "ok" `text` is the session's reply (`inside_candidate.call`), which is not trusted.

    A forged reply gains nothing: expected values are not in that process, so it can only be another answer.
    """

    outcome: str
    text: str = ""
    seconds: float = 0.0

    def reply(self, most: int) -> dict[str, Any]:
        """Parse the reply; empty if it is not one. `most` bounds the number of containers in it.

        Building them takes time, and blocks the event loop.
        """
        try:
            if self.text.count("[") + self.text.count("{") > most:
                return {"too_large": f"more than {most} containers"}
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class SandboxedSolution:
    """Code whose functions can be called. State that a call changes persists until the process dies."""

    def __init__(self, sandbox: Sandbox, source: str, limits: SandboxLimits) -> None:
        self._sandbox, self._source, self._limits = sandbox, source, limits
        self._stack = AsyncExitStack()
        self._session: SandboxSession | None = None
        self._failed: CallResult | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def call(self, name: str, arguments: str, wall_s: float, *, changes: bool = False) -> CallResult:
        """Call a function with encoded [args, kwargs]. Code that does not load always gives the same result.

        With `changes`, the reply includes arguments that the call has changed.
        """
        if self._failed is None and (self._session is None or self._session.ended):
            await self._load(wall_s)
        if self._failed is not None:
            return self._failed
        assert self._session is not None
        done = await self._session.execute(f"module.call({name!r}, {arguments!r}, {changes})", wall_s)
        return CallResult(OUTCOMES[done.outcome], done.value or "", done.seconds)

    async def _load(self, wall_s: float) -> None:
        await self._stack.aclose()
        self._session = await self._stack.enter_async_context(self._sandbox.session(limits=self._limits))
        program = f"{bundle(VALUES, CANDIDATE)}\nmodule.load({self._source!r})"
        done = await self._session.execute(program, wall_s)
        if done.outcome != "ok":
            self._failed = CallResult(OUTCOMES[done.outcome])
        elif done.value != "{}":
            self._failed = CallResult(COMPILE_ERROR)
