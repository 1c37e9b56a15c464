"""The reward of a reward model: a sequence classifier with one output, run on prompt and completion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from pydantic import Field

from rollmill.config.rewards import Reward
from rollmill.rewards.base import NO_ANSWER, OK, RewardResult, Score
from rollmill.rewards.values import validate_value
from rollmill.types import REASONING_END, Completion, StopReason, Task, opens_reasoning

if TYPE_CHECKING:
    from rollmill.rewards.resources import RewardResources

_TAG_TOKENS = 16
"""Tokens at the end of a prompt that may spell the tag `<think>`."""
_log = logging.getLogger(__name__)


class LoadedRewardModel:
    """A reward model in memory, with a thread that runs one forward pass at a time.

    Raises ModelError if the folder holds no reward model.
    """

    def __init__(self, folder: Path, device: str) -> None:
        from concurrent.futures import ThreadPoolExecutor

        import torch

        from rollmill.models.classifier import load_classifier

        self.folder, self.device = folder, torch.device(device)
        self.model, self.tokenizer = load_classifier(folder, self.device)
        self.limit: int | None = getattr(self.model.config, "max_position_embeddings", None)
        self.thread = ThreadPoolExecutor(1, "rollmill-reward-model")
        self.wake: Callable[[], object] | None = None  #: restores offloaded weights
        self._announced = False

    def scores(self, sequences: Sequence[Sequence[int]], batch_tokens: int) -> list[float]:
        """Return the score of each sequence of token ids. Raises ValueError if one is too long for the model."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        with torch.inference_mode():
            if self.wake is not None:
                self.wake()
            longest = max(map(len, sequences))
            if self.limit is not None and longest > self.limit:
                text = f"prompt and completion have {longest} tokens, and the reward model reads {self.limit}"
                raise ValueError(text)
            found = [0.0] * len(sequences)
            padding = self.model.config.pad_token_id
            for batch in self._batches(sequences, batch_tokens):
                rows = [torch.tensor(sequences[i], device=self.device) for i in batch]
                ids = pad_sequence(rows, batch_first=True, padding_value=0 if padding is None else padding)
                lengths = torch.tensor([len(row) for row in rows], device=self.device)
                mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
                scores = self.model(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
                for i, score in zip(batch, scores.float().tolist(), strict=True):
                    found[i] = score
            return found

    def announce_text(self) -> None:
        """Warn once that the policy's tokens differ from this model's."""
        if not self._announced:
            _log.warning("%s has another vocabulary than the policy: it reads completions as text", self.folder)
        self._announced = True

    def _batches(self, sequences: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
        """Return the indices of each batch; without a padding token a batch is one sequence."""
        batches: list[list[int]] = []
        for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
            full = not batches or (len(batches[-1]) + 1) * len(sequences[batches[-1][0]]) > batch_tokens
            if full or self.model.config.pad_token_id is None:
                batches.append([])
            batches[-1].append(i)
        return batches


_loaded_models: WeakValueDictionary[tuple[Path, str], LoadedRewardModel] = WeakValueDictionary()


def loaded_reward_models(folders: Iterable[Path], device: str) -> list[LoadedRewardModel]:
    """Return the reward models of these folders that are in memory, each once."""
    found = {folder.resolve(): _loaded_models.get((folder.resolve(), device)) for folder in folders}
    return [model for model in found.values() if model is not None]


class ModelReward(Reward):
    """Score of a reward model for the answer, without reasoning: a sequence classifier with one output."""

    scope = "either"
    name: Literal["model"]
    path: Path
    """A Hugging Face folder of a sequence classifier, such as RUN/checkpoints/step-N/reward_model."""
    batch_tokens: int = Field(8192, ge=1)
    """Tokens per forward pass, padding included; a longer completion has its own pass."""
    _model: LoadedRewardModel
    _reads_tokens: bool

    @property
    def offloadable_model(self) -> Path | None:
        return self.path

    def setup(self, resources: RewardResources) -> None:
        """Load the model: one in memory serves all rewards of its folder."""
        import torch

        tokenizer, device = resources.tokenizer, resources.device or ("cuda" if torch.cuda.is_available() else "cpu")
        key = self.path.resolve(), device
        model = _loaded_models.get(key)
        self._model = _loaded_models[key] = LoadedRewardModel(self.path, device) if model is None else model
        self._reads_tokens = tokenizer is not None and tokenizer.get_vocab() == self._model.tokenizer.get_vocab()
        if tokenizer is not None and not self._reads_tokens:
            self._model.announce_text()

    async def score(self, task: Task, completion: Completion) -> Score:
        return (await self.score_group(task, [completion], []))[0]

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        """Score completions in batches. A completion that ends within its reasoning is scored like an empty one, with
        the outcome `no_answer`: scores have no lowest value."""
        import asyncio

        sequences = [self._tokens(task, completion) for completion in completions]
        loop, model = asyncio.get_running_loop(), self._model
        found = await loop.run_in_executor(model.thread, model.scores, sequences, self.batch_tokens)
        outcomes = [OK if each.parsed_reply.reasoning_finished else NO_ANSWER for each in completions]
        return [Score(validate_value(score), outcome) for score, outcome in zip(found, outcomes, strict=True)]

    def _tokens(self, task: Task, completion: Completion) -> list[int]:
        """Return what the model reads: the policy's tokens if both have one vocabulary; of a completion with reasoning
        only those of the prompt and of the end.

        Otherwise the tokens of the text: the prompt (through the model's own chat template, if it is a chat), the
        answer, and, if the policy ended it, the model's own end: of a turn in a chat, of a sequence otherwise.
        """
        from rollmill.data.encoding import encode_prompt
        from rollmill.data.renderer import renderer_of

        tokenizer: Any = self._model.tokenizer
        reply = completion.parsed_reply
        if self._reads_tokens and reply.reasoning is None:
            return [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]
        prompt = completion.prompt_ids.tolist() if self._reads_tokens else list(encode_prompt(task, tokenizer))
        text = reply.content
        if reply.reasoning is not None and opens_reasoning(tokenizer.decode(prompt[-_TAG_TOKENS:])):
            text = f"{REASONING_END}\n\n{text}"
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        if completion.stop_reason is not StopReason.EOS:
            return [*prompt, *ids]
        end = int(completion.token_ids[-1]) if self._reads_tokens else tokenizer.eos_token_id
        if not self._reads_tokens and not isinstance(task.prompt, str):  # the template's end, as in its training
            turn_end = renderer_of(tokenizer).turn_end_id
            end = end if turn_end is None else turn_end
        return [*prompt, *ids, *([] if end is None else [end])]
