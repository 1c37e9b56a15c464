"""Worker of `bench structure`: one GRPO step of examples/minimal.yaml under sys.setprofile.

Counts everything between the second and the third call of the function that runs a step, including its preparation and
its records. Does not count code of reward processes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import rollmill.cli

STEP = "loop.py", "train_step"
ROOT = Path(__file__).resolve().parents[2]
SOURCE = str(Path(rollmill.cli.__file__).parents[1])


class Crossing:
    """A profile function that collects code objects from the second call of the step to the third."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.frames = 0
        self._calls: list[FrameType] = []
        self._depths: dict[Any, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(SOURCE):
            return
        code = frame.f_code
        if (Path(code.co_filename).name, code.co_qualname) == STEP and all(frame is not each for each in self._calls):
            self._calls.append(frame)
            self.frames = self._depth(frame)
        if len(self._calls) == 2:
            self.codes.add(code)

    def created(self, task: Any) -> None:
        """Record the coroutine depth at which a task is created, which adds to its own depth."""
        coroutines, loop = self._in_loop(sys._getframe(1))
        self._depths[task] = coroutines if loop is not None else 0

    def _depth(self, frame: FrameType) -> int:
        coroutines, frame_of_loop = self._in_loop(frame)
        return coroutines + _count(frame_of_loop)[0]

    def _in_loop(self, frame: FrameType) -> tuple[int, FrameType | None]:
        """Frames of rollmill above the event loop, including those that created the task; and the loop's frame."""
        count, loop = _count(frame, until="_run_once")
        try:
            return count + self._depths.get(asyncio.current_task(), 0), loop
        except RuntimeError:  # no event loop
            return count, loop


def _count(frame: FrameType | None, until: str = "") -> tuple[int, FrameType | None]:
    """Count frames of rollmill from `frame` outwards, up to a function named `until`."""
    count = 0
    while frame is not None and frame.f_code.co_name != until:
        count += frame.f_code.co_filename.startswith(SOURCE)
        frame = frame.f_back
    return count, frame


def main() -> None:
    """Print the crossing as one line of JSON."""
    crossing = Crossing()
    create = asyncio.base_events.BaseEventLoop.create_task

    def create_task(self: Any, *args: Any, **kwargs: Any) -> Any:
        task = create(self, *args, **kwargs)
        crossing.created(task)
        return task

    asyncio.base_events.BaseEventLoop.create_task = create_task  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        file = ROOT / "examples" / "minimal.yaml"
        sys.setprofile(crossing)
        code = rollmill.cli.main(
            [
                *("run", str(file), "--out", f"{folder}/run", "--set", "steps=3", "--set", "evaluation=null"),
                *("--set", "supervise.restarts=0"),  # in this process
            ]
        )
        sys.setprofile(None)
    assert code == 0, f"the run ended with exit code {code}"
    named = [each for each in crossing.codes if not re.search(r"<(?:\w+comp|genexpr|module)>$", each.co_qualname)]
    functions = sorted({f"{_file(each)}:{each.co_qualname}" for each in named})
    classes = {f"{_file(each)}:{each.co_qualname.split('.')[0]}" for each in named if _is_method(each)}
    found = {
        "files": sorted({_file(each) for each in crossing.codes}),
        "functions": functions,
        "classes": sorted(classes),
        "frames": crossing.frames,
    }
    print(json.dumps(found))


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(SOURCE))


def _is_method(code: CodeType) -> bool:
    return "." in code.co_qualname.split(".<locals>")[0]


if __name__ == "__main__":
    main()
