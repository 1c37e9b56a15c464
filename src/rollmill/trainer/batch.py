"""Packs experiences into micro-batches that compute a shared prompt once.

The tokens before an experience's first action are its prefix. In one micro-batch, experiences with the same prefix
share it: the row holds the prefix once, as a root segment, and the rest of each experience as a child segment. Tokens
after the last prediction are left out.

Rows are packed by Best-Fit Decreasing under a token budget and dealt over the ranks, equally many per rank (as in
DeepSeek-R1's RL infrastructure, arXiv:2501.12948).

Shapes: T tokens of a row, M action tokens of a micro-batch, A action tokens of the batch, N experiences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmill.data.picture_prompts import Block
from rollmill.models.attention import AttentionContext
from rollmill.models.cpu.step_timing import CPU_ROW
from rollmill.models.transfers import to_device
from rollmill.models.vision import PictureSpan, batch_pictures
from rollmill.trainer.attention import PackedAttention, SegmentLayout
from rollmill.trainer.distributed.context_parallel import ContextParallelAttention, ContextShare
from rollmill.types import Experience, ExperienceSource, FloatArray


def pack_rows(costs: Sequence[int], budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """Assigns units to chunks for every rank: `result[rank][chunk]` is a list of indices into `costs`.

    A chunk costs at most `budget`; a unit that costs more gets a chunk of its own. Every unit is in exactly one chunk.
    All ranks get equally many chunks: a rank with fewer splits its largest ones, and gets empty ones once nothing is
    left to split.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for n, unit in enumerate(sorted(range(len(costs)), key=lambda i: -costs[i])):
        turn, place = divmod(n, ranks)
        dealt[place if turn % 2 == 0 else ranks - 1 - place].append(unit)
    packed = [_best_fit(units, costs, budget) for units in dealt]
    most = max(len(chunks) for chunks in packed)
    return [_cut(chunks, costs, most) for chunks in packed]


def _best_fit(units: list[int], costs: Sequence[int], budget: int) -> list[list[int]]:
    """Best-Fit Decreasing: a unit goes to the fullest chunk with room for it. `units` are sorted by cost."""
    chunks: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, -chunk), sorted; of equally full chunks the newest
    for unit in units:
        at = bisect_left(room, (costs[unit], -len(chunks)))
        if at == len(room):
            chunks.append([unit])
            insort(room, (budget - costs[unit], 1 - len(chunks)))
        else:
            free, chunk = room.pop(at)
            chunks[-chunk].append(unit)
            insort(room, (free - costs[unit], chunk))
    return chunks


def _cut(chunks: list[list[int]], costs: Sequence[int], count: int) -> list[list[int]]:
    while len(chunks) < count:
        whole = [chunk for chunk in chunks if len(chunk) > 1]
        if not whole:
            return chunks + [[] for _ in range(count - len(chunks))]
        largest = max(whole, key=lambda chunk: sum(costs[unit] for unit in chunk))
        place = chunks.index(largest)
        chunks[place : place + 1] = [largest[::2], largest[1::2]]
    return chunks


@dataclass(frozen=True)
class TokenTable:
    """Every action token of a batch, experience by experience. Shape [A] unless noted."""

    target: Tensor  #: int64, the token's id
    rollout_logprob: Tensor  #: float32
    version: Tensor  #: int64
    temperature: Tensor  #: float32, of the rollout; 1 for demonstrations
    experience: Tensor  #: int64, index into the batch
    imitated: Tensor  #: bool
    tempered: bool  #: some temperature is not 1
    offsets: list[int]  #: [N + 1], start of each experience's tokens
    positions: list[npt.NDArray[Any]]
    """N arrays: index of each action token within its experience, repeated where several targets are at a place."""

    @property
    def lengths(self) -> Tensor:
        """int64 [N]: action tokens of each experience."""
        counts = np.array([len(each) for each in self.positions], np.int64)
        return to_device([counts], self.experience.device)[0]

    def place(self, i: int, experience: Experience, values: npt.NDArray[Any]) -> FloatArray:
        """Spreads numbers of the action tokens of experience `i` over its places, with 0 elsewhere: [T], or as its
        `targets`."""
        shape = (experience.token_ids if experience.targets is None else experience.targets).shape
        found = np.zeros(shape, np.float32)
        places = self.positions[i] if len(shape) == 1 else self.positions[i][:: shape[1]]
        found[places] = values.reshape(-1, *shape[1:])
        return found


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass."""

    experiences: list[int]  #: indices into the batch, in row order
    input_ids: Tensor  #: int64 [1, T]
    position_ids: Tensor  #: int64 [1, T]
    attention: AttentionContext
    rows: Tensor  #: int64 [M], row position whose hidden state predicts each action token
    tokens: Tensor  #: int64 [M], index of each action token in the batch's TokenTable
    sequence: Tensor  #: int64 [M], index into `experiences`
    group: Tensor  #: int64 [M], index of the token's group within the row
    lengths: list[int]  #: action tokens of each experience
    routing: Tensor | None = None
    """int16 [T, L, k]: experts that the rollout chose for each token, -1 where unknown; None: all unknown."""
    pictures: tuple[PictureSpan, ...] = ()  #: tokens of experiences whose prompts have pictures
    tower_passes: int = 0
    """Passes of the vision tower that every rank makes for its row of this number; 0: as many as the row needs."""
    share: ContextShare | None = None
    """This rank's share of the row, with context parallelism: hidden states are those of its tokens only."""

    def shared(self, rank: int, ranks: int) -> MicroBatch:
        """Returns the same row for one of several ranks that share its tokens."""
        share = ContextShare.of_row(rank, ranks, self.input_ids.shape[1], self.rows)
        return replace(self, share=share, attention=ContextParallelAttention(self.attention, share))

    @property
    def own_rows(self) -> Tensor:
        """int64 [m]: positions of the hidden states on this rank that predict."""
        return self.rows if self.share is None else self.share.rows

    def own(self, values_M: Tensor) -> Tensor:
        """Picks the predictions made on this rank: [M, ...] -> [m, ...]."""
        return values_M if self.share is None else values_M.index_select(0, self.share.chosen)

    def gather(self, *values_m: Tensor) -> Sequence[Tensor]:
        """Numbers of all predictions of the row from those made on this rank, [m] each -> [M] each."""
        return values_m if self.share is None else self.share.gather(*values_m)

    def of_source(
        self, source: ExperienceSource, sources: Sequence[ExperienceSource], among: Sequence[bool] | None = None
    ) -> Tensor:
        """Indices of the tokens whose experience has this source.

        Args:
            sources: source of each experience of the batch.
            among: whether each experience of the batch may be chosen; None: all may.
        """
        matches = [sources[i] is source and (among is None or among[i]) for i in self.experiences]
        found = np.flatnonzero(np.repeat(np.array(matches, bool), self.lengths))
        return to_device([found.astype(np.int64)], self.sequence.device)[0]


def build_token_table(experiences: Sequence[Experience], device: torch.device) -> TokenTable:
    """Collects the action tokens of a batch. A first token is never included, since nothing predicts it."""
    positions: list[npt.NDArray[Any]] = []
    targets: list[npt.NDArray[Any]] = []
    for e in experiences:
        places, wanted = np.flatnonzero(e.action_mask[1:]) + 1, e.token_ids if e.targets is None else e.targets
        positions.append(places if wanted.ndim == 1 else np.repeat(places, wanted.shape[1]))
        targets.append(wanted[places].ravel())
    counts = [len(p) for p in positions]

    def gather(arrays: list[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        picked = [a[p] for a, p in zip(arrays, positions, strict=True)]
        return np.concatenate([*picked, np.zeros(0, np.int32)]).astype(dtype)

    imitated = [e.source is ExperienceSource.EXPERT for e in experiences]
    temperatures = [1.0 if own else e.temperature for own, e in zip(imitated, experiences, strict=True)]
    columns = [
        np.concatenate([*targets, np.zeros(0, np.int32)]).astype(np.int64),
        gather([e.logprobs for e in experiences], np.float32),
        gather([e.versions for e in experiences], np.int64),
        np.repeat(np.array(temperatures, np.float32), counts),
        np.repeat(np.arange(len(experiences)), counts),
        np.repeat(np.array(imitated, bool), counts),
    ]
    target, rollout_logprob, version, temperature, experience, of_demonstrations = to_device(columns, device)
    return TokenTable(
        target=target,
        rollout_logprob=rollout_logprob,
        version=version,
        temperature=temperature,
        experience=experience,
        imitated=of_demonstrations,
        tempered=any(each != 1 for each in temperatures),
        offsets=np.cumsum([0, *counts]).tolist(),
        positions=positions,
    )


def build_micro_batches(
    experiences: Sequence[Experience],
    table: TokenTable,
    chosen: Iterable[int],
    budget: int,
    device: torch.device,
    *,
    share_prefixes: bool = True,
    keep_groups: bool = False,
    ranks: int = 1,
    rank: int = 0,
    even: bool = False,
    routing: tuple[int, int] | None = None,
) -> list[MicroBatch]:
    """Packs the chosen experiences into rows of at most `budget` tokens (more only if one experience is longer).

    Experiences are never split, and those with a common prefix stay together as far as the budget allows. Experiences
    without action tokens are left out. On a CPU, rows end at 2048 tokens where that splits no shared prefix.

    Args:
        keep_groups: keep the experiences of a group in one row, whatever the budget.
        ranks: number of ranks to deal the rows over; all get equally many, some of which may be missing at the end.
        rank: rank whose rows are returned.
        even: replace missing rows by dummy rows, for ranks that must make equally many forward passes, also of a
            vision tower.
        routing: (routers of the model, experts per token), to replay the rollout's choice of experts. Recorded choices
            of another shape are ignored.
    """
    atoms: dict[object, list[int]] = {}
    for i in chosen:
        if len(table.positions[i]):
            atoms.setdefault(experiences[i].group if keep_groups else i, []).append(i)
    families: dict[object, list[list[int]]] = {}
    for name, atom in atoms.items():
        families.setdefault(_prefix_ids(experiences, table, atom[0]) if share_prefixes else name, []).append(atom)
    units: list[list[int]] = []
    for members in families.values():
        units.extend(_split_family(members, lambda each: _cost(experiences, table, each, share_prefixes), budget))
    costs = [_cost(experiences, table, unit, share_prefixes) for unit in units]
    dealt = [
        [[i for unit in row for i in units[unit]] for row in rows]
        for rows in pack_rows(costs, min(budget, CPU_ROW) if device.type == "cpu" else budget, ranks)
    ]
    packed = [
        _micro_batch(experiences, table, _families(experiences, table, row, share_prefixes), device, routing)
        if row
        else _dummy_row(device)
        for row in dealt[rank]
        if row or even
    ]
    if not even:
        return packed
    passes = [max(_tower_passes(experiences, row) for row in rows) for rows in zip(*dealt, strict=True)]
    return [replace(micro, tower_passes=count) for micro, count in zip(packed, passes, strict=True)]


def _tower_passes(experiences: Sequence[Experience], row: list[int]) -> int:
    """Number of passes of the vision tower that a row needs, or more: a segment may be left out."""
    return len(batch_pictures(own for i in row if (own := experiences[i].pictures) is not None))


def _dummy_row(device: torch.device) -> MicroBatch:
    """Builds a row of one token that predicts nothing."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    none = token[0, :0]
    attention = PackedAttention(SegmentLayout((1,), (-1,)), device)
    return MicroBatch([], token, token, attention, rows=none, tokens=none, sequence=none, group=none, lengths=[])


def _split_family(atoms: list[list[int]], cost: Callable[[list[int]], int], budget: int) -> list[list[int]]:
    """Splits a family into pieces of at most `budget` tokens, each of which includes the prefix."""
    pieces: list[list[int]] = [[]]
    for atom in sorted(atoms, key=lambda each: -cost(each)):
        if pieces[-1] and cost(pieces[-1] + atom) > budget:
            pieces.append([])
        pieces[-1] = pieces[-1] + atom
    return pieces


def _cost(experiences: Sequence[Experience], table: TokenTable, members: list[int], share: bool) -> int:
    """Number of tokens of a row with these experiences."""
    families = _families(experiences, table, members, share)
    return sum(_prefix(table, family[0]) for family in families) + sum(_suffix(table, i) for i in members)


def _families(experiences: Sequence[Experience], table: TokenTable, members: list[int], share: bool) -> list[list[int]]:
    found: dict[object, list[int]] = {}
    for i in members:
        found.setdefault(_prefix_ids(experiences, table, i) if share else i, []).append(i)
    return list(found.values())


def _prefix_ids(experiences: Sequence[Experience], table: TokenTable, i: int) -> bytes:
    own, length = experiences[i].pictures, _prefix(table, i)
    ids = experiences[i].token_ids[:length].tobytes()
    return ids if own is None else ids + own.key_before(length).encode()


def _prefix(table: TokenTable, i: int) -> int:
    return int(table.positions[i][0])


def _suffix(table: TokenTable, i: int) -> int:
    """Number of tokens after the prefix that are needed as input: the last action token predicts nothing."""
    return int(table.positions[i][-1] - table.positions[i][0])


@dataclass(slots=True)
class _Segment:
    """Tokens first .. last - 1 of an experience; `start` is their position in the row."""

    experience: int
    first: int
    last: int
    parent: _Segment | None = None
    start: int = 0

    @property
    def length(self) -> int:
        return self.last - self.first


def _micro_batch(
    experiences: Sequence[Experience],
    table: TokenTable,
    families: list[list[int]],
    device: torch.device,
    routing: tuple[int, int] | None,
) -> MicroBatch:
    roots: list[_Segment] = []
    children: list[_Segment] = []
    homes: dict[int, tuple[_Segment, _Segment]] = {}  # experience -> segments of its prefix and its suffix
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

    groups: dict[str, int] = {}
    layout = SegmentLayout(
        tuple(s.length for s in segments), tuple(-1 if s.parent is None else number[id(s.parent)] for s in segments)
    )
    lengths = [len(table.positions[i]) for i in homes]
    of_group = [groups.setdefault(experiences[i].group, len(groups)) for i in homes]
    columns = [
        np.concatenate([experiences[s.experience].token_ids[s.first : s.last] for s in segments]),
        np.concatenate([np.arange(s.first, s.last) for s in segments]),
        np.concatenate([_rows(table.positions[i] - 1, *home) for i, home in homes.items()]),
        np.concatenate([np.arange(table.offsets[i], table.offsets[i + 1]) for i in homes]),
        np.repeat(np.arange(len(homes)), lengths),
        np.repeat(np.array(of_group), lengths),
    ]
    input_ids, position_ids, rows, tokens, sequence, group = to_device([x.astype(np.int64) for x in columns], device)
    return MicroBatch(
        experiences=list(homes),
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        attention=PackedAttention(layout, device, _both_ways(experiences, segments)),
        rows=rows,
        tokens=tokens,
        sequence=sequence,
        group=group,
        lengths=lengths,
        pictures=tuple(
            PictureSpan(own, s.start, s.first, s.length)
            for s in segments
            if (own := experiences[s.experience].pictures) is not None
        ),
        routing=None if routing is None else _routing(experiences, segments, routing, device),
    )


def _both_ways(experiences: Sequence[Experience], segments: list[_Segment]) -> dict[int, list[Block]]:
    """Runs of tokens that attend in both directions, by number of the segment, relative to it."""
    seen = ((n, s, experiences[s.experience].pictures) for n, s in enumerate(segments))
    return {n: own.blocks_within(s.first, s.length) for n, s, own in seen if own is not None}


def _routing(
    experiences: Sequence[Experience], segments: list[_Segment], shape: tuple[int, int], device: torch.device
) -> Tensor | None:
    """Experts of a row's tokens; a shared prefix takes those of its first experience."""
    found = np.full((sum(segment.length for segment in segments), *shape), -1, np.int16)
    known = False
    for segment in segments:
        own = experiences[segment.experience].routing
        if own is not None and own.shape[1:] == shape:
            part = own[segment.first : segment.last]
            found[segment.start : segment.start + len(part)] = part
            known = known or len(part) > 0
    return torch.from_numpy(found).to(device) if known else None


def _rows(predictors: npt.NDArray[Any], root: _Segment, child: _Segment) -> npt.NDArray[Any]:
    """Row positions of an experience's predictors."""
    return np.where(predictors < root.last, root.start + predictors, child.start + predictors - child.first)
