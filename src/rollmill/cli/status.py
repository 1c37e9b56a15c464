"""`rollmill status RUN`: show a run's progress and its processes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.printing import print_json, print_line, print_table

if TYPE_CHECKING:
    from rollmill.trackers.domains import DomainState
    from rollmill.trackers.heartbeat import HeartbeatRecord, RunStatus

HEADER = ("process", "host", "pid", "does", "waits for", "since", "version", "last heartbeat", "state")

DOMAIN_HEADER = ("domain", "reward", "share of the batch", "accuracy", "state")


def command(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a run's progress, and what each process does or waits for."""
    from rollmill.trackers.heartbeat import read_status

    status = read_status(run)
    if as_json:
        print_json(_as_json(run, status))
        return
    print_line(f"run {run}: {status.state}")
    print_line(_where(status))
    for line in (*_restarts(status), *_scalings(status)):
        print_line(line)
    if status.domains:
        print_table("", DOMAIN_HEADER, [_domain_row(each) for each in status.domains])
    if not status.processes:
        print_line("no process has reported yet: none has started")
        return
    print_table("", HEADER, [_row(heartbeat, state, status.now) for heartbeat, state in status.processes])


def _where(status: RunStatus) -> str:
    at = status.position
    parts = [f"stage {at.stage}, step {at.step} of {at.stage_steps}"]
    if at.total_steps != at.stage_steps:
        parts.append(f"{at.total} of {at.total_steps} in all")
    if at.seconds_per_step is not None:
        parts.append(f"{at.seconds_per_step:.3g} s a step")
    if at.reward is not None:
        parts.append(f"reward {at.reward:.3f}")
    if status.state == "running" and status.seconds_left is not None:
        parts.append(f"about {duration(status.seconds_left)} left")
    return ", ".join(parts)


def _restarts(status: RunStatus) -> list[str]:
    """Describe the restarts of the process that trains."""
    if not status.restarts:
        return []
    last = status.restarts[-1]
    reason = str(last.get("reason", "")).partition("\n")[0]
    return [f"restarts: {len(status.restarts)}, the last one {duration(status.now - last['time'])} ago: {reason}"]


def _domain_row(domain: DomainState) -> list[object]:
    reward, accuracy = (None if each is None else f"{each:.3f}" for each in (domain.reward, domain.accuracy))
    return [domain.name, reward, f"{domain.share:.2f}", accuracy, "paused" if domain.paused else "active"]


def _scalings(status: RunStatus) -> list[str]:
    """Describe the last change of the number of explorers."""
    if not status.scalings:
        return []
    last = status.scalings[-1]
    return [f"explorers: {last.get('text', '')} ({duration(status.now - last['time'])} ago)"]


def _row(heartbeat: HeartbeatRecord, state: str, now: float) -> list[object]:
    marks = {
        "alive": "alive",
        "late": "LATE: silent",
        "stopped": f"STOPPED: `kill -CONT {heartbeat.pid}` continues it",
        "gone": "GONE: no such process",
        "ended": heartbeat.ended,
    }
    silent = f"{duration(now - heartbeat.beat)} ago"
    version = None if heartbeat.version < 0 else heartbeat.version
    doing = f"last: {heartbeat.doing}" if state in ("gone", "ended") else heartbeat.doing
    since = f"{duration(now - heartbeat.since)} ago"
    return [
        heartbeat.name,
        heartbeat.host,
        heartbeat.pid,
        doing,
        heartbeat.waits_for or None,
        since,
        version,
        silent,
        marks[state],
    ]


def duration(seconds: float) -> str:
    """Format seconds such as `4 s`, `3 min` or `2.5 h`."""
    seconds = max(seconds, 0.0)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _as_json(run: Path, status: RunStatus) -> dict[str, object]:
    return {
        "run": str(run),
        "state": status.state,
        **asdict(status.position),
        "seconds_left": status.seconds_left,
        "restarts": status.restarts,
        "domains": [asdict(domain) for domain in status.domains],
        "scalings": status.scalings,
        "processes": [asdict(heartbeat) | {"state": state} for heartbeat, state in status.processes],
    }
