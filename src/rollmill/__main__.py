"""`python -m rollmill` is `rollmill`."""

import sys

from rollmill.cli import main

sys.exit(main())
