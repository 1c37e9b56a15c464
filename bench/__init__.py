"""Benchmarks: one file per question, each against a named peer in the same run (`python -m bench NAME`).

Those of the libraries can be imported, too: `grading_bench` of libs/grading/bench.
"""

import sys
from pathlib import Path

sys.path += [str(folder) for folder in sorted((Path(__file__).resolve().parents[1] / "libs").glob("*/bench"))]
