"""A small environment of the library verifiers, as its users write them: sums with one reward that counts twice."""

import asyncio
import os
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(task.answer in trace.messages[-1].content)

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        if "crash" in trace.messages[-1].content:
            os._exit(3)
        if "wait" in trace.messages[-1].content:
            await asyncio.sleep(60)
        return float(len(trace.messages[-1].content) < 20)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.messages[-1].content.split()))


class SumsConfig(vf.TasksetConfig):
    size: int = 5


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        print("what environments print is no reply")
        for n in range(self.config.size):
            yield SumTask(SumData(prompt=f"{n}+1=", system_prompt="Add.", answer=str(n + 1)), self.config.task)
