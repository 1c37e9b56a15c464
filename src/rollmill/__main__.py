"""Runs the command line: `python -m rollmill` is the same as `rollmill`."""

import sys

from rollmill.cli import main

sys.exit(main())
