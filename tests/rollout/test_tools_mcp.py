"""Tools of MCP servers, which are real ones, as processes and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny import tiny_run
from support.waiting import wait_until

from rollmill.config.loader import load_run
from rollmill.config.tools import ToolSection
from rollmill.errors import ConfigError, WorkflowError
from rollmill.rollout.tools.builtin.calculator import CalculatorTool
from rollmill.rollout.tools.builtin.mcp import MCPTool
from rollmill.rollout.tools.pool import ToolPool
from rollmill.rollout.tools.toolbox import Toolbox, ToolResult
from rollmill.rollout.workflow import Rollout
from rollmill.types import Task

SERVER = """
import json, os, sys, time

FRUIT = {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]}
PRICES = {"apple": 3, "pear": 4}
TOOLS = {"price": FRUIT, "sell": FRUIT, "wait_long": {"type": "object"}, "die": {"type": "object"}}
sold = []
print("the shop is open", file=sys.stderr, flush=True)

def call(name, arguments):
    if name == "price":
        total = PRICES[arguments["fruit"]] * arguments.get("count", 1)
        return f"{total} {os.environ.get('CURRENCY', 'EUR')}"
    if name == "sell":
        sold.append(arguments["fruit"])
        return f"{os.getpid()} " + " ".join(sold)
    if name == "die":
        print("the shop burns", file=sys.stderr, flush=True)
        os._exit(3)
    time.sleep(600)

def answer(method, given):
    if method == "initialize":
        info = {"name": "shop", "version": "1"}
        return {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        named = [{"name": name, "description": f"Tool {name}.", "inputSchema": each} for name, each in TOOLS.items()]
        second = (given or {}).get("cursor") == "2"
        return {"tools": named[2:]} if second else {"tools": named[:2], "nextCursor": "2"}
    try:
        return {"content": [{"type": "text", "text": call(given["name"], given.get("arguments") or {})}]}
    except KeyError as error:
        return {"content": [{"type": "text", "text": f"unknown fruit {error}"}], "isError": True}

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    found = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] in ("initialize", "tools/list", "tools/call"):
        found["result"] = answer(request["method"], request.get("params"))
    else:
        found["error"] = {"code": -32601, "message": "no such method"}
    print(json.dumps(found), flush=True)
"""
"""A server without any library: it starts at once."""
LIBRARY_SERVER = """
import os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")

@server.tool()
def price(fruit: str, count: int = 1) -> str:
    '''The price of some fruit.'''
    return f"{ {'apple': 3, 'pear': 4}[fruit] * count} {os.environ.get('CURRENCY', 'EUR')}"

server.run(*sys.argv[1:], **({"port": int(os.environ["PORT"])} if "PORT" in os.environ else {}))
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.py"
    path.write_text(SERVER)
    return path


def section(shop: Path, **options: Any) -> MCPTool:
    return MCPTool.model_validate({"command": ["python", str(shop)]} | options)


@contextmanager
def opened(*sections: ToolSection) -> Iterator[ToolPool]:
    pool = ToolPool(sections)
    try:
        yield pool
    finally:
        pool.close()


def used(pool: ToolPool, *calls: tuple[str, dict[str, Any]]) -> tuple[list[ToolResult], Toolbox]:
    """The results of calls in one rollout."""

    async def run() -> tuple[list[ToolResult], Toolbox]:
        rollout: Any = Rollout("g/0", Task("t", "?"), "g", 0, 0, 0, None, None, None)  # type: ignore[arg-type]
        async with pool.one(rollout) as tools:
            return [await tools.call(*each) for each in calls], tools

    return asyncio.run(run())


def test_the_tools_of_a_server_are_described_and_called(shop: Path) -> None:
    with opened(section(shop, environment={"CURRENCY": "CHF"}, result_chars=40), CalculatorTool()) as pool:
        found, tools = used(
            pool,
            ("price", {"fruit": "pear", "count": 2}),
            ("price", {"fruit": "plum"}),
            ("price", {"count": 2}),
            ("sell", {"fruit": "a" * 60}),
            ("calculator", {"expression": "1 + 1"}),
        )
        assert tools.names == ["price", "sell", "wait_long", "die", "calculator"]
        assert tools.descriptions[0]["function"]["description"] == "Tool price."
        schema = tools.schema("price")
        assert (schema["required"], schema["properties"]["fruit"]["type"]) == (["fruit"], "string")
        assert [each.ok for each in found] == [True, False, False, True, True]
        assert (found[0].content, found[4].content) == ("8 CHF", "2")
        assert found[1].content == "Error: unknown fruit 'plum'"
        assert "characters left out" in found[3].content
        counters = pool.counters()
        assert (counters["price/calls"], counters["price/errors"], counters["sell/calls"]) == (3, 2, 1)


def test_a_connection_is_shared_or_each_rollout_has_one(shop: Path) -> None:
    sell = ("sell", {"fruit": "apple"})
    with opened(section(shop, only=["sell"])) as pool:
        assert [len(used(pool, sell)[0][0].content.split()) for _ in range(3)] == [2, 3, 4]
    with opened(section(shop, only=["sell"], state="rollout", called="shop")) as pool:
        for _ in range(2):
            [first, second], tools = used(pool, ("shop_sell", {"fruit": "a"}), ("shop_sell", {"fruit": "b"}))
            assert tools.names == ["shop_sell"]
            assert (first.content.split()[1:], second.content.split()[1:]) == (["a"], ["a", "b"])
            ended = int(first.content.split()[0])
            wait_until(lambda ended=ended: not psutil.pid_exists(ended))


def test_a_call_that_takes_too_long_is_the_policys_error(shop: Path) -> None:
    with opened(section(shop, time_limit_s=0.5)) as pool:
        [late], _ = used(pool, ("wait_long", {}))
        assert (late.ok, late.content) == (False, "Error: no result after 0.5 s")


def test_a_server_that_hangs_fails_the_rollout_and_is_started_again(shop: Path) -> None:
    with opened(section(shop, time_limit_s=0.1)) as pool:
        with pytest.raises(WorkflowError, match="has not answered 8 calls in a row"):
            used(pool, *[("wait_long", {})] * 9)
        first, _ = used(pool, ("wait_long", {}))
        assert first[0].content == "Error: no result after 0.1 s", "by another process, whose calls are counted anew"


def test_a_server_that_ends_fails_the_rollout_and_is_started_again(shop: Path) -> None:
    with opened(section(shop)) as pool:
        with pytest.raises(WorkflowError, match=r"(?s)MCP server `python .*shop.py` has ended.*the shop burns"):
            used(pool, ("die", {}))
        [again], _ = used(pool, ("price", {"fruit": "apple"}))
        assert again.content == "3 EUR"


def test_its_processes_end_with_the_tools(shop: Path) -> None:
    with opened(section(shop)) as pool:
        [found], _ = used(pool, ("sell", {"fruit": "apple"}))
        process = int(found.content.split()[0])
        assert psutil.pid_exists(process)
    wait_until(lambda: not psutil.pid_exists(process))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"command": ["no-such-server"]}, r"MCP server `no-such-server` cannot be started"),
        ({"command": ["python", "-c", "raise SystemExit('no licence')"]}, r"(?s)cannot be started.*no licence"),
        ({"command": ["sleep", "600"], "start_s": 0.5}, r"has not started and listed its tools after 0.5 s"),
        ({"only": ["prize"]}, r"has no tool 'prize' \(only\); it has price, sell"),
        ({"command": [], "url": "http://127.0.0.1:9/mcp"}, r"`http://127.0.0.1:9/mcp` cannot be reached"),
    ],
)
def test_a_server_that_cannot_be_used_is_named_when_the_run_starts(
    shop: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ToolPool([section(shop, **options)])


def test_names_are_unique(shop: Path) -> None:
    with pytest.raises(ConfigError, match="two are called `price`"):
        ToolPool([section(shop), section(shop)])
    with opened(section(shop, called="a"), section(shop, called="b")) as pool:
        _, tools = used(pool)
        assert {"a_price", "b_price"} < set(tools.names)


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"name": "mcp"}, "needs either the command of a server or the url"),
        ({"name": "mcp", "command": ["x"], "url": "http://x"}, "needs either the command"),
        ({"name": "mcp", "command": ["x"], "description": "y"}, "its server describes the tools"),
        ({"name": "mcp", "url": "http://x", "folder": "y"}, "whose server runs already"),
    ],
)
def test_keys_that_do_not_fit_are_named(tmp_path: Path, tool: dict[str, Any], says: str) -> None:
    path = tiny_run(tmp_path, evaluation=None, stages=None, workflow="tools", tools=[tool])
    with pytest.raises(ConfigError, match=says):
        load_run(path)


@pytest.mark.slow  # the library takes long to import
def test_servers_of_the_library_are_used_as_processes_and_over_http(tmp_path: Path) -> None:
    shop = tmp_path / "library.py"
    shop.write_text(LIBRARY_SERVER)
    with opened(section(shop, time_limit_s=60)) as pool:
        found, tools = used(pool, ("price", {"fruit": "pear", "count": 2}), ("price", {"count": "many"}))
        assert (found[0].content, found[1].ok) == ("8 EUR", False)
        assert tools.descriptions[0]["function"]["description"] == "The price of some fruit."
        assert tools.schema("price")["required"] == ["fruit"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = os.environ | {"PORT": str(port), "CURRENCY": "NOK"}
    server = subprocess.Popen(
        [sys.executable, str(shop), "streamable-http"], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: _listens(port))
        with opened(MCPTool(url=f"http://127.0.0.1:{port}/mcp", time_limit_s=30)) as pool:
            [found], _ = used(pool, ("price", {"fruit": "pear"}))
            assert found.content == "4 NOK"
            server.send_signal(signal.SIGKILL)
            server.wait()
            with pytest.raises(WorkflowError, match=f"127.0.0.1:{port}/mcp"):
                used(pool, ("price", {"fruit": "pear"}))
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_structured_results_without_text_are_json() -> None:
    from rollmill.rollout.tools.builtin.mcp import _result_content

    result = rollmill_result(content=[], structured_content={"a": [1]})
    found = _result_content(result)
    assert isinstance(found, str)
    assert json.loads(found) == {"a": [1]}


def test_pictures_in_results_are_parts() -> None:
    from mcp.types import AudioContent, ImageContent, TextContent

    from rollmill.rollout.tools.builtin.mcp import _result_content

    drawn = ImageContent(type="image", data="AAAA", mime_type="image/png")
    heard = AudioContent(type="audio", data="AAAA", mime_type="audio/wav")
    found = _result_content(rollmill_result(content=[TextContent(type="text", text="a"), drawn, heard]))
    assert found == [
        {"type": "text", "text": "a"},
        {"type": "image", "image": "data:image/png;base64,AAAA"},
        {"type": "text", "text": "(audio, not shown)"},
    ]


def rollmill_result(**fields: Any) -> Any:
    from mcp.types import CallToolResult

    return CallToolResult(**fields)
