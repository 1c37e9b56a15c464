"""The judge of chat templates: what it finds right, absent, refused and wrong, and that nothing is wrong."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest

pytest.importorskip("trl", reason="the real chat templates are those in the package trl, which is not installed")

from bench.chat_templates.corpus import ChatTemplate, absent, template, templates
from bench.chat_templates.families import family
from bench.chat_templates.judge import FEATURES, TemplateFinding, judge
from bench.chat_templates.oracle import Oracle
from bench.chat_templates.tokenizers import stand_in
from bench.harness import RESULTS, BenchError, with_matrix
from bench.templates import BEGIN, END, PAGE, judged, main, matrix, summary
from rollmill.errors import RollmillError
from rollmill.types import ParsedReply, ToolCall, split_reasoning

CHATML = "qwen3_instruct_2507"


@dataclass
class Shown:
    """A rendered prompt."""

    token_ids: list[int]
    text: str


def _last_word(message: Any) -> str:
    calls = message.get("tool_calls")
    return str(calls[-1]["function"]["name"] if calls else message["content"].strip())


class Told:
    """A renderer that asks the oracle, but for parsing: calls in `<tool_call>` and reasoning in `<think>`."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int], known: ChatTemplate) -> None:
        self.oracle = Oracle(replace(known, text=tokenizer.chat_template))
        self.stop_ids, self.switches = stop_ids, dict[str, Any]()

    def bound(self, switches: Any) -> Self:
        other = copy.copy(self)
        other.switches = dict(switches or {})
        return other

    def prompt(self, messages: Any, tools: Any = None) -> Shown:
        texts = self.oracle.texts(messages, tools, self.switches, generation=True)
        if not texts or (tools and not self.oracle.shows_tools(messages, tools)):
            raise RollmillError("not shown")
        return Shown(self.oracle.ids(texts[0]), texts[0])

    def demonstration(
        self, messages: Any, first: int, tools: Any = None, learn: str = "last"
    ) -> tuple[list[int], list[bool]]:
        if tools and not self.oracle.shows_tools(messages[:1], tools):
            raise RollmillError("not shown")
        if learn == "all":
            return self._all_turns(messages, first, tools)
        samples = self.oracle.samples(messages, tools, self.switches)
        if not samples:
            raise RollmillError("not shown")
        text = samples[0].turn.removeprefix(samples[0].reasoning or "")
        prompt, turn = self.oracle.ids(samples[0].prompt), self.oracle.ids(text)
        return prompt + turn, [False] * len(prompt) + [True] * len(turn)

    def _all_turns(self, messages: Any, first: int, tools: Any) -> tuple[list[int], list[bool]]:
        ids, mask, done = list[int](), list[bool](), 0
        for text in self.oracle.texts(messages, tools)[:1]:
            for place in range(first, len(messages)):
                if messages[place]["role"] != "assistant":
                    continue
                prompts = self.oracle.texts(messages[:place], tools, generation=True)
                start = max((len(prompt) for prompt in prompts if text.startswith(prompt)), default=None)
                stop = start and self.oracle.end_after(text, text.index(_last_word(messages[place]), start))
                later = [text.find(_last_word(message), start or 0) for message in messages[place + 1 :]]
                if not start or not stop or any(0 <= position < stop for position in later):
                    raise RollmillError("the template changes the history")
                for part, learned in ((text[done:start], False), (text[start:stop], True)):
                    tokens = self.oracle.ids(part)
                    ids, mask, done = ids + tokens, mask + [learned] * len(tokens), stop
        if not ids:
            raise RollmillError("not shown")
        return ids, mask

    def parse(self, token_ids: Any, prompt_ids: Any = (), tools: Any = None) -> ParsedReply:
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        opened = self.oracle.text(prompt_ids).rstrip().endswith("<think>")
        text = self.oracle.text(ids)
        thinks = opened or text.lstrip().startswith("<think>")
        reply = split_reasoning(text, opened=opened) if thinks else ParsedReply(text)
        content, *blocks = reply.content.split("<tool_call>")
        calls, malformed = [], []
        for block in blocks:
            try:
                found = json.loads(block.rpartition("</tool_call>")[0])
                calls.append(ToolCall(f"call{len(calls):05d}", found["name"], found["arguments"]))
            except ValueError as error:
                malformed.append(str(error))
        return replace(reply, content=content, tool_calls=calls, malformed=malformed)

    def continue_prompt(
        self, prompt_ids: Any, completion_ids: Any, messages: Any, tools: Any = None
    ) -> list[int] | None:
        end = [] if completion_ids[-1] in self.stop_ids else self.oracle.ids(self.oracle.end() or "")
        sampled = [*prompt_ids, *completion_ids, *end]
        for text in self.oracle.texts(messages, tools, self.switches, generation=True):
            if text.startswith(self.oracle.text(sampled)):
                return [*sampled, *self.oracle.ids(text[len(self.oracle.text(sampled)) :])]
        return None


def told(name: str, **changed: Any) -> TemplateFinding:
    """The judge's finding for a renderer that asks the oracle, with some methods replaced."""
    known = template(name)

    def load(tokenizer: Any, stop_ids: frozenset[int]) -> Any:
        renderer = Told(tokenizer, stop_ids, known)
        for method, wrap in changed.items():
            setattr(renderer, method, wrap(getattr(renderer, method)))
        return renderer

    return judge(known, load)


def wrong(finding: TemplateFinding) -> dict[str, str]:
    """Wrong scenarios by name, with the reason."""
    return {f"{c.feature}, {c.scenario}": c.why for c in finding.checks if c.verdict == "wrong"}


def test_the_oracle_agrees_with_itself() -> None:
    finding = told(CHATML)
    assert not wrong(finding)
    assert finding.verdict == "right"
    cells = {feature: finding.cell(feature)[0] for feature in FEATURES}
    assert cells == dict.fromkeys(FEATURES, "right") | {"switches": "absent", "continuation": "refused"}
    scenarios = {(check.feature, check.scenario) for check in finding.checks if check.verdict == "right"}
    assert {("turns", "as TRL trains"), ("calls", "as TRL trains"), ("turns", "all turns")} <= scenarios


def test_absent_is_what_the_template_cannot_show() -> None:
    finding = told("gemma")
    assert not wrong(finding)
    checks = {f"{check.feature}, {check.scenario}": check.verdict for check in finding.checks}
    assert checks["prompt, system and user"] == checks["calls, one call"] == checks["tools, one tool"] == "absent"
    assert checks["prompt, user"] == checks["end, answer"] == "right"


def test_tools_that_are_dropped_silently_are_wrong() -> None:
    def deaf(prompt: Any) -> Any:
        return lambda messages, tools=None: prompt(messages, None)

    assert "tools, one tool" in wrong(told("gemma", prompt=deaf))
    assert "tools, one tool" in wrong(told(CHATML, prompt=deaf))


def test_other_prompts_are_wrong() -> None:
    def longer(prompt: Any) -> Any:
        def changed(*given: Any) -> Shown:
            got = prompt(*given)
            return Shown([*got.token_ids, got.token_ids[-1]], got.text)

        return changed

    found = wrong(told(CHATML, prompt=longer))
    assert found["prompt, user"].startswith("prompt tokens: ")


@pytest.mark.parametrize("name", [CHATML, "qwen3", "phi3", "gptoss"])
def test_turns_without_their_end_are_wrong(name: str) -> None:
    def endless(demonstration: Any) -> Any:
        def changed(*given: Any) -> tuple[list[int], list[bool]]:
            ids, mask = demonstration(*given)
            last = max(place for place, learned in enumerate(mask) if learned)
            return ids, [learned and place != last for place, learned in enumerate(mask)]

        return changed

    found = wrong(told(name, demonstration=endless))
    assert "the turn ends with" in found["demonstration, answer"]
    assert "end, answer" in found


def test_learning_the_header_is_wrong() -> None:
    def early(demonstration: Any) -> Any:
        def changed(*given: Any) -> tuple[list[int], list[bool]]:
            ids, mask = demonstration(*given)
            start = mask.index(True)
            return ids, [learned or place == start - 1 for place, learned in enumerate(mask)]

        return changed

    found = wrong(told(CHATML, demonstration=early))
    assert "learning starts after" in found["demonstration, answer"]
    assert "learning starts after" in found["calls, one call"]


def test_a_lost_call_an_invented_one_and_reasoning_as_an_answer_are_wrong() -> None:
    def blind(parse: Any) -> Any:
        return lambda ids, prompt_ids=(), tools=None: replace(
            parse(ids, prompt_ids, tools), tool_calls=[], malformed=[]
        )

    def eager(parse: Any) -> Any:
        call = ToolCall("call00001", "get_weather", {"city": "Paris", "days": 3})
        return lambda ids, prompt_ids=(), tools=None: replace(parse(ids, prompt_ids, tools), tool_calls=[call])

    def open_minded(parse: Any) -> Any:
        def changed(ids: Any, prompt_ids: Any = (), tools: Any = None) -> ParsedReply:
            reply = parse(ids, prompt_ids, tools)
            return replace(reply, content=(reply.reasoning or "") + reply.content, reasoning=None)

        return changed

    assert {"parsing, one call", "parsing, unfinished", "parsing, malformed"} <= set(wrong(told(CHATML, parse=blind)))
    assert {"parsing, an answer", "parsing, two calls"} <= set(wrong(told(CHATML, parse=eager)))
    assert {"reasoning, parsing", "reasoning, unfinished"} <= set(wrong(told("qwen3", parse=open_minded)))


def test_prompts_that_change_sampled_tokens_are_wrong() -> None:
    def spelled_anew(continue_prompt: Any) -> Any:
        def changed(prompt_ids: Any, completion_ids: Any, messages: Any, *given: Any) -> list[int] | None:
            found = continue_prompt(prompt_ids, completion_ids, messages, *given)
            return found and [found[0], *found]

        return changed

    found = wrong(told(CHATML, continue_prompt=spelled_anew))
    assert found["continuation, result"] == "the next prompt does not begin with the sampled tokens"


def test_stop_ids_that_lack_one_of_the_generation_config_are_wrong() -> None:
    known = template("llama3_1")

    def load(tokenizer: Any, stop_ids: frozenset[int]) -> Any:
        renderer = Told(tokenizer, stop_ids, known)
        renderer.stop_ids = frozenset({tokenizer.eos_token_id})
        return renderer

    assert "stop ids lack" in wrong(judge(known, load))["end, answer"]


def test_a_template_that_is_refused_at_load() -> None:
    def load(tokenizer: Any, stop_ids: frozenset[int]) -> Any:
        raise RollmillError("no such template")

    finding = judge(template(CHATML), load)
    assert finding.verdict == "refused"
    assert finding.cell("prompt") == ("refused", "load: no such template")


def test_stand_ins_have_the_families_tokens() -> None:
    tokenizer, ends = stand_in(template("qwen3"))
    for text, kept in (("<|im_end|>", False), ("<tool_call>", True), ("<think>", True)):
        ids = tokenizer(f"a{text}b", add_special_tokens=False)["input_ids"]
        assert len(ids) == 3
        assert (text in tokenizer.decode(ids, skip_special_tokens=True)) == kept
    assert sorted(tokenizer.convert_ids_to_tokens(sorted(ends))) == ["<|endoftext|>", "<|im_end|>"]
    text = 'Grüße, {"a": "b"}\n\n\t 🙂'
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert [stand_in(template("gemma"))[0].eos_token, family("gemma").ends] == ["<eos>", ("<eos>", "<end_of_turn>")]


def test_every_template_has_a_family() -> None:
    assert len(templates()) >= 41
    assert all(family(each.name) for each in templates())
    assert all(each.licence and each.version for each in templates())


def test_an_unknown_template_is_named() -> None:
    with pytest.raises(BenchError, match="no template is called qwen99"):
        judged(["qwen99"], lambda **_: None, progress=False)


def test_the_matrix_goes_between_its_markers() -> None:
    findings = [told("gemma"), told(CHATML, prompt=lambda _: None)]
    record = {**summary(findings), "findings": [finding.record() for finding in findings]}
    page = with_matrix(f"before\n{BEGIN}\nold\n{END}\nafter\n", matrix(record), BEGIN, END)
    assert page.startswith(f"before\n{BEGIN}\n\ntransformers ")
    assert page.endswith(f"{END}\nafter\n")
    assert "2 templates: 1 right, 0 refused, 1 wrong." in page
    assert "| gemma | ✓ | – | ✓ |" in page
    assert f"| {CHATML} | **wrong** |" in page
    assert "wrong: prompt: user; system and user; developer and user and 2 more | `TypeError: " in page
    assert "| trl 1.16" in page
    assert with_matrix(page, matrix(record), BEGIN, END) == page
    with pytest.raises(BenchError, match="lacks the markers"):
        with_matrix("no markers", matrix(record), BEGIN, END)


def test_the_page_is_that_of_the_last_result() -> None:
    file = RESULTS / "templates.json"
    if not file.exists():
        pytest.skip("there is no result of `python -m bench templates` yet")
    assert with_matrix(PAGE.read_text(), matrix(json.loads(file.read_text())), BEGIN, END) == PAGE.read_text()


@pytest.mark.slow
def test_no_family_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One template of each."""
    names = list({family(each.name): each.name for each in templates()}.values())
    code = main(["--only", *names, "--folder", str(tmp_path)], only_json=True)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, line["wrong"]) == (0, 0)
    assert 4 * line["right"] >= 3 * len(names)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_template_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if absent():
        names = [each.name for each in templates()]
        code = main(["--only", *names, "--folder", str(tmp_path)], only_json=True)
    else:
        code = main(["--folder", str(tmp_path)], only_json=True)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, line["wrong"]) == (0, 0)
    assert line["right"] >= (30 if absent() else 60)
