"""Tools of MCP servers (Model Context Protocol, https://modelcontextprotocol.io), through the library mcp.

Connections live in an event loop of their own, in a thread: the library opens and closes each in one task, and here
whatever rollout comes first opens it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from rollmill.config.section import Endpoint
from rollmill.config.tools import ToolSection
from rollmill.errors import ConfigError, WorkflowError
from rollmill.rollout.tools.toolbox import Tool, ToolCallable, ToolError, ToolResult

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    import anyio
    import mcp
    from anyio.from_thread import BlockingPortal

    from rollmill.rollout.tools.pool import ToolPool
    from rollmill.rollout.workflow import Rollout

_CLOSE_S = 15.0  # the library gives a server a few seconds to end, and then kills it
_TAIL = 1000
_MOST_PAGES, _MOST_LATE = 100, 8
_CLOSED = "has ended, or closed the connection"


class MCPTool(ToolSection):
    """The tools of an MCP server, which is started, or connected to (extra `mcp`)."""

    needs_extra = ("mcp", "mcp")
    many: ClassVar[bool] = True
    name: Literal["mcp"] = "mcp"
    command: list[str] = []
    """The server and its arguments, which speaks MCP on stdin and stdout; `python` is the Python that runs rollmill."""
    url: Endpoint | None = None
    """Address of a server that runs already (streamable HTTP), such as http://127.0.0.1:8000/mcp. Either this or
    `command`."""
    environment: dict[str, str] = {}
    """Additional environment variables of the server. It inherits PATH, HOME and a few others."""
    folder: Path = Path()
    """Working folder of the server."""
    only: list[str] = []
    """Names of the tools that the policy may call; empty: all."""
    state: Literal["shared", "rollout"] = "shared"
    """All rollouts share a connection (and the server's process), or each has one of its own, opened by its first
    call."""
    start_s: float = Field(30.0, gt=0)
    """Timeout for the server to start and list its tools."""
    _portal: BlockingPortal = PrivateAttr()
    _shared: MCPConnection = PrivateAttr()
    _described: list[Any] = PrivateAttr()

    def unused_keys(self) -> dict[str, str]:
        found = {"description": "not honoured by `mcp`: its server describes the tools; remove it"}
        if self.url is not None:
            text = "not honoured with url, whose server runs already; remove it"
            found |= {"environment": text, "folder": text}
        return found

    def conflicts(self) -> dict[str, str]:
        if (self.url is None) == (not self.command):
            return {"command": "tool `mcp` needs either the command of a server or the url of one"}
        return {}

    def setup(self, pool: ToolPool) -> None:
        """Ask the server for its tools.

        Raises ConfigError naming the server: it cannot be started or reached, does not answer in time, or lacks a tool.
        """
        try:
            import mcp as mcp
            from anyio.from_thread import start_blocking_portal
        except ImportError as error:
            text = "the tool `mcp` needs the library mcp; install it: pip install 'rollmill[mcp]'"
            raise ConfigError(text) from error
        stack = ExitStack()
        pool.close_later(stack.close)
        self._portal = stack.enter_context(start_blocking_portal())
        self._shared = MCPConnection(self, self._portal)
        stack.callback(self._shared.close)
        try:
            self._described = self._chosen(self._shared.tools())
        except WorkflowError as error:
            raise ConfigError(f"tools: {error}") from error
        for each in self._described:
            pool.add_name(self._prefix + each.name, self)
        if self.state == "rollout":
            self._shared.close()  # it has told what there is

    def open(self, rollout: Rollout, stack: AsyncExitStack) -> list[Tool]:
        connection = self._shared
        if self.state == "rollout":
            connection = MCPConnection(self, self._portal)
            stack.push_async_callback(asyncio.to_thread, connection.close)
        return [
            Tool(self._prefix + each.name, each.description or "", each.input_schema, connection.caller(each.name))
            for each in self._described
        ]

    @property
    def _prefix(self) -> str:
        return "" if self.called is None else f"{self.called}_"

    @property
    def server(self) -> str:
        """The server's address or command, for messages."""
        return f"`{self.url or ' '.join(self.command)}`"

    def _chosen(self, found: list[Any]) -> list[Any]:
        names = [each.name for each in found]
        for name in self.only:
            if name not in names:
                text = f"tools: MCP server {self.server} has no tool {name!r} (only)"
                raise ConfigError(f"{text}; it has {', '.join(names) or 'none'}")
        if not found:
            raise ConfigError(f"tools: MCP server {self.server} has no tools; remove it")
        return [each for each in found if not self.only or each.name in self.only]


@dataclass(slots=True, eq=False)
class _OpenConnection:
    """An open connection: its client, its tools, and the event that closes it."""

    client: mcp.Client
    tools: list[Any]
    leave: anyio.Event


class MCPConnection:
    """A connection to the server of a section, opened when it is first needed, and again after it was lost."""

    def __init__(self, section: MCPTool, portal: BlockingPortal) -> None:
        self._section, self._portal, self._lock = section, portal, threading.Lock()
        self._open: _OpenConnection | None = None
        self._task: Future[None] | None = None
        self._late = 0  # calls without a result in time, since the latest result
        self._errors: IO[str] | None = None  # what the server prints on stderr

    def tools(self) -> list[Any]:
        """Descriptions of the server's tools. Blocks. Raises WorkflowError if the server cannot be used."""
        return self._opened().tools

    def caller(self, name: str) -> ToolCallable:
        """Build the callable of a tool."""
        import anyio
        import mcp
        from mcp.types import CONNECTION_CLOSED

        async def call(arguments: dict[str, Any]) -> str | list[dict[str, Any]]:
            opened = self._open
            if opened is None:
                opened = await asyncio.to_thread(self._opened)
            limit = self._section.time_limit_s
            work = self._portal.start_task_soon(opened.client.call_tool, name, arguments)
            try:
                async with asyncio.timeout(limit):
                    result = await asyncio.wrap_future(work)
            except TimeoutError:
                self._late += 1
                if self._late >= _MOST_LATE:
                    raise self._lost(opened, f"has not answered {_MOST_LATE} calls in a row") from None
                raise ToolError(f"no result after {limit:g} s") from None
            except mcp.MCPError as error:
                if error.code != CONNECTION_CLOSED:
                    raise ToolError(error.message) from error
                raise self._lost(opened, _CLOSED) from error
            except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
                raise self._lost(opened, f"{_CLOSED} ({_first(error)})") from error
            except Exception as error:  # a result that contradicts the tool's own schema, for example
                raise ToolError(f"{type(error).__name__}: {error}") from error
            self._late = 0
            content = _result_content(result)
            if result.is_error:
                raise ToolError(ToolResult(content, False).text or "the tool has failed, and does not say why")
            return content

        return call

    def close(self) -> None:
        """Close the connection, and end the server that was started for it; may be called twice. Blocks."""
        with self._lock:
            opened, task, self._open, self._task = self._open, self._task, None, None
        if opened is not None and task is not None:
            self._portal.start_task_soon(_set, opened.leave)
            _finish(task)

    def _opened(self) -> _OpenConnection:
        with self._lock:
            if self._open is None:
                self._open = self._connect()
            return self._open

    def _connect(self) -> _OpenConnection:
        section, ready = self._section, Future[_OpenConnection]()
        if self._errors is None and section.url is None:
            self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._task = self._portal.start_task_soon(self._serve, ready)
        self._task.add_done_callback(lambda task: _tell(ready, task))
        try:
            return ready.result(section.start_s)
        except TimeoutError:
            _finish(self._task, cancel=True)
            text = f"has not started and listed its tools after {section.start_s:g} s; raise start_s, or correct it"
            raise WorkflowError(f"MCP server {section.server} {text}{self._tail()}") from None
        except Exception as error:
            what = "cannot be started or reached" if section.url is None else "cannot be reached"
            text = f"MCP server {section.server} {what}: {_first(error)}; correct it, or remove the tool"
            raise WorkflowError(f"{text}{self._tail()}") from error

    async def _serve(self, ready: Future[_OpenConnection]) -> None:
        """Hold the connection until it is to be closed."""
        import anyio
        import mcp

        async with mcp.Client(self._server()) as client:
            leave, tools, cursor = anyio.Event(), list[Any](), None
            for _ in range(_MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
            if not ready.done():
                ready.set_result(_OpenConnection(client, tools, leave))
            await leave.wait()

    def _server(self) -> Any:
        import mcp

        section = self._section
        if section.url is not None:
            return section.url
        program, *arguments = section.command
        parameters = mcp.StdioServerParameters(
            command=sys.executable if program == "python" else program,
            args=arguments,
            env=section.environment,
            cwd=section.folder,
        )
        assert self._errors is not None
        return mcp.stdio_client(parameters, errlog=self._errors)  # type: ignore[arg-type]

    def _lost(self, opened: _OpenConnection, what: str) -> WorkflowError:
        """Forget a connection that has ended, or end one that hangs, so that the next call opens another."""
        with self._lock:
            task = self._task if self._open is opened else None
            if task is not None:
                self._open, self._task, self._late = None, None, 0
                self._portal.start_task_soon(_set, opened.leave)
        return WorkflowError(f"MCP server {self._section.server} {what}{self._tail()}")

    def _tail(self) -> str:
        """The last that the server has printed on stderr, for error messages."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        text = self._errors.read()[-_TAIL:].strip()
        return f"\n{text}" if text else ""


async def _set(event: anyio.Event) -> None:
    event.set()


def _tell(ready: Future[_OpenConnection], task: Future[None]) -> None:
    """Pass the failure of a connection on, if it has failed before it was ready."""
    if not ready.done():
        error = None if task.cancelled() else task.exception()
        ready.set_exception(error or ConnectionError("it has ended"))


def _finish(task: Future[None], *, cancel: bool = False) -> None:
    """Wait for the task of a connection to end; it is cancelled at the latest."""
    if cancel or not wait([task], _CLOSE_S).done:
        task.cancel()


def _first(error: BaseException) -> str:
    """The first cause, since the library raises groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _result_content(result: Any) -> str | list[dict[str, Any]]:
    """The content of a result: its texts and pictures, else its structured content as JSON. Other content is named,
    not shown."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    parts = [_part(each) for each in result.content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(content: Any) -> dict[str, Any]:
    if content.type == "text":
        return {"type": "text", "text": content.text}
    if content.type == "image":
        return {"type": "image", "image": f"data:{content.mime_type};base64,{content.data}"}
    return {"type": "text", "text": f"({content.type}, not shown)"}
