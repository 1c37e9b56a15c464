"""Where code stands in a completion, and how it joins the prompt that it goes on from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.rewards.code.extraction import defines_name, extract_code, find_code_blocks, join_prefix


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nbetter:\n```python\nx = 2\n```", "x = 2\n"),
        ("```py\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```Python3\nx = 1\n```", "x = 1\n"),
        ("~~~python\nx = '```'\n~~~", "x = '```'\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = 1\n\nThen:\n```python\nx = 2\n```", "x = 2\n"),
        ("1. First\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()\n"),
        (
            '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```',
            'def f():\n    """\n    ```\n    f()\n    ```\n    """\n',
        ),
        ("  ```python\n  x = 1\n ```\nDone.", "x = 1\n"),
        ("x = 1\n", "x = 1\n"),
        ("Use `x = 1`.", "Use `x = 1`."),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("Say ```inline``` here", "Say ```inline``` here"),
        ("```inline``` here\nx", "```inline``` here\nx"),
        ("", None),
        (" \n\t\n", None),
    ],
)
def test_where_code_stands(text: str, code: str | None) -> None:
    assert extract_code(text) == code


def test_a_block_that_defines_the_function_comes_before_one_that_uses_it() -> None:
    text = "```python\ndef f(x):\n    return x\n```\nFor example\n```python\nprint(f(1))\n```"
    assert extract_code(text, name="f") == "def f(x):\n    return x\n"
    assert extract_code(text, name="g") == "print(f(1))\n"


def test_a_fence_can_be_required_and_ignored() -> None:
    assert extract_code("x = 1", "fence") is None
    assert extract_code("```text\nx\n```", "fence") is None
    assert extract_code("```\nx\n```", "fence") == "x\n"
    assert extract_code("```\nx\n```", "whole") == "```\nx\n```"
    assert extract_code("```python\n\n```", "fence") is None


@given(st.text(alphabet=" \t`~\npythonx=1", max_size=200))
def test_blocks_are_pieces_of_the_text(text: str) -> None:
    for block in find_code_blocks(text):
        assert all(line in text for line in block.code.split("\n"))
    found = extract_code(text)
    assert (found is None) == (not text.strip())


@given(st.text(alphabet="abc =\n", max_size=50).filter(str.strip))
def test_what_stands_in_a_fence_comes_out(code: str) -> None:
    assert extract_code(f"Text.\n```python\n{code}\n```\nMore text.") == f"{code}\n"


PROMPT = 'import math\n\n\ndef area(r):\n    """Of a circle."""\n'


def test_a_completion_goes_on_from_its_prompt() -> None:
    body = "    return math.pi * r * r\n"
    assert join_prefix(PROMPT, body, "area") == f"{PROMPT}{body}\n"
    for tail in (
        "\nprint(area(1))",
        "\ndef other():\n    pass",
        "\nif True:\n    1 / 0",
        "\n# so",
        "\n```\nExplanation",
    ):
        assert join_prefix(PROMPT, body + tail, "area").strip() == (PROMPT + body).strip()


def test_without_a_name_nothing_is_cut_off() -> None:
    program = "n = int(input())\ndef f(x):\n    return x\nprint(f(n))\n"
    assert join_prefix("import sys", program, None) == f"import sys\n\n{program}"
    assert join_prefix("def main():\n", "    pass\n\nmain()\n", None) == "def main():\n    pass\n\nmain()\n"


def test_whole_functions_come_after_the_prompt_and_may_use_what_it_imports() -> None:
    names: dict[str, object] = {}
    exec(join_prefix(PROMPT, "def area(r):\n    return math.floor(r)\n", "area"), names)
    assert names["area"](2.5) == 2  # type: ignore[operator]
    exec(join_prefix("def area(r):\n", "def area(r):\n    return 7\n", "area"), names)
    assert names["area"](0) == 7  # type: ignore[operator]
    exec(join_prefix("class Disc:\n    def area(r):\n", "class Disc:\n    area = 8\n", "Disc"), names)
    assert names["Disc"].area == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "known"),
    [
        ("def f(): pass", True),
        ("async def f(): pass", True),
        ("class f: pass", True),
        ("f = lambda: 1", True),
        ("x = 1\ndef f(): pass", True),
        ("    def f(): pass", False),
        ("def ff(): pass", False),
        ("print(f)", False),
        ("f == 1", False),
    ],
)
def test_what_defines_a_name(code: str, known: bool) -> None:
    assert defines_name(code, "f") is known
