"""What `mode` cannot be together with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmill.config.placement import RayPlacement
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import KeyPath
from rollmill.config.workflows import TrafficWorkflow


def mode_conflicts(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Choices that the mode does not allow, each with what to do."""
    if config.is_split:
        yield from _split(config, stages)
    elif config.mode in ("bench", "serve"):
        yield from _of_a_model(config, stages)


def unused_mode_keys(config: RunConfig) -> dict[KeyPath, str]:
    """Keys that only explorers in processes of their own honour."""
    if config.is_split:
        return {}
    return {("trainer_away_s",): f"not honoured by mode `{config.mode}`; it is by `explore` (and `train` may have it)"}


def _split(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    mode = config.mode
    if isinstance(config.placement, RayPlacement):
        text = f"with mode `{mode}` every explorer is a process that you start; remove it, or use mode: both"
        yield ("placement",), text
    if not any(stage.algorithm.uses_rollouts or stage.evaluation is not None for stage in stages):
        yield ("mode",), "no stage rolls anything out or is evaluated, so explorers would have nothing to do; use both"
    for index, stage in enumerate(stages):
        at: KeyPath = ("stages", index) if config.stages else ()
        for path, text in _needs_one_process(stage):
            yield (*at, *path), f"{text}; remove it, or use mode: both"
        if stage.buffer.store == "memory":
            text = "trainer and explorers meet in a database; use `sql` or `auto`"
            yield (*at, "buffer", "store"), f"mode `{mode}`: {text}"
        if stage.buffer.url != stages[0].buffer.url:
            text = "trainer and explorers meet in one database; write `buffer.url` once, for the whole file"
            yield (*at, "buffer", "url"), f"mode `{mode}`: {text}"


def _needs_one_process(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """What needs rollouts and updates in one process."""
    if isinstance(stage.workflow, TrafficWorkflow):
        yield ("workflow",), "an application's sessions come to the process that trains: `traffic` goes with mode serve"
    if stage.residency is not None:
        yield ("residency",), "it moves one process's models between phases, and here each process has one phase"
    if stage.rollout.token_budget is not None:
        yield ("rollout", "token_budget"), "it ends with the step, which explorers of their own do not know"
    if stage.rollout.oversample:
        yield ("rollout", "oversample"), "it ends with the step, which explorers of their own do not know"
    if stage.rollout.reuse is not None:
        yield ("rollout", "reuse"), "drafts belong to checkpoints, which explorers of their own do not write"
    for name, model in stage.models.items():
        if model.policy is not None:
            text = "the policy at the start of the stage is not kept for explorers that join later; give `path`"
            yield ("models", name, "policy"), text


def _of_a_model(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    trains = config.mode == "serve" and any(isinstance(stage.workflow, TrafficWorkflow) for stage in stages)
    if trains and len(stages) > 1:
        yield ("stages",), "mode `serve` trains on traffic in one stage; keep that one alone"
    if config.model.path == "new":
        what = "evaluate" if config.mode == "bench" else "serve"
        text = f"a new model has learned nothing; give the folder of one to {what}, such as RUN/checkpoints/step-000100"
        yield ("model", "path"), text
    if config.mode == "bench" and all(stage.evaluation is None for stage in stages):
        yield ("mode",), "mode `bench` needs an `evaluation`, which says what is measured"
