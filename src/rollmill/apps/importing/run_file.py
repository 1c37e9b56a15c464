"""Rewrites a run file with former names of keys and workflows. Comments and all other text stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from rollmill.apps.importing.foreign import ImportedRun
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.section import is_named_section, section_tag
from rollmill.config.validation_errors import FORMER_NAMES, section_classes, unwrap_annotation
from rollmill.files import MAX_YAML_BYTES, read_text

KEYS = RunConfig.model_fields.keys() | FORMER_NAMES.keys() | {"include"}
"""Top-level keys of run files."""


def import_run_file(path: Path) -> ImportedRun:
    """Reads a run file, which is valid YAML, and gives its keys and workflows the names of today."""
    text = read_text(path, MAX_YAML_BYTES)
    root = yaml.compose(text, yaml.SafeLoader)
    assert root is not None
    found = {node.start_mark.index: node for node in _former_names(root, RunConfig)}  # once, if anchors repeat it
    run = ImportedRun("rollmill")
    for start, node in sorted(found.items(), reverse=True):
        now = FORMER_NAMES[node.value]
        text = text[:start] + now + text[node.end_mark.index :]
        run.notes.insert(0, f"line {node.start_mark.line + 1}: `{node.value}` is called `{now}` now")
    run.text = text
    return run


def _former_names(node: yaml.Node, annotation: Any) -> Iterator[yaml.ScalarNode]:
    """Yields the keys and names at or below `node`, a value of type `annotation`, that are called otherwise now."""
    sections, inner = section_classes(annotation), unwrap_annotation(annotation)
    if isinstance(node, yaml.ScalarNode):
        if FORMER_NAMES.get(node.value) in [section_tag(each) for each in sections if is_named_section(each)]:
            yield node
    elif get_origin(inner) in (list, dict):
        for entry in node.value:
            yield from _former_names(entry[1] if isinstance(entry, tuple) else entry, get_args(inner)[-1])
    elif sections and isinstance(node, yaml.MappingNode):
        fields = {key: field.annotation for key, field in sections[0].model_fields.items()}
        fields |= {"name": annotation, "stages": list[StageConfig]}
        for key, value in node.value:
            if (now := FORMER_NAMES.get(key.value)) in fields:
                yield key
            yield from _former_names(value, fields.get(now or key.value))
