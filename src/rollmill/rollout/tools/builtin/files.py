"""Tools that read, write and patch files of the rollout's container."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr

from rollmill.config.tools import ToolSection
from rollmill.rollout.containers.patch import FileChange, PatchError, parse_patch
from rollmill.rollout.tools.builtin.shell import container_of
from rollmill.rollout.tools.toolbox import ToolError

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from rollmill.rollout.containers import Container
    from rollmill.rollout.containers.container import ExecResult
    from rollmill.rollout.tools.function_tool import FunctionTool
    from rollmill.rollout.tools.pool import ToolPool
    from rollmill.rollout.tools.toolbox import Tool
    from rollmill.rollout.workflow import Rollout

_MOST_BYTES = 4 << 20


class _FileTool(ToolSection):
    """A function whose work is done in the rollout's container."""

    uses_container: ClassVar[bool] = True
    _function: FunctionTool = PrivateAttr()

    def _prepare(self, function: Callable[..., str]) -> None:
        from rollmill.rollout.tools.function_tool import FunctionTool

        self._function = FunctionTool(function)

    def open(self, rollout: Rollout, stack: AsyncExitStack) -> Tool:
        container = container_of(rollout)

        async def call(arguments: dict[str, Any]) -> str:
            return await self._run(container, **self._function.checked(arguments))

        return self._function.tool(self.policy_name, self.description, call)

    def _run(self, container: Container, **arguments: Any) -> Awaitable[str]:
        raise NotImplementedError

    async def _exec(self, container: Container, script: str, *words: str, stdin: bytes | None = None) -> ExecResult:
        """Run a script of ours with arguments. Raises ToolError with what it says if it fails."""
        command = ["/bin/sh", "-c", script, "sh", *words]
        ended = await container.exec(command, time_limit_s=self.time_limit_s, stdin=stdin, most_output=2 * _MOST_BYTES)
        if not ended.ok:
            raise ToolError(ended.output.strip() or ended.reason or f"exit code {ended.code}")
        return ended

    async def _read(self, container: Container, path: str) -> str:
        script = 'test -f "$1" || { echo "there is no file $1" >&2; exit 1; }; head -c "$2" -- "$1"'
        found = await self._exec(container, script, path, str(_MOST_BYTES + 1))
        if len(found.stdout) > _MOST_BYTES:
            raise ToolError(f"{path} has more than {_MOST_BYTES >> 20} MiB; look at parts of it with other commands")
        return found.stdout

    async def _write(self, container: Container, path: str, text: str) -> None:
        content = text.encode("utf-8", "replace")
        script = 'mkdir -p -- "$(dirname -- "$1")" && head -c "$2" > "$1"'
        await self._exec(container, script, path, str(len(content)), stdin=content)


class ReadFileTool(_FileTool):
    """Reads text files of the rollout's container."""

    name: Literal["read_file"] = "read_file"

    def setup(self, pool: ToolPool) -> None:
        self._prepare(read_file)

    async def _run(self, container: Container, path: str, first: int = 1, last: int = 0) -> str:  # type: ignore[override]
        text = await self._read(container, path)
        if first <= 1 and last <= 0:
            return text
        lines = text.splitlines(keepends=True)
        if first > len(lines):
            raise ToolError(f"{path} has {len(lines)} lines")
        return "".join(lines[max(first, 1) - 1 : last if last > 0 else None])


class WriteFileTool(_FileTool):
    """Writes text files of the rollout's container."""

    name: Literal["write_file"] = "write_file"

    def setup(self, pool: ToolPool) -> None:
        self._prepare(write_file)

    async def _run(self, container: Container, path: str, text: str) -> str:  # type: ignore[override]
        await self._write(container, path, text)
        return f"wrote {path}"


class ApplyPatchTool(_FileTool):
    """Applies patches to text files of the rollout's container: all of a patch, or nothing."""

    name: Literal["apply_patch"] = "apply_patch"

    def setup(self, pool: ToolPool) -> None:
        self._prepare(apply_patch)

    async def _run(self, container: Container, patch: str) -> str:  # type: ignore[override]
        try:
            changes = parse_patch(patch)
            made = [(each, await self._patched(container, each)) for each in changes]
        except PatchError as error:
            raise ToolError(str(error)) from error
        said = []
        for change, text in made:
            if text is not None:
                await self._write(container, change.target, text)
            if text is None or change.target != change.path:
                await self._exec(container, 'rm -- "$1"', change.path)
            said.append(f"{change.kind} {change.target}")
        return "\n".join(said)

    async def _patched(self, container: Container, change: FileChange) -> str | None:
        """The new text of a file; None if it is deleted."""
        if change.kind == "add":
            there = 'if test -e "$1"; then echo "$1 exists already; update it" >&2; exit 1; fi'
            await self._exec(container, there, change.path)
            return change.apply("")
        text = await self._read(container, change.path)
        return None if change.kind == "delete" else change.apply(text)


def read_file(path: str, first: int = 1, last: int = 0) -> str:
    """Read a text file, or some of its lines.

    Args:
        path: the file.
        first: number of the first line to read; lines are counted from 1.
        last: number of the last line to read; 0: to the end.
    """
    raise NotImplementedError  # the policy sees signature and docstring; ReadFileTool reads the file


def write_file(path: str, text: str) -> str:
    """Write a text file; folders above it are made, and an existing file is replaced.

    Args:
        path: the file.
        text: the whole text of the file.
    """
    raise NotImplementedError  # the policy sees signature and docstring; WriteFileTool writes the file


def apply_patch(patch: str) -> str:
    """Change text files by a patch. Either all of it is applied, or an error comes back and no file has changed.

    A patch is a unified diff (of which lines count, not their numbers), or has this form:

    *** Begin Patch
    *** Update File: path/of/file
    @@
     a line before, as it is
    -a line to remove
    +a line to add
    *** Add File: path/of/another
    +a line of the new file
    *** Delete File: path/of/a/third
    *** End Patch

    Args:
        patch: the patch.
    """
    raise NotImplementedError  # the policy sees signature and docstring; ApplyPatchTool applies the patch
