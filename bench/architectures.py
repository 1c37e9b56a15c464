"""Checks rollouts and training of every causal language model of transformers, and of the vision-language families that
are trained, and lists those that are refused.

Every architecture is tested as a tiny random model: rollouts, packed training and the gradient against the checkpoint's
eager forward pass in transformers. `wrong` and `traceback` are bugs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import machine
from bench.harness import RESULTS, ROOT, BenchError, note, with_matrix
from bench.worker import versions

if TYPE_CHECKING:
    from bench.ours.architectures import Finding

VERDICTS = ("right", "refused", "wrong", "traceback", "not built")
PAGE = ROOT / "docs" / "guide" / "models.md"
BEGIN, END = "<!-- matrix: python -m bench architectures --table -->", "<!-- end of matrix -->"
PROCESSOR_S, WALL_S = 60, 300  #: limits of one architecture


def main(arguments: list[str], only_json: bool) -> int:
    """Run the benchmark; see the module's docstring. Exit code 1 if a model is wrong or ends in a traceback."""
    parser = argparse.ArgumentParser(prog="bench architectures", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types of transformers; nothing is written")
    parser.add_argument("--pictures", action="store_true", help="vision-language models only; keeps the other results")
    parser.add_argument("--workers", type=int, default=min(2, len(machine.cores())))
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where architectures.json goes")
    parser.add_argument(
        "--table", action="store_true", help=f"only write the matrix of {PAGE.name} from the last result"
    )
    args = parser.parse_args(arguments)
    file = args.folder / "architectures.json"
    if args.table:
        PAGE.write_text(with_matrix(PAGE.read_text(), matrix(json.loads(file.read_text())), BEGIN, END))
        return 0
    progress = not only_json
    if args.pictures:
        line = _line(judged(args.only, args.workers, progress, pictures=True))
        record = {**json.loads(file.read_text()), "vision": line} if args.only is None else line
    else:
        record = line = _line(judged(args.only, args.workers, progress))
        if args.only is None:
            record["vision"] = _line(judged(None, args.workers, progress, pictures=True))
    if args.only is None:
        args.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")
    shown = [line, line["vision"]] if "vision" in line else [line]
    if args.only is None or not only_json:
        for each in shown:
            each.pop("findings")
    print(json.dumps(line))
    return 1 if any(each["wrong"] or each["traceback"] for each in shown) else 0


def _line(findings: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the verdicts; the findings come last."""
    count = Counter(finding["verdict"] for finding in findings)
    return {
        "bench": "architectures",
        **{verdict.replace(" ", "_"): count[verdict] for verdict in VERDICTS},
        "architectures": len(findings),
        "versions": versions("torch", "transformers"),
        "machine": machine.describe(),
        "findings": findings,
    }


def judged(only: Sequence[str] | None, workers: int, progress: bool, pictures: bool = False) -> list[dict[str, Any]]:
    """A finding for each architecture, in transformers' order. Each is tested in a separate process.

    Args:
        pictures: vision-language models instead of causal language models.
    """
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from bench.ours.architectures import judge
    from bench.ours.vision_architectures import judge_pictures, picture_types
    from bench.tiny_architectures import architectures, tiny_model

    known = list(picture_types()) if pictures else architectures()
    if unknown := sorted(set(only or ()) - set(known)):
        what = "vision-language" if pictures else "causal language"
        raise BenchError(f"transformers has no {what} model of type {', '.join(unknown)}")
    import torch

    torch.set_num_threads(1)
    tiny_model("llama")  # its imports are shared by all processes
    test = judge_pictures if pictures else judge
    waiting, running = [name for name in known if only is None or name in only], list[_Process]()
    found: dict[str, dict[str, Any]] = {}
    order = list(waiting)
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_Process(waiting.pop(0), test))
        wait([process.answer for process in running], timeout=1)
        for process in [process for process in running if process.done()]:
            running.remove(process)
            finding = found[process.name] = process.finding()
            if progress:
                note(one_line(finding))
    return [found[name] for name in order]


class _Process:
    """A forked process that tests one architecture, with limits of processor and wall-clock time."""

    def __init__(self, name: str, test: Callable[[str, Path], Finding]) -> None:
        self.name = name
        self.answer, answer = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("fork").Process(
            target=_test_architecture, args=(name, test, answer), daemon=True
        )
        self._process.start()
        answer.close()
        self._began = time.monotonic()

    def done(self) -> bool:
        return self.answer.poll() or time.monotonic() - self._began > WALL_S

    def finding(self) -> dict[str, Any]:
        result: dict[str, Any]
        try:
            if not self.answer.poll():
                raise EOFError
            result = self.answer.recv()
        except EOFError:
            self._process.kill()
            self._process.join()
            why = f"its process ended with {self._process.exitcode}; it may take {PROCESSOR_S} s of processor time"
            result = {"name": self.name, "model": "", "verdict": "traceback", "stage": "", "why": why}
        self._process.join(20)
        result["seconds"] = round(time.monotonic() - self._began, 1)
        return result


def _test_architecture(name: str, test: Callable[[str, Path], Finding], answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S + 5))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
        answer.send(asdict(test(name, Path(folder))))


def one_line(finding: dict[str, Any]) -> str:
    """Format a finding for the terminal."""
    values = [finding.get(key) for key in ("rollout_gap", "chunked_gap", "training_gap", "gradient")]
    numbers = " ".join("   --  " if value is None else f"{value:7.1e}" for value in values)
    extra = "; ".join([finding["why"], *finding.get("notes", [])]).strip("; ")
    stage = f" at {finding['stage']}" if finding["stage"] else ""
    return f"{finding['name']:26} {finding['verdict'] + stage:20} {numbers}  {extra}"


def matrix(record: dict[str, Any]) -> str:
    """Format the findings as Markdown: right models with their gaps, the others with the reason."""
    vision = record["vision"]
    sees = {finding["name"] for finding in vision["findings"]}
    section = "sees pictures: see [Vision-language models](#vision-language-models)"
    causal = [
        f | {"why": section} if f["name"] in sees and f["verdict"] != "right" and "ForCausalLM" not in f["model"] else f
        for f in record["findings"]
    ]
    families = [f | {"why": f["why"].partition("; of those")[0]} for f in vision["findings"]]
    return "\n\n".join(
        [
            _summary(record),
            *_tables(causal, ("rollout gap", "in chunks, new weights", "training gap", "gradient")),
            "### Vision-language models",
            _summary(vision),
            *_tables(families, ("rollout gap", "training gap", "gradient", "picture tokens")),
        ]
    )


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "rollout gap": lambda finding: f"{finding['rollout_gap']:.0e}",
    "in chunks, new weights": lambda finding: f"{finding['chunked_gap']:.0e}",
    "training gap": lambda finding: f"{finding['training_gap']:.0e}",
    "gradient": lambda finding: f"{finding['gradient']:.0e}",
    "picture tokens": lambda finding: ", ".join(map(str, finding["picture_tokens"])),
}


def _summary(record: dict[str, Any]) -> str:
    counts = Counter(finding["verdict"] for finding in record["findings"])
    found = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"transformers {record['versions']['transformers']}, {record['architectures']} architectures: {found}."


def _tables(findings: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """Format one table of the right models with these columns, and one per other verdict."""
    groups = {verdict: [f for f in findings if f["verdict"] == verdict] for verdict in VERDICTS}
    rows = [f"| {f['name']} | {' | '.join(_COLUMNS[column](f) for column in columns)} |" for f in groups["right"]]
    head = f"| architecture | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}"
    parts = ["\n".join([head, *rows])]
    for verdict in VERDICTS[1:]:
        if groups[verdict]:
            others = "\n".join(f"| {f['name']} | {_cell(f['why'])} |" for f in groups[verdict])
            parts.append(f"| {verdict} | why |\n|---|---|\n{others}")
    return parts


def _cell(text: str) -> str:
    """Format a table cell: without folders and line breaks, at most 200 characters."""
    words = [word for word in text.split() if not word.startswith("/")]
    short = " ".join(words).replace("|", "\\|").removeprefix("model.path: ")
    return short if len(short) <= 200 else short[:197] + "..."
