"""`rewards`: code that must pass tests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.rewards.base import RewardSection

CodeExtraction = Literal["auto", "fence", "whole"]
OutputComparison = Literal["lines", "exact", "tokens"]


class CodeReward(RewardSection):
    """1 if a Python function or program passes the task's tests in the sandbox, else 0 or the fraction of tests
    passed."""

    implementation = "rollmill.rewards.code.reward:CodeScorer"
    decides = True
    largest = 1.0
    timeout_is_verdict = True
    name: Literal["code"]
    credit: Literal["all", "fraction"] = "all"
    """`all`: 1 if every test passes, else 0. `fraction`: the weight of passed tests over the weight of all tests."""
    kinds: list[str] = []
    """Kinds of tests to run, such as visible, hidden and generated. Empty: all."""
    extract: CodeExtraction = "auto"
    """Location of the code in the answer: the last fenced block, all of it, or (`auto`) a fenced block if there is one,
    else all of it. Code in reasoning is never run."""
    time_limit_s: float = Field(5.0, gt=0)
    """Timeout of one test (for a check function, of all that it does)."""
    total_limit_s: float = Field(30.0, gt=0)
    """Timeout of all tests of one completion. Tests that did not run fail as `timeout`."""
    memory_mb: int = Field(512, ge=32)
    """Address space of the code's process, MiB."""
    output_kb: int = Field(1024, ge=1)
    """Maximum output of one test, and maximum size of a returned value, KiB."""
    packages: list[str] = []
    """Import names of packages that the code may use besides the standard library, and their dependencies."""
    compare: OutputComparison = "lines"
    """Comparison of program output: line by line ignoring the amount of white space, exactly, or word by word with
    `tolerance` for numbers that are not integers."""
    tolerance: float = Field(1e-6, ge=0, lt=1)
    """Accepted absolute or relative error where the expected number is a float; for programs with `compare: tokens`."""
    tuples_as_lists: bool = True
    """Whether tuples and lists are interchangeable."""
    judge: str | None = None
    """FILE.py:NAME of a function `(input, output, expected) -> bool | float from 0 to 1` that replaces the comparison;
    it runs under `time_limit_s`."""
    jobs: int = Field(0, ge=0)
    """Maximum number of completions tested at the same time. 0: one per CPU core."""
    sandbox: Literal["auto", "namespaces", "landlock", "plain"] = "auto"
    """Isolation of code; `auto` is the first backend that works on this machine. `plain` isolates nothing."""
