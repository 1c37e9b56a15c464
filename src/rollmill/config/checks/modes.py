"""Features in every mode: the one table that the checks take their refusals from, and `rollmill check --matrix` prints.

A cell belongs to a feature, a deployment (which processes roll out and train) and an engine. It works, and names the
test that shows it, or it is refused with the reason that `rollmill check` gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rollmill.config.engines import VLLMEngineConfig


class Deployment(StrEnum):
    """The processes of a run."""

    ONE_PROCESS = "one process"
    PROCESSES = "processes"  #: modes `train` and `explore`
    RAY = "Ray"
    RANKS = "ranks"  #: one process rolls out, several train


ENGINES = ("native", "vllm")

NEEDS_ONE_PROCESS = {
    "workflow": "an application's sessions come to the process that trains: `live_requests` goes with mode serve",
    "rollout.reuse": "drafts belong to checkpoints, which explorers do not write",
    "engine.sleep": "explorers do not sleep while the trainer works",
    "models.policy": "earlier weights of the policy are not kept for explorers that start later; give `path`",
}
"""Reasons for keys that need explorers in the trainer's process."""

OFFLOAD_ENGINE = "it cannot say what memory it has; use `native` or `vllm`, or remove it"
OFFLOAD_SHARDS = "shards are a rank's own and stay with it; use sharding: none, or remove it"
"""Reasons for `offload` with another engine, and with shards."""
PAST_ENGINE = (
    "the copies are decoded by rollmill's own engine, beside the policy's; use engine `native`, or policy: initial"
)
PAST_RANKS = "the copies are taken where one process has all weights; set trainer.ranks: 1, or policy: initial"
"""Reasons against `policy: past` with another engine, and with several ranks."""
SHARED_WEIGHTS = "the native engine in the trainer's process decodes with the trainer's own, newest weights"
"""Reason against `sync_interval` where nothing is published."""


class RunMode(NamedTuple):
    """A deployment and an engine."""

    deployment: Deployment
    engine: str

    @property
    def id(self) -> str:
        """Parameter of the mode's tests."""
        return f"{self.deployment.replace(' ', '_').lower()}-{self.engine}"

    def settings(self) -> dict[str, Any]:
        """Sections of a run file that choose this mode."""
        chosen: dict[Deployment, dict[str, Any]] = {
            Deployment.PROCESSES: {"mode": "train"},
            Deployment.RAY: {"placement": {"name": "ray", "explorers": 2}},
            Deployment.RANKS: {"trainer": {"ranks": 2}},
        }
        return chosen.get(self.deployment, {}) | ({} if self.engine == "native" else {"engine": {"name": self.engine}})


RUN_MODES = tuple(RunMode(deployment, engine) for engine in ENGINES for deployment in Deployment)
_TESTS = "tests/modes/test_every_mode.py::test_"


@dataclass(frozen=True)
class ModeFeature:
    """A row of the matrix.

    Args:
        key: of the run file.
        settings: sections of a run file that ask for the feature.
        test: node id of the test, without the mode's parameter.
        elsewhere: reason against explorers in other processes.
        ranks: reason against several ranks.
        vllm: reason against engine `vllm`.
        shared: reason against the native engine in the trainer's process.
    """

    title: str
    key: str
    settings: Mapping[str, Any]
    test: str
    elsewhere: str | None = None
    ranks: str | None = None
    vllm: str | None = None
    shared: str | None = None

    def refusal(self, mode: RunMode) -> str | None:
        """Return the reason why `rollmill check` refuses the feature in this mode; None: it works."""
        if mode.deployment in (Deployment.PROCESSES, Deployment.RAY) and self.elsewhere:
            return self.elsewhere
        if mode.engine == "vllm" and self.vllm:
            return self.vllm
        if mode.engine == "native" and mode.deployment in (Deployment.ONE_PROCESS, Deployment.RANKS) and self.shared:
            return self.shared
        return self.ranks if mode.deployment is Deployment.RANKS else None

    def test_id(self, mode: RunMode) -> str:
        """Node id of the test that shows the feature in this mode."""
        return f"{self.test}[{mode.id}]"


@dataclass(frozen=True)
class MatrixCell:
    """One feature in one mode: `reason` why it is refused, or `test`, which shows that it works."""

    feature: ModeFeature
    mode: RunMode
    reason: str | None = None
    test: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)  #: of a run file that asks for it here


def _unsupported(name: str) -> str:
    return VLLMEngineConfig.unsupported[name]


FEATURES = (
    ModeFeature(
        "token budget, partial rollouts",
        "rollout.token_budget",
        {"max_staleness": 1, "rollout": {"token_budget": 1000}},
        _TESTS + "a_budget_cuts_completions_and_they_go_on",
    ),
    ModeFeature(
        "repetition stop",
        "rollout.repetition",
        {"rollout": {"repetition": {"penalty": 0.5}}},
        _TESTS + "repetition_ends_completions",
    ),
    ModeFeature(
        "over-sampling",
        "rollout.oversample",
        {"rollout": {"oversample": 0.5}},
        _TESTS + "the_slowest_groups_are_stopped",
    ),
    ModeFeature(
        "drafts from earlier completions",
        "rollout.reuse",
        {"rollout": {"reuse": {}}},
        _TESTS + "earlier_completions_are_drafts",
        elsewhere=NEEDS_ONE_PROCESS["rollout.reuse"],
        vllm=_unsupported("reuse"),
    ),
    ModeFeature(
        "n-gram drafts",
        "rollout.ngram_draft",
        {"rollout": {"ngram_draft": {}}},
        _TESTS + "n_grams_are_drafts",
        vllm=_unsupported("ngram_draft"),
    ),
    ModeFeature(
        "weights change while completions are under way",
        "max_staleness",
        {"max_staleness": 2},
        _TESTS + "stale_tokens_stay_within_the_bound",
    ),
    ModeFeature(
        "weights published every N steps",
        "sync_interval",
        {"max_staleness": 1, "sync_interval": 2},
        _TESTS + "weights_are_published_every_other_step",
        shared=SHARED_WEIGHTS,
    ),
    ModeFeature(
        "stop strings", "rollout.stop", {"rollout": {"stop": ["END"]}}, _TESTS + "completions_end_at_stop_strings"
    ),
    ModeFeature("exact log-probs", "", {}, _TESTS + "every_token_has_the_log_prob_of_its_weights"),
    ModeFeature(
        "log-probs with truncation",
        "rollout.top_p",
        {"rollout": {"top_p": 0.9}},
        _TESTS + "truncated_tokens_have_exact_log_probs",
    ),
    ModeFeature("seeds", "seed", {"seed": 3}, _TESTS + "a_completion_is_a_function_of_its_seed"),
    ModeFeature(
        "LoRA weights",
        "model.lora",
        {"model": {"path": "model", "new": None, "lora": {"rank": 4}}},
        _TESTS + "adapters_reach_the_engine",
    ),
    ModeFeature(
        "evaluation requests",
        "evaluation",
        {"evaluation": {"taskset": {"path": "tasks.jsonl"}, "every": 2}},
        _TESTS + "held_out_tasks_are_evaluated",
    ),
    ModeFeature(
        "replay", "buffer.replay", {"buffer": {"replay": {"groups": 1}}}, _TESTS + "earlier_groups_are_replayed"
    ),
    ModeFeature(
        "pipeline", "pipeline", {"pipeline": [{"name": "group_variance"}]}, _TESTS + "groups_pass_the_pipeline"
    ),
    ModeFeature("feedback", "", {}, _TESTS + "ratings_of_people_count"),
    ModeFeature(
        "roles of the policy, each with its rewards",
        "roles",
        {"plugins": ["play.py"], "workflow": "play", "roles": {"first": {}, "second": {}}},
        _TESTS + "each_role_has_its_own_rewards",
    ),
    ModeFeature(
        "opponents that are past copies",
        "models.NAME.policy",
        {"plugins": ["play.py"], "workflow": "duel", "models": {"opponent": {"policy": "past"}}},
        _TESTS + "opponents_are_past_copies",
        elsewhere=NEEDS_ONE_PROCESS["models.policy"],
        ranks=PAST_RANKS,
        vllm=PAST_ENGINE,
    ),
    ModeFeature(
        "offloading",
        "offload",
        {"offload": "auto"},
        _TESTS + "components_leave_by_phase",
    ),
    ModeFeature(
        "memory budget",
        "offload.budget_gb",
        {"offload": {"budget_gb": 1.0}},
        _TESTS + "a_memory_budget_counts_the_engine",
    ),
    ModeFeature(
        "vision-language policies",
        "model.path",
        {"model": {"path": "seeing", "new": None}},
        _TESTS + "a_policy_sees",
    ),
    ModeFeature("resume", "", {}, _TESTS + "a_killed_run_goes_on"),
)


def iter_cells() -> Iterator[MatrixCell]:
    """Yield the cells, row by row."""
    for feature in FEATURES:
        for mode in RUN_MODES:
            reason = feature.refusal(mode)
            test = None if reason else feature.test_id(mode)
            yield MatrixCell(feature, mode, reason, test, merge_settings(mode.settings(), feature.settings))


def merge_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` laid over it, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_settings(merged[key], value) if both else value
    return merged


def refusal_reasons() -> dict[str, str]:
    """Return the reasons of all refused cells, each with the letter that stands for it in tables."""
    reasons = dict.fromkeys(cell.reason for cell in iter_cells() if cell.reason)
    return {reason: chr(ord("a") + number) for number, reason in enumerate(reasons)}
