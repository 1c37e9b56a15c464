"""Docstrings of the keys of sections, read from their source when somebody asks for them.

pydantic would read them while the classes are made, which is a quarter of the time that all sections take to import.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from rollmill.config.section import Section
from rollmill.python_source import parse_python

_done: set[type[Section]] = set()


def document_sections(base: type[Section] = Section) -> None:
    """Set the `description` of the fields of all sections that are imported."""
    document_section(base)
    for section in base.__subclasses__():
        document_sections(section)


def document_section(section: type[Section]) -> None:
    """Set the `description` of the fields of a section, and of those that it inherits. A field that a section declares
    again, without a docstring, has none."""
    if section in _done:
        return
    _done.add(section)
    bases = [base for base in section.__mro__[1:] if issubclass(base, Section)]
    for base in bases:
        document_section(base)
    own = _attribute_docs(section.__module__).get(section.__name__, {})
    for name, field in section.model_fields.items():
        if field.description is not None:
            continue
        if name in vars(section).get("__annotations__", {}):
            field.description = own.get(name)
        else:
            inherited = (base.model_fields[name].description for base in bases if name in base.model_fields)
            field.description = next(inherited, None)


@cache
def _attribute_docs(module: str) -> dict[str, dict[str, str]]:
    """Docstrings of the attributes of a module's classes, by class and name; empty without its source."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    classes = [node for node in parse_python(source).body if isinstance(node, ast.ClassDef)]
    return {each.name: dict(_docstrings(each)) for each in classes}


def _docstrings(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Attributes of a class with the text that follows each."""
    for statement, following in pairwise(node.body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
