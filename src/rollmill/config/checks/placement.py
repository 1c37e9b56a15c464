"""Checks of `placement` and `mode`: limits of explorers in other processes, on Ray or joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmill.config.checks.engine import engine_conflicts, uses_engine
from rollmill.config.checks.modes import NEEDS_ONE_PROCESS, SHARED_WEIGHTS
from rollmill.config.engines import VLLMEngineConfig
from rollmill.config.placement import RayPlacement
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import KeyPath, format_key_path
from rollmill.config.workflows import LiveRequestsWorkflow

_RAY_CHOOSES = "Ray chooses the GPUs of explorers; say how many each gets by placement.gpus, and remove this"


def placement_conflicts(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Yields choices of stages that need explorers in the trainer's process, or that an explorer's engine does not
    support."""
    if not isinstance(config.placement, RayPlacement):
        return
    for index, stage in enumerate(stages):
        if isinstance(stage.engine, VLLMEngineConfig) and stage.engine.gpus is not None:
            yield ("stages", index, "engine", "gpus") if config.stages else ("engine", "gpus"), _RAY_CHOOSES
        for path, reason in _needs_one_process(stage):
            what = f"stage {stage.name} has {format_key_path(path)}, which needs explorers in the trainer's process"
            yield ("placement",), f"{what} ({reason}); remove it, or use placement: inline"
    for number, kind in enumerate(config.placement.explorers):
        if isinstance(kind.engine, VLLMEngineConfig) and kind.engine.sleep:
            text = "explorers on Ray do not sleep; remove it"
            yield ("placement", "explorers", number, "engine", "sleep"), text
        if isinstance(kind.engine, VLLMEngineConfig) and kind.engine.gpus is not None:
            yield ("placement", "explorers", number, "engine", "gpus"), _RAY_CHOOSES
        for stage in stages if kind.engine is not None else []:
            for path, text in engine_conflicts(stage.with_engine(kind.engine)):
                yield (
                    ("placement", "explorers", number, "engine"),
                    f"{format_key_path(path)} of stage {stage.name}: {text}",
                )
    if 0 < config.placement.trainer_gpus < 1 and any(stage.trainer.ranks > 1 for stage in stages):
        text = "ranks cannot share a GPU, and trainer.ranks is above 1"
        yield ("placement", "trainer_gpus"), f"{text}; reserve 1 for each, or none to see all of a host"


def sync_conflicts(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Yields `sync_interval` where weights are not published, or get staler than tokens may be."""
    one_process = config.mode == "both" and not isinstance(config.placement, RayPlacement)
    for index, stage in enumerate(stages):
        at: KeyPath = ("stages", index, "sync_interval") if config.stages else ("sync_interval",)
        interval = stage.sync_interval
        if interval == 1 or not stage.algorithm.uses_rollouts:
            continue
        here = one_process or isinstance(stage.workflow, LiveRequestsWorkflow)
        if here and stage.engine.name == "native":
            yield at, f"{SHARED_WEIGHTS}; remove it, or use another engine or placement"
        elif interval - 1 > stage.max_staleness:
            text = f"rollouts use weights that are up to {interval - 1} steps old, and max_staleness is"
            yield at, f"{text} {stage.max_staleness}; raise that to at least {interval - 1}, or lower this"


def unused_placement_keys(config: RunConfig, stages: Sequence[StageConfig]) -> dict[KeyPath, str]:
    """Returns keys of `placement` without effect, and keys of stages that it overrides."""
    keys: dict[KeyPath, str] = {}
    if not isinstance(config.placement, RayPlacement):
        return keys
    kinds, own = config.placement.explorers, "not honoured: every kind of placement.explorers has its own; remove it"
    if not any(uses_engine(stage) for stage in stages):
        for number in range(len(kinds)):
            text = "not honoured: no stage rolls out or is evaluated; remove it"
            keys |= {("placement", "explorers", number, key): text for key in ("engine", "threads")}
    elif config.mode == "both" and all(kind.engine is not None for kind in kinds):
        keys |= {("engine",): own} | {("stages", index, "engine"): own for index in range(len(stages))}
    return keys


# Modes


def mode_conflicts(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Yields choices that the mode does not allow, each with a remedy."""
    if config.is_split:
        yield from _split(config, stages)
    elif config.mode in ("bench", "serve"):
        yield from _of_a_model(config, stages)


def unused_mode_keys(config: RunConfig) -> dict[KeyPath, str]:
    """Returns keys that only separate explorer processes use."""
    if config.mode != "both":  # one file serves all modes
        return {}
    text = f"not honoured by mode `{config.mode}`; it is by"
    found: dict[KeyPath, str] = {
        (key,): f"{text} `explore` (and `train`, `bench` and `serve` may have it)"
        for key in ("trainer_away_s", "await_trainer")
    }
    if not isinstance(config.placement, RayPlacement):
        found["explorer_silent_s",] = (
            f"{text} `train` (and `explore`, `bench` and `serve` may have it), and by placement `ray`"
        )
    return found


def _split(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    mode = config.mode
    if isinstance(config.placement, RayPlacement):
        text = f"with mode `{mode}` every explorer is a process that you start; remove it, or use mode: both"
        yield ("placement",), text
    if mode == "explore" and not config.await_trainer:
        yield from _alone(config, stages)
    if not any(stage.algorithm.uses_rollouts or stage.evaluation is not None for stage in stages):
        yield ("mode",), "no stage rolls anything out or is evaluated, so explorers would have nothing to do; use both"
    for index, stage in enumerate(stages):
        at: KeyPath = ("stages", index) if config.stages else ()
        for path, text in _needs_one_process(stage):
            yield (*at, *path), f"{text}; remove it, or use mode: both"


def _alone(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Yields what a buffer that is filled without a trainer cannot do."""
    if len(stages) > 1:
        text = "without a trainer there is one stage, since later ones begin with weights that are not learned yet"
        yield (
            ("await_trainer",),
            f"{text}; give a file with one stage, whose model.path is where the stage before ended",
        )
    for stage in stages:
        if not stage.algorithm.uses_rollouts:
            text = f"algorithm `{stage.algorithm.name}` rolls nothing out, so there is nothing to put into a buffer"
            yield ("await_trainer",), f"{text}; remove this"
        elif not stage.buffer.in_database(persistent=True):
            yield ("buffer", "store"), "memory ends with the process, and no trainer takes part; use `sql` or `auto`"


def _needs_one_process(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields what needs explorers in the trainer's process, each with the reason."""
    if isinstance(stage.workflow, LiveRequestsWorkflow):
        yield ("workflow",), NEEDS_ONE_PROCESS["workflow"]
    if stage.rollout.reuse is not None:
        yield ("rollout", "reuse"), NEEDS_ONE_PROCESS["rollout.reuse"]
    if isinstance(stage.engine, VLLMEngineConfig) and stage.engine.sleep:
        yield ("engine", "sleep"), NEEDS_ONE_PROCESS["engine.sleep"]
    for name, model in stage.all_models.items():
        if model.policy is not None:
            yield ("models", name, "policy"), NEEDS_ONE_PROCESS["models.policy"]


def _of_a_model(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    trains = config.mode == "serve" and any(isinstance(stage.workflow, LiveRequestsWorkflow) for stage in stages)
    if trains and len(stages) > 1:
        yield ("stages",), "mode `serve` trains on live requests in one stage; keep that one alone"
    if config.model.path == "new":
        what = "evaluate" if config.mode == "bench" else "serve"
        text = f"a new model has learned nothing; give the folder of one to {what}, such as RUN/checkpoints/step-000100"
        yield ("model", "path"), text
    if config.mode == "bench" and all(stage.evaluation is None for stage in stages):
        yield ("mode",), "mode `bench` needs an `evaluation`, which says what is measured"
