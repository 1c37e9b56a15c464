"""`python -m bench NAME [--json] [options]`: run one benchmark, or list them."""

from __future__ import annotations

import importlib
import sys

from grading_bench.answers import MissingDataError

from bench.harness import BenchError

NAMES = (
    "roof",
    "rollout",
    "sampling",
    "step",
    "train_step",
    "see",
    "prefix",
    "packing",
    "logprob",
    "gradient",
    "before",
    "learn",
    "board",
    "real",
    "curriculum",
    "mixing",
    "verify",
    "int8",
    "overlap",
    "tail",
    "grade",
    "corpus",
    "sandbox",
    "serve",
    "ui",
    "buffer",
    "checkpoint",
    "spec",
    "sync",
    "asynchronous",
    "modes",
    "ranks",
    "context",
    "simulate",
    "simulation",
    "plan",
    "start",
    "architectures",
    "templates",
    "memory",
    "mutation",
    "structure",
    "gpu_check",
)


def main(arguments: list[str]) -> int:
    """Exit codes: 0 done, 1 failed or a peer is missing, 2 wrong usage."""
    only_json = "--json" in arguments
    rest = [argument for argument in arguments if argument != "--json"]
    if not rest or rest[0] not in NAMES:
        print(f"usage: python -m bench NAME [--json] [options]; NAME is one of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    try:
        code = importlib.import_module(f"bench.{rest[0]}").main(rest[1:], only_json)
    except (BenchError, MissingDataError) as error:
        print(f"bench {rest[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
