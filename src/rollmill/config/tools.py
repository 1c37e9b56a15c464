"""`tools`: tools that a policy may call in a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rollmill.config.section import Endpoint, NamedSection, module_sections, section_union


class ToolSection(NamedSection):
    """A tool chosen by name; its other keys are its options."""

    many: ClassVar[bool] = False
    """It stands for several tools, which have their own names."""

    called: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Tool name shown to the policy. Default: `name`. The tools of `mcp` have the server's names, with this and `_` in
    front."""
    description: str | None = None
    """Description shown to the policy. Default: the tool's own."""
    time_limit_s: float = Field(10.0, gt=0)
    """Timeout of one call, reported to the policy."""
    result_chars: int = Field(4000, ge=20)
    """Maximum length of a result in characters; longer results are truncated in the middle."""

    @property
    def policy_name(self) -> str:
        """Tool name shown to the policy."""
        return self.called or self.name

    def arguments(self) -> dict[str, Any]:
        """Returns the options of the tool itself."""
        common = ToolSection.model_fields
        return {key: value for key, value in super().arguments().items() if key not in common}


class CalculatorTool(ToolSection):
    """Exact arithmetic with rational numbers."""

    implementation = "rollmill.rollout.tools.calculator:build_calculator"
    name: Literal["calculator"] = "calculator"

    def unused_keys(self) -> dict[str, str]:
        return {"time_limit_s": "not honoured by `calculator`, whose numbers are bounded; remove it"}


class PythonTool(ToolSection):
    """Python programs in the sandbox."""

    implementation = "rollmill.rollout.tools.python:build_python_tool"
    name: Literal["python"] = "python"
    state: Literal["rollout", "call"] = "rollout"
    """Lifetime of variables: all calls of a rollout share an interpreter, or each call has a fresh one."""
    packages: list[str] = []
    """Import names of packages that programs may use besides the standard library, and their dependencies."""
    memory_mb: int = Field(512, ge=32)
    """Address space of each process, MiB."""
    jobs: int = Field(0, ge=0)
    """Maximum number of concurrent programs. 0: one per CPU core."""
    sessions: int = Field(64, ge=1)
    """Maximum number of concurrent interpreters, one per rollout; other rollouts wait. Only with `state: rollout`."""
    sandbox: Literal["auto", "namespaces", "landlock", "plain"] = "auto"
    """Isolation of programs; `auto` is the first backend that works on this machine. `plain` isolates nothing."""

    def unused_keys(self) -> dict[str, str]:
        text = "not honoured with state `call`, which keeps none; it is with `rollout`"
        return {"sessions": text} if self.state == "call" else {}


class SearchTool(ToolSection):
    """Keyword search over local documents (BM25; extra `search`)."""

    needs_extra = ("search", "bm25s")
    implementation = "rollmill.rollout.tools.search:build_search"
    name: Literal["search"] = "search"
    path: Path
    """A .jsonl file whose rows have `text` and optionally `title`, or a folder of .txt and .md files."""
    top_k: int = Field(3, ge=1)
    """Number of passages to return."""
    passage_words: int = Field(200, ge=10)
    """Maximum passage length in words. Longer documents are split, between paragraphs where possible."""


class MCPTool(ToolSection):
    """The tools of an MCP server, which is started, or connected to (extra `mcp`)."""

    needs_extra = ("mcp", "mcp")
    implementation = "rollmill.rollout.tools.mcp_server:build_mcp_tools"
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


if TYPE_CHECKING:
    ToolConfig = ToolSection
else:
    ToolConfig = section_union(module_sections(__name__, ToolSection), kind="tool")
