"""Strict base of every section (unknown keys are errors), names used in paths, and components chosen by name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    WrapValidator,
    create_model,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from rollmill.errors import ConfigError

_LONGEST_NAME = 100
"""UTF-8 bytes. Folder and file names derived from a name must stay below 255 bytes."""


class Section(BaseModel):
    """Base of configuration sections."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    #: Import path `module:name` of the class or function that builds the component of the section. It is imported when
    #: a run uses it, since it may need torch. It takes the section, and what its kind of component gets besides. A
    #: reward has none: it does the work itself.
    implementation: ClassVar[str] = ""
    #: Extra and module of an optional library that every use of the section needs.
    needs_extra: ClassVar[tuple[str, str] | None] = None

    def extras(self) -> dict[str, tuple[str, str]]:
        """Returns the optional libraries that the section needs with its values, as extra and module, by the key that
        needs them; `""` is the section itself."""
        return {} if self.needs_extra is None else {"": self.needs_extra}

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect because of the section's other keys, each with the reason."""
        return {}

    def conflicts(self) -> dict[str, str]:
        """Returns the keys that cannot have their value beside the section's other keys, each with the problem and a
        remedy. A key of a section inside it is written `kl.where`."""
        return {}

    def walk(self, at: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], Section]]:
        """Yields this section and those inside it, each with its key path, which begins with `at`."""
        yield at, self
        for key in type(self).model_fields:
            value = getattr(self, key)
            inside = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
            for path, each in [((*at, key), value), *(((*at, key, index), each) for index, each in inside)]:
                if isinstance(each, Section):
                    yield from each.walk(path)


def _folder_name(value: str) -> str:
    """Checks a name that is one part of a path: spaces and all scripts are allowed."""
    shown = f"found {value!r:.60}"
    if not value.strip() or value in (".", ".."):
        raise ValueError(f"expected a name, {shown}; it names a folder, too")
    if "/" in value or "\\" in value:
        raise ValueError(f"expected a name without `/` and `\\`, {shown}; `--out` says in which folder a run is")
    if not value.isprintable() or value != value.strip():
        raise ValueError(f"expected a name without control characters, and without space around it, {shown}")
    return _short(value)


def _plain_name(value: str) -> str:
    """Checks a name of letters, digits, `.`, `_` and `-`."""
    if re.fullmatch(r"[\w.-]+", value) is None or value in (".", ".."):
        raise ValueError(f"expected letters, digits, `.`, `_` and `-`, found `{value!s:.60}`")
    return _short(value)


def _endpoint(value: str) -> str:
    if not value.isprintable() or re.search(r"\s", value):
        raise ValueError(f"expected a URL without spaces and control characters, found {value!r:.80}")
    return value


def _short(value: str) -> str:
    if (length := len(value.encode())) > _LONGEST_NAME:
        raise ValueError(f"expected a name of at most {_LONGEST_NAME} bytes, found {length}: `{value:.30}...`")
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]
"""Base URL of a server."""
FolderName = Annotated[str, AfterValidator(_folder_name)]
"""Name of a run or a stage: one part of a path."""
PlainName = Annotated[str, AfterValidator(_plain_name)]
"""Name that is also part of metric names and ids."""


# Components chosen by name, built in or registered by a user's file


class NamedSection(Section):
    """A section chosen by its `name`; the other keys are keyword arguments of the function with that name."""

    #: Function of a registered component; None for built-in ones.
    function: ClassVar[Callable[..., Any] | None] = None
    name: str

    def arguments(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in type(self).model_fields if key != "name"}


SectionT = TypeVar("SectionT", bound=Section)

_registered: dict[tuple[str, str], type[Section]] = {}


def register_section(kind: str, name: str, section: type[Section]) -> None:
    """Registers `name` as a component of `kind`, replacing an earlier one of the same name.

    The kind is the run-file key of such components, such as advantage, loss, algorithm or pipeline.
    """
    _registered[kind, name] = section


def registered_sections(kind: str) -> list[type[Section]]:
    """Returns the sections registered by users' files."""
    return [section for (of, _), section in _registered.items() if of == kind]


def find_sections(package: str, path: Iterable[str], base: type[SectionT]) -> list[type[SectionT]]:
    """Returns the sections with a `name` of their own that the modules of a package define: by module, in their order.

    A new file in the package needs no list.

    Args:
        package, path: `__name__` and `__path__` of the package.
    """
    modules = [f"{package}.{each.name}" for each in pkgutil.iter_modules(path)]
    for module in modules:
        importlib.import_module(module)
    return [section for module in sorted(modules) for section in module_sections(module, base)]


def module_sections(module: str, base: type[SectionT]) -> list[type[SectionT]]:
    """Returns the sections with a `name` of their own that a module has defined so far, in order."""
    own = [each for each in vars(sys.modules[module]).values() if isinstance(each, type) and each.__module__ == module]
    sections = [each for each in own if issubclass(each, base) and "name" in each.__annotations__]
    return [each for each in sections if is_named_section(each)]


def is_named_section(section: type[Section]) -> bool:
    """Returns whether a section has a fixed `name`."""
    field = section.model_fields.get("name")
    return field is not None and get_origin(field.annotation) is Literal


def section_tag(section: type[Section]) -> str:
    """Returns the `name` that selects a section class."""
    tag: str = get_args(section.model_fields["name"].annotation)[0]
    return tag


def section_union(sections: Sequence[type[Section]], kind: str | None = None) -> Any:
    """Returns the annotation of a section that is one of several, chosen by `name`; the name alone will do.

    Args:
        kind: names that users' files register as this kind are accepted, too.
    """
    union: Any = reduce(or_, sections)
    if len(sections) > 1:
        union = Annotated[union, Field(discriminator="name")]
    if kind is None:
        return union
    registered = WrapValidator(RegisteredUnion(kind))
    return Annotated[SerializeAsAny[union], registered, BeforeValidator(expand_name)]  # type: ignore[misc]


def component_sections(package: str, base: type[SectionT]) -> list[type[SectionT]]:
    """Returns the components in a package of a layer above, which is found by its name."""
    return find_sections(package, importlib.import_module(package).__path__, base)


def section_from_signature(target: Callable[..., Any], base: type[NamedSection]) -> type[NamedSection]:
    """Builds a section from the keyword-only parameters of a function, or of a class's `__init__`.

    Raises ConfigError naming file, line and parameter if a parameter lacks a type or a default, has a default of
    another type, or has the name of a key that every section has.
    """
    name, where, hints, fields = target.__name__, source_location(target), _hints(target), {}
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if parameter.default is inspect.Parameter.empty or parameter.name not in hints:
            text = f"{where}: {name}: the option `{parameter.name}` needs a type and a default, such as"
            raise ConfigError(f"{text} `{parameter.name}: float = 1.0`")
        if hasattr(base, parameter.name) or parameter.name in base.model_fields:
            raise ConfigError(f"{where}: {name}: an option cannot be called `{parameter.name}`; give it another name")
        fields[parameter.name] = (hints[parameter.name], parameter.default)
    section = create_model(  # type: ignore[call-overload]
        name,
        __base__=base,
        __doc__=inspect.getdoc(target) or f"`{name}`.",
        name=(Literal[name], name),
        **fields,
    )
    section.function = staticmethod(target)
    made: type[NamedSection] = section
    try:
        made.model_validate({key: field.default for key, field in made.model_fields.items()})
    except ValidationError as error:
        key, text = error.errors()[0]["loc"][0], error.errors()[0]["msg"]
        raise ConfigError(f"{where}: {name}: the default of the option `{key}` is wrong: {text}") from error
    return made


def source_location(target: Callable[..., Any]) -> str:
    """Returns FILE:LINE of a function or a class."""
    if not inspect.isclass(target):
        code = inspect.unwrap(target).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):  # a class made by exec: use its first method
        codes = [each.__code__ for each in vars(target).values() if inspect.isfunction(each)]
        return f"{codes[0].co_filename}:{codes[0].co_firstlineno}" if codes else target.__module__


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the parameter types of a function, or of a class's `__init__`."""
    function = target.__init__ if inspect.isclass(target) else inspect.unwrap(target)
    try:
        return get_type_hints(function)
    except NameError as error:
        raise ConfigError(
            f"{source_location(target)}: {target.__name__}: a type is not known: {error}; import it"
        ) from error


class RegisteredUnion:
    """Annotation of a union of sections discriminated by `name`: names registered by users are accepted, too."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, value: Any, handler: Callable[[Any], Any]) -> Any:
        """Validates `value` as the registered section that it names, else with `handler`."""
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        section = _registered.get((self.kind, name)) if isinstance(name, str) else None
        if section is None or isinstance(value, section):
            return handler(value) if section is None else value
        try:
            return section.model_validate(value)
        except ValidationError as error:
            inside = [_inside(str(name), each) for each in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(self.kind, inside) from None


def _inside(name: str, details: Any) -> InitErrorDetails:
    """Locates an error of a registered section under its name, like those of built-in sections."""
    kind: Any = details["type"]
    if kind == "value_error":
        kind = PydanticCustomError("value_error", "{error}", {"error": str(details["ctx"]["error"])})
    made = InitErrorDetails(type=kind, loc=(name, *details["loc"]), input=details["input"])
    if "ctx" in details and details["type"] != "value_error":
        made["ctx"] = details["ctx"]
    return made


def expand_name(value: Any) -> Any:
    """Expands a name alone to a section without other keys."""
    return {"name": value} if isinstance(value, str) else value


def merge_with_default(default: Any, value: Any) -> Any:
    """Merges a component of a run file (`NAME` alone, or a section) over its default. Keys that are not set keep the
    default's values if the component is the same."""
    value = expand_name(value)
    if not isinstance(value, Mapping) or not isinstance(default, Section):
        return value
    named = getattr(default, "name", None)
    return {**default.model_dump(), **value} if value.get("name", named) == named else value
