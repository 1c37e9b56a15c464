"""GPU check: GPU-marked tests, then benchmarks on CUDA, with the installed torch, in nine minutes at most.

Installs nothing; `make gpu-wheels` brings what is missing, to be taken along. Results:
bench/results/gpu/. Each part has its own time limit, and writes its results as they come, so that what was measured
stays when the machine goes. A missing module is reported by name and fails the check, except TRL and vLLM, which are
only peers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import machine, models, train_step
from bench.harness import RESULTS, ROOT, BenchError, Measured, Side, import_path, note, run_in_turn, vllm_python
from bench.models import SHAPES
from bench.report import Case, finish
from bench.roof import Batch, decode_bytes, rollout_seconds, share, training_operations, training_seconds
from bench.worker import versions

#: part -> time limit in seconds; the sum is nine minutes
LIMITS = {"tests": 210, "rollout": 120, "train": 110, "large": 100}
NEEDED = ("torch", "transformers", "numpy", "pydantic", "yaml", "jinja2", "psutil", "safetensors", "sqlalchemy")
DEVICE = "cuda"


@dataclass(frozen=True)
class Size:
    """What the benchmarks compute."""

    small: str  #: benchmark model that peers run, too
    large: str  #: one that is made on the GPU
    rolled_out: Batch
    trained: Batch
    roof: Side
    folder: Path  #: of the results

    def rollout(self, model: str) -> tuple[str, ...]:
        """Arguments of a rollout's worker."""
        prompts = models.prompts(model, self.rolled_out.prompts, self.rolled_out.prompt)
        counts = ("--group", str(self.rolled_out.group), "--new-tokens", str(self.rolled_out.new_tokens))
        return ("--prompts", json.dumps(prompts), *counts)

    def training(self, model: str) -> tuple[str, ...]:
        """Arguments of a training step's worker."""
        counts = ("--prompts", str(self.trained.prompts), "--group", str(self.trained.group))
        return ("--model", model, *counts, "--new-tokens", str(self.trained.new_tokens), "--dtype", "bf16", *ON_GPU)


ON_GPU = ("--device", DEVICE)
FULL = Size(
    "m600",
    "m7600",
    Batch(prompts=32, group=8, new_tokens=256),
    Batch(prompts=8, group=8, new_tokens=512),
    Side("roof", "bench.ours.roof", ON_GPU),
    RESULTS / "gpu",
)
TRIAL = Size(
    "tiny",
    "tiny",
    Batch(prompts=4, group=4, new_tokens=16),
    Batch(prompts=4, group=4, new_tokens=16),
    Side("roof", "bench.ours.roof", (*ON_GPU, "--small")),
    ROOT / "build" / "gpu-trial",
)


def main(arguments: list[str], only_json: bool) -> int:
    """Exit code 0 if every part passed or was skipped for a stated reason."""
    parser = argparse.ArgumentParser(prog="bench gpu_check", description=__doc__)
    parser.add_argument("--parts", default=",".join(LIMITS))
    parser.add_argument("--part", choices=tuple(LIMITS), help="run this part alone, in this process")
    parser.add_argument("--trial", action="store_true", help="with the smallest model: tries the benchmark itself")
    parser.add_argument("--allow-missing", action="store_true", help="exit 0 where there is no CUDA device")
    args = parser.parse_args(arguments)
    size = TRIAL if args.trial else FULL
    if args.part == "tests":
        return _tests(size.folder)
    if args.part:
        {"rollout": _rollout, "train": _train, "large": _large}[args.part](size)
        return 0
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        note(f"gpu check: {', '.join(missing)} cannot be imported by {sys.executable}; `make gpu-wheels` brings them")
        return 1
    import torch

    if not torch.cuda.is_available():
        print(f"no CUDA device (torch {torch.__version__}): nothing was run")
        return 0 if args.allow_missing else 1
    size.folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Any] = {}
    for part in args.parts.split(","):
        outcomes[part] = _limited(part, trial=args.trial)
        packages = ("torch", "transformers", "triton", "trl", "vllm", "numpy")
        summary = {"bench": "gpu_check", "parts": outcomes, "machine": _machine(), "versions": versions(*packages)}
        (size.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return int(any(outcome["outcome"] == "failed" for outcome in outcomes.values()))


def _limited(part: str, *, trial: bool) -> dict[str, Any]:
    """Run one part in a separate process group, and kill it at its time limit."""
    note(f"{part} (at most {LIMITS[part]} s)")
    began = time.perf_counter()
    command = [sys.executable, "-m", "bench", "gpu_check", "--part", part, *["--trial"] * trial]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    reason = None
    try:
        code = process.wait(LIMITS[part])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code, reason = process.wait(), f"not finished within {LIMITS[part]} s"
    outcome = {"outcome": "failed" if code else "passed", "seconds": round(time.perf_counter() - began, 1)}
    return outcome | ({"reason": reason or f"exit code {code}"} if code else {})


def _tests(folder: Path) -> int:
    """Run the GPU-marked tests; imports only files that have some, so that other tests' dependencies don't matter.

    Each test's outcome is in tests.log as soon as it is known.
    """
    files = [str(path) for path in sorted(Path(ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    plugins = "-p no:cacheprovider --disable-plugin-autoload -p timeout"
    if os.cpu_count() != 1 and find_spec("xdist") is not None:
        plugins += f" -p xdist -n {min((os.cpu_count() or 1) // 2, 8) or 1} --dist worksteal"
    addopts = f"addopts=-v -rs --strict-markers --import-mode=importlib {plugins}"
    command = [sys.executable, "-m", "pytest", "-o", addopts, "-m", "gpu and not thorough"]
    with (folder / "tests.log").open("w") as log:
        done = subprocess.Popen(
            [*command, f"--junitxml={folder / 'tests.xml'}", *files],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": import_path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.stdout is not None
        for line in done.stdout:
            log.write(line)
            log.flush()
            if "PASSED" not in line:
                note(line.rstrip())
    return done.wait()


def _rollout(size: Size) -> None:
    """Tokens per second against vLLM, where it is installed, and transformers' generate."""
    given = ("--model", str(models.model_dir(size.small)), *size.rollout(size.small))
    ours = Side("ours", "bench.ours.rollout", (*given, "--dtype", "bf16", *ON_GPU))
    peers = [Side("transformers", "bench.peers.hf_rollout", (*given, *ON_GPU))]
    try:
        peers.append(Side("vllm", "bench.peers.vllm_rollout", (*given, "--dtype", "bfloat16"), vllm_python()))
    except BenchError as error:
        note(f"without vLLM: {error}")
    for there in ([], peers):  # a peer that fails takes nothing away
        roof, mine, *others = run_in_turn([size.roof, ours, *there], 3, warmups=2, pinned=False, deadline_s=90)
        found = [
            Case(size.small, each.name, "tokens/s", mine.values("tokens_per_s"), each.values("tokens_per_s"), True)
            for each in others
        ]
        _finish(
            size, "rollout", [_against_roof(size.small, size.rolled_out, roof, mine), *found], [roof, mine, *others]
        )


def _train(size: Size) -> None:
    """Seconds of an optimizer step against TRL, where it is installed."""
    given = size.training(size.small)
    ours, peers = Side("ours", "bench.ours.train_step", given), []
    if find_spec("trl") is not None and find_spec("datasets") is not None:
        one = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        for count in (8, 16):
            options = (*given, "--micro-batch", str(count))
            peers.append(Side(f"trl, {count} a pass", "bench.peers.trl_train_step", options, env=one))
    else:
        note("TRL is not installed: our side is measured alone")
    for there in ([], peers) if peers else ([],):
        roof, mine, *others = run_in_turn([size.roof, ours, *there], 3, warmups=2, pinned=False, deadline_s=90)
        found = [train_step.compare(size.small, [mine, *others])] if others else []
        _finish(
            size, "train", [_trained_against_roof(size.small, size.trained, roof, mine), *found], [roof, mine, *others]
        )


def _large(size: Size) -> None:
    """Rollouts and training of a large model, made on the GPU, against the roof; one after the other."""
    given = ("--model", size.large, *size.rollout(size.large), "--dtype", "bf16", *ON_GPU)
    sides = [size.roof, Side("ours", "bench.ours.rollout", given)]
    roof, rolled_out = run_in_turn(sides, 2, warmups=1, pinned=False, deadline_s=60)
    cases = [_against_roof(size.large, size.rolled_out, roof, rolled_out)]
    _finish(size, "large", cases, [roof, rolled_out])
    given = (*size.training(size.large), "--param-dtype", "bf16", "--checkpointing")
    side = Side("ours, train", "bench.ours.train_step", given)
    [trained] = run_in_turn([side], 2, warmups=1, pinned=False, deadline_s=60)
    cases.append(_trained_against_roof(size.large, size.trained, roof, trained))
    _finish(size, "large", cases, [roof, rolled_out, trained])


def _against_roof(model: str, batch: Batch, roof: Measured, mine: Measured) -> Case:
    """A rollout against the least time, with the share of the memory's bandwidth that its decode passes reach."""
    least, bound = rollout_seconds(SHAPES[model], batch, "bf16", roof)
    seconds = mine.values("seconds")
    extra = {"share_of_roof": share(least, seconds), "bound": bound, "peak_gb": max(mine.values("peak_gb"))}
    if (kind := _data_sheet()) is not None:
        rate = sum(decode_bytes(SHAPES[model], batch, "bf16")) / statistics.median(seconds)
        extra["share_of_bandwidth"] = round(rate / kind.bandwidth, 3)
    return Case(f"{model} rollout", f"roof ({bound})", "s", seconds, [least] * len(seconds), False, extra)


def _trained_against_roof(model: str, batch: Batch, roof: Measured, mine: Measured) -> Case:
    """A training step against the least time, with its share of the data sheet's operations (MFU)."""
    least, seconds = training_seconds(SHAPES[model], batch, "bf16", roof), mine.values("seconds")
    extra = {"share_of_roof": share(least, seconds), "peak_gb": max(mine.values("peak_gb"))}
    if (kind := _data_sheet()) is not None:
        rate = training_operations(SHAPES[model], batch) / statistics.median(seconds)
        extra["mfu"] = round(rate / kind.flops, 3)
    return Case(f"{model} train", "roof (products)", "s", seconds, [least] * len(seconds), False, extra)


def _data_sheet() -> Any:
    """The data sheet of this GPU; None if its name is not known."""
    from rollmill.apps.plan.planning.gpus import GPU_KINDS  # whose package needs what may be missing

    torch = importlib.import_module("torch")
    name = torch.cuda.get_device_properties(0).name.lower()
    return next((kind for key, kind in GPU_KINDS.items() if key in name), None)


def _finish(size: Size, bench: str, cases: list[Any], raw: list[Any]) -> None:
    found = {one.name: one.ready["versions"] for one in raw}
    finish(bench, cases, versions=found, only_json=False, folder=size.folder, raw=raw, machine_info=_machine())


def _machine() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    properties = torch.cuda.get_device_properties(0)
    memory = round(properties.total_memory / 2**30, 1)
    return machine.describe() | {"gpu": properties.name, "gpu_memory_gib": memory, "cuda": torch.version.cuda}
