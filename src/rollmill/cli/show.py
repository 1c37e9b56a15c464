"""`rollmill show RUN`: print the state of a run, the experiences of a step, or completions with their tokens."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.printing import print_json, print_line, print_table
from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

    from rollmill.types import Experience

_GOOD: tuple[str, ...] = ("#12382c", "#14573f", "#15784f", "#169a60")
_BAD: tuple[str, ...] = ("#431f29", "#662838", "#8a3047", "#b03a58")
_ODD: tuple[str, ...] = ("#2b241b", "#46351f", "#614623", "#7c5727", "#97682b", "#b2792f")


def command(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    step: Annotated[int | None, typer.Option(help="List the experiences of this step.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Print the completions of this task id (of the newest step).")
    ] = None,
    colour: Annotated[str, typer.Option("--colour", help="Colour tokens by `advantage` or `logprob`.")] = "advantage",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="One line per token: id, text, log-prob, version ...")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a run: its state, the experiences of a step (--step), or the completions of a task (--task)."""
    if colour not in ("advantage", "logprob"):
        raise ConfigError(f"--colour is advantage or logprob, not {colour!r}")
    if tokens and task is None:
        raise ConfigError("--tokens is honoured only with --task")
    if task is not None:
        _show_task(run, step, task, colour, tokens, as_json)
    elif step is not None:
        _show_step(run, step, as_json)
    else:
        _show_run(run, as_json)


def _show_run(run: Path, as_json: bool) -> None:
    from rollmill.trackers import read_metrics, read_summary, stored_steps
    from rollmill.trackers.eval_metrics import has_evaluation

    stored = stored_steps(run)
    rows = read_metrics(run)
    checkpoints = sorted((path.name for path in (run / "checkpoints").glob("step-*")), key=_step_of)
    evaluations = [
        {key: value for key, value in row.items() if key in ("step", "stage") or key.startswith("eval/")}
        for row in rows
        if has_evaluation(row)
    ]
    overview: dict[str, Any] = {
        "run": str(run),
        "steps": rows[-1]["step"] if rows else 0,
        "last": rows[-1] if rows else {},
        "evaluations": evaluations,
        "checkpoints": checkpoints,
        "stored_steps": stored,
        "summary": read_summary(run),
    }
    if as_json:
        print_json(overview)
        return
    print_line(f"run {run}: {overview['steps']} steps")
    print_line(f"checkpoints: {', '.join(checkpoints) or 'none'}")
    print_line(f"experiences: {f'{len(stored)} steps, {stored[0]} to {stored[-1]}' if stored else 'none stored'}")
    if rows:
        print_table(f"Last metrics (step {rows[-1]['step']})", ["metric", "value"], list(rows[-1].items()))
    if evaluations:
        keys = list(dict.fromkeys(key for row in evaluations for key in row))
        print_table("Evaluations", keys, [[row.get(key) for key in keys] for row in evaluations])


def _show_step(run: Path, step: int, as_json: bool) -> None:
    from rollmill.trackers import load_experiences

    listed = [
        {
            "id": one.id,
            "task": one.task_id,
            "reward": one.reward,
            "tokens": one.action_tokens,
            "stop": str(one.stop_reason),
            "source": str(one.source),
            "response": one.response,
        }
        for one in load_experiences(run, step)
    ]
    if as_json:
        print_json(listed)
    elif listed:
        print_table(f"Experiences of step {step}", list(listed[0]), [list(row.values()) for row in listed])
        print_line(f"print one with: rollmill show {run} --step {step} --task {listed[0]['task']}")
    else:
        print_line(f"step {step} learned from no experiences")


def _show_task(run: Path, step: int | None, task: str, colour: str, tokens: bool, as_json: bool) -> None:
    from rollmill.data.images import image_refs_of
    from rollmill.data.picture_turns import picture_places
    from rollmill.trackers.rollout_log import encode_experience
    from rollmill.trackers.token_texts import load_decoder, token_texts

    step, found = _find(run, step, task)
    decode = load_decoder(run)
    if as_json:
        print_json([{"step": step, **encode_experience(one), "token_texts": token_texts(one, decode)} for one in found])
        return
    for one in found:
        texts = token_texts(one, decode)
        reward = "no reward" if one.reward is None else f"reward {one.reward:g}"
        parts = "".join(f", {name} {value}" for name, value in one.reward_parts.items())
        print_line(f"== {one.id} (step {step}): {reward}{parts}, {one.action_tokens} tokens, {one.stop_reason} ==")
        for picture, turn in zip(image_refs_of(one.info), picture_places(one), strict=True):
            after = f" after turn {turn}" if turn else ""
            print_line(f"picture {picture.path} ({picture.width} x {picture.height}){after}")
        if boxes := one.info.get("boxes"):
            print_line(f"boxes in the first picture: {boxes}")
        if tokens:
            _token_table(one, texts)
        else:
            print_line(_coloured(one, texts, colour))


def _find(run: Path, step: int | None, task: str) -> tuple[int, list[Experience]]:
    """Return the experiences of `task` in `step`, or in the newest step that has any."""
    from rollmill.trackers import load_experiences, stored_steps

    stored = stored_steps(run)
    seen: dict[str, None] = {}
    for candidate in [step] if step is not None else reversed(stored):
        experiences = load_experiences(run, candidate)
        found = [one for one in experiences if one.task_id == task]
        if found:
            return candidate, found
        seen |= dict.fromkeys(one.task_id for one in experiences)
    close = difflib.get_close_matches(task, seen, n=3) or list(seen)[:3]
    where = f"step {step}" if step is not None else f"any of its {len(stored)} stored steps"
    advice = f"Nearest: {', '.join(close)}." if close else "No experiences are stored."
    raise ConfigError(f"{run} has no experience of task {task!r} in {where}. {advice}")


def _coloured(experience: Experience, texts: Sequence[str], colour: str) -> Text:
    from rich.console import Console
    from rich.text import Text

    from rollmill.trackers.console import printable
    from rollmill.trackers.token_texts import advantage_levels, surprise_levels

    by_advantage = colour == "advantage"
    levels = advantage_levels(experience) if by_advantage else surprise_levels(experience)
    few_colours = Console().color_system in (None, "standard")
    shown = Text()
    for text, level, counts in zip(texts, levels, experience.action_mask, strict=True):
        name, palette = ("green", _GOOD) if level > 0 else ("red", _BAD)
        if not by_advantage:
            name, palette = "yellow", _ODD
        ground = f"white on {name if few_colours else palette[abs(level) - 1]}" if level else ""
        style = ground if counts else "dim"
        shown.append(printable(text), style=style)
    return shown


def _token_table(experience: Experience, texts: Sequence[str]) -> None:
    advantages = [None] * len(texts) if experience.advantage is None else experience.advantage.tolist()
    columns = (
        range(len(texts)),
        experience.token_ids.tolist(),
        map(repr, texts),
        experience.logprobs.tolist(),
        experience.versions.tolist(),
        experience.action_mask.astype(int).tolist(),
        advantages,
    )
    header = ["index", "id", "text", "logprob", "version", "mask", "advantage"]
    print_table("", header, list(zip(*columns, strict=True)))


def _step_of(name: str) -> int:
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1
