"""`rollmill merge`: average checkpoints into a new checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from rollmill.errors import CheckpointError, ConfigError

METHODS = ("linear", "slerp")
DTYPES = ("fp32", "bf16", "fp16")


def command(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(metavar="CHECKPOINT...", help="Hugging Face folders, or run directories (newest checkpoint)."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Output folder.")],
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="W,W,...", help="One number per checkpoint (default: equal).")
    ] = None,
    method: Annotated[str, typer.Option("--method", help="`linear`, or `slerp` for two checkpoints.")] = "linear",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="`fp32`, `bf16` or `fp16` (default: as in the first checkpoint).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Average the weights of checkpoints; everything else is copied from the first."""
    if len(checkpoints) < 2:
        raise ConfigError(f"one checkpoint ({checkpoints[0]}) has no average; give two or more")
    if method not in METHODS:
        raise ConfigError(f"--method is {' or '.join(METHODS)}, not {method!r}")
    if method == "slerp" and len(checkpoints) != 2:
        raise ConfigError(f"--method slerp takes two checkpoints, found {len(checkpoints)}; use linear")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is {', '.join(DTYPES)}, not {dtype!r}")
    shares = parse_weights(",".join("1" * len(checkpoints)) if weights is None else weights, len(checkpoints))
    from rollmill.models.merge import merge_checkpoints
    from rollmill.orchestrator.manifest import require_whole

    folders = [checkpoint_folder(path) for path in checkpoints]
    for folder in folders:
        require_whole(folder)
    summary = merge_checkpoints(folders, out, shares, method=method, dtype=dtype)
    if as_json:
        print(json.dumps(summary))
        return
    terms = ", ".join(f"{share:.4g} x {folder}" for share, folder in zip(shares, folders, strict=True))
    size = f"{summary['parameters'] / 1e6:.2f}M parameters, {', '.join(summary['dtypes'])}"
    print(f"wrote {out} ({size}): {method} average of {terms}")


def parse_weights(text: str, count: int) -> list[float]:
    """Parse numbers such as `2,1`, scaled to sum to 1.

    Raises ConfigError unless they are `count` finite numbers with a sum other than 0.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--weights {text}: expected numbers with commas between them, such as 0.5,0.5") from error
    if len(weights) != count:
        raise ConfigError(f"--weights {text}: {len(weights)} weights for {count} checkpoints; give one per checkpoint")
    if not all(map(math.isfinite, weights)):
        raise ConfigError(f"--weights {text}: not all are finite; give plain numbers, such as 0.5,0.5")
    total = math.fsum(weights)
    if abs(total) <= 1e-9 * math.fsum(map(abs, weights)):
        raise ConfigError(f"--weights {text}: the sum is 0, so they cannot be scaled to sum to 1; change one of them")
    return [weight / total for weight in weights]


def checkpoint_folder(path: Path) -> Path:
    """Return the newest checkpoint of a run directory; return any other path unchanged.

    Raises CheckpointError if the run has no checkpoint, or a folder is not readable.
    """
    try:
        if not (path / "config.yaml").is_file():
            return path
        from rollmill.orchestrator.checkpoint import Checkpoints

        checkpoints = Checkpoints(path)
        steps = checkpoints.steps()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fix its permissions") from error
    if not steps:
        raise CheckpointError(f"{path} is a run without checkpoints; resume it, or give another folder")
    return checkpoints.path(steps[-1])
