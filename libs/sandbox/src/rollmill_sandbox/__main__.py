"""`python -m rollmill_sandbox check`: test with hostile programs what the sandbox isolates on this machine."""

from __future__ import annotations

import argparse
import sys

from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.isolation_check import print_checks


def main(arguments: list[str]) -> int:
    """Run the command. Exit codes: 0 if a backend is safe, 1 if none is, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m rollmill_sandbox", description=__doc__)
    check = parser.add_subparsers(dest="command", required=True).add_parser(
        "check", help="test every backend with hostile programs and all system calls; takes about half a minute"
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        return 0 if print_checks(parser.parse_args(arguments).json) else 1
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
