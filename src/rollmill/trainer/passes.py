"""Forward passes over chosen experiences of a batch, as a recipe and the section `trainer` have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollmill.algorithms.recipe import Recipe
from rollmill.config.trainer import TrainerConfig
from rollmill.trainer.batch import MicroBatch, TokenTable, build_micro_batches
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.logprobs import compute_hidden_states, compute_logprobs
from rollmill.types import Experience


@dataclass
class ForwardPasses:
    """What all passes have in common. `precision` (fp32 or bf16) is a checkpoint's after a resume."""

    recipe: Recipe
    config: TrainerConfig
    precision: str
    device: torch.device
    ranks: RankGroup
    routing: tuple[int, int] | None = None  #: routers and experts per token, where the rollout's choice is replayed

    def rows(self, experiences: Sequence[Experience], table: TokenTable, chosen: list[int]) -> list[MicroBatch]:
        """This rank's share of the chosen experiences."""
        return build_micro_batches(
            experiences,
            table,
            chosen,
            self.config.micro_batch_tokens,
            self.device,
            keep_groups=self.recipe.keep_groups_together,
            ranks=self.ranks.shares,
            rank=self.ranks.share,
            even=self.ranks.sharding == "fsdp",
            routing=self.routing,
        )

    def hidden(self, model: nn.Module, micro: MicroBatch) -> Tensor:
        """Last hidden states of a row [T, d]; run it inside `attending_to`."""
        return compute_hidden_states(model, micro, bf16=self.precision == "bf16")

    def predict(
        self, model: nn.Module, micro: MicroBatch, table: TokenTable, hidden_Td: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of a row's action tokens, [M] each; run it inside `attending_to`."""
        return compute_logprobs(
            model,
            micro,
            table,
            hidden_Td=hidden_Td,
            chunk=self.config.logprob_chunk,
            entropy_gradient=self.recipe.uses_entropy,
            bf16=self.precision == "bf16",
        )
