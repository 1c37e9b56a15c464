"""The policy as workflows see it: a model that chats and completes, and remembers its replies."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollmill.config.rollout import SamplingConfig
from rollmill.config.workflows import CompactionConfig, RoleConfig
from rollmill.data.content_parts import join_contents
from rollmill.data.images import PictureFolder
from rollmill.data.picture_turns import PictureTurn, refer_to_pictures
from rollmill.data.renderer import ChatMessage, Switches
from rollmill.data.renderer.call_formats import ToolFormat
from rollmill.data.renderer.tokens import encode_start
from rollmill.engines.base import GenerationRequest, RolloutEngine
from rollmill.errors import EngineError, WorkflowError
from rollmill.rollout.chat import ChatPrompt, ChatRenderer, RecordedReply
from rollmill.rollout.environments.base import Observation, has_pictures, observation_text
from rollmill.rollout.recorder import Recorder
from rollmill.seeds import derive_seed
from rollmill.trackers.trace import GENERATE, Trace
from rollmill.types import Completion, StopReason, Task, ToolCall, opens_reasoning, split_reasoning


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of a model."""

    text: str  #: without special tokens, and without a stop string
    completion: Completion
    message: dict[str, Any] = field(default_factory=dict)  #: message to append to the conversation unchanged
    tool_calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)  #: errors of malformed calls

    @property
    def stop_reason(self) -> StopReason:
        """Stop reason of the completion."""
        return self.completion.stop_reason

    @property
    def token_ids(self) -> list[int]:
        """Prompt and reply, which `complete` can continue."""
        return [*self.completion.prompt_ids.tolist(), *self.completion.token_ids.tolist()]


class PromptTokens(list[int]):
    """Tokens of a prompt, which know its pictures. Lists that are made of them do not."""

    def __init__(self, token_ids: Sequence[int], turns: tuple[PictureTurn, ...]) -> None:
        super().__init__(token_ids)
        self.turns = turns


_ROLES = 0x401E  # keeps the random numbers of roles apart from those of the policy's own calls

_ROLE_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Policy:
    """A model within one rollout. Concurrent calls are allowed.

    Args:
        sampling: default sampling of replies.
        seed: seed of all calls, together with their number.
        recorder: records every call; None: the model is not trained.
        index: index of the rollout in its group.
        roles: those that `role` may name; empty: any.
        in_role: name of the role whose calls these are, see `role`.
        copied_at: step of the stage after which this copy of the policy was taken (`policy: past`); None: no copy.
        switches: variables of the chat template for all chats (`chat_template_kwargs`).
    """

    def __init__(
        self,
        engine: RolloutEngine,
        chat: ChatRenderer,
        sampling: SamplingConfig,
        *,
        seed: int,
        name: str,
        recorder: Recorder | None = None,
        trace: Trace | None = None,
        index: int = 0,
        roles: Mapping[str, RoleConfig] | None = None,
        in_role: str | None = None,
        copied_at: int | None = None,
        switches: Switches | None = None,
    ) -> None:
        self.copied_at, self._switches = copied_at, dict(switches or {})
        self.sampling, self.name, self.seed, self.tokenizer = sampling, name, seed, chat.tokenizer
        self._engine, self._chat = engine, chat
        self._recorder, self._trace, self._index = recorder, trace, index
        self._replies: list[RecordedReply] = []
        self._seen: dict[tuple[int, ...], list[tuple[PictureTurn, ...]]] = {}  # by the tokens up to the last picture
        self._num_calls = 0
        self._declared, self._role, self._roles = roles or {}, in_role, dict[str, Policy]()
        own = None if in_role is None else self._declared.get(in_role)
        self._learns = own is None or own.learn

    def role(self, name: str) -> Policy:
        """Return the same model in a role, such as proposer or solver; the same object for the same name.

        Its calls become experiences of their own, with the role: advantages compare them with those of the
        same role in the group, and never with another role's. The workflow returns each role's reward, as a mapping of
        their names, or one for all; a branch may have its own (`reward`).

        Raises ValueError: the name has other characters than letters, digits, `_` and `-` (it becomes part of metrics'
            names), the run file has `roles` without it, this policy is a role already, or the rollout has steps
            (`step`).
        """
        if self._role is not None:
            raise ValueError(f"policy.role({name!r}) within the role `{self._role}`: call it on the workflow's policy")
        if not _ROLE_NAME.fullmatch(name):
            raise ValueError(f"policy.role({name!r}): a role's name has only letters, digits, _ and -")
        if self._declared and name not in self._declared:
            known = ", ".join(f"`{each}`" for each in self._declared)
            raise ValueError(f"policy.role({name!r}): the run file's roles are {known}; add it to `roles`")
        if self._recorder is not None and self._recorder.steps:
            raise ValueError(f"policy.role({name!r}): a rollout has roles or steps (policy.step), not both")
        if name not in self._roles:
            self._roles[name] = Policy(
                self._engine,
                self._chat,
                self.sampling,
                seed=derive_seed(self.seed, _ROLES, zlib.crc32(name.encode())),
                name=f"{self.name}, role {name}",
                recorder=self._recorder,
                trace=self._trace,
                index=self._index,
                roles=self._declared,
                in_role=name,
                copied_at=self.copied_at,
                switches=self._switches,
            )
        return self._roles[name]

    @property
    def role_names(self) -> Iterable[str]:
        """Names of the roles: those that the run file declares, or those used so far."""
        return self._declared.keys() or self._roles.keys()

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Any = None,
        tool_format: ToolFormat | None = None,
        chat_template_kwargs: Switches | None = None,
        learn: bool = True,
        **sampling: Any,
    ) -> Reply:
        """Generate the next turn of a conversation.

        Append `reply.message` to the messages to continue: then the policy's own tokens are kept as they are. A changed
        history is another branch.

        Args:
            messages: OpenAI's format: `{"role": "user", "content": "..."}`. For a vision-language model, contents may
                be lists of parts: `{"type": "image", "image": ...}` is the path of a file, an image of Pillow, or
                pixels (uint8 [H, W, 3]); `{"type": "video", "video": [...]}` is a list of them.
            tools: their descriptions in OpenAI's format. Templates without tools get them in the system message.
            tool_format: format of calls: auto (the model's own), hermes or json. Calls are parsed if this or tools is
                given.
            chat_template_kwargs: variables of the chat template, such as `{"enable_thinking": False}`, beside those of
                the task.
            learn: False leaves the reply out of the loss.
            sampling: keys of the section `rollout` that differ for this call: temperature, max_new_tokens, stop ...

        Raises:
            EngineError: there is no chat template, it refuses the messages, or the prompt does not fit; a part is not
                known, or a picture cannot be read, or the model does not see.
        """
        switches = chat_template_kwargs
        [reply] = await self.chat_n(
            messages, 1, tools=tools, tool_format=tool_format, chat_template_kwargs=switches, learn=learn, **sampling
        )
        return reply

    async def chat_n(
        self,
        messages: Sequence[ChatMessage],
        n: int,
        *,
        tools: Any = None,
        tool_format: ToolFormat | None = None,
        chat_template_kwargs: Switches | None = None,
        learn: bool = True,
        **sampling: Any,
    ) -> list[Reply]:
        """Generate several independent next turns, see `chat`."""
        messages = self._readable(messages)
        switches, format = {**self._switches, **(chat_template_kwargs or {})}, tool_format or "auto"
        prompt = self._chat.prompt(messages, self._replies, tools, format=format, switches=switches, name=self.name)
        self._note(prompt)
        replies = []
        for completion in await self._ask(prompt, n, learn, sampling):
            found = self._chat.parse(
                prompt,
                completion,
                tools,
                format=tool_format,
                switches=switches,
                salt=str(len(messages)),
                name=self.name,
            )
            completion.reply = found
            said = [*messages, found.message]
            self._replies.append(self._chat.record_reply(said, prompt, tools, completion, found))
            replies.append(Reply(completion.text, completion, found.message, found.tool_calls, found.malformed))
        return replies

    async def complete(self, prompt: str | Sequence[int], *, learn: bool = True, **sampling: Any) -> Reply:
        """Complete a text or tokens: `[*reply.token_ids, *policy.encode("...")]` continues a reply.

        Raises EngineError if the prompt does not fit.
        """
        [reply] = await self.complete_n(prompt, 1, learn=learn, **sampling)
        return reply

    async def complete_n(
        self, prompt: str | Sequence[int], n: int, *, learn: bool = True, **sampling: Any
    ) -> list[Reply]:
        """Generate several independent completions, see `complete`."""
        ids = self.encode(prompt, start=True) if isinstance(prompt, str) else list(prompt)
        text = prompt if isinstance(prompt, str) else self._chat.decode(ids)
        turns = prompt.turns if isinstance(prompt, PromptTokens) else self._turns_of(ids)
        pictures = self._chat.pictures(ids, turns, self.name)
        found = await self._ask(ChatPrompt(ids, text, (), None, turns, pictures), n, learn, sampling)
        for each in found:
            each.reply = split_reasoning(each.text, opened=opens_reasoning(text) or None)
        return [Reply(each.text, each, {"role": "assistant", "content": each.text}) for each in found]

    @property
    def sees(self) -> bool:
        """True for a vision-language model: messages may hold pictures."""
        return self._chat.sees

    @property
    def folder(self) -> PictureFolder:
        """The folder that keeps pictures which are no files."""
        return self._chat.folder

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """Token ids of a text; `start` adds the special tokens at the start of a whole text."""
        if start:
            return encode_start(self.tokenizer, text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of tokens, special ones included."""
        return self._chat.decode(token_ids)

    def reward(self, reply: Reply, value: float) -> None:
        """Set the reward of the branch that ends with a reply; it counts as a separate rollout within its group.

        For branches with different rewards, such as votes, or the two sides of a game. Branches without a reward get
        the workflow's.

        Raises ValueError: the value is not finite, or the reply is another model's.
        """
        if self._recorder is None:
            return
        value = _finite(value, "policy.reward")
        calls = [call for call in self._recorder.calls if call.completion is reply.completion]
        if not calls:
            raise ValueError("policy.reward was given a reply that is none of this policy; give what `chat` returned")
        calls[0].reward = value

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokenize a chat up to the start of the policy's turn, for `complete`. Raises EngineError like `chat`."""
        prompt = self._chat.prompt(self._readable(messages), switches=self._switches, name=self.name)
        self._note(prompt)
        return PromptTokens(prompt.token_ids, prompt.turns)

    def step(self, reward: float | None = None, *, anchor: str | None = None) -> None:
        """End a step: the calls since the last one become a separate experience.

        Args:
            reward: of the step; the rollout's reward is the sum over the steps and the workflow's result.
            anchor: the state in which the step was taken; GiGPO compares steps with the same one.

        Raises ValueError: the reward is not finite, or the rollout has roles (`role`).
        """
        if self._role is not None or self._roles:
            raise ValueError("policy.step: a rollout has roles (policy.role) or steps, not both; use policy.reward")
        if self._recorder is not None:
            self._recorder.end_step(None if reward is None else _finite(reward, "policy.step"), anchor)

    def log(self, /, **numbers: float) -> None:
        """Log numbers of this rollout; their means over a training step's rollouts become metrics `episode/NAME`."""
        if self._recorder is not None:
            self._recorder.numbers |= {name: float(value) for name, value in numbers.items()}

    def _readable(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Messages whose contents are texts, with references to their pictures."""
        found = []
        for number, message in enumerate(messages):
            try:
                content = refer_to_pictures(message.get("content"), f"message {number}", self._chat.folder)
            except ValueError as error:
                raise EngineError(f"{self.name}: {error}") from error
            found.append(dict(message) | ({} if "content" not in message else {"content": content}))
        return found

    def _note(self, prompt: ChatPrompt) -> None:
        """Remember where a prompt has pictures, for `complete`, which takes tokens."""
        if prompt.pictures is not None:
            known = self._seen.setdefault(tuple(prompt.pictures.token_ids), [])
            if prompt.turns not in known:
                known.append(prompt.turns)

    def _turns_of(self, ids: list[int]) -> tuple[PictureTurn, ...]:
        """The pictures of the longest prompt that tokens begin with.

        Raises EngineError if there were prompts of the same tokens with other pictures.
        """
        fitting = [known for known in self._seen if known == tuple(ids[: len(known)])]
        if not fitting:
            return ()
        turns = self._seen[max(fitting, key=len)]
        if len(turns) > 1:
            raise EngineError(
                f"{self.name}: policy.complete was given tokens that begin like {len(turns)} prompts with different "
                "pictures; give what policy.prompt returned, or use policy.chat"
            )
        return turns[0]

    async def _ask(self, prompt: ChatPrompt, n: int, learn: bool, changes: dict[str, Any]) -> list[Completion]:
        sampling = SamplingConfig.model_validate({**self._settings(), **changes}) if changes else self.sampling
        number, self._num_calls = self._num_calls, self._num_calls + 1
        seed = derive_seed(self.seed, number)
        request = GenerationRequest(
            prompt.token_ids,
            sampling,
            n=n,
            seed=seed,
            id=self.name,
            pictures=prompt.pictures,
            continues=True,
        )
        found = [replace(each, index=self._index) for each in await self._engine.generate(request)]
        greedy = sampling.temperature == 0 < self.sampling.temperature
        learn = learn and self._learns
        for completion in found:
            if self._recorder is not None:
                heat, learned = sampling.temperature, learn and not greedy
                turns = prompt.turns if self._chat.sees else None
                self._recorder.add(completion, prompt.text, heat, learned=learned, role=self._role, turns=turns)
            if self._trace is not None:
                self._trace.add(GENERATE, completion.submitted_at, completion.started_at, completion.finished_at)
        return found

    def _settings(self) -> dict[str, Any]:
        return {key: getattr(self.sampling, key) for key in SamplingConfig.model_fields}


def _finite(value: float, where: str) -> float:
    """Return the value as a float. Raises ValueError unless it is finite."""
    if not math.isfinite(value):
        raise ValueError(f"{where} was given {value!r} as reward; give a finite number")
    return float(value)


class PolicyConversation:
    """A conversation with a model, turn by turn, through its chat template. One that starts with a text is plain text:
    everything is appended as it is.

    Args:
        compaction: when and how `compact` summarises it; None: never.

    Attributes:
        messages: the chat so far.
    """

    def __init__(
        self, policy: Policy, start: str | Sequence[ChatMessage], compaction: CompactionConfig | None = None
    ) -> None:
        self._policy, self._start, self._compaction = policy, start, compaction
        self._compactions = 0
        if compaction is not None:
            policy.log(compactions=0)
        self._begin()

    def _begin(self) -> None:
        start = self._start
        self._text: str | None = start if isinstance(start, str) else None
        self._token_ids: list[int] | None = None
        self.messages: list[ChatMessage] = [] if isinstance(start, str) else list(start)

    @classmethod
    def of_task(cls, policy: Policy, task: Task) -> PolicyConversation:
        """Start a conversation with the task's prompt."""
        return cls(policy, task.prompt)

    @property
    def plain(self) -> bool:
        """True if it is plain text."""
        return self._text is not None

    def tell(self, content: Observation, role: str = "user") -> None:
        """Add the policy's next input: a text, or messages, which may hold pictures. Empty texts add nothing.

        A text after a message of the same role is joined to it: many templates require alternating roles. In plain
        text, only the contents of messages are added.

        Raises WorkflowError for a picture in plain text.
        """
        if self.plain and has_pictures(content):
            raise WorkflowError("a picture is shown in plain text; give the taskset `chat: true`")
        if not self.plain:
            self._tell_messages([{"role": role, "content": content}] if isinstance(content, str) else content)
        elif self._token_ids is None:
            self._text = f"{self._text}{observation_text(content)}"
        else:
            self._token_ids += self._policy.encode(observation_text(content))

    def _tell_messages(self, messages: Sequence[ChatMessage]) -> None:
        for message in messages:
            last = self.messages[-1] if self.messages else {}
            if message["content"] == "":
                continue
            if _is_users(message) and _is_users(last):
                joined = join_contents(last["content"], message["content"], "\n\n")
                self.messages[-1] = {"role": "user", "content": joined}
            else:
                self.messages.append(dict(message))

    def said(self, reply: Reply) -> None:
        """Add a reply from another conversation: its message, or in plain text its exact tokens."""
        if not self.plain:
            self.messages.append(reply.message)
            return
        assert self._text is not None
        if self._token_ids is None:
            self._token_ids = self._policy.encode(self._text, start=True)
        self._token_ids += reply.completion.token_ids.tolist()

    async def compact(self, last: Reply, **options: Any) -> Reply | None:
        """Replace all but the start of the conversation by the policy's summary, if it has become long.

        What was said before remains a trajectory, which the summary ends; what follows is another one, whose prompt has
        the summary as text. The number of summaries is logged as `compactions`.

        Args:
            last: the policy's last turn, whose tokens decide.
            options: as in `ask`; those of the other turns, so that the summary continues their tokens.

        Returns:
            The summary; None if the conversation is short.

        Raises ContextLengthError: the conversation is too long for a summary.
        """
        compaction = self._compaction
        if compaction is None or len(last.token_ids) < compaction.at_tokens:
            return None
        self.tell(f"\n\n{compaction.instruction}\n" if self.plain else compaction.instruction)
        longest = {} if compaction.max_new_tokens is None else {"max_new_tokens": compaction.max_new_tokens}
        reply = await self.ask(**options, learn=compaction.learn, **longest)
        opening = compaction.opening.replace("{summary}", reply.completion.answer.strip())
        self._begin()
        self.tell(f"\n\n{opening}\n\n" if self.plain else opening)
        self._compactions += 1
        self._policy.log(compactions=self._compactions)
        return reply

    async def ask(self, **options: Any) -> Reply:
        """Generate the policy's next turn; keyword arguments as in `Policy.chat`."""
        if not self.plain:
            reply = await self._policy.chat(self.messages, **options)
            self.messages.append(reply.message)
            return reply
        assert self._text is not None
        reply = await self._policy.complete(self._text if self._token_ids is None else self._token_ids, **options)
        self._token_ids = reply.token_ids
        return reply


def _is_users(message: ChatMessage) -> bool:
    """True for a message of the user with nothing but texts, and pictures."""
    plain = message.keys() == {"role", "content"} and message["role"] == "user"
    return plain and isinstance(message["content"], str | list)
