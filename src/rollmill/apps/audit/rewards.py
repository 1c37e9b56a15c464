"""Checks of rewards: the oracle, uninformed policies, reward hacks, and determinism."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollmill.apps.audit.findings import Finding, Severity, finding_by_share, list_task_ids, passed_check, skipped_check
from rollmill.apps.audit.grading import NOT_GRADED, AuditGrader
from rollmill.apps.audit.oracle import NormalizedText, call_oracle, oracle_completions, parse_number, reference_text
from rollmill.apps.audit.reward_hacks import REWARD_HACKS, RewardHack, guess_probability, random_text
from rollmill.data.operators.builtin.deduplication import flatten_prompt
from rollmill.rewards import RewardResult
from rollmill.types import Task

TRUNCATION_FRACTIONS = (0.25, 0.5, 0.75)
_CHANCE = 0.05
_SEVERAL = 2
_REPEATED = 40
_SLOW_S = 2.0

RewardOracle = Callable[[Task], str | None]
"""A user's function: the right completion for a task, or None."""


@dataclass(slots=True)
class ProbedTask:
    """One task with its completions and their results, by source (oracle, random, a hack, ...).

    Attributes:
        full: the reward of a right completion.
    """

    task: Task
    full: float
    texts: dict[str, list[str]]
    results: dict[str, list[RewardResult]] = field(default_factory=dict)
    cut: dict[float, RewardResult] = field(default_factory=dict)

    def made(self, source: str) -> list[RewardResult]:
        """Return the results of the completions of a source."""
        return [each for each in self.results.get(source, []) if each is not NOT_GRADED]

    def best(self, source: str) -> float:
        """Return the greatest reward of a source's completions."""
        return max(map(_reward, self.made(source)))

    def rewarded(self, source: str) -> int:
        """Return how many of a source's completions earned the full reward."""
        return sum(_reward(each) >= self.full for each in self.made(source))


class RewardAudit:
    """Scores made-up completions of tasks.

    Args:
        full: the reward of a right completion, by the task's id.
        template: the form of the oracle's completions; None: all known forms.
        oracle: a user's oracle.
    """

    def __init__(
        self,
        grader: AuditGrader,
        tasks: Sequence[Task],
        *,
        full: Mapping[str, float],
        template: str | None = None,
        oracle: RewardOracle | None = None,
    ) -> None:
        self._grader = grader
        self._shown = " or ".join(f"{each:g}" for each in sorted(set(full.values())))
        answers = [answer for task in tasks if (answer := reference_text(task)) is not None]
        words = sorted({word for task in tasks for word in flatten_prompt(task).split()})
        self._probes = [
            ProbedTask(task, full[task.id], self._texts(task, number, answers, words, template, oracle))
            for number, task in enumerate(tasks)
        ]

    @staticmethod
    def _texts(
        task: Task,
        number: int,
        answers: Sequence[str],
        words: Sequence[str],
        template: str | None,
        oracle: RewardOracle | None,
    ) -> dict[str, list[str]]:
        if oracle is not None:
            right = [text for text in [call_oracle(oracle, task)] if text is not None]
        else:
            right = list(oracle_completions(task, template).values())
        others = [*answers[number + 1 : number + 40], *answers[: max(0, number - len(answers) + 40)]]
        found = {"oracle": right, "random": [random_text(task, words, 0)], "empty": ["", " \n"]}
        return found | {hack.name: hack.texts(task, others) for hack in REWARD_HACKS}

    async def run(self) -> list[Finding]:
        await asyncio.gather(*(self._score(each) for each in self._probes))
        await asyncio.gather(*(self._score_truncated(each) for each in self._probes))
        findings = [
            self._check_applies(),
            self._check_oracle(),
            self._check_random(),
            self._check_empty(),
            self._check_truncated(),
        ]
        findings += [self._check_hack(hack) for hack in REWARD_HACKS]
        return [*findings, await self._check_determinism(), self._check_time(), self._check_failures()]

    async def _score(self, probe: ProbedTask) -> None:
        names = [name for name, texts in probe.texts.items() for _ in texts]
        found = await self._grader.score(probe.task, [text for texts in probe.texts.values() for text in texts])
        for name, result in zip(names, found, strict=True):
            probe.results.setdefault(name, []).append(result)

    async def _score_truncated(self, probe: ProbedTask) -> None:
        """Score truncations of the oracle's best completion that do not contain the answer yet."""
        judged = probe.results.get("oracle", [])
        if not judged or _reward(best := max(judged, key=_reward)) < probe.full:
            return
        text = probe.texts["oracle"][judged.index(best)]
        answer = reference_text(probe.task)
        cuts = {share: text[: int(len(text) * share)] for share in TRUNCATION_FRACTIONS}
        if answer is not None:
            value = parse_number(answer)
            cuts = {share: cut for share, cut in cuts.items() if not NormalizedText(cut).has(answer, value)}
        found = await self._grader.score(probe.task, list(cuts.values()))
        probe.cut = {cut: each for cut, each in zip(cuts, found, strict=True) if each is not NOT_GRADED}

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_applies(self) -> Finding:
        results = {
            one.task.id: made for one in self._probes if (made := [e for who in one.results for e in one.made(who)])
        }
        if not results:
            return self._skipped("answers", "whether a reward applies")
        none = [task for task, made in results.items() if all(each.reward is None for each in made)]
        text = f"no reward applies to {len(none)} of {len(results)} tasks" + (
            f" ({list_task_ids(none)})" if none else ""
        )
        advice = "give the tasks the reference that the rewards need (taskset.fields.answer), or drop them"
        share = len(none) / len(results)
        return finding_by_share("answers", share, 0.5, text if none else "every task can be scored", advice, none)

    def _check_oracle(self) -> Finding:
        known = [one for one in self._probes if one.made("oracle")]
        if not any(one.texts["oracle"] for one in self._probes):
            return skipped_check("oracle", "no task has an answer or a worked solution; give --oracle FILE.py:NAME")
        if not known:
            return self._skipped("oracle", "the right answer")
        short = {one.task.id: best for one in known if (best := one.best("oracle")) < one.full}
        if not short:
            return passed_check(
                "oracle", f"the right answer earns the full reward of {self._shown} on all {len(known)} tasks"
            )
        named = ", ".join(f"{task} {reward:g}" for task, reward in list(short.items())[:5])
        text = f"the right answer earns less than {self._shown} on {len(short)} of {len(known)} tasks ({named})"
        advice = (
            "correct these answers or the reward; if right completions look otherwise, say how with --template "
            "(such as '<answer>{answer}</answer>') or --oracle; if the full reward is another one, give --full"
        )
        return finding_by_share("oracle", len(short) / len(known), 0.02, text, advice, list(short), rewards=short)

    def _check_random(self) -> Finding:
        return self._check_uninformed("random", "random words", 0.02)

    def _check_empty(self) -> Finding:
        return self._check_uninformed("empty", "an empty completion", 0.0)

    def _check_uninformed(self, source: str, about: str, problem: float) -> Finding:
        scored = [one for one in self._probes if one.made(source)]
        if not scored:
            return self._skipped(source, about)
        rewarded = [one.task.id for one in scored if one.rewarded(source)]
        mean = float(np.mean([one.best(source) for one in scored]))
        full = float(np.mean([one.full for one in scored]))
        if len(rewarded) > problem * len(scored) and (problem == 0 or len(rewarded) >= _SEVERAL):
            text = (
                f"{about} earns the full reward on {len(rewarded)} of {len(scored)} tasks ({list_task_ids(rewarded)})"
            )
            advice = "the reward does not look at the answer; correct it, or drop tasks that anything solves"
            share = len(rewarded) / len(scored)
            return Finding(source, Severity.PROBLEM, text, advice, rewarded, {"share": share, "mean": mean})
        text = f"{about} earns {mean:.3g} on average, of {full:.3g}"
        if mean > problem * full:
            return Finding(
                source, Severity.WARNING, text, "an uninformed policy should earn nothing", numbers={"mean": mean}
            )
        return passed_check(source, text, mean=mean)

    def _check_truncated(self) -> Finding:
        known = [one for one in self._probes if one.cut]
        if not known:
            return skipped_check("truncated", "no completion of the oracle earns the full reward, so none was cut off")
        passed = {
            cut: [_reward(one.cut[cut]) >= one.full for one in known if cut in one.cut] for cut in TRUNCATION_FRACTIONS
        }
        shares = {cut: float(np.mean(each or [False])) for cut, each in passed.items()}
        early = [(one, each) for one in known for cut, each in one.cut.items() if cut <= 0.5]
        tasks = list(dict.fromkeys(one.task.id for one, each in early if _reward(each) >= one.full))
        words = ", ".join(f"{share:.0%} cut off at {cut:.0%}" for cut, share in shares.items())
        text = f"right completions that still earn the full reward: {words}"
        severity = Severity.OK if shares[0.5] <= _CHANCE else Severity.WARNING
        severity = Severity.PROBLEM if shares[0.5] >= 0.5 else severity
        advice = "the reward is given before the answer is complete; require it in one place (extract: boxed, a tag)"
        listed = tasks if severity is not Severity.OK else []
        return Finding(
            "truncated",
            severity,
            text,
            advice if listed else "",
            listed,
            {str(cut): shares[cut] for cut in TRUNCATION_FRACTIONS},
        )

    def _check_hack(self, hack: RewardHack) -> Finding:
        check = f"hack:{hack.name}"
        scored = [one for one in self._probes if one.made(hack.name)]
        if not any(one.texts[hack.name] for one in self._probes):
            return skipped_check(check, f"{hack.about}: does not apply to these tasks")
        if not scored:
            return self._skipped(check, hack.about)
        rewarded = [one.task.id for one in scored if one.rewarded(hack.name) >= hack.several]
        if not rewarded:
            return passed_check(check, f"{hack.about}: not rewarded")
        share, guessed = len(rewarded) / len(scored), float(np.mean([guess_probability(one.task) for one in scored]))
        text = f"{hack.about}: full reward on {len(rewarded)} of {len(scored)} tasks ({list_task_ids(rewarded)})"
        lucky = max(_CHANCE, guessed)
        by_chance = lucky + 2 * (lucky * (1 - lucky) / len(scored)) ** 0.5
        if hack.chance and (len(rewarded) < _SEVERAL or share <= by_chance):
            return passed_check(check, f"{text}, no more than by chance", share=share)
        advice = "a policy will find this; make the reward read one answer in one place, and nothing else"
        return Finding(check, Severity.PROBLEM, text, advice, rewarded, {"share": share})

    async def _check_determinism(self) -> Finding:
        """Score the same completions again, one after the other and in another order."""
        step = max(1, len(self._probes) // _REPEATED)
        changed: list[str] = []
        count = 0
        for one in reversed(self._probes[::step]):
            names: Sequence[str] = ("oracle", "random", "empty", "prompt_repeated", "many_boxes")
            if self._grader.groupwise:  # a reward compares the completions of a group
                names = list(one.texts)
            texts = [text for name in names for text in one.texts[name]][::-1]
            before = [each for name in names for each in one.results.get(name, [])][::-1]
            both = list(zip(before, await self._again(one.task, texts), strict=True))
            both = [pair for pair in both if not any(each is NOT_GRADED for each in pair)]
            count += bool(both)
            if any(first.reward != later.reward for first, later in both):
                changed.append(one.task.id)
        if not count:
            return self._skipped("determinism", "the same completions again")
        if not changed:
            return passed_check("determinism", f"the same completions earn the same reward again ({count} tasks)")
        named = list_task_ids(changed)
        text = f"the same completions earn another reward later on {len(changed)} of {count} tasks ({named})"
        advice = "remove all dependence on chance, time or other completions; a judge needs temperature 0 or a cache"
        return Finding("determinism", Severity.PROBLEM, text, advice, changed, {"share": len(changed) / count})

    async def _again(self, task: Task, texts: Sequence[str]) -> list[RewardResult]:
        if self._grader.groupwise:
            return await self._grader.score(task, texts)
        return [(await self._grader.score(task, [text]))[0] for text in texts]

    def _check_time(self) -> Finding:
        seconds, late = np.array(self._grader.seconds or [0.0]), self._grader.late
        p50, p99, most = (float(np.quantile(seconds, share)) for share in (0.5, 0.99, 1.0))
        numbers = {"p50": p50, "p99": p99, "max": most, "judgements": len(seconds), "late": len(late)}
        text = f"{len(seconds)} judgements: p50 {_ms(p50)}, p99 {_ms(p99)}, longest {_ms(most)}, {len(late)} too late"
        text += "; many are, so that no more were made" if self._grader.timed_out else ""
        if late:
            named = list_task_ids(list(dict.fromkeys(late)))
            advice = f"see why these take so long ({named}), or raise the reward's time limit"
            severity = Severity.PROBLEM if len(late) > 0.01 * len(seconds) else Severity.WARNING
            return Finding("reward_time", severity, text, advice, list(dict.fromkeys(late)), numbers)
        if p99 > _SLOW_S:
            advice = "a step waits for its slowest reward; make it faster, or use max_staleness 1 or more"
            return Finding("reward_time", Severity.WARNING, text, advice, numbers=numbers)
        return passed_check("reward_time", text, **numbers)

    def _skipped(self, check: str, about: str) -> Finding:
        why = "too many rewards took too long (reward_time)" if self._grader.timed_out else "the reward failed on it"
        return skipped_check(check, f"{about}: {why}" + ("" if self._grader.timed_out else " (reward_errors)"))

    def _check_failures(self) -> Finding:
        failed = self._grader.failed
        if not failed:
            return passed_check("reward_errors", "no completion made a reward fail")
        text = f"a reward fails on {len(failed)} of {len(self._probes)} tasks; the first: {next(iter(failed.values()))}"
        advice = "a policy will write this, too, and the run would end; return 0 for what cannot be read"
        return Finding("reward_errors", Severity.PROBLEM, text, advice, list(failed))


def _reward(result: RewardResult) -> float:
    return 0.0 if result.reward is None else result.reward


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
