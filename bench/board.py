"""Seconds and tokens to a stated accuracy on held-out tasks: ours against TRL's GRPOTrainer.

Per task and seed, a stage of SFT on a flawed teacher makes a checkpoint; both sides practise from it until the target.
Both are tuned on two other seeds, over the same types, learning rates and batches; ours also has the settings of
`FAST`. The fastest setting of each side counts. Then five seeds are measured, one side after the other on one core.
Evaluations do not count: the sampled accuracy on 500 held-out tasks every two steps.

TRL's vLLM modes are left out: they send weights over NCCL, which needs GPUs.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from bench.harness import RESULTS, ROOT, BenchError, Side, Worker, need, note
from bench.learn import checkpoint
from bench.models import cache_dir
from bench.report import Case, finish
from bench.step import TRL_HOW
from rollmill.user_code import import_object

TUNED_ON = (10, 11)  #: seeds
HELD_OUT = 500


@dataclass(frozen=True)
class Row:
    """A task of the board.

    Attributes:
        file: run file with a stage that makes the checkpoint, and one that practises.
        every: steps between two evaluations.
        checkpoint: function of the example that writes the model, where the run file has a folder.
        held_out: tasks of the evaluations, where the run file has several sets.
        shape: keys of `model.new` that differ from the run file.
    """

    file: str
    target: float
    every: int = 2
    max_steps: int = 80
    checkpoint: str | None = None
    held_out: dict[str, Any] | None = None
    shape: dict[str, int] = field(default_factory=dict)


LARGER = {"hidden_size": 256, "intermediate_size": 768, "layers": 4}  #: 3.2M parameters instead of 0.2M to 0.4M
ROWS = {
    "repair": Row("src/rollmill/quickstart/addition.yaml", 0.86),
    "repair_3m": Row("src/rollmill/quickstart/addition.yaml", 0.86, shape=LARGER),
    "sorting": Row("bench/board/sorting.yaml", 0.85),
    "sorting_3m": Row("bench/board/sorting.yaml", 0.85, shape=LARGER),
    "countdown": Row("bench/board/countdown.yaml", 0.36),
    "countdown_3m": Row("bench/board/countdown.yaml", 0.36, shape=LARGER),
    "frozen_lake": Row("examples/frozen_lake.yaml", 0.6),
    "frozen_lake_3m": Row("examples/frozen_lake.yaml", 0.6, shape=LARGER),
    "tools": Row("examples/tool_agent.yaml", 0.6),
    "tools_3m": Row("examples/tool_agent.yaml", 0.6, shape=LARGER),
    "pictures": Row(
        "examples/see.yaml",
        0.75,
        checkpoint="see.py:write_checkpoint",
        held_out={
            "function": "see.py:questions",
            "options": {"held_out": True},
            "chat": True,
            "fields": {"rewards": "rewards"},
        },
    ),
}
#: What both sides are tuned over: a factor of the run file's learning rate, optimizer steps per batch, passes over it.
GRID = {"as given": (1, 1, 1), "lr x2": (2, 1, 1), "lr x2, 2 updates": (2, 2, 1), "lr x2, 2 epochs": (2, 1, 2)}
#: Settings of ours that TRL has no counterpart for.
FAST = {"taskset.sampler": "{name: posterior}", "trainer.metrics_share": "0"}


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench board", description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--grid", nargs="+", default=list(GRID), choices=GRID, help="settings that both are tuned over")
    parser.add_argument("--target", type=float, help="accuracy to reach, instead of the task's own")
    parser.add_argument(
        "--ablation",
        action="store_true",
        help="measure ours without each of its own settings; needs the results of these tasks",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "board", help="folder of the measured tasks")
    args = parser.parse_args(arguments)
    need("trl", TRL_HOW)
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    for name in filter(None, args.rows.split(",")):
        row = ROWS[name] if args.target is None else replace(ROWS[name], target=args.target)
        path = args.out / f"{name}.json"
        if args.ablation:
            found = json.loads(path.read_text())
            found["ablation"] = ablation(name, row, seeds, found["tuned"]["ours"]["best"])
            path.write_text(json.dumps(found, indent=1) + "\n")
        else:
            measure(name, row, seeds, args.grid, path)
    report(args.out, only_json)


def measure(name: str, row: Row, seeds: Sequence[int], grid: Sequence[str], path: Path) -> None:
    """Tune both sides on a row, and measure them on every seed; the file is written after each, as a row takes long."""
    found = list[dict[str, Any]]()
    tuned = {side: tune(name, row, side, grid) for side in ("ours", "trl")}
    for seed in seeds:
        for side in ("ours", "trl"):
            one = run(name, row, side, tuned[side]["options"], seed)
            found.append({"side": side, "seed": seed, **one})
        whole = {"row": name, "target": row.target, "tuned": tuned, "runs": found}
        path.write_text(json.dumps(whole, indent=1) + "\n")


def ablation(name: str, row: Row, seeds: Sequence[int], best: str) -> list[dict[str, Any]]:
    """Measure ours with its best setting of a row, without each part of `FAST`, and as the run file is."""
    ways = {"all": FAST, **{f"without {key}": {k: v for k, v in FAST.items() if k != key} for key in FAST}}
    stage = yaml.safe_load(practice_file(name, row, TUNED_ON[0]).read_text())
    dtype, grid = best.split(" ", 1)
    tuned = {**_changes(grid, stage), "trainer.precision": dtype}
    sides = {way: {**parts, **tuned} for way, parts in ways.items()} | {"as given": {}}
    return [
        {"way": way, "seed": seed, **run(name, row, "ours", _options(changed), seed)}
        for seed in seeds
        for way, changed in sides.items()
    ]


def tune(name: str, row: Row, side: str, settings: Sequence[str] = tuple(GRID)) -> dict[str, Any]:
    """Find the setting of one side that reaches the target on most seeds for tuning, and the fastest of those.

    Raises BenchError if none reaches it on any.
    """
    stage = yaml.safe_load(practice_file(name, row, TUNED_ON[0]).read_text())
    if side == "ours":
        kinds = {dtype: _options({**FAST, "trainer.precision": dtype}) for dtype in ("fp32", "bf16")}
    else:
        kinds = {dtype: ["--dtype", dtype] for dtype in ("fp32", "bf16")}
    tried: dict[str, dict[str, Any]] = {}
    best, most = "", 0  # with the number of seeds that it reached the target on

    def attempt(setting: str, options: list[str]) -> float:
        """Seconds per step; the setting is the best if it reaches the target more often or sooner than all before."""
        nonlocal best, most
        limit, runs = (tried[best]["seconds"] if most == len(TUNED_ON) else None), list[dict[str, Any]]()
        seconds = 0.0
        for seed in TUNED_ON:
            if limit is None or seconds < limit:
                runs.append(run(name, row, side, options, seed, None if limit is None else limit - seconds))
                seconds += runs[-1]["seconds"]
        tried[setting] = {"seconds": round(seconds, 2), "options": options, "runs": runs}
        reached = sum(each["reached"] for each in runs)
        if reached > most or (best and reached == most and seconds < tried[best]["seconds"]):
            best, most = setting, reached
        return seconds / float(sum(each["steps"] for each in runs))

    for grid in settings:
        options = _options(_changes(grid, stage))
        pace = {kind: attempt(f"{kind} {grid}", [*own, *options]) for kind, own in kinds.items()}
        fastest = min(pace, key=lambda kind: pace[kind])
        kinds = {fastest: kinds[fastest]}  # go on with the type that was faster per step
    if not best:
        raise BenchError(f"{name}: no setting of {side} reached {row.target}: {tried}")
    return {"best": best, "options": tried[best]["options"], "tried": tried}


def _changes(grid: str, stage: dict[str, Any]) -> dict[str, Any]:
    """Keys of the run file that a setting of `GRID` changes."""
    lr, updates, epochs = GRID[grid]
    return {
        "trainer.lr": lr * stage["trainer"]["lr"],
        "trainer.updates_per_batch": updates,
        "trainer.epochs_per_batch": epochs,
    }


def _options(changes: dict[str, Any]) -> list[str]:
    return [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]


def run(name: str, row: Row, side: str, options: list[str], seed: int, limit: float | None = None) -> dict[str, Any]:
    """Practise until the target, for at most `max_steps` steps or about `limit` seconds."""
    own = ("--row", name) if side == "trl" else ()
    given = ("--file", str(practice_file(name, row, seed)), "--seed", str(seed), *own, *options)
    worker = Worker(Side(f"{side} {name}", "bench.ours.board" if side == "ours" else "bench.peers.trl_board", given))
    try:
        accuracies, rounds = [worker.ready["accuracy"]], list[dict[str, Any]]()
        while len(rounds) * row.every < row.max_steps and (not rounds or accuracies[-1] < row.target):
            rounds.append(worker.run(steps=row.every))
            accuracies.append(rounds[-1]["accuracy"])
            if limit is not None and sum(each["seconds"] for each in rounds) > limit:
                break
    finally:
        worker.close()
    sums = {key: round(sum(each[key] for each in rounds), 2) for key in ("seconds", "tokens", "completions")}
    found = {
        "reached": accuracies[-1] >= row.target,
        **sums,
        "steps": len(rounds) * row.every,
        "accuracy": [round(each, 3) for each in accuracies],
        "times": [round(each["seconds"], 2) for each in rounds],
        "versions": worker.ready["versions"],
    }
    if side == "ours":
        phases = rounds[-1]["phases"]
        found["phases"] = {key: round(sum(each["phases"].get(key, 0.0) for each in rounds), 2) for key in phases}
    note(f"  {name} {side} seed {seed} {' '.join(options)}: {found['seconds']} s, {found['accuracy']}")
    return found


def practice_file(name: str, row: Row, seed: int) -> Path:
    """The run file of the practice stage, beside the checkpoint that it begins from; both are made if absent."""
    source = ROOT / row.file
    whole = _absolute(yaml.safe_load(source.read_text()), source.parent)
    whole["model"].get("new", {}).update(row.shape)
    first, last = whole.pop("stages")
    held_out = whole.pop("evaluation")
    taskset = held_out["taskset"] if row.held_out is None else _absolute(row.held_out, source.parent)
    if row.checkpoint is not None:
        model = cache_dir() / f"board-{name}-new-{seed}"
        if not model.exists():
            import_object(str(_absolute(row.checkpoint, source.parent)))(model, seed)
        whole["model"] = {"path": str(model)}
    shared = {key: whole[key] for key in ("model", "taskset") if key in whole}
    warm_start = {**shared, **{key: value for key, value in first.items() if key != "evaluation"}}
    warm_start["taskset"].pop("fields", None)  # names of rewards, of which SFT has none
    folder = checkpoint(f"board-{name}", warm_start, seed)
    evaluated = {**taskset, "options": {**taskset["options"], "size": HELD_OUT}}
    evaluation = {"taskset": evaluated, "greedy": False, "every": 1000}
    stage = {**whole, **last, "model": {"path": str(folder / "model")}, "evaluation": evaluation, "steps": 1000}
    path = folder / "practice.yaml"
    path.write_text(yaml.safe_dump(stage, sort_keys=False))
    return path


def _absolute(node: Any, folder: Path) -> Any:
    """The node with functions of files beside the run file named from anywhere."""
    if isinstance(node, dict):
        return {key: _absolute(each, folder) for key, each in node.items()}
    if isinstance(node, list):
        return [_absolute(each, folder) for each in node]
    return f"{folder}/{node}" if isinstance(node, str) and re.match(r"\w+\.py:\w+$", node) else node


def report(folder: Path, only_json: bool) -> None:
    """Compare the rows that were measured so far."""
    cases, versions = list[Case](), dict[str, Any]()
    for name in ROWS:
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        measured = json.loads(path.read_text())
        sides = {side: [one for one in measured["runs"] if one["side"] == side] for side in ("ours", "trl")}
        versions |= {side: runs[0]["versions"] for side, runs in sides.items()}
        for unit in ("seconds", "tokens"):
            ours, peer = ([one[unit] for one in sides[side]] for side in sides)
            if None in peer:
                continue  # not counted
            extra = {
                "target": measured["target"],
                "settings": {side: measured["tuned"][side]["best"] for side in sides},
                "not_reached": {side: sum(not one["reached"] for one in runs) for side, runs in sides.items()},
            }
            cases.append(
                Case(f"{name}: {unit}", "TRL", unit[0] if unit == "seconds" else unit, ours, peer, False, extra)
            )
    headline = [case for case in cases if case.unit == "s"]
    finish("board", cases, headline=headline, versions=versions, only_json=only_json, folder=folder.parent)
