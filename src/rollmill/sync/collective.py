"""Weights by broadcast between ranks of torch.distributed: NCCL between GPUs, gloo between CPUs.

Rank `source` sends and all others of the group receive, in the same order. Tensors go in buckets, so that small ones do
not cost a message each; a version that arrived damaged is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rollmill.core.errors import SyncError
from rollmill.sync.layout import Layout

BUCKET = 64 << 20


class CollectiveSync:
    """One rank's side. `weights` are the tensors it sends, or those it receives into.

    Args:
        dtype: what floating-point tensors travel as; None leaves each as the sender has it. The same on all ranks.
        group: of torch.distributed; None means all ranks.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        source: int = 0,
        group: dist.ProcessGroup | None = None,
        bucket: int = BUCKET,
    ) -> None:
        self._source, self._group = source, group
        self._device = next(iter(weights.values())).device
        text = [Layout.of(weights, dtype).to_json()]
        dist.broadcast_object_list(text, source, group)
        self.layout = Layout.from_json(text[0])
        self.layout.require(weights, f"the model of rank {dist.get_rank()}")
        self._buckets = list(_buckets(self.layout, bucket))
        largest = max(end - start for _, start, end in self._buckets)
        self._block = torch.zeros(largest, dtype=torch.uint8, device=self._device)

    @torch.no_grad()
    def transfer(self, version: int, weights: Mapping[str, Tensor]) -> int:
        """Send `weights` as `version` (rank `source`), or receive into them; the version on every rank.

        Raises:
            SyncError: on every rank, if they did not arrive on one of them as they were sent.
        """
        sends = dist.get_rank(self._group) == self._source
        number = torch.tensor([version], device=self._device)
        dist.broadcast(number, self._source, self._group)
        sums = []
        for names, start, end in self._buckets:
            block = self._block[: end - start]
            views = {name: self._view(name, start) for name in names}
            if sends:
                for name, view in views.items():
                    view.copy_(weights[name])
            dist.broadcast(block, self._source, self._group)
            sums.append(_sum(block))
            if not sends:
                for name, view in views.items():
                    weights[name].detach().copy_(view)
        self._compare(torch.stack(sums), int(number))
        return int(number)

    def _view(self, name: str, start: int) -> Tensor:
        place = self.layout.places[name]
        part = self._block[place.start - start : place.start - start + place.bytes]
        return part.view(place.type).view(place.shape)

    def _compare(self, sums: Tensor, version: int) -> None:
        sent = sums.clone()
        dist.broadcast(sent, self._source, self._group)
        wrong = (sent != sums).any().int()
        dist.all_reduce(wrong, group=self._group)
        if wrong:
            raise SyncError(f"version {version} of the weights arrived damaged on {int(wrong)} of the ranks")


def _buckets(layout: Layout, size: int) -> Iterator[tuple[list[str], int, int]]:
    """Names that go together, and where they begin and end; a tensor larger than `size` goes alone."""
    names: list[str] = []
    start = end = 0
    for name, place in layout.places.items():
        if names and place.start + place.bytes - start > size:
            yield names, start, end
            names, start = [], place.start
        names.append(name)
        end = place.start + place.bytes
    if names:
        yield names, start, end


def _sum(block: Tensor) -> Tensor:
    """A sum over the bytes in which each counts by its place, on the device they are on."""
    whole = block[: len(block) // 4 * 4].view(torch.int32).long()
    weights = torch.arange(1, len(whole) + 1, device=block.device) | 1
    return (whole * weights).sum() + block[len(block) // 4 * 4 :].long().sum()
