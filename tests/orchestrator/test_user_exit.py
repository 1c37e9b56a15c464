"""A user's code that ends the process ends the run with an error that names it, and exit code 1 or 2, never 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks
from support.tiny import tiny_run

RL: dict[str, Any] = {"stages": None, "steps": 2, "algorithm": {"name": "grpo"}, "evaluation": None}

PLUGINS = {
    "plugin": "import sys\nsys.exit('no licence')\n",
    "taskset": "import sys\ndef rows():\n    yield {'prompt': 'a', 'answer': 'b'}\n    sys.exit('no licence')\n",
    "reward": "import rollmill, sys\n@rollmill.reward\ndef mine(task, completion):\n    sys.exit('no licence')\n",
    "async reward": (
        "import rollmill, sys\n@rollmill.reward\nasync def mine(task, completion):\n    sys.exit('no licence')\n"
    ),
    "operator": "import rollmill, sys\n@rollmill.operator\ndef mine(batch):\n    sys.exit('no licence')\n",
    "workflow": "import rollmill, sys\n@rollmill.workflow\nasync def mine(task, policy):\n    sys.exit('no licence')\n",
    "loss": "import rollmill, sys\n@rollmill.loss\ndef mine(batch):\n    sys.exit('no licence')\n",
    "advantage": "import rollmill, sys\n@rollmill.advantage\ndef mine(batch):\n    sys.exit('no licence')\n",
    "sampler": "import rollmill, sys\n@rollmill.sampler\ndef mine(tasks):\n    sys.exit('no licence')\n",
    "quietly": "import rollmill, sys\n@rollmill.advantage\ndef mine(batch):\n    sys.exit()\n",
}
SECTIONS: dict[str, dict[str, Any]] = {
    "plugin": {},
    "taskset": {"taskset": {"path": None, "function": "user.py:rows", "options": None}},
    "reward": {"rewards": [{"name": "python", "function": "mine"}]},
    "async reward": {"rewards": [{"name": "python", "function": "mine"}]},
    "operator": {"pipeline": [{"name": "mine"}]},
    "workflow": {"workflow": {"name": "mine"}, "rewards": None},
    "loss": {"algorithm": {"name": "grpo", "loss": {"name": "mine"}}},
    "advantage": {"algorithm": {"name": "grpo", "advantage": {"name": "mine"}}},
    "sampler": {"taskset": {"sampler": {"name": "mine"}}},
    "quietly": {"algorithm": {"name": "grpo", "advantage": {"name": "mine"}}},
}


@pytest.mark.parametrize("where", PLUGINS)
def test_user_code_that_exits_is_an_error_that_names_it(server: Forks, tmp_path: Path, where: str) -> None:
    (tmp_path / "user.py").write_text(PLUGINS[where])
    plugins = [] if where == "taskset" else ["user.py"]
    tiny_run(tmp_path, **RL | {"plugins": plugins} | SECTIONS[where])
    ended = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert ended.code == (2 if where == "plugin" else 1), ended.out + ended.err
    assert "no licence" in ended.err or where == "quietly"
    assert "Traceback" not in ended.err
    line = PLUGINS[where].count("\n")
    named = where in ("reward", "async reward")  # a function in another process or thread: named without its line
    assert ("`mine`" if named else f"user.py:{line}") in ended.err
