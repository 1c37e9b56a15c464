"""Engine/trainer mismatch of stale tokens, measured on a small sample of completions.

A token's mismatch is |log-prob of the trainer - log-prob of the engine|, both with the weights of the token's version.
For tokens of the current weights the training pass itself gives it. A stale token must be compared while the weights
that sampled it still exist:

- Completions of later steps are compared before the update that ends their version. If rollouts end before the trainer
  begins, this covers all of them, and no copy of weights is needed.
- If completions may arrive later (remote explorers, served applications), copies of the last versions' weights are kept
  in host memory, and the batch's own completions are compared.

Results are kept per completion, in checkpoints as well, and reported with the step that learns from the completion. The
comparison is a forward pass without gradient and does not change training.
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
"""Completions compared per batch, each from a different group."""
_TOKENS = 1024
_SHARE_OF_BATCH = 1 / 16
"""A sample has at most this share of the batch's tokens, or `_TOKENS` if that is more."""
_MIN_TOKENS = 32
"""Tokens compared per completion at least, however long its prompt is."""
_REMEMBERED = 4096
"""Completions whose mismatch is kept until they are trained on; some never are."""
_VERSIONS = 8
_SHARE_OF_MEMORY = 1 / 8
"""Weight copies are kept of at most `_VERSIONS` versions, in at most this share of the host's memory."""


@dataclass(frozen=True)
class LogprobMismatch:
    """Sums over compared tokens."""

    tokens: float = 0.0
    total: float = 0.0  #: sum of absolute differences, in nats
    greatest: float = 0.0

    def __add__(self, other: LogprobMismatch) -> LogprobMismatch:
        greatest = max(self.greatest, other.greatest)
        return LogprobMismatch(self.tokens + other.tokens, self.total + other.total, greatest)


class LogprobComparison:
    """Compares a sample of each batch's stale tokens with the log-probs under the weights of their version.

    Args:
        logprobs: returns the model's log-probs of all action tokens of experiences, [A].
        kept_versions: number of earlier versions whose weights to keep, memory permitting; 0 if no completion of a
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
        self._found: dict[str, LogprobMismatch] = {}  # completion id -> mismatch
        self._last: LogprobMismatch | None = None

    def choose(
        self, upcoming: Sequence[Sequence[Experience]], batch: Sequence[Experience], version: int
    ) -> list[Experience]:
        """Selects completions of later steps to compare now, with weights at `version`: a sample of each upcoming
        batch.

        Args:
            upcoming: completions of later steps, batch by batch.
            batch: batch of this step, which bounds the sample's size.
        """
        versions = [version, *self._kept.before(version)]
        missing = [each for each in upcoming if not self._knows(each)]
        return [one for each in missing for one in _sample(each, versions, _probe_token_budget(batch))]

    def compare(
        self, batch: Sequence[Experience], chosen: Sequence[Experience], version: int, *, fresh_as_well: bool
    ) -> None:
        """Compares `chosen` and a sample of the batch before the update. Every rank calls this with the same arguments.

        Args:
            version: version of the current weights.
            fresh_as_well: also compare tokens of the batch sampled with these weights, if no training pass does.
        """
        self._kept.keep(version)
        versions = [*self._kept.before(version), *([version] if fresh_as_well else [])]
        if versions and not self._knows(batch):
            chosen = [*chosen, *_sample(batch, versions, _probe_token_budget(batch))]
        by_version: dict[int, list[Experience]] = {}
        for each in chosen:
            by_version.setdefault(int(each.versions[each.action_mask][0]), []).append(each)
        compared = LogprobMismatch()
        for number, experiences in sorted(by_version.items()):
            with self._kept.loaded(number, version):
                for name, found in self._differences(experiences).items():
                    self._found[name], compared = found, compared + found
        if compared.tokens:
            self._last = compared
        for name in list(self._found)[:-_REMEMBERED]:
            del self._found[name]

    def metrics(self, batch: Sequence[Experience], fresh: LogprobMismatch) -> dict[str, float]:
        """Returns logprob_gap/mean, /max and /tokens of a trained batch; nothing before the first comparison.

        If no token of the batch was compared, mean and max are those of the last comparison, and tokens is 0.

        Args:
            fresh: mismatch of the tokens compared by the training pass.
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
        """Returns the results that are not reported yet."""
        last = None if self._last is None else astuple(self._last)
        return {"found": {name: astuple(each) for name, each in self._found.items()}, "last": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; it does not include copies of weights."""
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
    """Copies of the last versions' trained parameters in host memory; each rank copies what it holds.

    Args:
        count: number of earlier versions to keep.
    """

    def __init__(self, model: nn.Module, count: int, ranks: RankGroup) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._copies: dict[int, list[Tensor]] = {}
        self._count = count and self._fitting(min(count, _VERSIONS), ranks)

    def before(self, version: int) -> list[int]:
        """Versions before this one that are available, and still are after `keep` of this one."""
        return sorted(each for each in self._copies if each < version)[-self._count :]

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copies the current weights, replacing the oldest copy if there are enough."""
        if not self._count:
            return
        for later in [each for each in self._copies if each >= version]:  # left from steps that are repeated
            del self._copies[later]
        own = local_shards(self._parameters)
        full = len(self._copies) > self._count
        room = self._copies.pop(min(self._copies)) if full else [torch.empty_like(each, device="cpu") for each in own]
        for copy, parameter in zip(room, own, strict=True):
            copy.copy_(parameter)
        self._copies[version] = room

    @contextmanager
    def loaded(self, version: int, current: int) -> Iterator[None]:
        """Context in which the parameters are those of `version`; restores those of `current` bit for bit."""
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
        """Number of versions besides the current one that fit on every rank: all ranks must choose the same sample."""
        size = sum(each.nbytes for each in local_shards(self._parameters))
        fits = int(_SHARE_OF_MEMORY * psutil.virtual_memory().total / ranks.size / max(size, 1)) - 1
        counts = [min(count, max(fits, 0))] * ranks.size
        if ranks.size > 1:
            dist.all_gather_object(counts, counts[0])
        return min(counts)


def _probe_token_budget(batch: Sequence[Experience]) -> int:
    """Maximum tokens of a sample, prompts included."""
    return max(_TOKENS, int(_SHARE_OF_BATCH * sum(len(each.token_ids) for each in batch)))


def _sample(batch: Sequence[Experience], versions: Sequence[int], budget: int) -> list[Experience]:
    """Takes one completion each of up to PROBED_COMPLETIONS groups, spread evenly, reduced to the tokens of one
    version.
    """
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
    """Masks the experience to the tokens of one of `versions`, the one with most tokens; None if there are none."""
    if experience.source is not ExperienceSource.ROLLOUT or IMPORTED_FROM in experience.info:
        return None
    made = experience.versions[1:][experience.action_mask[1:]]  # nothing predicts a first token
    present, counts = np.unique(made[np.isin(made, versions)], return_counts=True)
    if not len(present):
        return None
    mask = experience.action_mask & (experience.versions == present[counts.argmax()])
    mask[0] = False
    return replace(experience, action_mask=mask)


def _truncate(experience: Experience, tokens: int) -> Experience:
    """Truncates to `tokens`, but keeps at least `_MIN_TOKENS` after the first action token."""
    end = max(tokens, int(experience.action_mask.argmax()) + _MIN_TOKENS)
    arrays = ("token_ids", "action_mask", "logprobs", "versions")
    return replace(experience, **{name: getattr(experience, name)[:end] for name in arrays}, advantage=None)
