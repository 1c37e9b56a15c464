"""Folders of runs for the web application: made up, live, killed and of an agent; and a running server for them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rollmill.apps.serve.web.guard import TOKEN_CLIENT, RequestGuard
from rollmill.apps.serve.web.keys import KeyRing, make_key
from rollmill.apps.studio.ui.server import open_server
from rollmill.models.run_tokenizer import save_run_tokenizer
from rollmill.rollout.recorder import Recorder
from rollmill.trackers.activity_log import Activity, ActivityLog
from rollmill.trackers.event_log import record_event
from rollmill.trackers.heartbeat import HeartbeatRecord, activity_file
from rollmill.trackers.metrics_log import MetricsLog
from rollmill.trackers.rollout_log import RolloutLog
from rollmill.types import Completion, DraftUse, DraftUseArray, Experience, StopReason
from support import feedback_runs
from support.feedback_runs import END, TOKENIZER
from support.waiting import answering


def config(run: Path, **changes: Any) -> None:
    """A run file of 40 steps of GRPO."""
    content = {
        "name": run.name,
        "seed": 0,
        "steps": 40,
        "model": {"path": "checkpoints/tiny"},
        "algorithm": {"name": "grpo", "clip": 0.2},
        "rollout": {"batch": 4, "group_size": 4, "temperature": 1.0},
    }
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(content | changes))


def step_row(step: int, rng: np.random.Generator, gain: float = 0.02) -> dict[str, Any]:
    """Metrics of a step, with phases and a pipeline."""
    reward = min(1.0, 0.2 + gain * step + float(rng.normal(0, 0.03)))
    return {
        "step": step,
        "stage": "train",
        "version": step,
        "experiences": 12,
        "completions": 16,
        "judged": 16,
        "raw/groups": 5.0,
        "pipeline/uniform/kept": 12.0,
        "pipeline/uniform/dropped": 8.0,
        "pipeline/uniform/too_easy": 5.0,
        "pipeline/uniform/too_hard": 3.0,
        "pipeline/length_bonus/kept": 4.0,
        "pipeline/length_bonus/changed": 8.0,
        "tokens": 500.0 + step,
        "reward/mean": reward,
        "length/mean": 40.0 + float(rng.normal(0, 2)),
        "entropy": 1.5 - 0.02 * step + float(rng.normal(0, 0.02)),
        "kl": abs(float(rng.normal(0, 0.003))),
        "grad_norm": abs(float(rng.normal(1, 0.1))),
        "loss": float(rng.normal(0, 0.01)),
        "seconds/rollout": 0.5 + abs(float(rng.normal(0, 0.05))),
        "seconds/inference": 0.1,
        "seconds/reward": 0.2 + abs(float(rng.normal(0, 0.05))),
        "seconds/train": 0.4,
        "memory/rollout": 2.0,
        "memory/train": 3.0 + 0.01 * step,
        "residency/optimizer/gb": 0.5,
        "seconds/total": 1.3,
    }


def heartbeat(run: Path, pid: int, *, ended: str = "", name: str = "trainer", doing: str = "train, step 30") -> None:
    """A process's file, as if it had just reported."""
    now = time.time()
    record = HeartbeatRecord(name, socket.gethostname(), pid, now - 60, now - 1, doing, "", now - 3, 30, 0, ended)
    (run / "processes").mkdir(parents=True, exist_ok=True)
    (run / "processes" / f"{name.replace(' ', '-')}.json").write_text(json.dumps(asdict(record)))


def activities(run: Path, steps: int, step_s: float = 5.0) -> None:
    """A trainer and two explorers that took turns, until now; explorer 1 came later, and rests half of the time."""
    begin = time.time() - steps * step_s
    logs = {name: ActivityLog(activity_file(run, name)) for name in ("trainer", "explorer 0", "explorer 1")}
    for name in logs:
        heartbeat(run, os.getpid(), name=name)
    for step in range(1, steps + 1):
        at = begin + (step - 1) * step_s
        doing = [(0.0, "roll out", "completions of 4 groups"), (2.0, "reward", "rewards of 4 groups")]
        doing += [(2.5, "inference", ""), (3.0, "train", "")]
        for after, what, waits in doing:
            logs["trainer"].add(Activity(at + after, f"{what}, step {step} of 40, stage train", waits, step - 1))
        logs["explorer 0"].add(Activity(at, "roll out", "", step - 1))
        if step > steps // 2:
            logs["explorer 1"].add(Activity(at, "roll out", "", step - 1))
            logs["explorer 1"].add(Activity(at + 2.2, "nothing", "the trainer", step - 1))
        if step % 10 == 0:
            logs["trainer"].add(Activity(at + 4.5, f"write the checkpoint of step {step}", "", step))


def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def completion(prompt: Sequence[int], text: str, version: int, rng: np.random.Generator) -> Completion:
    """What an engine would return for a prompt."""
    ids = np.array([*TOKENIZER.encode(text), END], np.int32)
    return Completion(
        prompt_ids=np.array(prompt, np.int32),
        token_ids=ids,
        logprobs=-rng.exponential(0.7, len(ids)).astype(np.float32),
        versions=np.full(len(ids), version, np.int32),
        kept_logmass=np.zeros(len(ids), np.float32),
        drafted=drafted(len(ids)),
        text=text,
        stop_reason=StopReason.EOS,
        seed=0,
        index=0,
        submitted_at=1.0,
        started_at=1.1,
        finished_at=1.6,
    )


def drafted(length: int) -> DraftUseArray:
    """Half of the tokens taken over, then one that was rejected, and after a pause a guess of four tokens."""
    uses = np.zeros(length, np.uint8)
    uses[: length // 2], uses[length // 2] = DraftUse.EARLIER, DraftUse.REJECTED
    uses[length // 2 + 3 : length // 2 + 7] = DraftUse.GUESS
    return uses


def agent_rollout(step: int, number: int, rng: np.random.Generator) -> list[Experience]:
    """A rollout whose second turn was tried in two ways, so that it has two paths."""
    recorder = Recorder()
    task = f"How many apples are {number} and 3?\n"
    first = completion(TOKENIZER.encode(task), f'{{"tool": "add", "arguments": [{number}, 3]}}', step - 1, rng)
    recorder.add(first, task, 1.0)
    seen = [
        *first.prompt_ids.tolist(),
        *first.token_ids.tolist(),
        *TOKENIZER.encode(f"\nThe tool says: {number + 3}\n"),
    ]
    for text in (f"The answer is {number + 3}.", "I do not know."):
        recorder.add(completion(seen, text, step - 1, rng), task, 1.0)
    id = f"main-{step:06d}/{number}"
    made = recorder.experiences(id=id, task_id=f"apples/{number}", group=f"main-{step:06d}", decode=TOKENIZER.decode)
    for one in made:
        one.reward, one.reward_parts = float(number % 2), {"exact": float(number % 2)}
        noise = rng.normal(0, 0.02, len(one.token_ids))
        one.trainer_logprobs = np.where(one.action_mask, one.logprobs + noise, 0).astype(np.float32)
        one.entropy = np.where(one.action_mask, rng.exponential(0.5, len(one.token_ids)), 0).astype(np.float32)
        one.advantage = np.where(one.action_mask, 2.0 * (number % 2) - 1, 0).astype(np.float32)
    return made


def make_run(run: Path, steps: int = 30, *, seed: int = 0, gain: float = 0.02, **changes: Any) -> Path:
    """A run with metrics, completions of an agent in every tenth step, a timeline, events and evaluations."""
    rng = np.random.default_rng(seed)
    config(run, **changes)
    save_run_tokenizer(run, TOKENIZER, END)
    log = MetricsLog(run / "metrics.jsonl")
    for step in range(1, steps + 1):
        log.append(step_row(step, rng, gain))
        if step % 10 == 0:
            log.append({"step": step, "stage": "train", **evaluation(run, step, gain)})
            RolloutLog(run / "rollouts").write(step, [one for n in range(4) for one in agent_rollout(step, n, rng)])
    log.close()
    spans = {
        "rollout": [[0.0, 0.0, 0.6]],
        "reward": [[0.6, 0.6, 0.8]],
        "train": [[0.8, 0.8, 1.2]],
        "generate": [[0.0, 0.05 * n, 0.3 + 0.05 * n] for n in range(6)],
        "reward/exact": [[0.3 + 0.05 * n, 0.35 + 0.05 * n, 0.5 + 0.05 * n] for n in range(6)],
        "device/train/optimizer": [[0.8, 0.8, 1.2]],
    }
    line = {
        "step": 10,
        "stage": "train",
        "seconds": 1.3,
        "spans": spans,
        "bytes": {"device/train/optimizer": 3_000_000},
    }
    (run / "timeline.jsonl").write_text(json.dumps(line) + "\n")
    return run


def evaluation(run: Path, step: int, gain: float, tasks: int = 40) -> dict[str, float]:
    """Stores an evaluation of some tasks, the first ones solved, and returns its metrics."""
    solved = min(tasks, int(tasks * (0.2 + gain * step)))
    rows = [{"id": f"t{n}", "rewards": [1.0 * (n < solved)] * 2, "correct": 2 * (n < solved)} for n in range(tasks)]
    folder = run / "evaluations"
    folder.mkdir(exist_ok=True)
    (folder / f"step-{step:06d}.json").write_text(json.dumps({"step": step, "sets": [{"name": "", "tasks": rows}]}))
    answers = [
        feedback_runs.completion(step, f"eval-{n}", 0, f"{n}+1=", str(n + 1), float(n < solved), f"t{n}")
        for n in range(3)
    ]
    RolloutLog(folder).write(step, answers)
    rate = solved / tasks
    return {"eval/sampled": rate, "eval/sampled_low": rate - 0.1, "eval/sampled_high": rate + 0.1}


def killed_run(run: Path) -> Path:
    """A run whose process is gone, after a restart."""
    make_run(run, 22, seed=3)
    heartbeat(run, dead_pid(), doing="train, step 23")
    record_event(run, "restart", step=12, reason="the engine's process ended with exit code 137")
    record_event(run, "incident", text="the judge did not answer 3 times, then it did", process="explorer 0")
    record_event(run, "stuck", step=20, text="the reward has not changed for 10 steps")
    return run


@dataclass
class ServedRuns:
    """A server that answers."""

    address: str
    folder: Path


@contextmanager
def served(folder: Path, host: str = "127.0.0.1", token: str | None = None) -> Iterator[ServedRuns]:
    """A real server for a folder of runs, in a thread."""
    keys = KeyRing([make_key(TOKEN_CLIENT, token)]) if token else None
    with open_server(folder, RequestGuard(host, keys), "ann") as server, answering(server) as address:
        yield ServedRuns(address, folder)
