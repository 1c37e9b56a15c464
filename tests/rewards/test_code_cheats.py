"""Completions that try to earn a reward without being right. Each is judged by data tests and by check code."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.reward_helpers import completion, task

from rollmill.rewards import RewardManager, RewardResult, build_reward_manager
from rollmill.rewards.builtin.code import CodeReward

SECRET = "expected-7c1f"
DATA: dict[str, Any] = {
    "entry_point": "f",
    "tests": [{"args": [n], "expected": [n * n, True, f"{SECRET}-{n}"]} for n in (2, 3, 5)],
}
CHECK: dict[str, Any] = {
    "entry_point": "f",
    "test": (
        "def check(candidate):\n"
        f"    for n in (2, 3, 5):\n        assert candidate(n) == [n * n, True, f'{SECRET}-{{n}}']\n"
        "    assert not (candidate(2) != [4, True, 'expected-7c1f-2']), 'wrong'\n"
        "    assert all(isinstance(each, (int, str)) for each in candidate(3)) and len(candidate(3)) == 3\n"
        "    assert candidate(2) in ([4, True, 'expected-7c1f-2'],)\n"
    ),
}
PROGRAM: dict[str, Any] = {"tests": [{"stdin": f"{n}\n", "stdout": f"{n * n} {SECRET}\n"} for n in (2, 3, 5)]}

LIAR = """
class Liar({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return hash((4, True))
    def __repr__(self): return "[4, True, 'expected-7c1f-2']"
    def __bool__(self): return True
    def __len__(self): return 3
    def __iter__(self): return iter([4, True, 'expected-7c1f-2'])
    def __getattribute__(self, name): return object.__getattribute__(self, name)
    __class__ = list
    __str__ = __repr__
def f(n): return Liar()
"""

FUNCTIONS = {
    "os._exit": "import os\nos._exit(0)",
    "os._exit in a call": "import os\ndef f(n): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in a call": "import sys\ndef f(n): sys.exit(0)",
    "raise SystemExit": "def f(n): raise SystemExit(0)",
    "raise KeyboardInterrupt": "def f(n): raise KeyboardInterrupt",
    "raise GeneratorExit": "def f(n): raise GeneratorExit",
    "raise StopIteration": "def f(n): raise StopIteration",
    "prints that all is well": (
        "print('ALL TESTS PASSED')\ndef f(n): print('passed', 'ok', '1 passed in 0.01s'); return True"
    ),
    "prints a verdict": "def f(n):\n    import os, json\n    os.write(1, json.dumps({'outcome': 'ok'}).encode())",
    "returns a verdict": "def f(n): return {'outcome': 'ok'}",
    "patches builtins": (
        "import builtins\nfor name in ('eq', 'len', 'all', 'any', 'isinstance', 'repr', 'type', 'AssertionError'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\ndef f(n): return n"
    ),
    "AssertionError that is none": (
        "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\ndef f(n): return 0"
    ),
    "unittest and pytest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(n): return 0",
    "looks for expected values": (
        "import gc, sys, inspect\n"
        "def f(n):\n"
        "    for thing in gc.get_objects():\n"
        "        if isinstance(thing, (list, dict, tuple)) and 'expected-7c' in str(thing)[:100000]:\n"
        "            for each in (thing.values() if isinstance(thing, dict) else thing):\n"
        "                if isinstance(each, list) and len(each) == 3: return each\n"
        "    for frame in inspect.stack():\n"
        "        for value in frame.frame.f_locals.values():\n"
        "            if isinstance(value, list) and len(value) == 3: return value\n"
    ),
    "looks for files": (
        "import os\ndef f(n):\n    texts = []\n"
        "    for folder in ('/tmp', '.', '/proc/self/fd', '/proc/self/cwd', '/dev/shm'):\n"
        "        try:\n            names = os.listdir(folder)\n        except OSError:\n            continue\n"
        "        for name in names:\n            try:\n"
        "                texts.append(open(os.path.join(folder, name)).read(9999))\n"
        "            except Exception:\n                pass\n"
        "    found = [t for t in texts if 'expected-7c' in t]\n    return found and eval(found[0])\n"
    ),
    "catches everything": (
        "def f(n):\n    while True:\n        try:\n            return undefined\n"
        "        except BaseException:\n            return None"
    ),
    "equal to everything": LIAR.format(base="object"),
    "an int equal to everything": LIAR.format(base="int"),
    "a list equal to everything": LIAR.format(base="list"),
    "a text equal to everything": LIAR.format(base="str"),
    "a dict equal to everything": LIAR.format(base="dict"),
    "members equal to everything": LIAR.format(base="int") + "def f(n): return [Liar(), Liar(), Liar()]",
    "patches json": (
        "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\njson.loads = lambda *a: [[2], {}]\n"
        "def f(n): return 0"
    ),
    "patches the encoder": (
        "import sys\nfor name, module in list(sys.modules.items()):\n"
        "    if name.startswith('rollmill'):\n"
        "        for key, each in list(vars(module).items()):\n"
        "            if callable(each): setattr(module, key, lambda *a, **k: ['l', 4, True, 'expected-7c1f'])\n"
        "def f(n): return 0"
    ),
    "patches sys.stdout": (
        "import sys\nsys.stdout = sys.stderr = None\nsys.modules['__main__'].module = None\ndef f(n): return 0"
    ),
    "asks the host": (
        "import __main__, builtins\ndef f(n):\n    host = getattr(__main__, 'host', None)\n"
        "    try:\n        return host('expected?')\n    except BaseException as e:\n        return str(e)"
    ),
    "defines host and check": (
        'def host(text): return \'{"outcome": "ok"}\'\ndef check(code): return host(code)\ndef f(n): return host(n)'
    ),
    "forged frames without the values": (
        "import os, struct\n"
        "def pack(*parts):\n"
        "    body = b''.join(struct.pack('!I', len(p)) + p for p in parts)\n"
        "    return struct.pack('!I', len(body)) + body\n"
        "def f(n):\n"
        "    for number in range(1, 9):\n"
        "        for fd in range(3, 12):\n"
        "            try:\n"
        "                os.write(fd, pack(b'done', b'%d' % number, b'ok', b'1', b'{\"outcome\": \"ok\"}'))\n"
        "            except OSError:\n                pass\n"
    ),
    "garbage on every descriptor": (
        "import os\ndef f(n):\n    for fd in range(99):\n        try:\n"
        "            os.write(fd, b'\\xff' * 999)\n        except OSError:\n            pass"
    ),
    "closes every descriptor": "import os\nos.closerange(0, 256)\ndef f(n): return 0",
    "closes them in the call": "import os\ndef f(n): os.closerange(0, 256)",
    "a thread that outlives": (
        "import threading, time\ndef go():\n    while True: time.sleep(0.001)\n"
        "threading.Thread(target=go).start()\ndef f(n): return n"
    ),
    "a generator": "def f(n):\n    yield n * n\n    yield True",
    "an endless generator": "def f(n):\n    while True: yield n",
    "nan": "def f(n): return float('nan')",
    "a value inside itself": "def f(n):\n    x = []\n    x.append(x)\n    return x",
    "very deep": "def f(n):\n    x = []\n    for _ in range(10 ** 5): x = [x]\n    return x",
    "very large": "def f(n): return [0] * 10 ** 6",
    "a long text": "def f(n): return 'x' * (3 << 20)",
    "a large number": "def f(n): return 1 << (1 << 22)",
    "bool for int": "def f(n): return [True, 1, '']",
    "no function": "x = 1",
    "a number in its place": "f = 1",
    "its own subclass of the exception": "class AssertionError(Exception): pass\ndef f(n): raise AssertionError('ok')",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n)",
    "a segmentation fault": "import ctypes\ndef f(n): ctypes.string_at(0)",
    "surrogates": "def f(n): return '\\ud800'",
    "signals": "import signal\nfor n in (2, 14, 15, 10):\n    signal.signal(n, signal.SIG_IGN)\ndef f(n): return 0",
    "exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef f(n): return 0",
    "async": "async def f(n): return [n * n, True, 'x']",
}
SLOW = {
    "an endless loop": "def f(n):\n    while True: pass",
    "an endless loop at the start": "while True: pass",
    "endless sleep": "import time\ndef f(n): time.sleep(1000)",
    "a memory bomb": "def f(n):\n    x = [0]\n    while True: x = x * 2",
    "a memory bomb at the start": "x = ' ' * (1 << 40)",
    "endless output": "def f(n):\n    while True: print('x' * 10000)",
    "an endless loop that catches": (
        "import signal\nsignal.alarm(0)\ndef f(n):\n    while True:\n        try:\n            while True: pass\n"
        "        except BaseException: pass"
    ),
}
PROGRAMS = {
    "prints that all is well": "print('ALL TESTS PASSED')",
    "prints everything": "print('\\n'.join(map(str, range(10000))))",
    "prints nothing": "",
    "exit 0": "import os\nos._exit(0)",
    "reads files": "import os\nfor n in os.listdir('.'): print(open(n).read())",
    "echoes": "import sys\nprint(sys.stdin.read())",
    "right for one test": f"input()\nprint('4 {SECRET}')",
    "right and then an error": f"n = int(input())\nprint(n * n, '{SECRET}')\n1 / 0",
    "right and then endless output": f"n = int(input())\nprint(n * n, '{SECRET}')\nwhile True: print('x' * 9999)",
    "not Python": "this is no code",
    "reads on": "import sys\nwhile True: sys.stdin.read(); input()",
}


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardManager]:
    with build_reward_manager(
        [CodeReward(name="code", credit="fraction", time_limit_s=0.5, total_limit_s=1.0, memory_mb=256)]
    ) as made:
        yield made


@pytest.fixture(scope="module")
def patient() -> Iterator[RewardManager]:
    """For what earns something, on a machine that has no time."""
    with build_reward_manager([CodeReward(name="code", credit="fraction", memory_mb=256)]) as made:
        yield made


def judged(judge: RewardManager, columns: dict[str, Any], code: str) -> RewardResult:
    return asyncio.run(judge.score(task(None, **columns), completion(f"```python\n{code}\n```")))


def test_the_right_function_and_program_earn_everything(patient: RewardManager) -> None:
    right = f"def f(n): return [n * n, True, f'{SECRET}-{{n}}']"
    for columns in (DATA, CHECK):
        assert judged(patient, columns, right).reward == 1.0
    assert judged(patient, PROGRAM, f"n = int(input())\nprint(n * n, '{SECRET}')").reward == 1.0


@pytest.mark.parametrize("name", [*FUNCTIONS, *SLOW])
@pytest.mark.parametrize("columns", [DATA, CHECK], ids=["data", "check"])
def test_functions_that_cheat_earn_nothing(judge: RewardManager, columns: dict[str, Any], name: str) -> None:
    found = judged(judge, columns, (FUNCTIONS | SLOW)[name])
    assert found.reward == 0.0
    assert found.outcomes["code"] not in ("ok", "test_error", "late")


FOOLING = (
    *("os._exit", "os._exit in a call", "sys.exit", "sys.exit in a call", "raise SystemExit", "exit handler"),
    *("equal to everything", "a list equal to everything", "a dict equal to everything"),
)


@pytest.mark.parametrize("name", FOOLING)
def test_the_cheats_are_real(name: str) -> None:
    """In one process with the check, as graders often do it, these pass."""
    program = f"{FUNCTIONS[name]}\n{CHECK['test']}\ncheck(f)\n"
    assert subprocess.run([sys.executable, "-I", "-c", program], capture_output=True).returncode == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_cheat_earn_no_more_than_they_solve(patient: RewardManager, name: str) -> None:
    found = judged(patient, PROGRAM, PROGRAMS[name])
    assert found.reward == (pytest.approx(1 / 3) if name == "right for one test" else 0.0)


@pytest.mark.parametrize("columns", [DATA, CHECK], ids=["data", "check"])
def test_a_function_that_remembers_earns_nothing_for_it(judge: RewardManager, columns: dict[str, Any]) -> None:
    """What the process has seen are arguments. It has them all by the last test, and no expected value among them."""
    code = "seen = []\ndef f(n):\n    seen.append(n)\n    return seen if len(seen) < 3 else [n * n, True, str(seen)]"
    assert judged(judge, columns, code).reward == 0.0


def test_forged_replies_earn_what_their_values_are_worth(patient: RewardManager) -> None:
    """Writing the protocol by hand is another way to return a value. A right one is right, since it had to be found."""
    forging = (
        "import __main__\ndef f(n): pass\n"
        "__main__.module.call = lambda *arguments: type('T', (), {'__repr__': lambda self: %r})()"
    )
    right_for_two = '{"value": ["l", 4, true, "expected-7c1f-2"]}'
    assert judged(patient, DATA, forging % right_for_two).reward == pytest.approx(1 / 3)
    assert judged(patient, CHECK, forging % right_for_two).reward == 0.0
    patch = f"import json; json.dumps = lambda *a, **k: {json.dumps({'outcome': 'ok'})!r}"
    names = (
        "exec",
        "eval",
        "exit",
        "__import__",
        "print",
        "type",
        "UnicodeDecodeError",
        "BaseException",
        "no_such_name",
    )
    calls = [json.dumps({"raised": name, "text": patch}) for name in names]
    for reply in (
        *calls,
        '{"outcome": "ok"}',
        "null",
        "[]",
        "{}",
        '{"value": 1e999}',
        "[" * 100_000,
        '{"raised": "SystemExit"}',
        "\udcff",
    ):
        for columns in (DATA, CHECK):
            assert judged(patient, columns, forging % reply).reward == 0.0


def test_nothing_is_left_in_the_trusted_process(judge: RewardManager) -> None:
    """No object of the model's classes is ever made here."""
    judged(judge, DATA, LIAR.format(base="int"))
    assert not [each for each in gc.get_objects() if type(each).__name__ == "Liar"]
