"""Stage 3: what C cannot say, read from ``ggml/annotations/*.toml``.

``rules.toml`` gives defaults by name or type, ``callbacks.toml`` the function-pointer types, every
other file one table per function. An unknown key, function or parameter, and a rule or table that
is of no use, are errors that name file and line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import ir
from .prefix import BuildError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GUARDS = ("throw", "compute", "nothrow")
LIFETIMES = ("call", "replaced", "result", "forever")
THREADS = ("caller", "any")
ERRORS = ("GGMLError", "NotSupportedError", "GGUFError", "MemoryError")

_LISTS = ("nullable", "out", "unique", "writes", "require", "op_copies")
_TABLES = ("arrays", "min_length", "buffers", "callbacks", "defaults", "op_defaults", "holds",
           "sized")  # fmt: skip
_STRINGS = (
    "guard", "ownership", "free", "null", "reason", "null_error", "skip", "override", "note",
    "threads", "before", "after", "undo", "scope", "instead",
)  # fmt: skip
_BOOLS = ("success", "releases", "frees_inside", "op")
KEYS = frozenset((*_LISTS, *_TABLES, *_STRINGS, *_BOOLS))
_OF_PARAMETERS = frozenset(
    ("holds", "nullable", "out", "unique", "writes", "arrays", "min_length", "buffers", "callbacks",
     "defaults", "op_defaults", "op_copies", "sized")
)  # fmt: skip
CALLBACK_KEYS = frozenset(
    ("threads", "on_error", "gone", "in_kernel", "between_steps", "used", "note", "after", "scope")
)


class AnnotationError(BuildError):
    """A wrong annotation; the message starts with file and line."""


@dataclass(frozen=True)
class Place:
    """Where an annotation stands."""

    file: str
    line: int

    def error(self, message: str) -> AnnotationError:
        """The error `message` about what stands here."""
        return AnnotationError(f"{self.file}:{self.line}: {message}")


@dataclass(frozen=True)
class Rule:
    """Defaults for the functions that it matches."""

    place: Place
    name: str | None
    returns: str | None
    first: str | None
    set: Mapping[str, Any]

    def matches(self, api: ir.Api, function: ir.Function) -> bool:
        """Whether the rule is for `function`."""
        if self.name is not None and not fnmatchcase(function.name, self.name):
            return False
        if self.returns is not None and ir.declare(function.returns) != self.returns:
            return False
        if self.first is not None:
            return bool(function.params) and ir.declare(function.params[0].type) == self.first
        return True


@dataclass(frozen=True)
class Annotations:
    """All that the folder says."""

    rules: tuple[Rule, ...] = ()
    functions: Mapping[str, tuple[Place, Mapping[str, Any]]] = field(default_factory=dict)
    callbacks: Mapping[str, tuple[Place, Mapping[str, Any]]] = field(default_factory=dict)

    def of(self, api: ir.Api, function: ir.Function) -> dict[str, Any]:
        """What holds for `function`: the rules in their order, then its own table."""
        merged: dict[str, Any] = {"guard": "throw"}
        for rule in self.rules:
            if rule.matches(api, function):
                merged.update(rule.set)
        merged.update(self.functions.get(function.name, (None, {}))[1])
        return merged

    def place(self, function: ir.Function) -> Place:
        """Where `function` is annotated; where the header declares it if it is not."""
        declared = Place(function.where.header, function.where.line)
        return self.functions.get(function.name, (declared, {}))[0]


def load(folder: Path) -> Annotations:
    """Read the folder; AnnotationError for what is no annotation at all."""
    rules: list[Rule] = []
    functions: dict[str, tuple[Place, Mapping[str, Any]]] = {}
    callbacks: dict[str, tuple[Place, Mapping[str, Any]]] = {}
    for path in sorted(folder.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"line (\d+)", str(error))
            raise Place(path.name, int(found.group(1)) if found else 1).error(str(error)) from None
        if path.name == "rules.toml":
            rules = list(_rules(path.name, text, data))
            continue
        target, keys = (
            (callbacks, CALLBACK_KEYS) if path.name == "callbacks.toml" else (functions, KEYS)
        )
        for name, table in data.items():
            place = Place(path.name, _line(text, rf"^\[\s*{re.escape(name)}\s*\]"))
            if not isinstance(table, dict):
                raise place.error(f"{name!r} is no table")
            _check_keys(table, keys, place, text, name)
            if name in target:
                raise place.error(f"{name} is annotated twice, first in {target[name][0].file}")
            target[name] = (place, table)
    return Annotations(tuple(rules), functions, callbacks)


def check_use(
    annotations: Annotations, api: ir.Api, idle: Collection[str] = ()
) -> Iterator[AnnotationError]:
    """What is said of things that are not there, or never applies.

    `idle`: the files of headers that this build does not bind.
    """
    for name, (place, table) in annotations.functions.items():
        if place.file in idle:
            continue
        function = api.functions.get(name)
        if function is None:
            yield place.error(f"no header declares a function {name}")
            continue
        yield from _check_params(place, function, table)
    for name, (place, _) in annotations.callbacks.items():
        if name not in api.typedefs or api.function_pointer(ir.Named(name)) is None:
            yield place.error(f"no header has a function-pointer type {name}")
    for rule in annotations.rules:
        if not any(rule.matches(api, function) for function in api.functions.values()):
            yield rule.place.error("this rule matches no function")


def _rules(file: str, text: str, data: Mapping[str, Any]) -> Iterator[Rule]:
    lines = [n for n, line in enumerate(text.split("\n"), 1) if line.strip() == "[[rule]]"]
    for line, table in zip(lines, data.get("rule", []), strict=True):
        place = Place(file, line)
        unknown = set(table) - {"name", "returns", "first", "set"}
        if unknown:
            raise place.error(f"unknown key {', '.join(sorted(unknown))} in a rule")
        if "set" not in table:
            raise place.error("a rule without `set`")
        _check_keys(table["set"], KEYS - _OF_PARAMETERS, place, "", "")
        yield Rule(place, table.get("name"), table.get("returns"), table.get("first"), table["set"])
    unknown = set(data) - {"rule"}
    if unknown:
        name = sorted(unknown)[0]
        raise Place(file, _line(text, rf"^\[*\s*{name}")).error(f"unknown table {name}")


def _check_keys(
    table: Mapping[str, Any], keys: frozenset[str], place: Place, text: str, name: str
) -> None:
    for key, value in table.items():
        start = text.split("\n", place.line - 1)[-1] if text else ""
        at = place
        if start:
            inner = _line(start, rf"^[ \t]*{re.escape(key)}[ \t]*=")
            at = Place(place.file, place.line + inner - 1)
        if key not in keys:
            raise at.error(f"unknown key {key!r}; known are {', '.join(sorted(keys))}")
        wanted: type | None = None
        if key in _LISTS:
            wanted = list
        elif key in _TABLES:
            wanted = dict
        elif key in _BOOLS or key in ("used", "gone", "in_kernel", "between_steps"):
            wanted = bool
        elif key in _STRINGS or key == "on_error":
            wanted = str
        if wanted and not isinstance(value, wanted):
            raise at.error(f"{key} must be a {wanted.__name__}, not {value!r}")
        if key == "guard" and value not in GUARDS:
            raise at.error(f"guard {value!r} is none of {', '.join(GUARDS)}")
        if key == "null" and value not in ("error", "none"):
            raise at.error(f"null {value!r} is neither 'error' nor 'none'")
        if key == "null_error" and value not in ERRORS:
            raise at.error(f"null_error {value!r} is none of {', '.join(ERRORS)}")
        if key == "ownership" and value.partition(":")[0] not in (
            "owned", "borrowed", "static", "caller",
        ):  # fmt: skip
            raise at.error(f"ownership {value!r} is not owned, borrowed:<param>, static or caller")
        if key == "threads" and keys is CALLBACK_KEYS and value not in THREADS:
            raise at.error(f"threads {value!r} is none of {', '.join(THREADS)}")
        if key == "callbacks":
            for callback in value.values():
                kind = str(callback.get("lifetime", "")).partition(":")[0]
                if kind not in (*LIFETIMES, "object"):
                    raise at.error(f"lifetime {callback.get('lifetime')!r} is not known")


def _check_params(
    place: Place, function: ir.Function, table: Mapping[str, Any]
) -> Iterator[AnnotationError]:
    params = {param.name for param in function.params}
    named: list[str] = []
    for key in _OF_PARAMETERS & set(table):
        named += [name for name in table[key] if not _is_field(function, name)]
    for key in ("arrays", "buffers", "holds"):
        named += [v for v in table.get(key, {}).values() if isinstance(v, str)]
    for callback in table.get("callbacks", {}).values():
        named += [callback["userdata"]] if "userdata" in callback else []
        lifetime = callback["lifetime"]
        named += [lifetime.partition(":")[2]] if lifetime.startswith("object:") else []
    ownership = table.get("ownership", "")
    if ownership.startswith("borrowed:") and not ownership.partition(":")[2].isdigit():
        named.append(ownership.partition(":")[2])
    for name in named:
        if name not in params:
            yield place.error(
                f"{function.name} has no parameter {name!r}; it has {', '.join(sorted(params))}"
            )


def _is_field(function: ir.Function, name: str) -> bool:
    """Whether `name` is said of a field of a struct that `function` takes ("params.field")."""
    head, dot, _ = name.partition(".")
    return bool(dot) and any(param.name == head for param in function.params)


def _line(text: str, pattern: str) -> int:
    found = re.search(pattern, text, re.M)
    return text.count("\n", 0, found.start()) + 1 if found else 1
