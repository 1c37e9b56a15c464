"""GPU check: GPU-marked tests and GPU benchmarks with the installed torch, in under nine minutes.

Installs nothing. Results: bench/results/gpu/. Each part has its own time limit. A missing module is reported by name
and fails the check, except TRL, which is only a peer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import machine, rollout, step
from bench.harness import RESULTS, ROOT, Side, import_path, note, run_in_turn
from bench.report import finish
from bench.worker import versions

FOLDER = RESULTS / "gpu"
#: part -> time limit in seconds; the sum is under nine minutes
LIMITS = {"tests": 180, "rollout": 220, "step": 110}
NEEDED = ("torch", "transformers", "numpy", "pydantic", "yaml", "jinja2", "psutil", "safetensors", "pytest")
DEVICE = "cuda"


def main(arguments: list[str], only_json: bool) -> int:
    """Exit code 0 if every part passed or was skipped for a stated reason."""
    parser = argparse.ArgumentParser(prog="bench gpu_check", description=__doc__)
    parser.add_argument("--parts", default=",".join(LIMITS))
    parser.add_argument("--part", choices=tuple(LIMITS), help="run this part alone, in this process")
    parser.add_argument("--allow-missing", action="store_true", help="exit 0 where there is no CUDA device")
    args = parser.parse_args(arguments)
    if args.part:
        return int({"tests": _tests, "rollout": _rollout, "step": _step}[args.part]())
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        note(f"gpu check: {', '.join(missing)} cannot be imported by {sys.executable}; nothing was run")
        return 1
    import torch

    if not torch.cuda.is_available():
        print(f"no CUDA device (torch {torch.__version__}): nothing was run")
        return 0 if args.allow_missing else 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    outcomes = {part: _limited(part) for part in args.parts.split(",")}
    packages = ("torch", "transformers", "triton", "trl", "numpy")
    summary = {"bench": "gpu_check", "parts": outcomes, "machine": _machine(), "versions": versions(*packages)}
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return int(any(outcome["outcome"] == "failed" for outcome in outcomes.values()))


def _limited(part: str) -> dict[str, Any]:
    """Run one part in a separate process group, and kill it at its time limit."""
    note(f"{part} (at most {LIMITS[part]} s)")
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "gpu_check", "--part", part], cwd=ROOT, start_new_session=True
    )
    reason = None
    try:
        code = process.wait(LIMITS[part])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code, reason = process.wait(), f"not finished within {LIMITS[part]} s"
    outcome = {"outcome": "failed" if code else "passed", "seconds": round(time.perf_counter() - began, 1)}
    return outcome | ({"reason": reason or f"exit code {code}"} if code else {})


def _tests() -> int:
    """Run the GPU-marked tests; imports only files that have some, so that other tests' dependencies don't matter."""
    files = [str(path) for path in sorted(Path(ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    if not files:
        note("no test is marked gpu")
        return 1
    without_plugins = "addopts=-q --strict-markers --import-mode=importlib"  # pyproject.toml names some; they may lack
    command = [sys.executable, "-m", "pytest", "-o", without_plugins, "-m", "gpu", "-p", "no:cacheprovider", "-rs"]
    report = [f"--junitxml={FOLDER / 'tests.xml'}"]
    return subprocess.run(
        [*command, *report, *files], cwd=ROOT, env={**os.environ, "PYTHONPATH": import_path()}
    ).returncode


def _rollout() -> int:
    cases, raw = [], []
    for name in ("m25", "m600"):
        measured = run_in_turn(
            rollout.sides(name, "auto", "", {"vllm"}, DEVICE), 3, warmups=2, pinned=False, deadline_s=150
        )
        cases += rollout.compare(name, measured)
        raw += measured
    _finish("rollout", cases, raw)
    return 0


def _step() -> int:
    """Compare with TRL if it is installed; else measure ours alone and record the reason."""
    sides = [Side("ours", "bench.ours.step", ("--model", "m25", "--device", DEVICE))]
    if find_spec("trl") is not None and find_spec("datasets") is not None:
        for kind in ("fp32", "bf16"):
            options = ("--model", "m25", "--device", DEVICE, "--dtype", kind)
            sides.append(Side(f"trl {kind}", "bench.peers.trl_step", options))
    measured = run_in_turn(sides, 5, warmups=2, pinned=False, deadline_s=90)
    if len(measured) > 1:
        _finish("step", [step.compare("m25", measured)], measured)
        return 0
    note("TRL is not installed: our side was measured alone")
    record = {"bench": "step", "skipped": "TRL is not installed", "machine": _machine(), "rounds": measured[0].rounds}
    (FOLDER / "step.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _finish(bench: str, cases: list[Any], raw: list[Any]) -> None:
    found = {one.name: one.ready["versions"] for one in raw}
    finish(bench, cases, versions=found, only_json=False, folder=FOLDER, raw=raw, machine_info=_machine())


def _machine() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    properties = torch.cuda.get_device_properties(0)
    memory = round(properties.total_memory / 2**30, 1)
    return machine.describe() | {"gpu": properties.name, "gpu_memory_gib": memory, "cuda": torch.version.cuda}
