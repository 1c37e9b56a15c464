"""Runs `python -m bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> dict[str, Any]:
    program = (
        "import sys; from pathlib import Path; import bench.report as r; "
        "r.finish.__kwdefaults__['folder'] = Path(sys.argv[1]); "
        "from bench.__main__ import main; sys.exit(main(sys.argv[2:]))"
    )
    folder, *rest = arguments
    done = subprocess.run([sys.executable, "-c", program, folder, *rest], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
