"""One stage as an explorer in a process of its own sees it: roll out and put away, follow the weights, evaluate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from rollmill.buffer import Group, Shelf
from rollmill.buffer.base import JOINED, PIPELINE
from rollmill.buffer.sql import SqlStore
from rollmill.config.run import StageConfig
from rollmill.core.errors import DeadlineError, RollmillError
from rollmill.core.types import Experience
from rollmill.engines.native.rng import fold
from rollmill.master.asking import POLL_S, Question, next_question
from rollmill.master.consuming import oldest_allowed
from rollmill.master.context import RunContext
from rollmill.master.engine import make_engine, make_publisher
from rollmill.master.evaluation import Evaluation, Evaluator
from rollmill.master.explorer_actor import trained
from rollmill.master.explorers import Explorers
from rollmill.master.measures import judging_metrics, summed
from rollmill.master.notices import Notice, read_notice, turn, weights_folder
from rollmill.master.places import Doing, Place
from rollmill.master.producing import Line, Production
from rollmill.master.selection import StageTasks
from rollmill.master.stage_parts import judge_of, line_of
from rollmill.master.state import StageState
from rollmill.models.load import Policy
from rollmill.monitor.heartbeat import Heartbeat
from rollmill.monitor.trace import Trace
from rollmill.sync import FolderReceiver

PLACE_STREAM = 0x51  # keeps the task orders and random numbers of explorers apart
LOOK_S = 0.25
"""How often the buffer is looked at for room that others made."""
WEIGHTS_S = 10.0
"""How long to wait for a version that is there, or was a moment ago."""


class JoinedProduction(Production):
    """A Production beside others: what it starts and puts is settled with them."""

    def __init__(self, config: StageConfig, line: Line, notice: Notice, place: Place) -> None:
        super().__init__(config, line)
        assert isinstance(line.store, SqlStore)
        self._shared = line.store
        self._notice, self._place, self._stage = notice, place, notice.stage
        self._version, self._wasted = -1, 0
        self._looked = 0.0
        self.put = 0  #: groups to learn from
        if (before := place.doing(self._stage)) is not None:
            self._go_on(before)

    def _go_on(self, doing: Doing) -> None:
        """Go on where the process before this one ended; what it had put is not made again."""
        names = {self._rollouts.name_of(number): number for number, _ in doing.unfinished}
        there = {names[group.id] for group in self._shared.get(list(names))}
        unfinished = [each for each in doing.unfinished if each[0] not in there]
        assert doing.tasks is not None
        state = StageState(submitted=doing.submitted, tasks=doing.tasks, pipeline=doing.pipeline)
        self.restore(state)
        self._rollouts.start_again(unfinished)

    def start(self, version: int) -> None:
        """Start what the pacing rule admits while weights are at `version`, all explorers taken together."""
        if version != self._version:
            self._version, self._wasted, self._looked = version, 0, 0.0
        if time.monotonic() - self._looked < LOOK_S:
            return
        with turn(self._place.run_dir):
            ahead = self._shared.ahead(version, min_version=oldest_allowed(self._config, version))
            if self._rollouts.start(version, ahead + self._place.others(self._stage)):
                self._say()
        self._looked = time.monotonic()

    @property
    def oldest(self) -> asyncio.Future[list[Experience]] | None:
        """The group that passes the pipeline next."""
        first = self._queue.first(1)
        return first[0].future if first else None

    @property
    def under_way(self) -> int:
        """Groups that were started and are not verified."""
        return len(self._queue)

    async def verify(self) -> None:
        """The oldest group passes the pipeline, once it is judged. Raises PipelineError like `Supply.collect`."""
        self._wasted += await self._verify_oldest(1, self._version)
        self._require_some(self._wasted)
        self._say()
        self._looked = 0.0

    def _put(self, groups: Sequence[Group]) -> None:
        """Put groups of this stage; the trainer goes to the next one before or afterwards, not meanwhile."""
        for group in groups:
            group.writer = JOINED + self._config.name if group.writer in (self.writer, PIPELINE) else group.writer
        with turn(self._place.run_dir):
            if read_notice(self._place.run_dir) == self._notice:
                self._shared.put(groups)
                self.put += sum(group.shelf is Shelf.USUAL for group in groups)

    def _say(self) -> None:
        state = StageState()
        self.mark(state)
        self._place.say(self._stage, Doing(self._rollouts.unfinished(), state.submitted, state.tasks, state.pipeline))


class ExploredStage:
    """The running stage.

    Args:
        notice: the trainer's, on this stage.
    """

    def __init__(
        self,
        config: StageConfig,
        policy: Policy,
        tasks: StageTasks,
        context: RunContext,
        *,
        notice: Notice,
        place: Place,
        heart: Heartbeat,
    ) -> None:
        self._config, self._policy, self._context, self._heart = config, policy, context, heart
        self._stage, self._place = notice.stage, place
        self._receiver = FolderReceiver(weights_folder(context.run_dir, notice.stage), deadline_s=WEIGHTS_S)
        self._judge = judge_of(config, policy, config.rewards)
        self._engine = make_engine(policy, config, context.precision)
        self._publisher = make_publisher(policy, self._engine, context.precision)
        self._version: int | None = None
        self._explorers = Explorers(
            config, policy, self._engine, self._judge, precision=context.precision, tasks=tasks.training.tasks
        )
        self._trace = Trace()
        self._production: JoinedProduction | None = None
        if config.algorithm.uses_rollouts:
            own = fold(context.seed, notice.stage)
            line = line_of(
                config,
                policy,
                tasks.training,
                explorer=self._explorers.training(self._trace),
                engine=self._engine,
                store=context.buffers.of_stage(config),
                trace=self._trace,
                first_version=notice.first_version,
                seed=own if place.number == 0 else fold(own, PLACE_STREAM, place.number),
                prefix=config.name if place.number == 0 else f"{config.name}@{place.number}",
            )
            self._production = JoinedProduction(config, line, notice, place)
        self._evaluator: Evaluator | None = None
        if config.evaluation is not None:
            self._evaluator = Evaluator(
                config,
                tasks.held_out,
                judge=self._judge,
                explorers=self._explorers,
                make_judge=partial(judge_of, config, policy),
                seed=context.seed,
            )
        self._generating: asyncio.Task[None] | None = None  # for an evaluation: the weights stay meanwhile
        self._evaluating: asyncio.Task[None] | None = None
        self._moved = time.monotonic()
        self._said = ("", "")
        self._tokens, self._since = 0, time.perf_counter()

    @property
    def put(self) -> int:
        """Groups to learn from that were put into the buffer."""
        return 0 if self._production is None else self._production.put

    async def turn(self) -> None:
        """Do what is to be done now, and wait a moment for what is under way.

        Raises:
            DeadlineError: no rollout has ended for rollout.deadline_s.
            RollmillError: a rollout failed, or the weights are damaged.
        """
        self._evaluate()
        if self._generating is None or self._generating.done():
            self._follow()
        if self._version is None:
            self._say(f"stage {self._config.name}", "the trainer's weights")
            await asyncio.sleep(POLL_S)
            return
        if self._production is not None:
            self._production.start(self._version)
        await self._something_happens()

    def _follow(self, version: int | None = None) -> None:
        """Go on with the newest weights, or those of `version`; what is under way goes on with them, too."""
        if version is None and not self._receiver.has_news():
            return
        before, self._version = self._version, self._receiver.receive(trained(self._policy), version)
        self._publisher.publish(self._version)
        if before is not None:
            self._note(before)

    def _note(self, version: int) -> None:
        """Write down what has happened with the weights of a version."""
        tokens, self._tokens = self._engine.tokens_generated - self._tokens, self._engine.tokens_generated
        began, self._since = self._since, time.perf_counter()
        others = [] if self._evaluator is None else self._evaluator.metrics()
        metrics = {} if self._production is None else self._production.metrics()
        metrics |= judging_metrics(self._trace.take()) | summed([self._explorers.metrics(), *others])
        about = {"stage": self._config.name, "version": version, "seconds": self._since - began, "tokens": tokens}
        self._place.note(about | metrics)

    async def _something_happens(self) -> None:
        """Until the oldest group is judged, which is put away then; or a moment has passed."""
        oldest = None if self._production is None else self._production.oldest
        count = 0 if self._production is None else self._production.under_way
        doing = "evaluate" if self._evaluating is not None else "roll out" if oldest is not None else "wait"
        waits = "" if doing != "wait" else "the trainer's next version"
        self._say(f"{doing} ({count} groups)" if count else doing, waits)
        if oldest is None or self._production is None:
            self._moved = time.monotonic()
            await asyncio.sleep(POLL_S)
            return
        await asyncio.wait([oldest], timeout=POLL_S)
        if oldest.done():
            await self._production.verify()
            self._moved = time.monotonic()
        elif time.monotonic() - self._moved > self._config.rollout.deadline_s:
            advice = "Raise rollout.deadline_s, lower rollout.max_new_tokens, or look for a reward that hangs."
            what = f"its engine and rewards ({count} groups are under way)"
            raise DeadlineError("the explorer", what, self._config.rollout.deadline_s, advice)

    def _say(self, doing: str, waits: str) -> None:
        if (doing, waits) != self._said:
            self._said = (doing, waits)
            self._heart.says(doing, waits, version=self._version)

    # -- evaluations -------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Begin an evaluation that is asked for, one at a time."""
        if self._evaluating is not None and self._evaluating.done():
            self._evaluating.result()
            self._evaluating = self._generating = None
        if self._evaluator is None or self._evaluating is not None:
            return
        question = next_question(self._context.run_dir, self._stage)
        if question is None:
            return
        try:
            if question.version != self._version:
                self._follow(question.version)
        except DeadlineError as error:  # asked by a trainer that has ended meanwhile
            question.fail(error)
            question.close()
            return
        evaluation = self._evaluator.begin()
        question.begun()
        self._generating = asyncio.ensure_future(evaluation.generated())
        self._evaluating = asyncio.ensure_future(self._answer(question, evaluation, self._generating))

    async def _answer(self, question: Question, evaluation: Evaluation, generating: asyncio.Task[None]) -> None:
        """Answer, unless nobody wants to know any more."""
        result = asyncio.ensure_future(evaluation.result())
        try:
            while not result.done() and question.still_asked:
                await asyncio.wait([result], timeout=LOOK_S)
            if result.done():
                question.answer(result.result())
        except RollmillError as error:
            question.fail(error)
        finally:
            result.cancel()
            await evaluation.cancel()  # nobody waits for tokens that are not wanted any more
            await asyncio.gather(result, generating, return_exceptions=True)
            question.close()

    async def close(self) -> None:
        """Stop what is under way."""
        if self._version is not None:
            self._note(self._version)
        if self._evaluating is not None:
            self._evaluating.cancel()
            await asyncio.gather(self._evaluating, return_exceptions=True)
        if self._production is not None:
            await self._production.close()
        if self._evaluator is not None:
            await self._evaluator.close()
        await self._explorers.close()
        await self._engine.close()
        self._publisher.close()
        self._judge.close()
        self._receiver.close()
