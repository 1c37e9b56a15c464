"""Data types shared by all components: Task, Completion, Experience.

No I/O and no torch: arrays are numpy, so any process can hold them cheaply.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
RoutingArray = npt.NDArray[np.unsignedinteger[Any]]
"""Experts chosen for tokens: uint8 or uint16 [tokens, routers, experts per token], see `rollmill.models.routing`."""

DraftUseArray = npt.NDArray[np.uint8]
"""A `DraftUse` for each token."""

REASONING_START, REASONING_END = "<think>", "</think>"
"""Tags of reasoning that most models use."""

SEALED = "sealed"
"""Key of a task's metadata with what its agent must not see: how its container is made, and how it is graded."""

IMPORTED_FROM = "imported_from"
"""Key of `Experience.info`: the other run that produced the experience; its versions are not this run's."""


class Message(TypedDict):
    """One chat message; the other keys are those of OpenAI's format that chat templates show."""

    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


class StopReason(StrEnum):
    """Reason why a completion ended."""

    EOS = "eos"  #: an end-of-sequence or stop token id
    STOP = "stop"  #: a stop string appeared
    LENGTH = "length"  #: max_new_tokens or the model's context was reached
    REPETITION = "repetition"  #: repetition detected
    ABORTED = "aborted"  #: the request was cancelled or interrupted


class DraftUse(IntEnum):
    """Part that a draft token had in one token of a completion."""

    NONE = 0  #: no draft token was verified at its place
    EARLIER = 1  #: a draft token of an earlier completion, accepted
    GUESS = 2  #: a guessed token (an n-gram, or an earlier completion after it had differed), which proved right
    REJECTED = 3  #: sampled in place of a draft token that was rejected


DRAFTED_KEY = "drafted"
"""Key of `Experience.info`: where draft tokens were verified, see `draft_spans`."""


class ExperienceSource(StrEnum):
    """Origin of an experience; loss terms select by it."""

    ROLLOUT = "usual"  #: rolled out by the policy
    EXPERT = "expert"  #: a demonstration to imitate
    PREFERENCE = "preference"
    """One of a pair that forms a group (the chosen one has the greater reward), or a single desirable (reward 1) or
    undesirable (reward 0) completion that forms a group alone."""


@dataclass(slots=True)
class Task:
    """One problem of a taskset.

    `prompt` is the text or the chat messages shown to the policy (templates already applied, chat template not yet);
    `response` is a worked solution, if the taskset has one: SFT and MIX imitate it, and DPO prefers it to `rejected`.
    For KTO, `response` is desirable and `rejected` undesirable; a task may have only one of them.
    """

    id: str
    prompt: str | list[Message]
    answer: Any = None
    response: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    taskset: str = ""
    rejected: str | None = None
    rewards: list[str] | None = None  #: names of the rewards that score it; None: all
    workflow: str | None = None  #: name of the workflow that rolls it out; None: the stage's


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]

    def message(self) -> dict[str, Any]:
        """Build the entry of `tool_calls` in OpenAI's format."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The policy's turn, taken apart: its reasoning, its answer, its tool calls.

    Attributes:
        content: the answer: text outside of reasoning and well-formed calls; empty while the reasoning is unfinished.
        reasoning: text of the reasoning; None if the turn has none.
        tool_calls: well-formed calls, in order. There are none in reasoning.
        malformed: an error for each call that cannot be read or was cut off; its text stays in `content`.
        reasoning_finished: False if the turn ended within its reasoning.
    """

    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    reasoning_finished: bool = True

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message in OpenAI's format, with the reasoning as `reasoning_content`."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found |= {"content": self.content or None, "tool_calls": [call.message() for call in self.tool_calls]}
        return found


def split_reasoning(
    text: str, *, opened: bool | None = None, start: str = REASONING_START, end: str = REASONING_END
) -> ParsedReply:
    """Split a text at the tags of its reasoning.

    Reasoning is at the beginning only: from the start tag, or from the prompt, to the first end tag. Later tags belong
    to the answer.

    Args:
        opened: whether the prompt ends within reasoning; None: unknown, so a text with an end tag is taken to continue
            such a prompt.
    """
    begins = text.lstrip().startswith(start)
    if opened is False and not begins:
        return ParsedReply(text)
    before, closed, after = (text.lstrip().removeprefix(start) if begins else text).partition(end)
    if closed:
        return ParsedReply(after.lstrip("\n"), before)
    return ParsedReply("", before, reasoning_finished=False) if begins or opened else ParsedReply(text)


def opens_reasoning(prompt: str) -> bool:
    """True if a prompt's text ends with the tag `<think>`, so that the reply to it begins within the reasoning."""
    return prompt.rstrip().endswith(REASONING_START)


def split_reply(text: str, prompt: str) -> ParsedReply:
    """Split a completion of plain text at its tags; the prompt may have opened the reasoning."""
    return split_reasoning(text, opened=opens_reasoning(prompt) or None)


@dataclass(slots=True)
class Completion:
    """Result of an engine for one sample of a request.

    Shapes: token_ids, logprobs, versions and kept_logmass all have one entry per generated token, stop tokens
    included.
    `logprobs` are of the sampled distribution (after penalties, a grammar, temperature and top-k/top-p/min-p
    truncation). `kept_logmass` is the log of the probability mass that truncation and the grammar kept, so
    `logprobs + kept_logmass` is the log-prob under the model's own distribution at the same temperature, which the
    trainer recomputes. With penalties or biases it is the difference of these two log-probs, and may be positive.
    `text` ends before a stop string; the tokens keep it. Times are `time.perf_counter()` seconds of the engine's
    process.
    """

    prompt_ids: IntArray
    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    kept_logmass: FloatArray
    text: str
    stop_reason: StopReason
    seed: int
    index: int  #: index of the sample in the request
    top_ids: IntArray | None = None  #: [T, K], the most probable tokens of the sampled distribution, if requested
    top_probs: FloatArray | None = None  #: [T, K]; 0 where unknown
    routing: RoutingArray | None = None
    """[prompt + T - 1, L, k], the experts chosen for every token but the last, if the engine recorded them."""
    drafted: DraftUseArray | None = None  #: [T]; None if no draft token was verified
    submitted_at: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    reply: ParsedReply | None = None
    """The turn taken apart by the model's renderer, in chats; None: the tags in `text` are all there is."""

    @property
    def parsed_reply(self) -> ParsedReply:
        """`reply`, or else `text` split at its tags."""
        return self.reply or split_reasoning(self.text)

    @property
    def answer(self) -> str:
        """Text that rewards grade: `text` without reasoning, empty while the reasoning is unfinished."""
        return self.parsed_reply.content


@dataclass(slots=True)
class Turn:
    """A span of an experience with one author. `start`/`end` index into Experience.token_ids."""

    role: str
    start: int
    end: int
    text: str = ""


@dataclass(slots=True)
class Experience:
    """One trajectory as the trainer sees it; tokens are authoritative, text is derived from them.

    Shapes: token_ids, action_mask, logprobs and versions are [T]. `action_mask[t]` is True where token t was produced
    by the policy (or by the imitated expert) and counts in the loss; for other tokens logprobs is 0 and versions -1.
    `logprobs` are at the rollout temperature `temperature`, without truncation. An experience without a reward (None)
    is left out of baselines and gets advantage 0. `group` names the experiences compared with each other.
    """

    id: str
    task_id: str
    group: str
    token_ids: IntArray
    action_mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    reward: float | None = None
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    source: ExperienceSource = ExperienceSource.ROLLOUT
    stop_reason: StopReason = StopReason.EOS
    temperature: float = 1.0
    turns: list[Turn] = field(default_factory=list)
    prompt: str = ""
    response: str = ""
    timings: dict[str, float] = field(default_factory=dict)  #: seconds by phase: queue, generate, reward
    info: dict[str, Any] = field(default_factory=dict)
    role: str | None = field(default=None, metadata={"stored": False})
    """The role that the policy had (`policy.role`). Advantages compare experiences of one role."""
    episode: str | None = field(default=None, metadata={"stored": False})
    """The rollout whose reward several experiences share; None: the experience is a rollout of its own."""
    anchor: str | None = field(default=None, metadata={"stored": False})
    """The state that the step began in. Step-level advantages compare the steps of a group that began in the same."""
    step_reward: float | None = field(default=None, metadata={"stored": False})
    """The part of the rollout's reward that its step earned; None: the rollout has one experience."""
    greedy_reward: float | None = field(default=None, metadata={"stored": False})
    """Reward of a greedy rollout of the same task, for algorithms that compare with it."""
    rejected: str | None = field(default=None, metadata={"stored": False})
    """Why the workflow rejected the rollout; None: it counts."""
    advantage: FloatArray | None = None  #: [T], set by the trainer in its training step
    pictures: Any = field(default=None, metadata={"stored": False})
    """`rollmill.data.picture_prompts.PicturePrompt` of a prompt with pictures, set before the training step."""
    teacher_prompt: IntArray | None = field(default=None, metadata={"stored": False})
    """Teacher's prompt, in place of the tokens before the first action; set before the training step."""
    teacher_pictures: Any = field(default=None, metadata={"stored": False})
    """`PicturePrompt` of `teacher_prompt`, where that has pictures."""
    routing: RoutingArray | None = field(default=None, metadata={"stored": False})
    """[R, L, k] with R <= T: the experts that the rollout chose for the first R tokens; None if unknown."""
    targets: IntArray | None = field(default=None, metadata={"stored": False})
    """[T], or [T, K] for several at a place: tokens whose log-probs are computed where `action_mask` is True; None:
    those of `token_ids`."""
    trainer_logprobs: FloatArray | None = field(default=None, metadata={"stored": False})
    """[T], or as `targets`, set by the trainer: log-probs in its first pass over the batch; 0 where `action_mask` is
    False."""
    entropy: FloatArray | None = field(default=None, metadata={"stored": False})
    """Of the same shape, set by the trainer: entropy of the next-token distribution in the same pass, in nats."""

    @property
    def oldest_version(self) -> int:
        """Version of the oldest policy token; -1 when the policy produced none."""
        produced = self.versions[self.action_mask]
        return int(produced.min()) if produced.size else -1

    def staleness(self, version: int) -> int:
        """Versions from the oldest policy token to `version`.

        0 for a later version: of another run, or of weights that a crash has undone.
        """
        return max(version - self.oldest_version, 0)

    @property
    def parsed_reply(self) -> ParsedReply:
        """The last turn as the renderer took it apart (`reply_info`), or else `response` split at its tags."""
        if REPLY_KEY in self.info:
            return ParsedReply(**self.info[REPLY_KEY])
        return split_reply(self.response, self.prompt)

    @property
    def action_tokens(self) -> int:
        """Number of tokens that count in the loss."""
        return int(self.action_mask.sum())


def task_domain(task_id: str) -> str:
    """The domain of a task of a stage with domains, or the entry of a mix, by the task's id."""
    return task_id.partition("/")[0]


REPLY_KEY = "reply"
"""Key of `info`: content and reasoning of the last turn, where the tags in its text do not tell them (`reply_info`)."""


def reply_info(completion: Completion, prompt: str) -> dict[str, Any]:
    """Entry of `info` that keeps what the renderer found in a turn; empty if the turn's text tells the same."""
    reply, plain = completion.reply, split_reply(completion.text, prompt)
    kept = ("content", "reasoning", "reasoning_finished")
    if reply is None or all(getattr(reply, name) == getattr(plain, name) for name in kept):
        return {}
    return {REPLY_KEY: {name: getattr(reply, name) for name in kept}}


STORED_FIELDS = tuple(each.name for each in fields(Experience) if each.metadata.get("stored", True))
"""Names of the fields of an experience that buffers and rollout files keep."""
_IN_INFO = ("role", "episode", "anchor", "step_reward", "greedy_reward", "rejected")
"""Fields that most experiences do not have. Buffers and rollout files keep them as keys of `info`."""


def stored_info(experience: Experience) -> dict[str, Any]:
    """`info` as it is stored, with the fields that are kept there."""
    known = {name: getattr(experience, name) for name in _IN_INFO}
    return experience.info | {name: value for name, value in known.items() if value is not None}


def fields_of_info(stored: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `stored_info`: the fields of an experience, `info` among them."""
    found = {name: stored[name] for name in _IN_INFO if name in stored}
    for name in found.keys() & {"step_reward", "greedy_reward"}:
        found[name] = None if found[name] is None else float(found[name])  # rollout files have names for NaN
    return found | {"info": {key: value for key, value in stored.items() if key not in _IN_INFO}}


def rollout_id(experience: Experience) -> str:
    """The id of the rollout that an experience of a workflow belongs to; several may belong to one."""
    group, slash, number = experience.id.rpartition("/")
    return group + slash + number.partition(".")[0]


def split_by_role(experiences: Iterable[Experience]) -> list[list[Experience]]:
    """The experiences of each role of a group, in the order of their first ones; one list without roles.

    Only rewards of one role are compared: if two players' rewards differ in every game, no one can learn from that.
    """
    found: dict[object, list[Experience]] = {}
    for experience in experiences:
        found.setdefault(experience.role, []).append(experience)
    return list(found.values())


def most_varied_rewards(experiences: Iterable[Experience]) -> list[float]:
    """The rewards of a group's rollouts, one each; of several roles those whose range is widest, first of equals.

    So a group teaches something if these differ. Missing rewards are left out.
    """
    rewards = [
        [each.reward for each in first_per_rollout(own) if each.reward is not None]
        for own in split_by_role(experiences)
    ]
    return max(rewards, key=lambda own: max(own) - min(own) if own else -1.0, default=[])


def first_per_rollout(experiences: Sequence[Experience]) -> list[Experience]:
    """The first experience of every rollout: all of one rollout have the same reward."""
    first: dict[object, Experience] = {}
    for number, experience in enumerate(experiences):
        first.setdefault(number if experience.episode is None else experience.episode, experience)
    return list(first.values())


def draft_spans(parts: Iterable[tuple[int, DraftUseArray | None]]) -> dict[str, Any]:
    """Describe draft tokens for `Experience.info`: {DRAFTED_KEY: spans by lower-case name of `DraftUse`}, each span
    [start, end) of token_ids. Empty if there are none.

    Args:
        parts: of each completion, the index of its first token in the experience, and its `drafted`.
    """
    found: dict[str, list[list[int]]] = {}
    for offset, drafted in parts:
        if drafted is None:
            continue
        edges = np.flatnonzero(np.diff(drafted, prepend=0, append=0)).tolist()
        for start, end in pairwise(edges):
            if drafted[start] != DraftUse.NONE:
                name = DraftUse(drafted[start]).name.lower()
                found.setdefault(name, []).append([offset + start, offset + end])
    return {DRAFTED_KEY: found} if found else {}


def drafted_tokens(experience: Experience) -> DraftUseArray | None:
    """Inverse of `draft_spans`, [T]; None if no draft token is recorded. Spans that are damaged are left out."""
    spans = experience.info.get(DRAFTED_KEY)
    if not isinstance(spans, dict):
        return None
    drafted = np.zeros(len(experience.token_ids), np.uint8)
    for use in DraftUse:
        own = spans.get(use.name.lower())
        for span in own if isinstance(own, list) else []:
            if isinstance(span, list) and len(span) == 2 and all(isinstance(each, int) for each in span):
                drafted[max(span[0], 0) : max(span[1], 0)] = use
    return drafted


def experience_from_completion(
    completion: Completion, *, id: str, task_id: str, group: str, prompt: str, temperature: float
) -> Experience:
    """Join prompt and completion tokens into one experience, without touching the tokens."""
    n_prompt, n_new = len(completion.prompt_ids), len(completion.token_ids)
    zeros = np.zeros(n_prompt, np.float32)
    return Experience(
        id=id,
        task_id=task_id,
        group=group,
        token_ids=np.concatenate([completion.prompt_ids, completion.token_ids]).astype(np.int32),
        action_mask=np.concatenate([np.zeros(n_prompt, bool), np.ones(n_new, bool)]),
        logprobs=np.concatenate([zeros, completion.logprobs + completion.kept_logmass]).astype(np.float32),
        versions=np.concatenate([np.full(n_prompt, -1, np.int32), completion.versions]).astype(np.int32),
        stop_reason=completion.stop_reason,
        temperature=temperature,
        turns=[
            Turn("prompt", 0, n_prompt, prompt),
            Turn("assistant", n_prompt, n_prompt + n_new, completion.text),
        ],
        prompt=prompt,
        response=completion.text,
        timings={
            "queue": completion.started_at - completion.submitted_at,
            "generate": completion.finished_at - completion.started_at,
        },
        info=draft_spans([(n_prompt, completion.drafted)]) | reply_info(completion, prompt),
        routing=completion.routing,
    )


def experience_from_demonstration(
    token_ids: Sequence[int] | IntArray,
    imitated: int | Sequence[bool],
    *,
    id: str,
    task_id: str,
    group: str,
    turns: list[Turn],
    prompt: str,
    response: str,
    source: ExperienceSource = ExperienceSource.EXPERT,
    info: dict[str, Any] | None = None,
) -> Experience:
    """Build an experience from tokens that no policy produced: log-probs 0, versions -1.

    Args:
        imitated: the tokens that are imitated: those from this index on, or a mask of them.
    """
    ids = np.array(token_ids, np.int32)
    mask = np.arange(len(ids)) >= imitated if isinstance(imitated, int) else np.array(imitated, bool)
    return Experience(
        id=id,
        task_id=task_id,
        group=group,
        token_ids=ids,
        action_mask=mask,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.full(len(ids), -1, np.int32),
        source=source,
        turns=turns,
        prompt=prompt,
        response=response,
        info=info or {},
    )
