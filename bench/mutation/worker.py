"""Runs tests against mutants, in one process that loads torch and all tests and forks for each mutant.

    python -m bench.mutation.worker SPEC    # JSON: modules, tests, jobs, budget_s, only

Writes JSON lines to stdout: the tests, then one for each mutant.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from bench.harness import ROOT
from bench.mutation.mutants import Mutant, mutants
from bench.mutation.patching import Live, LoadError, install, live_objects, note_lines, replace_code

#: Timeout of a test: this many times its time without a change, plus this many seconds.
SLOWER, MORE_S = 10, 5
#: Memory that a mutant may allocate beyond that of the process.
MORE_BYTES = 4 << 30


@dataclass(frozen=True)
class Source:
    """A module to mutate."""

    path: str  #: relative to the root
    file: str
    source: str
    tree: ast.Module
    module: ModuleType


@dataclass
class Tested:
    """A test, its time, and the lines that it ran in each file."""

    item: pytest.Item
    seconds: float  #: processor time
    wall_s: float
    lines: dict[str, set[int]]


@dataclass
class Run:
    """A mutant in a forked process."""

    mutant: Mutant
    pid: int
    pipe: int
    began: float
    limit_s: float
    output: bytes = b""


@dataclass
class Mutating:
    """A pytest plugin that runs every test once, and then for each mutant the tests that reach it."""

    spec: dict[str, Any]
    say: Callable[[dict[str, Any]], None]
    tests: list[Tested] = field(default_factory=list)
    killers: dict[str, Counter[int]] = field(default_factory=dict)  #: function -> tests that killed mutants of it

    def pytest_collection(self) -> None:
        """Configure hypothesis: the same few examples in every process, without shrinking."""
        phases = (Phase.explicit, Phase.generate)
        fixed: dict[str, Any] = {"derandomize": True, "database": None, "phases": phases, "max_examples": 20}
        settings.register_profile("mutation", settings.default, **fixed)
        settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Replace pytest's loop."""
        if session.testsfailed:
            raise session.Interrupted("tests cannot be collected")
        modules = [self._load(path) for path in self.spec["modules"]]
        live = live_objects({each.file for each in modules})
        failed = self._cover(session.items, modules, live)
        self.say({"tests": len(self.tests), "failed": failed, "seconds": sum(each.seconds for each in self.tests)})
        listed: list[tuple[Mutant, str, Callable[[], None]]] = []
        for each in modules:
            for mutant in mutants(each.tree, each.source, each.path):
                if self._wanted(mutant):
                    change = partial(install, mutant, each.tree, each.module, live[each.file])
                    listed.append((mutant, each.file, change))
        self._run_all(listed)
        return True

    def _wanted(self, mutant: Mutant) -> bool:
        again = self.spec["again"]
        left = again is None or [mutant.path, mutant.function, mutant.code, mutant.change, mutant.nth] in again
        return left and self.spec["only"] in f"{mutant.function} {mutant.change}"

    @staticmethod
    def _load(path: str) -> Source:
        source, name = (ROOT / path).read_text(), Path(path).relative_to("src").with_suffix("")
        module = importlib.import_module(".".join(name.parts).removesuffix(".__init__"))
        return Source(path, str(module.__file__), source, ast.parse(source), module)

    def _cover(self, items: list[pytest.Item], modules: list[Source], live: dict[str, Live]) -> list[str]:
        """Run every test once; returns those that failed."""
        failed = []
        reached = {each.file: note_lines(each.tree, each.module, live[each.file]) for each in modules}
        for item, following in zip(items, [*items[1:], None], strict=True):
            for lines in reached.values():
                lines.clear()
            began = time.process_time(), time.monotonic()
            reports = runtestprotocol(item, log=False, nextitem=following)
            seconds, wall_s = time.process_time() - began[0], time.monotonic() - began[1]
            if any(report.failed for report in reports):
                failed.append(item.nodeid)
            own = {file: set(lines) for file, lines in reached.items() if lines}
            if own and not any(report.failed or report.skipped for report in reports):
                self.tests.append(Tested(item, seconds, wall_s, own))
        for each in modules:
            replace_code(each.tree, each.module, live[each.file])
        return failed

    def _chosen(self, mutant: Mutant, file: str) -> list[int]:
        """Tests that run the changed lines, best first, within the time budget.

        Tests that killed other mutants of the function come first, then fast ones; the first case of each test
        function comes before the second.
        """
        wanted = set(mutant.lines)
        whole = not mutant.inside and not isinstance(mutant.owner, ast.FunctionDef | ast.AsyncFunctionDef)
        reaching = [n for n, t in enumerate(self.tests) if (got := t.lines.get(file)) and (whole or got & wanted)]
        reaching.sort(key=lambda n: self.tests[n].seconds)
        cases: Counter[str] = Counter()
        place: dict[int, int] = {}
        for n in reaching:
            name = self.tests[n].item.nodeid.partition("[")[0]
            place[n] = cases[name]
            cases[name] += 1
        known = self.killers.get(f"{file} {mutant.function}", Counter())
        reaching.sort(
            key=lambda n: (-known[n] / (0.05 + self.tests[n].seconds), self.tests[n].seconds * (1 + place[n]))
        )
        left, chosen = float(self.spec["budget_s"]), list[int]()
        for n in reaching:
            left -= self.tests[n].seconds
            if chosen and left < 0:
                break
            chosen.append(n)
        return chosen

    def _run_all(self, listed: list[tuple[Mutant, str, Callable[[], None]]]) -> None:
        running: list[Run] = []
        waiting: Iterator[tuple[Mutant, str, Callable[[], None]]] = iter(listed)
        done = False
        while not done or running:
            while not done and len(running) < self.spec["jobs"]:
                following = next(waiting, None)
                if following is None:
                    done = True
                    break
                mutant, file, change = following
                chosen = self._chosen(mutant, file)
                if chosen:
                    running.append(self._fork(mutant, change, chosen))
                else:
                    self._report(mutant, "survived", "no test reaches it", 0.0)
            for run in self._ended(running):
                running.remove(run)
                self._conclude(run)

    def _fork(self, mutant: Mutant, change: Callable[[], None], chosen: list[int]) -> Run:
        ours, theirs = os.pipe()
        limit = 30 + sum(SLOWER * self.tests[n].wall_s + MORE_S for n in chosen)
        pid = os.fork()
        if pid:
            os.close(theirs)
            return Run(mutant, pid, ours, time.monotonic(), limit)
        try:
            os.setpgrp()
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            os.write(theirs, self._attempt(change, chosen, theirs).encode())
        finally:
            os._exit(0)

    def _attempt(self, change: Callable[[], None], chosen: list[int], pipe: int) -> str:
        """Run the tests in the forked process; returns "killed N" or "survived"."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        allowed = pages * os.sysconf("SC_PAGE_SIZE") + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (allowed, resource.RLIM_INFINITY))
        try:
            change()
        except LoadError:
            return f"killed {chosen[0]} at import\n"
        except Exception as error:
            return f"broken {error!r}\n"
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for n, following in zip(chosen, [*chosen[1:], None], strict=True):
            test = self.tests[n]
            os.write(pipe, f"{n}\n".encode())
            signal.setitimer(signal.ITIMER_REAL, SLOWER * test.wall_s + MORE_S)
            after = None if following is None else self.tests[following].item
            if any(report.failed for report in runtestprotocol(test.item, log=False, nextitem=after)):
                return f"killed {n}\n"
        return "survived\n"

    def _ended(self, running: list[Run]) -> list[Run]:
        """Wait for messages; returns runs that have ended or timed out."""
        ready = select.select([run.pipe for run in running], [], [], 1.0)[0]
        ended = []
        for run in running:
            if run.pipe in ready:
                got = os.read(run.pipe, 65536)
                run.output += got
                if got and not any(word in run.output for word in (b"survived", b"killed", b"broken")):
                    continue
                ended.append(run)
            elif time.monotonic() - run.began > run.limit_s:
                ended.append(run)
        return ended

    def _conclude(self, run: Run) -> None:
        os.close(run.pipe)
        seconds = time.monotonic() - run.began
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(run.pid, signal.SIGKILL)
        os.waitpid(run.pid, 0)
        words = run.output.decode().splitlines()
        last = words[-1] if words else ""
        if last == "survived" or last.startswith("broken"):
            self._report(run.mutant, last.partition(" ")[0], last.partition(" ")[2], seconds)
            return
        number = int(last.removeprefix("killed ").split()[0]) if last else -1
        file = str(ROOT / run.mutant.path)
        self.killers.setdefault(f"{file} {run.mutant.function}", Counter())[number] += 1
        outcome = "killed" if last.startswith("killed") else "timeout"
        self._report(run.mutant, outcome, self.tests[number].item.nodeid if number >= 0 else "", seconds)

    def _report(self, mutant: Mutant, outcome: str, by: str, seconds: float) -> None:
        self.say(
            {
                "module": mutant.path,
                "line": mutant.line,
                "code": mutant.code,
                "function": mutant.function,
                "operator": mutant.operator,
                "change": mutant.change,
                "nth": mutant.nth,
                "outcome": outcome,
                "by": by,
                "seconds": round(seconds, 3),
            }
        )


def main(spec: dict[str, Any]) -> int:
    """Run pytest with the plugin; only JSON lines go to stdout, everything else to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    plugins = ["cacheprovider", "xdist", "faulthandler", "terminal"]
    options = ["-s", "--assert=plain", "--tb=native", "-o", "timeout=0", "-o", "addopts=--strict-markers"]
    without = [word for name in plugins[:3] for word in ("-p", f"no:{name}")]
    marked = ["-m", "not slow and not gpu and not service"]
    return int(pytest.main([*options, *without, *marked, *spec["tests"]], plugins=[Mutating(spec, say)]))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(json.loads(sys.argv[1])))
