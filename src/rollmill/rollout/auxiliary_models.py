"""Models besides the policy for workflows: frozen ones in this process, and endpoints."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollmill.config.model import AuxiliaryModelConfig, ModelConfig
from rollmill.config.rollout import RolloutConfig, SamplingConfig
from rollmill.data.renderer import ChatMessage
from rollmill.engines.base import RolloutEngine
from rollmill.engines.native import NativeEngine
from rollmill.errors import ConfigError, ModelError, WorkflowError
from rollmill.models.load import PolicyModel as Model
from rollmill.rewards.builtin.judge import JudgeReward
from rollmill.rewards.judges.chat import LENGTH, ChatSamplingParams, NoReplyError
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.past_policies import PastPolicies
from rollmill.rollout.policy import Policy, Reply
from rollmill.rollout.workflow import ResourceFactory, Rollout
from rollmill.seeds import derive_seed
from rollmill.trainer.parity import load_verified_policy
from rollmill.types import Completion, StopReason, split_reply

if TYPE_CHECKING:
    from rollmill.rewards.judges.endpoint import EndpointChatModel

_STREAM = 0x07E5  # keeps other models' random numbers apart from the policy's
_INITIAL, _PAST = "initial", "past"  # keys of the state if there are past copies


class AuxiliaryModels:
    """The auxiliary models of one stage, by name. Frozen ones are decoded in this process, next to the policy.

    Args:
        current: the stage's engine, which decodes with the current policy.
        precision: bf16 or fp32, their compute type.

    Raises:
        ModelError: a folder holds no causal language model.
        ConfigError: an endpoint's key is not set, or the library is missing.
    """

    def __init__(
        self,
        sections: Mapping[str, AuxiliaryModelConfig],
        policy: Model,
        current: RolloutEngine,
        rollout: RolloutConfig,
        precision: str,
    ) -> None:
        self._current = current
        self._rollout, self._dtype = rollout, torch.bfloat16 if precision == "bf16" else torch.float32
        self._engines: list[NativeEngine] = []
        self._endpoints: list[EndpointChatModel] = []
        self._initial: torch.nn.Module | None = None
        self._past: dict[str, PastPolicies] = {}
        self.sources: dict[str, ResourceFactory] = {
            name: self._source(name, number, section, policy) for number, (name, section) in enumerate(sections.items())
        }

    def state_dict(self) -> dict[str, Any] | None:
        """State for a checkpoint: the policy at the start of the stage, if a model is that, and past copies of it."""
        initial = None if self._initial is None else self._initial.state_dict()
        if not self._past:
            return initial
        return {_INITIAL: initial, _PAST: {name: each.state_dict() for name, each in self._past.items()}}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a state from `state_dict`."""
        if state is not None and self._past:
            for name, past in self._past.items():
                past.load_state_dict(state[_PAST][name])
            state = state[_INITIAL]
        if state is not None and self._initial is not None:
            self._initial.load_state_dict(state)
            for engine in self._engines:
                engine.weights_updated(0)

    def takes_copies(self, step: int) -> bool:
        """True if copies of the policy are due after a training step of the stage."""
        return any(past.takes_copy(step) for past in self._past.values())

    def finish_step(self, step: int) -> None:
        """Take the copies of the policy that are due after a training step of the stage."""
        for past in self._past.values():
            past.finish_step(step)

    async def close(self) -> None:
        """Free engines and connections; may be called twice."""
        for past in self._past.values():
            await past.close()
        for engine in self._engines:
            await engine.close()
        for endpoint in self._endpoints:
            endpoint.close()

    def _source(self, name: str, number: int, section: AuxiliaryModelConfig, policy: Model) -> ResourceFactory:
        if section.endpoint is not None:
            return partial(_open_endpoint_model, self._endpoint(name, section), number)
        sampling = SamplingConfig(temperature=section.temperature, max_new_tokens=section.max_new_tokens)
        if section.policy == "past":
            build = partial(self._build_engine, policy)
            past = self._past[name] = PastPolicies(name, number, section, policy, self._current, build, sampling)
            return past.open
        model = self._frozen(policy) if section.path is None else _load_frozen_model(name, section, policy)
        engine = self._build_engine(model, model.model)
        self._engines.append(engine)
        chat = ChatRenderer(model.tokenizer, model.eos_ids)
        return partial(_open_frozen_model, name, number, engine, chat, sampling)

    def _build_engine(self, model: Model, network: torch.nn.Module) -> NativeEngine:
        return NativeEngine(
            network,
            model.tokenizer,
            eos_ids=model.eos_ids,
            context=model.context,
            dtype=self._dtype,
            max_sequences=self._rollout.max_sequences,
            prefill_tokens=self._rollout.prefill_tokens,
        )

    def _frozen(self, policy: Model) -> Model:
        if self._initial is None:
            self._initial = copy.deepcopy(policy.model).requires_grad_(False).to(policy.device)
        return replace(policy, model=self._initial)

    def _endpoint(self, name: str, section: AuxiliaryModelConfig) -> EndpointModel:
        endpoint = connect_endpoint(f"models.{name}", section)
        self._endpoints.append(endpoint)
        return EndpointModel(name, endpoint, section)


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """A model behind an endpoint, with the part of the policy's interface that endpoints support."""

    name: str
    endpoint: EndpointChatModel
    config: AuxiliaryModelConfig
    seed: int = 0
    asked: Iterator[int] = field(default_factory=count)

    async def chat(self, messages: Sequence[ChatMessage], **sampling: Any) -> Reply:
        """Generate the next turn of a conversation. Keyword arguments are temperature and max_new_tokens.

        Raises:
            WorkflowError: these messages get no reply.
            RewardError: the endpoint does not reply at all.
        """
        [reply] = await self.chat_n(messages, 1, **sampling)
        return reply

    async def chat_n(self, messages: Sequence[ChatMessage], n: int, **sampling: Any) -> list[Reply]:
        """Generate several independent next turns, see `chat`."""
        return await self._ask([dict(each) for each in messages], n, sampling)

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """Complete a text; see `chat`. Raises WorkflowError for tokens, and if the endpoint only chats."""
        [reply] = await self.complete_n(prompt, 1, **sampling)
        return reply

    async def complete_n(self, prompt: str | Sequence[int], n: int, **sampling: Any) -> list[Reply]:
        """Generate several independent completions, see `complete`."""
        if not self.config.completes:
            raise WorkflowError(f"models.{self.name}: an endpoint has no `complete`, unless it has `completes: true`")
        if not isinstance(prompt, str):
            raise WorkflowError(f"models.{self.name}: an endpoint completes texts; its tokens are not known")
        return await self._ask(prompt, n, sampling)

    async def _ask(self, prompt: Any, n: int, sampling: dict[str, Any]) -> list[Reply]:
        unknown = sorted(sampling.keys() - {"temperature", "max_new_tokens"})
        if unknown:
            raise WorkflowError(f"models.{self.name}: an endpoint takes temperature and max_new_tokens, not {unknown}")
        settings = ChatSamplingParams(
            sampling.get("temperature", self.config.temperature),
            sampling.get("max_new_tokens", self.config.max_new_tokens),
            derive_seed(self.seed, next(self.asked)),
        )
        try:
            found = await self.endpoint.loop.run(self.endpoint.chat(prompt, settings, range(n)))
        except NoReplyError as error:
            raise WorkflowError(f"{error}; there is no reply ({error.outcome})") from error
        return [_reply(each.text, prompt, each.finish == LENGTH) for each in found]


def connect_endpoint(name: str, section: AuxiliaryModelConfig) -> EndpointChatModel:
    """Connect to the endpoint of a section. Raises ConfigError: the key is not set, or the library missing."""
    keys = ("endpoint", "model", "api_key_env", "options", "max_in_flight", "tries", "try_s", "deadline_s", "away_s")
    try:
        from rollmill.rewards.judges.endpoint import EndpointChatModel

        options = JudgeReward(name="judge", **{key: getattr(section, key) for key in keys})
        return EndpointChatModel(options, called=f"{name}: the model")
    except ConfigError as error:
        raise ConfigError(f"{name}: {str(error).removeprefix('rewards: ')}") from error


def _reply(text: str, prompt: Any, cut: bool) -> Reply:
    """Build a reply to a text or a chat without tokens, as endpoints give none."""
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    reason = StopReason.LENGTH if cut else StopReason.EOS
    completion = Completion(ids, ids, numbers, ids, numbers, text, reason, 0, 0)
    completion.reply = split_reply(text, prompt) if isinstance(prompt, str) else None
    return Reply(text, completion, {"role": "assistant", "content": text})


def _load_frozen_model(name: str, section: AuxiliaryModelConfig, policy: Model) -> Model:
    assert section.path is not None
    try:
        found = load_verified_policy(ModelConfig(path=section.path), texts=[], seed=0, device=policy.device)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", f"models.{name}.path")) from error
    found.model.requires_grad_(False)
    return found


@asynccontextmanager
async def _open_frozen_model(
    name: str, number: int, engine: NativeEngine, chat: ChatRenderer, sampling: SamplingConfig, rollout: Rollout
) -> AsyncIterator[Policy]:
    seed = derive_seed(rollout.seed, _STREAM, number)
    yield Policy(engine, chat, sampling, seed=seed, name=f"models.{name}, task {rollout.task.id}", index=rollout.index)


@asynccontextmanager
async def _open_endpoint_model(model: EndpointModel, number: int, rollout: Rollout) -> AsyncIterator[EndpointModel]:
    yield replace(model, seed=derive_seed(rollout.seed, _STREAM, number), asked=count())
