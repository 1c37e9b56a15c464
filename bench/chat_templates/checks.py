"""Comparisons of what the renderer does with the oracle's answer. Each returns the difference, or None where right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from bench.chat_templates.oracle import REASONING_TAGS, Messages, Oracle, Sample, runs, split_think
from rollmill.types import ParsedReply

MALFORMED, RENDERS_AGAIN = "malformed: ", "renders the history again"
_TAGS = re.compile("|".join(re.escape(tag) for pair in REASONING_TAGS.items() for tag in pair))


class Renderer(Protocol):
    """The part of `rollmill.data.renderer.Renderer` that is judged."""

    stop_ids: frozenset[int]

    def bound(self, switches: Any) -> Renderer: ...

    def prompt(self, messages: Any, tools: Any = None) -> Any: ...

    def demonstration(
        self, messages: Any, first: int, tools: Any = None, learn: Any = "all"
    ) -> tuple[list[int], list[bool]]: ...

    def parse(self, token_ids: Any, prompt_ids: Any = (), tools: Any = None) -> ParsedReply: ...

    def continue_prompt(
        self, prompt_ids: Any, completion_ids: Any, messages: Any, tools: Any = None
    ) -> list[int] | None: ...


def difference(found: str, wanted: str) -> str:
    """The first place where two texts differ."""
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    start = max(0, at - 25)
    return f"{found[start : at + 40]!r} instead of {wanted[start : at + 40]!r}"


def check_prompt(
    oracle: Oracle, renderer: Renderer, messages: Messages, tools: Any = None, switches: Any = None
) -> str | None:
    """Text and tokens of a prompt are those of transformers."""
    texts = oracle.texts(messages, tools, switches, generation=True)
    got = renderer.bound(switches).prompt([dict(message) for message in messages], tools)
    if not texts:
        return "renders a prompt that the template cannot show"
    if got.text not in texts:
        return f"prompt: {difference(got.text, texts[0])}"
    if list(got.token_ids) != oracle.ids(got.text):
        return f"prompt tokens: {difference(str(list(got.token_ids)), str(oracle.ids(got.text)))}"
    return None


def check_demonstration(
    oracle: Oracle,
    renderer: Renderer,
    messages: Messages,
    first: int,
    tools: Any = None,
    switches: Any = None,
    learn: str = "last",
) -> str | None:
    """Tokens are those that the template shows, and the learned ones exactly the policy's turns with their ends."""
    bound = renderer.bound(switches)
    ids, mask = bound.demonstration([dict(message) for message in messages], first, tools, learn)
    if len(ids) != len(mask):
        return f"{len(ids)} tokens with a mask of {len(mask)}"
    text = oracle.text(ids)
    problem = _same_text(oracle, text, messages, tools, switches)
    if problem is not None:
        return problem
    spans = runs(mask)
    turns = [place for place in range(first, len(messages)) if messages[place]["role"] == "assistant"]
    turns = turns if learn == "all" else turns[-1:]
    if len(spans) != len(turns):
        return f"{len(spans)} learned spans for {len(turns)} turns: {[oracle.text(ids[a:b])[:40] for a, b in spans]}"
    for (start, stop), place in zip(spans, turns, strict=True):
        before, learned = oracle.text(ids[:start]), oracle.text(ids[start:stop])
        problem = _turn_learned(oracle, text, before, learned, messages, place, tools, switches)
        if problem is not None:
            return problem
    return None


def _same_text(oracle: Oracle, text: str, messages: Messages, tools: Any, switches: Any) -> str | None:
    """Text is the template's up to the last turn's end, or the prompt's with the turn after it where these differ."""
    shown = oracle.texts(messages, tools, switches)
    for wanted in shown:
        rest = wanted[len(text) :]
        if wanted.startswith(text) and not any(_words(message)[0] in rest for message in messages if _words(message)):
            return None
        whole = wanted.rstrip()
        if text.startswith(whole) and text[len(whole) :].strip() in ("", *oracle.ends):
            return None
    last = split_think(messages[-1])
    reasoning = str(last.pop("reasoning_content", "") or "").strip()
    for plain in ([*messages[:-1], last], messages):
        for sample in oracle.samples(plain, tools, switches):
            given = any(wanted.startswith(sample.prompt) for wanted in shown) and sample.reasoning is None
            if text.startswith(sample.prompt) and not given:
                turn = text[len(sample.prompt) :]
                before = turn.removesuffix(sample.shown.lstrip())
                closed = sample.reasoning is None or any(tag in before for tag in REASONING_TAGS.values())
                other = _TAGS.sub("", before.replace(reasoning, "") if reasoning else before).strip()
                if before != turn and closed and not other:
                    return None
    if not shown:
        return "shows a demonstration that the template cannot show"
    return f"demonstration: {difference(text, shown[0])}"


def _turn_learned(
    oracle: Oracle,
    text: str,
    before: str,
    learned: str,
    messages: Messages,
    place: int,
    tools: Any,
    switches: Any,
) -> str | None:
    message = messages[place]
    words = _words(message)
    for word in words:
        if not _has(learned, word):
            return f"the learned span {learned[:60]!r} lacks {word[:40]!r}"
    reasoning = str(split_think(message).get("reasoning_content") or "").strip()
    if place == len(messages) - 1 and reasoning and reasoning not in learned:
        return f"the learned span {learned[:60]!r} lacks the reasoning"
    own = f"{message.get('content')} {reasoning} {message.get('tool_calls')}"
    for other in messages:
        for word in _words(other) if other is not message else ():
            if len(word) > 3 and word in learned and word not in own:
                return f"the learned span {learned[:60]!r} has {word[:40]!r} of another message"
    prompts = oracle.texts(messages[:place], tools, switches, generation=True)
    given = [prompt for prompt in prompts if text.startswith(prompt)]
    if given:
        # After a result some templates give no header in the prompt, and show one in the history: it may go unlearned.
        header = before[len(given[0]) :] if before.startswith(given[0]) else ""
        if before not in prompts and not (header and oracle.header().endswith(header)):
            return f"learning starts after {before[-40:]!r} instead of {prompts[0][-40:]!r}"
    elif words:
        start = learned.find(words[0]) if words[0] in learned else 0
        extra = _TAGS.sub("", learned[:start].replace(reasoning, "") if reasoning else learned[:start]).strip()
        if extra and prompts and extra in prompts[0][-60:]:
            return f"learns {extra!r}, which is in the prompt"
    return _end_learned(oracle, text, len(before), learned, messages, place)


def _end_learned(oracle: Oracle, text: str, start: int, learned: str, messages: Messages, place: int) -> str | None:
    """A learned span, which begins at `start`, ends with the token that ends the turn."""
    content_end, ends_at = start + oracle.last(learned, messages[place]), start + len(learned)
    end = oracle.end_after(text, content_end)
    following = [text.find(word, content_end) for message in messages[place + 1 :] for word in _words(message)[:1]]
    if end is not None and any(0 <= position < end for position in following):
        end = None  # an earlier turn has no such end in the history: gpt-oss writes `<|end|>` for `<|return|>`
    if end is None:
        rest = oracle.without_tokens(text[content_end:ends_at])
        return f"the turn ends with {learned[-30:]!r}" if rest.strip() else None
    if ends_at == end:
        return None
    begins_next = place < len(messages) - 1 and oracle.end_after(oracle.texts(messages[: place + 1])[0], 0) is None
    if begins_next and not text[content_end:ends_at].strip():
        return None  # the token that ends this turn belongs to the next message
    return f"the turn ends with {learned[-30:]!r} instead of {text[:end][-30:]!r}"


def check_end(oracle: Oracle, renderer: Renderer, messages: Messages, tools: Any = None) -> str | None:
    """The last learned token is the one that the template writes at the turn's end, and the engine stops at it."""
    ids, mask = renderer.demonstration([dict(message) for message in messages], len(messages) - 1, tools, "last")
    spans = runs(mask)
    if not spans:
        return "nothing is learned"
    last, wanted = ids[spans[-1][1] - 1], oracle.end(messages)
    name = oracle.text([last])
    if wanted is not None and name != wanted:
        alike = last in oracle.end_ids and wanted not in "".join(oracle.texts(messages, tools)[:1])
        if not alike:
            return f"the last learned token is {name!r} instead of {wanted!r}"
    if last not in renderer.stop_ids:
        return f"{name!r} ends the learned turn but is no stop id"
    missing = oracle.end_ids - renderer.stop_ids
    return f"stop ids lack {oracle.text(sorted(missing))!r} of the generation config" if missing else None


def check_trained(oracle: Oracle, renderer: Renderer, messages: Messages, first: int, tools: Any = None) -> str | None:
    """Learned spans are TRL's, but for the header, white space at the end, and a second end-of-sequence token.

    TRL's spans may begin with a part of the header (`<|start|>assistant`), which the prompt has, and may go on behind
    the token at which the model stops (a line break, `<|endoftext|>` after `<|end|>`) or leave it out. In the history,
    gpt-oss writes an end at which generation does not stop, which need not be learned.
    """
    trained = oracle.trained(messages, tools)
    if trained is None or trained[0] not in oracle.texts(messages, tools):
        return None
    ids, mask = renderer.demonstration([dict(message) for message in messages], first, tools, "all")
    ours = [oracle.text(ids[start:stop]) for start, stop in runs(mask)]
    if not trained[0].startswith(oracle.text(ids).rstrip().removesuffix(oracle.end() or "")):
        return None  # after a generation prompt that the template does not repeat in the history
    if len(ours) != len(trained[1]):
        return f"{len(ours)} learned spans, {len(trained[1])} in TRL"
    for own, theirs in zip(ours, trained[1], strict=True):
        bare = own.strip()
        for end in oracle.ends:
            bare = bare.removesuffix(end).rstrip()
        if bare not in theirs and not _after_header(oracle, bare, theirs):
            return f"learns {own[:60]!r}, TRL {theirs[:60]!r}"
        head, _, tail = theirs.rpartition(bare) if bare in theirs else ("", "", "")
        for end in oracle.ends:
            tail = tail.replace(end, "")
        unstopped = tail.strip() in oracle.tokenizer.get_added_vocab()
        known = not head.strip() or any(head.strip() in prompt for prompt in _prompts(oracle, messages, tools))
        if not known or (tail.strip() and not unstopped):
            return f"learns {own[:60]!r}, TRL {theirs[:60]!r}"
    return None


def _after_header(oracle: Oracle, own: str, theirs: str) -> bool:
    """Whether our span is TRL's after a header that the prompt does not have."""
    for end in oracle.ends:
        theirs = theirs.rstrip().removesuffix(end)
    head = own.removesuffix(theirs)
    return head != own and oracle.header().endswith(head)


def _prompts(oracle: Oracle, messages: Messages, tools: Any) -> Iterator[str]:
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            yield from oracle.texts(messages[:place], tools, generation=True)


def check_parse(
    oracle: Oracle,
    renderer: Renderer,
    sample: Sample,
    messages: Messages,
    tools: Any = None,
    turn_ids: Sequence[int] | None = None,
) -> str | None:
    """A sampled turn is taken apart into the last message, which the template had rendered."""
    ids = oracle.ids(sample.turn) if turn_ids is None else list(turn_ids)
    reply = renderer.parse(ids, oracle.ids(sample.prompt), tools)
    message = messages[-1]
    problem = reply_problem(oracle, reply, message, sample.reasoning)
    if problem is not None and message.get("content") and message.get("tool_calls"):
        # gpt-oss shows text before a call as reasoning: the turn may be either.
        thought = {**message, "content": "", "reasoning_content": message["content"]}
        if sample in oracle.samples([*messages[:-1], thought], tools):
            return reply_problem(oracle, reply, thought, sample.reasoning)
    return problem


def reply_problem(
    oracle: Oracle, reply: ParsedReply, message: Mapping[str, Any], before: str | None = None
) -> str | None:
    """Difference of a reply from the message."""
    whole = split_think(message)
    reasoning = str(whole.get("reasoning_content") or before or "").strip()
    content = str(whole.get("content") or "").strip()
    calls = [call["function"] for call in message.get("tool_calls", ())]
    wanted = [(call["name"], canonical(json.loads(call["arguments"]))) for call in calls]
    found = [(call.name, canonical(call.arguments)) for call in reply.tool_calls]
    if reply.malformed:
        return f"{MALFORMED}{reply.malformed[0][:120]}"
    if found != wanted:
        return f"calls {found} instead of {wanted}" if found else f"no call in {reply.content[:80]!r}"
    if (reply.reasoning or "").strip() != reasoning:
        return f"reasoning {reply.reasoning!r} instead of {reasoning!r}"
    if reply.content.strip() != content:
        return f"content {reply.content[:80]!r} instead of {content[:80]!r}"
    return None if reply.reasoning_finished else "the reasoning counts as unfinished"


def canonical(value: Any) -> str:
    """JSON in which 3 and 3.0, and true and 1, differ."""
    return json.dumps(value, sort_keys=True)


def check_continuation(
    oracle: Oracle,
    renderer: Renderer,
    sample: Sample,
    history: Messages,
    new: Messages,
    tools: Any = None,
    turn: str | None = None,
    cut: int = 0,
) -> str | None:
    """The next prompt begins with the sampled tokens and shows what the template shows; None only where that differs.

    Args:
        turn: another spelling of the sampled turn, of the same message.
        cut: tokens left off at the turn's end, as if the length limit had been reached there.
    """
    prompt, completion = oracle.ids(sample.prompt), oracle.ids(sample.turn if turn is None else turn)
    reply = renderer.parse(completion, prompt, tools)
    if reply.malformed or len(reply.tool_calls) != len(history[-1].get("tool_calls", ())):
        return f"the turn is not parsed: {(reply.malformed or [reply.content[:60]])[0]}"
    following = [dict(message) for message in new]
    for message, call in zip((m for m in following if m["role"] == "tool"), reply.tool_calls, strict=False):
        message["tool_call_id"] = call.id
    completion = completion[: len(completion) - cut]
    earlier = [dict(message) for message in history[:-1]]
    got = renderer.continue_prompt(prompt, completion, [*earlier, reply.message, *following], tools)
    told = dict(history[-1])
    if sample.reasoning is not None:
        told["reasoning_content"] = sample.reasoning
    texts = oracle.texts([*earlier, told, *new], tools, generation=True)
    sampled = oracle.ids(sample.turn)
    start = sample.prompt + (oracle.text(sampled[: len(sampled) - cut]) if cut else sample.turn)
    same = [rest for text in texts if (rest := _behind(text, start)) is not None]
    as_parsed = oracle.texts([*earlier, reply.message, *following], tools, generation=True)
    if got is None:
        return f"{RENDERS_AGAIN}, though the template shows the turn as sampled" if same else None
    if got[: len(prompt) + len(completion)] != prompt + completion:
        return "the next prompt does not begin with the sampled tokens"
    if not texts:
        return "continues with messages that the template cannot show"
    same += [rest for text in as_parsed if (rest := _behind(text, start)) is not None]
    if not same:
        return f"goes on where the template changes the history: {difference(start, texts[0])}"
    rest = oracle.text(got[len(prompt) + len(completion) :])
    return None if rest in same else f"after the turn: {difference(rest, same[0])}"


def _behind(text: str, start: str) -> str | None:
    """The rest of a text that begins with another one, white space around turns aside; None if it does not."""
    at = 0
    for character in start:
        if character.isspace():
            continue
        while at < len(text) and text[at].isspace():
            at += 1
        if text[at : at + 1] != character:
            return None
        at += 1
    return text[at:].removeprefix(start[len(start.rstrip()) :])


def _words(message: Mapping[str, Any]) -> list[str]:
    """Content and calls' names of a message, as far as they must be shown."""
    content = str(split_think(message).get("content") or "").strip()
    return [word for word in (content, *(call["function"]["name"] for call in message.get("tool_calls", ()))) if word]


def _has(text: str, word: str) -> bool:
    return word in text or json.dumps(word)[1:-1] in text or json.dumps(word, ensure_ascii=False)[1:-1] in text
