"""Validation of JSON Schemas without external references. Used by grader processes and when a reward is built.

jsonschema is imported with the first schema. Nothing is fetched: a reference may only point inside its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from rollmill.errors import ConfigError
from rollmill.files import parse_strict_json

INSTALL_HINT = "pip install 'rollmill[schema]'"
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def check_schema(schema_text: str, reward: str) -> None:
    """Raise ConfigError if a reward's schema cannot be used: jsonschema is missing, or `build_validator` rejects it."""
    try:
        build_validator(schema_text)
    except ModuleNotFoundError as error:
        raise ConfigError(f"reward `{reward}`: JSON Schemas need jsonschema: {INSTALL_HINT}") from error
    except ValueError as error:
        raise ConfigError(f"reward `{reward}`: {error}") from error


def validate_texts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return one letter per (schema, text): 1 valid, 0 invalid, x if the text is not JSON.

    Raises ValueError for an invalid schema.
    """
    return "".join(_checked(schema_text, text) for schema_text, text in pairs)


def _checked(schema_text: str, text: str) -> str:
    rules = build_validator(schema_text)
    try:
        value = parse_strict_json(text)
    except ValueError:
        return "x"
    try:
        return "1" if rules.is_valid(value) else "0"
    except (RecursionError, ArithmeticError):  # a schema that refers to itself forever; 1e400 as a multiple of .1
        return "0"


@lru_cache(2048)
def build_validator(schema_text: str) -> Any:
    """Build the validator of a schema (given as JSON). Raises ValueError, or ModuleNotFoundError."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = parse_strict_json(schema_text)
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON Schema is an object, not {type(schema).__name__}")
    _check_references(schema)
    _check_patterns(schema)
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"not a JSON Schema: {error.json_path}: {error.message:.200}") from error
    return kind(schema, registry=Registry())


def _check_references(schema: dict[str, Any]) -> None:
    """Raise ValueError if a reference points outside of the schema, or nowhere."""
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resource: Resource[Any] = Resource.from_contents(schema, default_specification=DRAFT202012)
    resolver = Registry().with_resource("", resource).resolver()
    references = [part[key] for part in _objects(schema) for key in _REFERENCES if isinstance(part.get(key), str)]
    for reference in references:
        if not reference.startswith("#"):
            raise ValueError(f"the JSON Schema refers to {reference!r:.100}; write it inside the schema, under $defs")
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise ValueError(f"the JSON Schema refers to {reference!r:.100}, which it lacks; add it") from error


def _check_patterns(schema: dict[str, Any]) -> None:
    """Raise ValueError for a pattern that is not a regular expression."""
    for part in _objects(schema):
        own_pattern, of_names = part.get("pattern"), part.get("patternProperties")
        for pattern in [own_pattern, *(of_names if isinstance(of_names, dict) else [])]:
            try:
                re.compile(pattern if isinstance(pattern, str) else "")
            except re.error as error:
                raise ValueError(f"the JSON Schema has the pattern {pattern!r:.100}: {error}; correct it") from error


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object inside a schema, including those in examples and constants."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def schema_text(schema: Any) -> str:
    """Return a schema as the text that `validate_texts` takes."""
    return schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
