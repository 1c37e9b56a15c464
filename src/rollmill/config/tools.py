"""`tools`: tools that a policy may call in a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rollmill.config.section import NamedSection, module_sections, section_union


class ToolSection(NamedSection):
    """A tool chosen by name; its other keys are its options."""

    called: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Tool name shown to the policy. Default: `name`."""
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
        """See Section.unused_keys."""
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
        """See Section.unused_keys."""
        text = "not honoured with state `call`, which keeps none; it is with `rollout`"
        return {"sessions": text} if self.state == "call" else {}


class SearchTool(ToolSection):
    """Keyword search over local documents (BM25; extra `search`)."""

    implementation = "rollmill.rollout.tools.search:build_search"
    name: Literal["search"] = "search"
    path: Path
    """A .jsonl file whose rows have `text` and optionally `title`, or a folder of .txt and .md files."""
    top_k: int = Field(3, ge=1)
    """Number of passages to return."""
    passage_words: int = Field(200, ge=10)
    """Maximum passage length in words. Longer documents are split, between paragraphs where possible."""


if TYPE_CHECKING:
    ToolConfig = ToolSection
else:
    ToolConfig = section_union(module_sections(__name__, ToolSection), kind="tool")
