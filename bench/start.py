"""Time from nothing to a first token and to a rising reward: a wheel, a fresh environment, and `rollmill quickstart`.

The wheel is built from the working tree, and installed with all that it needs into a new environment; how long that
takes depends on the package index. Then, in new processes on a warm disk, from the start of Python:

- imports of all that a run needs, against those of transformers that a model needs;
- the first token of the quickstart's model, sampled by `TrainablePolicy`, against transformers' `generate`;
- `rollmill plan` of a model of 6.3 billion parameters (no peer).

`quickstart` has seconds from the command to the first step, to the evaluation before the reinforcement learning, and to
the first one that is better.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bench.harness import ROOT, BenchError, Measured, note
from bench.report import Case, finish

_DEADLINE_S = 1800
_IMPORTS = {
    "ours": "import rollmill; rollmill.run; print()",
    "transformers": "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel; "
    "print()",
}
_TOKEN = {
    "ours": "import rollmill, sys; policy = rollmill.TrainablePolicy(sys.argv[1]); "
    "print(policy.sample(['12+34='], n=1, max_new_tokens=1)[0][0].response)",
    "transformers": "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer; "
    "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]); "
    "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
    "ids = tokenizer('12+34=', return_tensors='pt').input_ids; "
    "print(tokenizer.decode(model.generate(ids, max_new_tokens=1)[0, ids.shape[1]:]))",
}
_LARGE = {
    "name": "large",
    "steps": 10,
    "model": {
        "path": "new",
        "new": {"hidden_size": 4096, "layers": 30, "heads": 32, "kv_heads": 32, "intermediate_size": 11008}
        | {"context": 4096, "tokenizer": {"kind": "bpe", "vocab_size": 32000}},
    },
    "taskset": {"function": "rollmill.quickstart.addition:rows", "options": {"size": 400, "digits": 2}},
    "rewards": [{"name": "format", "pattern": ".*[0-4]"}],
    "rollout": {"batch": 16, "group_size": 8, "max_new_tokens": 48},
    "algorithm": {"name": "grpo", "kl": 0.01},
}
"""A run file of a model of 6.3 billion parameters."""


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", type=Path, help="interpreter of an environment that has rollmill; installs nothing")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-start-") as name:
        folder = Path(name)
        install = {} if args.python else _install(folder)
        python = args.python or folder / "environment/bin/python"
        quickstart = _quickstart(python, folder / "run")
        note(f"  quickstart: {quickstart}")
        model = _model(folder / "run", folder / "model")
        (folder / "large.yaml").write_text(yaml.safe_dump(_LARGE))
        commands = {
            "import": {side: ["-c", text] for side, text in _IMPORTS.items()},
            "first token": {side: ["-c", text, str(model)] for side, text in _TOKEN.items()},
        }
        plan = ["-m", "rollmill", "plan", str(folder / "large.yaml"), "--estimate"]
        rounds: dict[str, list[dict[str, float]]] = {"ours": [], "transformers": []}
        for number in range(-1, args.rounds):  # the first one warms the disk
            for side, results in rounds.items():
                found: dict[str, float] = {}
                for what, command in commands.items():
                    found |= _timed(python, command[side], what.replace(" ", "_"), folder)
                found |= _timed(python, plan, "plan", folder) if side == "ours" else {}
                note(f"  {'warm-up' if number < 0 else f'round {number + 1}'}: {side} {found}")
                results += [] if number < 0 else [found]
    cases = []
    own = {key: [each[key] for each in rounds["ours"]] for key in rounds["ours"][0]}
    for what in commands:
        key = what.replace(" ", "_")
        ours, peer = ([each[f"{key}_s"] for each in rounds[side]] for side in ("ours", "transformers"))
        processor = {side: statistics.median(each[f"{key}_processor_s"] for each in rounds[side]) for side in rounds}
        extra = {f"processor_s_{side}": seconds for side, seconds in processor.items()}
        cases.append(Case(f"{what}, from the start of Python", "transformers alone", "s", ours, peer, False, extra))
    cases[0].extra |= {
        "plan_s": statistics.median(own["plan_s"]),
        "plan_processor_s": statistics.median(own["plan_processor_s"]),
        "quickstart": quickstart,
        "install": install,
    }
    raw = [Measured(side, {}, each) for side, each in rounds.items()]
    finish("start", cases, versions=_versions(python if args.python else None, install), only_json=only_json, raw=raw)


def _install(folder: Path) -> dict[str, Any]:
    """Build the wheels and install them into a new environment. Seconds of each, and the size of what was installed."""
    wheels, environment = folder / "wheel", folder / "environment"
    libraries = [str(path.parent) for path in ROOT.glob("libs/*/pyproject.toml")]
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    began = time.perf_counter()
    _run([sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT), *libraries], "pip wheel")
    built = time.perf_counter()
    _run([sys.executable, "-m", "venv", str(environment)], "venv")
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    _run(
        [str(environment / "bin/python"), *pip, "install", *constraints, *map(str, wheels.glob("*.whl"))], "pip install"
    )
    ended = time.perf_counter()
    packages = sorted(path.name for path in environment.glob("lib/python*/site-packages/*.dist-info"))
    size = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file() and not path.is_symlink())
    found: dict[str, Any] = {"wheel_s": round(built - began, 2), "install_s": round(ended - built, 2)}
    found |= {"gb": round(size / 1e9, 2), "packages": [name.removesuffix(".dist-info") for name in packages]}
    note(f"  installed in {found['install_s']} s: {len(packages)} packages, {found['gb']} GB")
    return found


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, cwd=ROOT)
    if done.returncode:
        raise BenchError(f"{what} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")


def _environment(python: Path) -> dict[str, str]:
    """Nothing of the tree, so that what is measured is what was installed."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSTARTUP")}
    return kept | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def _timed(python: Path, command: list[str], key: str, folder: Path) -> dict[str, float]:
    """Wall and processor seconds of a process, from its start to its first line, or else to its end."""
    before = os.times()
    began = time.perf_counter()
    process = subprocess.Popen(
        [str(python), *command], cwd=folder, env=_environment(python), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    seconds = time.perf_counter() - began
    _, errors = process.communicate(timeout=_DEADLINE_S)
    if process.returncode:
        raise BenchError(f"{command} failed with exit code {process.returncode}:\n{errors.decode()[-2000:]}")
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {f"{key}_s": round(seconds, 3), f"{key}_processor_s": round(processor, 3)}


def _quickstart(python: Path, run: Path) -> dict[str, Any]:
    """Seconds from the start of `rollmill quickstart` to its first step, to the evaluation before the reinforcement
    learning, and to the first better one, with their accuracies."""
    log = run.parent / "quickstart.log"
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python), "-m", "rollmill", "quickstart", "--out", str(run)],
            cwd=run.parent,
            env=_environment(python),
            stdout=output,
            stderr=output,
        )
        found: dict[str, Any] = {}
        while process.poll() is None:
            if time.perf_counter() - began > _DEADLINE_S:
                process.kill()
                raise BenchError(f"rollmill quickstart has not ended within {_DEADLINE_S} s")
            _note_progress(run / "metrics.jsonl", round(time.perf_counter() - began, 2), found)
            time.sleep(0.02)
    _note_progress(run / "metrics.jsonl", round(time.perf_counter() - began, 2), found)
    if process.returncode or "better" not in found:
        raise BenchError(f"rollmill quickstart failed, or did not learn:\n{log.read_text()[-2000:]}")
    names = ("first_step_s", "before_s", "before", "rising_s", "better")
    return {name: found[name] for name in names} | {"whole_s": round(time.perf_counter() - began, 2)}


def _note_progress(path: Path, now: float, found: dict[str, Any]) -> None:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return
    rows = [json.loads(line) for line in lines[-2:]] if len(lines) > 1 else []
    if lines:
        found.setdefault("first_step_s", now)
    for row in rows:
        if (accuracy := row.get("eval/greedy")) is None or "better" in found:
            continue
        if row["stage"] != "repair":
            found |= {"before_s": found.get("before_s", now), "before": accuracy}
        elif accuracy > found.get("before", 1.0):
            found |= {"rising_s": now, "better": accuracy}


def _model(run: Path, folder: Path) -> Path:
    """A copy of the newest checkpoint as a model of any program: without manifest and state."""
    newest = max((run / "checkpoints").glob("step-*"))
    shutil.copytree(newest, folder, ignore=shutil.ignore_patterns("manifest.json", "state.json", "trainer.pt"))
    return folder


def _versions(python: Path | None, install: dict[str, Any]) -> dict[str, Any]:
    wanted = ("torch", "transformers", "rollmill")
    if python is None:
        pairs = (name.rsplit("-", 1) for name in install["packages"])
        return {"python": sys.version.split()[0]} | {name: version for name, version in pairs if name in wanted}
    text = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {wanted!r}}}))"
    done = subprocess.run([str(python), "-c", text], capture_output=True, text=True, check=True)
    versions: dict[str, Any] = json.loads(done.stdout)
    return versions
