"""A scenario: the run, its costs and its faults, all drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from rollmill.apps.plan.simulation.engine import SimulationCosts
from rollmill.config.run import StageConfig

LOCAL, RAY, JOINED = "local", "ray", "joined"
MEASURED: dict[str, float] = {
    "pass_s": 0.0062,
    "row_s": 9e-5,
    "group_s": 0.003,
    "train_s": 1.3,
    "publish_s": 0.007,
    "receive_s": 0.006,
    "recompute_s": 0.0018,
}
"""Medians of bench/results/simulate.json: GRPO on the 3.2M model, two processes beside each other."""
CLUSTERS = (100, 300, 1000)
_DEADLINE_S = 300.0
_JUDGES_TAKE = 2.0
"""Factor on the judges' mean seconds for all completions under way: their times are drawn, and faults hold them up."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, for `seconds`; `node` is an explorer's number. `at` is when: in a drawn scenario as a
    share of the undisturbed run's time, in a run in seconds."""

    kind: str
    at: float
    node: int = 0
    seconds: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """Everything that a simulated run depends on."""

    seed: int
    placement: str
    config: StageConfig
    costs: SimulationCosts
    tasks: int
    explorers: int
    ranks: int
    store: str  #: memory or sql
    shared: bool  #: another process puts groups into the store
    checkpoint_every: int
    judge_s: float
    judge_places: int
    delay_s: float  #: of a message
    weights_delay_s: float
    faults: tuple[Fault, ...]

    @property
    def repeatable(self) -> bool:
        """True if the run promises the same result whatever happens on the way."""
        if self.shared:
            return False
        return self.placement == LOCAL or (self.config.max_staleness == 0 and not self.config.rollout.oversample)

    @property
    def plain(self) -> bool:
        """True if a step trains on the groups that were submitted first, without exceptions."""
        rollout, buffer = self.config.rollout, self.config.buffer
        special = self.config.pipeline or rollout.oversample or rollout.token_budget or buffer.max_age is not None
        return not (special or self.shared)

    def with_enough_time(self) -> Scenario:
        """The same run with a deadline that its judges can keep.

        A step's groups are judged among those of the later steps that have started. A step that misses its deadline is
        repeated from the checkpoint, all rollouts again: too short a deadline is missed for ever.
        """
        rollout, started = self.config.rollout, min(self.config.max_staleness + 1, self.config.steps)
        completions = started * rollout.batch * rollout.group_size * (1.0 + rollout.oversample)
        needed = _JUDGES_TAKE * completions * self.judge_s / self.judge_places
        longer = rollout.model_copy(update={"deadline_s": max(_DEADLINE_S, needed)})
        return replace(self, config=self.config.model_copy(update={"rollout": longer}))

    def undisturbed(self) -> Scenario:
        """The same run without faults; its store is in memory, unless others write to it."""
        return replace(self, faults=(), store=self.store if self.shared else "memory")

    def disturbed(self, seconds: float) -> Scenario:
        """The run with its faults, if it takes so many seconds undisturbed."""
        return replace(self, faults=tuple(replace(each, at=each.at * seconds) for each in self.faults))

    def __str__(self) -> str:
        config, rollout = self.config, self.config.rollout
        more = [
            f"oversample {rollout.oversample}" * bool(rollout.oversample),
            f"token_budget {rollout.token_budget}" * bool(rollout.token_budget),
            "pipeline" * bool(config.pipeline),
            "replay" * (config.buffer.replay is not None),
            "shared" * self.shared,
            f"max_age {config.buffer.max_age}" * (config.buffer.max_age is not None),
        ]
        size = f"{config.steps} steps of {rollout.batch} x {rollout.group_size}, max_staleness {config.max_staleness}"
        where = f"{self.placement}, {self.explorers} explorers, {self.ranks} ranks, store {self.store}"
        faults = ", ".join(f"{each.kind} at {each.at:.2f}" for each in self.faults) or "no faults"
        return f"seed {self.seed}: {where}; {', '.join([size, *filter(None, more)])}; {faults}"


def draw_scenario(seed: int) -> Scenario:
    """Draw the scenario of a seed."""
    draw = random.Random(seed)
    placement = draw.choices((LOCAL, RAY, JOINED), (4, 4, 4))[0]
    large = placement != LOCAL and draw.random() < 0.01
    explorers = draw.choice(CLUSTERS) if large else 0 if placement == LOCAL else draw.randint(1, 5)
    shared = placement != LOCAL and not large and draw.random() < 0.08
    store = "sql" if shared or draw.random() < 0.08 else "memory"
    config = _draw_config(draw, placement, explorers if large else 0)
    costs = _draw_costs(draw)
    return Scenario(
        seed,
        placement,
        config,
        costs,
        tasks=draw.randint(3, 24),
        explorers=explorers,
        ranks=draw.choice((1, 1, 2, 8)),
        store=store,
        shared=shared,
        checkpoint_every=draw.choice((1, 1, 1, 2)),
        judge_s=draw.choice((0.0, 0.05, 0.3)),
        judge_places=draw.choice((1, 4, 64)),
        delay_s=draw.choice((0.0005, 0.005, 0.05)),
        weights_delay_s=draw.choice((0.0, 0.01, 0.5)),
        faults=_draw_faults(draw, placement, explorers, shared=shared),
    ).with_enough_time()


def _draw_config(draw: random.Random, placement: str, cluster: int) -> StageConfig:
    staleness, steps = draw.choice((0, 0, 1, 1, 2, 3)), draw.randint(3, 6)
    rollout: dict[str, Any] = {"group_size": draw.randint(1, 3), "batch": draw.randint(1, 4), "refills": 10**4}
    if cluster:
        steps, rollout["batch"], rollout["group_size"] = 2, cluster // 2, 1
    rollout |= {"max_new_tokens": 40, "deadline_s": _DEADLINE_S, "max_sequences": draw.choice((2, 8, 256))}
    config: dict[str, Any] = {"max_staleness": staleness, "steps": steps, "buffer": {}}
    special = draw.random()
    if placement == LOCAL and staleness and special < 0.2:
        rollout["token_budget"] = rollout["batch"] * rollout["group_size"] * draw.randint(3, 12)
        rollout["partial"] = {"learn": draw.choice(("all", "newest"))}
    elif special < 0.4 and not cluster:
        rollout["oversample"] = draw.choice((0.25, 0.5, 1.0))
    elif special < 0.55 and rollout["group_size"] > 1:
        config["pipeline"] = [{"name": "group_variance"}]
    if draw.random() < 0.2 and not cluster:
        config["buffer"]["replay"] = {"groups": draw.randint(1, 2), "order": draw.choice(("fifo", "uniform"))}
    if draw.random() < 0.1:
        config["buffer"]["max_age"] = draw.randint(0, 2)
    taskset = {"path": "tasks.jsonl", "sampler": draw.choice(("shuffled", "sequential"))}
    return StageConfig.model_validate({"taskset": taskset, "rollout": rollout, **config})


def _draw_costs(draw: random.Random) -> SimulationCosts:
    """Measured costs, each times a log-normal factor; lengths are log-normal, with a tail.

    In half of the runs rollouts take longer than training, as with long completions.
    """
    cost = {name: value * draw.lognormvariate(0.0, 0.7) for name, value in MEASURED.items()}
    longer = draw.choice((1.0, 20.0))
    cost |= {name: longer * cost[name] for name in ("pass_s", "row_s")}
    train, mean = cost.pop("train_s"), draw.choice((4.0, 10.0))
    lengths = [[max(1, min(40, round(mean * draw.lognormvariate(0, 0.8)))) for _ in range(3)] for _ in range(24)]
    return SimulationCosts(lengths, [train * draw.lognormvariate(0, 0.2) for _ in range(5)], **cost)


def _draw_faults(draw: random.Random, placement: str, explorers: int, *, shared: bool) -> tuple[Fault, ...]:
    kinds = ["trainer", "trainer", "trainer", "rank", "judge", "database"]
    if placement != LOCAL:
        kinds += ["explorer", "explorer", "partition", "slow", "break", "break", "duplicate"]
    count = draw.choice((0, 1, 1, 2, 3, 5))
    faults = [_draw_fault(draw, draw.choice(kinds), explorers) for _ in range(count)]
    if shared:
        faults += [_draw_fault(draw, "import", explorers) for _ in range(draw.randint(1, 6))]
    return tuple(sorted(faults, key=lambda each: each.at))


def _draw_fault(draw: random.Random, kind: str, explorers: int) -> Fault:
    longest = {"partition": 30.0, "slow": 20.0, "judge": 30.0}.get(kind, 0.0)
    return Fault(
        kind,
        draw.uniform(0.2 if kind in ("trainer", "rank") else 0.0, 1.0),
        draw.randrange(max(explorers, 1)),
        draw.uniform(0.1, 1.0) * longest,
        draw.uniform(2.0, 15.0),
    )
