"""`tools`: what a policy may call in a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator

from rollmill.config.section import NamedSection, RegisteredUnion, expand_name


class ToolSection(NamedSection):
    """A tool chosen by name; its other keys are its options."""

    called: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """What the policy calls it by. Default: its name."""
    description: str | None = None
    """What the policy is told of it. Default: the tool's own."""
    time_limit_s: float = Field(10.0, gt=0)
    """Longest time for one call. The policy is told when it is over."""
    result_chars: int = Field(4000, ge=20)
    """Longest result in characters; the middle of a longer one is left out."""

    @property
    def policy_name(self) -> str:
        """What the policy calls it by."""
        return self.called or self.name

    def arguments(self) -> dict[str, Any]:
        """The options of the tool itself."""
        common = ToolSection.model_fields
        return {key: value for key, value in super().arguments().items() if key not in common}


class CalculatorTool(ToolSection):
    """Exact arithmetic with rational numbers."""

    name: Literal["calculator"] = "calculator"


class PythonTool(ToolSection):
    """Python programs in the sandbox."""

    name: Literal["python"] = "python"
    state: Literal["rollout", "call"] = "rollout"
    """How long names live: all calls of a rollout share an interpreter, or each call has a fresh one."""
    packages: list[str] = []
    """Import names of packages that programs may use beside the standard library, with what they need themselves."""
    memory_mb: int = Field(512, ge=32)
    """Address space of each process, MiB."""
    jobs: int = Field(0, ge=0)
    """Programs that run at the same time. 0: as many as there are processor cores."""
    sessions: int = Field(64, ge=1)
    """Rollouts that have an interpreter at the same time; others wait. Only with `state: rollout`."""
    sandbox: Literal["auto", "namespaces", "landlock", "plain"] = "auto"
    """How programs are isolated; `auto` is the first that works on this machine. `plain` isolates nothing."""


class SearchTool(ToolSection):
    """Search for passages of local documents by their words (BM25; extra `search`)."""

    name: Literal["search"] = "search"
    path: Path
    """A .jsonl file whose rows have `text`, perhaps `title`; or a folder of .txt and .md files."""
    top_k: int = Field(3, ge=1)
    """Passages that are found."""
    passage_words: int = Field(200, ge=10)
    """Longest passage in words. Longer documents are cut, between paragraphs where possible."""


ToolConfig = Annotated[
    SerializeAsAny[Annotated[CalculatorTool | PythonTool | SearchTool, Field(discriminator="name")]],
    WrapValidator(RegisteredUnion("tool")),
    BeforeValidator(expand_name),
]
