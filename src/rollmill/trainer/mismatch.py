"""Engine/trainer mismatch of tokens that older weights made, from a small sample of completions.

A token's mismatch is |log-prob of the trainer - log-prob of the engine|, both with the weights of the token's version.
For tokens of the present weights the training pass itself gives it. A stale token has to be compared while the weights
that made it are still there:

- Completions of later steps are compared before the update that ends their version. Where rollouts end before the
  trainer begins, this finds all of them, and nothing has to be kept.
- Where completions may arrive later (remote explorers, served applications), copies of the last versions' weights are
  kept in host memory, and the batch's own completions are compared.

What was found is kept by completion, in checkpoints as well, and reported with the step that learns from it. Comparing
is a forward pass without gradient: it changes no number of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollmill.trainer.batch import TokenTable, build_token_table
from rollmill.trainer.distributed.fsdp import local_shards
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.types import IMPORTED_FROM, Experience, ExperienceSource

PROBED_COMPLETIONS = 4
"""Completions compared of each batch, each from another group."""
_TOKENS = 1024
_SHARE_OF_BATCH = 1 / 16
"""A sample has at most this share of the batch's tokens, or `_TOKENS` where that is more."""
_MIN_TOKENS = 32
"""Tokens compared of a completion, however long its prompt is."""
_REMEMBERED = 4096
"""Completions whose mismatch is kept until they are learned from; some never are."""
_VERSIONS = 8
_SHARE_OF_MEMORY = 1 / 8
"""Copies of at most so many versions, in at most this share of the host's memory."""


@dataclass(frozen=True)
class LogprobMismatch:
    """Sums over compared tokens."""

    tokens: float = 0.0
    total: float = 0.0  #: sum of absolute differences, in nats
    greatest: float = 0.0

    def __add__(self, other: LogprobMismatch) -> LogprobMismatch:
        greatest = max(self.greatest, other.greatest)
        return LogprobMismatch(self.tokens + other.tokens, self.total + other.total, greatest)


class MismatchProbe:
    """Compares a sample of each batch's stale tokens with what the weights of their version say.

    Args:
        logprobs: gives the model's log-probs of all action tokens of experiences, [A].
        kept_versions: how many earlier versions' weights to keep, as far as they fit; 0 where no completion of a
            version arrives after the next update has begun.
    """

    def __init__(
        self,
        model: nn.Module,
        logprobs: Callable[[Sequence[Experience], TokenTable], Tensor],
        ranks: RankGroup,
        device: torch.device,
        *,
        kept_versions: int,
    ) -> None:
        self._logprobs, self._device = logprobs, device
        self._kept = WeightHistory(model, kept_versions, ranks)
        self._found: dict[str, LogprobMismatch] = {}  # by completion
        self._last: LogprobMismatch | None = None

    def choose(
        self, upcoming: Sequence[Sequence[Experience]], batch: Sequence[Experience], version: int
    ) -> list[Experience]:
        """Completions of later steps to compare now, while weights are at `version`: some of every batch to come.

        Args:
            upcoming: completions of later steps, batch by batch.
            batch: of this step, for its size.
        """
        versions = [version, *self._kept.before(version)]
        missing = [each for each in upcoming if not self._knows(each)]
        return [one for each in missing for one in _sample(each, versions, _probe_token_budget(batch))]

    def compare(
        self, batch: Sequence[Experience], chosen: Sequence[Experience], version: int, *, fresh_as_well: bool
    ) -> None:
        """Compare `chosen`, and a sample of the batch, before the update; every rank calls this with the same.

        Args:
            version: of the weights as they are.
            fresh_as_well: whether tokens of the batch that these weights made are compared here, since no pass of
                the training does.
        """
        self._kept.keep(version)
        versions = [*self._kept.before(version), *([version] if fresh_as_well else [])]
        if versions and not self._knows(batch):
            chosen = [*chosen, *_sample(batch, versions, _probe_token_budget(batch))]
        by_version: dict[int, list[Experience]] = {}
        for each in chosen:
            by_version.setdefault(int(each.versions[each.action_mask][0]), []).append(each)
        looked = LogprobMismatch()
        for number, experiences in sorted(by_version.items()):
            with self._kept.loaded(number, version):
                for name, found in self._differences(experiences).items():
                    self._found[name], looked = found, looked + found
        if looked.tokens:
            self._last = looked
        for name in list(self._found)[:-_REMEMBERED]:
            del self._found[name]

    def metrics(self, batch: Sequence[Experience], fresh: LogprobMismatch) -> dict[str, float]:
        """logprob_gap/mean, /max and /tokens of a batch that was learned from; nothing before the first comparison.

        Where no token of the batch could be compared, mean and max are those of the last comparison, and tokens is 0.

        Args:
            fresh: of tokens that the training pass has compared.
        """
        stale = [self._found.pop(each.id) for each in batch if each.id in self._found]
        own = sum(stale, start=fresh)
        if own.tokens and (self._last is None or not stale):
            self._last = own
        shown = own if own.tokens else self._last
        if shown is None:
            return {}
        return {
            "logprob_gap/mean": shown.total / shown.tokens,
            "logprob_gap/max": shown.greatest,
            "logprob_gap/tokens": float(own.tokens),
        }

    def state_dict(self) -> dict[str, Any]:
        """What was found and is not reported yet."""
        last = None if self._last is None else astuple(self._last)
        return {"found": {name: astuple(each) for name, each in self._found.items()}, "last": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; copies of weights are not part of it."""
        self._found = {name: LogprobMismatch(*each) for name, each in state["found"].items()}
        self._last = None if state["last"] is None else LogprobMismatch(*state["last"])

    def _knows(self, experiences: Sequence[Experience]) -> bool:
        return any(each.id in self._found for each in experiences)

    def _differences(self, experiences: Sequence[Experience]) -> dict[str, LogprobMismatch]:
        table = build_token_table(experiences, self._device)
        gaps = (self._logprobs(experiences, table) - table.rollout_logprob).abs().double().cpu().numpy()
        parts = [gaps[a:b] for a, b in zip(table.offsets[:-1], table.offsets[1:], strict=True)]
        return {
            each.id: LogprobMismatch(float(len(part)), float(part.sum()), float(part.max()))
            for each, part in zip(experiences, parts, strict=True)
        }


class WeightHistory:
    """Copies of the trained parameters of the last versions, in host memory: of each rank those it holds.

    Args:
        count: of earlier versions wanted.
    """

    def __init__(self, model: nn.Module, count: int, ranks: RankGroup) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._copies: dict[int, list[Tensor]] = {}
        self._count = count and self._fitting(min(count, _VERSIONS), ranks)

    def before(self, version: int) -> list[int]:
        """The versions before this one that are there, and still are when this one is kept, too."""
        return sorted(each for each in self._copies if each < version)[-self._count :]

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copy the weights as they are, in place of the oldest copy where there are enough."""
        if not self._count:
            return
        for later in [each for each in self._copies if each >= version]:  # of steps that are made again
            del self._copies[later]
        own = local_shards(self._parameters)
        full = len(self._copies) > self._count
        room = self._copies.pop(min(self._copies)) if full else [torch.empty_like(each, device="cpu") for each in own]
        for copy, parameter in zip(room, own, strict=True):
            copy.copy_(parameter)
        self._copies[version] = room

    @contextmanager
    def loaded(self, version: int, current: int) -> Iterator[None]:
        """The parameters are those of `version` inside, and bit for bit those of `current` afterwards."""
        if version == current:
            yield
            return
        self._load(version)
        try:
            yield
        finally:
            self._load(current)

    @torch.no_grad()
    def _load(self, version: int) -> None:
        for copy, parameter in zip(self._copies[version], local_shards(self._parameters), strict=True):
            parameter.copy_(copy)

    def _fitting(self, count: int, ranks: RankGroup) -> int:
        """How many versions besides the present one fit, on every rank: they all have to choose the same sample."""
        size = sum(each.nbytes for each in local_shards(self._parameters))
        fits = int(_SHARE_OF_MEMORY * psutil.virtual_memory().total / ranks.size / max(size, 1)) - 1
        counts = [min(count, max(fits, 0))] * ranks.size
        if ranks.size > 1:
            dist.all_gather_object(counts, counts[0])
        return min(counts)


def _probe_token_budget(batch: Sequence[Experience]) -> int:
    """Tokens of a sample, prompts included."""
    return max(_TOKENS, int(_SHARE_OF_BATCH * sum(len(each.token_ids) for each in batch)))


def _sample(batch: Sequence[Experience], versions: Sequence[int], budget: int) -> list[Experience]:
    """A completion each of up to COMPLETIONS groups, spread evenly, reduced to the tokens of one version."""
    groups: dict[str, list[Experience]] = {}
    for each in batch:
        groups.setdefault(each.group, []).append(each)
    found = []
    for number, group in enumerate(groups.values()):
        rotated = (group[(number + i) % len(group)] for i in range(len(group)))
        found += [one for each in rotated if (one := _restrict_to_version(each, versions)) is not None][:1]
    count = min(PROBED_COMPLETIONS, len(found))
    return [_truncate(found[i * len(found) // count], budget // count) for i in range(count)]


def _restrict_to_version(experience: Experience, versions: Sequence[int]) -> Experience | None:
    """The experience with an action mask of the tokens that one of `versions` made, the one that made most."""
    if experience.source is not ExperienceSource.ROLLOUT or IMPORTED_FROM in experience.info:
        return None
    made = experience.versions[1:][experience.action_mask[1:]]  # nothing predicts a first token
    there, counts = np.unique(made[np.isin(made, versions)], return_counts=True)
    if not len(there):
        return None
    mask = experience.action_mask & (experience.versions == there[counts.argmax()])
    mask[0] = False
    return replace(experience, action_mask=mask)


def _truncate(experience: Experience, tokens: int) -> Experience:
    """The first tokens of it, at least `_MIN_TOKENS` after its first action token."""
    end = max(tokens, int(experience.action_mask.argmax()) + _MIN_TOKENS)
    arrays = ("token_ids", "action_mask", "logprobs", "versions")
    return replace(experience, **{name: getattr(experience, name)[:end] for name in arrays}, advantage=None)
