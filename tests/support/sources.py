"""PYTHONPATH of processes that tests start: the folders of rollmill and of its libraries in this checkout."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(map(str, [ROOT / "src", *sorted(ROOT.glob("libs/*/src"))]))
