"""Launch shared by run, resume and quickstart: the progress view and the final line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rollmill.trackers.console import PlainView, RunView


def launch_run(start: Callable[[RunView | None], dict[str, Any]], as_json: bool) -> dict[str, Any]:
    """Start a run and print its final line; with `as_json` its progress goes to stderr, so that stdout holds the JSON
    alone."""
    summary = start(PlainView(sys.stderr) if as_json else None)
    if not as_json:
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        accuracy = "" if after is None else f"; accuracy {before:.3f} -> {after:.3f}"
        print(f"done: {summary['steps']} steps in {summary['seconds']:.1f} s{accuracy}; {summary['checkpoint']}")
    return summary
