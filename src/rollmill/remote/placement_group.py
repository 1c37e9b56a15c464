"""Reserves cores and GPUs for a group of actors, by a placement group of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.errors import ConfigError, DeadlineError
from rollmill.ray_session import ray_module

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ResourceRequest:
    """Resources that one actor reserves."""

    cpus: float
    gpus: float = 0.0

    @property
    def bundle(self) -> dict[str, float]:
        """The request as a Ray bundle; empty if nothing is reserved."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: count for name, count in wanted.items() if count > 0}


class PlacementGroup:
    """Reserves the resources of actors, until `close`.

    Args:
        needs: of each actor. One that needs nothing is placed with the others.
        one_host: all on the same host; else on as few as possible.

    Raises:
        ConfigError: Ray has fewer resources.
        DeadlineError: they do not become free.
    """

    def __init__(self, needs: Sequence[ResourceRequest], *, one_host: bool) -> None:
        from ray.util.placement_group import placement_group

        self._needs, self._one_host = needs, one_host
        bundles = [need.bundle for need in needs if need.bundle]
        _require(bundles)
        self._group = None
        if not bundles:
            return
        self._group = placement_group(bundles, strategy="STRICT_PACK" if one_host else "PACK")
        try:
            there = self._group.wait(_TIMEOUT_S)
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if not there:
            self.close()
            where = "on one host, as weights `memory` needs it; or use `broadcast`" if one_host else "in the cluster"
            advice = f"Others use them: `ray status` shows who. There have to be enough {where}."
            raise DeadlineError("the run", f"{_describe(bundles)} on Ray", _TIMEOUT_S, advice)

    def __len__(self) -> int:
        """Number of actors it is for."""
        return len(self._needs)

    def options(self, number: int) -> dict[str, Any]:
        """Ray options of the actor of that number."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        need = self._needs[number]
        options: dict[str, Any] = {"num_cpus": need.cpus, "num_gpus": need.gpus}
        if self._group is None:
            return options
        place = sum(bool(each.bundle) for each in self._needs[:number]) if need.bundle else 0
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        return options | {"scheduling_strategy": strategy}

    def options_beside(self, need: ResourceRequest) -> dict[str, Any]:
        """Ray options of a further actor, whose resources are not part of the group; on its host if it has one."""
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"num_cpus": need.cpus, "num_gpus": need.gpus}
        if self._group is None or not self._one_host:
            return options
        hosts = placement_group_table(self._group)["bundles_to_node_id"]
        return options | {"scheduling_strategy": NodeAffinitySchedulingStrategy(hosts[0], soft=False)}

    def close(self) -> None:
        """Release the resources."""
        from ray.util.placement_group import remove_placement_group

        if self._group is not None and ray_module().is_initialized():
            remove_placement_group(self._group)
        self._group = None


def _require(bundles: Sequence[dict[str, float]]) -> None:
    """Raise ConfigError if Ray has fewer resources than all bundles together, so that waiting would not help."""
    have = ray_module().cluster_resources()
    for name, what in (("CPU", "cores"), ("GPU", "GPUs")):
        wanted, found = sum(each.get(name, 0.0) for each in bundles), have.get(name, 0.0)
        if wanted > found:
            text = f"placement: explorers and trainer reserve {wanted:g} {what}, and Ray has {found:g}"
            raise ConfigError(f"{text}; lower placement.explorers, or what each reserves")


def _describe(bundles: Sequence[dict[str, float]]) -> str:
    cpus, gpus = (sum(each.get(name, 0.0) for each in bundles) for name in ("CPU", "GPU"))
    return f"{cpus:g} cores" + (f" and {gpus:g} GPUs" if gpus else "")
