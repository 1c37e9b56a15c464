"""Adapters over one base model: those that clients train, and those that they sample from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rollmill.algorithms.recipe import LossInputs
from rollmill.apps.serve.tinker.losses import (
    LossFunction,
    cross_entropy,
    find_loss,
    make_experiences,
    make_recipe,
    token_weights,
)
from rollmill.apps.serve.tinker.wire import (
    Array,
    Datum,
    ForwardRequest,
    Sampled,
    TinkerRequestError,
    TopLogprobs,
    encode_forward_result,
)
from rollmill.config.engines import NativeEngineConfig
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.config.rollout import RolloutConfig, SamplingConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.engines.base import GenerationRequest, SampledToken
from rollmill.engines.native.build import build_native
from rollmill.engines.native.engine import NativeEngine
from rollmill.errors import CheckpointError, describe_read_error
from rollmill.models.cpu.step_timing import choose_precision
from rollmill.models.from_scratch import silence_transformers
from rollmill.models.load import PolicyModel
from rollmill.models.lora import add_lora, copy_with_same_weights, load_adapter, save_adapter
from rollmill.orchestrator.manifest import model_files, verifying
from rollmill.trainer.batch import build_token_table
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.logprobs import ForwardPasses, compute_logits, use_packed_attention
from rollmill.trainer.model_setup import evaluation_mode
from rollmill.trainer.parity import load_verified_policy
from rollmill.trainer.stepwise import AdamSettings, StepwiseTrainer
from rollmill.types import FloatArray, StopReason

ALPHA = 32.0
"""The product of an adapter is scaled by ALPHA / rank, as tinker does."""
OPTIMIZER_FILE = "optimizer.pt"
Precision = Literal["auto", "fp32", "bf16"]
_ROWS = 256  # of logits that exist at a time


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The adapter of a model: its rank, and the layers that have one. The output layer never has."""

    rank: int
    attention: bool = True
    mlp: bool = True

    def config(self, model: nn.Module, *, merge: bool) -> LoRAConfig:
        """The section `model.lora` of such an adapter. Raises TinkerRequestError if no layer would have one."""
        if not (self.attention or self.mlp):
            raise TinkerRequestError(
                "the output layer alone cannot be adapted; set train_attn or train_mlp of the LoRA config"
            )
        if not 1 <= self.rank <= 1024:
            raise TinkerRequestError(f"the LoRA rank is {self.rank}; give one from 1 to 1024")
        targets: Any = "all-linear"
        if not (self.attention and self.mlp):
            linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            chosen = {
                name.rpartition(".")[2] for name in linear if ("attn" in name or "attention" in name) is self.attention
            }
            targets = sorted(chosen - {"lm_head"})
        return LoRAConfig(rank=self.rank, alpha=ALPHA, targets=targets, merge=merge)


class SharedBase:
    """A checkpoint, loaded once, whose weights all adapters share and none changes.

    Args:
        precision: of all passes.
    """

    def __init__(self, folder: Path, device: torch.device, precision: Precision = "auto") -> None:
        with verifying(folder, model_files):
            self.policy = load_verified_policy(ModelConfig(path=folder), texts=(), seed=0, device=device)
        self.folder = folder.absolute()
        # It never runs itself: threads run copies of its modules.
        self.policy.model.requires_grad_(False)
        self.precision = choose_precision(self.policy.model, device) if precision == "auto" else precision

    @property
    def vocabulary(self) -> int:
        """Number of rows of the embeddings."""
        return int(self.policy.model.get_input_embeddings().weight.shape[0])

    def adapted(self, settings: AdapterSettings, seed: int) -> PolicyModel:
        """A model with a new adapter over these weights.

        An engine decodes with these weights and the adapter; in bf16, for which it needs a copy of the weights in any
        case, with a copy in which the adapter is merged, which is faster.
        """
        twin: Any = copy_with_same_weights(self.policy.model)
        add_lora(twin, settings.config(twin, merge=self.precision == "bf16"), seed)
        return replace(self.policy, model=twin)


class TrainedAdapter:
    """An adapter with its gradients and its optimizer."""

    def __init__(self, base: SharedBase, settings: AdapterSettings, seed: int) -> None:
        self.base, self.settings = base, settings
        self.version = 0  #: number of optimizer steps
        self._policy = base.adapted(settings, seed)
        config = TrainerConfig(precision=base.precision, param_dtype="fp32")
        recipe = make_recipe("cross_entropy", cross_entropy, torch.zeros(0))
        self._trainer = StepwiseTrainer(
            self._policy.model, recipe, config, total_steps=1, device=base.policy.device, seed=seed
        )

    def forward(self, request: ForwardRequest) -> bytes:
        """Compute the loss of a request and, unless it is `forward_only`, add its gradients to those since the last
        optimizer step; return its encoded result.

        Raises:
            TinkerRequestError: the request is wrong.
            TrainingError: the loss is not finite; all gradients since the last optimizer step are discarded.
        """
        loss = find_loss(request.loss, request.options)
        weights = token_weights(request.loss, request.data)
        experiences = make_experiences(
            request.loss, request.data, self.version, self.base.vocabulary, self.base.policy.context
        )
        if request.forward_only:
            logprobs = [each[1:] for each in self._trainer.logprobs(experiences)]
            total = _total(loss, weights, request.data, logprobs)
        else:
            recipe = make_recipe(request.loss, loss, weights)
            total = self._trainer.forward_backward(experiences, self.version, recipe)["loss"]
            details = [each.trainer_logprobs for each in experiences]
            logprobs = [each[1:] for each in details if each is not None]
        return encode_forward_result(logprobs, {"loss:sum": total})

    def optim_step(self, settings: AdamSettings) -> dict[str, float]:
        """Take an optimizer step. Raises TrainingError without gradients, or if one is not finite."""
        found = self._trainer.optim_step(settings)
        self.version += 1
        return {"grad_norm:mean": found["grad_norm"], "skipped:max": found["skipped"]}

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Write the adapter in peft's format, and with `optimizer` what training goes on from."""
        with silence_transformers():
            save_adapter(self._policy.model, folder)
        if optimizer:
            torch.save({**self._trainer.state_dict(), "version": self.version}, folder / OPTIMIZER_FILE)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load what `save` wrote; gradients are discarded. Raises ModelError or CheckpointError."""
        load_adapter(self._policy.model, folder)
        self._trainer.discard()
        if not optimizer:
            return
        try:
            state = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
            self.version = state.pop("version")
            self._trainer.load_state_dict(state)
        except Exception as error:  # torch raises errors of its own
            raise CheckpointError(f"the optimizer's state cannot be loaded: {describe_read_error(error)}") from error


def _total(loss: LossFunction, weights: Tensor, data: Any, logprobs: list[FloatArray]) -> float:
    """The loss of log-probs that are known."""
    logprob = torch.from_numpy(np.concatenate([each.ravel() for each in logprobs]))
    rollout = [
        each.inputs.get("logprobs", np.zeros(known.shape)).ravel().astype(np.float32)
        for each, known in zip(data, logprobs, strict=True)
    ]
    nothing = torch.zeros_like(logprob)
    sequence = torch.from_numpy(np.repeat(np.arange(len(logprobs)), [each.size for each in logprobs]))
    inputs = LossInputs(
        logprob=logprob,
        old_logprob=logprob,
        rollout_logprob=torch.from_numpy(np.concatenate(rollout)),
        advantage=weights,
        reward=nothing,
        entropy=nothing,
        reference_logprob=None,
        staleness=nothing,
        sequence=sequence,
        group=sequence,
    )
    return float(loss(inputs).double().sum())


@dataclass(frozen=True, slots=True)
class PromptQuestion:
    """A prompt whose log-probs are asked for, with the `top` most probable tokens; of the `last` tokens, or of all."""

    tokens: Array
    top: int = 0
    last: int | None = None

    def empty(self) -> PromptLogprobs:
        """An answer without any number."""
        shape = len(self.tokens), self.top
        best = TopLogprobs(np.zeros(shape, np.int32), np.full(shape, EMPTY_LOGPROB, np.float32))
        return PromptLogprobs(np.full(shape[0], np.nan, np.float32), best)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probs of a prompt's tokens, [N], and the most probable tokens in their places."""

    logprobs: FloatArray
    top: TopLogprobs


class SamplingModel:
    """The base model, or one with a saved adapter, with an engine; it does not change.

    Args:
        folder: of the adapter, as `TrainedAdapter.save` wrote it; None: the base model itself.
    """

    def __init__(self, base: SharedBase, settings: AdapterSettings | None = None, folder: Path | None = None) -> None:
        self.base = base
        self._policy = replace(base.policy, model=copy_with_same_weights(base.policy.model))
        if settings is not None and folder is not None:
            self._policy = base.adapted(settings, 0)
            load_adapter(self._policy.model, folder)
            self._policy.model.requires_grad_(False)
        # The engine, which runs in another thread than `prompt_logprobs`, has modules of its own.
        own = replace(self._policy, model=copy_with_same_weights(self._policy.model))
        self.engine: NativeEngine = build_native(NativeEngineConfig(), own, RolloutConfig(), base.precision)
        recipe = make_recipe("cross_entropy", cross_entropy, torch.zeros(0))
        config = TrainerConfig(precision=base.precision).settled()
        self._passes = ForwardPasses(recipe, config, base.precision, base.policy.device, RankGroup.current())

    async def sample(
        self, prompt: list[int], sampling: SamplingConfig, n: int, seed: int, top: int, *, endless: bool = False
    ) -> list[Sampled]:
        """Sample completions of a prompt, with the `top` most probable tokens of each place; `endless` ones go on after
        the end of the text. Raises EngineError."""
        found: list[list[SampledToken]] = [[] for _ in range(n)]

        def keep(token: SampledToken) -> None:
            found[token.index].append(token)

        request = GenerationRequest(
            prompt, sampling, n=n, seed=seed, top=top, on_token=keep if top else None, ignore_eos=endless
        )
        completions = await self.engine.generate(request)
        sampled = []
        for each in completions:
            tokens = found[each.index][: len(each.token_ids)]
            best = None
            if tokens:
                ids, values = ([[pair[at] for pair in token.top] for token in tokens] for at in (0, 1))
                best = TopLogprobs(np.array(ids, np.int32), np.array(values, np.float32))
            stopped = each.stop_reason in (StopReason.EOS, StopReason.STOP)
            own = each.logprobs + each.kept_logmass  # of the model's own distribution, at the request's temperature
            sampled.append(Sampled(each.token_ids, own, stopped, best))
        return sampled

    @torch.no_grad()
    def prompt_logprobs(self, asked: Sequence[PromptQuestion]) -> list[PromptLogprobs]:
        """Log-probs of the tokens of prompts, and the most probable tokens in their places, in passes that several
        prompts share; NaN for a first token, and for all but the `last` ones."""
        found = [each.empty() for each in asked]
        data = [Datum(each.tokens[:-1], {"target_tokens": each.tokens[1:]}) for each in asked if len(each.tokens) > 1]
        of = [number for number, each in enumerate(asked) if len(each.tokens) > 1]
        experiences = make_experiences("cross_entropy", data, 0, self.base.vocabulary, self.base.policy.context)
        table, model = build_token_table(experiences, self.base.policy.device), self._policy.model
        owner, offsets = table.experience.cpu().numpy(), np.array(table.offsets)
        top = max((each.top for each in asked), default=0)
        with evaluation_mode(model):
            for micro in self._passes.rows(experiences, table, list(range(len(experiences)))):
                with use_packed_attention(model, micro):
                    hidden_Td = self._passes.hidden(model, micro)
                    values = self._passes.predict(model, micro, table, hidden_Td)[0].float().cpu().numpy()
                    best = [self._best(hidden_Td[rows], top) for rows in micro.rows.split(_ROWS)] if top else []
                tokens = micro.tokens.cpu().numpy()
                for at in range(len(tokens)) if top else ():
                    result = found[of[owner[tokens[at]]]]
                    ids, logprobs = (each[at % _ROWS][: result.top.ids.shape[1]] for each in best[at // _ROWS])
                    place = tokens[at] - offsets[owner[tokens[at]]] + 1
                    result.top.ids[place], result.top.logprobs[place] = ids, logprobs
                for number in np.unique(owner[tokens]):
                    mine = owner[tokens] == number
                    found[of[number]].logprobs[tokens[mine] - offsets[number] + 1] = values[mine]
        for question, result in zip(asked, found, strict=True):
            unknown = 0 if question.last is None else len(question.tokens) - question.last
            result.logprobs[:unknown], result.top.logprobs[:unknown] = np.nan, EMPTY_LOGPROB
        return found

    def _best(self, hidden_Cd: Tensor, top: int) -> tuple[Any, Any]:
        values, ids = torch.log_softmax(compute_logits(self._policy.model, hidden_Cd), -1).topk(top)
        return ids.cpu().numpy(), values.cpu().numpy()


EMPTY_LOGPROB = -99999.0
"""In tinker's tables of most probable tokens: nothing is known of this place."""


def adam_settings(params: Any) -> AdamSettings:
    """The settings of an optimizer step from `tinker.types.AdamParams`. Raises TinkerRequestError for wrong ones."""
    numbers = (params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm)
    if not all(math.isfinite(each) and each >= 0 for each in numbers) or max(params.beta1, params.beta2) >= 1:
        raise TinkerRequestError("adam_params: numbers are finite and at least 0, and beta1 and beta2 are below 1")
    return AdamSettings(
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_grad_norm=params.grad_clip_norm or math.inf,
    )
