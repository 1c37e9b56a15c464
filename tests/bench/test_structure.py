"""Counting what makes code hard to read, in a package made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import structure

FILES = {
    "types.py": '"""Types."""\nfrom rollmill.trainer import loss\n\nclass Group:\n    """What it is."""\n',
    "trainer/__init__.py": "",
    "trainer/build.py": "from rollmill.trainer import loss\nfrom typing import TYPE_CHECKING\n\n"
    "if TYPE_CHECKING:\n    from rollmill.orchestrator import loop\n",
    "trainer/loss.py": 'from rollmill.trainer import build\n\nLIMIT = 3\n"""How many there are."""\n\n'
    "class Group:\n" + "    x = 0\n" * 250,
    "orchestrator/__init__.py": "",
    "apps/web/server.py": "from rollmill.orchestrator import loop\n\ndef _serve():\n    return loop.step(1)\n",
    "algorithms.py": '"""See `Group`."""\n\n'
    'def size(name, tokens):\n    """Tokens."""\n    return _size(name, tokens)\n'
    "\n\ndef _size(name, tokens):\n"
    "    from rollmill.orchestrator import loop\n    return _three() + loop.step(name)\n\n"
    "def _three():\n    return 3\n",
    "orchestrator/loop.py": "import rollmill.types, rollmill.algorithms\n\ndef step(part):\n"
    '    """Trains once."""\n    return isinstance(part, int) or isinstance(part, str)\n',
}


def test_what_is_counted(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    measures, details = structure.static_measures(tmp_path)
    core = [text for name, text in FILES.items() if not name.startswith("apps/")]
    assert measures["files"] == len(core)
    assert measures["lines"] == sum(text.count("\n") for text in core)
    assert measures["lines_with_applications_and_libraries"] == sum(text.count("\n") for text in FILES.values())
    assert (measures["functions"], measures["median_function"]) == (4, 3)
    assert details["private_helpers_used_once"] == ["algorithms.py: _size", "algorithms.py: _three"]
    assert details["functions_that_only_forward"] == ["algorithms.py: size"]
    assert details["docstrings_that_say_see"] == ["algorithms.py: See `Group`."]
    assert "algorithms.py: Tokens." in details["docstrings_of_four_words"]
    loaded = ["algorithms.py", "orchestrator/__init__.py", "orchestrator/loop.py"]
    assert details["files_that_the_loop_loads"] == sorted([*loaded, *(n for n in FILES if n.startswith(("tr", "ty")))])
    assert details["class_names_used_twice"] == ["Group: trainer/loss.py, types.py"]
    assert sorted(details["docstrings_that_open_with_a_question"]) == [
        "trainer/loss.py: How many there are.",
        "types.py: What it is.",
    ]
    assert details["isinstance_in_the_loop"] == ["orchestrator/loop.py: 2"]
    assert measures["isinstance_in_the_loop"] == 2
    assert details["classes_over_250_lines"] == ["trainer/loss.py: Group, 251"]
    assert details["import_circles"] == [
        "trainer/build.py -> trainer/loss.py",
        "algorithms.py -> orchestrator/loop.py",
    ]
    assert details["packages_in_circles"] == ["algorithms", "orchestrator"]
    assert details["imports_upwards"] == ["algorithms.py -> orchestrator/loop.py", "types.py -> trainer/loss.py"]
    assert measures["files_called_build"] == 1
    assert details["carriers"] == ["Group"]


@pytest.mark.slow
def test_every_measure_with_a_target_is_counted() -> None:
    measures, _ = structure.static_measures(structure.SOURCE)
    by_running = {"step_files", "step_functions", "step_classes", "frames_to_the_step"}
    assert set(structure.TARGETS) - by_running <= set(measures)
