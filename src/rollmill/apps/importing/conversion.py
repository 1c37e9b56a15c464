"""Turns configuration files of TRL, verl and Trinity-RFT, and earlier run files, into run files of today, with a list
of what has no counterpart."""

from __future__ import annotations

from pathlib import Path

from rollmill.apps.importing.foreign import ForeignSettings, ImportedRun, read_foreign
from rollmill.apps.importing.run_file import KEYS, import_run_file
from rollmill.apps.importing.trinity import import_trinity
from rollmill.apps.importing.trl import KINDS, import_trl, kind_of
from rollmill.apps.importing.verl import import_verl
from rollmill.config.yaml_file import write_yaml
from rollmill.errors import ConfigError

SOURCES = (*(f"trl-{kind}" for kind in KINDS), "verl", "trinity", "rollmill")


def import_file(
    path: Path, source: str | None = None, *, processes: int | None = None, rows: int | None = None
) -> ImportedRun:
    """Reads a configuration file of another framework, or a run file with former names.

    Args:
        source: one of SOURCES; None: found by the file's keys.
        processes: number of processes that TRL trains with; None: as the file says, or 1.
        rows: number of rows of the data set, to turn epochs into steps.

    Raises ConfigError if the file is none of these, or one of its values is wrong.
    """
    settings = read_foreign(path)
    found = source or source_of(settings)
    if found is None:
        raise ConfigError(
            f"{path}: its keys are not those of one framework; say which it is by --from ({', '.join(SOURCES)})"
        )
    if found == "rollmill":
        return import_run_file(path)
    if found == "verl":
        return import_verl(settings, rows=rows)
    if found == "trinity":
        return import_trinity(settings, rows=rows)
    return import_trl(settings, found.removeprefix("trl-"), processes=processes, rows=rows)


def source_of(settings: ForeignSettings) -> str | None:
    """Returns the framework whose keys these are; None if they do not say so."""
    if "algorithm.algorithm_type" in settings:
        return "trinity"
    if any(key in settings for key in ("actor_rollout_ref.model.path", "algorithm.adv_estimator", "data.train_files")):
        return "verl"
    if (kind := kind_of(settings)) is not None:
        return f"trl-{kind}"
    return "rollmill" if settings.top_level <= KEYS else None


def to_run_file(run: ImportedRun, source: Path) -> str:
    """Writes the run file, with what was lost and noted as comments above it, if it was not one before."""
    if run.text:
        return run.text
    lines = [f"# Imported from {source.name} ({run.framework}) by `rollmill import-config`."]
    if run.lost:
        lines += ["# Without a counterpart:", *(f"#   {key}: {text}" for key, text in run.lost.items())]
    if run.notes:
        lines += ["# To know:", *(f"#   {note}" for note in run.notes)]
    return "\n".join(lines) + "\n\n" + write_yaml(run.sections)
