"""Importing users' code by name, and registered rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollmill
from rollmill.errors import ConfigError
from rollmill.registry import find_reward, import_file, import_object


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_plugin.py").write_text("BONUS = 2\n", encoding="utf-8")
    file = tmp_path / "plugin.py"
    file.write_text(
        "import rollmill\nfrom helper_of_plugin import BONUS\nRUNS = []\nRUNS.append(1)\n\n"
        "@rollmill.reward\ndef plugin_reward(task, completion):\n    return float(BONUS)\n",
        encoding="utf-8",
    )
    return file


def test_function_of_a_file(plugin: Path) -> None:
    assert import_object(f"{plugin}:plugin_reward")(None, None) == 2.0
    assert find_reward(f"{plugin}:plugin_reward") is import_object(f"{plugin}:plugin_reward")


def test_file_runs_once(plugin: Path) -> None:
    assert import_file(plugin) is import_file(plugin)
    assert import_object(f"{plugin}:RUNS") == [1]


def test_function_of_a_module() -> None:
    assert import_object("os.path:basename")("a/b") == "b"


def test_plugin_registers_a_reward(plugin: Path) -> None:
    import_file(plugin)
    assert find_reward("plugin_reward")(None, None) == 2.0
    with pytest.raises(ConfigError, match="no reward `plugin_rewards`; did you mean `plugin_reward`"):
        find_reward("plugin_rewards")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(:\n", r"code\.py:1: syntax error"),
        ("\nimport nothing_like_this\n", r"code\.py:2: importing it failed: ModuleNotFoundError"),
        ("x = 1\n\nx / 0\n", r"code\.py:3: importing it failed: ZeroDivisionError"),
        ("def scoer(task, completion): ...\n", "defines no `score`; did you mean `scoer`"),
        ("score = 3\n", "score is a int, not a function"),
    ],
)
def test_wrong_file(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected):
        find_reward(f"{tmp_path / 'code.py'}:score")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("nowhere.py:f", "nowhere.py: no such file"),
        ("nothing_like_this:f", "module `nothing_like_this` cannot be imported; install it"),
        ("os.path:basenam", "os.path defines no `basenam`; did you mean `basename`"),
        ("os.path", "expected FILE.py:NAME or package.module:NAME"),
        (":f", "expected FILE.py:NAME or package.module:NAME"),
    ],
)
def test_wrong_name(spec: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        import_object(spec)


def test_failed_import_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        import_file(file)
    file.write_text("value = 1000\n", encoding="utf-8")
    assert import_object(f"{file}:value") == 1000


def test_public_names() -> None:
    assert rollmill.reward.__module__ == "rollmill.registry"
    with pytest.raises(AttributeError, match="no attribute 'rewards_'"):
        _ = rollmill.rewards_
