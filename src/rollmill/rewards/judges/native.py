"""A chat model in a Hugging Face folder, run by rollmill's native engine in a separate thread."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from rollmill.concurrency import EventLoopThread
from rollmill.config.model import ModelConfig
from rollmill.config.rollout import SamplingConfig
from rollmill.data.renderer import renderer_of
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.engines.native.parity_check import check_engine_parity
from rollmill.errors import ChatTemplateError, ModelError, RewardError
from rollmill.models.load import load_policy
from rollmill.rewards.judges.chat import (
    LENGTH,
    STOP,
    TOO_LONG,
    TOO_LONG_ADVICE,
    ChatMessage,
    ChatModelReply,
    ChatSamplingParams,
    NoReplyError,
)
from rollmill.types import StopReason


class NativeChatModel:
    """One model in memory: fp32 on a CPU, bf16 on a GPU. Its engine steps in the loop's thread.

    Raises ModelError if the folder holds no causal language model, or one without a chat template.
    """

    def __init__(self, folder: Path, device: str) -> None:
        try:
            policy = load_policy(ModelConfig(path=folder), texts=[], seed=0, device=torch.device(device))
            check_engine_parity(policy.model, folder)
        except ModelError as error:
            raise ModelError(str(error).replace("model.path", "a judge's path")) from error
        try:
            self._renderer = renderer_of(policy.tokenizer)
        except ChatTemplateError as error:
            text = f"a judge's path: {folder} has no chat template; use a model that was tuned for chat"
            raise ModelError(text) from error
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = policy.model.to(dtype).requires_grad_(False)
        self._tokenizer: Any = policy.tokenizer
        self._context = policy.context
        self._engine = NativeEngine(
            model, policy.tokenizer, eos_ids=policy.eos_ids, context=policy.context, dtype=dtype
        )
        self._control = _control_tokens(policy.tokenizer)
        self.identity = _identity(folder, dtype)
        self.loop = EventLoopThread("rollmill-native-judge", None)
        weakref.finalize(self, self.loop.close)

    async def chat(
        self, messages: Sequence[ChatMessage], sampling: ChatSamplingParams, indices: Sequence[int]
    ) -> list[ChatModelReply]:
        """Messages begin with `system` and `user`. Prompt tokens are counted in the first reply."""
        ids = self._encoded(messages)
        if len(ids) + sampling.max_tokens > self._context:
            message = (
                f"{len(ids)} tokens and {sampling.max_tokens} of the reply; the judge's context is {self._context}"
            )
            raise NoReplyError(TOO_LONG, message, TOO_LONG_ADVICE)
        settings = SamplingConfig(temperature=sampling.temperature, max_new_tokens=sampling.max_tokens)
        request = GenerationRequest(ids, settings, n=max(indices) + 1, seed=sampling.seed, id="a question to the judge")
        found = await self._engine.generate(request)
        return [
            ChatModelReply(
                self._renderer.parse(found[index].token_ids.tolist(), ids, text=found[index].text).content,
                LENGTH if found[index].stop_reason is StopReason.LENGTH else STOP,
                prompt_tokens=0 if number else len(ids),
                completion_tokens=len(found[index].token_ids),
            )
            for number, index in enumerate(indices)
        ]

    def _encoded(self, messages: Sequence[ChatMessage]) -> list[int]:
        plain = [{"role": each["role"], "content": self._plain(each["content"])} for each in messages]
        if plain[0]["role"] == "system" and not self._renderer.template.supports_system:
            joined = f"{plain[0]['content']}\n\n{plain[1]['content']}"
            plain = [{"role": "user", "content": joined}, *plain[2:]]
        try:
            return self._renderer.prompt(plain).token_ids
        except ChatTemplateError as error:
            raise RewardError(f"a judge with `path`: {error}") from error

    def _plain(self, content: Any) -> str:
        """Escape this tokenizer's control tokens in the text, which would end its turn in the chat."""
        if not isinstance(content, str):
            raise RewardError(
                "the task has images, and a judge with `path` reads text only; set images: false, or use an endpoint "
                "with a vision-language model"
            )
        text = content
        for token in self._control:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


_models: WeakValueDictionary[tuple[Path, str], NativeChatModel] = WeakValueDictionary()


def load_native_chat_model(folder: Path, device: str | None) -> NativeChatModel:
    """Return the model of a folder; one in memory serves all rewards. `device` None: a GPU if torch finds one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    key = folder.resolve(), device
    model = _models.get(key)
    if model is None:
        model = _models[key] = NativeChatModel(folder, device)
    return model


def _control_tokens(tokenizer: Any) -> list[str]:
    tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted((token for token in tokens | set(tokenizer.all_special_tokens) if len(token) > 1), key=len)[::-1]


def _identity(folder: Path, dtype: torch.dtype) -> str:
    """Return an identity of the current files: another checkpoint in the same folder is another model."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{folder.resolve()} {dtype} {hashlib.sha256(repr(stats).encode()).hexdigest()}"
