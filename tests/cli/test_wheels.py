"""What users install: the wheels of rollmill and of its libraries, in an environment that knows no checkout."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NOT_COPIED = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "tests")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Wheels made of a copy of the sources, so that the checkout stays as it is."""
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", "libs"):
        shutil.copytree(ROOT / name, copy / name, ignore=NOT_COPIED)
    projects = [str(path.parent) for path in sorted(copy.glob("libs/*/pyproject.toml"))] + [str(copy)]
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(made)]
    run([sys.executable, "-m", "pip", "wheel", *options, *projects], copy)
    found = sorted(made.glob("*.whl"))
    assert len(found) == len(projects)
    return found


def test_every_file_is_in_one_wheel(wheels: list[Path]) -> None:
    packed = [name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()]
    assert len(packed) == len(set(packed))
    sources = {
        path.relative_to(source).as_posix()
        for source in (ROOT / "src", *ROOT.glob("libs/*/src"))
        for path in source.rglob("*")
        if path.is_file() and not {"__pycache__"} & set(path.parts) and "egg-info" not in str(path)
    }
    assert sources - set(packed) == set()


def test_the_quickstart_from_the_wheels_repairs_the_model(wheels: list[Path], tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], tmp_path)
    python = str(environment / "bin/python")
    install = ["install", "--no-deps", "--no-index", "--quiet", *map(str, wheels)]
    run([sys.executable, "-m", "pip", "--python", python, *install], tmp_path)
    [packages] = environment.glob("lib/python*/site-packages")
    # Other packages are those of this environment. A folder in a .pth file has its own .pth files left alone, so that
    # nothing leads to the checkout.
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    for name in ("rollmill", *(path.parent.name for path in ROOT.glob("libs/*/src/*/__init__.py"))):
        assert run([python, "-c", f"import {name}; print({name}.__file__)"], tmp_path).startswith(str(environment))
    printed = run([str(environment / "bin/rollmill"), "quickstart", "--out", str(tmp_path / "run"), "--json"], tmp_path)
    summary = json.loads(printed)
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= 0.95
    assert (tmp_path / "run/report.html").is_file()


def run(command: list[str], folder: Path) -> str:
    """Run a command that knows nothing of the checkout. Returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
