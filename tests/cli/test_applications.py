"""The commands and hooks of applications are found by searching their package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OWN = """
COMMANDS = {"greet": "rollmill.apps.greeter.greeting:command"}
HOOKS = {"write_run_report": "rollmill.apps.greeter.greeting:write"}
"""
GREETING = """
from pathlib import Path

def command(name: str) -> None:
    print(f"good morning, {name}")

def write(folder: Path) -> Path:
    (folder / "greeting").write_text("good evening")
    return folder / "greeting"
"""
PROGRAM = """
import sys
from pathlib import Path

import rollmill.apps
rollmill.apps.__path__ = [str(Path.cwd() / "apps")] if sys.argv.pop(1) == "only" else [*rollmill.apps.__path__, "apps"]
{}
"""


def run(folder: Path, which: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = folder / "apps" / "greeter"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(OWN)
    (package / "greeting.py").write_text(GREETING)
    command = [sys.executable, "-c", PROGRAM.format(program), which, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_an_application_adds_its_command(tmp_path: Path) -> None:
    main = "from rollmill.cli import main; sys.exit(main())"
    ended = run(tmp_path, "all", main, "greet", "Ada")
    assert (ended.returncode, ended.stdout) == (0, "good morning, Ada\n"), ended.stderr
    shown = run(tmp_path, "all", main, "--help").stdout
    assert all(name in shown for name in ("greet", "plan", "audit", "run"))


def test_without_the_others_their_commands_are_unknown_and_hooks_are_its_own(tmp_path: Path) -> None:
    ended = run(tmp_path, "only", "from rollmill.cli import main; sys.exit(main())", "plan", "run.yaml")
    assert ended.returncode == 2
    assert "No such command" in ended.stderr
    hooks = """
from rollmill.plugins import call_hook
print(call_hook("write_run_report", Path.cwd()).read_text(), call_hook("notebook_view", 3))
"""
    ended = run(tmp_path, "only", hooks)
    assert ended.stdout == "good evening None\n", ended.stderr


def test_what_is_declared_can_be_imported() -> None:
    from importlib import import_module

    from rollmill.plugins import application_commands

    for place in application_commands().values():
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(module), name)), place
