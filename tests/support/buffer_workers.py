"""A writer and a reader in processes of their own, which are killed and started again: a run in small.

    python buffer_workers.py URL RUN_ID FOLDER KILLS SEED

forks both, kills one of them KILLS times at random moments, lets the reader go on until the file FOLDER/end exists
(made by itself after the last kill, unless KILLS is 0) and prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmill.buffer.base import EXPLORER, ExperienceKind
from rollmill.buffer.database import Database
from rollmill.buffer.sql import SqlStore
from rollmill.config.buffer import ReplayConfig
from support.buffer_groups import group

BATCH, AHEAD, STEPS_PER_CHECKPOINT = 4, 24, 3
MORE_STEPS = 12
REPLAY = ReplayConfig(groups=2, order="priority", priority="advantage", cooldown=2)


def write(url: str, run_id: str, folder: Path) -> None:
    """The explorer: makes the first groups that the newest checkpoint has not learned from, again and again.

    Most of them are known already. Those that a rewind has deleted are new.
    """
    store = SqlStore(Database(url), run_id)
    store.announce(EXPLORER)
    while not (folder / "done").exists():
        learned = set(read_checkpoint(folder)["learned"])
        missing = [n for n in range(len(learned) + AHEAD) if f"g{n:06d}" not in learned]
        for first in range(0, AHEAD, 3):
            some = missing[first : first + 3]
            store.put([group(f"g{n:06d}", version=n, rewards=(float(n), 0.5)) for n in some])


def read(url: str, run_id: str, folder: Path) -> None:
    """The trainer: what it has learned from is its model, and goes into checkpoints with the mark of the store."""
    store = SqlStore(Database(url), run_id)
    state = read_checkpoint(folder)
    store.rewind(state["mark"], step=state["step"])
    end: int | None = None
    while end is None or state["step"] < end:
        step = state["step"] + 1
        groups = store.take(BATCH, step=step, deadline_s=20)
        again = store.replay(REPLAY, step=step, version=step, seed=3)
        assert {each.id for each in again} <= set(state["learned"]), "replayed what was never learned from"
        for place, each in enumerate(groups):
            number = int(each.id[1:])
            assert [one.reward for one in each.experiences] == [float(number), 0.5]
            assert each.oldest_version == number
            each.priority = 1.0 + place
        store.update_priorities(groups + again, step=step)
        state["learned"] += [each.id for each in groups]
        state["replayed"] += [[step, each.id, each.priority] for each in again]
        state["step"] = step
        if step % STEPS_PER_CHECKPOINT == 0:
            state["mark"] = store.mark()
            temporary = folder / "checkpoint.tmp"
            temporary.write_text(json.dumps(state))
            temporary.replace(folder / "checkpoint.json")
            if end is None and (folder / "end").exists():
                end = step + MORE_STEPS * STEPS_PER_CHECKPOINT
    (folder / "done").touch()


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The newest checkpoint, or the start."""
    path = folder / "checkpoint.json"
    if not path.exists():
        return {"step": 0, "learned": [], "replayed": [], "mark": None}
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def supervise(url: str, run_id: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Start both, kill one at a time, start it again."""
    draw = random.Random(seed)
    work: dict[str, Callable[[], None]] = {
        "writer": lambda: write(url, run_id, folder),
        "reader": lambda: read(url, run_id, folder),
    }
    running = {name: _fork(function, folder / f"{name}.log") for name, function in work.items()}
    killed = dict.fromkeys(work, 0)
    while sum(killed.values()) < kills:
        name = draw.choice(list(work))
        time.sleep(draw.uniform(0.0, 0.3) ** 1.5)
        os.kill(running[name], signal.SIGKILL)
        _, status = os.waitpid(running[name], 0)
        assert os.WIFSIGNALED(status), f"the {name} ended by itself:\n{(folder / f'{name}.log').read_text()}"
        killed[name] += 1
        running[name] = _fork(work[name], folder / f"{name}.log")
    if kills:
        (folder / "end").touch()
    codes = {"reader": os.waitstatus_to_exitcode(os.waitpid(running["reader"], 0)[1])}
    (folder / "done").touch()  # should the reader have failed
    codes["writer"] = os.waitstatus_to_exitcode(os.waitpid(running["writer"], 0)[1])
    logs = {name: (folder / f"{name}.log").read_text()[-2000:] for name in work}
    return {"killed": killed, "codes": codes, "logs": logs, **_result(url, run_id, folder)}


def _result(url: str, run_id: str, folder: Path) -> dict[str, Any]:
    """What the surviving lineage learned from, and all that was written, by number of the group."""
    state = read_checkpoint(folder)
    store = SqlStore(Database(url), run_id)
    written = sorted(int(each.id[1:]) for _, each in store.read(ExperienceKind.ROLLOUT))
    taken = len(written) - store.waiting()
    store.close()
    learned = [int(name[1:]) for name in state["learned"]]
    return {"learned": learned, "written": written, "taken": taken, "replayed": state["replayed"]}


def _fork(function: Callable[[], None], log: Path) -> int:
    if pid := os.fork():
        return pid
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    url_, run_id_, folder_, kills_, seed_ = sys.argv[1:]
    print(json.dumps(supervise(url_, run_id_, Path(folder_), int(kills_), int(seed_))))
