"""The critic (PPO, arXiv:1707.06347): a value model with one output per token and its own optimizer.

Shapes: A action tokens of the batch, M of a micro-batch, T tokens of the row, d hidden size, N experiences.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from rollmill.algorithms.aggregation import token_mean
from rollmill.algorithms.losses import value_loss
from rollmill.config.algorithms.base import CriticOptions
from rollmill.models.attention import use_attention_context
from rollmill.models.vision import picture_processor, text_model
from rollmill.progress import Progress, count_progress
from rollmill.trainer.batch import MicroBatch, TokenTable
from rollmill.trainer.distributed.fsdp import load_full_weights
from rollmill.trainer.logprobs import ForwardPasses, compute_hidden_states
from rollmill.trainer.loss import BatchAdvantages, PrecomputedScores
from rollmill.trainer.optimizer import (
    TensorGetter,
    build_optimizer,
    clip_gradients,
    collect_gradients,
    compute_gradient_norm,
    compute_learning_rate,
    failed_step_error,
    load_optimizer_state_dict,
    optimizer_state_dict,
    optimizer_tensors,
)
from rollmill.trainer.update import MiniBatch
from rollmill.types import ExperienceSource


class ValueModel(nn.Module):
    """Predicts the value of the state in which each token is chosen; 0 at initialization. A linear head on a network.

    The network is a trained copy of the policy's network, or the policy's network itself. In the second case the hidden
    states are detached, and the value loss trains the head only.
    """

    def __init__(self, policy: Any, *, own_network: bool = True) -> None:
        super().__init__()
        self._own = own_network
        self._shared = [] if own_network else [policy.base_model]  # in a list, so it is not registered as a submodule
        if own_network:
            self.copied = copy.deepcopy(policy.base_model)
        if (processor := picture_processor(policy)) is not None:
            self.picture_processor = processor
        weight = policy.get_output_embeddings().weight
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def network(self) -> Any:
        """The network that computes the hidden states."""
        return self.copied if self._own else self._shared[0]

    @property
    def base_model(self) -> Any:
        """The network, under the name that it has in a policy."""
        return self.network

    @property
    def model(self) -> Any:
        """The network, under the name that it has in a vision-language policy."""
        return self.network

    def get_input_embeddings(self) -> nn.Module:
        """Embeddings of the network's tokens."""
        embeddings: nn.Module = self.network.get_input_embeddings()
        return embeddings

    @contextmanager
    def use_packed_attention(self, micro: MicroBatch) -> Iterator[None]:
        """Context in which `forward` and its backward pass must run."""
        network = self.network if picture_processor(self) is None else text_model(self)
        with use_attention_context(network, micro.attention):
            yield

    def forward(self, micro: MicroBatch, *, bf16: bool) -> Tensor:
        """Values [M] of a micro-batch's action tokens; call it inside `use_packed_attention`."""
        count_progress(Progress.MICRO_BATCHES)
        with torch.set_grad_enabled(self._own and torch.is_grad_enabled()):
            hidden_Td = compute_hidden_states(self, micro, bf16=bf16)
        hidden_md = hidden_Td.index_select(0, micro.own_rows)
        values: Tensor = self.head(hidden_md.to(self.head.weight.dtype))[
            :, 0
        ].clone()  # FSDP hooks do not work on views
        return micro.gather(values)[0]


class Critic:
    """A value model trained on the same batches as the policy."""

    def __init__(self, policy: Any, options: CriticOptions, passes: ForwardPasses, total_steps: int) -> None:
        self.model = ValueModel(policy, own_network=options.network == "own")
        self.options, self._passes, self._ranks = options, passes, passes.ranks
        self._config = passes.config.model_copy(update={"lr": options.lr})
        self._total_steps = total_steps
        self._pending: list[tuple[MiniBatch, list[int]]] = []

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, built on first use because the model may be sharded before that."""
        return build_optimizer(self.model, self._config)

    def offloadable_tensors(self) -> dict[str, TensorGetter]:
        """Returns what can leave the device: weights and optimizer state."""
        return {"critic": self.model.parameters, "critic_optimizer": partial(optimizer_tensors, self._optimizer)}

    @torch.no_grad()
    def values(self, micros: Sequence[MicroBatch], table: TokenTable) -> Tensor:
        """Values of the micro-batches' tokens: float32 [A], 0 for all other tokens."""
        result = torch.zeros(len(table.target), device=table.target.device)
        for micro in micros:
            with self.model.use_packed_attention(micro):
                result[micro.tokens] = self.model(micro, bf16=self._passes.precision == "bf16").float()
        return self._ranks.add(result)

    def update(self, batch: MiniBatch, advantages: BatchAdvantages, scores: PrecomputedScores) -> dict[str, float]:
        """Takes one optimizer step towards the returns, on the rollout experiences of a mini-batch that count.

        Returns value/loss and value/grad_norm; nothing if no experience counts.

        Raises:
            TrainingError: the gradient is not finite; the critic is unchanged.
        """
        self.discard()
        return {**self.forward_backward(batch, advantages, scores), **self.step()}

    def forward_backward(
        self, batch: MiniBatch, advantages: BatchAdvantages, scores: PrecomputedScores
    ) -> dict[str, float]:
        """Adds the gradients of a mini-batch to those since the last step.

        Returns value/loss; nothing if no experience counts.
        """
        returns, old_values, table = advantages.returns, scores.values, batch.table
        assert returns is not None
        assert old_values is not None
        rollouts = [i for i in batch.chosen if batch.experiences[i].source == ExperienceSource.ROLLOUT]
        counted_N = advantages.counted.tolist()
        chosen = [i for i in rollouts if len(table.positions[i]) and counted_N[i]]
        if not chosen:
            return {}
        counted = torch.zeros_like(advantages.counted)
        counted[chosen] = True
        weights = token_mean(table.lengths * counted)[table.experience]
        total = torch.zeros((), dtype=torch.float64, device=table.target.device)
        for micro in self._passes.rows(batch.experiences, table, chosen):
            with self.model.use_packed_attention(micro):
                values, tokens = self.model(micro, bf16=self._passes.precision == "bf16"), micro.tokens
                losses = value_loss(values, old_values[tokens], returns[tokens], clip=self.options.value_clip)
                loss = torch.dot(weights[tokens].to(losses.dtype), losses)
                loss.backward()
            total += loss.detach()
        self._pending.append((batch, chosen))
        return {"value/loss": self._ranks.add(total).item()}

    def step(self) -> dict[str, float]:
        """Takes one optimizer step with the gradients since the last one; returns value/grad_norm, or nothing if there
        are none. Raises TrainingError like `update`."""
        if not self._pending:
            return {}
        lr = compute_learning_rate(self._config, self._pending[-1][0].step, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._ranks.add_gradients(list(self.model.parameters()))
        grads = collect_gradients(self._optimizer)
        norm = compute_gradient_norm(grads)
        if not math.isfinite(norm):
            tasks = [batch.experiences[i].task_id for batch, chosen in self._pending for i in chosen]
            step = self._pending[-1][0].step
            self.discard()
            raise failed_step_error(step, "the critic's gradient is not finite", tasks)
        clip_gradients(grads, norm, self._config.max_grad_norm)
        self._optimizer.step()
        self.discard()
        return {"value/grad_norm": norm}

    def discard(self) -> None:
        """Forgets all gradients since the last step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._pending.clear()

    def state_dict(self, keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Any]:
        """Returns weights and optimizer state; `keep` as in `optimizer_state_dict`."""
        return {"model": self.model.state_dict(), "optimizer": optimizer_state_dict(self._optimizer, self.model, keep)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_full_weights(self.model, state["model"])
        load_optimizer_state_dict(self._optimizer, self.model, state["optimizer"])


def value_metrics(values: Tensor, returns: Tensor, tokens: Tensor) -> dict[str, float]:
    """Mean value and explained variance 1 - Var(R - V) / Var(R) over `tokens` (bool [A])."""
    value, target = values[tokens].double(), returns[tokens].double()
    if len(target) < 2:
        return {}
    spread = target.var()
    found = {"value/mean": float(value.mean())}
    if float(spread) > 0:
        found["value/explained_variance"] = float(1 - (target - value).var() / spread)
    return found
