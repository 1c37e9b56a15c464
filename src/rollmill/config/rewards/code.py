"""`rewards`: programs that have to pass tests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.rewards.base import RewardSection

CodeExtraction = Literal["auto", "fence", "whole"]
OutputComparison = Literal["lines", "exact", "tokens"]


class CodeReward(RewardSection):
    """1 if a Python function or program passes the task's tests in the sandbox, else 0 or the fraction it passes."""

    name: Literal["code"]
    credit: Literal["all", "fraction"] = "all"
    """`all`: 1 if every test passes, else 0. `fraction`: the weight of the tests that pass, of the weight of all."""
    kinds: list[str] = []
    """Kinds of tests that are run and count, such as visible, hidden and generated. Empty: all of them."""
    extract: CodeExtraction = "auto"
    """Where the code stands: in the last fenced block, in the whole text, or in the first of these found."""
    time_limit_s: float = Field(5.0, gt=0)
    """Hard limit for one test (of a check function: for all it does)."""
    total_limit_s: float = Field(30.0, gt=0)
    """Hard limit for all tests of one completion. Tests that are not reached fail as `timeout`."""
    memory_mb: int = Field(512, ge=32)
    """Address space of the code's process, MiB."""
    output_kb: int = Field(1024, ge=1)
    """What the code may print in one test, and the size of a value that it may return, KiB."""
    packages: list[str] = []
    """Import names of packages that the code may use beside the standard library, with what they need themselves."""
    compare: OutputComparison = "lines"
    """How the output of programs is compared: line by line without regard to the amount of white space, exactly, or
    word by word with `tolerance` for numbers that are not whole."""
    tolerance: float = Field(1e-6, ge=0, lt=1)
    """Difference, absolute or relative, that a number may have where the expected one is a float; for programs with
    `compare: tokens`."""
    tuples_as_lists: bool = True
    """Whether a tuple is right where a list is expected, and a list where a tuple is."""
    judge: str | None = None
    """FILE.py:NAME of a function of your own `(input, output, expected) -> bool | float from 0 to 1` that compares in
    place of all that; it runs under `time_limit_s`."""
    jobs: int = Field(0, ge=0)
    """Completions judged at the same time. 0: as many as there are processor cores."""
    sandbox: Literal["auto", "namespaces", "landlock", "plain"] = "auto"
    """How code is isolated; `auto` is the first that works on this machine. `plain` isolates nothing."""
