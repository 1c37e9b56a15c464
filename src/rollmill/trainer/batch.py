"""From experiences to packed micro-batches in which a shared prompt is computed once.

The tokens before an experience's first action are its prefix. In one micro-batch, experiences with the same prefix
share it: the row holds the prefix once, as a root segment, and what follows of each experience as a child. Tokens after
the last prediction that counts are left out. Shapes: T tokens of a row, M action tokens of a micro-batch, A of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmill.core.types import Experience, Source
from rollmill.trainer.attention import Layout, PackedAttention

_CPU_ROW = 1024


@dataclass(frozen=True)
class TokenTable:
    """Every action token of a batch, experience by experience: [A] unless said otherwise."""

    target: Tensor  #: int64, the token's id
    rollout_logprob: Tensor  #: float32
    version: Tensor  #: int64
    temperature: Tensor  #: float32, of the rollout; 1 for experts
    experience: Tensor  #: int64, index into the batch
    expert: Tensor  #: bool
    offsets: list[int]  #: [N + 1], where each experience's tokens begin
    positions: list[npt.NDArray[Any]]  #: N arrays: index of each action token within its experience

    @property
    def lengths(self) -> Tensor:
        """int64 [N]: action tokens of each experience."""
        return torch.bincount(self.experience, minlength=len(self.positions))


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass."""

    experiences: list[int]  #: indices into the batch, in row order
    input_ids: Tensor  #: int64 [1, T]
    position_ids: Tensor  #: int64 [1, T]
    attention: PackedAttention
    rows: Tensor  #: int64 [M], place in the row whose hidden state predicts each action token
    tokens: Tensor  #: int64 [M], index of each action token in the batch's TokenTable
    sequence: Tensor  #: int64 [M], which of `experiences` the token belongs to


def token_table(experiences: Sequence[Experience], device: torch.device) -> TokenTable:
    """Gather what the loss needs of every action token. A first token has nothing to predict it and never counts."""
    positions = [np.flatnonzero(e.action_mask[1:]) + 1 for e in experiences]
    counts = [len(p) for p in positions]

    def gather(arrays: list[npt.NDArray[Any]], dtype: torch.dtype) -> Tensor:
        picked = [a[p] for a, p in zip(arrays, positions, strict=True)]
        return torch.from_numpy(np.concatenate([*picked, np.zeros(0, np.int32)])).to(device, dtype)

    def spread(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values), counts)).to(device, dtype)

    return TokenTable(
        target=gather([e.token_ids for e in experiences], torch.int64),
        rollout_logprob=gather([e.logprobs for e in experiences], torch.float32),
        version=gather([e.versions for e in experiences], torch.int64),
        temperature=spread([1.0 if e.source is Source.EXPERT else e.temperature for e in experiences], torch.float32),
        experience=spread([float(i) for i in range(len(experiences))], torch.int64),
        expert=spread([float(e.source is Source.EXPERT) for e in experiences], torch.bool),
        offsets=np.cumsum([0, *counts]).tolist(),
        positions=positions,
    )


def micro_batches(
    experiences: Sequence[Experience],
    table: TokenTable,
    chosen: Iterable[int],
    budget: int,
    device: torch.device,
    *,
    share_prefixes: bool = True,
) -> list[MicroBatch]:
    """Pack the chosen experiences into rows of at most `budget` tokens (more only if one experience is longer).

    On a CPU rows end sooner where that cuts no family: 1024 tokens keep activations near the caches and fewer of them.
    Experiences are never cut; those with a common prefix stay together as far as the budget allows. Experiences without
    action tokens are left out.
    """
    families: dict[bytes, list[int]] = {}
    for i in chosen:
        if len(table.positions[i]):
            prefix = experiences[i].token_ids[: table.positions[i][0]].tobytes()
            families.setdefault(prefix if share_prefixes else b"%d" % i, []).append(i)
    rows: list[list[list[int]]] = [[]]
    used = 0
    for members in sorted(families.values(), key=lambda m: -max(_suffix(table, i) for i in m)):
        family: list[int] = []
        whole = _prefix(table, members[0]) + sum(_suffix(table, i) for i in members)
        if used and device.type == "cpu" and used + whole > _CPU_ROW:
            rows.append([])
            used = 0
        for i in sorted(members, key=lambda i: -_suffix(table, i)):
            cost = _suffix(table, i) + (0 if family else _prefix(table, i))
            if used and used + cost > budget:
                rows[-1].append(family)
                rows.append([])
                family, used, cost = [], 0, _suffix(table, i) + _prefix(table, i)
            family.append(i)
            used += cost
        rows[-1].append(family)
    return [_micro_batch(experiences, table, [f for f in row if f], device) for row in rows if any(row)]


def _prefix(table: TokenTable, i: int) -> int:
    return int(table.positions[i][0])


def _suffix(table: TokenTable, i: int) -> int:
    """Tokens after the prefix that are needed as input: the last action token predicts nothing."""
    return int(table.positions[i][-1] - table.positions[i][0])


@dataclass(slots=True)
class _Segment:
    """Tokens first .. last - 1 of an experience; `start` is where they lie in the row."""

    experience: int
    first: int
    last: int
    parent: _Segment | None = None
    start: int = 0

    @property
    def length(self) -> int:
        return self.last - self.first


def _micro_batch(
    experiences: Sequence[Experience], table: TokenTable, families: list[list[int]], device: torch.device
) -> MicroBatch:
    roots: list[_Segment] = []
    children: list[_Segment] = []
    homes: dict[int, tuple[_Segment, _Segment]] = {}  # experience -> the segments of its prefix and of the rest
    for family in families:
        prefix = _prefix(table, family[0])
        alone = len(family) == 1
        root = _Segment(family[0], 0, prefix + (_suffix(table, family[0]) if alone else 0))
        roots.append(root)
        for i in family:
            child = root if alone else _Segment(i, prefix, prefix + _suffix(table, i), root)
            homes[i] = root, child
            if child.length and child is not root:
                children.append(child)
    segments = sorted(roots, key=lambda s: -s.length) + sorted(children, key=lambda s: -s.length)
    number = {id(segment): n for n, segment in enumerate(segments)}
    start = 0
    for segment in segments:
        segment.start, start = start, start + segment.length

    def tensor(pieces: list[npt.NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(pieces)).to(device, torch.int64)

    layout = Layout(
        tuple(s.length for s in segments), tuple(-1 if s.parent is None else number[id(s.parent)] for s in segments)
    )
    return MicroBatch(
        experiences=list(homes),
        input_ids=tensor([experiences[s.experience].token_ids[s.first : s.last] for s in segments])[None],
        position_ids=tensor([np.arange(s.first, s.last) for s in segments])[None],
        attention=PackedAttention(layout, device),
        rows=tensor([_rows(table.positions[i] - 1, *home) for i, home in homes.items()]),
        tokens=tensor([np.arange(table.offsets[i], table.offsets[i + 1]) for i in homes]),
        sequence=tensor([np.full(len(table.positions[i]), n) for n, i in enumerate(homes)]),
    )


def _rows(predictors: npt.NDArray[Any], root: _Segment, child: _Segment) -> npt.NDArray[Any]:
    """Places in the row of an experience's positions."""
    return np.where(predictors < root.last, root.start + predictors, child.start + predictors - child.first)
