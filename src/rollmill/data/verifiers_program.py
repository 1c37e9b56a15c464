"""Program that runs environments of the library verifiers in a separate Python environment: JSON lines in and out.

Run by path; it imports only the standard library and verifiers. The first line has the settings:
{"taskset": ..., "harness": ..., "options": ..., "env": ..., "folders": [...], "max_turns": ...}. Then

    {"id": 1, "list": 10}                                       -> {"id": 1, "rows": [{"index": 0, "prompt": ...}]}
    {"id": 2, "task": 3, "base_url": ..., "api_key": ...}       -> {"id": 2, "rewards": {...}, "metrics": {...}}
    {"id": 2, "cancel": true}                                   ends that run, without a reply

An error is a reply with the key `error`. At the end of the input, the program and all its child processes end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

CHAT = "rollmill_chat"


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Runs a conversation with tools in this process, so that no program is installed and started per rollout."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Run the conversation until a reply without tool calls, or until it exceeds the context."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            try:
                await _chat(client, ctx.model, messages, tools, dispatch, connected)
            except openai.APIStatusError as error:
                if trace.stop_condition is None and not is_context_overflow(error):
                    raise
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _chat(client: Any, model: str, messages: list[Any], tools: list[Any], dispatch: Any, servers: Any) -> None:
    offered: dict[str, Any] = {"tools": tools} if tools else {}
    while True:
        completion = await client.chat.completions.create(model=model, messages=messages, **offered)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            content = await _call_tool(call, dispatch, servers)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _call_tool(call: Any, dispatch: Any, servers: Any) -> Any:
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not JSON ({error})"
    if name not in dispatch:
        return f"error: there is no tool {name}"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    return await call_mcp(servers, dispatch, name, arguments)


class EpisodeServer:
    """Runs the episodes of one environment; reads its tasks lazily."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = _environment_config(settings)
        self.env = vf.load_environment(self._settings)
        self._tasks: list[Any] = []
        self._more: Iterator[Any] = iter(self.env.taskset)
        self._running: dict[int, asyncio.Task[None]] = {}

    def task(self, index: int) -> Any:
        """The task at an index. Raises IndexError past the last one."""
        self._tasks += itertools.islice(self._more, max(index + 1 - len(self._tasks), 0))
        return self._tasks[index]

    def answer(self, message: dict[str, Any]) -> None:
        """Start or cancel the request of one line."""
        number = message["id"]
        if message.get("cancel"):
            if number in self._running:
                self._running[number].cancel()
            return
        task = self._running[number] = asyncio.ensure_future(self._handle(number, message))
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def _handle(self, number: int, message: dict[str, Any]) -> None:
        try:
            result = self._rows(message["list"]) if "list" in message else await self._run(number, message)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:4000]}
        _reply({"id": number, **result})

    def _rows(self, count: int | None) -> dict[str, Any]:
        rows = []
        for index in itertools.count() if count is None else range(count):
            try:
                task = self.task(index)
            except IndexError:
                break
            rows.append({"index": index, "prompt": task.data.prompt_text, "key": task.key})
        return {"rows": rows}

    async def _run(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        variable = f"ROLLMILL_API_KEY_{number}"
        os.environ[variable] = message["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=message["base_url"], api_key_var=variable)
            sampling = vf.SamplingConfig(**message.get("sampling", {}))
            context = vf.ModelContext(model=message["model"], client=client, sampling=sampling)
            episode = await self.env.run_episode(self.task(message["task"]), context)
        finally:
            del os.environ[variable]
        return _outcome(episode)


def _outcome(episode: Any) -> dict[str, Any]:
    """Weighted rewards and metrics by name (`AGENT/NAME` if there are several agents), or the error."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return {"error": "; ".join(f"{each.type}: {each.message}" for each in errors)[:4000] or "the episode failed"}
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    learning = [trace for trace in episode.traces if trace.agent.trainable]
    for trace in learning:
        prefix = "" if len(learning) == 1 else f"{trace.agent.name}/"
        rewards |= {f"{prefix}{name}": each.value for name, each in trace.rewards.items() if each is not None}
        metrics |= {f"{prefix}{name}": value for name, value in trace.metrics.items() if value is not None}
    return {"rewards": rewards, "metrics": metrics}


def _environment_config(settings: dict[str, Any]) -> Any:
    """The environment's configuration; programs run as subprocesses on this machine."""
    sys.path[:0] = settings["folders"]
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}, "harness": {"id": settings["harness"]}}
    if settings["max_turns"] is not None:
        agent["max_turns"] = settings["max_turns"]
    env, taskset = settings["env"], {"id": settings["taskset"], **settings["options"]}
    return vf.resolve_env_config({**env, "taskset": taskset, "agent": {**agent, **env.get("agent", {})}})


def _reply(message: dict[str, Any]) -> None:
    os.write(_REPLIES, (json.dumps(message) + "\n").encode())


async def main() -> None:
    """Handle lines until the end of the input."""
    lines = asyncio.StreamReader(limit=64 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(_REQUESTS, "rb"))
    try:
        server = EpisodeServer(json.loads(await lines.readline()))
    except Exception as error:
        _reply({"id": 0, "error": f"{type(error).__name__}: {error}"[:4000]})
        return
    async with server.env.serving():
        _reply({"id": 0})
        while line := await lines.readline():
            server.answer(json.loads(line))
        os.killpg(0, signal.SIGKILL)  # child processes of episodes, too


if __name__ == "__main__":
    _REQUESTS, _REPLIES = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # keep printing code away from the protocol's pipes
    os.dup2(2, 1)
    module = types.ModuleType(CHAT)
    module.__dict__.update(__all__=["ChatHarness"], ChatHarness=ChatHarness)
    sys.modules[CHAT] = module
    eval_client.SESSION_ID_HEADER = "X-Verifiers-Trace"  # the endpoint reads X-Session-Id, and identifies us by key
    asyncio.run(main())
