"""Completions to a joint accuracy on the four domains of examples/kimi.yaml: shares by need against the same for all.

Per seed, the example's first stage makes a warm-started checkpoint. Its second stage trains from there, once with
`mixing: {by: need}` and once with `{by: weight}`, with weights of 1 and all else equal, and is evaluated every 4 steps.
The score is the mean of the domains' sampled accuracies. A run counts until its score, averaged with that of the
evaluation before, reaches the target.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import rollmill
from bench.harness import BenchError, note
from bench.report import Case, finish
from rollmill.config.loader import load_run
from rollmill.user_code import import_object

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "kimi.yaml"
DOMAINS = ("math", "code", "school", "pictures")
EVERY, PEER = 4, "weight"


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench mixing", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--warm-steps", type=int, default=800)
    args = parser.parse_args(arguments)
    raw: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in map(int, args.seeds.split(",")):
            warm = _warm_start(Path(folder) / f"warm-{seed}", seed, args.warm_steps)
            for by in ("need", PEER):
                raw.append(_race(Path(folder) / f"{by}-{seed}", warm, by, seed, args))
                note(f"  {by} seed {seed}: {[round(each, 3) for each in raw[-1]['scores']]}")
    reached = {by: [_cost(one, args.target) for one in raw if one["by"] == by] for by in ("need", PEER)}
    case = Case(
        f"need: completions to a mean accuracy of {args.target:.0%}",
        PEER,
        "completions",
        reached["need"],
        reached[PEER],
        False,
        {"runs": raw},
    )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    finish("mixing", [case], versions=versions, only_json=only_json)


def _warm_start(out: Path, seed: int, steps: int) -> Path:
    """Run the example's first stage on a new model; returns its checkpoint."""
    model = out.with_suffix(".model")
    import_object(f"{EXAMPLE.with_suffix('.py')}:write_checkpoint")(model, seed)
    config = load_run(EXAMPLE, [f"seed={seed}", f"model.path={model}"]).resolved()
    only = {"stages": [config["stages"][0] | {"steps": steps, "evaluation": None}]}
    file = out.with_suffix(".json")  # JSON is YAML
    file.write_text(json.dumps(config | only))
    rollmill.run(file, [], out)
    return out / f"checkpoints/step-{steps:06d}"


def _race(out: Path, warm: Path, by: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run the second stage from a warm-started checkpoint; returns the scores, and the completions before each."""
    settings = [
        f"seed={seed}",
        f"model.path={warm}",
        f"mixing={{by: {by}}}",
        *(f"domains.{name}.weight=1" for name in DOMAINS),
        f"evaluation.every={EVERY}",
        f"stages.1.steps={args.steps}",
        "checkpoint.every=1000",
    ]
    config = load_run(EXAMPLE, settings).resolved()
    file = out.with_suffix(".json")
    file.write_text(json.dumps(config | {"stages": config["stages"][1:]}))
    rollmill.run(file, [], out)
    scores, completions, made = [], [], 0.0
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        made += row.get("completions", 0)
        if "eval/math/sampled" in row:
            scores.append(sum(row[f"eval/{name}/sampled"] for name in DOMAINS) / len(DOMAINS))
            completions.append(made)
    return {"by": by, "seed": seed, "scores": scores, "completions": completions}


def _cost(one: dict[str, Any], target: float) -> float:
    """Completions until the target. Raises BenchError if it was not reached."""
    scores = one["scores"]
    for index in range(1, len(scores)):
        if (scores[index - 1] + scores[index]) / 2 >= target:
            return float(one["completions"][index])
    raise BenchError(f"mixing by {one['by']}, seed {one['seed']}, did not reach {target}: {scores}")
