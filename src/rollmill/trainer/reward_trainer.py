"""Reward-model training on preference pairs: the policy's network with one score per sequence.

Shapes: T tokens of the row, n experiences of a micro-batch, P pairs of a micro-batch, d hidden size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollmill.algorithms.preference import bradley_terry
from rollmill.config.algorithms.preferences import RewardModel
from rollmill.config.trainer import TrainerConfig
from rollmill.models.attention import use_attention_context
from rollmill.models.classifier import REWARD_MODEL_FOLDER, save_classifier
from rollmill.models.cpu.norms import NormReplacements, find_norms, use_fast_norms
from rollmill.models.cpu.step_timing import StepSize, choose_precision
from rollmill.models.load import PolicyModel
from rollmill.progress import Progress, count_progress
from rollmill.trainer.batch import MicroBatch, TokenTable, build_micro_batches, build_token_table
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.model_setup import evaluation_mode, set_gradient_checkpointing, to_master_weights
from rollmill.trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    collect_gradients,
    compute_gradient_norm,
    compute_learning_rate,
    failed_step_error,
)
from rollmill.trainer.update import split_mini_batches
from rollmill.types import Experience


class ScoringNetwork(nn.Module):
    """Scores a prompt with its completion, from the hidden state of the last token (arXiv:2203.02155).

    Starts as a copy of the policy's network with a score of 0.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.network = copy.deepcopy(policy.base_model)
        weight = policy.get_output_embeddings().weight
        self.head = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: MicroBatch, *, bf16: bool) -> Tensor:
        """Scores [n] of a micro-batch of `append_end_token` experiences; call it inside `use_attention_context`."""
        count_progress(Progress.MICRO_BATCHES)
        with torch.autocast(micro.input_ids.device.type, torch.bfloat16) if bf16 else nullcontext():
            output = self.network(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False)
        hidden_nd = output.last_hidden_state[0].index_select(0, micro.rows[_last(micro)])
        scores: Tensor = self.head(hidden_nd.to(self.head.weight.dtype))[:, 0]
        return scores


class RewardTrainer:
    """Trains a scoring model on batches of preference pairs, with the Bradley-Terry loss. The policy is not changed.

    Args:
        policy: a transformers causal LM, whose network is copied.
        total_steps: training steps of the stage, for the schedule.
        ranks: data-parallel ranks; every rank calls `step` with the same batch. Default: those of torch.distributed.
    """

    def __init__(
        self,
        policy: Any,
        options: RewardModel,
        config: TrainerConfig,
        *,
        total_steps: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        ranks: RankGroup | None = None,
    ) -> None:
        self.device, config = torch.device(device), config.settled()
        self.model = to_master_weights(ScoringNetwork(policy).requires_grad_(True).to(self.device))
        self.options, self.config, self.total_steps = options, config, total_steps
        self.precision = config.precision
        if config.precision == "auto":
            self.precision = choose_precision(policy, device, StepSize.of_training(config.micro_batch_tokens))
        self.steps = 0
        self._ranks = ranks or RankGroup.current()
        self._optimizer = build_optimizer(self.model, config)
        self._generator = torch.Generator().manual_seed(seed)
        self._norms: NormReplacements = find_norms(self.model) if self.device.type == "cpu" else []
        set_gradient_checkpointing(self.model.network, config.gradient_checkpointing)

    def start(self, *, keeps_policy: bool = True) -> None:
        """No-op: there are no other processes."""

    def sharded_weights(self) -> None:
        """None: reward models are not sharded."""

    def gather_policy(self) -> None:
        """No-op: the policy is not trained."""

    def precompute(self, experiences: Sequence[Experience], version: int) -> Iterator[None]:
        """No-op: pairs need no passes before they are learned from."""
        return iter(())

    def set_learning_rate(self, lr: float) -> None:
        """Changes the peak learning rate from the next step on; its schedule goes on. A checkpoint does not hold it."""
        self.config = self.config.model_copy(update={"lr": lr})

    def to_compare(
        self, upcoming: Sequence[Sequence[Experience]], experiences: Sequence[Experience], version: int
    ) -> list[Experience]:
        """Returns nothing to compare: no engine samples from a reward model."""
        return []

    def step(
        self, experiences: Sequence[Experience], version: int, compared: Sequence[Experience] = ()
    ) -> dict[str, float]:
        """Learns from one batch of pairs; `version` and `compared` are ignored.

        Returns the metrics: loss and grad_norm (means over the updates), lr, tokens (of the completions), updates, and
        of the pairs, each before it is learned from in this step: pairs/accuracy (share whose chosen completion has the
        greater score; equal scores count half), pairs/margin (mean difference), pairs/chosen and pairs/rejected (mean
        scores).

        Raises:
            TrainingError: a loss or gradient is not finite; the weights are as before the failing update.
        """
        config, ended = self.config, [append_end_token(experience) for experience in experiences]
        table = build_token_table(ended, self.device)
        lr = compute_learning_rate(config, self.steps, self.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        totals, sums, updates = {"loss": 0.0, "grad_norm": 0.0}, dict[str, float](), 0
        with evaluation_mode(self.model), use_fast_norms(self._norms):
            for epoch in range(config.epochs_per_batch):
                for part in split_mini_batches(
                    experiences, config.updates_per_batch, self._generator if epoch else None
                ):
                    found = self._update(ended, table, part)
                    totals = {name: value + found.pop(name) for name, value in totals.items()}
                    if epoch == 0:
                        sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
                    updates += 1
        self.steps += 1
        count = sums.pop("count")
        means = {name: value / updates for name, value in totals.items()}
        pairs = {f"pairs/{name}": value / count for name, value in sums.items()}
        tokens = float(sum(experience.action_tokens for experience in experiences))
        return {**means, **pairs, "lr": lr, "tokens": tokens, "updates": float(updates)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to resume from, including the scoring model, which is no part of the policy."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "generator": self._generator.get_state(),
            "precision": self.precision,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.precision = state["steps"], state["precision"]
        self._generator.set_state(state["generator"])

    def export(self, folder: Path, policy: PolicyModel) -> None:
        """Writes the reward model into a subfolder of the checkpoint folder."""
        directory = folder / REWARD_MODEL_FOLDER
        network, head = self.model.network, self.model.head
        save_classifier(policy.model, network, head, policy.tokenizer, directory, end_id=policy.end_id)

    def close(self) -> None:
        """No-op: there are no other processes."""

    def _update(self, experiences: Sequence[Experience], table: TokenTable, part: list[int]) -> dict[str, float]:
        """Takes one optimizer step; returns loss and grad_norm, and sums over the pairs of the part."""
        self._optimizer.zero_grad(set_to_none=True)
        total: dict[str, float] = {}
        for micro in self._rows(experiences, table, part):
            with use_attention_context(self.model.network, micro.attention):
                scores = self.model(micro, bf16=self.precision == "bf16")
                chosen, rejected = _by_pair(micro, scores, experiences)
                losses = bradley_terry(
                    chosen,
                    rejected,
                    margin=self.options.margin,
                    centre_coefficient=self.options.centre_coefficient,
                )
                loss = losses.sum() / (len(part) // 2)
                if self._ranks.size == 1 and not math.isfinite(loss.item()):
                    self._fail(f"the loss of pairs is {loss.item()}", [experiences[i] for i in micro.experiences])
                loss.backward()
            for name, value in {"loss": loss.item(), **_sums(chosen, rejected)}.items():
                total[name] = total.get(name, 0.0) + value
        self._ranks.add_gradients(list(self.model.parameters()))
        grads = collect_gradients(self._optimizer)
        norm = compute_gradient_norm(grads)
        if not math.isfinite(norm):
            self._fail("the gradient is not finite", [experiences[i] for i in part])
        clip_gradients(grads, norm, self.config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {**self._ranks.merged(total), "grad_norm": norm}

    def _rows(self, experiences: Sequence[Experience], table: TokenTable, chosen: list[int]) -> list[MicroBatch]:
        """This rank's share of the chosen experiences; a pair is never split."""
        return build_micro_batches(
            experiences,
            table,
            chosen,
            self.config.micro_batch_tokens,
            self.device,
            keep_groups=True,
            ranks=self._ranks.size,
            rank=self._ranks.rank,
        )

    def _fail(self, what: str, experiences: list[Experience]) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        raise failed_step_error(self.steps, what, [experience.task_id for experience in experiences])


def append_end_token(experience: Experience) -> Experience:
    """Appends a token that nothing reads, so that the experience's last token is part of the packed row."""
    return replace(
        experience,
        token_ids=np.append(experience.token_ids, np.int32(0)),
        action_mask=np.append(experience.action_mask, True),
        logprobs=np.append(experience.logprobs, np.float32(0)),
        versions=np.append(experience.versions, np.int32(-1)),
    )


def _last(micro: MicroBatch) -> Tensor:
    """Index of each experience's last action token among the micro-batch's: int64 [n]."""
    return torch.bincount(micro.sequence).cumsum(0) - 1


def _by_pair(micro: MicroBatch, scores: Tensor, experiences: Sequence[Experience]) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected completion of each pair, [P] each; the chosen has the reward 1."""
    pair = micro.group[_last(micro)]
    chosen = torch.tensor([bool(experiences[i].reward) for i in micro.experiences], device=scores.device)
    better, worse = (scores[side][pair[side].argsort()] for side in (chosen, ~chosen))
    return better, worse


def _sums(chosen: Tensor, rejected: Tensor) -> dict[str, float]:
    margin = (chosen - rejected).detach()
    return {
        "count": float(len(margin)),
        "accuracy": float((margin > 0).sum() + 0.5 * (margin == 0).sum()),
        "margin": float(margin.double().sum()),
        "chosen": float(chosen.detach().double().sum()),
        "rejected": float(rejected.detach().double().sum()),
    }
