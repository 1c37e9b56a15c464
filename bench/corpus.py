"""Labelled answers graded by rollmill and by math-verify: right ones that are rejected, wrong ones that are accepted.

The answers are those of libs/grading/bench, including the ones about pictures, which only rollmill's rewards grade:
about 13,000 to published tasks, in four banks of phrasings in English and Chinese (`answer_phrasings.py`), and about
700 completions as chat models write them (`chat_answers.py`), whose groups start with "chat:". math-verify extracts
formulas, expressions and option letters, as its documentation shows.

With `--mutants`, instead: wrong variants of all published references by kind of mutation, and equal rewritings, each
labelled by values at random points (`answer_mutants.py` there).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from grading_bench.answer_corpus import Labelled
from grading_bench.answer_mutants import mutants, rewritings
from grading_bench.answers import data_dir
from grading_bench.corpus import accepted_by_math_verify, counts, labelled

from bench.report import Case, finish

_MOST_EXAMPLES = 5
_AT_ONCE = 16


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench corpus", description=__doc__)
    parser.add_argument("--mutants", action="store_true", help="judge mutated and rewritten references")
    versions = {name: importlib.metadata.version(name) for name in ("math-verify", "sympy")}
    if parser.parse_args(arguments).mutants:
        cases = [_by_kind("mutants", mutants(data_dir())), _by_kind("rewritings", rewritings(data_dir()))]
        finish("corpus_mutants", cases, headline=cases[:1], versions=versions, only_json=only_json)
        return
    rows = labelled(data_dir())
    ours, peer = accepted_by_rollmill(rows), accepted_by_math_verify(rows)
    groups = dict.fromkeys(row.group for row in rows)
    cases = [_case(group, *_of(group, rows, ours, peer)) for group in groups]
    whole = _case("all", rows, ours, peer)
    finish("corpus", [whole, *cases], headline=[whole], versions=versions, only_json=only_json)


def accepted_by_rollmill(rows: Sequence[Labelled], time_limit_s: float = 60.0) -> list[bool]:
    """Whether each answer earns full reward."""
    from pydantic import TypeAdapter

    from rollmill.config.rewards import RewardConfig
    from rollmill.rewards import build_reward_manager
    from rollmill.types import Task

    adapter: TypeAdapter[Any] = TypeAdapter(RewardConfig)
    limits = {"math": {"time_limit_s": time_limit_s}, "k12": {"time_limit_s": time_limit_s}}
    names = sorted({row.reward for row in rows})
    judges = {
        name: build_reward_manager([adapter.validate_python({"name": name, **limits.get(name, {})})]) for name in names
    }

    async def judged() -> list[bool]:
        found = []
        for start in range(0, len(rows), _AT_ONCE):
            chunk = rows[start : start + _AT_ONCE]
            tasks = [Task("t", "", row.gold, metadata=row.metadata) for row in chunk]
            pairs = zip(chunk, tasks, strict=True)
            found += await asyncio.gather(*(judges[row.reward].score(t, _completion(row.text)) for row, t in pairs))
        return [each.reward == 1.0 for each in found]

    try:
        return asyncio.run(judged())
    finally:
        for judge in judges.values():
            judge.close()


def _of(
    group: str, rows: Sequence[Labelled], *columns: Sequence[bool]
) -> tuple[list[Labelled], list[bool], list[bool]]:
    chosen = [index for index, row in enumerate(rows) if row.group == group]
    ours, peer = ([column[index] for index in chosen] for column in columns)
    return [rows[index] for index in chosen], ours, peer


def _case(name: str, rows: list[Labelled], ours: list[bool], peer: list[bool]) -> Case:
    rejected, accepted = zip(counts(rows, ours), counts(rows, peer), strict=True)
    shares = [1 - (one + other) / len(rows) for one, other in zip(rejected, accepted, strict=True)]
    right = sum(row.right for row in rows)
    extra = {
        "right": right,
        "right_rejected": {"ours": rejected[0], "math-verify": rejected[1]},
        "wrong": len(rows) - right,
        "wrong_accepted": {"ours": accepted[0], "math-verify": accepted[1]},
    }
    return Case(name, "math-verify 0.9", "share judged as labelled", [shares[0]], [shares[1]], True, extra)


def _by_kind(name: str, rows: list[Labelled]) -> Case:
    """Misjudged answers by kind, with examples."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        peer = pool.submit(accepted_by_math_verify, rows)
        judged = {"ours": accepted_by_rollmill(rows), "math-verify": peer.result()}
    kinds: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(row.group for row in rows):
        chosen = [index for index, row in enumerate(rows) if row.group == kind]
        example = rows[chosen[0]]
        kinds[kind] = {"answers": len(chosen), "example": [example.gold, example.text]}
        for judge, accepted in judged.items():
            missed = [index for index in chosen if accepted[index] != rows[index].right]
            examples = [[rows[index].gold, rows[index].text] for index in missed[:_MOST_EXAMPLES]]
            kinds[kind][judge] = {"misjudged": len(missed), "examples": examples}
    shares = [sum(a == row.right for a, row in zip(each, rows, strict=True)) / len(rows) for each in judged.values()]
    extra = {"answers": len(rows), "references": len({row.gold for row in rows}), "kinds": kinds}
    return Case(name, "math-verify 0.9", "share judged as labelled", [shares[0]], [shares[1]], True, extra)


def _completion(text: str) -> Any:
    import numpy as np

    from rollmill.types import Completion, StopReason

    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(ids, ids, numbers, ids, numbers, text, StopReason.EOS, seed=0, index=0)
