"""The program that Ray starts for each of its workers, instead of its own one: it has the fork server start the worker,
and ends with it.

    run as: python ray_worker.py SCRIPT OPTIONS...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # Ray starts this file

from support.forks import ForkedPopen

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="

if __name__ == "__main__":
    own = {each for each in sys.argv[1:] if each.startswith((_CONTEXT, _LANGUAGE))}
    for each in own:
        if each.startswith(_CONTEXT):
            os.environ.update(json.loads(each.removeprefix(_CONTEXT)).get("env_vars") or {})
    sys.exit(ForkedPopen([sys.executable, *(each for each in sys.argv[1:] if each not in own)]).wait())
