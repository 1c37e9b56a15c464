"""Seconds until `rollmill ui` shows the first curve of a long run in a browser, and the memory of its server."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.harness import ROOT, BenchError, Measured, import_path, need, note
from bench.report import Case, finish
from bench.worker import versions

PEER = "TensorBoard"
_DEADLINE_S = 300
_ADDRESS = re.compile(r"http://[^/\s]+/")
Measurement = dict[str, float]


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench ui", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="in completions that the run stores")
    args = parser.parse_args(arguments)
    need("playwright", "pip install playwright")
    need("tensorboard", "pip install tensorboard")
    with tempfile.TemporaryDirectory(prefix="bench-ui-") as folder:
        began = time.perf_counter()
        run = make_run(Path(folder) / "runs" / "long", args.steps, args.tokens)
        note(f"  made a run of {args.steps} steps in {time.perf_counter() - began:.0f} s")
        rounds: dict[str, list[Measurement]] = {"ours": [], PEER: []}
        with open_browser() as browser:
            for number in range(args.rounds):
                for name, measure in (("ours", measure_ours), (PEER, measure_tensorboard)):
                    rounds[name].append(measure(run, browser))
                    note(f"  round {number + 1}: {name} {rounds[name][-1]}")

    def values(name: str, key: str) -> list[float]:
        return [each[key] for each in rounds[name]]

    compared = {
        "first_curve_s": ("first curve, from the start of the command", "s"),
        "processor_s": ("processor time of the server up to it", "s"),
        "memory_mb": ("memory of the server, at most", "MB"),
    }
    own = {key: values("ours", key) for key in rounds["ours"][0] if key not in compared}
    about = {"steps": args.steps, "tokens": args.tokens} | own
    cases = [
        Case(f"{args.steps:,} steps: {what}", PEER, unit, values("ours", key), values(PEER, key), False, about)
        for key, (what, unit) in compared.items()
    ]
    raw = [Measured(name, {}, each) for name, each in rounds.items()]
    finish(
        "ui",
        cases,
        headline=cases[:1],
        versions=versions("fastapi", "uvicorn", "tensorboard", "playwright"),
        only_json=only_json,
        raw=raw,
    )


def make_run(run: Path, steps: int, tokens: int) -> Path:
    """A run directory as a run of GRPO leaves it, with TensorBoard's files beside: metrics, completions, an evaluation
    every 100 steps. The numbers are drawn."""
    import numpy as np
    import yaml

    from rollmill.config.model import TokenizerConfig
    from rollmill.models.from_scratch import train_tokenizer
    from rollmill.models.run_tokenizer import save_run_tokenizer
    from rollmill.trackers.builtin.tensorboard import TensorBoardTracker
    from rollmill.trackers.metrics_log import MetricsLog, TrackedRun
    from rollmill.trackers.rollout_log import RolloutLog

    run.mkdir(parents=True)
    section = {"name": "long", "steps": steps, "model": {"path": "new"}, "algorithm": {"name": "grpo"}}
    (run / "config.yaml").write_text(yaml.safe_dump(section))
    tokenizer = train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), ["".join(map(chr, range(32, 127)))] * 4)
    save_run_tokenizer(run, tokenizer, tokenizer.eos_token_id)
    rng = np.random.default_rng(0)
    log, store = MetricsLog(run / "metrics.jsonl"), RolloutLog(run / "rollouts")
    tracker = TensorBoardTracker(completions=0)
    tracker.setup(TrackedRun(run, "long"))
    count = max(1, tokens // steps // 25)
    length = max(2, tokens // steps // count)
    for step in range(1, steps + 1):
        row = _metrics(step, steps, rng)
        log.append(row)
        tracker.write(row)
        store.write(step, [_experience(rng, step, n, length, tokenizer.encode) for n in range(count)])
    log.close()
    tracker.close()
    return run


def _metrics(step: int, steps: int, rng: Any) -> dict[str, Any]:
    noise = rng.normal(size=40)
    reward = step / steps + 0.1 * noise[0]
    names = [
        f"{group}/part-{n}"
        for group in ("reward", "loss", "pipeline/filter", "judging/exact", "tools/add")
        for n in range(6)
    ]
    row = {name: float(value) for name, value in zip(names, noise, strict=False)}
    row |= {"reward/mean": float(reward), "entropy": float(1.5 - step / steps + 0.05 * noise[1])}
    row |= {"loss": float(noise[2]), "grad_norm": float(abs(noise[3])), "length/mean": float(40 + noise[4])}
    row |= {"tokens": 1000.0, "seconds/rollout": 0.5, "seconds/train": 0.4, "seconds/total": 1.0}
    if step % 100 == 0:
        row["eval/greedy"] = step / steps
    return {"step": step, "stage": "train", "version": step, **row}


def _experience(rng: Any, step: int, index: int, length: int, encode: Callable[[str], list[int]]) -> Any:
    import numpy as np

    from rollmill.types import Experience, Turn

    prompt, answer = f"What is {step} and {index}? ", f"It is {step + index}. " * length
    head, tail = encode(prompt)[:8], encode(answer)[: max(1, length - 8)]
    mask = np.arange(len(head) + len(tail)) >= len(head)
    return Experience(
        id=f"main-{step:06d}/{index}",
        task_id=f"sums/{step % 500}",
        group=f"main-{step:06d}",
        token_ids=np.array([*head, *tail], np.int32),
        action_mask=mask,
        logprobs=np.where(mask, -rng.exponential(0.5, len(mask)), 0).astype(np.float32),
        versions=np.where(mask, step - 1, -1).astype(np.int32),
        reward=float(rng.random() < 0.5),
        turns=[Turn("prompt", 0, len(head), prompt), Turn("assistant", len(head), len(mask), answer[:60])],
        prompt=prompt,
        response=answer[:60],
        advantage=mask.astype(np.float32),
    )


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield a headless Chromium. Raises BenchError if there is none."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise BenchError("chromium is not installed; as root: apt-get install chromium, or: make chromium-installed")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


def measure_ours(run: Path, browser: Any) -> Measurement:
    """Open the run's curves, then its completions and one of them."""
    with serving([sys.executable, "-m", "rollmill", "ui", str(run.parent), "--port", "0"], browser) as (
        page,
        address,
        server,
    ):
        began = server.create_time()
        page.goto(f"{address}#/run?run={run.name}&tab=curves")
        page.locator(".chart canvas").first.wait_for()
        page.locator(".chart .legend b").first.wait_for()
        first, processor = time.time() - began, processor_s(server)

        def change_axis() -> None:
            page.get_by_label("Over").select_option("tokens")
            page.locator(".slot:first-child .chart:not(.stale)").first.wait_for()

        def open_completions() -> None:
            page.get_by_role("tab", name="Rollouts").click()
            page.locator(".rollouts tbody tr").first.wait_for()

        def search() -> None:
            page.get_by_label("Search").fill("What is 77 and")
            page.locator(".rollouts tbody tr", has_text="sums/77").first.wait_for()

        def open_completion() -> None:
            page.locator(".rollouts a").first.click()
            page.locator(".token").first.wait_for()

        axis, rollouts = timed(change_axis), timed(open_completions)
        everything = timed(lambda: page.get_by_role("status").filter(has_text="completions in").wait_for())
        searched, completion = timed(search), timed(open_completion)
        return {
            "first_curve_s": round(first, 2),
            "processor_s": processor,
            "memory_mb": peak_memory_mb(server),
            "other_axis_s": axis,
            "first_completions_s": rollouts,
            "all_completions_s": everything,
            "search_s": searched,
            "one_completion_s": completion,
        }


def measure_tensorboard(run: Path, browser: Any) -> Measurement:
    """Open the scalars of the same run: those of a group of metrics."""
    folder = str(run / "tensorboard")
    with serving([sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", "0"], browser) as (
        page,
        address,
        server,
    ):
        began = server.create_time()
        page.goto(f"{address}?darkMode=false#timeseries")
        page.locator("line-chart canvas, line-chart svg path").first.wait_for(state="attached")
        first = round(time.time() - began, 2)
        return {"first_curve_s": first, "processor_s": processor_s(server), "memory_mb": peak_memory_mb(server)}


def timed(act: Callable[[], Any]) -> float:
    """Seconds that `act` takes."""
    began = time.perf_counter()
    act()
    return round(time.perf_counter() - began, 2)


@contextmanager
def serving(command: list[str], browser: Any) -> Iterator[tuple[Any, str, psutil.Process]]:
    """Start a server, and yield a page of the browser, the printed address and the server's process."""
    environment = os.environ | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(_DEADLINE_S * 1000)
    try:
        assert process.stdout is not None
        said = ""
        while (found := _ADDRESS.search(said)) is None:
            if not (line := process.stdout.readline()):
                raise BenchError(f"{' '.join(command[1:4])} did not start: {said}")
            said += line
        yield context.new_page(), found[0], psutil.Process(process.pid)
    finally:
        context.close()
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.communicate()


def processor_s(server: psutil.Process) -> float:
    """Processor seconds so far of a server and its child processes."""
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return round(sum(each.user + each.system for each in times), 2)


def peak_memory_mb(server: psutil.Process) -> float:
    """Largest resident sets so far of a server and its child processes, in MiB (Linux)."""
    total = 0
    for process in (server, *server.children(recursive=True)):
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        total += int(found[1]) if found else 0
    return round(total / 1024, 1)
