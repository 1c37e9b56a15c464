"""The training loop of a stage, and one step of it.

    tasks -> rollouts -> rewards -> pipeline -> buffer -> batch -> advantages -> optimizer steps -> weights

The explorer scores each completion as soon as it ends (rollout/explorer.py); the batches wait for the rewards, and pass
groups through the pipeline into the buffer (batches.py); advantages and optimizer steps are the trainer's
(trainer/trainer.py). Synchronous, one-step-off-policy, asynchronous, partial and remote rollouts all run this loop.
They differ in three places outside it: how far ahead the scheduler may start rollouts (`max_staleness`, pacing.py;
in this process only rewards overlap with the update, since the scheduler waits for all completions), what ends a step's
rollouts (all of them, the first ones, or a token budget; scheduler.py), and which process rolls out (rollouts.py here
and in remote/).

Ctrl-C (interrupt.py turns the signal into Interrupted, Orchestrator._stage stores the checkpoint):

    it comes                    the loop                                          the checkpoint
    before `stage.learn`        cancels the step                                  of the step before
    in `stage.learn`            finishes it, counts the step, runs `after_step`   of this step
    in `after_step`             runs it to its end, an evaluation, too            of this step
    after the last step         ends the stage as usual, and begins no other      of this step
    again, at any time          ends at once                                      none

An update that fails leaves no checkpoint: weights may be half made (`Stage.updating`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rollmill.errors import StoreError
from rollmill.orchestrator.interrupt import Interrupts
from rollmill.orchestrator.loop_callback import LoopCallback, TrainingStep
from rollmill.orchestrator.metrics import require_rewards
from rollmill.types import Experience

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage


async def train(stage: Stage, callbacks: Sequence[LoopCallback], interrupts: Interrupts) -> None:
    """Make the remaining steps of a stage.

    After a step come its evaluation and record, warnings, the user's callbacks, and last the checkpoint
    (`Orchestrator._callbacks`).

    Raises:
        Interrupted: the user asked to stop. What a step does before its update is cancelled; an update that has
            begun is finished and counts, and its callbacks run before the stage ends.
        RollmillError: whatever stopped a step, or a callback.
    """
    for each in callbacks:
        await interrupts.guard(each.on_stage_begin(stage))
    while not stage.done:
        step = await interrupts.guard(train_step(stage, callbacks))
        for each in callbacks:
            await each.after_step(stage, step)


async def train_step(stage: Stage, callbacks: Sequence[LoopCallback] = ()) -> TrainingStep:
    """Make one training step: collect a batch, learn from it, publish the new weights if they are due.

    Raises:
        RewardError: no reward applies to any completion of the batch.
        TrainingError: a loss or gradient is not finite.
        RollmillError: a rollout, the pipeline, the buffer or a callback failed.
    """
    try:
        for each in callbacks:
            await each.before_step(stage)
        stage.meter.begin()
        batch = await collect(stage)
        for each in callbacks:
            await each.before_update(stage)
        stage.meter.end_rollouts()
        require_rewards(batch, f"stage {stage.config.name}, step {stage.state.step + 1}")
        version = stage.version
        trained = await update(stage, batch)
        return stage.meter.finish(batch, trained, version)
    except BaseException:
        for each in callbacks:
            await each.step_failed(stage)
        raise


async def collect(stage: Stage) -> list[Experience]:
    """Collect the experiences of the next step: rollouts made here, replayed groups and demonstrations.

    Without rollouts (SFT, DPO) demonstrations alone. Where the pipeline drops groups, `batches.take` rolls out others
    in their place. `enter_phase` brings to the device what a phase needs. While rewards are awaited, the trainer makes
    the passes that need none.
    """
    batches, algorithm = stage.batches, stage.config.algorithm
    if batches is None:
        return await _demonstrations(stage, algorithm.demonstrations_per_step(0))
    evaluates = stage.evaluator is not None and stage.evaluator.is_generating
    with stage.trace.enter_phase("rollout", f"{stage.backend.display_name} to finish its completions"):
        await batches.roll_out(stage.version, deadlines=2 if evaluates else 1)
    completions = stage.config.rollout.batch * stage.config.rollout.group_size
    replayed = batches.replay(stage.version)
    others = replayed + await _demonstrations(stage, algorithm.demonstrations_per_step(completions))
    if stage.offloader is None or not evaluates:  # else the engine is still at work, and nothing may move
        await asyncio.sleep(0)  # rewards begin
        if (unscored := batches.peek()) is not None:
            await _precompute(stage, unscored + others)
    return await batches.take(stage.version) + others


async def _demonstrations(stage: Stage, count: int) -> list[Experience]:
    """Draw demonstrations, pairs or labelled completions, and pass them through the pipeline.

    Raises StoreError where the batch would be empty.
    """
    if stage.offline_data is None or count == 0:
        return []
    waits = "demonstrations to pass the pipeline"
    with stage.trace.enter_phase("reward", waits) if len(stage.pipeline) else nullcontext():
        drawn = await stage.offline_data.draw(count, step=stage.state.step, version=stage.version)
    if not drawn and stage.batches is None:
        names, dropped = ", ".join(stage.config.offline_data.sources), stage.pipeline.describe_dropped()
        raise StoreError(
            f"stage {stage.config.name}: nothing to learn from in offline_data.sources ({names}); give feedback first "
            "(`rollmill feedback`), or name other sources" + (f". The pipeline: {dropped}" if dropped else "")
        )
    return drawn


async def _precompute(stage: Stage, batch: list[Experience]) -> None:
    """Make the trainer's passes that need no rewards: reference and old log-probs, values."""
    await stage.offload_other_processes("inference")
    with stage.trace.enter_phase("inference"):
        stage.pictures.attach(batch)
        for _ in stage.trainer.precompute(batch, stage.version):
            await asyncio.sleep(0)  # rewards and requests go on in between


async def update(stage: Stage, batch: list[Experience]) -> dict[str, float]:
    """Make the optimizer steps of a batch, count the step, and publish the weights if they are due.

    Once the optimizer steps have begun nothing cancels them, and `finish_step` follows at once. So an interrupted step
    either counts as made or leaves the state as it was. An engine that shares the trainer's parameters is only told of
    the new version. Where others send requests, the trainer works in a thread; an
    engine of this process pauses meanwhile, since its weights are the ones that change.

    Returns the trainer's metrics.
    """
    if stage.offloader is not None:  # what `collect` has precomputed is not computed again
        await _precompute(stage, batch)  # in its own phase, before reward models and the engine are offloaded
    await stage.offload_other_processes("train")
    await stage.engine.sleep()  # frees its memory, if `engine.sleep` is set; its next request wakes it
    upcoming = [] if stage.batches is None else stage.batches.upcoming()
    with stage.trace.enter_phase("train"):
        if not stage.backend.trains_in_thread:
            metrics = stage.learn(batch, upcoming)
            stage.finish_step()
            return metrics
        stage.engine.pause()
        try:
            await stage.engine.drain()
            metrics = await _in_thread(stage, batch, upcoming)
            stage.finish_step()
            return metrics
        finally:
            stage.engine.resume()


async def _in_thread(
    stage: Stage, batch: list[Experience], upcoming: Sequence[Sequence[Experience]]
) -> dict[str, float]:
    """Run `stage.learn` in the trainer's thread to its end, even if an interrupt cancels this task."""
    work = asyncio.get_running_loop().run_in_executor(stage.train_thread, stage.learn, batch, upcoming)
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
    return work.result()
