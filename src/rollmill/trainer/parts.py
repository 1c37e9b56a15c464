"""Cutting a batch into the parts of its optimizer steps, group by group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollmill.types import Experience, ExperienceSource


def split_mini_batches(
    experiences: Sequence[Experience], parts: int, generator: torch.Generator | None
) -> list[list[int]]:
    """Indices of the experiences of each part.

    Groups are never cut. Usual and expert groups are dealt separately, so that every part has its share of both; parts
    that stay empty because there are too few groups are left out.

    Args:
        generator: shuffles the groups; None keeps their order.
    """
    result: list[list[int]] = [[] for _ in range(parts)]
    for source in ExperienceSource:
        groups: dict[str, list[int]] = {}
        for i, experience in enumerate(experiences):
            if experience.source is source:
                groups.setdefault(experience.group, []).append(i)
        members = list(groups.values())
        if generator is not None:
            members = [members[i] for i in torch.randperm(len(members), generator=generator).tolist()]
        for n, group in enumerate(members):
            result[n * parts // len(members)].extend(group)
    return [part for part in result if part]
