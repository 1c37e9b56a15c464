"""Judges one template, feature by feature: right, absent, refused or wrong.

`absent`: the template cannot show it, and the renderer refuses, as it must. `refused`: the renderer refuses what the
template shows. `wrong`: another answer than the oracle's, or one where the template has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.chat_templates import checks
from bench.chat_templates.checks import Renderer
from bench.chat_templates.corpus import ChatTemplate
from bench.chat_templates.oracle import Oracle, Sample
from bench.chat_templates.scenarios import (
    ASKED_AGAIN,
    ASSISTANT,
    CALLS,
    DEMONSTRATIONS,
    FIRST_CALL,
    HARD,
    LOOP,
    PROMPTS,
    REASONED,
    REASONING,
    SECOND,
    SECOND_CALL,
    SYSTEM,
    TAGGED,
    TOOLS,
    USER,
    Message,
    cut_tags,
    not_escaped,
    result,
    switches_of,
)
from rollmill.errors import RollmillError

FEATURES = (
    "prompt", "switches", "demonstration", "reasoning", "tools", "calls", "parsing", "turns", "continuation", "end",
)  # fmt: skip
VERDICTS = ("right", "absent", "refused", "wrong")
Load = Callable[..., Renderer]


@dataclass(frozen=True)
class Check:
    """Verdict on one scenario; `why` is the renderer's error or the difference."""

    feature: str
    scenario: str
    verdict: str
    why: str = ""


@dataclass
class TemplateFinding:
    """All checks of a template."""

    name: str
    package: str
    version: str
    licence: str
    note: str
    checks: list[Check] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Wrong if anything is, refused if prompts or demonstrations cannot be had, else right."""
        if any(check.verdict == "wrong" for check in self.checks):
            return "wrong"
        needed = [check for check in self.checks if check.feature in ("prompt", "demonstration")]
        plain = [check.verdict for check in needed if check.scenario in ("user", "answer")]
        return "right" if plain and all(verdict == "right" for verdict in plain) else "refused"

    def cell(self, feature: str) -> tuple[str, str]:
        """Verdict on a feature, the worst of its scenarios, with the first reason; absent only if nothing is right."""
        found = [check for check in self.checks if check.feature == feature]
        for verdict in ("wrong", "refused"):
            for check in found:
                if check.verdict == verdict:
                    return verdict, f"{check.scenario}: {check.why}"
        if any(check.verdict == "right" for check in found):
            return "right", ""
        return "absent", found[0].why if found else ""

    def record(self) -> dict[str, Any]:
        """The finding for the result file: verdicts by feature, and the checks that are not right, by reason."""
        others: dict[tuple[str, str, str], list[str]] = {}
        for check in self.checks:
            if check.verdict != "right":
                others.setdefault((check.verdict, check.feature, check.why), []).append(check.scenario)
        head = {key: getattr(self, key) for key in ("name", "package", "version", "licence", "note", "verdict")}
        return {
            **head,
            "checks": len(self.checks),
            "features": {feature: self.cell(feature)[0] for feature in FEATURES},
            "others": [
                {"verdict": verdict, "feature": feature, "why": why, "scenarios": scenarios}
                for (verdict, feature, why), scenarios in others.items()
            ],
        }


def judge(template: ChatTemplate, load: Load) -> TemplateFinding:
    """Judge the renderer that `load(tokenizer, stop_ids=...)` gives for a template."""
    finding = TemplateFinding(template.name, template.package, template.version, template.licence, template.note)
    oracle = Oracle(template)
    try:
        renderer = load(oracle.tokenizer, stop_ids=oracle.end_ids)
    except RollmillError as error:
        verdict = "refused" if oracle.texts([USER], generation=True) else "absent"
        finding.checks = [Check(feature, "load", verdict, str(error)) for feature in FEATURES]
    except Exception as error:
        finding.checks = [Check(feature, "load", "wrong", f"{type(error).__name__}: {error}") for feature in FEATURES]
    else:
        finding.checks = _Judge(oracle, renderer).checks()
    return finding


class _Judge:
    def __init__(self, oracle: Oracle, renderer: Renderer) -> None:
        self.oracle, self.renderer = oracle, renderer
        self.found: list[Check] = []

    def checks(self) -> list[Check]:
        self._prompts()
        self._demonstrations()
        self._reasoning()
        self._tools()
        self._turns()
        self._continuations()
        self._ends()
        return self.found

    def _try(
        self,
        feature: str,
        scenario: str,
        possible: bool,
        act: Callable[..., str | None],
        *arguments: Any,
        hard: bool = False,
    ) -> None:
        """Add the verdict on one scenario. `hard`: a malformed call counts as refused."""
        try:
            problem = act(*arguments)
        except RollmillError as error:
            self.found.append(Check(feature, scenario, "refused" if possible else "absent", str(error)))
        except Exception as error:
            self.found.append(Check(feature, scenario, "wrong", f"{type(error).__name__}: {error}"))
        else:
            refused = problem is not None and (
                problem.startswith(checks.RENDERS_AGAIN) or (hard and problem.startswith(checks.MALFORMED))
            )
            verdict = "right" if problem is None else "refused" if refused else "wrong"
            self.found.append(Check(feature, scenario, verdict, problem or ""))

    def _absent(self, feature: str, scenario: str, why: str) -> None:
        self.found.append(Check(feature, scenario, "absent", why))

    def _prompts(self) -> None:
        for name, messages in PROMPTS.items():
            self._prompt("prompt", name, messages)
        for switch in switches_of(self.oracle.template.text):
            self._prompt("switches", f"prompt, {_setting(switch)}", [USER], switches=switch)
            self._demonstration("switches", f"demonstration, {_setting(switch)}", [USER, ASSISTANT], switches=switch)

    def _prompt(
        self, feature: str, scenario: str, messages: list[Message], tools: Any = None, switches: Any = None
    ) -> None:
        possible = bool(self.oracle.texts(messages, tools, switches, generation=True, as_system=False))
        if tools and not self.oracle.shows_tools(messages, tools):
            self._try(feature, scenario, False, self._must_refuse, self.renderer.prompt, messages, tools)
        else:
            arguments = (self.oracle, self.renderer, messages, tools, switches)
            self._try(feature, scenario, possible, checks.check_prompt, *arguments)

    def _must_refuse(self, act: Callable[..., Any], *arguments: Any) -> str:
        act(*arguments)
        return "does not refuse what the template does not show"

    def _demonstration(
        self,
        feature: str,
        scenario: str,
        messages: list[Message],
        first: int | None = None,
        tools: Any = None,
        switches: Any = None,
        learn: str = "last",
    ) -> None:
        first = len(messages) - 1 if first is None else first
        if tools and not self.oracle.shows_tools(messages[:1], tools):
            self._try(feature, scenario, False, self._must_refuse, self.renderer.demonstration, messages, first, tools)
            return
        possible = bool(self.oracle.texts(messages, tools, switches))
        arguments = (self.oracle, self.renderer, messages, first, tools, switches, learn)
        self._try(feature, scenario, possible, checks.check_demonstration, *arguments)

    def _demonstrations(self) -> None:
        for name, messages in DEMONSTRATIONS.items():
            self._demonstration("demonstration", name, messages)
        self._trained("demonstration", [USER, ASSISTANT])

    def _trained(self, feature: str, messages: list[Message], tools: Any = None) -> None:
        if tools and not self.oracle.shows_tools(messages[:1], tools):
            return
        if self.oracle.trained(messages, tools) is not None:
            arguments = (self.oracle, self.renderer, messages, 1, tools)
            self._try(feature, "as TRL trains", True, checks.check_trained, *arguments)

    def _reasoning(self) -> None:
        for name, message in (("own field", REASONED), ("tags in the content", TAGGED)):
            self._demonstration("reasoning", f"demonstration, {name}", [USER, message])
        self._trained("reasoning", [USER, REASONED])
        switches = self._thinking()
        self._parses("reasoning", "parsing", [USER, REASONED], switches=switches)
        self._parses("reasoning", "parsing an answer", [USER, ASSISTANT])
        for sample in self.oracle.samples([USER, REASONED], None, switches)[:1]:
            cut = sample.turn[: sample.turn.index(REASONING) + len(REASONING) // 2]
            self._try("reasoning", "unfinished", True, self._unfinished, sample, cut, self.renderer.bound(switches))
            self._call_in_reasoning(sample)

    def _thinking(self) -> dict[str, Any] | None:
        """The switch that lets the template show reasoning after its prompt, if one is needed and there is one."""
        for switches in (None, *switches_of(self.oracle.template.text)):
            if self.oracle.samples([USER, REASONED], None, switches):
                return switches
        return None

    def _unfinished(self, sample: Sample, turn: str, renderer: Renderer) -> str | None:
        reply = renderer.parse(self.oracle.ids(turn), self.oracle.ids(sample.prompt))
        if reply.content.strip() or reply.tool_calls:
            return f"answers with {reply.content!r} in its reasoning"
        return "the reasoning counts as finished" if reply.reasoning_finished else None

    def _call_in_reasoning(self, sample: Sample) -> None:
        """Check that a call which is only thought of is none."""
        turns = (one.turn for one in self.oracle.samples(CALLS["one call"], TOOLS))
        turn = next((turn for turn in turns if "<tool_call>\n{" in turn), None)
        if turn is not None:
            end = "</tool_call>"
            thought = turn[turn.index("<tool_call>") : turn.index(end) + len(end)]
            whole = sample.turn.replace(REASONING, f"{REASONING}\n{thought}")
            self._try("reasoning", "a call in reasoning", True, self._only_thought, sample, whole)

    def _only_thought(self, sample: Sample, turn: str) -> str | None:
        reply = self.renderer.parse(self.oracle.ids(turn), self.oracle.ids(sample.prompt), TOOLS)
        return f"calls {reply.tool_calls[0].name} in its reasoning" if reply.tool_calls else None

    def _parses(
        self, feature: str, scenario: str, messages: list[Message], tools: Any = None, switches: Any = None
    ) -> None:
        samples = self.oracle.samples(messages, tools, switches)
        if not samples:
            self._absent(feature, scenario, "the template shows no such turn after its prompt")
        elif messages[-1].get("tool_calls") and self._refuses_tools(feature, scenario):
            return
        for sample in samples[:1]:
            arguments = (self.oracle, self.renderer.bound(switches), sample, messages, tools)
            hard = any(name in scenario for name in HARD) or not_escaped(messages[-1], sample.turn)
            self._try(feature, scenario, True, checks.check_parse, *arguments, hard=hard)
            parts = cut_tags(sample.turn)
            if len(parts) > 1:
                ids = [token for part in parts for token in self.oracle.ids(part)]
                self._try(feature, f"{scenario}, spelled", True, checks.check_parse, *arguments, ids, hard=True)

    def _refuses_tools(self, feature: str, scenario: str) -> bool:
        """True if prompts with tools are refused: then no call has to be read. Adds the verdict."""
        try:
            self.renderer.prompt([USER], TOOLS)
        except RollmillError as error:
            verdict = "refused" if self.oracle.shows_tools([USER], TOOLS) else "absent"
            self.found.append(Check(feature, scenario, verdict, str(error)))
            return True
        except Exception:
            return False  # found by the prompts themselves
        return False

    def _tools(self) -> None:
        for tools, name in ((TOOLS[:1], "one tool"), (TOOLS, "two tools")):
            self._prompt("tools", name, [USER], tools)
            self._prompt("tools", f"{name} after a system message", [SYSTEM, USER], tools)
        for name, messages in CALLS.items():
            self._demonstration("calls", name, messages, tools=TOOLS)
            self._parses("parsing", name, messages, TOOLS)
        self._demonstration("calls", "answer after a result", LOOP, tools=TOOLS)
        self._demonstration("calls", "call and answer", LOOP, first=1, tools=TOOLS, learn="all")
        self._trained("calls", LOOP, TOOLS)
        self._parses("parsing", "an answer", [USER, ASSISTANT], TOOLS)
        self._parses("parsing", "an answer in JSON", [USER, {"role": "assistant", "content": '{"answer": 5}'}], TOOLS)
        if self._refuses_tools("parsing", "unfinished"):
            return
        for sample in self.oracle.samples(CALLS["one call"], TOOLS)[:1]:
            value = sample.turn.rfind("Paris")
            damaged = sample.turn[: value + 5] + sample.turn[value + 7 :]
            self._try("parsing", "unfinished", True, self._cut_off, sample, sample.turn[: value + 2], 0)
            self._try("parsing", "malformed", True, self._damaged, sample, damaged)
        for sample in self.oracle.samples(CALLS["two calls"], TOOLS)[:1]:
            turn = sample.turn[: sample.turn.rfind("Oslo") + 2]
            self._try("parsing", "second unfinished", True, self._cut_off, sample, turn, 1)

    def _cut_off(self, sample: Sample, turn: str, calls: int) -> str | None:
        """A call that is cut off is an error; in a list of calls the whole list may be one."""
        reply = self.renderer.parse(self.oracle.ids(turn), self.oracle.ids(sample.prompt), TOOLS)
        if not reply.malformed:
            return f"no error: calls {reply.tool_calls}, content {reply.content[:80]!r}"
        return f"calls {reply.tool_calls}" if len(reply.tool_calls) > calls else None

    def _damaged(self, sample: Sample, turn: str) -> str | None:
        """A damaged call is an error, or a call with other arguments where the format cannot tell, never an answer."""
        reply = self.renderer.parse(self.oracle.ids(turn), self.oracle.ids(sample.prompt), TOOLS)
        return None if reply.malformed or reply.tool_calls else f"answers with {reply.content[:80]!r}"

    def _turns(self) -> None:
        history = [USER, ASSISTANT, ASKED_AGAIN, SECOND]
        reasoned: list[Message] = [USER, REASONED, ASKED_AGAIN, {**SECOND, "reasoning_content": "Five and one."}]
        for name, whole in (("", history), (" with reasoning", reasoned)):
            self._prompt("turns", f"prompt{name}", whole[:-1])
            self._demonstration("turns", f"the last turn{name}", whole)
            self._demonstration("turns", f"all turns{name}", whole, first=1, learn="all")
        self._trained("turns", history)
        if self.oracle.shows_tools([USER], TOOLS):
            self._prompt("turns", "prompt after a result", LOOP[:3], TOOLS)

    def _continuations(self) -> None:
        results = [result(FIRST_CALL), result(SECOND_CALL, "It is dry there.")]
        cases: tuple[tuple[str, list[Message], list[Message], Any], ...] = (
            ("next question", [USER, ASSISTANT], [ASKED_AGAIN], None),
            ("next question after reasoning", [USER, REASONED], [ASKED_AGAIN], None),
            ("result", CALLS["one call"], results[:1], TOOLS),
            ("result after reasoning", CALLS["call after reasoning"], results[:1], TOOLS),
            ("result after text", CALLS["call after text"], results[:1], TOOLS),
            ("two results", CALLS["two calls"], results, TOOLS),
        )
        for name, history, new, tools in cases:
            samples = self.oracle.samples(history, tools)
            if tools and not self.oracle.shows_tools([USER], tools):
                samples = []
            if not samples or not self.oracle.texts([*history, *new], tools, generation=True):
                self._absent("continuation", name, "the template shows no such history")
                continue
            if tools and self._refuses_tools("continuation", name):
                continue
            check, sample = checks.check_continuation, samples[0]
            arguments = (self.oracle, self.renderer, sample, history, new, tools)
            self._try("continuation", name, True, check, *arguments)
            compact = sample.turn.replace('": ', '":')
            if tools and compact != sample.turn:
                self._try("continuation", f"{name}, other spacing", True, check, *arguments, compact)
            if not tools:
                self._try("continuation", f"{name}, cut off before its end", True, check, *arguments, None, 1)

    def _ends(self) -> None:
        for name, messages, tools in (("answer", [USER, ASSISTANT], None), ("call", CALLS["one call"], TOOLS)):
            if not self.oracle.texts(messages, tools) or (tools and not self.oracle.shows_tools([USER], tools)):
                self._absent("end", name, "the template shows no such turn")
            else:
                self._try("end", name, True, checks.check_end, self.oracle, self.renderer, messages, tools)


def _setting(switch: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in switch.items())
