"""`rollmill buffer`: inspect, export, import and clean up the buffer of a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.printing import print_json, print_line, print_table
from rollmill.errors import ConfigError, DeadlineError
from rollmill.files import describe_non_file

if TYPE_CHECKING:
    from rollmill.buffer.base import ExperienceKind, Group
    from rollmill.buffer.sql import SqlStore

HELP = "Inspect, export, import and clean up the buffer of a run."

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KindOption = Annotated[str | None, typer.Option("--kind", help="usual, expert, preference, rated or partial.")]

_START_S, _LOOK_S = 600.0, 0.2
"""Timeout for a process that starts a run, and polling interval."""
_COLUMNS = ("number", "id", "kind", "state", "task", "experiences", "reward", "version", "step", "writer", "author")


def ls(
    run: Run,
    kind: KindOption = None,
    task: Annotated[str | None, typer.Option(help="Only this task id.")] = None,
    author: Annotated[str | None, typer.Option(help="Only feedback of this person or application.")] = None,
    reward_at_least: Annotated[float | None, typer.Option(help="Minimum mean reward of the group.")] = None,
    reward_at_most: Annotated[float | None, typer.Option(help="Maximum mean reward of the group.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=2**31, help="Maximum number of groups.")] = 20,
    as_json: Json = False,
) -> None:
    """List groups of experiences, the newest first."""
    from rollmill.buffer.maintenance import GroupFilter, list_newest

    which = GroupFilter(_kind(kind), task, author, reward_at_least, reward_at_most)
    with _opened(run) as store:
        rows = list_newest(store, which, limit)
    if as_json:
        print_json(rows)
    elif rows:
        print_table("", _COLUMNS, [[row[name] for name in _COLUMNS] for row in rows])
    else:
        print_line("no such groups")


def show(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="ID", help="Id or number of a group, or id of an experience.")],
    as_json: Json = False,
) -> None:
    """Print a group: prompt, responses, rewards, and the weight versions of its tokens."""
    from rollmill.buffer.base import version_segments
    from rollmill.buffer.maintenance import find_group
    from rollmill.trackers.rollout_log import encode_experience

    with _opened(run) as store:
        row = find_group(store, name)
        [group] = store.groups([row["number"]])
    if as_json:
        inside = [
            encode_experience(each)
            | {"segments": [[part.start, part.end, part.version] for part in version_segments(each)]}
            for each in group.experiences
        ]
        print_json(row | {"info": group.info, "experiences": inside})
        return
    _print_group(row, group)
    for each in group.experiences:
        reward = "no reward" if each.reward is None else f"reward {each.reward:g}"
        parts = "".join(
            f", {part} {'-' if value is None else f'{value:g}'}" for part, value in each.reward_parts.items()
        )
        print_line(f"\n== {each.id}: {reward}{parts}, {each.action_tokens} tokens, {each.stop_reason} ==")
        found = [f"tokens {part.start} to {part.end} by version {part.version}" for part in version_segments(each)]
        print_line("; ".join(found) or "no tokens of a policy")
        print_line(f"-- prompt --\n{each.prompt}\n-- response --\n{each.response}")


def stats(run: Run, as_json: Json = False) -> None:
    """Count groups by kind, state, writer and version; show size in bytes and a histogram of rewards."""
    from rollmill.buffer.maintenance import buffer_statistics

    with _opened(run) as store:
        found = buffer_statistics(store)
    if as_json:
        print_json(found)
        return
    print_line(f"{found['groups']} groups, {found['experiences']} experiences, {found['bytes'] / 2**20:.1f} MiB")
    print_line(f"{found['tasks']} tasks; {found['uses']} times a step learned from a group")
    for key in ("state", "writer", "author", "version"):
        if counts := found[f"by_{key}"]:
            print_line(f"{key}: " + ", ".join(f"{value} {count}" for value, count in counts.items()))
    most = max((each["count"] for each in found["rewards"]), default=1)
    for each in found["rewards"]:
        name = f"{each['from']:g}" if each["from"] == each["to"] else f"{each['from']:.3g} to {each['to']:.3g}"
        print_line(f"reward {name:<16} {each['count']:>8} {'#' * round(30 * each['count'] / most)}")
    if found["not_judged"]:
        print_line(f"no reward {found['not_judged']}")


def export(
    run: Run,
    to: Annotated[Path, typer.Option("--to", metavar="FILE.parquet", help="Output file; an existing one is replaced.")],
    kind: KindOption = None,
    as_json: Json = False,
) -> None:
    """Write groups to a Parquet file, one row per experience."""
    from rollmill.buffer.base import ExperienceKind
    from rollmill.buffer.parquet import import_pyarrow, write_parquet

    import_pyarrow()
    if to.is_dir():
        raise ConfigError(f"--to {to} is a folder; give the name of a file in it, such as {to / 'mine.parquet'}")
    kinds = [found] if (found := _kind(kind)) is not None else list(ExperienceKind)
    with _opened(run) as store:
        groups = (group for each in kinds for _, group in store.read(each))
        count = write_parquet(groups, to, run_id=store.run_id, tokenizer=_fingerprint(run))
    _report({"groups": count, "file": str(to)}, f"{count} groups written to {to}", as_json)


def import_(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File written by `rollmill buffer export`.")],
    wait_s: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for a run that does not exist yet."),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Add the groups of a Parquet file, which the run then trains on like its own. Known groups are left unchanged.

    If the run is just being started, wait for it.
    """
    from itertools import islice

    from rollmill.buffer import DATABASE_FILE, create_run_store, database_url, open_run_store
    from rollmill.buffer.parquet import import_groups

    if what := describe_non_file(file):
        raise ConfigError(f"{file}: {what}")
    _await_start(run, wait_s)
    makes = (run / "config.yaml").is_file() and database_url(run) is None and not (run / DATABASE_FILE).is_file()
    with closing(
        create_run_store(run) if makes and _in_database(run) else open_run_store(run, read_only=False)
    ) as store:
        groups, seen, new = import_groups(file, store.run_id, _fingerprint(run)), 0, 0
        while page := list(islice(groups, 64)):
            seen, new = seen + len(page), new + store.put(page)
    _report({"groups": seen, "new": new}, f"{new} groups added, {seen - new} were there already", as_json)


def gc(
    run: Run,
    older_than: Annotated[
        int, typer.Option("--older-than", min=0, help="Delete groups last used more than N steps ago.")
    ] = 100,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Delete groups that were used long ago, expired or removed; groups that a checkpoint may need are kept."""
    from rollmill.buffer import replay_capacity
    from rollmill.buffer.maintenance import prune
    from rollmill.orchestrator.checkpoint import Checkpoints

    with _opened(run, read_only=dry_run) as store:
        oldest = min(Checkpoints(run).steps(), default=0)
        capacity = replay_capacity(run)
        found = prune(store, oldest_step=oldest, older_than=older_than, capacity=capacity, dry_run=dry_run)
    counts = {name: getattr(found, name) for name in ("learned", "continued", "expired", "removed", "bytes")}
    kinds = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "bytes")
    verb = "would be deleted" if dry_run else "deleted"
    text = f"{found.groups} groups {verb} ({kinds}), {found.bytes / 2**20:.1f} MiB; oldest checkpoint: step {oldest}"
    _report(counts | {"groups": found.groups, "oldest_checkpoint": oldest}, text, as_json)


@contextmanager
def _opened(run: Path, *, read_only: bool = True) -> Iterator[SqlStore]:
    from rollmill.buffer import open_run_store

    with closing(open_run_store(run, read_only=read_only)) as store:
        yield store


def _await_start(run: Path, wait_s: float) -> None:
    """Wait until a run has written its settings, id and tokenizer, which an import needs.

    Raises:
        ConfigError: there is no run, and no process that starts one, after `wait_s` seconds.
        DeadlineError: the process that starts it takes too long.
    """
    from rollmill.models.run_tokenizer import TOKENIZER_FOLDER, TOKENIZER_INFO_FILE

    known = [run / "config.yaml", run / "machine.json", run / TOKENIZER_FOLDER / TOKENIZER_INFO_FILE]
    began, announced = time.monotonic(), False
    while not all(file.is_file() for file in known):
        from rollmill.supervision.run_lock import is_run_locked

        starting = run.is_dir() and is_run_locked(run)
        waited = time.monotonic() - began
        if not starting and waited >= wait_s:
            missing = next(file for file in known if not file.is_file()).relative_to(run)
            raise ConfigError(
                f"{run} holds no run yet (no {missing}): start it first, for example "
                f"by `rollmill run FILE --set mode=train --out {run}`, and import while it waits; or let this command "
                "wait for it by --wait SECONDS"
            )
        if starting and waited >= max(wait_s, _START_S):
            advice = "See what it says; raise --wait if its model takes longer to load."
            raise DeadlineError("the import", f"the process that starts the run in {run}", waited, advice)
        if not announced:
            print(f"waiting for the run in {run} to start", file=sys.stderr, flush=True)
        announced = True
        time.sleep(_LOOK_S)


def _in_database(run: Path) -> bool:
    """Return whether a run will store its groups in a database."""
    from rollmill.config.loader import load_run

    loaded = load_run(run / "config.yaml", out=run, require_files=False)
    return any(each.buffer.in_database(each.persistent or loaded.config.is_split) for each in loaded.stages)


def _fingerprint(run: Path) -> str:
    """Return the fingerprint of the run's tokenizer; empty if none is stored."""
    from rollmill.models.run_tokenizer import TOKENIZER_FOLDER, TOKENIZER_INFO_FILE, load_run_fingerprint

    return load_run_fingerprint(run) if (run / TOKENIZER_FOLDER / TOKENIZER_INFO_FILE).is_file() else ""


def _kind(name: str | None) -> ExperienceKind | None:
    from rollmill.buffer.base import ExperienceKind

    try:
        return None if name is None else ExperienceKind(name)
    except ValueError as error:
        raise ConfigError(f"--kind is {', '.join(ExperienceKind)}, not {name!r}") from error


def _print_group(row: dict[str, Any], group: Group) -> None:
    origin = f"by {row['writer']}" + (f" ({group.author})" if group.author else "")
    where = f"{row['kind']}, {row['state']}, {origin}"
    print_line(f"group {row['id']} (number {row['number']}) of task {row['task']}: {where}")
    for use in row["uses"]:
        priority = "" if use["priority"] is None else f", priority {use['priority']:g} afterwards"
        print_line(f"learned from in step {use['step']}{priority}")
    if row["removed_by"]:
        print_line(f"removed by {row['removed_by']}")
    if group.info:
        print_line(f"info: {json.dumps(group.info, default=str)}")


def _report(found: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print_line(text)


COMMANDS = {"ls": ls, "show": show, "stats": stats, "export": export, "import": import_, "gc": gc}
"""Name of a command -> function."""
